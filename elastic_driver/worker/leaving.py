"""SIGTERM and SIGUSR1 as a request to leave: at the next commit, with exit code 0, without any blame.

Owns the signal handlers. Machines that are taken away (spot instances, evicted pods) say so by SIGTERM; whoever wants
one worker gone may send either. Handlers that the program has set itself are left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def install(ask: Callable[[str], bool]) -> None:
    """Has the signals call ``ask`` with their names; where it returns False, they end the process as by default.

    Only in the main thread, where alone Python sets handlers; elsewhere it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # In a forked child (a data loader) the signal is meant for the child alone.
        if os.getpid() != owner or not ask(signal.Signals(number).name):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handle)
