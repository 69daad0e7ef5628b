"""A driver dies, and another one takes its job over: what becomes of each thing that agents may know.

Both drivers are real; at the other ends of their links are the same hosts (docs/decisions/0044, "Coming back").
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.core.events import EndJob, Fault, HostLost
from elastic_driver.core.standing import JobActivity, standing_of
from elastic_driver.core.state import Kill, Silence, State, WorkerPhase, record_of
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver import takeover
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.journal.entries import Facts
from elastic_driver.journal.past import Recorded
from elastic_driver.launch.fleet.kept import AgentKept
from elastic_driver.rendezvous import agent_messages as words
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import JobOver, NextRoundReply, Removed, RoundAssignment
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.system.process_name import ProcessName
from elastic_driver.words import ExitCode, NoticeKind, OnChange, ReadyCause
from tests.support.fakes.driver_fakes import FakeHost, Job
from tests.support.fakes.fleet_fakes import Dial, hello, rest
from tests.support.fakes.job_facts import a_took, job_of_one
from tests.support.fakes.played_disk import Disk
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, B = Host("a", 1), Host("b", 1)
A0, B0 = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


class Lives:
    """A job, and the driver that has it now.

    Attributes:
        job: with its present driver.
        listed: the hosts that the next driver finds listed.
    """

    def __init__(self, folder: Path, *hosts: Host, **settings: Any) -> None:
        self._folder, self.listed, self._settings = folder, hosts, {"min_num_proc": 1} | settings
        self.job = Job(folder, *hosts, **self._settings)
        self.hosts: dict[str, FakeHost] = {}
        self.state: State
        self.agents: dict[str, AgentKept] = {}

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Lets time pass until it holds."""
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not seen: {what}; {self.job.text()}")

    async def dies(self) -> None:
        """The driver does."""
        world = self.job.world
        self.hosts = dict(world.hosts)
        self.agents = {host.link.agent: _kept(host) for host in world.hosts.values()}
        self.state = await self.job.dies()

    def takes_over(self, state: State | None = None, **settings: Any) -> None:
        """Another driver begins with what the last one has left."""
        (self._folder / "second").mkdir()
        disk = Disk()
        disk.answers_soon = True
        self.job = Job(
            self._folder / "second",
            *self.listed,
            clock=self.job.driver.clock,
            disk=disk,
            before=Recorded(
                a_took(), job_of_one(), state or self.state, 0.0, facts=Facts(agents=self.agents), away_s=1.5
            ),
            **(self._settings | settings),
        )

    async def listens(self) -> None:
        """Agents can come."""
        await self.until(lambda: "rendezvous at" in self.job.text(), "the driver is there")
        await rest()

    async def are_back(self, *names: str) -> None:
        """The agents of these hosts are; all of them where none is named."""
        await self.listens()
        for name in names or self.hosts:
            host = self.hosts[name]
            link = self.job.world.fleet.fleet.known(host.link.agent)
            assert link is not None
            host.comes_back(link, self.job.world)
        await rest()

    async def is_taken_over(self, state: State | None = None, **settings: Any) -> None:
        """The driver dies, another one takes over, and all agents are back."""
        if not self.agents:
            await self.dies()
        self.takes_over(state, **settings)
        await self.are_back()

    def notice(self) -> NoticeKind | None:
        """What the members of the round are told."""
        present = self.job.driver.stepper.state.round
        return None if present is None else present.notice

    def record(self, worker: WorkerId) -> Any:
        """What the driver's state has of a worker."""
        return record_of(self.job.driver.stepper.state, worker)


def _kept(host: FakeHost) -> AgentKept:
    facts = host.link.facts
    return AgentKept(
        host.link.agent,
        bytes(32).hex(),
        facts.host,
        facts.peer,
        facts.ours,
        facts.local,
        facts.joined,
        ending=False,
        given_up=False,
        hello=facts.hello,
    )


def play(tmp_path: Path, test: Callable[[Lives], Coroutine[Any, Any, None]], *hosts: Host, **settings: Any) -> None:
    """Runs a test of such a job."""

    async def main(_: VirtualLoop) -> None:
        await test(Lives(tmp_path, *(hosts or (A, B)), **settings))

    run_virtually(main)


async def answered(lives: Lives, answer: asyncio.Future[NextRoundReply]) -> NextRoundReply:
    await lives.until(answer.done, "an answer")
    return answer.result()


# --- the table -------------------------------------------------------------------------------------------------------


def test_workers_go_on_and_nobody_is_told_anything_that_it_knows(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.until(lambda: standing_of(lives.job.driver.stepper.state).doing is JobActivity.TRAINING, "training")
        await lives.is_taken_over()
        for host in lives.hosts.values():
            assert [each for each in host.told if not isinstance(each, words.WarmUp)] == []
        told = "took over: no driver for 1.5 s; 2 workers on 2 hosts kept training, no step is lost"
        assert told in lives.job.text()
        assert len(lives.job.status()["workers"]) == 2
        for worker in (A0, B0):
            lives.job.exits(worker, 0)
        assert await lives.job.end() == 0

    play(tmp_path, test)


def test_one_of_which_its_agent_has_not_heard_is_started(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.started(2)
        await lives.dies()
        del lives.hosts["b"].workers[B0]
        lives.takes_over()
        await lives.are_back()
        assert [order.worker for order in lives.hosts["b"].of(words.Start)] == [B0.key]
        assert not lives.hosts["a"].of(words.Start)

    play(tmp_path, test)


def test_one_that_was_told_to_stop_is_told_again(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.started(2)
        lives.job.world.started[B0].is_stubborn = True
        lives.job.discovery.hosts = (A,)
        await lives.until(lambda: lives.job.world.started[B0].stops, "a stop")
        await lives.is_taken_over()
        assert lives.record(B0).phase is WorkerPhase.LEAVING
        (stop,) = lives.hosts["b"].of(words.Stop)
        assert (stop.worker, stop.grace_s) == (B0.key, lives.job.driver.settings.grace_s)

    play(tmp_path, test)


def test_one_that_was_killed_is_killed_again(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        record = record_of(lives.state, B0)
        assert record is not None
        state = replace(
            lives.state, workers=lives.state.workers.put(replace(record, killed=Kill("hung", Fault.OWN, hangs=True)))
        )
        lives.takes_over(state)
        await lives.are_back()
        (kill,) = lives.hosts["b"].of(words.Kill)
        assert (kill.worker, kill.stacks_s > 0) == (B0.key, True)

    play(tmp_path, test)


def test_one_that_was_told_to_stop_before_its_start_has_ended(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.started(2)
        lives.job.world.started[B0].is_stubborn = True
        lives.job.discovery.hosts = (A,)
        await lives.until(lambda: lives.job.world.started[B0].stops, "a stop")
        await lives.dies()
        del lives.hosts["b"].workers[B0]
        lives.listed = (A,)
        lives.takes_over()
        await lives.are_back()
        await lives.until(lambda: lives.record(B0) is None, "its end")
        assert not lives.hosts["b"].of(words.Start)

    play(tmp_path, test)


def test_one_that_was_dismissed_is_answered_so(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        lives.job.discovery.hosts = (A,)
        await lives.until(lambda: lives.notice() is NoticeKind.HOSTS_UPDATED, "a notice")
        # The answer is on its way when the driver dies.
        lives.job.world.hosts["b"].written = lambda: None  # type: ignore[method-assign]
        answers = [lives.job.ready(worker, after=1, cause=ReadyCause.HOSTS_UPDATED) for worker in (A0, B0)]
        assert isinstance(await answered(lives, answers[0]), RoundAssignment)
        del lives.job.world.hosts["b"].written
        await lives.dies()
        lives.listed = (A,)
        lives.takes_over()
        await lives.are_back()
        assert isinstance(await answered(lives, answers[1]), Removed)

    play(tmp_path, test)


def test_a_member_that_has_not_heard_its_place_is_told_it(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.started(2)
        lives.job.world.hosts["b"].written = lambda: None  # type: ignore[method-assign]
        answers = [lives.job.ready(worker) for worker in (A0, B0)]
        first = await answered(lives, answers[0])
        lives.job.world.hosts["b"].heard().clear()
        del lives.job.world.hosts["b"].written
        await lives.is_taken_over()
        second = await answered(lives, answers[1])
        assert isinstance(first, RoundAssignment)
        assert isinstance(second, RoundAssignment)
        assert second == replace(first, slot=second.slot, address=second.address)
        assert [round_.round_id for round_ in lives.hosts["b"].of(words.Round)] == [1]
        assert not lives.hosts["a"].of(words.Round)

    play(tmp_path, test)


def test_one_that_is_ready_is_parked_again(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.started(2)
        first = lives.job.ready(A0)
        await lives.until(lambda: lives.record(A0).phase is WorkerPhase.READY, "it is ready")
        await lives.is_taken_over()
        assert not first.done()
        second = lives.job.ready(B0)
        places = [await answered(lives, answer) for answer in (first, second)]
        assert [isinstance(place, RoundAssignment) and place.slot.rank for place in places] == [0, 1]

    play(tmp_path, test)


def test_a_member_that_asks_for_the_next_round_has_reported_anew(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await rest()
        await lives.dies()
        answers = [lives.job.ready(worker, after=1, cause=ReadyCause.INTERNAL_ERROR) for worker in (A0, B0)]
        lives.takes_over()
        await lives.are_back()
        places = [await answered(lives, answer) for answer in answers]
        assert [isinstance(place, RoundAssignment) and place.round_id for place in places] == [2, 2]

    play(tmp_path, test)


def test_a_label_of_before_the_round_is_changed(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        one = lives.hosts["b"].workers[B0]
        one.start = replace(one.start, label="7")
        lives.takes_over()
        await lives.are_back()
        assert [order.labels for order in lives.hosts["b"].of(words.Labels)] == [{B0.key: "1"}]
        assert not lives.hosts["a"].of(words.Labels)

    play(tmp_path, test)


# --- workers that are restarted ------------------------------------------------------------------------------------


RESTARTED = {"on_change": "restart", "dialect": OurDialect({}, exported={}, on_change=OnChange.RESTART)}


async def launched(lives: Lives) -> State:
    """Both workers run, and the driver dies. Returns what it had written down: that they are to be started."""
    seen: list[State] = []
    lives.job.world.on_start = lambda worker: seen.append(lives.job.driver.stepper.state)
    await lives.until(lambda: len(lives.job.world.started) == 2, "two workers")
    await lives.dies()
    assert {record.phase for record in seen[0].workers} == {WorkerPhase.BOOTING}
    return seen[0]


def port_of(host: FakeHost) -> list[str | None]:
    """Where the workers that its agent was told to start meet."""
    return [order.env.get("MASTER_PORT") for order in host.of(words.Start)]


def test_a_launch_goes_on_with_those_who_run(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        state = await launched(lives)
        lives.takes_over(state)
        await lives.are_back()
        assert not any(host.of(words.Start) for host in lives.hosts.values())
        await lives.until(lambda: "round 1: 2 workers" in lives.job.text(), "the round")
        for worker in (A0, B0):
            lives.job.exits(worker, 0)
        assert await lives.job.end() == 0

    play(tmp_path, test, **RESTARTED)


def test_restarted_workers_are_watched_by_nothing_but_their_ends(tmp_path: Path) -> None:
    """They say nothing, before a takeover and after it."""

    async def test(lives: Lives) -> None:
        await launched(lives)
        lives.takes_over()
        await lives.are_back()
        for _ in range(100):
            await asyncio.sleep(1.0)
            for host in lives.hosts.values():
                host.beat()
        assert not any(host.of(words.Kill) for host in lives.hosts.values())
        assert lives.job.living() == [A0, B0]

    play(tmp_path, test, heartbeat_timeout_s=10.0, **RESTARTED)


@pytest.mark.parametrize("first", ["a", "b"])
def test_one_that_is_started_by_another_driver_meets_those_of_its_launch(tmp_path: Path, first: str) -> None:
    """Whoever is back first: rank 0's host, which holds the port, or that of the one that is to be started."""

    async def test(lives: Lives) -> None:
        state = await launched(lives)
        (port,) = port_of(lives.hosts["a"])
        del lives.hosts["b"].workers[B0]
        lives.takes_over(state)
        for name in sorted(lives.hosts, reverse=first == "b"):
            await lives.are_back(name)
        assert port_of(lives.hosts["b"]) == [port]
        assert not lives.hosts["a"].of(words.HoldPort)
        await lives.until(lambda: "round 1: 2 workers" in lives.job.text(), "the round")
        lives.job.exits(B0, 1)
        await lives.until(lambda: len(lives.hosts["a"].of(words.Start)) == 1, "the next launch")
        assert [order.generation for order in lives.hosts["a"].of(words.HoldPort)] == [2]
        assert [order.generation for order in lives.hosts["a"].of(words.LetGo)] == [1]

    play(tmp_path, test, **RESTARTED)


def test_one_that_is_started_by_another_driver_does_not_wait_for_a_host_that_is_lost(tmp_path: Path) -> None:
    """Rank 0 was to run there: its launch is over, and the next one is of those who are left."""

    async def test(lives: Lives) -> None:
        state = await launched(lives)
        del lives.hosts["b"].workers[B0]
        lives.takes_over(state)
        await lives.are_back("b")
        assert not lives.hosts["b"].of(words.Start)
        await lives.until(lambda: port_of(lives.hosts["b"])[-1:] == ["20001"], "another launch")

    play(tmp_path, test, **RESTARTED)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exit_code", [0, 3])
def test_one_that_has_ended_meanwhile_has_ended_as_it_did(tmp_path: Path, exit_code: int) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.job.exits(B0, exit_code)
        lives.takes_over()
        await lives.are_back()
        await lives.until(lambda: lives.record(B0) is None, "its end")
        assert not lives.hosts["b"].of(words.Stop)
        if exit_code:
            assert f"exited with code {exit_code}" in lives.job.text()
            return
        lives.job.exits(A0, 0)
        assert await lives.job.end() == 0

    play(tmp_path, test)


def test_one_that_the_job_does_not_have_is_stopped(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        other = WorkerId("b", 0, 9)
        one = lives.hosts["b"].workers[B0]
        lives.hosts["b"].workers[other] = replace(one, worker=other, start=replace(one.start, worker=other.key))
        lives.takes_over()
        await lives.are_back()
        assert [order.worker for order in lives.hosts["b"].of(words.Stop)] == [other.key]

    play(tmp_path, test)


def test_an_agent_that_knows_an_older_round_and_notice_is_told(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.job.drain("b")
        await lives.until(lambda: lives.notice() is NoticeKind.HOSTS_UPDATED, "a notice")
        await rest()
        await lives.dies()
        lives.hosts["a"].told = []
        lives.takes_over()
        await lives.are_back()
        assert [each.round_id for each in lives.hosts["a"].of(words.Round)] == [1]
        (told,) = lives.hosts["a"].of(words.NoticeSet)
        assert (told.notice.kind, told.notice.round_id) == (NoticeKind.HOSTS_UPDATED, 1)
        assert not lives.hosts["b"].of(words.NoticeSet)

    play(tmp_path, test)


def test_an_agent_that_knows_a_later_round_is_refused(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await rest()
        await lives.dies()
        lives.hosts["b"].told.append(words.Round(9))
        lives.takes_over()
        await lives.are_back()
        assert "its agent knows round 9, but the last one here is 1" in lives.job.text()
        assert lives.job.world.fleet.fleet.link_of("b") is not lives.hosts["b"].link
        await lives.until(lambda: lives.record(B0) is None, "its workers are lost")

    play(tmp_path, test)


def test_a_host_that_was_given_up_is_refused(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over(
            replace(lives.state, silent=(Silence("b", lives.job.driver.clock(), sure=True, given_up=True),))
        )
        await lives.are_back()
        assert lives.hosts["b"].link.is_lost
        await lives.until(lambda: lives.record(B0) is None, "its workers are lost")

    play(tmp_path, test)


def test_a_host_that_was_silent_is_heard(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over(replace(lives.state, silent=(Silence("b", lives.job.driver.clock(), sure=True),)))
        await lives.are_back()
        await lives.until(lambda: not lives.job.driver.stepper.state.silent, "it is heard")
        assert lives.record(B0) is not None

    play(tmp_path, test)


def test_a_job_that_had_ended_goes_on_ending(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over(replace(lives.state, end=EndJob(3, "too few slots")))
        await lives.are_back()
        assert await lives.job.end() == 3
        assert not lives.job.living()
        for host in lives.hosts.values():
            assert host.of(words.Stop)
            assert [(close.exit_code, close.why) for close in host.of(words.Close)] == [(3, "too few slots")]
            assert not host.of(words.Start)

    play(tmp_path, test)


def test_a_member_that_its_agent_does_not_know_is_lost(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        del lives.hosts["b"].workers[B0]
        lives.takes_over()
        await lives.are_back()
        assert f"worker {B0} has ended, and its exit status is unknown" in lives.job.text()
        await lives.until(lambda: lives.record(B0) is None, "its end")

    play(tmp_path, test)


# --- who comes, and who does not -------------------------------------------------------------------------------------


def test_an_agent_speaks_for_its_own_workers_only(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.hosts["b"].workers[A0] = lives.hosts["a"].workers[A0]
        lives.takes_over()
        await lives.are_back("b")
        assert lives.hosts["b"].transport.is_closed
        assert lives.job.world.fleet.fleet.link_of("b").is_away  # type: ignore[union-attr]

    play(tmp_path, test)


@pytest.mark.parametrize("exit_code", [None, 0])
def test_this_machine_may_have_had_names_that_nobody_knows_any_more(tmp_path: Path, exit_code: int | None) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        other, one = WorkerId("127.0.0.1", 0, 0), lives.hosts["b"].workers[B0]
        lives.hosts["b"].workers[other] = replace(
            one, worker=other, start=replace(one.start, worker=other.key), exit_code=exit_code
        )
        for number, kept in lives.agents.items():
            lives.agents[number] = replace(kept, local=kept.host == "b")
        lives.takes_over()
        await lives.are_back()
        assert not lives.hosts["b"].link.is_away
        assert [order.worker for order in lives.hosts["b"].of(words.Stop)] == ([other.key] if exit_code is None else [])
        assert lives.record(B0) is not None

    play(tmp_path, test)


def test_no_host_is_lost_before_its_agents_lease_is_over(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        loop = asyncio.get_running_loop()
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over()
        await lives.listens()
        began = loop.time()
        await lives.are_back("a")
        await lives.until(lambda: lives.record(B0) is None, "it is lost")
        assert 15.9 <= loop.time() - began < 16.5

    play(tmp_path, test)


def test_as_long_as_no_member_is_back_all_may_train_on(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        loop = asyncio.get_running_loop()
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over(driver_timeout_s=100.0, journal=JournalPlace(tmp_path))
        await lives.listens()
        began = loop.time()
        await asyncio.sleep(50.0)
        assert lives.record(A0) is not None
        assert lives.record(B0) is not None
        await lives.are_back("a")
        await lives.until(lambda: lives.record(B0) is None, "it is lost")
        assert loop.time() - began < 51.0
        assert lives.record(A0) is not None

    play(tmp_path, test)


def test_a_job_of_which_nobody_comes_back_is_over(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        loop = asyncio.get_running_loop()
        await lives.job.train(2)
        await lives.dies()
        began = loop.time()
        lives.takes_over(driver_timeout_s=100.0, journal=JournalPlace(tmp_path))
        await lives.job.end()
        assert lives.job.driver.found_nothing
        assert 100.9 <= loop.time() - began < 102.0
        assert lives.job.world.asked == []

    play(tmp_path, test)


@pytest.mark.parametrize("dies_after_s", [0.0, 5.0])
def test_an_agent_of_this_machine_that_is_dead_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after_s: float
) -> None:
    dead: list[bool] = [] if dies_after_s else [True]
    monkeypatch.setattr(takeover, "may_come_back", lambda kept: not (kept.local and dead))

    async def test(lives: Lives) -> None:
        loop = asyncio.get_running_loop()
        await lives.job.train(2)
        await lives.dies()
        for number, kept in lives.agents.items():
            if kept.host == "b":
                lives.agents[number] = replace(kept, local=True)
        lives.takes_over()
        await lives.listens()
        began = loop.time()
        await lives.are_back("a")
        await asyncio.sleep(dies_after_s)
        assert lives.record(B0) is not None
        dead.append(True)
        await lives.until(lambda: lives.record(B0) is None, "it is lost")
        assert loop.time() - began < dies_after_s + 2.5

    play(tmp_path, test)


def _is_here(lives: Lives, name: str, process: subprocess.Popen[bytes]) -> None:
    """The agent of that host is on the driver's machine, and is this process."""
    for number, kept in lives.agents.items():
        if kept.host == name:
            assert kept.hello is not None
            owner = str(ProcessName.of(process.pid))
            lives.agents[number] = replace(kept, local=True, hello=replace(kept.hello, owner=owner))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """In the place of an agent's process."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("others_are_back", [True, False])
def test_an_agent_of_this_machine_that_is_stopped_is_killed(
    *, tmp_path: Path, sleeper: subprocess.Popen[bytes], others_are_back: bool
) -> None:
    """Its workers would train on, or have the memory of their devices, for as long as it lives."""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)

    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        _is_here(lives, "b", sleeper)
        lives.takes_over(driver_timeout_s=1000.0, journal=JournalPlace(tmp_path))
        await lives.listens()
        if others_are_back:
            await lives.are_back("a")
        await asyncio.sleep(15.0)
        assert lives.record(B0) is not None
        assert sleeper.poll() is None
        if others_are_back:
            await lives.until(lambda: lives.record(B0) is None, "it is lost")
            assert lives.record(A0) is not None
        else:
            await lives.job.end()
            assert lives.job.driver.found_nothing, (
                "nobody's lease is longer, and no round goes on without one of its own"
            )
        assert sleeper.wait() == -signal.SIGKILL
        assert lives.job.text().count("killing it, and its workers with it") == 1

    play(tmp_path, test)


def test_one_that_only_runs_slowly_is_waited_for(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Its workers may have trained for long since their last commit."""

    async def test(lives: Lives) -> None:
        await lives.job.train(1)
        await lives.dies()
        _is_here(lives, "a", sleeper)
        lives.takes_over(driver_timeout_s=1000.0, journal=JournalPlace(tmp_path))
        await lives.listens()
        await asyncio.sleep(300.0)
        assert lives.job.text().count("its workers may still be training with each other") == 1
        assert sleeper.poll() is None
        await lives.are_back()
        assert "no driver for 1.5 s; 1 worker on 1 host" in lives.job.text()
        assert lives.job.driver.stepper.state.round_id == 1

    play(tmp_path, test, A)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_or_until_it_is_stopped_or_dies(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    async def test(lives: Lives) -> None:
        loop = asyncio.get_running_loop()
        await lives.job.train(2)
        await lives.dies()
        _is_here(lives, "a", sleeper)
        lives.takes_over(driver_timeout_s=1000.0, journal=JournalPlace(tmp_path))
        await lives.listens()
        await asyncio.sleep(100.0)
        began = loop.time()
        sleeper.send_signal(number)
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        await lives.job.end()
        assert lives.job.driver.found_nothing
        assert sleeper.wait() == -signal.SIGKILL
        # Virtual seconds pass while the kernel ends it; nobody waits for a thousand.
        assert loop.time() - began < 500.0, "of a round of which one is dead nobody is waited for"

    play(tmp_path, test)


def test_one_that_is_late_is_lost_where_others_are_back(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        _is_here(lives, "b", sleeper)
        lives.takes_over(driver_timeout_s=1000.0, journal=JournalPlace(tmp_path))
        await lives.are_back("a")
        await lives.until(lambda: lives.record(B0) is None, "it is lost")
        assert sleeper.poll() is None
        assert "killed" not in lives.job.text()

    play(tmp_path, test)


def test_a_worker_of_a_host_whose_agent_was_lost_is_lost(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.agents = {number: kept for number, kept in lives.agents.items() if kept.host != "b"}
        lives.takes_over()
        await lives.are_back("a")
        await lives.until(lambda: lives.record(B0) is None, "it is lost")
        assert any(isinstance(event, HostLost) for _, event in lives.job.driver.stepper.history)

    play(tmp_path, test)


def test_what_was_ordered_while_an_agent_was_away_is_ordered_when_it_is_back(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over()
        await lives.are_back("a")
        lives.job.driver.interrupts.end()
        await lives.until(lambda: lives.hosts["a"].of(words.Stop), "a stop")
        await lives.are_back("b")
        await lives.until(lambda: lives.hosts["b"].of(words.Stop), "a stop")
        assert await lives.job.end() > 0
        assert not lives.job.living()

    play(tmp_path, test)


def test_nobody_is_unlisted_before_all_agents_are_back(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        lives.takes_over()
        await lives.are_back("a")
        await asyncio.sleep(10.0)
        assert [host.name for host in lives.job.driver.stepper.state.hosts] == ["a", "b"]
        assert lives.record(B0) is not None
        assert not lives.job.world.fleet.remote.dials
        await lives.are_back("b")
        await asyncio.sleep(10.0)
        assert [host.name for host in lives.job.driver.stepper.state.hosts] == ["a", "b"]
        assert not lives.job.world.fleet.remote.dials
        assert lives.job.driver.stepper.state.round_id == 1

    play(tmp_path, test)


def test_a_driver_that_has_lost_its_job_leaves_everything_alone(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await rest()
        agents = lives.job.driver.agents
        agents.fleet.superseded(2)
        dial = Dial(agents.admission, Identity(Role.JOINER))
        assert dial.says(hello(key="0" * 64, slots=1, host="c")) is None, "it is not told that the job is over"
        assert await lives.job.end() == ExitCode.OTHER_DRIVER
        for host in lives.job.world.hosts.values():
            assert host.transport.is_closed
            assert not host.of(words.Close)
            assert not host.of(words.Stop)
        assert len(lives.job.living()) == 2
        assert "another driver has this job" in lives.job.text()

    play(tmp_path, test)


def test_who_asks_when_the_job_has_ended_is_told_so(tmp_path: Path) -> None:
    async def test(lives: Lives) -> None:
        await lives.job.train(2)
        await lives.dies()
        for worker in (A0, B0):
            lives.hosts[worker.hostname].workers[worker].is_stubborn = True
        answer = lives.job.ready(A0, after=1, cause=ReadyCause.INTERNAL_ERROR)
        lives.takes_over(replace(lives.state, end=EndJob(1, "it failed")))
        await lives.are_back()
        assert isinstance(await answered(lives, answer), JobOver)
        await lives.job.end()

    play(tmp_path, test)
