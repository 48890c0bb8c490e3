"""Ctrl-C ends a run soon, whatever it is in.

Python hears of Ctrl-C only between two of its own instructions, and the factorisation of a large matrix is one
instruction that takes minutes. The signal itself arrives at once, so a thread waits for it, gives the run a moment
to end in order, and ends the process otherwise. Nothing is lost by that: whatever a run has finished is whole on
disk before it goes on, as it must be for a run that is killed.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from publisher.records.progress import Notice

_GRACE = 0.8  # seconds in which most runs end by themselves
EXIT_CODE = 130


@contextmanager
def interruptible(last_words: Notice) -> Iterator[None]:
    """End the process within seconds of Ctrl-C while the block runs; `last_words` are said where it must be forced.

    For the main thread, as everything about signals.
    """
    receiver, sender = socket.socketpair()  # a pipe would not do on Windows
    sender.settimeout(0)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(receiver, ended, last_words), daemon=True).start()
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        sender.close()


def _watch(receiver: socket.socket, ended: threading.Event, last_words: Notice) -> None:
    with receiver:
        while signals := receiver.recv(64):
            if signal.SIGINT in signals and not ended.wait(_GRACE):
                last_words()
                os._exit(EXIT_CODE)
