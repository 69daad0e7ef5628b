"""Processes forked before this one has threads, each of which becomes a program that it starts later.

What a program is started with stays as with :class:`subprocess.Popen`: descriptors, environment, folder, session. Its
command line in /proc is that of what it was forked from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from tests.support.processes.program_exit import run_to_exit

# Out of the way of descriptors that are wanted by number.
_HIGH = 400
_MOST_BYTES = 1 << 20

Becomes = Callable[[Sequence[str], Mapping[str, str]], object]
"""Runs a command, with this environment."""


class Spare:
    """The part of :class:`subprocess.Popen` that the product uses; until it is told to begin it waits.

    It ends with this process if it has not begun by then.
    """

    def __init__(self, becomes: Becomes) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            run_to_exit(lambda: _wait(theirs, becomes))
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._code: int | None = None

    def begin(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
        cwd: str | None = None,
    ) -> None:
        """Has it become that program. Blocks until its session can be killed."""
        assert start_new_session
        assert self._control.recv(1), "it has ended"
        given = {0: stdin, 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        given = {number: there for number, there in given.items() if there != subprocess.DEVNULL}
        request = {"command": list(command), "cwd": cwd or os.getcwd(), "env": dict(env), "numbers": list(given)}
        socket.send_fds(self._control, [json.dumps(request).encode()], list(given.values()))
        self._control.close()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Blocks until it has ended."""
        if self._code is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._code

    def kill(self) -> None:
        """Kills it."""
        os.kill(self.pid, signal.SIGKILL)


def _wait(control: socket.socket, becomes: Becomes) -> None:
    """Holds nothing of its parent's, and is as a program that was started just now."""
    os.setsid()
    kept = fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    for name in os.listdir("/proc/self/fd"):
        if 2 < int(name) != kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with socket.socket(fileno=kept) as asked:
        asked.sendall(b"!")
        data, given, _, _ = socket.recv_fds(asked, _MOST_BYTES, 16)
    if not data:
        os._exit(0)
    request = json.loads(data)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in given]
    for each in given:
        os.close(each)
    for source, number in zip(high, request["numbers"], strict=True):
        os.dup2(source, number)
        os.close(source)
    os.chdir(request["cwd"])
    becomes(request["command"], request["env"])
