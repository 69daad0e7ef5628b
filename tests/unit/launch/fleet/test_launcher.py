"""Workers on whatever host: what agents are told, and what comes of what they say."""

from __future__ import annotations

import asyncio

import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import RemoteWorker
from elastic_driver.launch.launcher import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import (
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
    Prepare,
    Prepared,
    Spared,
    Start,
    Started,
    Stop,
    Warmed,
    WarmUp,
    Warning,
)
from tests.support.fakes.fleet_fakes import AGENT_TIMEOUT_S, FakeAgent, FakeFleet, on_fleet, rest

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


def start(fleet: FakeFleet, worker: WorkerId = A) -> asyncio.Task[RemoteWorker]:
    return asyncio.create_task(
        fleet.launcher.start(worker, ["train"], {"HERE": "1", "ALL": "2"}, label="0", rank_at_launch=3)
    )


async def runs(fleet: FakeFleet, agent: FakeAgent, worker: WorkerId = A) -> RemoteWorker:
    task = start(fleet, worker)
    await rest()
    agent.say(Started(worker.key, 5))
    return await task


def test_a_worker_starts_writes_and_ends() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        task = start(fleet)
        await rest()
        assert agent.of(Start) == [Start(A.key, ["train"], {"ALL": "2"}, "0", 3)]
        agent.say(Started(A.key, 5))
        worker = await task
        assert (worker.pid, worker.label) == (5, "0")
        agent.say(Output(A.key, "stderr", b"one\n"), Output(A.key, "rubbish", b"two\n"))
        agent.say(Dying(A.key, 1, "exited with code 1", ["last"]))
        assert worker.dying.result().returncode == 1  # type: ignore[union-attr]
        agent.say(Exited(A.key, 1, ["last"]))
        assert worker.exited.result().returncode == 1
        assert list(worker.last_lines) == ["last"]
        assert not worker.finished.done()
        agent.say(Finished(A.key))
        assert (await worker.wait()).returncode == 1
        assert fleet.sink.began == [(A, 5, 3)]
        assert fleet.sink.written == [(A, "stderr", b"one\n"), (A, "stdout", b"two\n")]
        assert fleet.sink.ended == [A]

    on_fleet(main)


def test_workers_here_have_the_drivers_own_variables() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("here")
        task = start(fleet, WorkerId("here", 0, 0))
        await rest()
        assert agent.of(Start)[0].env == {"HERE": "1", "ALL": "2"}
        task.cancel()
        await rest()

    on_fleet(main)


def test_started_and_dead_in_one_frame() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        task = start(fleet)
        await rest()
        agent.say(Started(A.key, 5), Exited(A.key, 3, []), Finished(A.key))
        worker = await task
        assert worker.exited.result().returncode == 3
        assert not fleet.launcher.has_workers(agent.link)

    on_fleet(main)


def test_a_worker_that_can_not_be_started() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        for bad_command, kind in ((False, LaunchError), (True, CommandNotFoundError)):
            task = start(fleet)
            await rest()
            agent.say(NotStarted(A.key, "a reason", bad_command))
            with pytest.raises(kind, match="a reason"):
                await task
        assert not fleet.launcher.has_workers(agent.link)

    on_fleet(main)


def test_a_worker_is_started_by_the_agent_that_has_a_host_after_a_broken_connection() -> None:
    """The one that was there, or another that has joined under its name; one that is gone fails no start."""

    async def main(fleet: FakeFleet) -> None:
        first = fleet.arrives("j", ticket=False)
        await rest()
        worker = WorkerId("j", 0, 0)
        first.hang_up()
        task = start(fleet, worker)
        await rest()
        first.connect()
        await asyncio.sleep(0.1)
        assert first.of(Start)
        first.say(Started(worker.key, 5), Exited(worker.key, 0, []), Finished(worker.key))
        await task
        first.hang_up()
        second = fleet.arrives("j", ticket=False)
        again = WorkerId("j", 0, 1)
        task = start(fleet, again)
        await asyncio.sleep(5)
        assert (len(first.of(Start)), len(second.of(Start))) == (1, 1)
        second.say(Started(again.key, 6))
        assert (await task).pid == 6

    on_fleet(main)


def test_no_worker_starts_on_a_host_without_an_agent_or_at_the_end() -> None:
    async def main(fleet: FakeFleet) -> None:
        with pytest.raises(LaunchError, match="its host has no agent any more"):
            await start(fleet)
        (agent,) = await fleet.has("a")
        closing = asyncio.create_task(fleet.launcher.close())
        await rest()
        with pytest.raises(LaunchError, match="the job is ending"):
            await start(fleet)
        await agent.leaves()
        await closing

    on_fleet(main)


def test_with_an_agent_its_workers_are_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        agents = await fleet.has("a", "b")
        worker, other = await runs(fleet, agents[0]), await runs(fleet, agents[1], B)
        starting = start(fleet, WorkerId("a", 1, 0))
        killing = asyncio.create_task(worker.kill_hung(stacks_s=1.0, exits=False))
        await rest()
        agents[0].link.lose("a test")
        assert str(worker.exited.result()) == "lost with its host"
        assert worker.finished.result().returncode == -9
        assert fleet.sink.ended == [A, WorkerId("a", 1, 0)], "who reads their output need not wait for more"
        with pytest.raises(LaunchError, match=r"cannot start worker a\[1\]: a test"):
            await starting
        assert await killing is True
        assert not other.exited.done()
        assert fleet.launcher.cores("a") == 1
        assert fleet.launcher.cores("b") == 4

    on_fleet(main)


def test_an_agent_that_is_stopped_before_it_has_started_a_worker_is_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a")
        task = start(fleet)
        await asyncio.sleep(AGENT_TIMEOUT_S + 1.1)
        with pytest.raises(LaunchError, match="its agent does not start worker"):
            await task

    on_fleet(main)


def test_a_start_that_nobody_waits_for_is_stopped() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        task = start(fleet)
        await rest()
        task.cancel()
        await rest()
        assert agent.of(Stop) == [Stop(A.key, 0.0)]
        agent.say(Started(A.key, 5), Exited(A.key, -15, []), Finished(A.key))
        assert not fleet.launcher.has_workers(agent.link)

    on_fleet(main)


def test_what_an_agent_says_of_others_workers_changes_nothing() -> None:
    async def main(fleet: FakeFleet) -> None:
        agents = await fleet.has("a", "b")
        worker = await runs(fleet, agents[0])
        starting = start(fleet, WorkerId("a", 1, 0))
        await rest()
        key = WorkerId("a", 1, 0).key
        agents[1].say(
            Output(A.key, "stdout", b"x\n"),
            Dying(A.key, 1, "", []),
            Exited(A.key, 1, []),
            Finished(A.key),
            Spared(A.key),
            Started(key, 9),
            NotStarted(key, "no", bad_command=True),
        )
        await rest()
        assert not worker.exited.done()
        assert not starting.done()
        assert fleet.sink.written == []
        starting.cancel()
        await rest()

    on_fleet(main)


def test_a_worker_that_has_not_exited_is_not_finished() -> None:
    """Else nobody would ever hear of its end."""

    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        worker = await runs(fleet, agent)
        agent.say(Finished(A.key))
        assert agent.transport.is_closed
        assert fleet.launcher.has_workers(agent.link)
        await asyncio.sleep(1.1)
        assert worker.finished.done()

    on_fleet(main)


def test_orders_go_to_the_workers_agent() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        worker = await runs(fleet, agent)
        worker.label = "1"
        worker.label = "1"
        worker.kill()
        stopping = asyncio.create_task(worker.stop(2.0))
        killing = [asyncio.create_task(worker.kill_hung(stacks_s=2.0, exits=True)) for _ in range(2)]
        await rest()
        assert agent.of(Labels) == [Labels({A.key: "1"})]
        assert agent.of(Kill) == [Kill(A.key, 0.0, exits=False), Kill(A.key, 2.0, exits=True)]
        assert agent.of(Stop) == [Stop(A.key, 2.0)]
        agent.say(Spared(A.key))
        assert [await each for each in killing] == [False, False]
        agent.say(Exited(A.key, -15, []), Finished(A.key))
        assert (await stopping).returncode == -15
        assert await worker.kill_hung(stacks_s=0.0, exits=False) is False
        worker.kill()
        await worker.stop(1.0)
        await rest()
        assert (len(agent.of(Kill)), len(agent.of(Stop))) == (2, 1)

    on_fleet(main)


def test_all_agents_warm_up_once_also_those_that_come_later() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        for _ in range(2):
            fleet.launcher.warm_up()
        later = fleet.arrives("j", ticket=False)
        await rest()
        assert (agent.of(WarmUp), later.of(WarmUp)) == ([WarmUp()], [WarmUp()])
        agent.say(Warmed(7, 0.5), Warning("a warning"))
        assert fleet.warmed == [(7, 0.5)]
        assert fleet.warnings == ["host a: a warning"]

    on_fleet(main)


def test_a_host_without_workers_imports_what_they_import_once() -> None:
    async def main(fleet: FakeFleet) -> None:
        busy, fresh = await fleet.has("a", "b")
        samples: list[str] = []

        def prepares(name: str) -> bool:
            def sample() -> tuple[list[str], dict[str, str]]:
                samples.append(name)
                return ["python", "train.py"], {"NAME": name}

            return fleet.launcher.prepare(name, sample)

        await runs(fleet, busy)
        assert [prepares(name) for name in ("a", "b", "b", "nowhere")] == [False, True, True, False]
        assert samples == ["b"]
        await rest()
        (order,) = fresh.of(Prepare)
        assert (order.command, busy.of(Prepare)) == (["python", "train.py"], [])
        changes = fleet.fleet.changes.count
        fresh.say(Prepared())
        assert fleet.fleet.changes.count > changes
        assert not prepares("b")
        # Another agent of that name knows nothing of it.
        fresh.link.lose("a test")
        await rest()
        again = fleet.arrives("b")
        assert prepares("b")
        await rest()
        assert len(again.of(Prepare)) == 1

    on_fleet(main)


def test_workers_of_one_machine_listen_on_loopback() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("here")
        assert fleet.launcher.addresses(["here", "too"]) == {"here": "127.0.0.1", "too": "127.0.0.1"}
        await fleet.fleet.want(["here", "a"])
        await rest()
        fleet.arrives("a", address="10.0.0.2", peer="10.0.0.2")
        # The driver's own machine is where the other has reached it.
        assert fleet.launcher.addresses(["here", "a"]) == {"here": "10.0.0.9", "a": "10.0.0.2"}
        assert fleet.launcher.addresses(["a"]) == {"a": "127.0.0.1"}

    on_fleet(main, local_names=("here", "too"))


def test_a_host_without_an_address_for_others_starts_no_workers_beside_them() -> None:
    async def main(fleet: FakeFleet) -> None:
        agents = await fleet.has("a")
        await runs(fleet, agents[0])  # while it is alone
        await fleet.fleet.want(["a", "b"])
        await rest()
        fleet.arrives("b", peer="10.0.0.2", address="10.0.0.2")
        with pytest.raises(LaunchError, match="host a has no address"):
            await start(fleet, WorkerId("a", 1, 0))
        # A round with the worker that it has is no error of the driver's.
        assert fleet.launcher.addresses(["a", "b"]) == {"a": "10.0.0.1", "b": "10.0.0.2"}
        assert fleet.warnings == ["host a has no address"]

    on_fleet(main, no_address=("a",))


def test_a_port_is_held_until_it_is_let_go() -> None:
    async def main(fleet: FakeFleet) -> None:
        a, b = await fleet.has("a", "b")
        holding = asyncio.create_task(fleet.launcher.hold_port("b", 7))
        await rest()
        assert (a.of(HoldPort), b.of(HoldPort)) == ([], [HoldPort(7, [])])
        a.say(PortHeld(7, 1234, ""))  # nobody has asked it
        b.say(PortHeld(8, 1234, ""))  # nor for that one
        await rest()
        assert not holding.done()
        b.say(PortHeld(7, 4321, ""), PortHeld(7, 4322, ""))
        assert await holding == 4321
        fleet.launcher.let_go("b", 7)
        fleet.launcher.let_go("c", 7)
        await rest()
        assert (a.of(LetGo), b.of(LetGo)) == ([], [LetGo(7)])

    on_fleet(main)


def test_a_port_that_can_not_be_held() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        with pytest.raises(LaunchError, match="host c has no agent any more"):
            await fleet.launcher.hold_port("c", 1)
        for port, error in ((0, "all are taken"), (1 << 16, "")):
            holding = asyncio.create_task(fleet.launcher.hold_port("a", 2))
            await rest()
            agent.say(PortHeld(2, port, error))
            with pytest.raises(LaunchError, match=f"cannot hold a port for rank 0 on host a: {error}"):
                await holding
        lost = asyncio.create_task(fleet.launcher.hold_port("a", 3))
        silent = asyncio.create_task(fleet.launcher.hold_port("a", 4))
        await rest()
        link = fleet.fleet.link_of("a")
        assert link is not None
        link.lose("cut off")
        await rest()
        for one in (lost, silent):
            with pytest.raises(LaunchError, match="cut off"):
                await one

    on_fleet(main)


def test_an_agent_that_is_stopped_before_it_holds_a_port_is_lost() -> None:
    async def main(fleet: FakeFleet) -> None:
        await fleet.has("a")
        holding = asyncio.create_task(fleet.launcher.hold_port("a", 1))
        with pytest.raises(LaunchError, match="its agent does not hold a port for generation 1"):
            await asyncio.wait_for(holding, 4 * AGENT_TIMEOUT_S)

    on_fleet(main)


def test_a_traceback_that_is_in_the_error_file_only_is_among_the_last_words() -> None:
    async def main(fleet: FakeFleet) -> None:
        (agent,) = await fleet.has("a")
        worker = await runs(fleet, agent)
        file = '{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback\\n  File"}}}'
        agent.say(Exited(A.key, 1, ["loading"], file))
        await worker.exited
        assert worker.error_file == file
        assert worker.last_lines == ("Traceback", "  File", "ValueError: no")
        again = await runs(fleet, agent, WorkerId("a", 1, 0))
        agent.say(Exited(again.worker.key, 1, ["[rank1]: ValueError: no"], file))
        await again.exited
        assert again.last_lines == ("[rank1]: ValueError: no",)

    on_fleet(main)
