"""Decisions of the membership core, one at a time. Whole histories: tests/scenarios; random ones: tests/property.

Every step is audited by ``membership_job.Job``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_driver.core import placement
from elastic_driver.core.deadlines import JOINERS_WINDOW_S, next_deadline
from elastic_driver.core.events import (
    DiscoveryFailed,
    DismissWorker,
    DrainRequested,
    EndJob,
    HostsDiscovered,
    PublishRound,
    ReportExit,
    ReportResumed,
    SetNotice,
    StartWorker,
    StopRequested,
    StopWorker,
    TimerExpired,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerReady,
    WorkerRunning,
    WorkerSpared,
    WorkersReported,
)
from elastic_driver.core.membership import new_state, step
from elastic_driver.core.placement import keeps_its_places
from elastic_driver.core.state import DISMISSED_GRACE_S, JobPhase, ResetTally, WorkerPhase
from elastic_driver.hosts import Host
from elastic_driver.words import Backend, NoticeKind, OnChange, ReadyCause
from tests.support.fakes.membership_job import BOTH, Job, worker_id

pytestmark = pytest.mark.unit


def kinds(commands: list[object]) -> list[str]:
    return [type(command).__name__ for command in commands]


def ended(job: Job) -> EndJob:
    assert job.ended is not None, "the job goes on"
    return job.ended


def published(job: Job) -> PublishRound:
    command = job.last(PublishRound)
    assert isinstance(command, PublishRound)
    return command


# --- the start -------------------------------------------------------------------------------------------------------


def test_a_job_that_has_not_begun_has_no_past() -> None:
    state = Job(num_proc=2).state
    assert (state.phase, state.round_id, state.commits, state.resets) == (JobPhase.WAITING, 0, 0, 0)
    assert not state.workers


def test_nothing_starts_below_np_and_everything_up_to_max_np_does() -> None:
    job = Job(num_proc=3, min_num_proc=1, max_num_proc=5)
    assert job.hosts("a:2") == []
    commands = job.hosts("a:2", "b:4")
    assert kinds(commands) == ["StartWorker"] * 5
    assert [str(c.worker) for c in commands if isinstance(c, StartWorker)] == ["a[0]", "a[1]", "b[0]", "b[1]", "b[2]"]
    assert [c.planned.rank for c in commands if isinstance(c, StartWorker)] == [0, 1, 2, 3, 4]


def test_the_first_round_is_formed_when_all_have_called_init() -> None:
    job = Job(num_proc=2)
    job.hosts("a:2")
    assert job.ready("a[1]") == []
    assert kinds(job.ready("a[0]")) == ["PublishRound", "SetNotice"]
    assert job.ranks() == ["a[0]", "a[1]"]
    assert (published(job).sync, published(job).commits, published(job).old_size) == (True, 0, 0)


def test_slots_that_come_in_time() -> None:
    job = Job(num_proc=2, elastic_timeout_s=60.0)
    job.hosts("a:1")
    job.hosts("a:2", at=59.875)
    assert job.state.phase is JobPhase.STARTING


def test_slots_that_do_not() -> None:
    job = Job(num_proc=2, elastic_timeout_s=60.0)
    job.hosts("a:1")
    job.timer()
    assert (ended(job).exit_code, job.now) == (3, 60.0)
    assert "gave up after 60 s (--elastic-timeout)" in ended(job).message


def test_hosts_that_go_while_the_first_workers_boot() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.hosts("a:1", "b:1")
    job.ready("a[0]")
    commands = job.hosts("a:1")
    assert [str(c.worker) for c in commands if isinstance(c, StopWorker)] == ["b[0]"]
    assert job.state.slots_deadline is not None
    job.exit("b[0]", -15)
    job.hosts("a:1", "c:1")
    job.ready("c[0]")
    assert job.ranks() == ["a[0]", "c[0]"]


def test_a_worker_that_ends_well_before_its_first_round_has_not_trained() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.hosts("a:1", "b:1")
    job.ready("a[0]")
    job.exit("b[0]", 0)
    assert job.state.blacklist.is_blacklisted("b")
    assert job.ranks() == ["a[0]"]


def test_with_a_cooldown_a_start_is_tried_again() -> None:
    job = Job(num_proc=2, min_num_proc=2, cooldown_range_s=(5.0, 60.0))
    job.hosts("a:1", "b:1")
    job.ready("a[0]")
    job.exit("b[0]", 1)
    assert job.ended is None
    job.timer()
    assert job.now == 5
    job.ready("b[0]#1")
    assert job.ranks() == ["a[0]", "b[0]#1"]


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_crash_stops_the_siblings_aborts_the_round_and_counts_once() -> None:
    job = Job(num_proc=3, cooldown_range_s=(10.0, 100.0))
    job.train("a:1", "b:2")
    commands = job.exit("b[0]", 1)
    assert kinds(commands) == ["ReportExit", "StopWorker", "SetNotice"]
    assert job.exit("b[1]", -9) == [ReportExit(worker_id("b[1]"), expected=True)], "the sibling's end is no news"
    (entry,) = job.state.blacklist.entries
    assert (entry.hostname, entry.failures) == ("b", 1)
    job.ready("a[0]", commits=1)
    assert (job.ranks(), job.state.resets, published(job).sync) == (["a[0]"], 1, True)


def test_a_lost_collective_resets_without_blaming_a_host() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    commands = job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR, detail="connection reset")
    assert [c.kind for c in commands if isinstance(c, SetNotice)] == [NoticeKind.ABORT]
    job.ready("b[0]")
    assert (job.ranks(), job.state.blacklist.entries, job.state.resets) == (["a[0]", "b[0]"], (), 1)
    assert "connection reset" in published(job).cause


def test_a_member_that_dies_after_it_was_ready_is_not_in_the_next_round() -> None:
    job = Job(num_proc=3)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9)
    job.ready("a[0]")
    job.exit("a[0]", -9)
    job.ready("b[0]")
    assert job.ranks() == ["b[0]"]


def test_the_silent_are_voted_out_at_the_deadline_and_their_hosts_stay() -> None:
    job = Job(num_proc=3, start_timeout_s=30.0)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9, at=10.0)
    job.ready("a[0]", at=12.0)
    commands = job.timer()
    assert job.now == 40
    assert [str(c.worker) for c in commands if isinstance(c, StopWorker)] == ["b[0]"]
    assert job.ranks() == ["a[0]"]
    assert not job.state.blacklist.is_blacklisted("b")
    assert kinds(job.exit("b[0]", -9)) == ["ReportExit", "StartWorker"]


def test_the_hung_before_their_first_round_are_replaced_and_their_hosts_stay() -> None:
    job = Job(start_timeout_s=30.0)
    job.train("a:1")
    job.hosts("a:1", "b:1", at=5.0)
    assert kinds(job.timer()) == ["StopWorker"]
    assert (job.now, job.state.blacklist.entries) == (35.0, ())
    assert kinds(job.exit("b[0]", -9)) == ["ReportExit", "StartWorker"]
    assert job.state.phase is JobPhase.RUNNING


def test_the_reset_limit_is_for_failures_only() -> None:
    job = Job(num_proc=2, reset_limit=0)
    job.train("a:1", "b:1")
    job.hosts("a:1")
    job.ready("a[0]", commits=1)
    job.ready("b[0]", commits=1)
    assert (job.ended, job.state.resets) == (None, 0)
    job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR)
    assert (ended(job).exit_code, "--reset-limit" in ended(job).message) == (4, True)


def test_the_loss_of_all_names_the_first() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.exit("a[0]", 1)
    assert ended(job).exit_code == 1
    assert ended(job).message.startswith("worker b[0] (rank 1) killed by SIGKILL; all workers of round 1 ")


def test_a_dead_joiner_is_nobodys_failure_but_its_hosts() -> None:
    job = Job()
    job.train("a:1")
    job.hosts("a:1", "b:1")
    job.exit("b[0]", 1)
    assert job.state.blacklist.is_blacklisted("b")
    assert (job.state.phase, job.state.notice_kind) == (JobPhase.RUNNING, NoticeKind.NONE)
    job.exit("a[0]", 0)
    assert ended(job).exit_code == 0


def test_siblings_of_a_dead_joiner_go_on() -> None:
    job = Job(num_proc=1, max_num_proc=2)
    job.train("a:1")
    job.hosts("a:2")
    job.exit("a[1]", 1)
    assert job.state.phase is JobPhase.RUNNING
    assert job.ranks() == ["a[0]"]
    assert next_deadline(job.state) is None
    job.exit("a[0]", 0)
    assert ended(job).exit_code == 0


def test_a_host_that_was_removed_is_not_blamed_for_what_happens_to_it() -> None:
    job = Job(num_proc=3)
    job.train("a:1", "b:2")
    job.hosts("a:1")
    commands = job.exit("b[0]", -9)
    assert "StopWorker" not in kinds(commands), "its sibling may still hand over what it has"
    assert not job.state.blacklist.is_blacklisted("b")
    job.ready("a[0]", commits=1)
    job.ready("b[1]", commits=2)
    assert job.ranks() == ["a[0]"]
    job.exit("b[1]", 0)
    assert kinds(job.hosts("a:1", "b:2")) == ["StartWorker"] * 2


# --- ends ------------------------------------------------------------------------------------------------------------


def test_all_members_end_with_0() -> None:
    job = Job(num_proc=2)
    job.train("a:2")
    job.exit("a[1]", 0)
    assert job.ended is None
    job.exit("a[0]", 0)
    assert ended(job).exit_code == 0


def test_members_that_finish_are_not_disturbed_by_growth() -> None:
    job = Job(num_proc=2)
    job.train("a:2")
    job.exit("a[1]", 0)
    assert job.hosts("a:2", "b:2") == []


def test_ready_joiners_do_not_hold_up_the_end() -> None:
    job = Job()
    job.train("a:1")
    job.hosts("a:1", "b:1")
    job.ready("b[0]")
    job.exit("a[0]", 0)
    assert ended(job).exit_code == 0


def test_a_joiner_that_never_synced_still_counts_as_one_who_trained() -> None:
    job = Job(num_proc=1)
    job.train("a:1", commits=3)
    job.hosts("a:1", "b:1")
    job.ready("b[0]")
    job.ready("a[0]", commits=4)
    assert job.ranks() == ["a[0]", "b[0]"]
    job.exit("a[0]", 0)
    job.ready("b[0]", cause=ReadyCause.INTERNAL_ERROR, commits=0)
    assert ended(job).exit_code == 1
    assert "a rank left early" in ended(job).message


def test_the_last_of_the_removed_members_can_finish_the_job() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.hosts("c:1")
    job.exit("a[0]", 0)
    job.exit("b[0]", 0)
    assert ended(job).exit_code == 0


def test_an_interruption_ends_the_job_wherever_it_stands() -> None:
    job = Job(num_proc=2)
    starting, waiting = job.fork(), job.fork()
    job.train("a:2")
    starting.hosts("a:2")
    for one in (job, starting, waiting):
        one.feed(StopRequested(2, "SIGINT"))
        assert ended(one).exit_code == 130
        assert next_deadline(one.state) is None
        assert one.feed(StopRequested(15, "SIGTERM")) == []


def test_discovery_that_keeps_failing() -> None:
    job = Job(elastic_timeout_s=60.0)
    job.train("a:1")
    assert kinds(job.feed(DiscoveryFailed("timed out"), at=10.0)) == ["Report"]
    assert job.feed(DiscoveryFailed("timed out"), at=11.0) == []
    assert next_deadline(job.state) is None, "a job that runs is not ended by it"
    assert job.hosts("a:1", answered=False, at=50.0) == []
    assert job.state.discovery.outage is not None
    assert [command.text for command in job.hosts("a:1", at=80.0)] == ["host discovery works again, after 70 s"]


# --- planned changes -------------------------------------------------------------------------------------------------


def test_growth_closes_the_round_only_when_joiners_are_ready() -> None:
    job = Job()
    job.train("a:1")
    job.hosts("a:1", "b:1")
    assert job.state.notice_kind is NoticeKind.NONE
    job.ready("b[0]")
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED
    assert job.ranks() == ["a[0]"]
    job.ready("a[0]", commits=5)
    assert (job.ranks(), published(job).commits, published(job).sync) == (["a[0]", "b[0]"], 5, True)


def test_joiners_wait_a_moment_for_each_other() -> None:
    job = Job()
    job.train("a:1")
    job.hosts("a:1", "b:1", "c:1")
    job.ready("b[0]", at=10.0)
    assert next_deadline(job.state) == 10 + JOINERS_WINDOW_S
    both = job.fork()
    both.ready("c[0]", at=11.0)
    assert both.state.notice_kind is NoticeKind.HOSTS_UPDATED
    job.timer()
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED


def test_survivors_that_suffice_wait_for_no_joiner() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    job.hosts("a:1", "b:1", "c:1", "d:1")
    job.ready("c[0]")
    job.exit("b[0]", -9)
    job.ready("a[0]")
    assert job.ranks() == ["a[0]", "c[0]"]


def test_members_that_are_needed_train_on_while_their_replacements_boot() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.hosts("a:1", "c:1")
    assert job.state.notice_kind is NoticeKind.NONE
    job.ready("c[0]")
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED


def test_the_removed_are_dismissed_and_stopped_when_they_do_not_go() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.hosts("a:1")
    job.ready("a[0]", commits=1, at=10.0)
    commands = job.ready("b[0]", commits=1)
    assert [str(c.worker) for c in commands if isinstance(c, DismissWorker)] == ["b[0]"]
    assert published(job).sync is False
    commands = job.timer()
    assert job.now == 10 + DISMISSED_GRACE_S
    assert kinds(commands) == ["StopWorker"]
    assert next_deadline(job.state) is None


def test_unequal_commits_sync() -> None:
    job = Job(num_proc=3)
    job.train("a:1", "b:1", "c:1")
    job.hosts("a:1", "b:1")
    for name, commits in (("a[0]", 4), ("b[0]", 5), ("c[0]", 4)):
        job.ready(name, commits=commits)
    assert (job.ranks(), published(job).sync, published(job).commits) == (["b[0]", "a[0]"], True, 5)


def test_the_root_is_among_the_most_advanced_the_one_with_the_lowest_old_rank() -> None:
    job = Job(num_proc=4)
    job.train("a:1", "b:1", "c:1", "d:1")
    job.exit("a[0]", -9)
    for name, commits in (("d[0]", 9), ("c[0]", 9), ("b[0]", 8)):
        job.ready(name, commits=commits)
    assert job.ranks() == ["c[0]", "b[0]", "d[0]"]


def test_a_blank_worker_that_claims_commits_is_no_root() -> None:
    job = Job()
    job.train("a:1")
    job.hosts("a:1", "b:1")
    job.ready("b[0]", commits=1000)
    job.ready("a[0]", commits=2)
    assert (job.ranks(), published(job).commits) == (["a[0]", "b[0]"], 2)


def test_a_flap_changes_nothing() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    before = job.state
    job.hosts("b:1")
    job.hosts("b:1", "a:1")
    assert dataclasses.replace(job.state, notice_version=before.notice_version) == before


def test_below_min_np_the_members_wait_and_go_on() -> None:
    job = Job(num_proc=2, min_num_proc=2, elastic_timeout_s=60.0)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9, at=10.0)
    job.ready("a[0]", commits=3, at=11.0)
    assert next_deadline(job.state) == 71
    late = job.fork()
    late.timer()
    assert (ended(late).exit_code, late.now) == (3, 71.0)
    job.hosts("a:1", "c:1", at=40.0)
    job.ready("c[0]", at=41.0)
    assert (job.ranks(), job.state.slots_deadline) == (["a[0]", "c[0]"], None)


def test_enough_workers_at_the_last_moment_are_enough() -> None:
    """The moment that the first joiner gives the others must not run into the end of the wait for slots."""
    job = Job(num_proc=2, min_num_proc=2, elastic_timeout_s=60.0)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9, at=10.0)
    job.ready("a[0]", commits=3)
    job.hosts("a:1", "c:1", "d:1", at=60.0)
    job.ready("c[0]", at=68.0)
    assert job.round_id == 1
    job.timer()
    assert (job.now, job.ranks()) == (70.0, ["a[0]", "c[0]"])


def test_one_who_made_room_for_a_handover_stays_ready() -> None:
    job = Job(num_proc=2, min_num_proc=1, max_num_proc=2)
    job.train("a:2")
    job.hosts("b:2")
    for name in ("b[0]", "b[1]"):
        job.ready(name)
    for name in ("a[0]", "a[1]"):
        job.ready(name, commits=6)
    assert (job.ranks(), job.of(WorkerPhase.READY)) == (["a[0]", "b[0]"], ["b[1]"])
    for name in ("a[0]", "b[0]"):
        job.running(name)
        job.ready(name, commits=7)
    assert job.ranks() == ["b[0]", "b[1]"]
    assert "b[1]#1" not in job.of(WorkerPhase.BOOTING)


def test_a_place_whose_process_does_not_go_away_is_passed_over() -> None:
    job = Job(num_proc=2, min_num_proc=1, max_num_proc=2, start_timeout_s=30.0)
    job.hosts("a:1", "b:1", "c:1")
    job.ready("a[0]")
    commands = job.timer()
    assert [str(c.worker) for c in commands if isinstance(c, StopWorker)] == ["b[0]"]
    assert [str(c.worker) for c in commands if isinstance(c, StartWorker)] == ["c[0]"]


# --- what belongs to the past ----------------------------------------------------------------------------------------


def test_words_of_the_past_change_nothing() -> None:
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.hosts("a:1", "b:1", "c:1")
    before = job.state
    assert job.ready("a[0]", after=0) == [], "answered already"
    assert job.ready("a[0]", after=2) == [], "a round that was never"
    assert job.ready("x[0]", after=1) == [], "nobody"
    assert job.ready("a[0]#1", after=0) == [], "a process that was never started"
    assert job.running("c[0]") == [], "no member"
    assert job.exit("x[0]", 1) == []
    assert job.feed(TimerExpired()) == []
    assert job.state == before


def test_the_report_of_a_resumed_round_comes_once_when_the_last_trains() -> None:
    job = Job(num_proc=2)
    job.hosts("a:2")
    job.ready("a[0]", at=1.0)
    job.ready("a[1]", at=2.0)
    assert job.running("a[0]", at=3.0) == []
    assert job.running("a[1]", at=4.5) == [ReportResumed(1, 0, 4.5)]
    assert job.running("a[1]") == []


def test_backends() -> None:
    both = Job(num_proc=2)
    both.hosts("a:2")
    both.ready("a[0]", backends=(Backend.TORCH, Backend.NATIVE))
    both.ready("a[1]")
    assert published(both).backend is Backend.NATIVE
    one = Job(num_proc=2)
    one.hosts("a:2")
    one.ready("a[0]", backends=(Backend.TORCH,))
    one.ready("a[1]")
    assert published(one).backend is Backend.TORCH
    none = Job(num_proc=2)
    none.hosts("a:2")
    none.ready("a[0]", backends=())
    none.ready("a[1]")
    assert ended(none).exit_code == 2
    assert "(a[0] has none; a[1] has native, torch)" in ended(none).message
    alone = Job()
    alone.hosts("a:1")
    alone.ready("a[0]", backends=())
    assert alone.ranks() == ["a[0]"]


def test_members_that_leave_go_as_soon_as_there_are_enough_without_them() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.hosts("b:1", "c:1", "d:1")
    assert job.state.notice_kind is NoticeKind.NONE
    # d still boots, and c would wait for it; but a is to go, and b and c are the two that it takes.
    job.ready("c[0]")
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED


def test_a_place_that_comes_back_takes_none_from_one_that_boots() -> None:
    job = Job(num_proc=2, min_num_proc=1, max_num_proc=2)
    job.hosts("a:1", "b:1", "c:1")
    job.feed(DrainRequested("a", None, "as asked"))
    job.exit("a[0]", -15)
    assert job.of(WorkerPhase.BOOTING) == ["b[0]", "c[0]"]
    assert job.feed(DrainRequested("a", None, "as asked", undo=True))[1:] == []
    assert job.of(WorkerPhase.BOOTING) == ["b[0]", "c[0]"]


def test_a_standby_takes_no_place_from_a_member_behind_it() -> None:
    job = Job(num_proc=2, min_num_proc=1, max_num_proc=2, num_standby=1, cooldown_range_s=(10.0, 60.0))
    job.train("a:1", "b:1", "c:1")
    job.ready("c[0]")
    job.exit("a[0]", -9)
    job.ready("b[0]")
    assert job.ranks() == ["b[0]", "c[0]"]
    job.timer()
    job.ready("a[0]#1")
    assert (job.state.notice_kind, job.of(WorkerPhase.READY)) == (NoticeKind.NONE, ["a[0]#1"])


def test_resets_count_for_as_long_as_the_window() -> None:
    tally = ResetTally(7, (0.0, 1.0))
    assert [tally.that_count(now, 10.0) for now in (9.0, 10.0, 11.0)] == [2, 1, 0]
    assert tally.that_count(11.0, None) == 7
    assert tally.one_more(10.0, 10.0) == ResetTally(8, (1.0, 10.0))
    assert tally.one_more(10.0, None) == ResetTally(8, ())


def test_step_changes_no_argument() -> None:
    state = new_state(Job(num_proc=2).policy, 0.0)
    copy = dataclasses.replace(state)
    step(state, HostsDiscovered((Host("a", 2),)), 1.0)
    assert state == copy


def test_after_the_end_only_the_dead_are_taken_off_the_list() -> None:
    job = Job(num_proc=3)
    job.train("a:2", "b:1")
    job.feed(StopRequested(15, "SIGTERM"))
    worker = worker_id("a[0]")
    assert job.feed(WorkerExited(worker, -15, "killed by SIGTERM", 0.0)) == [ReportExit(worker, expected=True)]
    assert [str(record.worker) for record in job.state.workers] == ["a[1]", "b[0]"]
    assert job.lose("a") == [ReportExit(worker_id("a[1]"), expected=True)]
    assert [str(record.worker) for record in job.state.workers] == ["b[0]"]


# --- what is remembered from round to round -----------------------------------------------------------------------


def test_a_member_that_hangs_in_a_planned_reset_makes_it_a_failure() -> None:
    job = Job(num_proc=3, start_timeout_s=30.0)
    job.train("a:1", "b:1", "c:1")
    job.hosts("a:1", "b:1")
    job.ready("a[0]", commits=1)
    job.ready("c[0]", commits=1)
    job.timer()
    assert (job.ranks(), published(job).sync, job.state.resets) == (["a[0]"], True, 1)


def test_among_equals_the_root_stays_the_root() -> None:
    job = Job(num_proc=3)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9)
    job.ready("a[0]", commits=1)
    job.ready("b[0]", commits=2)
    assert job.ranks() == ["b[0]", "a[0]"]
    job.ready("a[0]", commits=3, cause=ReadyCause.INTERNAL_ERROR)
    job.ready("b[0]", commits=3)
    assert job.ranks() == ["b[0]", "a[0]"], "a started earlier, but b has rank 0"


def test_the_first_failure_is_that_of_the_last_round() -> None:
    job = Job(num_proc=3)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9)
    job.ready("a[0]")
    job.ready("b[0]")
    job.exit("b[0]", 7)
    job.exit("a[0]", 1)
    assert ended(job).message.startswith("worker b[0] (rank 1) exited with code 7; ")


def test_who_failed_first_is_who_raised_first_not_whose_end_was_seen_first() -> None:
    """Ending takes its time, too: peers may see the connections close, raise, and be gone before it."""
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", 1, at=10.0, error="RuntimeError: connection closed by peer", raised_s=0.125)
    job.exit("a[0]", 1, at=10.25, error="ValueError: bad row", where="train.py:3", raised_s=0.5)
    assert ended(job).message.startswith("ValueError: bad row (train.py:3), rank 0 on a; ")


@pytest.mark.parametrize(
    ("returncode", "raised_s", "first"),
    [
        (1, 0.5, "ValueError: bad row (train.py:3), rank 0 on a;"),
        (
            -15,
            0.5,
            "ValueError: bad row (train.py:3), rank 0 on a, exited with code -15;",
        ),  # the signal met it on its way out
        (1, 0.0625, "RuntimeError: connection closed (train.py:5), rank 1 on a;"),  # it was raised for the other's end
        (-15, 300.0, "RuntimeError: connection closed (train.py:5), rank 1 on a;"),  # it went on after that error
        (-15, None, "RuntimeError: connection closed (train.py:5), rank 1 on a;"),
    ],
)
def test_who_was_stopped_for_anothers_failure_may_have_failed_first(
    returncode: int, raised_s: float | None, first: str
) -> None:
    job = Job(num_proc=2, min_num_proc=2, on_change=OnChange.RESTART)
    job.train("a:2")
    job.exit("a[1]", 1, at=10.0, error="RuntimeError: connection closed", where="train.py:5", raised_s=0.125)
    job.exit("a[0]", returncode, at=10.125, error="ValueError: bad row", where="train.py:3", raised_s=raised_s)
    assert ended(job).message.startswith(f"{first} ")


def test_when_places_run_short_members_keep_theirs_before_those_who_boot() -> None:
    job = Job(num_proc=2, min_num_proc=2, max_num_proc=2, cooldown_range_s=(5.0, 60.0))
    job.train("c:1", "a:1", "b:1")
    job.exit("c[0]", -9)
    job.ready("a[0]")
    job.ready("b[0]")
    assert job.ranks() == ["a[0]", "b[0]"]
    job.hosts("c:1")
    job.timer()
    assert job.of(WorkerPhase.BOOTING) == ["c[0]#1"]
    # The members' hosts are back, behind c in the order of hosts.
    commands = job.hosts("a:1", "b:1", "c:1")
    assert [str(c.worker) for c in commands if isinstance(c, StopWorker)] == ["c[0]#1"]
    assert job.state.notice_kind is NoticeKind.NONE


# --- reports that come together --------------------------------------------------------------------------------------


def test_who_fails_for_one_that_was_killed_does_not_end_a_start() -> None:
    """Both have died while there was no driver: the next one is told of both at once."""
    job = Job(num_proc=2, min_num_proc=2, on_change=OnChange.RESTART, ends_at_start=True)
    job.train("a:2")
    killed = WorkerExited(worker_id("a[0]"), -9, "killed by SIGKILL", 0.0)
    follows = WorkerExited(worker_id("a[1]"), 1, "exited with code 1", 0.0, error="RuntimeError: connection closed")
    commands = job.feed(WorkersReported((killed, follows)))
    assert [str(command.worker) for command in commands if isinstance(command, StartWorker)] == ["a[0]#1", "a[1]#1"]


def test_reports_that_come_together_are_those_that_come_one_by_one() -> None:
    one_by_one, together = Job(num_proc=3, min_num_proc=1), Job(num_proc=3, min_num_proc=1)
    for job in (one_by_one, together):
        job.hosts("a:2", "b:1")
    ready = [WorkerReady(r.worker, 0, 0, ReadyCause.START, "", BOTH) for r in together.state.workers]
    for event in ready:
        one_by_one.feed(event)
    # Somebody who asks twice changes nothing here either.
    commands = together.feed(WorkersReported((*ready, ready[0])))
    assert kinds(commands).count("PublishRound") == 1
    assert together.state == one_by_one.state
    running = [WorkerRunning(worker, 1, 0) for worker in together.state.members]
    for event in running[:-1]:
        one_by_one.feed(event)
    last = one_by_one.feed(running[-1])
    assert together.feed(WorkersReported(tuple(running))) == last
    assert kinds(last) == ["ReportResumed"]
    assert together.state == one_by_one.state
    # The same again is no news.
    assert together.feed(WorkersReported(tuple(running))) == []


def test_of_reports_that_come_together_the_first_opens_the_reset() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:2", commits=4)
    lost = [
        WorkerReady(worker, 1, 4, ReadyCause.INTERNAL_ERROR, "a peer is gone", BOTH) for worker in job.state.members
    ]
    commands = job.feed(WorkersReported(tuple(lost)))
    assert kinds(commands)[:2] == ["SetNotice", "PublishRound"]
    assert published(job).cause == "worker a[0] lost its round (a peer is gone)"


@pytest.mark.parametrize(
    ("causes", "dead", "told", "reinit"),
    [
        ({"a[0]": ReadyCause.REINIT, "b[0]": ReadyCause.REINIT, "c[0]": ReadyCause.REINIT}, "", "all workers", True),
        ({"a[0]": ReadyCause.HOSTS_UPDATED, "b[0]": ReadyCause.REINIT, "c[0]": ReadyCause.REINIT}, "", "workers", True),
        ({"a[0]": ReadyCause.INTERNAL_ERROR, "b[0]": ReadyCause.REINIT}, "c[0]", "worker b[0]", False),
    ],
)
def test_who_calls_shutdown_and_init_is_told_of_as_that(
    causes: dict[str, ReadyCause], dead: str, told: str, reinit: bool
) -> None:
    job = Job(num_proc=3, min_num_proc=1)
    job.train("a:1", "b:1", "c:1")
    if dead:
        job.exit(dead, -9)
    for worker, cause in causes.items():
        job.ready(worker, commits=1, cause=cause)
    round_ = job.last(PublishRound)
    assert isinstance(round_, PublishRound)
    assert f"{told} " in round_.cause
    assert round_.cause.endswith(" called shutdown() and init() again")
    assert round_.reinit is reinit
    assert "changed back" not in round_.cause
    assert ("host c lost" in round_.cause) is bool(dead)
    assert job.state.reset is None


def test_a_start_that_fails_again_and_again_is_told_in_a_line_that_can_be_read() -> None:
    job = Job(num_proc=2, min_num_proc=2, cooldown_range_s=(1.0, 1.0))
    job.hosts("a:1", "b:1")
    job.ready("a[0]")
    for _ in range(40):
        job.exit(job.of(WorkerPhase.BOOTING)[0], 1)
        job.timer()
    job.ready(job.of(WorkerPhase.BOOTING)[0])
    formed = job.last(PublishRound)
    assert isinstance(formed, PublishRound)
    assert formed.cause.count("; ") == 17
    assert formed.cause.endswith("; and 24 more failures")


def test_the_end_says_what_the_first_failure_was_and_where() -> None:
    job = Job(num_proc=1, min_num_proc=1)
    job.train("a:1")
    worker = job.members[0]
    job.feed(WorkerExited(worker, 1, "exited with code 1", 0.5, "ValueError: 7 rows", "train.py:40"))
    end = job.last(EndJob)
    assert isinstance(end, EndJob)
    assert end.message.startswith("ValueError: 7 rows (train.py:40), rank 0 on a; ")


def test_who_stands_by_for_a_multiple_takes_no_place_of_a_member() -> None:
    """Whatever the order of hosts is by now: labels may move it to the front."""
    job = Job(num_proc=2, min_num_proc=2, num_proc_multiple=2)
    job.train("a:1", "b:1", "c:1", "d:1")
    job.hosts("a:1", "b:1", "c:1")
    for name in ("a[0]", "b[0]", "c[0]", "d[0]"):
        job.ready(name)
    assert (job.ranks(), job.of(WorkerPhase.READY)) == (["a[0]", "b[0]"], ["c[0]"])
    job.exit("d[0]", 0)
    for name in job.ranks():
        job.running(name)
    job.hosts("a:1,rack=1", "b:1,rack=2", "c:1,rack=1")
    assert [host.name for host in job.state.hosts] == ["a", "c", "b"]
    assert job.state.notice_kind is NoticeKind.NONE, "c would be no better than b"
    # With another on its way there are places for all; c alone still makes up no round.
    job.hosts("a:1,rack=1", "b:1,rack=2", "c:1,rack=1", "e:1")
    assert (job.of(WorkerPhase.BOOTING), job.state.notice_kind) == (["e[0]"], NoticeKind.NONE)
    job.ready("e[0]")
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED


def test_a_group_that_hands_over_again_and_again_is_no_excuse() -> None:
    """Its places are gone, as everybody knew when the round was formed: its failures count."""
    job = Job(num_proc=2, min_num_proc=2, max_num_proc=2, ranks_per_host_multiple=2)
    job.train("a:2", commits=1)
    job.hosts("b:2")
    for name in ("b[0]", "b[1]", "a[0]", "a[1]"):
        job.ready(name)
    assert job.ranks() == ["a[0]", "a[1]", "b[0]", "b[1]"]
    assert keeps_its_places(job.state)
    job.hosts("c:2")
    assert not keeps_its_places(job.state)


def test_one_that_is_spared_is_not_killed_again_for_its_exit() -> None:
    """Its script has ended, or all of it. Found by random histories: the limit of its exit had passed as well."""
    job = Job(num_proc=1)
    job.train("a:1")
    worker = job.members[0]
    job.feed(WorkerExiting(worker))
    job.feed(WorkerHung(worker, "no news", silent=False))
    job.now += 1000.0
    assert job.feed(WorkerSpared(worker)) == []


# --- what many workers cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("returncode", [0, -9])
def test_ends_that_come_together_have_all_places_made_so_often_however_many_they_are(
    returncode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts what costs time with the number of workers, and no time."""
    counts = []
    for hosts in (4, 16):
        job = Job(num_proc=2 * hosts, min_num_proc=1)
        job.train(*(f"h{number}:2" for number in range(hosts)))
        made = 0
        offered = placement._offered_places

        def counted(*args: Any, offered: Any = offered) -> Any:
            nonlocal made
            made += 1
            return offered(*args)

        how = "killed by SIGKILL" if returncode else "exited with code 0"
        ends = tuple(WorkerExited(worker, returncode, how, 0.5) for worker in job.members)
        with monkeypatch.context() as patch:
            patch.setattr(placement, "_offered_places", counted)
            step(job.state, WorkersReported(ends), job.now)
        counts.append(made)
    assert counts[0] == counts[1]
