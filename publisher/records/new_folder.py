"""A folder that is written as a whole: it appears under its name when all of it is on disk, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from publisher.records.files import flush, no_room, room_in
from publisher.records.lock import locked


def is_free(folder: Path) -> bool:
    """Return whether a folder may be written: it does not exist yet, or is an empty one."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


@contextmanager
def becoming(out: Path, *, size: int) -> Iterator[Path]:
    """Yield a new folder that takes the place of `out` when the block ends well, and vanishes when it does not.

    What a run that was killed had written is cleared away first.

    Args:
        out: the folder, which does not exist yet or is empty.
        size: bytes that it will have.

    Yields:
        The new folder, to be written into.

    Raises:
        NoRoomError: the disk is too small.
        BusyError: another run writes to the same folder.
    """
    place = out.resolve()
    work = place.with_name(f".{place.name}.partial")
    folder = work / "checkpoint"
    with room_in(place.parent, name=place.name, size=size):
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(work):
            try:
                shutil.rmtree(folder, ignore_errors=True)
                if size > shutil.disk_usage(place.parent).free:
                    raise no_room(place.parent, name=place.name, size=size, reason="seen beforehand")
                folder.mkdir()
                yield folder
                if place.is_dir():
                    place.rmdir()  # empty
                folder.rename(place)
                flush(place.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
