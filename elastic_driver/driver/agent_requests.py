"""Requests of workers, which their agents pass on, and the answers.

Owns the keys of all hosts. Passes requests on to the rounds and to the driver's routes for workers; knows nothing of
processes and connections. An agent speaks only for the workers of its own host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from elastic_driver.driver.rounds import Rounds
from elastic_driver.errors import RendezvousError, RendezvousProtocolError
from elastic_driver.health.figures import FigureBook
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Answer,
    Ask,
    FiguresSeen,
    GpusSeen,
    Heard,
    NoFigures,
    NoticeSet,
    OnDisk,
    Put,
    Ready,
    Reply,
    Round,
    RoundRefused,
    Running,
    Value,
    Values,
    VitalsSeen,
    Want,
    worker_named,
)
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import NextRoundReply, NextRoundRequest, Notice
from elastic_driver.rendezvous.routes import Answer as RouteAnswer
from elastic_driver.rendezvous.routes import (
    Deferred,
    RouteRequest,
    Routes,
    RouteTable,
    refusal,
    unknown,
    written,
)
from elastic_driver.rendezvous.server.keys import Keys
from elastic_driver.system.tasks import Tasks


class AgentRequests:
    """Answers the workers' requests that arrive through agents. Used on the event loop only.

    Args:
        rounds: the rounds of the job.
        routes: the routes of the driver; those that workers may use are answered here.
        figures: takes the figures that trainings report.
        tasks: runs slow answers.
        links: returns all connected agents.
        host_of: returns the agent of a host; None if there is none.
    """

    def __init__(
        self,
        rounds: Rounds,
        routes: Routes,
        *,
        figures: FigureBook,
        tasks: Tasks,
        links: Callable[[], Sequence[AgentLink]],
        host_of: Callable[[str], AgentLink | None],
    ) -> None:
        self._rounds = rounds
        self._figures = figures
        self._keys: Keys[_AgentWaiter] = Keys()
        theirs = [route for route in routes if Role.WORKER in route.roles]
        # An agent does not report the method of a request.
        assert len({route.path for route in theirs}) == len(theirs)
        self._table = RouteTable(theirs)
        self._tasks = tasks
        self._links = links
        self._host_of = host_of
        self._notice: Notice | None = None

    # --- messages to all -------------------------------------------------------------------------------------------

    def begin_round(self, round_id: int) -> None:
        """Fence off the past: drop the keys of the round before, and all waits for them.

        Raises:
            ValueError: the round is not above the current one.
        """
        self._keys.begin_round(round_id)
        for link in self._links():
            link.send(Round(round_id))

    def notify(self, notice: Notice) -> None:
        """Send the current notice to all agents."""
        self._notice = notice
        message = NoticeSet(notice)
        for link in self._links():
            link.send(message)

    # --- calls by the fleet (Part) ---------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Bring an agent that has connected, or is back, up to date with all others."""
        known_round, known_notice = (link.levels.round_id, link.levels.notice_version) if link.levels else (0, 0)
        if self._keys.store.round_id > known_round:
            link.send(Round(self._keys.store.round_id))
        if self._notice is not None and self._notice.version > known_notice:
            link.send(NoticeSet(self._notice))

    def lost(self, link: AgentLink, why: str) -> None:
        """Forget the agent's waits and its GPUs."""
        self._figures.lost(link.facts.host)
        for waiter in self._keys.waiting:
            if waiter.link is link:
                self._keys.remove(waiter)

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle a message that an agent sends for its workers. Return whether it was one.

        Raises:
            RendezvousProtocolError: the agent may not send it.
        """
        match message:
            case Ready(request):
                self._check(link, request.worker)
                self._ready(link, request)
            case Running(report):
                self._check(link, report.worker)
                with contextlib.suppress(RendezvousProtocolError):  # of a round that it cannot know
                    self._rounds.running(report)
            case Heard(workers, leaving, exiting):
                for key, (progress, waiting) in workers.items():
                    self._rounds.heard(
                        self._own(link, key),
                        progress,
                        waiting=waiting,
                        leaving=key in leaving or key in exiting,
                        exiting=key in exiting,
                    )
            case VitalsSeen(seen):
                for key, vitals in seen.items():
                    self._rounds.seen(self._own(link, key), vitals)
            case FiguresSeen(reported):
                for key, figures in reported.items():
                    self._figures.take(self._own(link, key), figures)
            case NoFigures(key, why):
                self._figures.refuse(self._own(link, key), why)
            case GpusSeen(look):
                self._figures.see_gpus(link.facts.host, look)
            case OnDisk(key, disk):
                self._own(link, key)
                self._rounds.on_disk(disk)
            case Ask(number, key, what, path, body):
                self._ask(link, number, self._own(link, key), what, path, body)
            case Put(round_id, scope, key, value):
                self._keys.take(round_id, scope, [(key, value)])
            case Want(round_id, scope, key, count):
                self._want(_AgentWaiter(link, round_id, scope, None if count else key, count))
            case _:
                return False
        return True

    def _own(self, link: AgentLink, key: str) -> WorkerId:
        worker = worker_named(key)
        self._check(link, worker)
        return worker

    def _check(self, link: AgentLink, worker: WorkerId) -> None:
        if self._host_of(worker.hostname) is not link:
            raise RendezvousProtocolError(f"this agent is not responsible for worker {worker}")

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _ready(self, link: AgentLink, request: NextRoundRequest) -> None:
        worker = request.worker.key
        try:
            answer = asyncio.ensure_future(self._rounds.next_round(request))
        except RendezvousError as error:
            link.send(RoundRefused(worker, str(error)))
            return

        def reply(future: asyncio.Future[NextRoundReply]) -> None:
            if not future.cancelled():
                link.send(Reply(worker, future.result()))

        if answer.done():
            reply(answer)
        else:
            answer.add_done_callback(reply)

    def _ask(self, link: AgentLink, number: int, worker: WorkerId, what: str, path: Sequence[str], body: bytes) -> None:
        """Answer as a server would. An unexpected error ends the job, as it does there."""
        try:
            answer = self._answer(worker, what, path, body)
        except RendezvousError as error:
            link.send(Answer(number, *refusal(error)))
            return
        if not isinstance(answer, Awaitable):
            link.send(Answer(number, *written(answer)))
            return

        async def answer_later() -> None:
            try:
                link.send(Answer(number, *written(await answer)))
            except RendezvousError as error:
                link.send(Answer(number, *refusal(error)))

        self._tasks.start(answer_later())

    def _answer(
        self, worker: WorkerId, what: str, path: Sequence[str], body: bytes
    ) -> RouteAnswer | Awaitable[RouteAnswer]:
        routes, words = self._table.find([what, *path])
        if not routes:
            return unknown("/".join((what, *path)))
        (route,) = routes.values()
        answer = route.answer(RouteRequest(Identity(Role.WORKER, worker), words, {}, body))
        assert not isinstance(answer, Deferred)  # there is no connection, and none of the driver's routes needs one
        return answer

    # --- keys ------------------------------------------------------------------------------------------------------

    def _want(self, waiter: _AgentWaiter) -> None:
        if waiter.round_id == self._keys.store.round_id:
            body = self._keys.find(waiter)
            if body is None:
                self._keys.add(waiter)
            else:
                waiter.answer(200, body)


@dataclass(frozen=True, slots=True)
class _AgentWaiter:
    """An agent that waits for a key, or for this many: once for all of its workers (a KeyWaiter)."""

    link: AgentLink
    round_id: int
    scope: str
    key: str | None
    count: int

    def answer(self, status: int, body: bytes) -> None:
        if status != 200:
            return  # the round is over: agents are notified of that
        if self.key is None:
            self.link.send(Values(self.round_id, self.scope, body))
        else:
            self.link.send(Value(self.round_id, self.scope, self.key, body))
