"""The first process of a container: what the kernel expects of process 1, and an ordinary program does not do.

A process whose parent has died becomes a child of process 1, which has to reap it: else it stays as a zombie, one more
for each worker that was killed with children of its own. And process 1 gets only those signals that it handles. So the
program goes on in a child, as in any other place, and process 1 itself does nothing but reap and pass signals on.
"""

from __future__ import annotations

import contextlib
import os
import signal

_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
# Linux: what the kernel sends, a terminal's for instance, has a code above this. It is sent to the whole group, so the
# child has it already; twice would mean something else there.
_SENT_BY_A_PROCESS = 0


def leave_first_place() -> None:
    """Returns in a child, where this is process 1; process 1 ends when that does, with its exit code.

    To be called before there are threads.
    """
    if os.getpid() == 1:
        _go_on_in_a_child()


def _go_on_in_a_child() -> None:
    # Else nobody would be told how the child has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = (*_PASSED, signal.SIGCHLD)
    # Blocked signals wait, also those that process 1 does not handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(awaited)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= _SENT_BY_A_PROCESS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, received.si_signo)
            continue
        code = _reap(child)
        if code is not None:
            os._exit(code if code >= 0 else 128 - code)


def _reap(child: int) -> int | None:
    """Reaps whoever has ended. Returns how the child has, as Popen says it; None while it lives."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return None
            if pid == child:
                return os.waitstatus_to_exitcode(status)
    return None
