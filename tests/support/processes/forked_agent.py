"""The agent of a driver's own machine, forked from the driver before that has done anything, for tests of whole jobs.

To import it takes a quarter of a second of a processor. Its descriptors, session, environment and end, and what the
driver has of it, are as where it is started afresh; its command line is the driver's. So is its guard forked from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import elastic_driver.launch.agent.__main__ as agent
from elastic_driver.driver import agent_side
from elastic_driver.launch.dial import early, spawned
from elastic_driver.launch.fleet.admission import WelcomeFacts
from tests.support.processes.forked_guard import fork_guard
from tests.support.processes.spare import Spare


def fork_first_workers() -> None:
    """From now on agents that this process welcomes fork their first workers, too (``warm_first``)."""

    def facts(**given: Any) -> WelcomeFacts:
        return WelcomeFacts(**{**given, "warm_first": True})

    agent_side.WelcomeFacts = facts  # type: ignore[misc, assignment]


def fork_first_agent(*, warms: bool = False) -> None:
    """From now on this process forks what elasticrun begins as its own machine's agent. No thread may run by then.

    Args:
        warms: whether what the agent's workers are forked from is forked, too.
    """

    def run(_: Sequence[str], env: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(env)
        fork_guard()
        if warms:
            from tests.support.processes.forked_warm import fork_warmed

            fork_warmed()
        sys.exit(agent.main([]))

    def start(command: Sequence[str], **given: Any) -> Spare:
        assert command == early.local_command()
        spare = Spare(run)
        spare.begin(command, **given)
        return spare

    def spawn(command: Sequence[str], env: Mapping[str, str], **more: Any) -> spawned.Spawned:
        forking = types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
        with mock.patch.object(spawned, "subprocess", forking):
            return spawned.spawn(command, env, **more)

    early.spawn = spawn
