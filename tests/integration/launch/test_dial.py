"""Starting agents: one contract that all diallers keep. The agent is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from early_dialler import EarlyDialler

from elastic_driver.launch.dial.child import Child
from elastic_driver.launch.dial.command import CommandDialler, RshDialler
from elastic_driver.launch.dial.dialler import Dialler
from elastic_driver.launch.dial.early import EarlyAgent
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.rendezvous.agent_messages import Bootstrap
from tests.support.network.namespaces import Namespaces
from tests.support.processes.launching import EACH_LOOP, PATIENCE_S, run

pytestmark = pytest.mark.integration

PROGRAMS = str(Path(__file__).parents[2] / "support" / "programs")
STANDIN = {"module": "standin_agent", "pythonpath": PROGRAMS}
SECRET = "5ec2e7" * 8
# Joins its words for a shell and prints all: as kubexec.sh does, which forwards no input either.
RSH_AGENT = '#!/bin/sh\nset -x\n[ "$1" = --quiet ] && shift\nHOST=$1\nshift\n/bin/sh -c "$*"'


@dataclass(frozen=True)
class Transport:
    """A dialler, a host for it, and whether what the agent is given stands on no command line."""

    dialler: Dialler
    host: str
    hides: bool
    here: bool = True


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with Namespaces(2, sshd=True) as made:
        yield made


@pytest.fixture(
    params=[
        "local",
        "local, begun early",
        "ssh",
        "rsh agent",
        pytest.param("rsh agent without input", marks=pytest.mark.release),  # the ticket is as on a command
        "command",
        pytest.param("command in a shell", marks=pytest.mark.release),  # as that with the ticket is
        "ticket on the command",
    ]
)
def transport(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    monkeypatch.setenv("PYTHONPATH", PROGRAMS)
    match request.param:
        case "local":
            return Transport(LocalDialler(module="standin_agent"), "localhost", hides=True)
        case "local, begun early":
            return Transport(EarlyDialler(), "localhost", hides=True)
        case "ssh":
            hosts = request.getfixturevalue("hosts")
            program = [*hosts[0].prefix, str(hosts.bin / "ssh")]
            return Transport(SshDialler(program=program, **STANDIN), "node1", hides=True, here=False)
        case "rsh agent" | "rsh agent without input":
            program, hides = tmp_path / "rsh agent", request.param == "rsh agent"
            program.write_text(f"{RSH_AGENT}\n" if hides else f"{RSH_AGENT} </dev/null\n")
            program.chmod(0o755)
            on = None if hides else "command"
            return Transport(RshDialler(f"'{program}' --quiet", bootstrap_on=on, **STANDIN), "pod-1", hides=hides)
        case "command":
            return Transport(CommandDialler("env THERE={host}", **STANDIN), "b", hides=True)
        case "command in a shell":
            return Transport(CommandDialler("sh -c 'exec '{command} {host}", **STANDIN), "b", hides=True)
        case _:
            dialler = CommandDialler("sh -c {command} {host}", bootstrap_on="command", **STANDIN)
            return Transport(dialler, "b", hides=False)


class Standins:
    """Hears of agents that have come up."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._pipe = pipe
        self._read = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._told: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._begun = b""
        asyncio.get_running_loop().add_reader(self._read, self._take)
        self.dialled: list[Child] = []

    async def dial(self, transport: Transport, do: str, number: int = 0) -> tuple[Child, Bootstrap]:
        bootstrap = Bootstrap(
            urls=("http://10.0.0.1:5000", "http://[fd00::1]:5000"),
            identity=f"agent {number}",
            key=SECRET,
            host=transport.host,
            owner=do,
            job=str(self._pipe),
        )
        child = await transport.dialler.dial(transport.host, bootstrap)
        self.dialled.append(child)
        return child, bootstrap

    async def came_up(self) -> tuple[str, int]:
        """What the next one was given, and its process."""
        async with asyncio.timeout(PATIENCE_S):
            told = await self._told.get()
        return told["given"], told["pid"]

    async def close(self) -> None:
        await asyncio.gather(*(child.close() for child in self.dialled))
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)

    def _take(self) -> None:
        *lines, self._begun = (self._begun + os.read(self._read, 65536)).split(b"\n")
        for line in lines:
            self._told.put_nowait(json.loads(line))


@contextlib.asynccontextmanager
async def standins(tmp_path: Path) -> AsyncIterator[Standins]:
    """Afterwards no child and no descriptor may be left."""
    gc.collect()
    children, before = psutil.Process().children(), os.listdir("/proc/self/fd")
    standing = Standins(tmp_path / "pipe")
    try:
        yield standing
    finally:
        await standing.close()
    assert [child for child in psutil.Process().children() if child not in children] == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def gone(pid: int) -> bool:
    """Blocks until a process is dead, up to 30 s."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(30_000))
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("loop", EACH_LOOP)
def test_the_agent_gets_what_it_is_given(transport: Transport, tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            child, bootstrap = await standing.dial(transport, "wait")
            given, pid = await standing.came_up()
            assert Bootstrap.from_json(given.encode()) == bootstrap
            assert not child.failed.done()
            seen = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
            environment = Path(f"/proc/{pid}/environ").read_text()
            if transport.hides:
                word = bootstrap.to_word()
                assert not [line for line in [*seen, environment] if SECRET in line or word in line]

    run(loop, main)


def test_how_it_ended_is_told(transport: Transport, tmp_path: Path) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            for do, reason, permanent in (
                ("say cannot reach the driver", "cannot reach the driver", False),
                ("say python: No module named elastic_driver", "No module named elastic_driver", True),
                ("chatter", "the last line", False),
                ("exit 3", "exited with code 3 without output", False),
            ):
                child, _ = await standing.dial(transport, do)
                async with asyncio.timeout(PATIENCE_S):
                    failure = await child.failed
                assert failure.reason.endswith(reason)
                assert transport.host in failure.reason
                assert "\n" not in failure.reason
                assert failure.permanent == permanent

    run("asyncio", main)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("do", [pytest.param("wait", marks=pytest.mark.release), "deaf"])
def test_what_hangs_is_ended(transport: Transport, tmp_path: Path, do: str, stopped: bool) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            child, _ = await standing.dial(transport, do)
            _, agent = await standing.came_up()
            if stopped:
                os.kill(child.pid, signal.SIGSTOP)
            await child.close()
            await child.close()
            assert child.failed.done()
            assert not psutil.pid_exists(child.pid)
            # On another host it hears of it: by the end of its input, at the latest.
            assert await asyncio.to_thread(gone, agent)

    run("asyncio", main)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.release), True])
def test_it_dies_with_the_driver(transport: Transport, tmp_path: Path, stopped: bool) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            pipe = str(tmp_path / "pipe")
            bootstrap = Bootstrap(urls=(), identity="agent 1", key=SECRET, host=transport.host, owner="wait", job=pipe)
            driver = subprocess.Popen(
                [sys.executable, f"{PROGRAMS}/dialling_program.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{PROGRAMS}"},
            )
            with driver:
                driver.stdin.write(pickle.dumps((transport.dialler, transport.host, bootstrap)))
                driver.stdin.close()
                child = int(driver.stdout.readline())
                _, agent = await standing.came_up()
                if stopped:
                    os.kill(child, signal.SIGSTOP)
                driver.kill()
                assert await asyncio.to_thread(gone, child)
                assert await asyncio.to_thread(gone, agent)

    run("asyncio", main)


def test_who_holds_its_output_is_not_waited_for(transport: Transport, tmp_path: Path) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            child, _ = await standing.dial(transport, "leave")
            if transport.here:
                async with asyncio.timeout(PATIENCE_S):
                    assert (await child.failed).reason.endswith("gone before its child")
            else:  # ssh's server waits, but close does not
                await standing.came_up()

    run("asyncio", main)


def test_what_it_leaves_in_its_group_is_ended_with_it(transport: Transport, tmp_path: Path) -> None:
    if not transport.here:
        pytest.skip("what ssh starts is on another host")

    async def main() -> None:
        async with standins(tmp_path) as standing:
            child, _ = await standing.dial(transport, "leave one of the group")
            _, left = await standing.came_up()
            async with asyncio.timeout(PATIENCE_S):
                await child.failed
            assert await asyncio.to_thread(gone, left)

    run("asyncio", main)


def test_many_are_dialled_side_by_side(transport: Transport, tmp_path: Path) -> None:
    count = min(32, (os.cpu_count() or 1) + 4) + 2  # more than there are threads for what blocks

    async def main() -> None:
        async with standins(tmp_path) as standing:
            await asyncio.gather(*(standing.dial(transport, "wait", number) for number in range(count)))
            given = {json.loads((await standing.came_up())[0])["identity"] for _ in range(count)}
            assert given == {f"agent {number}" for number in range(count)}
            assert not [child for child in standing.dialled if child.failed.done()]

    run("uvloop", main)


def test_a_dial_that_is_given_up_leaves_nothing(transport: Transport, tmp_path: Path) -> None:
    async def main() -> None:
        async with standins(tmp_path) as standing:
            for turns in range(4):
                dialling = asyncio.ensure_future(standing.dial(transport, "wait"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                dialling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await dialling
            await asyncio.get_running_loop().shutdown_default_executor()
            await asyncio.sleep(0)

    run("asyncio", main)


def test_an_agent_that_was_begun_early_and_is_not_needed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PROGRAMS)
    before = set(psutil.Process().children())
    early = EarlyAgent("standin_agent")
    begun = set(psutil.Process().children()) - before
    assert begun
    early.dismiss()
    assert not any(process.is_running() for process in begun)
    assert early.take() is None


def test_an_agent_that_was_begun_early_and_died_is_a_failed_try_like_any_other() -> None:
    async def main() -> None:
        dialler = LocalDialler(module="no_such_module", early=EarlyAgent("no_such_module"))
        bootstrap = Bootstrap(urls=(), identity="agent 1", key=SECRET, host="localhost")
        for _ in range(2):
            dialled = await dialler.dial("localhost", bootstrap)
            failure = await asyncio.wait_for(dialled.failed, PATIENCE_S)
            assert "no_such_module" in failure.reason
            await dialled.close()

    run("uvloop", main)
