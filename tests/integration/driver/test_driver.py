"""The driver's loop among fakes: errors that nobody expected, and time limits over a time in which it stood still."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_driver.core.events import WorkerHung
from elastic_driver.core.state import DISCOVERY_TOLD_S
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver import status as status_module
from elastic_driver.driver import status_line
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.rendezvous.agent_messages import Close, Kill, KillAll, NoticeSet, Round, Stop
from elastic_driver.rendezvous.messages import (
    JobOver,
    NextRoundReply,
    RoundAssignment,
)
from elastic_driver.rendezvous.server.unauthenticated import UnauthenticatedConnection
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.local_socket import path_of
from elastic_driver.version import __version__
from elastic_driver.words import NoticeKind, ReadyCause
from tests.support.fakes.driver_fakes import FakeWorker, Job
from tests.support.fakes.fleet_fakes import HOST_TIMEOUT_S
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually
from tests.support.fakes.watched_workers import WatchedWorkers

pytestmark = pytest.mark.integration

A, B = Host("localhost", 1), Host("127.0.0.1", 1)
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(main: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop] = LOOPS[1]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


def fail(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug")


async def crashed(job: Job, what: str = "ZeroDivisionError('a bug')") -> None:
    """The job ends as one does in which something was wrong with the driver: nothing runs, and all is told."""
    assert await job.end() == 70
    assert job.living() == []
    said = f"internal error of the driver (elasticrun {__version__}); please report the lines below"
    assert said in job.console.said
    assert f"summary: internal error of the driver: {what}" in job.console.said
    assert "the last " in job.text()
    assert len(job.logged("internal_error")) == 1
    assert job.logged("job_ended")[0]["exit_code"] == 70


def test_a_late_ctrl_c_has_nothing_to_say_of_workers_that_are_gone(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A)
        fleet = job.world.fleet.fleet
        close = fleet.close

        async def interrupted() -> None:
            job.interrupt(signal.SIGINT)
            await close()

        fleet.close = interrupted  # type: ignore[method-assign]
        await job.started(1)
        job.interrupt(signal.SIGINT)
        assert await job.end() == 130
        assert "SIGINT: stopping all workers" in job.text()
        assert "killing all workers" not in job.text()
        assert job.console.said[-1] == "summary: interrupted by SIGINT"

    run(main())


# --- errors that nobody expected -----------------------------------------------------------------------------------


def test_a_bug_in_the_start_of_a_worker_ends_the_job(tmp_path: Path) -> None:
    class Buggy(OurDialect):
        environment = fail

    async def main() -> None:
        job = Job(tmp_path, A, B, dialect=Buggy({}, exported={}))
        await crashed(job)
        assert job.world.asked == []

    run(main())


def test_a_worker_that_cannot_be_started_is_its_hosts_failure(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        job.world.start_error = "cannot start worker: no memory is left"
        assert await job.end() == 1
        assert "could not be started: cannot start worker: no memory is left" in job.text()
        assert job.logged("internal_error") == []

    run(main())


def test_a_worker_that_asks_before_its_start_fails_is_its_hosts_failure(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        job.world.start_error = "cannot start worker: no descriptor is free"
        why_not = job.world.why_not_started
        answers: list[asyncio.Future[NextRoundReply]] = []

        def asks(worker: WorkerId) -> str:
            answers.append(job.ready(worker))
            return why_not(worker)

        job.world.why_not_started = asks  # type: ignore[method-assign]
        assert await job.end() == 1
        assert "could not be started: cannot start worker: no descriptor is free" in job.text()
        assert job.logged("internal_error") == []
        assert answers

    run(main())


def test_after_an_internal_error_nothing_is_decided_and_nobody_started(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A)

        def on_start(worker: FakeWorker) -> None:
            # At once: a new host, the worker's death, its request for a round; and a start that is on its way.
            job.discovery.hosts = (A, B)
            job.driver.end.crash(ZeroDivisionError("a bug"))
            worker.end(1)

        job.world.on_start = on_start
        await job.started(1)
        worker = job.world.asked[0]
        assert await job.ready(worker) == JobOver("the job has ended")
        await crashed(job)
        assert job.world.asked == [worker]
        assert job.logged("round_formed") == []

    run(main())


def test_a_start_that_was_ordered_before_the_error_is_not_made(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        seen = job.driver._carry_out

        def carry_out(command: Any) -> None:
            seen(command)
            fail()

        job.driver._carry_out = carry_out  # type: ignore[method-assign]
        await crashed(job)
        assert job.world.asked == []

    run(main())


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("where", ["timer", "callback", "task", "watch_over", "kill", "explain", "tick"])
def test_a_bug_anywhere_on_the_loop_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        if where == "tick":
            monkeypatch.setattr(status_line, "_TICK_S", 0.01)
        job = Job(tmp_path, A, B, heartbeat_timeout_s=0.1 if where == "watch_over" else 60.0)
        job.console.live = where in ("explain", "tick")
        await job.train(2)
        loop = asyncio.get_running_loop()
        match where:
            case "timer":
                loop.call_later(0.001, fail)
            case "callback":
                loop.call_soon(fail)
            case "task":
                job.driver.agents.tasks.start(asyncio.sleep(0, fail))  # that it is no error itself
                job.driver.agents.tasks.start(asyncio.to_thread(fail))
            case "watch_over":
                job.driver.health.watch._heartbeats.find = fail  # type: ignore[method-assign]
            case "kill":
                job.world.break_orders(Kill, ZeroDivisionError("a bug"))
                job.driver.stepper.report(WorkerHung(job.world.asked[0], "no heartbeat", True))
            case "explain" | "tick":
                monkeypatch.setattr(status_module, "explain", fail)
                if where == "explain":
                    job.ready(job.world.asked[0], after=1, cause=ReadyCause.INTERNAL_ERROR)
        await crashed(job)

    run(main(), new_loop)


def test_a_bug_in_what_tells_of_the_job_ends_no_job(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        workers = await job.train(2)
        job.console.fail_at = "127.0.0.1[0] (pid"
        job.exits(workers[1], 1)
        await job.until(lambda: "failed on an event of the job" in job.text(), "it is told")
        assert len(job.logged("worker_exited")) == 1
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143
        assert "from here on: ValueError: a bug of the console" in job.text()
        assert job.logged("internal_error") == []

    run(main())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_a_peer_does_to_its_connection_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        await job.train(2)
        monkeypatch.setattr(UnauthenticatedConnection, "data_received", fail)
        socket = path_of(job.logged("job_started")[0]["rendezvous"])
        assert socket is not None
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"x")
        with pytest.raises((EOFError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        monkeypatch.undo()
        assert any("buffer_updated" in text or "transport" in text for text in job.console.said)
        for worker in job.living():
            job.exits(worker, 0)
        assert await job.end() == 0

    run(main(), new_loop)


@pytest.mark.parametrize("where", ["stop", "close", "summary"])
def test_a_bug_on_the_way_out_is_told_and_skips_nothing(tmp_path: Path, where: str) -> None:
    async def main() -> None:
        job = Job(tmp_path, A, B)
        workers = await job.train(2)
        match where:
            case "stop":
                job.world.break_orders(Stop, ZeroDivisionError("a bug"))
            case "close":
                close = job.world.fleet.fleet.close

                async def broken() -> None:
                    await close()
                    fail()

                job.world.fleet.fleet.close = broken  # type: ignore[method-assign]
            case "summary":
                job.console.fail_at = "summary"
        job.exits(workers[0], 0)
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143, "it was over before"
        missed = "failed on an event of the job"
        assert (
            missed if where == "summary" else "internal error of the driver while the job was ending: "
        ) in job.text()
        socket = path_of(job.logged("job_started")[0]["rendezvous"])
        assert socket is not None
        assert not socket.parent.exists()
        assert list(tmp_path.glob("elasticrun/*")) == []

    run(main())


def test_a_report_that_cannot_be_told_reaches_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        job = Job(tmp_path, A)
        await job.started(1)
        job.console.fail_at = "internal error"
        asyncio.get_running_loop().call_soon(fail)
        assert await job.end() == 70
        assert job.living() == []

    run(main())
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def virtually(tmp_path: Path, main: Callable[[Job, VirtualLoop], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def inside(loop: VirtualLoop) -> None:
        await main(Job(tmp_path, A, B, clock=JobClock(loop.time), **settings), loop)

    run_virtually(inside)


def test_a_machine_without_room_to_look_for_hosts_is_no_bug(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        await job.train(2)
        for error, what in (
            (RuntimeError("can't start new thread"), "no thread can be started"),
            (MemoryError(), "no memory is left"),
            (OSError(errno.EMFILE, "Too many files"), "Too many files"),
        ):
            job.discovery.error = error
            found = len(job.logged("hosts_discovered"))
            await asyncio.sleep(DISCOVERY_TOLD_S + 1)
            assert f"cannot look for hosts: {what}" in job.text()
            job.discovery.error = None
            await asyncio.sleep(DISCOVERY_TOLD_S + 1)
            assert len(job.logged("hosts_discovered")) > found
        job.discovery.error = ZeroDivisionError("a bug")
        await crashed(job)

    virtually(tmp_path, main, discovery_interval_s=1.0, heartbeat_timeout_s=0.0)


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        workers = await job.started(2)
        for worker in workers:
            job.world.started[worker].is_stubborn = True
        job.interrupt(signal.SIGINT)
        await job.until(lambda: all(job.world.started[worker].stops for worker in workers), "they are told to end")
        assert job.living() == workers
        job.interrupt(signal.SIGINT)
        assert await job.end() == 130
        assert "SIGINT again: killing all workers now" in job.text()
        assert [len(host.of(KillAll)) for host in job.world.hosts.values()] == [1, 1]
        assert [job.world.started[worker].exit_code for worker in workers] == [-9, -9]

    virtually(tmp_path, main)


def test_hosts_are_silent_until_they_are_heard(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        workers = await job.train(2)
        for host in job.world.hosts.values():
            host.vanishes()
        await asyncio.sleep(HOST_TIMEOUT_S + 1)
        assert sorted(job.status()["silent"]) == sorted((A.name, B.name)), "which was heard last is chance"
        for host in job.world.hosts.values():
            host.is_back()
        await asyncio.sleep(1)
        assert job.status()["silent"] == []
        assert job.living() == workers
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)


def test_a_stall_is_seen_and_is_over_before_the_end_of_its_round_is_told(tmp_path: Path) -> None:
    """The watch over the workers' health knows each step of the core before it is carried out."""

    async def main(job: Job, loop: VirtualLoop) -> None:
        first, second = await job.train(2)
        looks = WatchedWorkers()

        async def look_for(seconds: int) -> None:
            for _ in range(seconds):
                await asyncio.sleep(1)
                for worker, vitals in looks.look((first, second), 1, loop.time()):
                    job.sees(worker, vitals)

        await look_for(5)
        looks.does[second] = "is-stopped"
        await look_for(8)
        (suspected,) = job.logged("worker_suspected")
        assert suspected["worker"] == second.key
        job.exits(second, -9)
        await job.until(lambda: job.logged("worker_exited"), "its end")
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143
        kinds = [json.loads(line)["event"] for line in job.events.read_text().splitlines()]
        assert kinds.index("stalled") < kinds.index("stall_ended") < kinds.index("worker_exited")

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)


# --- a driver that stood still -------------------------------------------------------------------------------------


def test_a_start_outlives_a_driver_that_is_stopped(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        first, second = await job.started(2)
        job.ready(first)
        await asyncio.sleep(100)
        loop.stand_still(1000)
        await asyncio.sleep(150)
        answer = job.ready(second)
        await job.until(answer.done, "the first round")
        assert isinstance(answer.result(), RoundAssignment)
        assert "the driver was suspended for 1000 s" in job.text()
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)


def test_a_start_that_takes_too_long_ends_all_the_same(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        await job.started(2)
        await asyncio.sleep(100)
        loop.stand_still(1000)
        assert await job.end() == 2
        assert "no worker called hvd.init() within 300 s" in job.text()

    virtually(tmp_path, main)


def test_a_reset_outlives_a_driver_that_is_stopped(tmp_path: Path) -> None:
    """One worker dies, and the driver is stopped before it, while or after it takes the other's request."""

    async def main(job: Job, loop: VirtualLoop) -> None:
        first, second = await job.train(2)
        job.exits(second, -9)
        await asyncio.sleep(1)
        loop.stand_still(10_000)
        await asyncio.sleep(200)
        answer = job.ready(first, after=1, cause=ReadyCause.INTERNAL_ERROR)
        await job.until(answer.done, "the second round")
        assert isinstance(answer.result(), RoundAssignment)
        assert [event["size"] for event in job.logged("round_formed")] == [2, 1]
        assert "localhost" not in str(job.status()["blacklisted"])
        job.exits(first, 0)
        assert await job.end() == 0
        told = [each.notice.kind for each in job.world.hosts[first.hostname].of(NoticeSet)]
        assert told == [NoticeKind.NONE, NoticeKind.ABORT, NoticeKind.NONE, NoticeKind.JOB_OVER]

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)


def test_workers_that_were_not_heard_meanwhile_are_not_frozen(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        workers = await job.train(2)

        def heartbeat() -> None:
            for worker in workers:
                job.lives(worker)

        for _ in range(4):
            heartbeat()
            await asyncio.sleep(15)
        heartbeat()
        loop.stand_still(3600)
        await asyncio.sleep(10)  # the timers that are due come before what workers have sent
        for _ in range(4):
            heartbeat()
            await asyncio.sleep(15)
        assert job.logged("worker_hung") == []
        await asyncio.sleep(60)
        assert len(job.logged("worker_hung")) == 2, "now they are"
        assert await job.end() == 1

    virtually(tmp_path, main)


def test_a_drained_worker_has_its_time(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        first, second = await job.train(2)
        job.leaves(second, "SIGTERM")
        await asyncio.sleep(50)
        loop.stand_still(1000)
        await asyncio.sleep(40)
        assert job.living() == [first, second]
        await asyncio.sleep(20)
        assert "did not leave within 100 s (--drain-timeout)" in job.text()
        assert job.living() == [first]
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    virtually(tmp_path, main, drain_timeout_s=100.0, heartbeat_timeout_s=0.0)


def test_slots_are_waited_for_as_long_as_the_driver_runs(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        job.discovery.hosts = (A,)
        await asyncio.sleep(500)
        loop.stand_still(10_000)
        await asyncio.sleep(90)
        assert job.logged("job_ended") == []
        assert await job.end() == 3
        assert "gave up after 600 s (--elastic-timeout)" in job.text()

    virtually(tmp_path, main, min_num_proc=2)


def test_who_is_drained_and_ready_waits_for_slots_and_is_not_late(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        workers = await job.train(2)
        for host in (A, B):
            await job.drain(host)
        answers = [job.ready(worker, after=1, commits=1, cause=ReadyCause.HOSTS_UPDATED) for worker in workers]
        await asyncio.sleep(300)
        assert job.living(), "it waits for slots, longer than the drain's limit"
        assert "--drain-timeout" not in job.text()
        await job.drain(B, undo=True)
        await job.until(lambda: any(answer.done() for answer in answers), "the round after the undo")
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    virtually(tmp_path, main, drain_timeout_s=20.0, heartbeat_timeout_s=0.0)


def test_a_signal_that_leaves_too_few_slots_is_told_with_the_way_back(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        _, second = await job.train(2)
        job.leaves(second, "SIGTERM")
        await job.until(lambda: "of the 2 that the job needs (--min-np)" in job.text(), "the drain")
        assert f"elasticrun drain --undo {second.hostname} undoes it" in job.text()
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    virtually(tmp_path, main, min_num_proc=2, heartbeat_timeout_s=0.0)


def test_a_job_that_ends_just_after_a_standstill_has_it_booked(tmp_path: Path) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        await job.train(2)
        loop.stand_still(1000)
        await asyncio.sleep(2)
        assert "the driver was suspended" in job.text()
        assert job.logged("stood_still") == [], "its workers have not said what they did meanwhile"
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143
        assert len(job.logged("stood_still")) == 1

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)


# --- what agents are told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "preempted"),
    [
        (lambda job: job.interrupt(signal.SIGTERM), 143, True),
        (lambda job: job.interrupt(signal.SIGINT), 130, False),
        (lambda job: job.driver.interrupts.end(), 143, False),
    ],
    ids=["SIGTERM", "SIGINT", "operator"],
)
def test_agents_are_told_of_rounds_and_of_the_end(
    tmp_path: Path, end: Callable[[Job], object], code: int, preempted: bool
) -> None:
    async def main(job: Job, loop: VirtualLoop) -> None:
        await job.train(2)
        end(job)
        assert await job.end() == code
        for host in job.world.hosts.values():
            assert [each.round_id for each in host.of(Round)] == [1]
            assert [(each.exit_code, each.preempted) for each in host.of(Close)] == [(code, preempted)]

    virtually(tmp_path, main, heartbeat_timeout_s=0.0)
