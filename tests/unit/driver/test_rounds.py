"""The rounds of a job with the real core and nothing else: who is answered what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from elastic_driver.core.events import (
    Command,
    DismissWorker,
    DrainRequested,
    EndJob,
    HostsDiscovered,
    KillWorker,
    PublishRound,
    Report,
    SetNotice,
    StopRequested,
    WorkerExited,
    WorkerNotStarted,
)
from elastic_driver.core.membership import Policy
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.write_ahead import WriteAhead
from elastic_driver.errors import RendezvousClosedError
from elastic_driver.hosts import WorkerId, parse_host
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    DrainReply,
    JobOver,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    PublishReply,
    PublishRequest,
    Removed,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.rendezvous.routes import RouteRequest
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.asking import ask
from tests.support.fakes.played_disk import Disk
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, B, C = WorkerId("a", 0, 0), WorkerId("b", 0, 0), WorkerId("c", 0, 0)


class Known:
    """See Heartbeats: keeps what it is told."""

    def __init__(self) -> None:
        self.watched: set[WorkerId] = set()
        self.looks: list[WorkerId] = []

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, leaving: bool = False) -> None:
        (self.watched.discard if leaving else self.watched.add)(worker)

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        self.looks.append(worker)


class World:
    """A job whose workers the test plays; no process, no server."""

    def __init__(self, loop: VirtualLoop, *, journal: bool = False, **limits: Any) -> None:
        self.known = Known()
        self.progress = Progress()
        self.commands: list[Command] = []
        self.errors: list[Exception] = []
        policy = Policy(**({"num_proc": 2, "min_num_proc": 1} | limits))
        self.disk = Disk()
        self.stepper = Stepper(
            policy,
            clock=loop.time,
            carry_out=self._carry_out,
            on_error=self.errors.append,
            ahead=_ahead(self.disk, loop, self.errors) if journal else None,
        )
        self.rounds = make_rounds(self, loop)

    def _carry_out(self, commands: Sequence[Command], now: float) -> None:
        self.commands += commands
        for command in commands:
            match command:
                case PublishRound():
                    formed = self.stepper.state.round
                    assert formed is not None
                    addresses = {worker.hostname: "127.0.0.1" for worker in formed.members}
                    self.rounds.publish(formed, command.placed, addresses)
                case DismissWorker():
                    self.rounds.dismiss(command.worker, command.reason)
                case SetNotice():
                    self.rounds.notify(Notice(command.version, command.round_id, command.kind, command.reason))
                case EndJob():
                    self.rounds.job_over(command.message)

    def hosts(self, *names: str) -> None:
        self.stepper.post(HostsDiscovered(tuple(parse_host(name, default_slots=1) for name in names)))

    def ask(self, worker: WorkerId, after: int = 0, cause: ReadyCause = ReadyCause.START) -> Awaitable[NextRoundReply]:
        return self.rounds.next_round(NextRoundRequest(worker, after, 0, cause, "", (Backend.NATIVE,), 5, 6))

    def hear(self, worker: WorkerId, *, leaving: bool = False, exiting: bool = False) -> None:
        self.rounds.heard(worker, 0, waiting=True, leaving=leaving, exiting=exiting)

    async def train(self, *workers: WorkerId) -> None:
        """The first round runs with these."""
        self.hosts(*(worker.hostname for worker in workers))
        await self.stepper.settled()
        answers = [self.ask(worker) for worker in workers]
        for worker, answer in zip(workers, answers, strict=True):
            assert isinstance(await answer, RoundAssignment)
            self.rounds.running(RunningReport(worker, 1, 0))
        await self.stepper.settled()

    def end(self) -> str:
        self.stepper.post(StopRequested(15, "elasticrun end"))
        return "it ends"

    def exits(self, worker: WorkerId, returncode: int) -> None:
        self.rounds.gone(worker)
        self.stepper.post(WorkerExited(worker, returncode, f"exited with code {returncode}", 0.0))


def _ahead(disk: Any, loop: VirtualLoop, errors: list[Any]) -> WriteAhead:
    return WriteAhead(disk, 600.0, loop.call_later, errors.append, on_held=errors.append)


def make_rounds(world: World, loop: VirtualLoop) -> Rounds:
    return Rounds(
        world.stepper,
        heartbeats=world.known,
        progress=world.progress,
        clock=loop.time,
        on_disk=lambda report: None,
        end=world.end,
    )


def play(test: Callable[[World], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop, **limits)
        await test(world)
        world.stepper.close()
        assert world.errors == []

    run_virtually(main)


def is_open(answer: Awaitable[object]) -> bool:
    assert isinstance(answer, asyncio.Future)
    return not answer.done()


# --- asking for a round --------------------------------------------------------------------------------------------


def test_workers_are_parked_until_their_round_is_formed() -> None:
    async def test(world: World) -> None:
        world.hosts("a", "b")
        first = world.ask(A)
        await asyncio.sleep(1)
        assert is_open(first)
        second = world.ask(B)
        answers = [await first, await second]
        assert [(one.round_id, one.slot.rank) for one in answers] == [(1, 0), (1, 1)]  # type: ignore[union-attr]
        assert world.known.watched == {A, B}

    play(test)


def test_who_asks_again_takes_its_older_request_with_it() -> None:
    """Its long poll ran out, or its connection was cut: the round forms once, and the last request is answered."""

    async def test(world: World) -> None:
        world.hosts("a", "b")
        older = world.ask(A)
        newer = world.ask(A)
        with pytest.raises(asyncio.CancelledError):
            await older
        world.ask(B)
        assert isinstance(await newer, RoundAssignment)
        assert sum(isinstance(command, PublishRound) for command in world.commands) == 1

    play(test)


def test_an_answer_that_was_lost_is_given_again() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        again = await world.ask(A)
        assert isinstance(again, RoundAssignment)
        assert (again.round_id, again.slot.rank) == (1, 0)
        assert world.stepper.state.phase == "running", "it is no report"

    play(test)


def test_a_request_whose_peer_has_gone_is_not_answered() -> None:
    async def test(world: World) -> None:
        world.hosts("a", "b")
        gone = world.ask(A)
        assert isinstance(gone, asyncio.Future)
        gone.cancel()
        assert isinstance(await world.ask(B), RoundAssignment)

    play(test)


def test_whom_nobody_knows_and_who_is_being_stopped_is_removed() -> None:
    async def test(world: World) -> None:
        assert await world.ask(C) == Removed("the job does not know it")
        await world.train(A, B)
        world.hosts("a", "b", "c")
        world.hosts("a", "b")  # c is being stopped before it has asked
        assert await world.ask(C) == Removed("it is being stopped")

    play(test)


def test_a_worker_that_died_while_it_was_parked_is_forgotten() -> None:
    async def test(world: World) -> None:
        world.hosts("a", "b")
        dead = world.ask(A)
        world.stepper.catch_up()
        world.exits(A, 1)
        await world.ask(B)
        await asyncio.sleep(1)
        assert is_open(dead), "the server cancels it with its connection"

    play(test)


def test_a_worker_that_could_not_be_started_is_not_waited_for() -> None:
    async def test(world: World) -> None:
        world.hosts("a", "b")
        answer = world.ask(A)
        world.stepper.post(WorkerNotStarted(B, "no room", 0.0, bad_command=False))
        assert isinstance(await answer, RoundAssignment)

    play(test)


def test_a_member_whose_place_is_gone_is_dismissed_at_the_next_round() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        world.hosts("a")
        staying = world.ask(A, 1, ReadyCause.HOSTS_UPDATED)
        leaving = world.ask(B, 1, ReadyCause.HOSTS_UPDATED)
        assert isinstance(await staying, RoundAssignment)
        assert await leaving == Removed("host b is no longer listed")

    play(test)


# --- members -------------------------------------------------------------------------------------------------------


def test_who_leaves_its_round_is_not_listened_for() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        world.hear(A, leaving=True)
        assert world.known.watched == {B}
        world.hear(C)
        assert world.known.watched == {B}, "it is none of the job's"

    play(test)


def test_how_far_workers_have_come_is_noted_also_when_they_end() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        world.rounds.running(RunningReport(A, 1, 0, total=100))
        for worker, commits in ((A, 7), (B, 8), (C, 9)):
            world.rounds.seen(worker, Vitals(1.0, 11, "S", commits=commits))
        assert world.known.looks == [A, B], "the third is none of the job's"
        assert (world.progress.newest_commit, world.progress.estimate(0.0).total) == (8, 100)
        world.exits(B, -9)
        assert world.progress.newest_commit == 8
        assert isinstance(await world.ask(A, 1, ReadyCause.INTERNAL_ERROR), RoundAssignment)
        assert world.progress.newest_commit == 0, "what a loss took back is not there"

    play(test)


def test_what_a_member_says_again_is_fed_to_nobody() -> None:
    """All members do, to each driver that takes the job over."""

    async def test(world: World) -> None:
        await world.train(A, B)
        fed = len(world.stepper.history)
        world.rounds.running(RunningReport(A, 1, 0, total=100))
        await world.stepper.settled()
        assert len(world.stepper.history) == fed
        assert world.progress.estimate(0.0).total == 100, "it was heard all the same"
        world.rounds.running(RunningReport(A, 1, 1))
        await world.stepper.settled()
        assert len(world.stepper.history) == fed + 1

    play(test)


def test_who_says_that_it_exits_has_a_limit() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        world.hear(A, leaving=True, exiting=True)
        await asyncio.sleep(6)
        world.hear(A, leaving=True, exiting=True)
        await asyncio.sleep(5)
        kills = [command for command in world.commands if isinstance(command, KillWorker)]
        assert [(kill.worker, kill.reason) for kill in kills] == [
            (A, "did not end within 10 s of its exit (--start-timeout)")
        ]

    play(test, start_timeout_s=10.0)


# --- the end, and who asks from outside ----------------------------------------------------------------------------


def test_at_the_end_all_who_wait_are_answered() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        parked = world.ask(B, 1, ReadyCause.HOSTS_UPDATED)
        world.stepper.post(StopRequested(15, "SIGTERM"))
        assert await parked == JobOver("interrupted by SIGTERM")
        assert await world.ask(A, 1) == JobOver("the job has ended")

    play(test)


def test_a_leave_before_the_first_round_or_of_nobody_is_refused() -> None:
    async def test(world: World) -> None:
        world.hosts("a", "b")
        for worker in (A, C):
            with pytest.raises(RendezvousClosedError, match="must exit at once"):
                await world.rounds.leave(LeaveRequest(worker, "SIGTERM"))

    play(test)


def test_a_leave_drains_the_place_of_who_leaves() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        await world.rounds.leave(LeaveRequest(B, "SIGTERM"))
        await world.rounds.leave(LeaveRequest(B, "SIGTERM"))
        assert world.stepper.state.drained == {("b", 0)}
        texts = [command.text for command in world.commands if isinstance(command, Report)]
        assert texts == ["worker b[0] is leaving at the next commit: it received SIGTERM"]

    play(test)


def test_who_drains_a_host_is_told_what_comes_of_it() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)

        async def drain(host: str, *, undo: bool = False) -> str:
            reply = await world.rounds.drain(DrainHostRequest(host, undo=undo))
            assert reply.done
            return reply.text

        assert await drain("b") == "host b is drained: its workers leave at their next commit"
        assert await drain("b") == "host b is already drained: its workers leave at their next commit"
        short = (
            "that leaves 0 slots of the 1 that the job needs (--min-np): it waits for more, and ends after 600 s "
            "(--elastic-timeout)"
        )
        assert await drain("a") == f"host a is drained: its workers leave at their next commit; {short}"
        assert await drain("a", undo=True) == "host a can be used again"
        assert await drain("a", undo=True) == "host a was not drained"

    play(test)


def test_a_drain_of_a_host_that_is_not_there() -> None:
    async def test(world: World) -> None:
        await world.train(A, B)
        reply = await world.rounds.drain(DrainHostRequest("c", undo=False))
        assert reply == DrainReply(done=False, text="the job has no host c; its hosts: a, b")

    play(test)


def test_only_living_members_of_the_present_round_may_put_commits_on_disk() -> None:
    async def test(world: World) -> None:
        async def asked(worker: WorkerId, round_id: int) -> str:
            body = PublishRequest(round_id, 42).to_json()
            answer = ask(world.rounds.routes, Identity(Role.WORKER, worker), "POST", "publish", body)
            assert isinstance(answer, Awaitable)
            reply = await answer
            assert isinstance(reply, PublishReply)
            assert reply.granted is not bool(reply.reason)
            return reply.reason

        await world.train(A, B)
        assert [await asked(A, 1), await asked(B, 1)] == ["", ""]
        assert await asked(A, 2) == "there has been no round 2"
        assert "no longer belongs to the job" in await asked(C, 1)
        world.hosts("b", "c")
        answers = [world.ask(B, 1, ReadyCause.HOSTS_UPDATED), world.ask(C)]
        assert await asked(B, 1) == "", "in a reset it is the last round's members that count"
        assert await asked(C, 1) == "round 1 is over, and worker c[0] is not a member of round 1"
        left = world.ask(A, 1, ReadyCause.HOSTS_UPDATED)
        assert isinstance(await left, Removed)
        for answer in answers:
            assert isinstance(await answer, RoundAssignment)
        assert [await asked(B, 1), await asked(B, 2), await asked(C, 2)] == ["", "", ""]
        assert "no longer belongs to the job" in await asked(A, 1), "a member of a past round"
        world.exits(C, -9)
        assert "no longer belongs to the job" in await asked(C, 2)
        world.stepper.post(StopRequested(15, "SIGTERM"))
        assert await asked(B, 2) == "the job is over"

    play(test)


# --- with a journal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask_for", "expected"),
    [
        (lambda world: world.rounds.drain(DrainHostRequest("b", undo=False)), "host b is already drained"),
        (lambda world: world.rounds.leave(LeaveRequest(A, "SIGTERM")), ""),
        (lambda world: world.rounds.end(), "it ends"),
        (lambda world: world.rounds._may_publish(publish_request(A)), ""),
    ],
    ids=["drain", "leave", "end", "publish"],
)
def test_nobody_is_answered_before_it_is_on_disk(
    ask_for: Callable[[World], Coroutine[Any, Any, Any]], expected: str
) -> None:
    async def test(world: World) -> None:
        world.disk.answers_soon = True
        world.stepper.begin()
        await world.train(A, B)
        world.disk.answers_soon = False
        world.stepper.post(DrainRequested("b", None, "as another has asked"))
        asked = asyncio.ensure_future(ask_for(world))
        await asyncio.sleep(1)
        assert not asked.done()
        world.disk.answers()
        await asyncio.sleep(1)
        if world.disk.looks:
            assert not asked.done(), "another driver may have the job by now, and its own writer of commits"
            world.disk.looked()
        elif not asked.done():
            assert world.disk.waiting, "what it has asked for is being written"
            world.disk.answers()
        reply = await asked
        assert expected in ("" if reply is None else getattr(reply, "text", ""))
        assert not world.disk.waiting
        assert world.stepper.state.drained >= {("b", None)}

    play(test, journal=True)


def test_a_driver_that_has_lost_its_job_lets_nobody_publish() -> None:
    async def test(world: World) -> None:
        world.disk.answers_soon = True
        world.stepper.begin()
        await world.train(A, B)
        world.disk.answers_soon = False
        asked = asyncio.ensure_future(world.rounds._may_publish(publish_request(A)))
        await asyncio.sleep(1)
        world.stepper.abandon(EndJob(75, "another driver holds it"))
        world.disk.looked()
        reply = await asked
        assert (reply.granted, reply.reason) == (False, "the job is over")

    play(test, journal=True)


def test_a_leave_a_drain_and_an_end_are_written_before_they_are_answered() -> None:
    async def test(world: World) -> None:
        world.disk.answers_soon = True
        world.stepper.begin()
        await world.train(A, B)
        world.disk.answers_soon = False
        for ask_for in (
            lambda: world.rounds.leave(LeaveRequest(A, "SIGTERM")),
            lambda: world.rounds.drain(DrainHostRequest("b", undo=False)),
            lambda: world.rounds.end(),
        ):
            asked = asyncio.ensure_future(ask_for())
            await asyncio.sleep(1)
            assert not asked.done()
            before = world.stepper.state
            world.disk.answers()
            await asked
            assert world.stepper.state.drained > before.drained or world.stepper.is_over

    play(test, journal=True)


def test_an_end_does_not_wait_for_a_disk_that_hangs_over_something_else() -> None:
    async def test(world: World) -> None:
        world.disk.answers_soon = True
        world.stepper.begin()
        await world.train(A, B)
        world.disk.answers_soon = False
        world.stepper.post(DrainRequested("b", None, "as another has asked"))
        asked = asyncio.ensure_future(world.rounds.end())
        await asyncio.sleep(10)
        assert world.stepper.is_over
        assert (await asked).text == "it ends"
        assert len(world.errors) == 1, "that the disk does not answer"
        world.errors.clear()

    play(test, journal=True)


def publish_request(worker: WorkerId) -> RouteRequest:
    return RouteRequest(Identity(Role.WORKER, worker), (), {}, PublishRequest(1, 0).to_json())
