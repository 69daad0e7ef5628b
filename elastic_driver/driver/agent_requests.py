"""What workers ask through their agents, and what they are answered.

Owns which agents wait for which key. What is said goes to the rounds, to the store and to the routes that workers have
at the driver; knows nothing of processes and connections. An agent speaks for the workers of its own host only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.stacks import Stacks
from elastic_driver.errors import (
    RendezvousError,
    RendezvousProtocolError,
)
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import (
    Answer,
    Ask,
    Heard,
    NoticeSet,
    OnDisc,
    Put,
    Ready,
    Reply,
    Round,
    Running,
    Said,
    Value,
    Values,
    VitalsSeen,
    Want,
    worker_named,
)
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import (
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
)
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
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.system.tasks import Tasks


class AgentRequests:
    """See above. Used on the event loop only.

    Args:
        rounds: of the job.
        store: the keys of the present round.
        routes: of the driver; those that workers may ask are answered here.
        tasks: run what takes a while.
        links: all agents that there are.
        host_of: the agent of a host; None when there is none.
        stacks: takes what agents say of those.
    """

    def __init__(
        self,
        rounds: Rounds,
        store: RoundStore,
        routes: Routes,
        *,
        tasks: Tasks,
        links: Callable[[], Sequence[AgentLink]],
        host_of: Callable[[str], AgentLink | None],
        stacks: Stacks | None = None,
    ) -> None:
        self._rounds = rounds
        self._store = store
        theirs = [route for route in routes if Role.WORKER in route.roles]
        # An agent does not say with which method it was asked.
        assert len({route.path for route in theirs}) == len(theirs)
        self._table = RouteTable(theirs)
        self._tasks = tasks
        self._links = links
        self._host_of = host_of
        self._stacks = stacks
        self._notice: Notice | None = None
        self._keys: dict[tuple[str, str], dict[AgentLink, None]] = {}
        self._counts: dict[str, set[tuple[AgentLink, int]]] = {}

    # --- what there is to be told to all ---------------------------------------------------------------------------

    def begin_round(self, round_id: int) -> None:
        """A round begins: the keys of the one before are gone, and nobody waits for them."""
        self._store.begin_round(round_id)
        self._keys.clear()
        self._counts.clear()
        for link in self._links():
            link.send(Round(round_id))

    def notify(self, notice: Notice) -> None:
        """The present notice, for all who watch."""
        self._notice = notice
        message = NoticeSet(notice.to_json())
        for link in self._links():
            link.send(message)

    # --- what the fleet tells --------------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """An agent is there: it is told what all others know."""
        if self._store.round_id:
            link.send(Round(self._store.round_id))
        if self._notice is not None:
            link.send(NoticeSet(self._notice.to_json()))

    def lost(self, link: AgentLink, why: str) -> None:
        """It waits for nothing any more."""
        if self._stacks is not None:
            self._stacks.lost(link)
        for waiting in self._keys.values():
            waiting.pop(link, None)
        for scope, counts in self._counts.items():
            self._counts[scope] = {each for each in counts if each[0] is not link}

    def take(self, link: AgentLink, message: Said) -> bool:
        """What an agent says for its workers. Returns whether it was that.

        Raises:
            RendezvousProtocolError: it cannot say that.
        """
        match message:
            case Ready(key, body):
                self._ready(link, self._own(link, key), NextRoundRequest.from_json(body))
            case Running(body):
                report = RunningReport.from_json(body)
                self._own(link, report.worker.key)
                with contextlib.suppress(RendezvousProtocolError):  # of a round that it cannot know
                    self._rounds.running(report)
            case Heard(workers, leaving, exiting):
                for key, numbers in workers.items():
                    if len(numbers) != 2:
                        raise RendezvousProtocolError("cannot read message heard: two numbers a worker")
                    worker = self._own(link, key)
                    self._rounds.heard(
                        worker,
                        numbers[0],
                        waiting=bool(numbers[1]),
                        leaving=key in leaving or key in exiting,
                        exiting=key in exiting,
                    )
            case VitalsSeen(seen):
                for key, vitals in seen.items():
                    self._rounds.seen(self._own(link, key), vitals)
            case OnDisc(key, disc):
                self._own(link, key)
                self._rounds.on_disc(disc)
            case Ask(number, key, what, path, body):
                self._ask(link, number, self._own(link, key), what, path, body)
            case Put(round_id, scope, key, value):
                self._put(round_id, scope, key, value)
            case Want(round_id, scope, key, count):
                self._want(link, round_id, scope, key, count)
            case _:
                return self._stacks is not None and self._stacks.take(link, message)
        return True

    def _own(self, link: AgentLink, key: str) -> WorkerId:
        worker = worker_named(key)
        if self._host_of(worker.hostname) is not link:
            raise RendezvousProtocolError(f"an agent may not speak for worker {worker}")
        return worker

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _ready(self, link: AgentLink, worker: WorkerId, request: NextRoundRequest) -> None:
        if request.worker != worker:
            raise RendezvousProtocolError(f"worker {worker} may not speak for worker {request.worker}")
        try:
            answer = asyncio.ensure_future(self._rounds.next_round(request))
        except RendezvousError as error:
            link.send(Reply(worker.key, 400, str(error).encode()))
            return

        def reply(future: asyncio.Future[NextRoundReply]) -> None:
            if not future.cancelled():
                link.send(Reply(worker.key, 200, future.result().to_json()))

        if answer.done():
            reply(answer)
        else:
            answer.add_done_callback(reply)

    def _ask(self, link: AgentLink, number: int, worker: WorkerId, what: str, path: Sequence[str], body: bytes) -> None:
        """Answers as a server would. An error that nobody expects ends the job, as it does there."""
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

    def _put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        if round_id != self._store.round_id:
            return  # the agent will have heard by now
        self._store.put(round_id, scope, key, value)
        for link in self._keys.pop((scope, key), ()):
            link.send(Value(round_id, scope, key, value))
        counts = self._counts.get(scope)
        if counts:
            present = self._store.count(round_id, scope)
            met = {each for each in counts if each[1] <= present}
            counts -= met
            for link in {link for link, _ in met}:
                link.send(Values(round_id, scope, self._store.packed(round_id, scope)))

    def _want(self, link: AgentLink, round_id: int, scope: str, key: str, count: int) -> None:
        store = self._store
        if round_id != store.round_id:
            return
        if count:
            if store.count(round_id, scope) >= count:
                link.send(Values(round_id, scope, store.packed(round_id, scope)))
            else:
                self._counts.setdefault(scope, set()).add((link, count))
            return
        value = store.get(round_id, scope, key)
        if value is not None:
            link.send(Value(round_id, scope, key, value))
        else:
            self._keys.setdefault((scope, key), {})[link] = None
