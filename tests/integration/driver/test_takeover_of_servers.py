"""Drivers die of jobs with a chief: the script and its servers go on. Real processes, without TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.launch.agent.machine import addresses
from tests.support.paths import PROGRAMS, ROOT, SUPPORT
from tests.support.processes.dying_drivers import ALL, DyingDrivers, agents_of
from tests.support.processes.joined import joined, where_to_join, write_token

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PATH = f"{SUPPORT / 'fake_tensorflow'}:{ROOT}"
TWO, THREE = "localhost:2\n127.0.0.1:1\n", "localhost:2\n127.0.0.1:1\n127.0.0.2:1\n"
PHASES = ("start", "growth", "loss", "drain", "end")
Json = dict[str, Any]


class Servers(DyingDrivers):
    """A job of a parameter server, workers and ``chief_program.py``."""

    def __init__(self, folder: Path, *flags: str, hosts: str = TWO) -> None:
        self._orders = folder / "orders"
        least = ("--parameter-servers", "1", "-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1")
        super().__init__(
            folder,
            hosts,
            *least,
            *flags,
            "--output-filename",
            str(folder / "output"),
            program=PROGRAMS / "chief_program.py",
            options=(str(self._orders),),
            PYTHONPATH=PATH,
        )

    def order(self, text: str) -> None:
        """The chief does it soon."""
        with self._orders.open("a") as file:
            file.write(f"{text}\n")

    def printed(self, word: str) -> list[Any]:
        """What all chiefs have said so far behind this word, in the driver's files."""
        said = []
        file = self.folder / "output" / "chief" / "stdout"
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            name, _, value = line.removeprefix("[chief]<stdout>:").partition(" ")
            if name == word and value.endswith("\n"):
                said.append(json.loads(value))
        return said

    def chiefs(self) -> list[Json]:
        """What each chief was started with. A line comes twice where its driver dies before it has acknowledged it."""
        return list({said["pid"]: said for said in self.printed("cluster")}.values())

    def servers(self, found: Callable[[Json], bool], what: str = "a list") -> Json:
        """The newest list that the chief has, as soon as this holds of it."""

        def newest() -> Json | None:
            lists = self.printed("servers")
            return lists[-1] if lists and found(lists[-1]) else None

        answer: Json = self.until(what, newest)
        return answer

    def with_workers(self, count: int, *, but: str = "") -> Json:
        """The list that has so many workers, and not the one at that address."""

        def is_it(known: Json) -> bool:
            return len(known["workers"]) == count and but not in known["workers"]

        return self.servers(is_it, f"{count} workers")

    def pid(self, place: str) -> int:
        """Of the newest server in a place. A driver that has not told of its start tells the next one's takeover."""

        def found() -> int | None:
            pids: dict[str, int] = {}
            for event in self.job.events():
                pids |= event["pids"] if event["event"] == "took_over" else {}
                pids |= {event["worker"]: event["pid"]} if event["event"] == "worker_started" else {}
            return next((pid for worker, pid in reversed(pids.items()) if worker.startswith(f"{place}#")), None)

        return int(self.until(f"the process of {place}", found))


def with_one_chief(job: Servers) -> None:
    """And with one parameter server, all the while."""
    assert len(job.chiefs()) == 1
    lists = job.printed("servers")
    assert {tuple(known["ps"]) for known in lists} == {tuple(lists[0]["ps"])}
    assert not job.printed("closed")


def test_chief_and_servers_go_on(tmp_path: Path) -> None:
    with Servers(tmp_path) as job:
        job.start()
        first = job.with_workers(2)
        job.die()
        job.start()
        assert job.has_taken_over()["workers"] == 3
        job.set_hosts(THREE)
        assert job.with_workers(3)["workers"].items() > first["workers"].items()
        job.order("exit 0")
        assert job.ended() == 0
        with_one_chief(job)


def test_a_server_dies_while_there_is_no_driver(tmp_path: Path) -> None:
    with Servers(tmp_path) as job:
        job.start()
        before = job.with_workers(2)["workers"]
        pid = job.pid("127.0.0.1[0]")
        job.die()
        os.kill(pid, signal.SIGKILL)
        job.wait_for_end_of(pid)
        job.start()
        after = job.servers(lambda known: len(known["workers"].keys() - before) == 1, "another worker")["workers"]
        assert len(after.keys() & before) == 1
        job.order("exit 0")
        assert job.ended() == 0
        with_one_chief(job)


@pytest.mark.parametrize("code", [0, 5])
def test_the_chief_ends_while_there_is_no_driver(tmp_path: Path, code: int) -> None:
    with Servers(tmp_path) as job:
        job.start()
        job.with_workers(2)
        job.die()
        pid = job.job.events("chief_started")[-1]["pid"]
        job.order(f"exit {code}")
        job.wait_for_end_of(pid)
        job.start()
        assert job.ended() == bool(code)
        if code:
            assert "the chief exited with code 5" in job.said()


def test_a_chief_that_dies_while_there_is_no_driver_is_started_again(tmp_path: Path) -> None:
    with Servers(tmp_path, "--restart-chief") as job:
        job.start()
        first = job.with_workers(2)
        job.die()
        pid = job.job.events("chief_started")[-1]["pid"]
        os.kill(pid, signal.SIGKILL)
        job.wait_for_end_of(pid)
        job.start()
        job.until("another chief", lambda: len(job.chiefs()) == 2)
        assert job.chiefs()[-1]["cluster"]["ps"] == first["ps"]
        job.with_workers(2)
        job.order("exit 0")
        assert job.ended() == 0


def test_the_agent_of_the_chief_dies_while_there_is_no_driver(tmp_path: Path) -> None:
    """All were on this machine: nothing is left of the job."""
    with Servers(tmp_path) as job:
        job.start()
        job.with_workers(2)
        job.die()
        pid = job.job.events("chief_started")[-1]["pid"]
        (agent,) = agents_of(job.runtime).values()
        os.kill(agent.pid, signal.SIGKILL)
        job.wait_for_end_of(pid)
        job.start()
        job.until("a new job", lambda: len(job.chiefs()) == 2)
        job.order("exit 0")
        assert job.ended() == 0


@pytest.mark.skipif(not addresses(), reason="this machine has no address but loopback")
def test_all_servers_are_on_other_machines(tmp_path: Path) -> None:
    """The driver's own machine has an agent for the chief alone."""
    flags = ("--accept-agents", "--join-token-file", str(write_token(tmp_path)))
    with Servers(tmp_path, *flags, hosts="") as job, contextlib.ExitStack() as nodes:
        where = where_to_join(job.start())
        env = {"PYTHONPATH": PATH, "XDG_RUNTIME_DIR": str(job.runtime)}
        for name in ("node-a", "node-b", "node-c"):
            nodes.enter_context(joined(tmp_path, name, where, apart=False, timeout_s=120, **env))
        before = job.with_workers(2)
        job.die()
        job.start()
        assert job.has_taken_over()["workers"] == 3
        nodes.enter_context(joined(tmp_path, "node-d", where, apart=False, timeout_s=120, **env))
        assert job.with_workers(3)["workers"].items() > before["workers"].items()
        job.order("exit 0")
        assert job.ended() == 0
        with_one_chief(job)


# --- at each place ---------------------------------------------------------------------------------------------------


class Walked(Servers):
    """One that goes through phases, in which its drivers die at some places. See Walk."""

    def __init__(self, folder: Path, *, once: bool, **places: str) -> None:
        super().__init__(folder)
        self._once = once
        self._places = places

    def phase(self, name: str) -> int:
        """Arms the drivers, if they are to die in it. Returns how often they have died before."""
        self.disarm()
        if name in self._places:
            self.arm(name, self._places[name], once=self._once)
        return len(self.died_at)

    def walk(self) -> Iterator[bool]:
        """The whole job; tells of each phase whether a driver has died in it."""
        died = self.phase("start")
        self.start()
        first = self.with_workers(2)["workers"]
        yield len(self.died_at) > died
        died = self.phase("growth")
        self.set_hosts(THREE)
        grown = self.with_workers(3)["workers"]
        yield len(self.died_at) > died
        died = self.phase("loss")
        os.kill(self.pid("127.0.0.2[0]"), signal.SIGKILL)
        (gone,) = grown.keys() - first
        self.with_workers(3, but=gone)
        yield len(self.died_at) > died
        died = self.phase("drain")
        self.order("take-out")
        self.set_hosts(TWO)
        left = self.with_workers(2)["workers"]
        assert left.keys() == first.keys()
        yield len(self.died_at) > died
        died = self.phase("end")
        self.order("exit 0")
        assert self.ended() == 0
        with_one_chief(self)
        yield len(self.died_at) > died


@pytest.mark.slow
def test_at_one_place_of_each_phase(tmp_path: Path) -> None:
    places = {
        "start": "^carried out StartChief",
        "growth": "^written .*WorkerServing",
        "loss": "^written .*WorkerExited",
        "drain": "^written .*WorkerReleased",
        "end": "^carried out EndJob",
    }
    with Walked(tmp_path, once=True, **places) as job:
        assert all(list(job.walk()))
        assert [name.partition(":")[0] for name in job.died_at] == list(PHASES)


@pytest.mark.release
@pytest.mark.timeout(1200)
def test_at_each_place_one_after_the_other(tmp_path: Path) -> None:
    """Whoever takes over dies at the next one: also those of a takeover are among them."""
    with Walked(tmp_path, once=False, **dict.fromkeys(PHASES, ALL)) as job:
        assert all(list(job.walk()))
        print("\n".join(job.died_at))
        assert len(job.died_at) > 60
