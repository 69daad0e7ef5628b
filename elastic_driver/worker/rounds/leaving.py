"""SIGTERM and SIGUSR1 as a request to leave: at the next commit, with exit code 0, not counted as a failure.

Owns the signal handlers and the thread that asks the driver, which may take long to answer: the training continues
meanwhile. Preempted machines (spot instances, evicted pods) send SIGTERM; users may send either to remove one worker.
Handlers set by the program are left alone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_AGAIN_S = 0.1

_log = logging.getLogger("elastic_driver.worker")


def install(ask: Callable[[str], bool]) -> None:
    """Install handlers that call ``ask`` with the signal's name; if it returns False, the signal ends the process as by
    default.

    ``ask`` is called in a thread of its own, once for each signal, one after the other. Does nothing outside the main
    thread, where alone Python sets handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    unhandled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not unhandled:
        return
    process, main = os.getpid(), threading.get_ident()
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put() may interrupt another one
    refused: set[int] = set()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # In a forked child (a data loader) the signal is meant for the child alone. While the interpreter exits, the
        # asking thread no longer runs.
        if os.getpid() != process or number in refused or sys.is_finalizing():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            sent.put(number)

    def ask_for_all() -> None:
        while True:
            number = sent.get()
            try:
                may_stay = ask(signal.Signals(number).name)
            except Exception:
                _log.exception("cannot ask the driver whether this worker may leave; the worker ends")
                may_stay = False
            if not may_stay:
                # Only the main thread can remove the handler. A signal that arrives between its check for signals and
                # its sleep does not wake it: so they are repeated until the process has ended.
                refused.add(number)
                while signal.getsignal(number) is on_signal:
                    signal.pthread_kill(main, number)
                    time.sleep(_AGAIN_S)

    # A daemon, because nothing ends it: an exiting process does not wait for an answer. The signals wake it. Started
    # now, since a handler may interrupt the start of another thread.
    threading.Thread(target=ask_for_all, name="elastic-leave", daemon=True).start()
    for number in unhandled:
        signal.signal(number, on_signal)
