"""The keeper of workers: every order of starts, stops, deaths and losses, as the agents see it and the listener."""

from __future__ import annotations

import asyncio
import signal

import pytest

from elastic_driver.core.events import KillWorker
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.workers import BROKEN_S
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Dying,
    Exited,
    Finished,
    HoldPort,
    Kill,
    Labels,
    LetGo,
    NotStarted,
    Output,
    PortHeld,
    Spared,
    Start,
    Started,
    Stop,
)
from elastic_driver.words import Ending
from tests.support.fakes.fleet_fakes import AGENT_TIMEOUT_S, DRAIN_S, GRACE_S, FakeAgent, FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit

A, A1, B = WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0)


async def runs(fleet: FakeFleet, agent: FakeAgent, worker: WorkerId = A) -> None:
    """It is started."""
    await fleet.order(worker)
    agent.say(Started(worker.key, 5))
    await rest()


async def ends(agent: FakeAgent, worker: WorkerId = A, returncode: int = 0) -> None:
    """It ends, and nothing is left of it."""
    agent.say(Exited(worker.key, returncode, []), Finished(worker.key))
    await rest()


# --- starts --------------------------------------------------------------------------------------------------------


def test_a_worker_starts_writes_and_ends() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        place = {"PLACE": "rank 0 of round 3 of job j, 4 cores"}
        assert agent.of(Start) == [Start(A.key, ["train"], place, "0", 0)]
        assert fleet.workers.pid(A) is None
        agent.say(Started(A.key, 5))
        await rest()
        assert (list(fleet.workers.living), fleet.workers.pid(A), fleet.workers.pid(B)) == ([A], 5, None)
        assert (fleet.workers.living[A].pid, fleet.workers.living[A].label) == (5, "0")
        agent.say(Output(A.key, "stderr", b"one\n"), Output(A.key, "rubbish", b"two\n"))
        agent.say(Dying(A.key, 1, "exited with code 1", ["last"]))
        await rest()
        assert fleet.workers.pid(A) == 5, "it holds its place"
        agent.say(Exited(A.key, 1, ["last"]))
        await rest()
        assert list(fleet.workers.living) == []
        assert fleet.sink.ended == []
        agent.say(Finished(A.key))
        await rest()
        assert fleet.story.told == [
            ("started", A, "5"),
            ("dying", A, "exited with code 1"),
            ("exited", A, "exited with code 1; last"),
        ]
        assert fleet.sink.began == [(A, 5, 0)]
        assert fleet.sink.written == [(A, "stderr", b"one\n"), (A, "stdout", b"two\n")]
        assert fleet.sink.ended == [A]

    on_fleet(main)


def test_workers_here_have_the_drivers_own_variables() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("here")
        await fleet.order(WorkerId("here", 0, 0))
        assert agent.of(Start)[0].env["HERE"] == "1"

    on_fleet(main)


@pytest.mark.parametrize(("bad_command", "kind"), [(False, "LaunchError"), (True, "CommandNotFoundError")])
def test_a_worker_that_can_not_be_started(bad_command: bool, kind: str) -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        fleet.workers.stop(A)
        agent.say(NotStarted(A.key, "a reason", bad_command))
        await rest()
        assert fleet.story.told == [("not started", A, f"{kind}: a reason")]
        assert not fleet.workers.has_workers(agent.link)
        stops = len(agent.of(Stop))
        await runs(fleet, agent)
        assert len(agent.of(Stop)) == stops, "nothing is left of the stop"

    on_fleet(main)


def test_a_command_that_one_host_lacks_is_that_hosts_fault() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await fleet.order(A, B)
        a.say(NotStarted(A.key, "no such file", bad_command=True))
        b.say(NotStarted(B.key, "no such file", bad_command=True))
        await rest()
        assert fleet.story.told == [
            ("not started", A, "LaunchError: no such file"),
            ("not started", B, "CommandNotFoundError: no such file"),
        ]

    on_fleet(main)


def test_a_worker_is_started_by_the_agent_that_has_a_host_after_a_broken_connection() -> None:
    """The one that was there, or another that has joined under its name; one that is gone fails no start."""

    async def main(fleet: FakeFleet) -> None:
        first = fleet.arrives("j", ticket=False)
        await rest()
        worker, again = WorkerId("j", 0, 0), WorkerId("j", 0, 1)
        first.hang_up()
        await fleet.order(worker)
        first.connect()
        await asyncio.sleep(0.1)
        assert first.of(Start)
        first.say(Started(worker.key, 5))
        await ends(first, worker)
        first.hang_up()
        second = fleet.arrives("j", ticket=False)
        await fleet.order(again)
        await asyncio.sleep(5)
        assert (len(first.of(Start)), len(second.of(Start))) == (1, 1)
        second.say(Started(again.key, 6))
        await rest()
        assert fleet.story.told[2:] == [("started", again, "6")]

    on_fleet(main)


def test_no_worker_starts_on_a_host_without_an_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.order(A)
        why = f"LaunchError: cannot start worker {A}: its host no longer has an agent"
        assert fleet.story.told == [("not started", A, why)]

    on_fleet(main)


def test_a_host_without_an_address_for_others_starts_no_workers_beside_them() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)  # while it is alone
        await fleet.fleet.want(["a", "b"])
        await rest()
        fleet.arrives("b", peer="10.0.0.2", address="10.0.0.2")
        await fleet.order(A1)
        assert fleet.story.told[1:] == [("not started", A1, "LaunchError: host a has no address")]

    on_fleet(main, no_address=("a",))


def test_what_an_agent_says_of_others_workers_changes_nothing() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await runs(fleet, a)
        await fleet.order(A1)
        b.say(
            Output(A.key, "stdout", b"x\n"),
            Dying(A.key, 1, "", []),
            Exited(A.key, 1, []),
            Finished(A.key),
            Spared(A.key),
            Started(A1.key, 9),
            NotStarted(A1.key, "no", bad_command=True),
        )
        await rest()
        assert fleet.story.told == [("started", A, "5")]
        assert fleet.sink.written == []

    on_fleet(main)


# --- ends ----------------------------------------------------------------------------------------------------------


def test_started_and_dead_in_one_frame() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        agent.say(Started(A.key, 5), Exited(A.key, 3, []), Finished(A.key))
        await rest()
        assert fleet.story.told == [("started", A, "5"), ("exited", A, "exited with code 3")]
        assert not fleet.workers.has_workers(agent.link)

    on_fleet(main)


def test_a_death_that_is_seen_with_the_end_is_told_as_the_end() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        agent.say(Exited(A.key, -9, []), Dying(A.key, None, "too late", []))
        await rest()
        assert fleet.story.of(A) == ["started", "exited"]

    on_fleet(main)


def test_a_worker_that_has_not_exited_is_not_finished() -> None:
    """Else nobody would ever hear of its end."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        agent.say(Finished(A.key))
        assert agent.transport.is_closed
        assert fleet.workers.has_workers(agent.link)
        await asyncio.sleep(1.1)
        assert fleet.story.of(A) == ["started", "lost"]

    on_fleet(main)


def test_what_is_said_twice_or_too_late_is_told_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        agent.say(Finished(A.key), Exited(A.key, 0, []), Dying(A.key, 1, "", []))
        assert fleet.story.told == []
        agent.say(Started(A.key, 5), Started(A.key, 6), NotStarted(A.key, "no", bad_command=False))
        agent.say(Dying(A.key, 1, "", []), Dying(A.key, 1, "", []), Exited(A.key, 1, []), Exited(A.key, 2, []))
        await rest()
        assert fleet.story.told == [
            ("started", A, "5"),
            ("dying", A, "exited with code 1"),
            ("exited", A, "exited with code 1"),
        ]
        agent.link.lose("a test")
        assert len(fleet.story.told) == 3, "it was dead"
        assert fleet.sink.ended == [A]

    on_fleet(main)


@pytest.mark.parametrize("end", [NotStarted(A.key, "no", bad_command=False), Dying(A.key, None, "", []), None])
def test_the_standard_input_is_free_as_soon_as_a_worker_ends(end: AgentMessage | None) -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        if not isinstance(end, NotStarted):
            agent.say(Started(A.key, 5))
            assert fleet.stdin.told == [("started", A)]
        agent.say(Exited(A.key, 0, []) if end is None else end)
        assert fleet.stdin.told[-1] == ("gone", A)

    on_fleet(main)


def test_the_standard_input_is_free_when_its_worker_is_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        agent.link.lose("a test")
        assert fleet.stdin.told == [("started", A), ("gone", A)]

    on_fleet(main)


def test_a_traceback_that_is_in_the_error_file_only_is_among_the_last_words() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        file = '{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback\\n  File"}}}'
        for worker, line in ((A, "loading"), (A1, "[rank1]: ValueError: no")):
            await runs(fleet, agent, worker)
            agent.say(Exited(worker.key, 1, [line], file))
            await rest()
        ends = [how for what, _, how in fleet.story.told if what == "exited"]
        assert ends == [
            "exited with code 1; Traceback   File ValueError: no",
            "exited with code 1; [rank1]: ValueError: no",
        ]

    on_fleet(main)


def test_with_an_agent_its_workers_are_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await runs(fleet, a)
        await runs(fleet, b, B)
        await fleet.order(A1)
        fleet.workers.kill(KillWorker(A, "did not end", hangs=True, exits=True))
        await rest()
        a.link.lose("a test")
        await rest()
        assert fleet.story.told[2:] == [
            ("killed", A, "did not end"),
            ("lost", A, "a test"),
            ("not started", A1, f"LaunchError: cannot start worker {A1}: a test"),
        ]
        assert fleet.sink.ended == [A, A1], "who reads their output need not wait for more"
        assert list(fleet.workers.living) == [B]

    on_fleet(main)


def test_an_agent_that_is_stopped_before_it_has_started_a_worker_is_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a")
        await fleet.order(A)
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.1)
        (told,) = fleet.story.told
        assert told[:2] == ("not started", A)
        assert "its agent did not start worker" in told[2]

    on_fleet(main)


def test_an_agent_that_is_stopped_does_not_stop_its_worker() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        fleet.workers.stop(A)
        await asyncio.sleep(GRACE_S + AGENT_TIMEOUT_S)
        assert fleet.listener.lost == []
        await asyncio.sleep(1.5)
        ((host, why),) = fleet.listener.lost
        assert (host, why.partition(":")[0]) == ("a", f"its agent did not stop worker {A} within 5 s")
        assert fleet.story.told[1:] == [("lost", A, why)]

    on_fleet(main)


# --- stops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "grace_s", "sever"),
    [(Ending.USUAL, GRACE_S, False), (Ending.PLANNED, DRAIN_S, False), (Ending.BROKEN, BROKEN_S, True)],
)
def test_how_a_worker_ends(ending: Ending, grace_s: float, sever: bool) -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        fleet.workers.stop(A, ending)
        await rest()
        assert agent.of(Stop) == [Stop(A.key, grace_s, sever)]

    on_fleet(main)


def test_a_stop_while_it_is_being_started() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        fleet.workers.stop(A)
        agent.say(Started(A.key, 5))
        await rest()
        assert agent.of(Stop) == [Stop(A.key, GRACE_S)]
        await ends(agent, A, -15)
        assert fleet.story.told == [("started", A, "5"), ("exited", A, "killed by SIGTERM")]
        await runs(fleet, agent)
        assert len(agent.of(Stop)) == 1, "the stop was for the first one"

    on_fleet(main)


@pytest.mark.parametrize("orders", [(Ending.PLANNED, Ending.BROKEN), (Ending.BROKEN, Ending.PLANNED)])
def test_the_nearest_end_is_that_of_a_worker_which_is_being_started(orders: tuple[Ending, Ending]) -> None:
    """An agent that is told two ends carries out the nearer one."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        for ending in orders:
            fleet.workers.stop(A, ending)
        agent.say(Started(A.key, 5))
        await rest()
        assert min(agent.of(Stop), key=lambda stop: stop.grace_s) == Stop(A.key, BROKEN_S, sever=True)

    on_fleet(main)


def test_a_stop_needs_a_process() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        fleet.workers.stop(A)
        await runs(fleet, agent)
        agent.say(Exited(A.key, 0, []))
        await rest()
        fleet.workers.stop(A)
        await rest()
        await ends(agent)
        fleet.workers.stop(A)
        await rest()
        assert agent.of(Stop) == []
        assert fleet.story.of(A) == ["started", "exited"]

    on_fleet(main)


def test_labels_go_to_the_workers_agent_when_they_change() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        for label in ("0", "1", "1"):
            fleet.workers.label(A, label)
        fleet.workers.label(B, "2")
        await runs(fleet, agent, A1)
        agent.say(Exited(A1.key, 0, []))
        fleet.workers.label(A1, "2")
        await rest()
        assert agent.of(Labels) == [Labels({A.key: "1"})]
        assert fleet.workers.living[A].label == "1"

    on_fleet(main)


def test_what_is_ordered_of_one_that_waits_goes_with_its_start() -> None:
    """Its agent has no connection for a moment: the nearest end is sent right behind the start, with its label."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        agent.hang_up()
        await fleet.order(A, A1)
        fleet.workers.stop(A, Ending.PLANNED)
        fleet.workers.stop(A)
        fleet.workers.kill(KillWorker(A1, "did not leave"))
        fleet.workers.label(A1, "7")
        agent.connect()
        await rest()
        starts = [Start, Stop]
        told = [(type(each), each.worker) for each in agent.heard() if isinstance(each, Start | Stop)]
        assert told == [(kind, worker.key) for worker in (A, A1) for kind in starts]
        assert agent.of(Stop) == [Stop(A.key, GRACE_S), Stop(A1.key, GRACE_S)]
        assert ([start.label for start in agent.of(Start)], agent.of(Labels)) == (["0", "7"], [])
        assert fleet.story.told == [("killed", A1, "did not leave")]

    on_fleet(main)


def test_who_waits_for_an_agent_that_is_lost_is_not_started() -> None:
    async def main(fleet: FakeFleet) -> None:
        agent = fleet.arrives("j", ticket=False)
        await rest()
        worker = WorkerId("j", 0, 0)
        agent.hang_up()
        await fleet.order(worker)
        fleet.workers.stop(worker)
        await asyncio.sleep(5)
        assert fleet.story.of(worker) == ["not started"]
        assert fleet.story.told[0][2].endswith("its host no longer has an agent")
        assert agent.of(Start) == agent.of(Stop) == []
        assert not fleet.workers._workers

    on_fleet(main)


def test_orders_follow_a_start_at_once() -> None:
    """Its agent keeps them until the process is there, and carries out the nearest end."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        fleet.workers.label(A, "1")
        fleet.workers.stop(A, Ending.PLANNED)
        fleet.workers.stop(A, Ending.BROKEN)
        fleet.workers.kill(KillWorker(A, "did not leave"))
        await rest()
        told = agent.heard()[-4:]
        assert told == [
            Labels({A.key: "1"}),
            Stop(A.key, DRAIN_S),
            Stop(A.key, BROKEN_S, sever=True),
            Kill(A.key, 0.0, exits=False),
        ]

    on_fleet(main)


def test_a_start_has_a_name_of_its_own() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        agent.say(Exited(A.key, 0, []))
        with pytest.raises(AssertionError):
            await fleet.order(A)

    on_fleet(main)


# --- kills ---------------------------------------------------------------------------------------------------------


def test_a_kill_needs_a_process() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        order = KillWorker(A, "did not leave")
        fleet.workers.kill(order)
        await runs(fleet, agent)
        fleet.workers.kill(order)
        await rest()
        assert agent.of(Kill) == [Kill(A.key, 0.0, exits=False)]
        agent.say(Exited(A.key, -9, []))
        await rest()
        fleet.workers.kill(order)
        await rest()
        assert fleet.story.of(A) == ["spared", "started", "killed", "exited", "spared"]
        assert len(agent.of(Kill)) == 1

    on_fleet(main)


def test_a_kill_while_it_is_being_started() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        fleet.workers.kill(KillWorker(A, "did not leave"))
        assert fleet.story.of(A) == ["killed"]
        agent.say(Started(A.key, 5))
        await rest()
        assert agent.of(Stop) or agent.of(Kill)

    on_fleet(main)


def test_a_worker_that_exits_is_let_be_when_its_script_has_ended() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        exits = KillWorker(A, "did not end", hangs=True, exits=True)
        fleet.workers.kill(exits)
        await rest()
        assert agent.of(Kill) == [Kill(A.key, 2.0, exits=True)]
        assert fleet.story.of(A) == ["started"], "its agent knows"
        agent.say(Spared(A.key))
        await rest()
        assert fleet.story.of(A) == ["started", "spared"]
        fleet.workers.kill(exits)
        await rest()
        assert len(agent.of(Kill)) == 2
        fleet.workers.kill(exits)
        await rest()
        assert len(agent.of(Kill)) == 2, "it has yet to answer"
        await ends(agent, A, -6)
        assert sorted(fleet.story.of(A)) == ["exited", "killed", "spared", "started"]

    on_fleet(main)


def test_one_that_hangs_has_two_seconds_for_its_stacks() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        fleet.workers.kill(KillWorker(A, "no heartbeat", hangs=True))
        assert fleet.story.told[-1] == ("killed", A, "no heartbeat")
        await rest()
        assert agent.of(Kill) == [Kill(A.key, 2.0, exits=False)]
        await ends(agent, A, -6)
        assert fleet.story.of(A) == ["started", "killed", "exited"]

    on_fleet(main)


@pytest.mark.parametrize("spares", [False, True])
def test_an_agent_that_is_stopped_does_not_kill_its_worker(spares: bool) -> None:
    """One that has spared it has done what it was told."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        fleet.workers.kill(KillWorker(A, "did not end", exits=True))
        if spares:
            agent.say(Spared(A.key))
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.5)
        whys = [why.partition(":")[0] for _, why in fleet.listener.lost]
        assert whys == ([] if spares else [f"its agent did not kill worker {A}"])

    on_fleet(main)


# --- the end of the job --------------------------------------------------------------------------------------------


def test_after_the_jobs_end_nobody_is_started() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        ordered = asyncio.ensure_future(fleet.order(A))
        await asyncio.sleep(0)
        agent.hang_up()
        fleet.workers.job_ends()
        agent.connect()
        await ordered
        assert agent.of(Start) == []
        await fleet.workers.stop_all(1.0)
        assert fleet.story.told == []

    on_fleet(main)


def test_the_jobs_end_waits_for_nobody_of_whom_no_agent_was_told() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        loop = asyncio.get_running_loop()
        agent.hang_up()
        await fleet.order(A)
        await fleet.order(A1, hosts=("a",))
        fleet.workers.job_ends()
        await fleet.order(WorkerId("a", 2, 0))
        began = loop.time()
        await fleet.workers.stop_all(10.0)
        assert loop.time() == began
        assert not fleet.workers._workers

    on_fleet(main)


def test_the_signal_that_ends_the_job_ends_its_workers() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        fleet.workers.end_by(signal.SIGINT)
        fleet.workers.stop(A)
        await rest()
        assert agent.of(Stop) == [Stop(A.key, GRACE_S, signal=signal.SIGINT)]

    on_fleet(main)


@pytest.mark.parametrize("starts", [True, False])
def test_a_worker_that_is_being_started_at_the_jobs_end(starts: bool) -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A)
        stopping = asyncio.ensure_future(fleet.workers.stop_all(10.0))
        await rest()
        assert not stopping.done()
        if not starts:
            agent.say(NotStarted(A.key, "the job is ending", bad_command=False))
            await stopping
            assert fleet.story.of(A) == ["not started"]
            return
        agent.say(Started(A.key, 5))
        await rest()
        assert agent.of(Stop) == [Stop(A.key, GRACE_S)]
        await ends(agent, A, -15)
        await stopping
        assert fleet.story.of(A) == ["started", "exited"]

    on_fleet(main)


def test_the_jobs_end_does_not_wait_for_what_a_dead_worker_has_left() -> None:
    """It may have the grace of a drained worker. Its agent ends it, when it is ended."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await runs(fleet, agent)
        await runs(fleet, agent, A1)
        fleet.workers.stop(A, Ending.PLANNED)
        agent.say(Exited(A.key, -15, []))
        await rest()
        stopping = asyncio.ensure_future(fleet.workers.stop_all(10.0))
        await rest()
        assert [stop.worker for stop in agent.of(Stop)] == [A.key, A1.key]
        agent.say(Exited(A1.key, -15, []))
        await rest()
        assert not stopping.done()
        agent.say(Finished(A1.key))
        await rest()
        assert stopping.done()
        assert fleet.workers.has_workers(agent.link)

    on_fleet(main)


def test_stopping_all_has_a_limit() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await runs(fleet, a)
        await runs(fleet, b, B)
        loop = asyncio.get_running_loop()

        async def beat() -> None:
            while True:
                a.beat()
                b.beat()
                await asyncio.sleep(0.5)

        beating = asyncio.create_task(beat())
        began = loop.time()
        stopping = asyncio.ensure_future(fleet.workers.stop_all(40.0))
        await rest()
        await ends(b, B, -15)
        await stopping
        assert loop.time() == began + 40.0
        assert list(fleet.workers.living) == [A]
        beating.cancel()

    on_fleet(main)


# --- where they meet -----------------------------------------------------------------------------------------------


def test_a_generation_meets_at_a_port_that_is_held_until_the_next() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await fleet.order(A, B, hosts=("a", "b"), round_id=1)
        assert (a.of(HoldPort), b.of(HoldPort)) == ([HoldPort(1, [], 1)], []), "one for all"
        assert a.of(Start) == b.of(Start) == [], "their environment is not known yet"
        b.say(PortHeld(1, 1234, ""))  # nobody has asked it
        a.say(PortHeld(2, 1234, ""))  # nor for that one
        await rest()
        assert a.of(Start) == []
        a.say(PortHeld(1, 5000, ""), PortHeld(1, 5001, ""))
        await rest()
        places = [start.env["PLACE"].partition("cores")[2] for agent in (a, b) for start in agent.of(Start)]
        assert places == [", at 10.0.0.1:5000"] * 2
        await fleet.order(A1, hosts=("a", "b"), round_id=1)
        assert (len(a.of(HoldPort)), a.of(LetGo)) == (1, []), "who comes later meets them there"
        assert len(a.of(Start)) == 2
        await fleet.order(WorkerId("b", 0, 1), hosts=("b", "a"), round_id=2)
        assert (b.of(HoldPort), a.of(LetGo), b.of(LetGo)) == ([HoldPort(2, [], 2)], [LetGo(1)], [])

    on_fleet(main)


@pytest.mark.parametrize("port", [0, 1 << 16])
def test_a_port_that_can_not_be_held_is_the_fault_of_its_host(port: int) -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await fleet.order(A, B, hosts=("a", "b"))
        a.say(PortHeld(1, port, "all are taken"))
        await rest()
        why = "LaunchError: cannot hold a port for rank 0 on host a: all are taken"
        assert fleet.story.told == [("not started", A, why)]
        ((start,), none) = (b.of(Start), a.of(Start))
        assert (start.env["PLACE"], none) == ("rank 0 of round 3 of job j, 4 cores", [])

    on_fleet(main)


def test_a_host_whose_agent_is_gone_holds_no_port() -> None:
    async def main(fleet: FakeFleet) -> None:
        (b,) = await fleet.has("b")
        await fleet.order(A, B, hosts=("a", "b"))
        assert fleet.story.of(A) == ["not started"]
        assert "host a no longer has an agent" in fleet.story.told[0][2]
        assert len(b.of(Start)) == 1

    on_fleet(main)


def test_a_port_that_could_not_be_held_is_asked_for_again_with_the_next_start() -> None:
    """Though no round has been formed meanwhile: the ports of others may be free again, or another agent be there."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A, A1, hosts=("a",), round_id=0)
        agent.say(PortHeld(1, 0, "all are taken"))
        await rest()
        assert [what for what, _, _ in fleet.story.told] == ["not started"] * 2
        again = WorkerId("a", 0, 1), WorkerId("a", 1, 1)
        await fleet.order(*again, hosts=("a",), round_id=0)
        assert [hold.generation for hold in agent.of(HoldPort)] == [1, 2]
        agent.say(PortHeld(2, 5000, ""))
        await rest()
        assert [start.worker for start in agent.of(Start)] == [worker.key for worker in again]

    on_fleet(main)


def test_an_agent_that_is_lost_or_stopped_holds_no_port() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, _ = await fleet.has("a", "b")
        await fleet.order(A, hosts=("a", "b"))
        a.link.lose("cut off")
        await rest()
        assert fleet.story.told == [("not started", A, "LaunchError: cannot hold a port for rank 0: cut off")]
        await fleet.order(B, hosts=("b", "a"))
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.1)
        assert "its agent did not hold a port for generation 2" in fleet.story.told[1][2]

    on_fleet(main)


def test_nobody_is_started_where_the_job_ends_before_a_port_is_held() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        await fleet.order(A, hosts=("a",))
        stopping = asyncio.ensure_future(fleet.workers.stop_all(10.0))
        await rest()
        agent.say(PortHeld(1, 5000, ""))
        await stopping
        await rest()
        assert agent.of(Start) == []
        assert fleet.story.told == []

    on_fleet(main)


def test_who_waits_for_the_port_of_a_generation_that_another_has_followed_meets_there() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await fleet.order(A, hosts=("a", "b"), round_id=1)
        await fleet.order(B, hosts=("b", "a"), round_id=2)
        assert (a.of(HoldPort), a.of(LetGo)) == ([HoldPort(1, [], 1)], [LetGo(1)])
        a.say(PortHeld(1, 5000, ""))
        b.say(PortHeld(2, 6000, ""))
        await rest()
        places = [start.env["PLACE"].rpartition(":")[2] for agent in (a, b) for start in agent.of(Start)]
        assert places == ["5000", "6000"]

    on_fleet(main)


def test_a_bug_of_the_listener_keeps_no_lost_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        await fleet.order(A, hosts=("a", "b"))
        await runs(fleet, b, B)
        fleet.story.fails_at = "lost"
        b.link.lose("a test")
        assert [type(error) for error in fleet.listener.errors] == [ZeroDivisionError]
        assert fleet.fleet.link_of("b") is None
        await rest()
        assert fleet.remote.hosts() == ["a", "b", "b"], "another is wanted"
        fleet.listener.errors.clear()
        closing = asyncio.ensure_future(fleet.fleet.close())
        await a.leaves()
        await closing

    on_fleet(main)


@pytest.mark.parametrize("where", ["started", "dying", "exited"])
def test_a_bug_of_the_listener_reaches_the_net_and_loses_no_process(where: str) -> None:
    async def main(fleet: FakeFleet) -> None:
        errors = fleet.listener.errors
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        (agent,) = await fleet.has("a")
        fleet.story.fails_at = where
        await runs(fleet, agent)
        if where == "dying":
            agent.say(Dying(A.key, None, "is dumping core", []))
        if where == "exited":
            agent.say(Exited(A.key, 1, []))
        await rest()
        assert [type(error) for error in errors] == [ZeroDivisionError]
        errors.clear()
        fleet.story.fails_at = ""
        stopping = asyncio.ensure_future(fleet.workers.stop_all(10.0))
        await rest()
        assert (len(agent.of(Stop)), agent.transport.is_closed) == (int(where != "exited"), False)
        agent.say(*([] if where == "exited" else [Exited(A.key, -15, [])]), Finished(A.key))
        await stopping
        await rest()
        assert dict(fleet.workers.living) == {}
        assert not fleet.workers.has_workers(agent.link)

    on_fleet(main)
