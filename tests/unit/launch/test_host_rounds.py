"""What an agent answers its host's workers, over a channel that only keeps what is said, on the test's own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Answer,
    Ask,
    Heard,
    Levels,
    NoticeSet,
    OnDisk,
    Put,
    Ready,
    Reply,
    RoundRefused,
    Running,
    Value,
    Values,
    Want,
    WarmUp,
    WorkerLevel,
    WorkerPhase,
)
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.entries import pack_entries
from elastic_driver.rendezvous.messages import (
    DiskReport,
    JobOver,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.fakes.asking import ask
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, B, DEAD = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("a", 2, 0)
PLACE = RoundAssignment(1, SlotInfo(0, 2, 0, 2, 0, 1), sync=True, commits=0, backend=Backend.NATIVE)


class Host:
    """An agent's rounds. Plays the processes and the server's store, too."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.said: list[AgentMessage] = []
        self.threads: list[tuple[WorkerId, int, int]] = []
        self.living = {A, B}
        self.taken: list[tuple[int, str, list[tuple[str, bytes]]]] = []
        self.began: list[int] = []
        self.is_heard, self.is_alone = True, False
        self.rounds = HostRounds(self.said.append, self, is_heard=lambda: self.is_heard, is_alone=lambda: self.is_alone)
        self.rounds.serve(self)

    def runs(self, worker: WorkerId) -> bool:
        return worker in self.living

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        self.threads.append((worker, pid, thread))

    def begin_round(self, round_id: int) -> None:
        self.began.append(round_id)

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        self.taken.append((round_id, scope, list(entries)))

    def ask(self, worker: WorkerId = A, after: int = 0, cause: ReadyCause = ReadyCause.START) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.rounds.next_round(ready(worker, after, cause)))

    def watch(self, worker: WorkerId = A, version: int = 0, round_id: int = 1, **more: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.rounds.watch(WatchRequest(worker, round_id, version, **more)))

    def notice(self, version: int, kind: NoticeKind = NoticeKind.NONE, round_id: int = 1) -> Notice:
        notice = Notice(version, round_id, kind, "")
        assert self.rounds.take(NoticeSet(notice))
        return notice

    def train(self, *workers: WorkerId) -> None:
        """Round 1 runs with these."""
        self.rounds.begin_round(1)
        for worker in workers:
            self.rounds.take(Reply(worker.key, PLACE))
        self.notice(1)

    def of(self, kind: type[AgentMessage]) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]


def ready(worker: WorkerId, after: int = 0, cause: ReadyCause = ReadyCause.START) -> NextRoundRequest:
    return NextRoundRequest(worker, after, 0, cause, "", (Backend.NATIVE,), 5, 6)


def on(test: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        host = Host(loop)
        await test(host)
        host.rounds.close()

    run_virtually(main)


# --- rounds --------------------------------------------------------------------------------------------------------


def test_a_worker_is_told_its_place() -> None:
    async def test(host: Host) -> None:
        answer = host.ask()
        assert host.said == [Ready(ready(A))]
        assert host.threads == [(A, 5, 6)]
        host.rounds.begin_round(1)
        host.rounds.take(Reply(A.key, PLACE))
        assert await answer == PLACE
        assert host.began == [1]

    on(test)


def test_what_it_says_again_is_only_a_heartbeat() -> None:
    async def test(host: Host) -> None:
        first = host.ask()
        first.cancel()  # its poll time is over
        second = host.ask()
        assert len(host.of(Ready)) == 1
        await asyncio.sleep(0.6)
        assert host.of(Heard) == [Heard({A.key: (0, True)}, [], [])]
        third = host.ask(cause=ReadyCause.INTERNAL_ERROR)
        assert host.of(Ready) == [Ready(ready(A)), Ready(ready(A, cause=ReadyCause.INTERNAL_ERROR))]
        host.rounds.take(Reply(A.key, JobOver("done")))
        assert await third == JobOver("done")
        assert second.cancelled()

    on(test)


def test_a_place_whose_answer_was_lost_is_told_again() -> None:
    async def test(host: Host) -> None:
        host.ask().cancel()
        host.train(A)  # while nobody waits
        assert await host.ask() == PLACE
        assert await host.ask() == PLACE
        assert len(host.of(Ready)) == 1
        waiting = host.ask(after=1)
        await asyncio.sleep(0)
        assert not waiting.done(), "it has been in that round, and wants the next"
        assert len(host.of(Ready)) == 2

    on(test)


def test_a_place_of_a_round_that_has_passed_is_not_told_again() -> None:
    async def test(host: Host) -> None:
        host.ask().cancel()
        host.train(A)
        host.rounds.begin_round(2)
        waiting = host.ask()
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(host.of(Ready)) == 2

    on(test)


def test_a_worker_that_is_refused_hears_why() -> None:
    async def test(host: Host) -> None:
        answer = host.ask()
        host.rounds.take(RoundRefused(A.key, "cannot take this report"))
        with pytest.raises(RendezvousProtocolError, match="cannot take this report"):
            await answer
        host.ask()
        assert len(host.of(Ready)) == 2, "what was answered may be asked again"

    on(test)


def test_the_dead_ask_nothing_and_wait_for_nothing() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        waiting, watching = host.ask(after=1), host.watch(B, 1)
        await asyncio.sleep(0)
        for worker in (A, B):
            host.living.discard(worker)
            host.rounds.gone(worker)
        assert (waiting.cancelled(), watching.cancelled()) == (True, True)
        with pytest.raises(RendezvousClosedError, match="is not a running worker of this host"):
            host.rounds.next_round(ready(DEAD))
        with pytest.raises(RendezvousClosedError):
            host.rounds.watch(WatchRequest(DEAD, 1, 0))
        host.rounds.take(Reply(A.key, PLACE))
        await asyncio.sleep(1)
        assert host.of(Heard) == []

    on(test)


def test_what_a_driver_says_to_nobody() -> None:
    async def test(host: Host) -> None:
        for message in (Reply("nobody", PLACE), RoundRefused("nobody", "")):
            with pytest.raises(RendezvousProtocolError):
                host.rounds.take(message)
        assert not host.rounds.take(WarmUp())

    on(test)


# --- notices -------------------------------------------------------------------------------------------------------


def test_a_notice_reaches_who_watches_and_who_has_not_seen_it() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        watching = host.watch(A, 1)
        await asyncio.sleep(0)
        assert not watching.done()
        notice = host.notice(2, NoticeKind.HOSTS_UPDATED)
        assert await watching == notice
        assert await host.watch(B, 1) == notice
        again = host.watch(B, 2)
        newer = host.watch(B, 2)
        assert again.cancelled()
        assert not newer.done()

    on(test)


def test_a_round_that_has_passed_is_not_watched() -> None:
    async def test(host: Host) -> None:
        host.train(A)
        with pytest.raises(StaleRoundError) as caught:
            host.rounds.watch(WatchRequest(A, 2, 0))
        assert (caught.value.round_id, caught.value.current_round_id) == (2, 1)
        host.rounds.begin_round(2)
        with pytest.raises(StaleRoundError):
            host.rounds.watch(WatchRequest(A, 1, 0))
        early = host.watch(A, 0, 2)
        await asyncio.sleep(0)
        assert not early.done(), "its notice is on its way"
        assert await_now(early, host.notice(5, round_id=2))

    on(test)


def await_now(future: asyncio.Future[Any], value: object) -> bool:
    return future.done() and future.result() == value


def test_a_round_that_is_told_twice_changes_nothing() -> None:
    async def test(host: Host) -> None:
        host.train(A)
        host.rounds.begin_round(1)
        assert host.began == [1]
        assert await host.ask() == PLACE

    on(test)


# --- heartbeats ----------------------------------------------------------------------------------------------------


def test_who_was_heard_is_told_in_one_message() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        host.watch(A, 1, progress=3, waiting=True)
        host.watch(B, 1, progress=4)
        host.watch(B, 1, progress=5)
        await asyncio.sleep(0.6)
        assert host.of(Heard) == [Heard({A.key: (3, True), B.key: (5, False)}, [], [])]
        await asyncio.sleep(5)
        assert len(host.of(Heard)) == 1, "only of those heard since"

    on(test)


def test_short_limits_are_kept_with_shorter_pauses() -> None:
    async def test(host: Host) -> None:
        host.rounds.poll_s = 0.1
        host.train(A)
        host.watch(A, 1)
        await asyncio.sleep(0.06)
        assert len(host.of(Heard)) == 1

    on(test)


def test_a_driver_that_takes_nothing_is_told_the_latest_when_it_does() -> None:
    async def test(host: Host) -> None:
        host.train(A)
        host.is_heard = False
        for progress in range(20):
            host.watch(A, 1, progress=progress)
            await asyncio.sleep(0.5)
        assert host.of(Heard) == []
        host.is_heard = True
        await asyncio.sleep(0.6)
        assert host.of(Heard) == [Heard({A.key: (19, False)}, [], [])]

    on(test)


def test_a_goodbye_is_told_at_once() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        assert (await host.watch(A, 1, leaving=True)).version == 1
        assert (await host.watch(B, 1, exiting=True)).version == 1
        assert host.of(Heard) == [Heard({A.key: (0, False)}, [A.key], []), Heard({B.key: (0, False)}, [], [B.key])]

    on(test)


def test_what_is_on_disk_is_told_when_it_has_changed() -> None:
    async def test(host: Host) -> None:
        host.train(A)
        for written in (1, 1, 2, 3):
            host.watch(A, 1, disk=DiskReport("id", "/d on a", written, 9, "", drivers=True))
        await asyncio.sleep(0.6)
        host.watch(A, 1, disk=DiskReport("id", "/d on a", 3, 9, "", drivers=True))
        await asyncio.sleep(0.6)
        assert host.of(OnDisk) == [OnDisk(A.key, DiskReport("id", "/d on a", 3, 9, "", drivers=True))]

    on(test)


# --- keys, and what the driver answers -------------------------------------------------------------------------------


def test_keys_go_up_and_are_wanted_once() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        host.rounds.put(1, "s", "k", b"v")
        for _ in range(3):
            host.rounds.want(1, "s", "k", 0)
            host.rounds.want(1, "s", "", 4)
        assert host.said[-3:] == [Put(1, "s", "k", b"v"), Want(1, "s", "k", 0), Want(1, "s", "", 4)]
        host.rounds.begin_round(2)
        host.rounds.want(2, "s", "k", 0)
        assert host.said[-1] == Want(2, "s", "k", 0)
        host.rounds.take(Value(2, "s", "k", b"v"))
        host.rounds.take(Values(2, "t", pack_entries([("0", b"x"), ("1", b"y")])))
        assert host.taken == [(2, "s", [("k", b"v")]), (2, "t", [("0", b"x"), ("1", b"y")])]

    on(test)


def test_a_report_is_passed_on() -> None:
    async def test(host: Host) -> None:
        report = RunningReport(A, 1, 3)
        host.rounds.running(report)
        assert host.said == [Running(report)]

    on(test)


def test_what_it_does_not_answer_itself_the_driver_is_asked() -> None:
    async def test(host: Host) -> None:
        a = Identity(Role.WORKER, A)
        answers = [
            asyncio.ensure_future(ask(host.rounds.routes, a, method, path, b"body"))  # type: ignore[arg-type]
            for method, path in (("POST", "leave"), ("GET", "status"), ("POST", "outcome/0/1"))
        ]
        assert host.said == [
            Ask(1, A.key, "leave", [], b"body"),
            Ask(2, A.key, "status", [], b"body"),
            Ask(3, A.key, "outcome", ["0", "1"], b"body"),
        ]
        host.rounds.take(Answer(2, 200, b"{}"))
        host.rounds.take(Answer(1, 777, b""))
        host.rounds.take(Answer(9, 200, b"to nobody"))
        assert await answers[1] == (200, b"{}")
        assert await answers[0] == (500, b"")
        host.rounds.take(Answer(3, 429, b""))
        assert await answers[2] == (429, b""), "it is to be sent again"
        again = asyncio.ensure_future(ask(host.rounds.routes, a, "POST", "leave", b"body"))  # type: ignore[arg-type]
        again.cancel()
        await asyncio.sleep(0)
        host.rounds.take(Answer(4, 200, b"too late"))

    on(test)


# --- while there is no driver, and when another has come ------------------------------------------------------------


def abort(version: int) -> Notice:
    return Notice(version, 1, NoticeKind.ABORT, f"worker {B} was killed by SIGKILL")


def test_a_member_that_dies_while_there_is_no_driver_sends_the_others_to_their_next_round() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        watching = host.watch(version=1)
        await asyncio.sleep(0)
        host.is_alone = True
        host.rounds.fails(B, "was killed by SIGKILL")
        assert await watching == abort(2)
        host.rounds.fails(B, "was killed by SIGKILL")
        assert await host.watch(version=1) == abort(2), "once"
        # A driver that has come knows nothing of it, and says what it said last.
        host.is_alone = False
        host.notice(1)
        assert await host.watch(version=1) == abort(2)
        later = host.notice(2, NoticeKind.ABORT)
        assert await host.watch(version=1) == later

    on(test)


def test_one_that_had_failed_before_is_told_of_when_the_driver_is_gone() -> None:
    """Nobody knows whether it has said so to the others."""

    async def test(host: Host) -> None:
        host.train(A, B)
        watching = host.watch(version=1)
        host.rounds.fails(B, "was killed by SIGKILL")
        host.rounds.alone()
        await asyncio.sleep(0)
        assert not watching.done(), "a driver says it"
        host.is_alone = True
        host.rounds.alone()
        assert await watching == abort(2)

    on(test)


@pytest.mark.parametrize("kind", [NoticeKind.ABORT, NoticeKind.JOB_OVER])
def test_what_the_driver_has_said_need_not_be_said_again(kind: NoticeKind) -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        said = host.notice(2, kind)
        host.is_alone = True
        host.rounds.fails(B, "was killed by SIGKILL")
        assert await host.watch(version=1) == said

    on(test)


def test_who_is_no_member_breaks_no_round() -> None:
    async def test(host: Host) -> None:
        host.train(A)
        host.is_alone = True
        host.rounds.fails(B, "was killed by SIGKILL")
        host.ask(A, after=1)
        await asyncio.sleep(0)
        host.rounds.fails(A, "was killed by SIGKILL")  # it waits for its next round already
        watching = host.watch(version=1)
        await asyncio.sleep(1.0)
        assert not watching.done()
        host.rounds.begin_round(2)
        host.rounds.alone()
        await asyncio.sleep(0)
        assert not watching.done()

    on(test)


def test_who_fails_in_its_exit_handlers_breaks_no_round() -> None:
    """Its script is over: the others may have their last steps to do, or a checkpoint to write."""

    async def test(host: Host) -> None:
        host.train(A, B)
        host.is_alone = True
        watching = host.watch(version=1)
        host.watch(B, exiting=True)
        host.rounds.fails(B, "was killed by SIGKILL")
        host.rounds.gone(B)
        host.rounds.alone()
        await asyncio.sleep(0)
        assert not watching.done()

    on(test)


def level(worker: WorkerId, *, leaving: bool = False, exiting: bool = False) -> WorkerLevel:
    return WorkerLevel(worker.key, WorkerPhase.RUNS, 7, "0", 0, leaving=leaving, exiting=exiting)


def test_levels_have_what_a_driver_has_said_and_not_what_was_said_in_its_place() -> None:
    async def test(host: Host) -> None:
        assert host.rounds.levels([]) == Levels([], 0, 0)
        host.train(A, B)
        host.notice(4)
        host.is_alone = True
        host.rounds.fails(B, "was killed by SIGKILL")
        assert await host.watch(version=4) == abort(5)
        host.watch(leaving=True)
        host.watch(B, exiting=True)
        await asyncio.sleep(0)
        known = [level(A), level(B)]
        assert host.rounds.levels(known) == Levels([level(A, leaving=True), level(B, exiting=True)], 1, 4)
        host.rounds.gone(A)
        host.rounds.gone(B)
        assert host.rounds.levels(known) == Levels(known, 1, 4)

    on(test)


def test_that_the_job_is_over_is_no_version() -> None:
    """A driver may die while it ends the job, and its journal says nothing of that."""

    async def test(host: Host) -> None:
        host.train(A)
        host.notice(2, NoticeKind.JOB_OVER)
        assert host.rounds.levels([]) == Levels([], 1, 1)

    on(test)


def test_another_driver_is_told_what_runs_and_who_asks() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        first, second = RunningReport(A, 1, 0), RunningReport(A, 1, 5, another=True)
        of_b = RunningReport(B, 1, 0)
        for report in (first, of_b, second, RunningReport(B, 0, 9)):
            host.rounds.running(report)
        disk = DiskReport("id", "/d", 1, 2, "", drivers=True)
        host.watch(B, disk=disk)
        asked = host.ask(A, after=1)
        await asyncio.sleep(0)
        asked.cancel()  # its poll time is over, and it asks again
        again = [Running(second), Running(of_b), Ready(ready(A, 1)), OnDisk(B.key, disk)]
        assert list(host.rounds.reports()) == again
        assert list(host.rounds.reports()) == again, "as often as one comes"
        await asyncio.sleep(1.0)
        assert host.of(OnDisk) == [], "it was told"
        host.rounds.gone(B)
        assert list(host.rounds.reports()) == [Running(second), Ready(ready(A, 1))]
        host.rounds.begin_round(2)
        host.rounds.take(Reply(A.key, PLACE))
        assert list(host.rounds.reports()) == []

    on(test)


def test_another_driver_is_told_the_keys_and_asked_what_is_open() -> None:
    async def test(host: Host) -> None:
        host.train(A, B)
        host.rounds.put(0, "past", "a", b"-")
        host.rounds.put(1, "s", "a", b"x")
        host.rounds.put(1, "s", "b", b"y")
        host.rounds.put(1, "s", "a", b"z")
        for key, count in (("k", 0), ("l", 0), ("", 2), ("", 3)):
            host.rounds.want(1, "s", key, count)
        host.rounds.take(Value(1, "s", "k", b"1"))
        host.rounds.take(Values(1, "s", pack_entries([("a", b"z"), ("b", b"y")])))
        open_, answered = (
            asyncio.ensure_future(ask(host.rounds.routes, Identity(Role.WORKER, worker), "POST", "leave", b"{}"))  # type: ignore[arg-type]
            for worker in (A, B)
        )
        first, second = host.of(Ask)
        host.rounds.take(Answer(second.number, 204, b""))
        await answered
        assert list(host.rounds.questions()) == [
            *(Put(1, "s", "a", b"z"), Put(1, "s", "b", b"y")),
            *(Want(1, "s", "l", 0), Want(1, "s", "", 3)),
            first,
        ]
        host.rounds.take(Answer(first.number, 200, b"ok"))
        assert await open_ == (200, b"ok")
        host.rounds.begin_round(2)
        assert list(host.rounds.questions()) == []

    on(test)
