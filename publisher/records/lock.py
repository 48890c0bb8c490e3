"""One run at a time on one output.

The lock belongs to the operating system: it ends with its process, however that ends, so a run that was killed
blocks nobody. A second run is refused at once and told who holds the lock, rather than left to wait for hours.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from publisher.border.escape import for_terminal
from publisher.errors import BusyError
from publisher.records.files import write_text

_LOCK, _HOLDER = "lock", "lock.holder"
_TOLD = 1000  # bytes of a command that are shown


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Hold the lock of this work folder while the block runs.

    Raises:
        BusyError: another run holds it.
    """
    work.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(work / _LOCK), work / _HOLDER
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BusyError(
            f"{work} is in use by {_told(holder)}",
            expected="one run at a time on one output",
            next_step="wait until that run has ended, or give this one a folder of its own with --dist",
        ) from None
    try:
        write_text(holder, f"process {os.getpid()} ({shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])})")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _told(holder: Path) -> str:
    try:
        return for_terminal(holder.read_bytes()[:_TOLD].decode(errors="replace"))
    except OSError:  # it holds the lock and has yet to say so
        return "another process"
