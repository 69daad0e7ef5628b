"""Which rounds are setbacks, how long the pauses are, and what is said of them."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from elastic_driver.core.events import EndJob, Fault, PublishRound, Report, WorkerHung, WorkerRunning
from elastic_driver.core.setbacks import Failure, Setbacks, fault_of
from elastic_driver.core.state import JobPhase, WorkerPhase
from elastic_driver.hosts import WorkerId
from elastic_driver.words import OnChange, ReadyCause
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.unit

PAUSES = (2.0, 60.0)
A = Failure(WorkerId("a", 0, 0), 1, "exited with code 1", "ValueError: 7 rows at 0x7f12", "train.py:12")


def after(*failures: Failure, setbacks: Setbacks | None = None) -> Setbacks:
    """So many rounds, each ended by one of these."""
    setbacks = setbacks or Setbacks()
    for failure in failures:
        setbacks = setbacks.next_round().failed(failure, Fault.OWN).judged(0.0, PAUSES)
    return setbacks


@pytest.mark.parametrize("number", ["SEGV", "ABRT", "FPE", "BUS", "ILL"])
def test_signals_of_its_own_making(number: str) -> None:
    signum = signal.Signals[f"SIG{number}"]
    assert fault_of(-signum) is fault_of(128 + signum) is Fault.OWN


@pytest.mark.parametrize("number", ["KILL", "TERM", "HUP", "INT"])
def test_signals_of_others(number: str) -> None:
    signum = signal.Signals[f"SIG{number}"]
    assert fault_of(-signum) is fault_of(128 + signum) is Fault.OUTSIDE


def test_want_of_memory_is_its_own() -> None:
    assert fault_of(-signal.SIGKILL, out_of_memory=True) is Fault.OWN


def test_exit_codes_and_cores_are_its_own() -> None:
    assert fault_of(1) is fault_of(255) is fault_of(None) is Fault.OWN


def test_pauses_grow_from_the_second_on() -> None:
    setbacks, pauses = Setbacks(), []
    for _ in range(9):
        setbacks = after(A, setbacks=setbacks)
        pauses.append(setbacks.present.until)
    assert pauses == [0, 2, 4, 8, 16, 32, 60, 60, 60]


def test_further_than_ever_and_not_than_the_last_time() -> None:
    setbacks = after(A, A).next_round().came_to(0, 5).failed(A, Fault.OWN).judged(0.0, PAUSES)
    assert setbacks.count == 0
    for steps, count in ((5, 1), (3, 2), (5, 3)):
        setbacks = setbacks.next_round().came_to(0, steps).failed(A, Fault.OWN).judged(0.0, PAUSES)
        assert setbacks.count == count
    assert setbacks.next_round().came_to(1, 0).judged(0.0, PAUSES).count == 0


def test_one_death_from_outside_excuses_all_and_forgets_nothing() -> None:
    setbacks = after(A, A).next_round().failed(A, Fault.OWN).failed(A, Fault.OUTSIDE)
    assert setbacks.judged(0.0, PAUSES).count == 2


def test_who_lost_the_round_counts_when_nobody_died_and_who_raised_the_error_comes_first() -> None:
    felt = Failure(WorkerId("b", 0, 0), 0, "lost its round", "a peer is gone")
    raised = Failure(WorkerId("c", 0, 0), 2, "raised HorovodInternalError", "a bad sample")
    setbacks = Setbacks().complained(felt, raised=False).complained(raised, raised=True).complained(felt, raised=False)
    assert setbacks.judged(0.0, PAUSES).last == raised
    assert setbacks.failed(A, Fault.OWN).judged(0.0, PAUSES).last == A
    assert Setbacks().complained(felt, raised=False).judged(0.0, PAUSES).last == felt


def test_the_sentence_says_whether_it_was_the_same_each_time() -> None:
    same = Failure(WorkerId("a", 0, 1), 1, "exited with code 1", "ValueError: 9 rows at 0x55aa", "train.py:12")
    elsewhere = Failure(WorkerId("c", 0, 1), 2, "exited with code 1", "ValueError: 9 rows at 0x55aa", "train.py:12")
    other = Failure(WorkerId("a", 0, 1), 1, "killed by SIGSEGV")
    assert after(A, same, setbacks=Setbacks(3, 1)).told(has_commits=True) == (
        "ValueError: 9 rows at 0x55aa (train.py:12), rank 1 on a; the training failed 2 times in a row without "
        "getting past commit 3 and 1 operation, the same error each time"
    )
    told = after(A, elsewhere).told(has_commits=True)
    assert told.startswith("ValueError: 9 rows at 0x55aa (train.py:12), rank 2 on c; ")
    assert told.endswith(", the same error each time, but not on the same rank")
    told = after(A, other).told(has_commits=True)
    assert told.startswith("worker a[0]#1 (rank 1) killed by SIGSEGV; ")
    assert told.endswith(", with different errors, this one last, all on the same rank")
    assert after(A, other, elsewhere).told(has_commits=True).endswith(", with different errors, this one last")


def test_restarted_workers_have_no_commits_and_may_tell_of_steps() -> None:
    failure = Failure(WorkerId("a", 0, 0), 0, "exited with code 1")
    cause, alike = "worker a[0] (rank 0) exited with code 1; ", ", the same error each time"
    assert replace(Setbacks(), count=2, last=failure).told(has_commits=False) == (
        f"{cause}the training failed 2 times in a row{alike}"
    )
    assert replace(Setbacks(commits=40), count=2, last=failure).told(has_commits=False) == (
        f"{cause}the training failed 2 times in a row without getting past step 40{alike}"
    )


def test_a_start_is_over_when_a_round_has_run_for_a_while() -> None:
    fresh = Setbacks()
    assert fresh.is_start(1000.0)
    begun = fresh.begin(1000.0)
    assert begun.is_start(1059.0)
    assert not begun.is_start(1060.0)
    assert begun.over(1059.0).judged(1059.0, (2.0, 60.0)).next_round().is_start(5000.0)
    trained = begun.over(1060.0)
    for after_it in (trained, trained.came_to(3, 0)):
        assert not after_it.judged(1060.0, (2.0, 60.0)).next_round().begin(1070.0).is_start(1071.0)


def test_what_is_said_is_one_line() -> None:
    failure = Failure.said(WorkerId("a", 0, 0), 0, "lost its round", "cannot\n  go on" + "x" * 1000, "y" * 1000)
    assert failure.error.startswith("cannot go onxxx")
    assert len(failure.error) == len(failure.where) == 300


def failing(**limits: object) -> Job:
    job = Job(num_proc=2, min_num_proc=1, **limits)
    job.train("a:1", "b:1", commits=3)
    lose(job)  # the round that has come to commit 3 is none
    return job


def lose(job: Job) -> None:
    for worker in job.members:
        job.ready(str(worker), cause=ReadyCause.INTERNAL_ERROR, detail="boom")


def test_the_job_ends_and_does_not_wait_before_it_does() -> None:
    job = failing(setbacks_limit=3)
    lose(job)
    assert job.round_id == 3
    lose(job)
    assert job.round_id == 3
    job.timer(at=job.now + 2.0)
    lose(job)
    assert isinstance(end := job.commands[-1], EndJob)
    assert (end.exit_code, job.now) == (1, 2.0)
    assert "; the training failed 3 times in a row without getting past commit 3, the same" in end.message


def test_another_training_is_no_setback_of_the_one_before() -> None:
    """It begins without commits; what it commits is progress, though the first one had come to more."""
    job = failing(setbacks_limit=3)
    for worker in job.members:
        job.feed(WorkerRunning(worker, job.round_id, 3))  # it goes on with the first one ...
    for worker in job.members:
        job.feed(WorkerRunning(worker, job.round_id, 0, another=True))  # ... and comes to its end
    for commits in (0, 1, 2, 3, 4):
        formed = job.round_id
        for worker in job.members:
            job.ready(str(worker), commits=commits, cause=ReadyCause.INTERNAL_ERROR, detail="boom")
        assert (job.round_id, job.state.setbacks.count) == (formed + 1, 0)
    for _ in range(3):
        for worker in job.members:
            job.ready(str(worker), commits=4, cause=ReadyCause.INTERNAL_ERROR, detail="boom")
        job.timer(at=job.now + 2.0)
    assert job.state.phase is JobPhase.ENDED


def test_the_state_of_another_training_is_that_with_the_most_of_its_commits() -> None:
    job = failing()
    for worker in job.members:
        job.feed(WorkerRunning(worker, job.round_id, 3))
        job.feed(WorkerRunning(worker, job.round_id, 0, another=True))
    first, second = job.members
    job.ready(str(first), commits=1, cause=ReadyCause.INTERNAL_ERROR, detail="boom")
    formed = job.ready(str(second), commits=2, cause=ReadyCause.INTERNAL_ERROR, detail="boom")
    (publish,) = [command for command in formed if isinstance(command, PublishRound)]
    assert (publish.placed[0].worker, publish.commits) == (second, 2)


def test_each_pause_is_told_once() -> None:
    job = failing()
    lose(job)
    lose(job)
    job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR)
    job.timer(at=job.now + 1.0)
    told = [command for command in job.commands if isinstance(command, Report)]
    assert [command.text.rpartition("; pausing ")[2] for command in told] == [
        "for 2 s; 10 failures in a row end the job"
    ]
    assert told[0].warning


def test_a_hang_is_its_own_failure_and_silence_is_not() -> None:
    for silent, count in ((False, 1), (True, 0)):
        job = failing(cooldown_range_s=(1.0, 1.0))
        job.feed(WorkerHung(worker_id("b[0]"), "no news for 60 s", silent))
        job.exit("b[0]", -signal.SIGABRT)
        job.ready("a[0]")
        assert job.state.setbacks.count == count


def test_who_does_not_come_back_for_the_next_round_has_failed() -> None:
    job = failing(start_timeout_s=10.0)
    job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR)
    job.timer(at=job.now + 10.0)
    assert job.state.setbacks.last is not None
    assert job.state.setbacks.last.how == "did not join the next round within 10 s (--start-timeout)"


def test_slots_that_come_too_late_for_the_pause_end_it() -> None:
    """The job waited for slots when the pause began: that wait's deadline is no reason to give up any more."""
    job = Job(num_proc=2, min_num_proc=2, elastic_timeout_s=3.0, pause_range_s=(60.0, 60.0))
    job.train("a:1", "b:1", commits=3)
    lose(job)
    lose(job)
    lose(job)
    assert job.round_id == 3
    job.exit("b[0]", -9, at=1.0)
    job.hosts("a:1")
    job.hosts("a:1", "b:1")
    job.ready("b[0]#1")
    assert job.ended is None
    job.timer()
    assert (job.now, job.round_id) == (4.0, 4)
    assert isinstance(job.last(PublishRound), PublishRound)


def test_all_lost_to_preemption_again_and_again_goes_on_from_disk() -> None:
    job = Job(durable=True, cooldown_range_s=(1.0, 1.0))
    job.train("a:1", commits=3)
    for _ in range(30):
        job.exit(job.of(WorkerPhase.MEMBER)[0], -9)
        job.timer()
        job.ready(job.of(WorkerPhase.BOOTING)[0])
        job.running(str(job.members[0]), commits=3)
    assert (job.ended, job.round_id, job.state.setbacks.count) == (None, 31, 0)


def test_a_crash_loop_from_disk_ends_whatever_the_cooldown() -> None:
    job = Job(durable=True, cooldown_range_s=(0.5, 0.5), setbacks_limit=4)
    job.train("a:1", commits=3)
    while job.ended is None:
        job.exit(job.of(WorkerPhase.MEMBER)[0], 1, error="ValueError: 7")
        while job.ended is None and not job.of(WorkerPhase.MEMBER):
            for booting in job.of(WorkerPhase.BOOTING):
                job.ready(booting)
            if not job.of(WorkerPhase.MEMBER):
                job.timer()
    assert job.ended.exit_code == 1
    assert "failed 4 times in a row without getting past commit 3, the same error each time" in job.ended.message
    assert job.now == 0.5 + 0.5 + 2.0 + 4.0, "where there is a pause, it is longer than the cooldown"


@pytest.mark.parametrize("kind", [OnChange.IN_PLACE, OnChange.RESTART])
def test_workers_that_run_out_of_memory_again_and_again_end_the_job(kind: OnChange) -> None:
    """As their host comes back each time, a preemption would not: there is another machine then."""
    ends = {}
    for starved in (True, False):
        job = Job(num_proc=2, min_num_proc=1, on_change=kind, cooldown_range_s=(1.0, 1.0), setbacks_limit=3)
        job.train("a:1", "b:1")
        for attempt in range(6):
            job.exit(f"b[0]#{attempt}", -9, out_of_memory=starved)
            if job.ended is not None:
                break
            job.cooperate()  # until there is nothing left to do: b has a worker again
        ends[starved] = job.ended
    assert ends[False] is None
    assert ends[True] is not None
    assert "; the training failed 3 times in a row" in ends[True].message


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("SyntaxError: invalid syntax", ""),
        ("ModuleNotFoundError: No module named 'tochr'", ""),
        ("ValueError: a SyntaxError", "; --reset-limit N would allow retries"),
        ("my.errors.SyntaxError: of a language of its own", "; --reset-limit N would allow retries"),
        ("", "; --reset-limit N would allow retries"),
    ],
)
def test_only_what_another_try_may_mend_is_said_to_be_tried_again(error: str, hint: str) -> None:
    job = Job(num_proc=2, min_num_proc=1, on_change=OnChange.RESTART, ends_at_start=True)
    job.train("a:2")
    job.exit("a[1]", 1, at=10.0, error=error, where="train.py:1" if error else "")
    assert job.ended is not None
    assert job.ended.message.endswith(f", within the first 60 s of the training{hint}")
