"""The guard of an agent, forked from that before it has begun, for tests of whole jobs.

To start its Python takes a twentieth of a second of a processor. Its command line is that of what it was forked from,
its memory too; what it does, and what it is given, is the same. A second guard of an agent starts afresh.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_driver.launch.processes import guard, guard_link
from tests.support.processes.spare import Spare


class _Guard(Spare):
    """With the part of :class:`subprocess.Popen` that its agent uses besides."""

    def __init__(self) -> None:
        super().__init__(_become)
        self.stdin: Any = None

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Begins with a pipe as its standard input."""
        reading_end, writing_end = os.pipe()
        nothing = subprocess.DEVNULL
        self.begin(
            command,
            stdin=reading_end,
            stdout=nothing,
            stderr=nothing,
            env=env,
            pass_fds=(),
            start_new_session=True,
            cwd=cwd,
        )
        os.close(reading_end)
        self.stdin = open(writing_end, "wb", buffering=0)  # noqa: SIM115 - the agent closes it


def fork_guard() -> None:
    """From now on this process, an agent that has not begun, has its first guard forked from itself."""
    guards = [_Guard()]

    def start(command: Sequence[str], **given: Any) -> subprocess.Popen[bytes] | _Guard:
        if not guards:
            return subprocess.Popen(command, **given)
        one = guards.pop()
        one.start(command, given["env"], given["cwd"])
        return one

    guard_link.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )


def _become(command: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0)  # noqa: SIM115 - as long as it lives
    sys.exit(guard.main(command[-2]))
