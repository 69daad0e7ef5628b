"""What a node with a journal in etcd does next, by what is said there and how its part in a job has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_driver import codec
from elastic_driver.driver import nodes_in_etcd
from elastic_driver.driver.node import Node
from elastic_driver.driver.nodes_in_etcd import NodeInEtcd
from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, encode
from elastic_driver.journal.etcd_records import Ended, ended_key
from elastic_driver.launch.agent.agent import AgentEnd, End
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings
from tests.support.fakes.fake_etcd import FakeEtcd, fake_etcd

pytestmark = pytest.mark.unit

THERE = RegisteredDriver("0123", "node1", "", 1, "first", ("https://node1:29400",), "f" * 64, lease_s=5)
MET = End(AgentEnd.OVER, 0, "all workers exited with code 0", job="0123")


class Beside:
    """In the place of the process beside a node."""

    def __init__(self) -> None:
        self.is_refused = False
        self.begun_again = 0

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, limit_s: float) -> None: ...

    def again(self) -> None:
        self.begun_again += 1


class World:
    """A node whose joining is the test's, and whose time passes only while it waits."""

    def __init__(self, etcd: FakeEtcd, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etcd, self.place = etcd, etcd.place()
        self.now = 0.0
        self.later: list[tuple[float, Callable[[], object]]] = []
        self.ends: Iterator[End] = itertools.repeat(MET)
        self.joined: list[tuple[str, ...]] = []
        self.beside = Beside()
        monkeypatch.setattr(nodes_in_etcd, "NodeDriver", lambda *args, **more: self.beside)
        for module in ("nodes_in_etcd", "node"):
            monkeypatch.setattr(f"elastic_driver.driver.{module}.time.monotonic", lambda: self.now)
        monkeypatch.setattr("elastic_driver.driver.nodes_in_etcd.time.sleep", self._pass)
        journal = JournalPlace(url="etcd://localhost/jobs/a", key=folder / "key")
        settings = Settings(
            command=("true",), num_proc=1, min_num_proc=1, accept_agents=True, launcher="none", journal=journal
        )
        nodes = Nodes(least=1, most=2, endpoint="node0:29400", conf={"join_timeout": "60"})
        self.node = Node(settings, nodes, "a token of the test's own", "the test")
        monkeypatch.setattr(self.node, "join", self._join)

    def at(self, when_s: float, what: Callable[[], object]) -> None:
        self.later.append((when_s, what))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for each in [each for each in self.later if each[0] <= self.now]:
            self.later.remove(each)
            each[1]()

    def _join(self, urls: tuple[str, ...], wait: Any, **more: Any) -> End:
        assert more["fingerprint"] == THERE.fingerprint
        self.joined.append(urls)
        return next(self.ends)

    def is_driven(self) -> None:
        self.etcd.put(driver_key(self.place), encode(THERE))

    def is_not_driven(self) -> None:
        self.etcd.remove(driver_key(self.place))

    def has_ended(self, job: str, exit_code: int) -> None:
        self.etcd.put(ended_key(self.place), codec.encode(Ended, Ended(job, exit_code)))

    def run(self) -> int:
        return NodeInEtcd(self.node, self.place, {}).run()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with fake_etcd() as etcd:
        yield World(etcd, tmp_path, monkeypatch)


def test_it_joins_whoever_drives(world: World) -> None:
    world.at(7.0, world.is_driven)
    assert world.run() == 0
    assert world.joined == [THERE.urls]


def test_nobody_comes_to_drive(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.run() == 1
    assert world.now >= 60
    assert "has no driver yet" in capsys.readouterr().err


def test_the_driver_cannot_be_reached(world: World) -> None:
    world.is_driven()
    world.ends = itertools.repeat(End(AgentEnd.NOT_MET, 1, "no way there"))
    assert world.run() == 1
    assert world.now >= 60


def test_etcd_does_not_answer(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.etcd.close()
    world.beside.is_refused = True
    assert world.run() == 1
    assert world.now >= 60
    assert "cannot find the driver" in capsys.readouterr().err


def test_it_may_not_drive(world: World) -> None:
    """Then somebody else has to; a node that is there already waits for that."""
    world.beside.is_refused = True
    assert world.run() == 2
    world.is_driven()
    assert world.run() == 0
    world.ends = iter([End(AgentEnd.LOST, 1, "lost", job="0123"), MET])
    world.at(world.now + 0.1, world.is_not_driven)
    world.at(world.now + 30, world.is_driven)
    assert world.run() == 0


@pytest.mark.parametrize("is_driven", [False, True])
def test_its_job_has_ended_without_it(world: World, is_driven: bool) -> None:
    """It does not begin that anew, nor another one that others have begun since."""
    world.is_driven()
    world.ends = iter([End(AgentEnd.LOST, 1, "lost", job="0123")])

    def end() -> None:
        world.has_ended("0123", 3)
        if not is_driven:
            world.is_not_driven()

    world.at(0.1, end)
    assert world.run() == 3
    assert not world.beside.begun_again


def test_the_job_before_has_ended_when_it_comes(world: World) -> None:
    """It is for the next one."""
    world.is_driven()
    world.ends = iter([End(AgentEnd.TOO_LATE, 2, "the job is over"), MET])
    world.at(0.1, lambda: (world.has_ended("0099", 0), world.is_not_driven()))
    world.at(5.0, world.is_driven)
    assert world.run() == 0
    assert world.beside.begun_again


def test_all_know_how_the_job_has_ended(world: World) -> None:
    world.is_driven()
    world.has_ended("0123", 143)
    world.ends = iter([End(AgentEnd.OVER, 1, "interrupted", job="0123")])
    assert world.run() == 143


def test_another_program_is_where_a_driver_has_died(world: World) -> None:
    world.is_driven()
    world.ends = iter([End(AgentEnd.STRANGE, 2, "no TLS"), End(AgentEnd.STRANGE, 2, "no TLS"), MET])
    assert world.run() == 0
    world.ends = itertools.repeat(End(AgentEnd.STRANGE, 2, "another token"))
    before = world.now
    assert world.run() == 2
    assert world.now - before >= THERE.lease_s
