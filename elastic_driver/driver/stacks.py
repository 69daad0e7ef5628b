"""The stacks of all workers at one moment, for the search for hangs.

Owns the requests: to all agents at once, and those that do not answer are named. The agents take the stacks
(:mod:`elastic_driver.launch.agent.stacks`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import AgentMessage, Stacked, StacksTold, TakeStacks, worker_named
from elastic_driver.rendezvous.routes import OPERATOR, Route, RouteRequest, Routes
from elastic_driver.reporting.stacks_text import stacks_text

# A worker has two seconds; the rest is for the network.
LIMIT_S = 5.0
_MOST_TEXT = 512 << 10


@dataclass(frozen=True, slots=True)
class StackDump:
    """The position of a worker's threads.

    Attributes:
        pid: its process id on its host; None if unknown.
        state: the kernel's letter for its state; "" if unknown.
        text: the stacks of its threads, as Python's faulthandler writes them; "" for none.
        reason: why there are none; "" if there are.
        syscall: the number of its main thread's current system call, or "running"; "" if unknown.
        wchan: where in the kernel that thread sleeps; "" for nowhere, or unknown.
    """

    pid: int | None = None
    state: str = ""
    text: str = ""
    reason: str = ""
    syscall: str = ""
    wchan: str = ""


@dataclass(slots=True)
class _Asked:
    left: set[AgentLink]
    found: dict[WorkerId, StackDump]
    done: asyncio.Future[None]

    def answered(self, link: AgentLink) -> None:
        self.left.discard(link)
        if not self.left and not self.done.done():
            self.done.set_result(None)


class Stacks:
    """Requests stacks from the agents of one job. Used on the event loop only.

    Args:
        living: returns the workers whose processes run.
        host_of: returns the agent of a host; None if there is none.
    """

    def __init__(
        self, living: Callable[[], Collection[WorkerId]], *, host_of: Callable[[str], AgentLink | None]
    ) -> None:
        self._living = living
        self._host_of = host_of
        self._number = 0
        self._asked: dict[int, _Asked] = {}

    async def take_all(self, workers: Collection[WorkerId] | None = None) -> dict[WorkerId, StackDump]:
        """Return the stacks of these workers, or of all, or why there are none. Blocks for five seconds at most.

        Args:
            workers: the workers; those that do not run are omitted. None for all.
        """
        wanted = [worker for worker in self._living() if workers is None or worker in workers]
        keys: dict[AgentLink, list[str]] = {}
        for worker in wanted:
            link = self._host_of(worker.hostname)
            if link is not None:
                keys.setdefault(link, []).append(worker.key)
        asked = await self._ask(keys)
        for worker in wanted:
            link = self._host_of(worker.hostname)
            if link not in keys:
                why = "its host has no agent"
            else:
                why = f"its agent did not answer within {LIMIT_S:.0f} s" if link in asked.left else "it has ended"
            asked.found.setdefault(worker, StackDump(reason=why))
        return {worker: asked.found[worker] for worker in wanted}

    async def take_one(self, worker: WorkerId) -> str | None:
        """Return the stacks of one worker; None if there are none. Blocks for five seconds at most."""
        dump = (await self.take_all([worker])).get(worker)
        return dump.text or None if dump is not None else None

    async def _ask(self, keys: Mapping[AgentLink, list[str]]) -> _Asked:
        asked = _Asked(set(keys), {}, asyncio.get_running_loop().create_future())
        if not keys:
            return asked
        self._number += 1
        number = self._number
        self._asked[number] = asked
        for link, of_link in keys.items():
            link.send(TakeStacks(number, of_link))
        try:
            async with asyncio.timeout(LIMIT_S):
                await asked.done
        except TimeoutError:
            pass  # the missing ones are named
        finally:
            del self._asked[number]
        return asked

    # --- calls by the fleet (Part) ---------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Do nothing: it has no open request."""

    def lost(self, link: AgentLink, why: str) -> None:
        """Stop waiting for a lost agent."""
        for asked in self._asked.values():
            if link in asked.left:
                asked.answered(link)

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle an agent's message about stacks. Return whether it was one.

        Raises:
            RendezvousProtocolError: it speaks for a worker of another host.
        """
        match message:
            case Stacked(number, key, pid, state, reason, syscall, wchan, blob):
                worker = worker_named(key)
                if self._host_of(worker.hostname) is not link:
                    raise RendezvousProtocolError(f"this agent is not responsible for worker {worker}")
                asked = self._asked.get(number)
                if asked is not None and link in asked.left:
                    text = blob[:_MOST_TEXT].decode("utf-8", "replace")
                    asked.found[worker] = StackDump(pid, state[:1], text, reason[:256], syscall[:64], wchan[:64])
            case StacksTold(number):
                asked = self._asked.get(number)
                if asked is not None:
                    asked.answered(link)
            case _:
                return False
        return True


class StackReports:
    """The stacks for people: with each worker's rank, and its agent's observations.

    Args:
        stacks: requests the stacks.
        stepper: has the state.
        table: the last observations of the workers.
        clock: the job's time, seconds.
    """

    def __init__(self, stacks: Stacks, stepper: Stepper, table: VitalsTable, clock: Callable[[], float]) -> None:
        self._stacks = stacks
        self._stepper = stepper
        self._table = table
        self._clock = clock

    @property
    def routes(self) -> Routes:
        """The routes for operators."""
        return (Route("GET", "stacks", OPERATOR, self._answer),)

    async def text(self) -> str:
        """Return all stacks as text. Blocks as :meth:`Stacks.take_all` does."""
        return stacks_text(await self._take())

    async def _answer(self, request: RouteRequest) -> tuple[int, bytes]:
        return 200, json.dumps(await self._take()).encode()

    async def _take(self) -> dict[str, Any]:
        dumps = await self._stacks.take_all()
        records = {record.worker: record for record in self._stepper.state.workers}
        found = []
        for worker, dump in dumps.items():
            record, vitals = records.get(worker), self._table.of(worker)
            found.append(
                {
                    "worker": worker.key,
                    "rank": record.rank if record is not None and record.round_id else None,
                    "host": worker.hostname,
                    **asdict(dump),
                    "waits_s": None if vitals is None else round(vitals.waits_s, 3),
                    "steps": None if vitals is None else vitals.steps,
                }
            )
        return {"stacks": found, "waiting": self._table.waiting(self._clock())}
