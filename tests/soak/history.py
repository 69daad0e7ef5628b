"""What a job's training was, told by the lines of its workers, and whether it is what it should have been.

Owns the rules: ranks agree bit for bit, steps follow each other, no more is lost than since the last commit (nothing
by a planned change), each sample of an epoch is used once, no two rounds train side by side. Reads no file and knows no
process; a broken rule is an AssertionError.

The steps that count are those of the last round that did them: what was done after the commit to which a job went
back is not part of the training, and is dropped here, too.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# What was done longer before the loss of all processes than this is on disk: the writer was not busy all the time.
# Seconds of training; a gap between two steps counts as at most _GAP_S, because a writer may be lost in a longer one.
ON_DISK_AFTER_S = 5.0
_GAP_S = 0.5
# Steps that are kept after their epoch has ended, for jobs that go back.
_KEPT = 400


def digest(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """Of weights, bit for bit."""
    return hashlib.sha1(np.concatenate([array.ravel() for array in arrays]).tobytes()).hexdigest()


@dataclass(slots=True)
class Commit:
    """A commit on disk, as its file says."""

    commits: int
    step: int
    weights: str


@dataclass(slots=True)
class _Step:
    epoch: int
    weights: str
    samples: list[int]
    time: float
    trained_s: float


@dataclass(slots=True)
class _Round:
    """A round that has done steps."""

    first: int
    last: int
    size: int
    workers: frozenset[str]
    rank_last: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # ranks that have finished a step after another round's first


@dataclass(slots=True)
class _Job:
    job_id: str
    members: dict[int, frozenset[str]] = field(default_factory=dict)  # by round
    aborted: set[int] = field(default_factory=set)  # rounds that were broken
    gone: set[str] = field(default_factory=set)  # workers that have ended or were told to
    rounds: dict[int, _Round] = field(default_factory=dict)  # those that did steps


class History:
    """Takes events and lines in their order.

    Args:
        commit_every: steps from one commit to the next; there is one at each end of an epoch as well.
        samples: of the data set.
        per_step: samples that all ranks together use in a step; divides ``samples``.
        on_disk_after_s: seconds of training after which a commit is on disk at the latest.
    """

    def __init__(
        self, *, commit_every: int, samples: int, per_step: int, on_disk_after_s: float = ON_DISK_AFTER_S
    ) -> None:
        self.commit_every = commit_every
        self.samples = samples
        self.per_epoch = samples // per_step
        self.on_disk_after_s = on_disk_after_s
        self.steps: dict[int, _Step] = {}
        self.last = 0
        self.epochs = 0
        self.lost = 0
        self.lost_at_most = 0
        self.lost_to_disk_at_most = 0
        self.from_disk = 0
        self.rounds = 0
        self.on_disk: Commit | None = None  # what a job that begins anew goes on from, or something later
        self._jobs: list[_Job] = []

    def begin_job(self, job_id: str) -> None:
        """A job goes on with this training. Lines of those before are an error as soon as this one trains.

        Told again of the same job, another driver has taken it over.
        """
        if self._jobs and self._jobs[-1].job_id == job_id:
            return
        self._jobs.append(_Job(job_id))

    def event(self, event: dict[str, Any]) -> None:
        """Takes a record of the present job's event log, before the lines that follow from it."""
        job = self._jobs[-1]
        match event["event"]:
            case "round_formed":
                job.members[event["round_id"]] = frozenset(one["worker"] for one in event["members"])
                self.rounds += 1
            case "notice" if event["kind"] == "abort":
                job.aborted.add(event["round_id"])
            case "worker_exited" | "worker_stopped":
                job.gone.add(event["worker"])

    def knows(self, line: dict[str, Any]) -> bool:
        """Whether the event is there that a worker's line follows from."""
        if "missing" in line:
            return True
        return any(line["round"] in job.members for job in self._jobs if job.job_id == line["job"])

    def line(self, line: dict[str, Any]) -> None:
        """Takes what a worker wrote."""
        if "missing" in line:
            assert line["missing"] == line["repeated"] == 0, f"the state says that samples were not used once: {line}"
            return
        job = next((job for job in self._jobs if job.job_id == line["job"]), None)
        assert job is not None, f"no such job: {line}"
        assert job is self._jobs[-1] or not self._jobs[-1].rounds, f"a job of the past trains: {line}"
        if line["round"] not in job.rounds:
            self._enter(job, line)
        one, rank, step = job.rounds[line["round"]], line["rank"], line["step"]
        assert rank < line["size"] == one.size, f"a round of {one.size}: {line}"
        before = one.rank_last.get(rank, one.first - 1)
        assert step == before + 1, f"rank {rank} of round {line['round']} went from step {before} to {step}"
        one.rank_last[rank] = step
        if line["round"] < max(job.rounds):
            # A step needs all members, so those that were left behind finish the one they were in and no other.
            assert rank not in one.late, f"two rounds train side by side: {line}"
            assert step <= one.last + 1, f"two rounds train side by side: {line}"
            one.late.add(rank)
            return
        assert line["epoch"] == (step - 1) // self.per_epoch, f"step {step} is not of epoch {line['epoch']}"
        if step <= one.last:
            known = self.steps[step]
            assert known.weights == line["weights"], f"ranks differ after step {step} of round {line['round']}: {line}"
            assert known.samples == line["samples"], f"ranks differ on the samples of step {step}: {line}"
            return
        before_it = self.steps.get(self.last)
        trained_s = before_it.trained_s + min(line["time"] - before_it.time, _GAP_S) if before_it else 0.0
        one.last = self.last = step
        self.steps[step] = _Step(line["epoch"], line["weights"], line["samples"], line["time"], trained_s)

    def _enter(self, job: _Job, line: dict[str, Any]) -> None:
        round_id, first = line["round"], line["step"]
        assert round_id in job.members, f"a round that the driver has not formed: {line}"
        assert round_id > max(job.rounds, default=0), f"a round of the past trains: {line}"
        workers = job.members[round_id]
        assert line["worker"] in workers, f"no member of round {round_id}: {line}"
        lost = self.last + 1 - first
        assert lost >= 0, f"step {first} of round {round_id} came after {self.last}"
        held = [self._held(one) for one in job.rounds.values() if one.workers & workers]
        if held:
            assert first > max(held), f"went back behind commit of step {max(held)} to {first - 1}: {line}"
            newest = max(job.rounds)
            planned = job.aborted.isdisjoint(range(newest, round_id))
            assert not planned or not lost, f"a planned change lost {lost} steps at {first}: {line}"
            self.lost_at_most = max(self.lost_at_most, lost)
        elif self.last:
            self._enter_from_disk(job, line, lost)
        self.lost += lost
        for step in range(first, self.last + 1):
            del self.steps[step]
        self.last = first - 1
        job.rounds[round_id] = _Round(first, first - 1, line["size"], workers)

    def _held(self, one: _Round) -> int:
        """The step that every member of a round has saved: where it began, or a commit that all are beyond."""
        done = one.last - 1
        return max(one.first - 1, done - done % self.commit_every, done - done % self.per_epoch)

    def _enter_from_disk(self, job: _Job, line: dict[str, Any], lost: int) -> None:
        self.from_disk += 1
        self.lost_to_disk_at_most = max(self.lost_to_disk_at_most, lost)
        if job.rounds:
            newest = job.members[max(job.rounds)]
            living = sorted(newest - job.gone)
            assert not living, f"went back to the disk though {living} had the state: {line}"
        since = self.steps[self.last].trained_s - self.on_disk_after_s
        first = line["step"]
        late = [step for step in range(first, self.last + 1) if self.steps[step].trained_s < since]
        # The steps after the last commit are nowhere, however old they are.
        assert len(late) < self.commit_every, (
            f"{len(late)} steps older than {self.on_disk_after_s:g} s were lost: {line}"
        )
        expected, self.on_disk = self.on_disk, None
        if expected is None:
            return
        assert line["commits"] >= expected.commits, f"commit {expected.commits} was on disk: {line}"
        if line["commits"] == expected.commits:
            assert first == expected.step + 1, f"commit {expected.commits} is of step {expected.step}: {line}"
        if expected.step in self.steps:
            known = self.steps[expected.step].weights
            assert known == expected.weights, f"commit {expected.commits} differs from step {expected.step}"

    def check_epochs(self, *, all_of_them: bool = False) -> None:
        """Looks at epochs that nobody goes back to any more: each sample was used once."""
        end = self.last if all_of_them else self.last - _KEPT
        while (self.epochs + 1) * self.per_epoch <= end:
            first = self.epochs * self.per_epoch + 1
            steps = range(first, first + self.per_epoch)
            used = collections.Counter(sample for step in steps for sample in self.steps[step].samples)
            wrong = {sample: used[sample] for sample in range(self.samples) if used[sample] != 1}
            assert not wrong, f"epoch {self.epochs}: samples that were not used once (sample: times): {wrong}"
            assert len(used) == self.samples, f"epoch {self.epochs}: samples that do not exist"
            self.epochs += 1
            for step in steps:
                if step <= self.last - _KEPT:
                    del self.steps[step]
