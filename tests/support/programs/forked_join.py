"""``elasticrun join`` in a forked process, whose guard and first workers are forked, too: ``forked_join.py FLAGS...``.

With APART in its environment it sees only processes of its own, as on a machine of its own: it is as if ``unshare --pid
--fork --kill-child --mount-proc`` had started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from elastic_driver.cli.main import main
from elastic_driver.system import parent
from tests.support.processes.forked_guard import fork_guard
from tests.support.processes.forked_warm import fork_warmed

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1


def live_apart() -> None:
    """Goes on in a child, which is the first process of a namespace; this one ends as that does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    child = os.fork()
    if child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)
    check(libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)))
    check(libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None))


def fork_what_it_starts() -> None:
    """From now on this process forks what an agent has started: its guard, and its warmed process."""
    fork_guard()
    fork_warmed()


if __name__ == "__main__":
    if os.environ.pop("APART", ""):
        live_apart()
        go_on_in_a_child = parent.go_on_in_a_child

        def go_on(again: parent.Again | None = None) -> None:
            go_on_in_a_child(again)
            fork_what_it_starts()

        parent.go_on_in_a_child = go_on  # as process 1 does
    else:
        fork_what_it_starts()
    sys.exit(main())
