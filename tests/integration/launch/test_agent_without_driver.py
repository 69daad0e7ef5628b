"""An agent whose driver dies, and another comes in its place: at once, late, never, an earlier one, or two at once.

For drivers with a journal. Without one an agent ends with its driver: see test_agent.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.codec import encode
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.control import Leave, Order
from elastic_driver.rendezvous.agent_messages import (
    Dying,
    Exited,
    Finished,
    Heard,
    KillAll,
    Leaves,
    Levels,
    NotStarted,
    Output,
    PortHeld,
    Prepare,
    Prepared,
    Ready,
    Redrawn,
    Round,
    Running,
    Started,
    Stop,
    Warning,
    WorkerLevel,
    WorkerPhase,
)
from elastic_driver.system.local_socket import SocketFolder, connect, url_of
from elastic_driver.system.process_name import place_of_sockets
from tests.support.processes.agents import A, B, FakeDriver, Scene, act, gone, scene
from tests.support.processes.hub import WORKERS, Hub

pytestmark = pytest.mark.integration

SLEEP = "import time; print('sleeps', flush=True); time.sleep(600)"
BAR = "import sys, time; sys.stderr.write('\\r50%'); sys.stderr.flush(); time.sleep(600)"
TELLS = "import sys; sys.stdin = open(sys.argv[1]); print(sys.stdin.readline(), flush=True); sys.exit(3)"


@asynccontextmanager
async def job(folder: Path, **more: Any) -> AsyncIterator[Scene]:
    """A scene whose driver has a journal."""
    facts = {"epoch": 1, "driver": "first", "driver_timeout_s": 600.0, "place": place_of_sockets()} | more
    async with scene(folder, **facts) as one:
        yield one


@asynccontextmanager
async def successors(one: Scene) -> AsyncIterator[list[FakeDriver]]:
    """Those that the test puts there are ended."""
    made: list[FakeDriver] = []
    try:
        yield made
    finally:
        for driver in made:
            await driver.deafen()
            for link in driver.links.values():
                link.close("the test is over")


async def take_over(one: Scene, made: list[FakeDriver], epoch: int, driver: str = "", **more: Any) -> FakeDriver:
    """Another driver has the job, at the port of the one before, which is dead."""
    made.append(one.driver.successor(epoch, driver, **more))
    await made[-1].listen()
    return made[-1]


def worker_levels(driver: FakeDriver) -> dict[str, WorkerLevel]:
    (levels,) = driver.of(Levels)
    return {each.worker: each for each in levels.workers}


def test_workers_run_on_and_another_driver_has_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.writes("sleeps")
            one.driver.tell(Round(4))
            channel = one.driver.link._channel
            await one.driver.until(lambda: channel.is_seen(channel.last), "that it is taken")
            await one.driver.deafen()
            second = await take_over(one, made, 2)
            levels = await second.hears(Levels)
            assert second.said[0] is levels
            level = WorkerLevel(A.key, WorkerPhase.RUNS, process.pid, "0", 0, leaving=False, exiting=False)
            assert levels == Levels([level], 4, 0, levels.alone_s)
            assert levels.alone_s > 0
            second.tell(Stop(A.key, 30.0))
            assert (await second.hears(Exited, A)).returncode == -signal.SIGTERM
            await second.hears(Finished, A)
            second.start(["true"], B)
            assert (await second.hears(Exited, B)).returncode == 0
            hellos = [link.facts.hello for link in second.links.values()]
            assert len(hellos) == 1
            await Scene.ends_well(Scene(tmp_path, second), agent)

    act(main)


def test_another_driver_is_told_of_a_bar_that_stands_still(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, bars="all") as one, successors(one) as made:
            await one.ready()
            one.driver.python(BAR)
            assert (await one.driver.hears(Redrawn, A)).blob == b"[0]<stderr>:50%\n"
            channel = one.driver.link._channel
            await one.driver.until(lambda: channel.is_seen(channel.last), "that it is taken")
            await one.driver.deafen()
            second = await take_over(one, made, 2, bars="all")
            again = await second.hears(Redrawn, A)  # at once, not as the line that follows after 10 s
            assert (again.is_line, again.blob) == (False, b"[0]<stderr>:50%\n")
            second.tell(Stop(A.key, 30.0))
            await second.hears(Finished, A)

    act(main)


def test_it_says_which_driver_has_welcomed_it_last(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            await one.ready()
            assert (one.driver.link.facts.hello.epoch, one.driver.link.facts.hello.driver) == (0, "")
            said = await hellos_of(one.driver)
            one.driver.cut(one.driver.link)
            await one.driver.until(lambda: said, "a hello")
            assert said[0] == (True, 1, "first")
            await one.driver.deafen()
            second = await take_over(one, made, 5)
            more = await hellos_of(second)
            await second.until(lambda: second.links and second.link.connected, "the agent")
            assert more[0] == (True, 1, "first")
            second.cut(second.link)
            await second.until(lambda: len(more) > 1, "it again")
            assert more[1] == (True, 5, "driver 5")
            assert len(second.of(Levels)) == 1, "the same driver is not told again"

    act(main)


async def hellos_of(driver: FakeDriver) -> list[tuple[bool, int, str]]:
    """What agents say first of whom they know, from now on."""
    said: list[tuple[bool, int, str]] = []
    known = driver.known

    def asked(agent: str) -> Any:
        link = known(agent)
        if link is not None:
            comes_from = link.comes_from

            def noted(hello: Any, peer: str, ours: str) -> None:
                said.append((hello.resumes, hello.epoch, hello.driver))
                comes_from(hello, peer, ours)

            link.comes_from = noted  # type: ignore[method-assign]
        return link

    driver.known = asked  # type: ignore[method-assign]
    return said


def test_what_nobody_has_kept_is_said_again_behind_the_levels(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            agent = await one.ready()
            mark = tmp_path / "mark"
            os.mkfifo(mark)
            one.driver.python(TELLS, str(mark))
            await one.driver.runs()
            one.driver.python(SLEEP, worker=B)
            await one.driver.runs(B)
            await one.driver.deafen()
            await asyncio.to_thread(mark.write_text, "while nobody was there\n")
            # Its end is known here before anybody comes; so it stands in the levels, and comes behind them.
            await until_dead(one, A)
            second = await take_over(one, made, 2)
            await second.hears(Finished, A)
            levels = worker_levels(second)
            assert levels[A.key].phase is WorkerPhase.ENDED
            assert levels[B.key].phase is WorkerPhase.RUNS
            of = [each for each in second.said if getattr(each, "worker", "") == A.key]
            # What it has written may come in pieces.
            kinds = dict.fromkeys(type(each) for each in of if not isinstance(each, Dying))
            assert list(kinds) == [Output, Exited, Finished]
            assert b"while nobody was there" in second.output()
            assert (await second.hears(Exited, A)).returncode == 3
            assert second.said.index(second.of(Levels)[0]) < second.said.index(of[0])
            last = WorkerId("a", 2, 0)
            second.start(["true"], last)  # with which it says what it has taken
            await second.hears(Exited, last)
            await second.deafen()
            made.append(second.successor(3))
            await made[-1].listen()
            third = made[-1]
            await third.hears(Levels)
            assert A.key not in worker_levels(third), "the second has taken it"
            third.tell(Stop(B.key, 30.0))
            await third.hears(Finished, B)
            await Scene.ends_well(Scene(tmp_path, third), agent)

    act(main)


async def until_dead(one: Scene, worker: WorkerId) -> None:
    """Blocks until nothing is left of the worker's process."""
    pid = one.driver.of(Started, worker)[0].pid
    await one.driver.until(lambda: not psutil.pid_exists(pid), "its end")


def test_levels_of_the_host_come_before_what_has_happened(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            await one.ready()
            one.driver.tell(Prepare(["true"], {}))
            await one.driver.hears(Prepared)
            await one.driver.deafen()
            leave(one)
            second = await take_over(one, made, 2)
            leaves = await second.hears(Leaves)
            assert leaves.within_s is None
            kinds = [type(each) for each in second.said if not isinstance(each, Heard)]
            assert kinds[:3] == [Levels, Prepared, Leaves]
            assert second.of(PortHeld) == []
            assert second.of(Warning) == []

    act(main)


def leave(one: Scene) -> None:
    """Has the agent leave. Nobody answers until it has left: the order stays open."""
    (path,) = (one.folder / "elasticrun").glob("agent-*.sock")
    with connect(path, 150.0) as sock:
        sock.sendall(encode(Order, Leave("by the test", None)) + b"\n")


def test_a_driver_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """The lease is over several times, and each refusal renews it."""

    async def main() -> None:
        async with job(tmp_path, agent_timeout_s=6.0) as one, successors(one) as made:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            await asyncio.sleep(14.0)
            assert process.is_running()
            assert agent.popen.poll() is None
            second = await take_over(one, made, 2)
            assert worker_levels_of(await second.hears(Levels)) == [A.key]

    act(main)


def worker_levels_of(levels: Levels) -> list[str]:
    return [each.worker for each in levels.workers]


def test_without_a_journal_nobody_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=3.0, epoch=1, driver="first") as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            code, text = await agent.ends()
            assert code == 1
            assert "cannot reach the driver" in text
            await gone([process])

    act(main)


def test_who_never_comes_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, agent_timeout_s=3.0, driver_timeout_s=7.0) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            began = asyncio.get_running_loop().time()
            await one.driver.deafen()
            code, text = await agent.ends()
            assert asyncio.get_running_loop().time() - began > 6.0
            assert code == 1
            assert "cannot reach the driver: no other driver has taken over within 7 s" in text
            await gone([process])

    act(main)


def test_a_network_that_is_silent_renews_nothing(tmp_path: Path) -> None:
    """A driver that is cut off may live, and go on without this host."""

    async def main() -> None:
        async with job(tmp_path, agent_timeout_s=3.0) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            # It takes connections, and says nothing on them.
            await one.driver.deafen()
            with socket.create_server(("127.0.0.1", one.driver.port), backlog=100):
                code, text = await agent.ends()
                assert code == 1
                assert "cannot reach the driver" in text
                await gone([process])

    act(main)


def test_a_tunnel_that_ends_says_nothing_of_the_driver(tmp_path: Path) -> None:
    """What refuses on this machine in the name of another."""

    async def main() -> None:
        async with job(tmp_path, agent_timeout_s=3.0, place="another machine") as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            code, text = await agent.ends()
            assert code == 1
            assert "cannot reach the driver" in text
            await gone([process])

    act(main)


def test_an_earlier_driver_is_not_obeyed(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, epoch=4) as one, successors(one) as made:
            await one.ready()
            one.driver.python(SLEEP)
            await one.driver.runs()
            await one.driver.deafen()
            for epoch, name in ((3, "an earlier one"), (4, "of a copy"), (0, "without a journal")):
                other = await take_over(one, made, epoch, name)
                said = await hellos_of(other)
                await other.until(lambda: len(said) + len(other.superseded_by) > 1, "that it tries on")  # noqa: B023 - is called here
                assert other.said == []
                await other.deafen()
            await take_over_again(one, made)

    act(main)


async def take_over_again(one: Scene, made: list[FakeDriver]) -> None:
    """A later driver is obeyed, by agents that have met others."""
    last = await take_over(one, made, 5)
    assert worker_levels_of(await last.hears(Levels)) == [A.key]


def test_an_earlier_drivers_refusal_ends_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, epoch=4) as one, successors(one) as made:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            other = one.driver.successor(3)
            other.before = None  # it knows nothing of the agent, and refuses it
            made.append(other)
            await other.listen()
            await other.until(lambda: len(other.superseded_by) > 1, "that it tries on")
            assert process.is_running()
            assert agent.popen.poll() is None
            await other.deafen()
            await take_over_again(one, made)

    act(main)


def test_a_later_drivers_refusal_ends_the_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            other = one.driver.successor(2)
            other.before = None
            made.append(other)
            await other.listen()
            code, text = await agent.ends()
            assert code == 1
            assert "rejected this agent when it reconnected" in text
            await gone([process])

    act(main)


def test_of_two_that_live_the_later_one_is_obeyed(tmp_path: Path) -> None:
    """The earlier one is stopped, and goes on when the other has the job."""

    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            with closing(SocketFolder.new([tmp_path])) as folder:
                url = url_of(folder.path / "driver.sock")
                await one.driver.listen_here(folder.listen("driver.sock"))
                await one.ready(one.driver.bootstrap(urls=(url,)))
                one.driver.python(SLEEP)
                process = await one.driver.runs()
                old = one.driver.freeze(one.driver.link)
                broken: list[str] = []
                old._on_lost = broken.append
                second = one.driver.successor(2)
                second.port = 0
                made.append(second)
                await second.listen()
                await second.listen_here(folder.listen("driver.sock"))
                await second.hears(Levels)
                one.driver.resume(one.driver.link)
                old.write(1 + one.driver.link._channel.last, 0, 0, [KillAll().message().pack()])
                await one.driver.until(lambda: broken, "that the old connection is cut")
                second.start(["true"], B)
                assert (await second.hears(Exited, B)).returncode == 0
                assert process.is_running()
                assert second.of(Exited, A) == []

    act(main)


def test_an_agent_whose_workers_have_ended_waits_to_tell_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, agent_timeout_s=4.0) as one, successors(one) as made:
            await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            process.kill()
            await asyncio.sleep(6.0)
            second = await take_over(one, made, 2)
            assert (await second.hears(Exited, A)).returncode == -signal.SIGKILL
            await second.hears(Finished, A)
            assert worker_levels(second)[A.key].phase is WorkerPhase.ENDED

    act(main)


def test_what_could_not_be_started_is_told_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path) as one, successors(one) as made:
            await one.ready()
            one.driver.pause(one.driver.link)
            one.driver.start(["/nonexistent/program"])
            await one.driver.deafen()
            second = await take_over(one, made, 2)
            levels = await second.hears(Levels)
            if levels.workers:  # else the order was lost with the driver
                await second.hears(NotStarted, A)

    act(main)


# --- a round that breaks meanwhile ----------------------------------------------------------------------------------

TRAINS = """
import numpy, os, sys, time
import elastic_driver as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    print("begins as", hvd.rank(), "of", hvd.size(), flush=True)
    while not hvd.allreduce(numpy.array([float(os.path.exists(sys.argv[1]))]), op=hvd.Max)[0]:
        state.step += 1
        state.commit()
        if state.step == 1:
            print("has a state", flush=True)
        time.sleep(0.02)
    print("ends after", state.step, flush=True)

train(hvd.elastic.ObjectState(step=0))
"""


def test_members_wait_for_their_next_round_until_another_driver_has_it(tmp_path: Path) -> None:
    """One of three is killed while there is no driver. The others go on in the next round, with their state."""

    async def main() -> None:
        async with job(tmp_path, kind=Hub) as one, successors(one) as made:
            hub = one.driver
            assert isinstance(hub, Hub)
            for host in ("a", "b"):
                await one.ready(hub.bootstrap(host))
            over = tmp_path / "over"
            hub.launch(TRAINS, str(over))
            stays, dies, other = WORKERS
            for worker in WORKERS:
                await hub.writes("has a state", worker)
            await hub.until(lambda: len(hub.of(Running)) >= 3, "that they train")
            pid = hub.of(Started, dies)[0].pid
            await hub.deafen()
            psutil.Process(pid).kill()
            await hub.until(lambda: not psutil.pid_exists(pid), "its end")
            second = hub.successor(2)
            assert isinstance(second, Hub)
            second.members = (stays, other)
            made.append(second)
            await second.listen()
            for worker, rank in ((stays, 0), (other, 1)):
                await second.writes(f"begins as {rank} of 2", worker)
            assert (await second.hears(Exited, dies)).returncode == -signal.SIGKILL
            assert sorted(each.round_id for each in second.of(Levels)) == [1, 1]
            phases = {each.worker: each.phase for levels in second.of(Levels) for each in levels.workers}
            assert (phases[stays.key], phases[other.key]) == (WorkerPhase.RUNS, WorkerPhase.RUNS)
            firsts = [type(each) for each in second.said]
            assert firsts[0] is Levels
            assert firsts.index(Running) < firsts.index(Ready)
            assert {(each.request.worker, each.request.after_round) for each in second.of(Ready)} == {
                (stays, 1),
                (other, 1),
            }
            over.touch()
            for worker in (stays, other):
                assert (await second.hears(Exited, worker)).returncode == 0, second.output(worker, "stderr")
            steps = {second.output(worker).decode().rpartition("ends after ")[2] for worker in (stays, other)}
            assert len(steps) == 1
            assert int(steps.pop()) > 0

    act(main)


# --- others on the machine ------------------------------------------------------------------------------------------


def test_a_new_agent_obeys_no_earlier_driver_than_the_others_of_its_job_here(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path, epoch=4) as one, successors(one) as made:
            await one.ready(one.driver.bootstrap("a", job="j"))
            other = one.driver.successor(3)
            other.port = 0
            made.append(other)
            await other.listen()
            late = one.agent(other.bootstrap("b", job="j", first_s=8.0))
            code, text = await late.ends()
            assert code == 1
            assert "an earlier driver of the job answered (epoch 3; this agent knows epoch 4)" in text
            assert one.driver.link.connected
            # Of another job there may be any.
            third = FakeDriver(tmp_path / "work", epoch=1, driver="another job's")
            made.append(third)
            await third.listen()
            one.agent(third.bootstrap("b", job="j"))
            await third.until(lambda: third.links, "the agent")

    act(main)
