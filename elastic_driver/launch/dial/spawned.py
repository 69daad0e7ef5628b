"""The process of a command that starts an agent: its input, its standard error, and whether it dies with this process.

Owns the descriptors. Knows no event loop, and imports little: the agent of the driver's own machine is started while
the driver is still being imported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from elastic_driver.system.kernel import end_of_child
from elastic_driver.system.tether import tie

# High enough not to collide with scripts that use descriptors by number, like the tether's.
_FROM = 100


class Spawned:
    """A process to be reaped, with the descriptors that belong to it.

    Until it is given its input, only the end of that input notifies it of this process's death.
    """

    def __init__(
        self, popen: subprocess.Popen[bytes], owner: int, stdin: int, stdin_there: int, stderr: int, ended: int
    ) -> None:
        self.popen = popen
        self.stderr = stderr
        self.ended = ended
        self._owner = owner
        self._descriptors = [stdin, stdin_there, stderr, ended]

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, or its group. Only before it is reaped: until then the PID is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._owner, number)

    def give(self, data: bytes, *, outlives: bool = False) -> None:
        """Write to its standard input, once, and tie it to this process: the next event of the pipe kills it.

        Args:
            data: the input.
            outlives: whether not to tie it: it continues when this process dies.

        Raises:
            OSError: the input is more than a pipe holds.
        """
        stdin, stdin_there, *_ = self._descriptors
        if os.write(stdin, data) != len(data):
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        if not outlives:
            tie(stdin_there, self._owner)
        self._descriptors.remove(stdin_there)
        os.close(stdin_there)

    def end(self) -> None:
        """Kill it. Blocks until it is dead, and closes everything."""
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self.close()

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def spawn(
    command: Sequence[str], env: Mapping[str, str] | None, *, with_group: bool, more: Sequence[int] = ()
) -> Spawned:
    """Start a command. Its program is loaded afterwards.

    Args:
        command, env, with_group, more: see :func:`~elastic_driver.launch.dial.child.start_child`.

    Raises:
        OSError: it could not be started.
    """
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as childs_ends:
        # All of them close at exec, whatever else this process starts.
        stdin_there, stdin = os.pipe()
        on_error.callback(os.close, stdin_there)
        on_error.callback(os.close, stdin)
        os.set_blocking(stdin, False)
        # A copy of the same open file, which ties even a program that replaces its standard input.
        kept = fcntl.fcntl(stdin_there, fcntl.F_DUPFD_CLOEXEC, _FROM)
        childs_ends.callback(os.close, kept)
        stderr, childs_stderr = os.pipe()
        on_error.callback(os.close, stderr)
        childs_ends.callback(os.close, childs_stderr)
        os.set_blocking(stderr, False)
        popen = subprocess.Popen(
            command,
            stdin=stdin_there,
            stdout=subprocess.DEVNULL,
            stderr=childs_stderr,
            env=env,
            pass_fds=(kept, *more),
            start_new_session=True,
        )
        on_error.callback(popen.wait)
        on_error.callback(popen.kill)
        owner = -popen.pid if with_group else popen.pid
        end = end_of_child(popen.pid)
        on_error.pop_all()
        return Spawned(popen, owner, stdin, stdin_there, stderr, end)
