"""The chief of parameter servers as a process of this machine's agent: it outlives the driver as workers do.

Owns how it is started and stopped. In everything else it is like a worker (:mod:`elastic_driver.launch.fleet.workers`)
whose host has the chief's name.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import CHIEF, WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.worker import Phase, Worker
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.launch.local.keeper import Launch
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Start, Stop
from elastic_driver.words import Ending


class WorkersWithChief(Workers):
    """The workers of a job, and its chief. Used on the event loop only."""

    def start_chief(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        """Make this machine's agent start the chief, as soon as there is one.

        Args:
            chief: its name. No other start has had it.
            launch: returns what to run, when it is called. May raise LaunchError.
        """
        if self._job_ends:
            return
        link = self._agents.link_of(chief.hostname)
        if link is not None and link.is_away:
            self.expect((chief,))  # as with any worker
            return
        assert chief not in self._workers, chief
        one = self._workers[chief] = Worker(chief, -1, chief.hostname)
        self._around.tasks.start(self._start_chief(one, launch))

    async def _start_chief(self, one: Worker, launch: Callable[[], Launch]) -> None:
        seen = self._agents.changes.count
        while (link := self._agents.link_of(one.id.hostname)) is None or not link.connected:
            await self._agents.changes.wait(seen)
            seen = self._agents.changes.count
        if self._job_ends:
            return
        try:
            what = launch()
        except LaunchError as error:
            self._not_started(one, error)
            return
        self._send_start(one, link, Start(one.id.key, list(what.command), dict(what.env), one.label, one.rank))
        if one.stop is not None:
            self._stop(one, one.stop)

    def stop_chief(self, chief: WorkerId, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after the grace; to a starting chief as soon as its process exists."""
        one = self._workers.get(chief)
        if one is not None and one.phase in (Phase.ORDERED, Phase.RUNS) and one.link is not None:
            one.link.send(Stop(chief.key, grace_s, sever=False, signal=int(signal.SIGTERM)))
        else:
            self.stop(chief, Ending.USUAL)

    def _why_not(self, one: Worker, link: AgentLink, error: str, *, bad_command: bool) -> LaunchError:
        if bad_command and one.id.hostname == CHIEF:
            return CommandNotFoundError(error)  # no other host runs it
        return super()._why_not(one, link, error, bad_command=bad_command)
