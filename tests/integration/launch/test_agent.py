"""An agent as a real process, with real workers, under a driver that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.control import AgentHere, agents_here, end_alone, leave
from elastic_driver.launch.agent.workers import UNKEPT_BYTES
from elastic_driver.rendezvous.agent_messages import (
    NOTHING_GIVEN,
    Bye,
    Close,
    Dying,
    Exited,
    Finished,
    Kill,
    KillAll,
    Labels,
    Leaves,
    NotStarted,
    Output,
    Spared,
    Started,
    Stop,
    Warmed,
    WarmUp,
)
from elastic_driver.system.keeping import Keeping
from elastic_driver.system.local_socket import SocketFolder, url_of
from tests.support.processes import forked
from tests.support.processes.agents import PATIENCE_S, A, B, FakeDriver, Scene, act, gone, scene

pytestmark = pytest.mark.integration

SLEEP = "import time; print('up', flush=True); time.sleep(1000)"


# --- processes -----------------------------------------------------------------------------------------------------


def test_a_worker_from_its_start_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, umask=0o027) as one:
            driver = one.driver
            agent = await one.ready()
            assert driver.link.facts.hello.pid == agent.popen.pid
            assert driver.link.facts.hello.cores == len(os.sched_getaffinity(0))
            driver.python(
                "import os, sys; print(os.getcwd(), os.environ['ELASTIC_DRIVER_WORKER'], oct(os.umask(0)));"
                "print('bad', file=sys.stderr); sys.exit(3)"
            )
            assert (await driver.hears(Exited, A)).returncode == 3
            assert (await driver.hears(Exited, A)).last_lines == ["bad"]
            await driver.hears(Finished, A)
            assert driver.output() == f"[0]<stdout>:{tmp_path / 'work'} {A.key} 0o27\n".encode()
            assert driver.output(stream="stderr") == b"[0]<stderr>:bad\n"
            kinds = [type(said) for said in driver.said if not isinstance(said, Output | Dying)]
            assert kinds == [Started, Exited, Finished]
            last_output = max(index for index, said in enumerate(driver.said) if isinstance(said, Output))
            assert last_output < driver.said.index(driver.of(Exited)[0]), "the news of a death comes after its words"
            await one.ends_well(agent)

    act(main)


def test_the_workers_socket_is_this_users_alone_and_goes_with_its_agent(tmp_path: Path) -> None:
    async def main() -> None:
        folders = []
        async with scene(tmp_path) as one, scene(tmp_path) as other:
            killed, agent = await one.ready(), await other.ready()
            for driver in (one.driver, other.driver):
                driver.python(f"import os; print(os.environ['ELASTIC_DRIVER_RENDEZVOUS'], flush=True); {SLEEP}")
                await driver.writes("\n")
                folders.append(Path(driver.output().decode().strip().partition("unix:")[2]).parent)
                assert (folders[-1] / "workers.sock").is_socket()
                assert folders[-1].stat().st_mode & 0o777 == 0o700
            process = await one.driver.runs()
            killed.popen.kill()
            await gone([process])
            await other.ends_well(agent)
            assert not folders[1].exists()
        async with scene(tmp_path) as one:
            await one.ends_well(await one.ready())
            assert not folders[0].exists()

    act(main)


def test_an_agent_of_its_machine_keeps_its_drivers_folder_from_being_removed(tmp_path: Path) -> None:
    async def main() -> None:
        folder = SocketFolder.new()
        with contextlib.closing(folder):
            async with scene(tmp_path) as one:
                await one.driver.listen_here(folder.listen("driver.sock"))
                agent = await one.ready(one.driver.bootstrap(urls=(url_of(folder.path / "driver.sock"),)))
                assert one.driver.link.facts.peer == "127.0.0.1"
                fcntl.flock(folder.fileno(), fcntl.LOCK_UN)  # as if the driver was dead
                with pytest.raises(BlockingIOError):
                    SocketFolder.at(folder.path, fcntl.LOCK_EX)
                await one.ends_well(agent)
                with contextlib.suppress(FileNotFoundError):  # another job's start has removed it by now: it was free
                    SocketFolder.at(folder.path, fcntl.LOCK_EX).close()

    act(main)


def test_workers_that_cannot_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            await one.ready()
            one.driver.start(["no-such-command-anywhere"])
            said = await one.driver.hears(NotStarted, A)
            assert said.bad_command
            assert "there is no such command" in said.error

    act(main)


def test_a_folder_that_the_host_does_not_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, cwd=tmp_path / "nowhere") as one:
            await one.ready()
            one.driver.start(["true"])
            said = await one.driver.hears(NotStarted, A)
            assert said.bad_command
            assert said.error == (
                f"cannot start workers on host a in the folder {tmp_path}/nowhere: No such file or directory"
            )

    act(main)


def test_stop_and_kill(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            driver.python(SLEEP)
            driver.python(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}", worker=B)
            await driver.writes("up")
            await driver.writes("up", B)
            driver.tell(Stop(A.key, 3600.0))
            assert (await driver.hears(Exited, A)).returncode == -signal.SIGTERM
            driver.tell(Stop(B.key, 0.05))
            assert (await driver.hears(Exited, B)).returncode == -signal.SIGKILL
            third, fourth = WorkerId("a", 0, 1), WorkerId("a", 1, 1)
            for worker in (third, fourth):
                driver.python(SLEEP, worker=worker)
                await driver.runs(worker)
            driver.tell(Kill(third.key, 0.0, exits=False))
            assert (await driver.hears(Exited, third)).returncode == -signal.SIGKILL
            driver.tell(KillAll())
            assert (await driver.hears(Finished, fourth)).worker == fourth.key

    act(main)


def test_an_order_for_a_worker_that_is_being_started(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            await one.ready()
            one.driver.python(SLEEP)
            one.driver.tell(Stop(A.key, 5.0))
            assert (await one.driver.hears(Exited, A)).returncode < 0
            await one.driver.hears(Finished, A)

    act(main)


def test_one_whose_script_has_ended_is_spared(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            await one.ready()
            one.driver.python(SLEEP)
            await one.driver.writes("up")
            one.driver.tell(Kill(A.key, 1.0, exits=True))
            await one.driver.hears(Spared, A)
            one.driver.tell(Kill(A.key, 1.0, exits=False))
            assert (await one.driver.hears(Exited, A)).returncode in (-signal.SIGABRT, -signal.SIGKILL)

    act(main)


def test_labels(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            driver.python(f"import signal; signal.signal(signal.SIGTERM, lambda *_: print('b', flush=True)); {SLEEP}")
            await driver.writes("up")
            driver.tell(Labels({A.key: "7", B.key: "8"}))
            driver.tell(Stop(A.key, 0.5))
            await driver.hears(Finished, A)
            assert driver.output() == b"[0]<stdout>:up\n[7]<stdout>:b\n"

    act(main)


def test_workers_are_forked_from_a_warmed_process(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "train.py").write_text("import os\nprint(os.getppid())\n")
        async with scene(tmp_path, warm=True, preload=("json",)) as one:
            driver = one.driver
            agent = await one.ready()
            driver.start([sys.executable, "train.py"])
            await driver.hears(Started, A)
            driver.tell(WarmUp())
            assert (await driver.hears(Warmed)).took_s > 0
            driver.start([sys.executable, "train.py"], B)
            await driver.hears(Finished, B)
            assert driver.output(B) == f"[0]<stdout>:{agent.popen.pid}\n".encode()
            await one.ends_well(agent)

    act(main)


def test_close_kills_what_runs_and_passes_on_its_last_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            await one.driver.writes("up")
            await one.ends_well(agent)
            assert [type(said) for said in one.driver.said[-3:]] == [Exited, Finished, Bye]

    act(main)


# --- output that the driver does not take ---------------------------------------------------------------------------

COUNT = """
import sys, pathlib
for number in range(int(sys.argv[1])):
    print(number, "x" * 1000, flush=True)
    pathlib.Path("reached").write_text(str(number))
"""


def numbers(driver: FakeDriver) -> list[int]:
    return [int(line.split()[0].partition(b":")[2]) for line in driver.output().splitlines()]


def test_a_driver_that_does_not_take_output_blocks_the_worker_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            driver.pause(driver.link)
            driver.python(COUNT, "2000")
            reached = tmp_path / "work" / "reached"

            def number() -> int:
                try:
                    return int(reached.read_text())
                except (OSError, ValueError):
                    return -1

            last = -2
            while number() != last or last < 0:  # until it stands still
                last = number()
                await asyncio.sleep(0.5)
            assert last < 1000, "what is on its way is bounded"
            driver.resume(driver.link)
            await driver.hears(Finished, A)
            assert numbers(driver) == list(range(2000))

    act(main)


@pytest.mark.parametrize("order", [pytest.param("none", marks=pytest.mark.release), "close"])
def test_with_a_journal_a_driver_that_takes_nothing_blocks_no_worker(tmp_path: Path, order: str) -> None:
    """What it writes is kept, on disk for the most part, and comes in order, before the news that nothing is left."""

    async def main() -> None:
        async with scene(tmp_path, driver_timeout_s=600.0) as one:
            driver = one.driver
            agent = await one.ready()
            driver.pause(driver.link)
            driver.python(COUNT, "4000")
            reached = tmp_path / "work" / "reached"
            async with asyncio.timeout(PATIENCE_S):
                while not reached.exists() or reached.read_text() != "3999":
                    await asyncio.sleep(0.05)
            if order == "close":
                driver.tell(Close())
            driver.resume(driver.link)
            await driver.hears(Bye if order == "close" else Finished)
            assert numbers(driver) == list(range(4000))
            kinds = [type(said) for said in driver.said]
            assert kinds.index(Finished) > max(index for index, kind in enumerate(kinds) if kind is Output)
            if order == "close":
                assert await agent.ends() == (0, "")
            else:
                await one.ends_well(agent)

    act(main)


def test_a_driver_that_keeps_nothing_yet_is_told_all_that_there_is_room_for(tmp_path: Path) -> None:
    """Its disk hangs. Output goes on, also beyond what may be on its way; when there is no room for more it waits."""

    async def main() -> None:
        async with scene(tmp_path) as one:
            driver, disk = one.driver, Keeping()
            driver.keepings = (disk,)
            driver.comes_of = lambda message: disk.comes() if isinstance(message, Output) else None
            await one.ready()
            driver.python("for n in range(100_000): print(f'{n:099d}')")
            # Beside their heads, which count too, and are many where it comes in small pieces.
            room = UNKEPT_BYTES // 4 * 3
            await driver.until(lambda: len(driver.output()) > room, "as much output as there is room for")
            assert driver.link.kept < driver.link.seen
            heard_at = driver.link._connection.heard_at  # type: ignore[union-attr]
            await driver.until(lambda: driver.link._connection.heard_at > heard_at, "a beat")  # type: ignore[union-attr]
            assert len(driver.output()) < UNKEPT_BYTES + (1 << 20), "of ten times that"
            while not driver.of(Finished):
                disk.keep(disk.came)
                before = len(driver.said)
                await driver.until(lambda before=before: len(driver.said) > before, "more")  # type: ignore[misc]
            assert [int(line.split(b":")[1]) for line in driver.output().splitlines()] == list(range(100_000))

    act(main)


def test_an_agent_whose_host_leaves_ends_when_the_ends_of_its_workers_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver, disk = one.driver, Keeping()
            driver.keepings = (disk,)
            driver.comes_of = lambda message: disk.comes() if isinstance(message, Exited) else None
            agent = await one.ready()
            driver.python("pass")
            await driver.hears(Finished, A)
            driver.tell(Close())
            heard_at = driver.link._connection.heard_at  # type: ignore[union-attr]
            await driver.until(lambda: driver.link._connection.heard_at > heard_at + 1, "beats")  # type: ignore[union-attr]
            assert not driver.of(Bye)
            disk.keep(1)
            assert await agent.ends() == (0, "")
            assert driver.of(Bye)

    act(main)


def test_a_death_comes_through_though_output_is_not_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            driver.python("import os, sys\nwhile 1: print('x' * 1000)")
            driver.python(SLEEP, worker=B)
            process = await driver.runs(B)
            await driver.writes("up", B)
            process.kill()
            assert (await driver.hears(Exited, B)).returncode == -signal.SIGKILL

    act(main)


# --- connections ----------------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_again_and_again_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            driver.python(COUNT, "1800")
            for wanted in range(300, 1500, 300):
                await driver.until(lambda wanted=wanted: len(numbers(driver)) > wanted, "more output")
                driver.cut(driver.link)
                await driver.until(lambda: driver.link.connected, "the agent dials in again")
            await driver.hears(Finished, A)
            assert numbers(driver) == list(range(1800))
            assert (driver.lost, len(driver.links)) == ([], 1)
            assert len(driver.of(Started)) == 1

    act(main)


@pytest.mark.parametrize(
    "data",
    [b"\0" * 64, b"\xff" * 64, b"HTTP/1.1 200 OK\r\n\r\n", b"\0\0\1\0" + bytes(256)],
    ids=["zeros", "ones", "http", "a frame"],
)
def test_rubbish_on_the_connection_costs_only_the_connection(tmp_path: Path, data: bytes) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            await one.ready()
            connection = driver.link._connection
            driver.rubbish(driver.link, data)
            await driver.until(
                lambda: driver.link.connected and driver.link._connection is not connection, "another connection"
            )
            driver.start(["true"])
            assert (await driver.hears(Exited, A)).returncode == 0

    act(main)


@pytest.mark.parametrize("joins", [True, False])
def test_a_driver_that_is_gone_takes_the_workers_along(tmp_path: Path, joins: bool) -> None:
    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one:
            agent = await one.ready(one.driver.joiner() if joins else None)
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            code, text = await agent.ends()
            assert code == 1
            assert "cannot reach the driver" in text
            assert text.endswith("; the workers on this host were killed\n") is joins
            await gone([process])

    act(main)


def test_an_agent_goes_by_the_jobs_lease_whatever_it_was_given(tmp_path: Path) -> None:
    """Else the driver would go on without a host that trains on by itself."""

    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one:
            agent = await one.ready(one.driver.joiner(agent_timeout_s=3600.0))
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            code, _ = await agent.ends()
            assert code == 1
            await gone([process])

    act(main)


def test_a_driver_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one:
            driver = one.driver
            agent = await one.ready()
            driver.python(SLEEP)
            process = await driver.runs()
            driver.pause(driver.link)
            await asyncio.sleep(9.0)  # its kernel acknowledges meanwhile
            assert process.is_running()
            assert agent.popen.poll() is None
            driver.resume(driver.link)
            driver.start(["true"], B)
            assert (await driver.hears(Exited, B)).returncode == 0
            assert len(driver.links) == 1
            await one.ends_well(agent)

    act(main)


def test_a_killed_agent_takes_its_workers_along(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready()
            child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
            one.driver.python(child)
            process = await one.driver.runs()
            await one.driver.until(lambda: one.driver.output().count(b"up") == 2, "both write")
            tree = [process, *process.children()]
            agent.popen.kill()
            await gone(tree)
            await one.driver.until(lambda: one.driver.lost, "the verdict")

    act(main)


def test_an_agent_on_the_drivers_machine_ends_with_the_drivers_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            owner = await asyncio.create_subprocess_exec("sleep", "1000")
            place = one.driver.bootstrap().owner  # none
            assert place == ""
            from elastic_driver.system.process_name import ProcessName

            name = str(ProcessName.of(owner.pid))
            agent = await one.ready(one.driver.bootstrap(owner=name))
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            owner.kill()
            await owner.wait()
            assert await agent.ends() == (1, "elastic_driver agent: the driver has died\n")
            await gone([process])
            late = one.agent(one.driver.bootstrap(owner=name))
            assert await late.ends() == (1, "elastic_driver agent: the driver has died\n")

    act(main)


def test_an_agent_that_was_given_up_ends_its_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            one.driver.link.lose("the test gives it up")
            code, text = await agent.ends()
            assert code == 1
            assert "the driver has given up on this agent" in text
            await gone([process])

    act(main)


def test_one_that_has_joined_and_was_given_up_begins_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            driver = one.driver
            agent = await one.ready(driver.joiner())
            driver.python(SLEEP)
            process = await driver.runs()
            first = driver.link
            first.lose("the test gives it up")
            await driver.until(lambda: driver.link is not first, "another agent")
            await gone([process])
            driver.start(["true"], B)
            assert (await driver.hears(Exited, B)).returncode == 0
            driver.tell(Close())
            code, text = await agent.ends()
            assert code == 0
            assert "the driver rejected this agent when it reconnected" in text

    act(main)


def test_one_whose_driver_was_started_again_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one, successor_of(one) as begin:
            agent = await one.ready()
            await begin()
            code, text = await agent.ends()
            assert code == 1
            assert "the driver is gone: another process now answers at its address" in text

    act(main)


def test_one_that_has_joined_joins_the_driver_that_was_started_again(tmp_path: Path) -> None:
    """At the same address, with the same secret; long before its lease with the old one ends."""

    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=300.0) as one, successor_of(one) as begin:
            agent = await one.ready(one.driver.joiner())
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            second = await begin()
            await second.until(lambda: second.links, "it has joined")
            await gone([process])
            second.start(["true"], B)
            assert (await second.hears(Exited, B)).returncode == 0
            second.tell(Close())
            code, text = await agent.ends()
            assert code == 0
            assert "the driver there was started later" in text

    act(main)


def test_one_that_was_dialled_knows_no_other_driver(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one, successor_of(one) as begin:
            agent = await one.ready()
            second = await begin()
            code, text = await agent.ends()
            assert code == 1
            assert "the driver is gone: another process now answers at its address" in text
            assert not second.links

    act(main)


def test_whom_it_has_authenticated_once_it_has_pinned(tmp_path: Path) -> None:
    """It was given no fingerprint. Nobody with another certificate is its driver, though he had the agent's own key."""

    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=4.0) as one, successor_of(one) as begin:
            agent = await one.ready()
            hello = one.driver.link.facts.hello
            second = await begin()
            second.tickets.admit(hello.agent, bytes.fromhex(hello.key))
            code, text = await agent.ends()
            assert code == 1
            assert "the driver is gone: another process now answers at its address" in text

    act(main)


@asynccontextmanager
async def successor_of(one: Scene) -> AsyncIterator[Callable[[], Awaitable[FakeDriver]]]:
    """Gives what ends the scene's driver and has another one listen at its port."""
    second = FakeDriver(one.folder / "work", agent_timeout_s=one.driver.agent_timeout_s)

    async def begin() -> FakeDriver:
        await one.driver.deafen()
        second.port = one.driver.port
        await second.listen()
        return second

    try:
        yield begin
    finally:
        await second.deafen()
        for link in second.links.values():
            link.close("the test is over")


# --- who is not taken in --------------------------------------------------------------------------------------------


def test_an_agent_that_is_refused_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            one.driver.refuses = "the job is over"
            code, text = await one.agent().ends()
            assert (code, text) == (2, "elastic_driver agent: the driver rejected this agent: the job is over\n")
            code, text = await one.agent(one.driver.joiner()).ends()
            assert (code, text) == (2, "elasticrun join: the driver rejected this host: the job is over\n")
            code, text = await one.agent(one.driver.joiner(slots=0)).ends()
            assert code == 2
            assert "pass --slots to elasticrun join" in text

    act(main)


def test_a_stranger_is_not_told_anything(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            code, text = await one.agent(one.driver.bootstrap(key="00" * 32)).ends()
            assert code == 2
            assert "did not prove to be this job's driver" in text

    act(main)


EITHER = "either another job's driver answers there, or this job's join token is not the one that was given"
SHUT_OUT: dict[str, tuple[dict[str, Any], int, str]] = {
    "another token": (
        {"key": "00" * 32},
        2,
        f"cannot join the job at URL: {EITHER}; use the URL and the token that this job's driver prints",
    ),
    "another token, and it is the driver": (
        {"key": "00" * 32, "fingerprint": ""},
        2,
        "cannot join the job at URL: this job's join token is not the one that was given; elasticrun jobs "
        "--write-join-token FILE, on the driver's machine, writes the current one",
    ),
    "another driver": (
        {"fingerprint": "ab" * 32},
        2,
        "cannot join the job at URL: the certificate there does not match the fingerprint in the URL: another driver "
        "answers there, or the driver was restarted; use the URL that the driver prints",
    ),
    "a job that nobody joins": (
        {"takes_joiners": False},
        2,
        "cannot join the job at URL: the server there rejected the connection: hosts cannot join here: this is not "
        "a job that was started with --accept-agents",
    ),
    "another node's token": (
        {"key": "00" * 32, "alike": {"--nnodes": "2"}},
        2,
        f"cannot join the job at URL: {EITHER}; check that all nodes have the same join token and that the port is the "
        "job's",
    ),
    "another driver, and no time to see whether it stays": (
        {"fingerprint": "ab" * 32, "first_s": 0.2},
        1,
        "cannot reach the driver: URL: the certificate there does not match the fingerprint in the URL: another driver "
        "answers there, or the driver was restarted; check that this is its URL and that it is running",
    ),
    "nobody": (
        {"urls": ("https://127.0.0.1:1",), "first_s": 0.2},
        1,
        "cannot reach the driver: URL: nothing listens there (connection refused); check that this is its URL and that "
        "it is running",
    ),
}


@pytest.mark.parametrize("what", SHUT_OUT)
def test_who_cannot_join_is_told_in_one_sentence_what_is_wrong_and_what_to_do(tmp_path: Path, what: str) -> None:
    given, code, why = SHUT_OUT[what]

    async def main() -> None:
        async with scene(tmp_path) as one:
            values = dict(given)
            if not values.pop("takes_joiners", True):
                one.driver.tickets._join_key = None
            if values.get("fingerprint") == "":
                values["fingerprint"] = await one.driver._certificate.make()
            bootstrap = one.driver.joiner(**values)
            who = "elastic_driver agent" if bootstrap.alike else "elasticrun join"
            ended, text = await one.agent(bootstrap).ends()
            lines = text.splitlines()
            assert ended == code, text
            assert lines[-1] == f"{who}: {why.replace('URL', bootstrap.urls[0], 1)}"
            assert len(lines) == (2 if what == "nobody" else 1)

    act(main)


def test_a_dialled_agent_says_it_to_its_driver(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            bootstrap = one.driver.bootstrap(fingerprint="ab" * 32)
            assert await one.agent(bootstrap).ends() == (
                2,
                f"elastic_driver agent: cannot reach the driver at {bootstrap.urls[0]}: the certificate there "
                "does not match the fingerprint in the URL: another driver answers there, or the driver was "
                "restarted\n",
            )

    act(main)


def test_one_url_of_several_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            right = one.driver.bootstrap().urls[0]
            await one.ready(one.driver.bootstrap(urls=("http://127.0.0.1:1", "http://[::1]:1", right)))

    act(main)


def test_one_that_joins_says_at_once_that_it_does_not_reach_the_driver(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = one.agent(one.driver.joiner(urls=("http://127.0.0.1:1",)))
            line = await asyncio.wait_for(asyncio.to_thread(agent.stderr.readline), PATIENCE_S)
            told = rb"elasticrun join: cannot reach the driver yet: http://127.0.0.1:1: "
            told += rb"nothing listens there \(connection refused\); retrying for another \d+ s\n"
            assert re.fullmatch(told, line), line
            assert agent.popen.poll() is None

    act(main)


def test_an_agent_that_is_given_nothing_says_so() -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "elastic_driver.launch.agent", stdin=-1, stderr=-1
        )
        _, text = await process.communicate(b"")
        assert process.returncode == NOTHING_GIVEN
        assert text == b"elastic_driver agent: received nothing on standard input\n"

    act(main)


@pytest.mark.parametrize(
    "given",
    [*(pytest.param(text, marks=pytest.mark.release) for text in (b"{}\n", b"[]\n")), b"\xff\xff\n", b'{"urls": 3}\n'],
)
def test_what_is_no_bootstrap(tmp_path: Path, given: bytes) -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "elastic_driver.launch.agent", stdin=-1, stderr=-1
        )
        _, text = await process.communicate(given)
        assert process.returncode == 2
        assert text.startswith(b"elastic_driver agent: cannot read this agent's parameters")
        assert text.count(b"\n") == 1

    act(main)


# --- leaving --------------------------------------------------------------------------------------------------------


async def in_thread(one: Scene, host: str | None = None, job: str | None = None) -> str:
    return await asyncio.to_thread(leave, host, job, 30.0)


@pytest.mark.parametrize("joins", [False, True])
def test_leaving_by_order(*, joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        async with scene(tmp_path) as one:
            # One that has joined without a name and an id, and one that was dialled: both go by the driver's words.
            bootstrap = one.driver.joiner() if joins else one.driver.bootstrap(job="j")
            agent = await one.ready(dataclasses.replace(bootstrap, host="") if joins else bootstrap)
            name, job = one.driver.link.facts.host, one.driver.welcome_facts.job_id
            there = await asyncio.to_thread(agents_here)
            assert [(each.host, each.job, each.connected, each.pid) for each in there.values()] == [
                (name, job, True, agent.popen.pid)
            ]
            with pytest.raises(SettingsError, match="cannot find an agent of yours for host other on this machine"):
                await in_thread(one, "other")
            with pytest.raises(SettingsError, match="cannot find an agent of yours for job other on this machine"):
                await in_thread(one, job="other")
            leaving = asyncio.ensure_future(in_thread(one, job=job[:2]))
            assert (await one.driver.hears(Leaves)).why == "elasticrun leave was run there"
            assert not leaving.done()
            one.driver.tell(Close())
            assert (await agent.ends())[0] == 0
            assert await leaving == f"host {name} has left its job"
            assert not list((tmp_path / "elasticrun").glob("*.sock"))

    act(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_has_no_agent_leave(tmp_path: Path) -> None:
    source = """
import os, socket
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect([name for name in os.listdir() if name.startswith("agent-")][0])
print(len(connection.recv(100)))  # before it has said a word
"""

    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready()
            folder = tmp_path / "elasticrun"
            folder.chmod(0o755)  # else he does not get there
            for path in folder.glob("agent-*.sock"):
                path.chmod(0o777)
            command = [sys.executable, "-S", "-c", source]
            asked = await asyncio.to_thread(
                subprocess.run, command, cwd=folder, capture_output=True, timeout=PATIENCE_S
            )
            assert asked.stdout == b"0\n", asked
            await one.ends_well(agent)

    act(main)


def test_one_that_has_joined_leaves_at_a_signal_and_ends_at_the_second(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready(one.driver.joiner())
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            agent.popen.send_signal(signal.SIGHUP)
            agent.popen.send_signal(signal.SIGTERM)
            assert (await one.driver.hears(Leaves)).why == "its agent received SIGTERM"
            assert process.is_running()
            agent.popen.send_signal(signal.SIGTERM)
            code, text = await agent.ends()
            assert code == 1
            assert "SIGTERM: exiting" in text
            await gone([process])

    act(main)


def test_an_agent_ends_what_an_earlier_driver_of_its_job_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one, scene(tmp_path) as other, scene(tmp_path) as third:
            orphan = await one.ready(one.driver.bootstrap(job="j"))
            kept = await other.ready(other.driver.bootstrap(job="j"))
            stranger = await third.ready(third.driver.bootstrap(job="another"))
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            await one.driver.deafen()
            await third.driver.deafen()
            (tmp_path / "elasticrun" / "agent-dead.sock").touch()
            await other.ready(other.driver.bootstrap(job="j"))
            code, text = await orphan.ends()
            assert code == 1
            assert "a newer agent of this job has started on this machine" in text
            await gone([process])
            assert kept.popen.poll() is None, "its driver is there"
            assert stranger.popen.poll() is None, "it is another job's"

    act(main)


def test_an_agent_without_a_driver_ends_by_order_with_one_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        async with scene(tmp_path, agent_timeout_s=2 * PATIENCE_S) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            there = await asyncio.to_thread(agents_here)
            assert [(each.workers, each.alone_s) for each in there.values()] == [(1, 0.0)]
            assert await asyncio.to_thread(end_alone, there, PATIENCE_S) == list(there.values()), "it has a driver"
            await one.driver.deafen()
            (alone,) = await there_alone()
            assert alone.alone_s > 0
            others = {path: dataclasses.replace(each, job="another") for path, each in there.items()}
            assert await asyncio.to_thread(end_alone, others, PATIENCE_S) == list(others.values()), "no job of its"
            assert process.is_running()
            assert await asyncio.to_thread(end_alone, there, PATIENCE_S) == []
            await gone([process])
            code, text = await agent.ends()
            assert code == 1
            assert "ended by elasticrun end: its job has no driver" in text
            assert await asyncio.to_thread(end_alone, {}, PATIENCE_S) == []

    act(main)


async def there_alone() -> list[AgentHere]:
    """The agents here, when all have lost their driver."""
    while True:
        there = list((await asyncio.to_thread(agents_here)).values())
        if not any(each.connected for each in there):
            return there
        await asyncio.sleep(0.05)


BROKEN = """
import sys
from elastic_driver.launch.agent import __main__, workers
def label(*_): raise ValueError("a fault of this test's")
workers.HostWorkers._label = label
sys.exit(__main__.main([]))
"""


def test_an_internal_error_ends_the_agent_and_its_workers_and_says_where_it_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            agent = await one.ready()
            one.driver.python(SLEEP)
            process = await one.driver.runs()
            one.driver.tell(Labels({A.key: "0"}))
            await gone([process])
            code, text = await agent.ends()
            assert code == 1
            assert "elastic_driver agent: internal error; please report the lines below\nTraceback (most recent" in text
            assert "in label" in text
            assert text.endswith('internal error in the agent: ValueError("a fault of this test\'s")\n')

    monkeypatch.setattr(forked, "starts_afresh", lambda: True)
    monkeypatch.setattr(sys, "executable", str(broken_python(tmp_path)))
    act(main)


def broken_python(folder: Path) -> Path:
    """A Python whose agents have a fault: they cannot label a worker's output."""
    program, python = folder / "broken.py", folder / "python"
    program.write_text(BROKEN, encoding="utf-8")
    other = f'[ "$2" = elastic_driver.launch.agent ] || exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{other}\nexec {sys.executable} {program}\n")
    python.chmod(0o755)
    return python
