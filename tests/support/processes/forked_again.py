"""A driver that its parent starts again, forked from that parent, for tests of whole jobs.

Its parent executes it anew, which costs the imports of a driver each time. What the kernel keeps and takes away at an
execution is as there: descriptors, handlers, the signals that wait. The modules are those of the parent, and so is what
a test has changed in them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence

from elastic_driver.system import parent
from tests.support.processes import forked
from tests.support.processes.program_exit import run_to_exit


def fork_again(main: Callable[[], int]) -> None:
    """From now on a driver that this process is the parent of, and starts again, calls this in a fork of it."""
    arguments = list(sys.argv)

    def become(program: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        assert [program, *command[1:]] == parent.this_command()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the list itself
                if not os.get_inheritable(int(name)):
                    os.close(int(name))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                is_pythons = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_pythons else signal.SIG_DFL)
        sys.argv[:] = arguments
        forked.take_environment(env)
        run_to_exit(lambda: sys.exit(main()))

    parent.os = types.SimpleNamespace(**{**vars(os), "execve": become})  # type: ignore[assignment]
