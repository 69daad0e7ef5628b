"""What is still due of a host's processes: each line of decision 44's table that is about them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elastic_driver.core import redo as redo_module
from elastic_driver.core.events import (
    Command,
    DrainRequested,
    EndJob,
    GiveUpHost,
    HostSilent,
    KillWorker,
    PublishRound,
    ReportExit,
    StartChief,
    StartWorker,
    StopChief,
    StopRequested,
    StopWorker,
    WorkerDying,
    WorkerExiting,
    WorkerHung,
)
from elastic_driver.core.redo import HostLevels, OlderStateError, redo, unknown
from elastic_driver.core.roster import Roster
from elastic_driver.core.state import WorkerPhase
from elastic_driver.hosts import SlotInfo
from elastic_driver.words import Ending, OnChange, ReadyCause
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.unit

AGAIN = "repeated after the driver's absence"


def levels(hostname: str, *there: str, ended: Iterable[str] = (), round_id: int = 0, notice: int = 0) -> HostLevels:
    return HostLevels(hostname, tuple(map(worker_id, there)), tuple(map(worker_id, ended)), round_id, notice)


def due(job: Job, hostname: str, *there: str, ended: Iterable[str] = ()) -> list[Command]:
    return redo(job.state, levels(hostname, *there, ended=ended))


def job_of(*hosts: str, least: int = 1, **limits: object) -> Job:
    """A job that trains in a first round on these hosts."""
    job = Job(num_proc=len(hosts), min_num_proc=least, **limits)
    job.train(*hosts, commits=1)
    return job


def test_what_a_host_needs_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("a:1", "b:1", "c:1")
    assert job.state.workers.by_host  # made once for all hosts

    def refuse(*unused: object) -> None:
        raise AssertionError("all workers are looked at")

    monkeypatch.setattr(Roster, "__iter__", refuse)
    monkeypatch.setattr(redo_module, "planned_starts", refuse)
    assert due(job, "b", "b[0]") == []
    assert unknown(job.state, levels("b", "b[0]")) == ()


class TestWhoBoots:
    def test_one_that_nobody_has_heard_of_is_started_under_its_name(self) -> None:
        job = Job(num_proc=2)
        commands = job.hosts("a:1", "b:1")
        start = commands[1]
        assert isinstance(start, StartWorker)
        assert start.worker == worker_id("b[0]")
        assert due(job, "b") == [start]

    def test_its_place_is_that_of_now(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        job.hosts("a:1", "b:2")
        starts = [command for command in due(job, "b") if isinstance(command, StartWorker)]
        assert [(str(one.worker), one.planned) for one in starts] == [
            ("b[0]", SlotInfo(1, 3, 0, 2, 1, 2)),
            ("b[1]", SlotInfo(2, 3, 1, 2, 0, 1)),
        ]
        assert starts[0].hosts == ("a", "b")

    def test_before_the_first_round_the_protected_host_is_first(self) -> None:
        job = Job(num_proc=2, protect=("b",))
        commands = job.hosts("a:1", "b:1")
        assert [*due(job, "b"), *due(job, "a")] == commands

    def test_a_standby_is_started_as_one(self) -> None:
        job = Job(num_proc=1, max_num_proc=1, num_standby=1)
        job.train("a:1")
        started = [command for command in job.hosts("a:1", "b:1") if isinstance(command, StartWorker)]
        assert [(str(one.worker), one.standby) for one in started] == [("b[0]", True)]
        assert due(job, "b") == started

    def test_one_that_runs_is_not_started_again(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        assert due(job, "b", "b[0]") == []
        assert unknown(job.state, levels("b", "b[0]")) == ()

    def test_nor_is_one_that_has_ended_and_whose_end_is_still_to_come(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        assert due(job, "b", ended=["b[0]"]) == []
        assert unknown(job.state, levels("b", ended=["b[0]"])) == ()

    def test_of_another_host_nothing_is_said(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        assert due(job, "c") == []
        assert unknown(job.state, levels("c")) == ()


class TestWhoLeaves:
    def test_one_that_was_told_to_stop_is_told_so_again(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        assert [type(command) for command in job.hosts("a:1")] == [StopWorker]
        assert due(job, "b", "b[0]") == [StopWorker(worker_id("b[0]"), AGAIN)]

    @pytest.mark.parametrize("ending", [Ending.PLANNED, Ending.BROKEN])
    def test_with_the_time_that_it_was_given(self, ending: Ending) -> None:
        """Before the job's first ``init()`` its workers were restarted, and one of them is still there."""
        job = Job(num_proc=3, on_change=OnChange.RESTART, becomes_in_place=True, last_call_s=0.0)
        job.train("a:1", "b:1", "c:1")
        job.feed(DrainRequested("c", None, "as asked"))
        job.exit("a[0]", -15 if ending is Ending.PLANNED else -9)
        job.exit("b[0]", -15)
        while not job.of(WorkerPhase.BOOTING):
            job.timer()
        job.ready(job.of(WorkerPhase.BOOTING)[0])
        assert due(job, "c", "c[0]") == [StopWorker(worker_id("c[0]"), AGAIN, ending)]

    def test_one_that_was_never_started_is_unknown(self) -> None:
        """It was told to stop while its host was away, and holds its place: nobody else would report its end."""
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        job.hosts("a:1")
        assert due(job, "b") == []
        assert unknown(job.state, levels("b")) == (worker_id("b[0]"),)
        assert job.lose("b") == [ReportExit(worker_id("b[0]"), expected=True)]

    def test_one_that_was_dismissed_is_answered_and_not_stopped(self) -> None:
        job = job_of("a:1", "b:1", max_num_proc=2)
        job.hosts("a:1")
        for name in ("a[0]", "b[0]"):
            job.ready(name, cause=ReadyCause.HOSTS_UPDATED)
        assert job.of(WorkerPhase.LEAVING) == ["b[0]"]
        assert due(job, "b", "b[0]") == []

    def test_one_that_dies_by_itself_is_let_die(self) -> None:
        job = job_of("a:1", "b:1")
        job.feed(WorkerDying(worker_id("b[0]"), None, "is dumping core", 0.5))
        assert job.of(WorkerPhase.LEAVING) == ["b[0]"]
        assert due(job, "b", "b[0]") == []


class TestWhoIsKilled:
    def test_one_that_hangs_is_killed_again_and_shows_first_where(self) -> None:
        job = job_of("a:1", "b:1")
        job.feed(WorkerHung(worker_id("b[0]"), "no heartbeat for 60.0 s", silent=True))
        assert due(job, "b", "b[0]") == [KillWorker(worker_id("b[0]"), "hung: no heartbeat for 60.0 s", hangs=True)]

    def test_one_whose_script_may_be_over_is_spared_again(self) -> None:
        job = job_of("a:1", "b:1", start_timeout_s=15.0)
        job.feed(WorkerExiting(worker_id("b[0]")))
        order = job.timer()[0]
        assert isinstance(order, KillWorker)
        assert (order.hangs, order.exits) == (True, True)
        assert due(job, "b", "b[0]") == [order]

    def test_one_that_trains_on_in_a_drained_place_is_just_killed(self) -> None:
        job = job_of("a:1", "b:1", drain_timeout_s=10.0)
        job.feed(DrainRequested("b", None, "as asked"))
        order = job.timer(at=10.0)[0]
        assert isinstance(order, KillWorker)
        assert (order.hangs, order.exits) == (False, False)
        assert due(job, "b", "b[0]") == [order]

    def test_one_that_was_told_to_stop_before_is_told_both(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        job.hosts("a:1")
        job.feed(WorkerHung(worker_id("b[0]"), "no news", silent=False))
        assert [type(command) for command in due(job, "b", "b[0]")] == [StopWorker, KillWorker]

    def test_one_that_was_killed_before_it_was_started_is_not_started(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        job.feed(WorkerHung(worker_id("b[0]"), "no news", silent=False))
        assert due(job, "b") == []
        assert unknown(job.state, levels("b")) == (worker_id("b[0]"),)


class TestWhoRuns:
    def test_of_a_member_nothing_is_due(self) -> None:
        job = job_of("a:1", "b:1")
        assert due(job, "a", "a[0]") == due(job, "b", "b[0]") == []

    def test_nor_of_one_that_waits_for_its_round(self) -> None:
        job = job_of("a:1", "b:1")
        job.ready("b[0]", cause=ReadyCause.INTERNAL_ERROR)
        assert due(job, "b", "b[0]") == []

    def test_a_member_that_its_agent_does_not_know_has_ended_and_nobody_knows_how(self) -> None:
        job = job_of("a:1", "b:1")
        assert due(job, "b") == []
        assert unknown(job.state, levels("b")) == (worker_id("b[0]"),)

    def test_one_that_the_job_does_not_know_is_stopped(self) -> None:
        job = job_of("a:1", "b:1")
        job.lose("b")
        assert due(job, "b", "b[0]") == [StopWorker(worker_id("b[0]"), "the job does not know it")]

    def test_before_another_is_started_in_its_place(self) -> None:
        job = job_of("a:1", "b:1", cooldown_range_s=(1.0, 1.0))
        job.lose("b")
        job.timer()
        assert job.of(WorkerPhase.BOOTING) == ["b[0]#1"]
        assert [
            (type(one), str(one.worker)) for one in due(job, "b", "b[0]") if isinstance(one, StopWorker | StartWorker)
        ] == [
            (StopWorker, "b[0]"),
            (StartWorker, "b[0]#1"),
        ]


class TestTheHost:
    def test_one_that_was_given_up_is_given_up_again(self) -> None:
        job = job_of("a:1", "b:1")
        job.feed(HostSilent("b", 5.0))
        assert isinstance(job.last(GiveUpHost), GiveUpHost)
        assert due(job, "b", "b[0]") == [GiveUpHost("b", "it was given up while it did not respond")]
        assert due(job, "a", "a[0]") == []

    def test_one_that_is_only_silent_is_not(self) -> None:
        job = job_of("a:1", "b:1", least=2)
        job.feed(HostSilent("b", 5.0))
        assert due(job, "b", "b[0]") == []

    def test_one_that_knows_a_later_round_is_refused(self) -> None:
        job = job_of("a:1", "b:1")
        assert redo(job.state, levels("b", "b[0]", round_id=1)) == []
        with pytest.raises(OlderStateError, match="host b: its agent knows round 2, but the last one here is 1;"):
            redo(job.state, levels("b", "b[0]", round_id=2))

    def test_also_before_the_first_round_of_this_job(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        with pytest.raises(OlderStateError, match="round 1, but the last one here is 0"):
            redo(job.state, levels("b", "b[0]", round_id=1))

    def test_rounds_before_the_first_init_count(self) -> None:
        job = Job(on_change=OnChange.RESTART, becomes_in_place=True, last_call_s=0.0)
        job.train("a:1")
        job.ready("a[0]")
        assert isinstance(job.last(PublishRound), PublishRound)
        before = job.state.rounds_before
        assert before > 0
        redo(job.state, levels("a", "a[0]", round_id=job.state.round_id))
        with pytest.raises(OlderStateError):
            redo(job.state, levels("a", "a[0]", round_id=job.state.next_round_id))

    def test_one_that_knows_a_later_notice_is_refused(self) -> None:
        job = job_of("a:1", "b:1")
        last = job.state.notice_version
        assert last > 0
        assert redo(job.state, levels("b", "b[0]", notice=last)) == []
        with pytest.raises(OlderStateError, match=f"notice {last + 1}, but the last one here is {last};"):
            redo(job.state, levels("b", "b[0]", notice=last + 1))


class TestTheEnd:
    def test_who_runs_is_stopped(self) -> None:
        job = job_of("a:1", "b:1")
        job.feed(StopRequested(15, "SIGTERM"))
        assert isinstance(job.last(EndJob), EndJob)
        assert due(job, "b", "b[0]") == [StopWorker(worker_id("b[0]"), "interrupted by SIGTERM")]

    def test_nobody_is_started(self) -> None:
        job = Job(num_proc=2)
        job.hosts("a:1", "b:1")
        job.feed(StopRequested(15, "SIGTERM"))
        assert due(job, "b") == []
        assert unknown(job.state, levels("b")) == (worker_id("b[0]"),)

    def test_a_host_that_was_given_up_ends_like_others(self) -> None:
        job = job_of("a:1", "b:1")
        job.feed(HostSilent("b", 5.0))
        job.feed(StopRequested(15, "SIGTERM"))
        assert [type(command) for command in due(job, "b", "b[0]")] == [StopWorker]


class TestRestarted:
    def test_one_that_nobody_has_heard_of_gets_the_rank_of_its_launch(self) -> None:
        job = Job(num_proc=2, on_change=OnChange.RESTART, last_call_s=0.0)
        starts = [command for command in job.hosts("a:1", "b:1") if isinstance(command, StartWorker)]
        job.begin(worker_id("a[0]"))
        job.hosts("c:1", "a:1", "b:1")  # would be another plan
        assert due(job, "a", "a[0]") == []
        assert due(job, "b") == starts[1:]

    def test_one_of_a_launch_that_has_failed_is_not_started(self) -> None:
        job = Job(num_proc=2, on_change=OnChange.RESTART, last_call_s=0.0)
        job.hosts("a:1", "b:1")
        job.exit("a[0]", 1)
        assert due(job, "b") == []
        assert unknown(job.state, levels("b")) == (worker_id("b[0]"),)

    def test_one_that_ends_for_the_next_round_is_told_so_again(self) -> None:
        job = Job(num_proc=2, on_change=OnChange.RESTART, last_call_s=0.0)
        job.train("a:1", "b:1")
        job.exit("a[0]", 1)
        assert due(job, "b", "b[0]") == [StopWorker(worker_id("b[0]"), AGAIN, Ending.BROKEN)]


def test_workers_without_rounds() -> None:
    job = Job(num_proc=2, on_change=OnChange.NO_ROUNDS)
    starts = [command for command in job.hosts("a:1", "b:1") if isinstance(command, StartWorker)]
    assert due(job, "a", "a[0]") == []
    assert due(job, "b") == starts[1:]


class TestChief:
    """A process of the driver's own machine, which stands for a host of its own."""

    CHIEF, NEXT = worker_id("chief[0]"), worker_id("chief[0]#1")

    @staticmethod
    def job(*, serving: bool = True, **limits: object) -> Job:
        job = Job(num_proc=1, min_num_proc=1, num_parameter_servers=1, on_change=OnChange.NO_ROUNDS, **limits)
        job.hosts("a:1", "b:1")
        for worker in ("a[0]", "b[0]") if serving else ():
            job.begin(worker_id(worker))
        return job

    def test_servers_are_started_as_what_they_were_to_be(self) -> None:
        job = self.job(serving=False)
        (server,), (worker,) = due(job, "a"), due(job, "b")
        assert isinstance(server, StartWorker)
        assert isinstance(worker, StartWorker)
        assert (server.parameter_server, worker.parameter_server) == (0, None)

    def test_one_that_runs_is_let_be(self) -> None:
        assert due(self.job(), "chief", "chief[0]") == []

    def test_one_that_nobody_was_told_to_start_is_started(self) -> None:
        job = self.job()
        assert due(job, "chief") == [job.last(StartChief)]
        assert unknown(job.state, levels("chief")) == ()

    def test_one_whose_end_comes_is_not_started(self) -> None:
        assert due(self.job(), "chief", ended=["chief[0]"]) == []

    def test_one_that_is_to_stop_is_told_so_again(self) -> None:
        job = self.job(restart_chief=True)
        job.exit("a[0]", 1)
        assert due(job, "chief", "chief[0]") == [StopChief(1, AGAIN, job.state.policy.drain_timeout_s)]

    def test_one_that_was_to_stop_before_it_was_started_has_ended(self) -> None:
        job = self.job(restart_chief=True)
        job.exit("a[0]", 1)
        assert due(job, "chief") == []
        assert unknown(job.state, levels("chief")) == (self.CHIEF,)

    def test_another_than_the_jobs_is_stopped(self) -> None:
        assert due(self.job(), "chief", "chief[0]", "chief[0]#1") == [StopWorker(self.NEXT, "the job does not know it")]

    def test_it_ends_with_the_job(self) -> None:
        job = self.job()
        job.feed(StopRequested(15, "SIGTERM"))
        assert due(job, "chief", "chief[0]") == [StopWorker(self.CHIEF, "interrupted by SIGTERM")]
        assert unknown(job.state, levels("chief")) == (self.CHIEF,)
