"""The agent of a driver's own machine, forked from the driver before that has done anything, for tests of whole jobs.

To import it takes a quarter of a second of a processor. Its descriptors, session, environment and end, and what the
driver has of it, are as where it is started afresh; its command line is the driver's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from unittest import mock

import elastic_driver.launch.agent.__main__ as agent
from elastic_driver.launch.dial import early, spawned
from tests.support.processes.program_exit import run_to_exit


def fork_first_agent() -> None:
    """From now on this process forks what elasticrun begins as its own machine's agent. No thread may run by then."""
    early.spawn = _spawn


def _spawn(command: Sequence[str], env: Mapping[str, str], **more: object) -> spawned.Spawned:
    forking = types.SimpleNamespace(Popen=ForkedAgent, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(spawned, "subprocess", forking):
        return spawned.spawn(command, env, **more)  # type: ignore[arg-type]


class ForkedAgent:
    """The part of :class:`subprocess.Popen` that the product uses of an agent's process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert command == early.local_command()
        assert stdout == subprocess.DEVNULL
        assert start_new_session
        is_ready, tell = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(tell)
            os.read(is_ready, 1)  # until it closes: from then on its session can be killed
            os.close(is_ready)
            return
        os.setsid()
        for stream, source in enumerate((stdin, os.open(os.devnull, os.O_WRONLY), stderr)):
            os.dup2(source, stream)
        for inherited in pass_fds:
            os.set_inheritable(inherited, True)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in pass_fds:
                _close(int(name))
        os.environ.clear()
        os.environ.update(env)
        run_to_exit(lambda: sys.exit(agent.main([])))

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:  # it was that of the list itself
        return
