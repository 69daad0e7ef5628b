"""What workers say through their agents, and what they are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_driver.driver.agent_requests import AgentRequests
from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError, StaleRoundError
from elastic_driver.figures import GpuLook
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
    Started,
    Value,
    Values,
    VitalsSeen,
    Want,
)
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.messages import (
    DiskReport,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    Removed,
    RunningReport,
)
from elastic_driver.rendezvous.routes import ALL, OPERATOR, WORKER, Route, RouteRequest, error_body, read_own
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, A1, B = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0)
DISK = DiskReport("id", "/d", 3, 9, "", drivers=True)


class Link:
    """See AgentLink: keeps what is sent."""

    levels = None

    def __init__(self, host: str) -> None:
        self.facts = SimpleNamespace(host=host)
        self.sent: list[AgentMessage] = []

    def send(self, message: AgentMessage) -> None:
        self.sent.append(message)


class Job:
    """Plays the rounds, two agents, and routes of which one is not answered at once."""

    def __init__(self) -> None:
        self.links = {"a": Link("a"), "b": Link("b")}
        self.asked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self.ran: list[RunningReport] = []
        self.beats: list[tuple[WorkerId, int, bool, bool, bool]] = []
        self.disk: list[DiskReport] = []
        self.looks: list[tuple[WorkerId, Vitals]] = []
        self.left: list[WorkerId] = []
        self.asked_routes: list[RouteRequest] = []
        self.error: Exception | None = None
        self.later: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.tasks = Tasks()
        self.figures = FigureBook({}.get, list[str]().append)
        routes = (
            Route("POST", "leave", WORKER, read_own(LeaveRequest.from_json, self.leave)),
            Route("GET", "status", ALL, lambda _: {"phase": "running"}),
            Route("POST", "publish", WORKER, self._answer),
            Route("POST", "outcome/*/*", WORKER, self._answer),
            Route("POST", "store", WORKER, self._answer_later),
            Route("POST", "drain", OPERATOR, self._answer),
        )
        self.requests = AgentRequests(
            self,  # type: ignore[arg-type]
            routes,
            figures=self.figures,
            tasks=self.tasks,
            links=lambda: tuple(self.links.values()),  # type: ignore[arg-type, return-value]
            host_of=self.links.get,  # type: ignore[arg-type]
        )

    # --- Rounds ----------------------------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        if self.error is not None:
            raise self.error
        self.asked[request.worker] = asyncio.get_running_loop().create_future()
        return self.asked[request.worker]

    def running(self, report: RunningReport) -> None:
        if self.error is not None:
            raise self.error
        self.ran.append(report)

    def heard(self, worker: WorkerId, progress: int, *, waiting: bool, leaving: bool, exiting: bool) -> None:
        self.beats.append((worker, progress, waiting, leaving, exiting))

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        self.looks.append((worker, vitals))

    def on_disk(self, report: DiskReport) -> None:
        self.disk.append(report)

    # --- routes ----------------------------------------------------------------------------------------------------

    def leave(self, request: LeaveRequest) -> None:
        if self.error is not None:
            raise self.error
        self.left.append(request.worker)

    def _answer(self, request: RouteRequest) -> tuple[int, bytes]:
        self.asked_routes.append(request)
        if self.error is not None:
            raise self.error
        return 200, b"yes"

    def _answer_later(self, request: RouteRequest) -> Awaitable[tuple[int, bytes]]:
        return self.later

    # --- for the tests ---------------------------------------------------------------------------------------------

    def say(self, message: AgentMessage, host: str = "a") -> bool:
        return self.requests.take(self._link(host), message)

    def _link(self, host: str) -> AgentLink:
        return self.links[host]  # type: ignore[return-value]

    def begin_round(self, round_id: int) -> None:
        """One that agents have been told of."""
        self.requests.begin_round(round_id)
        for link in self.links.values():
            link.sent.clear()

    def sent(self, host: str = "a") -> list[AgentMessage]:
        """What the agent was told since this was asked last."""
        sent, self.links[host].sent = self.links[host].sent, []
        return sent


def on(test: Callable[[Job], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        job = Job()
        await test(job)
        await job.tasks.end()

    run_virtually(main)


def ready(worker: WorkerId = A) -> Ready:
    return Ready(NextRoundRequest(worker, 0, 0, ReadyCause.START, "", (Backend.NATIVE,), 5, 6))


def test_who_is_ready_is_answered_when_its_round_is_there() -> None:
    async def test(job: Job) -> None:
        assert job.say(ready())
        assert job.sent() == []
        job.asked[A].set_result(Removed("a reason"))
        await asyncio.sleep(0)
        assert job.sent() == [Reply(A.key, Removed("a reason"))]

    on(test)


def test_an_older_request_of_a_worker_is_not_answered() -> None:
    async def test(job: Job) -> None:
        job.say(ready())
        job.asked[A].cancel()
        await asyncio.sleep(0)
        assert job.sent() == []

    on(test)


def test_a_worker_that_speaks_of_what_can_not_be_is_told_why() -> None:
    async def test(job: Job) -> None:
        job.error = RendezvousProtocolError("no such round")
        job.say(ready())
        assert job.sent() == [RoundRefused(A.key, "no such round")]
        job.say(Running(RunningReport(A, 9, 0)))
        assert job.ran == []

    on(test)


@pytest.mark.parametrize(
    "message",
    [
        ready(B),
        Running(RunningReport(B, 1, 0)),
        Heard({B.key: (1, False)}, [], []),
        OnDisk(B.key, DISK),
        Ask(1, B.key, "status", [], b""),
        Ask(1, "nobody", "status", [], b""),
        VitalsSeen({B.key: Vitals(1.0, 2)}),
        FiguresSeen({B.key: {"loss": 1.0}}),
        NoFigures(B.key, "x"),
    ],
    ids=lambda message: message.name,
)
def test_an_agent_speaks_for_its_own_workers_only(message: AgentMessage) -> None:
    async def test(job: Job) -> None:
        with pytest.raises(RendezvousProtocolError):
            job.say(message)
        assert (job.asked, job.ran, job.beats, job.disk, job.looks, job.sent()) == ({}, [], [], [], [], [])

    on(test)


def test_what_an_agent_says_of_its_workers_reaches_the_rounds() -> None:
    async def test(job: Job) -> None:
        job.say(Running(RunningReport(A, 1, 2)))
        assert [(one.worker, one.round_id) for one in job.ran] == [(A, 1)]
        job.say(Heard({A.key: (7, True), A1.key: (8, False)}, [A.key], [A1.key]))
        assert job.beats == [(A, 7, True, True, False), (A1, 8, False, True, True)]
        looks = {A.key: Vitals(1.5, 2, state="S"), A1.key: Vitals(1.5, 3, pulse_s=0.1)}
        job.say(VitalsSeen(looks))
        assert job.looks == [(A, looks[A.key]), (A1, looks[A1.key])]
        job.say(FiguresSeen({A.key: {"loss": 0.5, "accuracy": None}}))
        assert job.figures.figures == {"loss": 0.5, "accuracy": None}
        job.say(GpusSeen(GpuLook(2, 0.5, 7)))
        assert (job.figures.gpu, job.figures.gpu_memory_bytes) == (0.5, 7)

    on(test)


def test_questions_have_the_answers_that_the_server_would_give() -> None:
    async def test(job: Job) -> None:
        job.say(Ask(1, A.key, "leave", [], LeaveRequest(A, "SIGTERM").to_json()))
        job.say(Ask(2, A.key, "leave", [], LeaveRequest(A1, "SIGTERM").to_json()))
        job.say(Ask(3, A.key, "leave", [], b"rubbish"))
        job.say(Ask(4, A.key, "status", [], b""))
        job.say(Ask(5, A.key, "outcome", ["1", "2"], b"body"))
        job.say(Ask(6, A.key, "nothing", ["x"], b""))
        job.say(Ask(7, A.key, "outcome", [], b""))
        job.say(Ask(8, A.key, "drain", [], b""))
        answers = {each.number: each for each in job.sent() if isinstance(each, Answer)}
        assert [answers[number].status for number in range(1, 9)] == [204, 403, 400, 200, 200, 404, 404, 404]
        assert json.loads(answers[4].blob) == {"phase": "running"}
        assert answers[5].blob == b"yes"
        assert json.loads(answers[6].blob) == {"error": "no such path: /v1/nothing/x"}
        assert job.left == [A]
        (request,) = job.asked_routes
        assert (request.identity.worker, request.path, request.body) == (A, ("1", "2"), b"body")

    on(test)


@pytest.mark.parametrize(
    ("error", "status"),
    [(StaleRoundError(1, 2), 409), (RendezvousClosedError("gone"), 410), (RendezvousProtocolError("rubbish"), 400)],
    ids=["stale", "closed", "rubbish"],
)
def test_refusals_have_the_servers_statuses(error: Exception, status: int) -> None:
    async def test(job: Job) -> None:
        job.error = error
        job.say(Ask(1, A.key, "publish", [], b""))
        assert job.sent() == [Answer(1, status, error_body(error))]

    on(test)


def test_an_error_of_our_own_is_not_hidden() -> None:
    async def test(job: Job) -> None:
        job.error = ValueError("a bug")
        with pytest.raises(ValueError, match="a bug"):
            job.say(Ask(1, A.key, "publish", [], b""))

    on(test)


def test_an_answer_may_take_its_time_and_be_a_refusal() -> None:
    async def test(job: Job) -> None:
        for outcome in ((200, b"late"), RendezvousProtocolError("rubbish")):
            job.later = asyncio.get_running_loop().create_future()
            job.say(Ask(1, A.key, "store", [], b""))
            await asyncio.sleep(0.1)
            assert job.sent() == []
            if isinstance(outcome, tuple):
                job.later.set_result(outcome)
            else:
                job.later.set_exception(outcome)
            await asyncio.sleep(0.1)
            assert job.sent() == [Answer(1, *(outcome if isinstance(outcome, tuple) else (400, error_body("rubbish"))))]

    on(test)


def test_rounds_and_notices_go_to_all_agents_also_those_that_come_later() -> None:
    async def test(job: Job) -> None:
        notice = Notice(3, 1, NoticeKind.HOSTS_UPDATED, "")
        job.requests.came(job._link("a"))
        assert job.sent() == []
        job.requests.begin_round(1)
        job.requests.notify(notice)
        assert job.sent("a") == job.sent("b") == [Round(1), NoticeSet(notice)]
        job.requests.came(job._link("b"))
        assert job.sent("b") == [Round(1), NoticeSet(notice)]

    on(test)


def test_who_wants_a_key_has_it_at_once_or_when_it_is_there() -> None:
    async def test(job: Job) -> None:
        job.begin_round(1)
        job.say(Want(1, "s", "k", 0))
        job.say(Want(1, "s", "k", 0))
        assert job.sent() == []
        job.say(Put(1, "s", "k", b"v"), "b")
        assert job.sent() == [Value(1, "s", "k", b"v")]
        job.say(Want(1, "s", "k", 0), "b")
        assert job.sent("b") == [Value(1, "s", "k", b"v")]

    on(test)


def test_who_wants_many_keys_has_them_when_all_are_there() -> None:
    async def test(job: Job) -> None:
        job.begin_round(1)
        job.say(Put(1, "s", "0", b"x"))
        job.say(Want(1, "s", "", 2))
        job.say(Want(1, "s", "", 3))
        assert job.sent() == []
        job.say(Put(1, "s", "1", b"y"), "b")
        (values,) = job.sent()
        assert isinstance(values, Values)
        assert unpack_entries(values.blob) == [("0", b"x"), ("1", b"y")]
        job.say(Want(1, "s", "", 2), "b")
        assert job.sent("b") == [values]

    on(test)


def test_of_another_round_nothing_is_taken_and_nobody_waits() -> None:
    async def test(job: Job) -> None:
        job.begin_round(1)
        job.say(Want(1, "s", "k", 0))
        job.say(Want(1, "s", "", 1))
        job.requests.begin_round(2)
        job.sent()
        job.say(Put(1, "s", "k", b"old"))
        job.say(Want(1, "s", "k", 0))
        job.say(Put(2, "s", "k", b"new"), "b")
        assert job.sent() == []
        job.say(Want(2, "s", "k", 0))
        assert job.sent() == [Value(2, "s", "k", b"new")]

    on(test)


def test_an_agent_that_is_lost_waits_for_nothing() -> None:
    async def test(job: Job) -> None:
        job.begin_round(1)
        job.say(Want(1, "s", "k", 0))
        job.say(Want(1, "s", "", 1))
        job.requests.lost(job._link("a"), "a test")
        job.say(Put(1, "s", "k", b"v"), "b")
        assert job.sent() == []

    on(test)


def test_what_is_said_of_processes_is_not_its_business() -> None:
    async def test(job: Job) -> None:
        assert not job.say(Started(A.key, 1))

    on(test)
