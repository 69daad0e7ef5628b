"""The soak's own rules: a training that is as it should be passes, and each thing that may go wrong is seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from history import Commit, History

SAMPLES, PER_STEP, COMMIT_EVERY = 24, 4, 3
Line = dict[str, Any]


def a_line(step: int, rank: int, *, round_id: int = 1, size: int = 2, job: str = "a", **others: Any) -> Line:
    """What a rank writes after a step; the second round is of other processes where ``attempt`` says so."""
    first = (step - 1) * PER_STEP % SAMPLES
    line = {
        "time": step * 0.02,
        "job": job,
        "worker": f"host[{rank}]#{others.pop('attempt', 0)}",
        "round": round_id,
        "rank": rank,
        "size": size,
        "step": step,
        "epoch": (step - 1) // (SAMPLES // PER_STEP),
        "commits": (step - 1) // COMMIT_EVERY,
        "samples": list(range(first, first + PER_STEP)),
        "weights": f"weights {step}",
    }
    return line | others


def steps(first: int, last: int, **others: Any) -> list[Line]:
    """Of both ranks."""
    return [a_line(step, rank, **others) for step in range(first, last + 1) for rank in (0, 1)]


def formed(round_id: int, attempt: int = 0) -> Line:
    members = [{"rank": rank, "worker": f"host[{rank}]#{attempt}"} for rank in (0, 1)]
    return {"event": "round_formed", "round_id": round_id, "members": members}


ABORT = {"event": "notice", "kind": "abort", "round_id": 1}
BOTH_GONE = [{"event": "worker_exited", "worker": f"host[{rank}]#0"} for rank in (0, 1)]


def told(*events_then_lines: list[Line]) -> History:
    """A history of one job: lists of events and of lines, in turn."""
    history = History(commit_every=COMMIT_EVERY, samples=SAMPLES, per_step=PER_STEP)
    history.begin_job("a")
    for record in (record for records in events_then_lines for record in records):
        if "event" in record:
            history.event(record)
        else:
            history.line(record)
    return history


def test_two_epochs() -> None:
    history = told([formed(1)], steps(1, 13))
    history.check_epochs(all_of_them=True)
    assert (history.epochs, history.lost, history.last) == (2, 0, 13)


def test_a_planned_change_loses_nothing() -> None:
    history = told([formed(1)], steps(1, 6), [formed(2)], steps(7, 13, round_id=2))
    history.check_epochs(all_of_them=True)
    assert (history.epochs, history.lost) == (2, 0)
    with pytest.raises(AssertionError, match="a planned change lost 2 steps"):
        told([formed(1)], steps(1, 5), [formed(2)], steps(4, 6, round_id=2))


def test_a_fault_loses_what_came_after_the_commit() -> None:
    history = told([formed(1)], steps(1, 5), [ABORT, formed(2)], steps(4, 13, round_id=2, weights="others"))
    history.check_epochs(all_of_them=True)
    assert (history.epochs, history.lost, history.lost_at_most) == (2, 2, 2)
    with pytest.raises(AssertionError, match="went back behind commit of step 3"):
        told([formed(1)], steps(1, 5), [ABORT, formed(2)], steps(3, 6, round_id=2))
    with pytest.raises(AssertionError, match="came after 5"):
        told([formed(1)], steps(1, 5), [ABORT, formed(2)], steps(7, 8, round_id=2))


def test_ranks_that_differ() -> None:
    with pytest.raises(AssertionError, match="ranks differ after step 2"):
        told([formed(1)], [*steps(1, 1), a_line(2, 0), a_line(2, 1, weights="others")])
    with pytest.raises(AssertionError, match="ranks differ on the samples"):
        told([formed(1)], [*steps(1, 1), a_line(2, 0), a_line(2, 1, samples=[1])])


def test_steps_that_do_not_follow_each_other() -> None:
    with pytest.raises(AssertionError, match="rank 0 of round 1 went from step 2 to 4"):
        told([formed(1)], [*steps(1, 2), *steps(4, 5)])
    with pytest.raises(AssertionError, match="step 2 of round 1 came after 0"):
        told([formed(1)], steps(2, 3))
    with pytest.raises(AssertionError, match="not of epoch"):
        told([formed(1)], steps(1, 3, epoch=1))


@pytest.mark.parametrize("samples", [[4, 5, 6, 6], [4, 5, 6], [4, 5, 6, 7, 8], [4, 5, 6, 24]])
def test_samples_that_are_not_used_once(samples: list[int]) -> None:
    lines = steps(1, 7)
    for line in lines:
        if line["step"] == 2:
            line["samples"] = samples
    with pytest.raises(AssertionError, match="epoch 0: samples that"):
        told([formed(1)], lines).check_epochs(all_of_them=True)
    with pytest.raises(AssertionError, match="the state says"):
        told([{"epoch": 0, "missing": 0, "repeated": 1}])


def test_epochs_are_looked_at_when_nobody_goes_back_to_them() -> None:
    history = told([formed(1)])
    for line in steps(1, 500):
        history.line(copy.deepcopy(line))
        history.check_epochs()
    assert history.epochs == (500 - 400) // 6
    assert len(history.steps) < 410


def test_rounds_and_jobs_of_the_past() -> None:
    with pytest.raises(AssertionError, match="a round of the past"):
        told([formed(1), ABORT, formed(2)], steps(1, 3, round_id=2), steps(1, 3))
    with pytest.raises(AssertionError, match="that the driver has not formed"):
        told([formed(1)], steps(1, 3, round_id=2))
    with pytest.raises(AssertionError, match="no member of round"):
        told([formed(1)], steps(1, 3, attempt=1))
    history = told([formed(1)], steps(1, 3))
    history.begin_job("b")
    history.line(a_line(4, 0))  # until it is ended, it may go on
    history.event(formed(1))
    history.line(a_line(4, 0, job="b"))
    with pytest.raises(AssertionError, match="a job of the past"):
        history.line(a_line(4, 1))


def test_a_round_that_others_have_gone_on_without() -> None:
    behind = told([formed(1)], steps(1, 5), [ABORT, formed(2)], steps(4, 5, round_id=2))
    behind.line(a_line(6, 1))  # the step that it was in
    assert behind.last == 5
    with pytest.raises(AssertionError, match="two rounds train side by side"):
        behind.line(a_line(7, 1))
    for line in (a_line(6, 0, round_id=2), a_line(6, 1, round_id=2)):
        behind.line(line)
    ahead = told([formed(1)], [*steps(1, 4), a_line(5, 0)], [ABORT, formed(2)], steps(4, 4, round_id=2))
    ahead.line(a_line(5, 1))
    with pytest.raises(AssertionError, match="two rounds train side by side"):
        ahead.line(a_line(6, 1))


def test_back_to_the_disk_in_the_same_job() -> None:
    events = [ABORT, *BOTH_GONE, formed(2, attempt=1)]
    history = told([formed(1)], steps(1, 8), events, steps(4, 13, round_id=2, attempt=1, commits=1))
    history.check_epochs(all_of_them=True)
    assert (history.from_disk, history.lost_to_disk_at_most, history.epochs) == (1, 5, 2)
    with pytest.raises(AssertionError, match="had the state"):
        told([formed(1)], steps(1, 8), [ABORT, formed(2, attempt=1)], steps(7, 8, round_id=2, attempt=1))


def a_killed_job(last: int) -> History:
    history = told([formed(1)], steps(1, last))
    history.begin_job("b")
    history.event(formed(1))
    return history


def test_the_next_job_goes_on_from_what_is_on_disk() -> None:
    history = a_killed_job(8)
    history.on_disk = Commit(2, 6, "weights 6")
    for line in steps(7, 13, job="b"):
        history.line(line)
    history.check_epochs(all_of_them=True)
    assert (history.from_disk, history.lost, history.epochs) == (1, 2, 2)


@pytest.mark.parametrize(
    ("on_disk", "first", "why"),
    [
        (Commit(2, 6, "weights 6"), 4, "commit 2 was on disk"),
        (Commit(2, 5, "weights 5"), 7, "commit 2 is of step 5"),
        (Commit(2, 6, "others"), 7, "commit 2 differs from step 6"),
    ],
)
def test_the_next_job_does_not(on_disk: Commit, first: int, why: str) -> None:
    history = a_killed_job(8)
    history.on_disk = on_disk
    with pytest.raises(AssertionError, match=why):
        history.line(a_line(first, 0, job="b"))


def test_commits_that_do_not_reach_the_disk() -> None:
    history = a_killed_job(400)
    with pytest.raises(AssertionError, match="older than 5 s were lost"):
        history.line(a_line(100, 0, job="b"))
    history = a_killed_job(400)
    history.line(a_line(400 - 250 + 1, 0, job="b"))
    assert history.lost_to_disk_at_most == 250
