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

from elastic_driver.system.kernel import pidfd_open
from elastic_driver.system.tether import tie

# Out of the way of scripts that use descriptors by number, as the tether's.
_FROM = 100


class Spawned:
    """What belongs to the process: it, to be reaped, and descriptors of this process.

    Until it is given something the end of its input is all that tells it of this process's death.
    """

    def __init__(
        self, popen: subprocess.Popen[bytes], owner: int, stdin: int, stdin_there: int, stderr: int, pidfd: int
    ) -> None:
        self.popen = popen
        self.stderr = stderr
        self.pidfd = pidfd
        self._owner = owner
        self._descriptors = [stdin, stdin_there, stderr, pidfd]

    def signal(self, number: signal.Signals) -> None:
        """To the process, or its group. Only before it is reaped: until then the number is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._owner, number)

    def give(self, data: bytes, *, outlives: bool = False) -> None:
        """Writes to its standard input, once, and ties it to this process: what happens to the pipe next kills it.

        Args:
            data: what is written.
            outlives: whether it is not tied: it goes on when this process dies.

        Raises:
            OSError: that is more than a pipe holds.
        """
        stdin, stdin_there, *_ = self._descriptors
        if os.write(stdin, data) != len(data):
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        if not outlives:
            tie(stdin_there, self._owner)
        self._descriptors.remove(stdin_there)
        os.close(stdin_there)

    def end(self) -> None:
        """Kills it. Blocks until it is dead, and lets go of all."""
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self.close()

    def close(self) -> None:
        """Lets go of the descriptors."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def spawn(
    command: Sequence[str], env: Mapping[str, str] | None, *, with_group: bool, more: Sequence[int] = ()
) -> Spawned:
    """Starts a command. Its program is loaded afterwards.

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
        # The same open file once more: a program that turns its standard input into something else is tied by this.
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
        pidfd = pidfd_open(popen.pid)
        on_error.pop_all()
        return Spawned(popen, owner, stdin, stdin_there, stderr, pidfd)
