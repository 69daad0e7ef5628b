"""What agents see of workers that do what a test says, and a job whose health is watched by that, on a test's time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import Command, DrainRequested, PublishRound, TimerExpired, WorkerHung
from elastic_driver.core.state import WorkerPhase, in_phase
from elastic_driver.health.events import (
    CommitFound,
    Event,
    JobChanged,
    StackTaken,
    TimePassed,
    VitalsSeen,
    WorkerGone,
    WorkerHeard,
)
from elastic_driver.health.findings import StackWanted
from elastic_driver.health.watch import Finding, HealthWatch, Rules
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals, Waiting
from tests.support.fakes.membership_job import Job

STEP_S = 0.1
STACK = """Thread 0x01 (most recent call first):
  File "/x/train.py", line 12 in wait
  File "/x/train.py", line 3 in <module>
"""
AT_A_PROMPT = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.11/bdb.py", line 96 in user_line\n'

# What a worker does, by the word for it; others wait for it while it does. "trains" is the usual thing, and so is
# "trains=1.5": it takes so many times as long for each step as the others.
MODES: dict[str, Mapping[str, object]] = {
    "hangs": {"state": "S"},
    "computes": {"state": "R"},
    "is-stopped": {"state": "T", "pulse_s": 99.0},
    "is-debugged": {"state": "t", "traced": True, "pulse_s": 99.0},
    "waits-for-a-lock": {"state": "S", "awaits": "a file lock (flock)"},
    "is-silent": {"state": "S", "pulse_s": 99.0},
}


class WatchedWorkers:
    """Looks at the members of a round, once a second.

    Attributes:
        does: what each does, where it does not train as the others; see MODES.
        unseen: those that no look comes of.
        scripts: whether they do not use this library, and say nothing of themselves.
    """

    def __init__(self) -> None:
        self.scripts = False
        self.does: dict[WorkerId, str] = {}
        self.unseen: set[WorkerId] = set()
        self._last: dict[WorkerId, Vitals] = {}

    def look(self, members: Sequence[WorkerId], round_id: int, now: float) -> Iterable[tuple[WorkerId, Vitals]]:
        """What agents see of them now."""
        lacking = tuple(rank for rank, worker in enumerate(members) if self.does.get(worker) in MODES)
        slowest = max([1.0, *map(self._slowness, members)])
        for rank, worker in enumerate(members):
            if worker not in self.unseen:
                self._last[worker] = look = self._look(worker, rank, round_id, now, lacking, slowest)
                yield worker, look

    def _slowness(self, worker: WorkerId) -> float:
        return float(self.does.get(worker, "").partition("trains=")[2] or 1.0)

    def _look(
        self, worker: WorkerId, rank: int, round_id: int, now: float, lacking: tuple[int, ...], slowest: float
    ) -> Vitals:
        last = self._last.get(worker) or Vitals(now - 1, 100 + rank, pulse_s=0.1, can_dump=True)
        is_new = last.round_id != round_id
        pause = {"traced": False, "pulse_s": 0.1, "awaits": "", "waiting": (), "waits_s": 0.0}
        last = replace(last, at_s=last.at_s + 1, round_id=round_id, rank=rank, submitted=last.finished, **pause)
        mode = MODES.get(self.does.get(worker, ""))
        if self.scripts:
            state, cpu_s = ("R", last.cpu_s + 1) if mode is None else ("S", last.cpu_s)
            return replace(last, state=state, cpu_s=cpu_s, pulse_s=None, round_id=0, rank=-1)
        if mode is not None:
            last = replace(last, **mode)
            return replace(last, cpu_s=last.cpu_s + 1) if mode["state"] == "R" else last
        if lacking:
            waits_s = self._last[worker].waits_s + 1 if worker in self._last else 1.0
            waiting = (Waiting("allreduce 'loss'", waits_s, lacking),) if rank == 0 else ()
            return replace(last, state="S", submitted=last.finished + 1, waits_s=waits_s, waiting=waiting)
        done, own = round(1 / STEP_S), self._slowness(worker) / slowest
        return replace(
            last,
            state="R",
            steps=last.steps + done,
            submitted=last.submitted + done,
            finished=last.finished + done,
            cpu_s=last.cpu_s + 1,
            waited_s=last.waited_s + 1 - own,
            own_s=None if is_new else own * STEP_S,
        )


class WatchedJob:
    """A job, its workers as agents see them, and the watch over their health: what it finds is fed to the job.

    Attributes:
        workers: what they do.
        stack: what is answered when a stack is wanted; None where it cannot be had.
        unheard: hosts whose agents say nothing though their machines acknowledge, and since when.
        watch: the watch.
        found: what it has found, and what the core made of it, with the time.
    """

    def __init__(self, job: Job, rules: Rules) -> None:
        self.job = job
        self.workers = WatchedWorkers()
        self.stack: str | None = STACK
        self.unheard: dict[str, float] = {}
        self.watch = HealthWatch(rules, job.state, job.now)
        self.found: list[tuple[float, Finding | Command]] = []
        self._look_at = job.now + 1.0

    def step(self, event: Event) -> None:
        """One step of the watch."""
        for finding in self.watch.step(event, self.job.now):
            self.found.append((self.job.now, finding))
            match finding:
                case WorkerHung() | DrainRequested():
                    commands = self.job.feed(finding)
                    self.found += [(self.job.now, command) for command in commands]
                    self.follow(commands)
                case StackWanted(worker, number):
                    self.step(StackTaken(worker, number, self.stack))

    def follow(self, commands: Iterable[Command]) -> None:
        """The core has made a step: what the driver tells the watch of it."""
        before = self.watch.suspects(self.job.now)
        self.step(JobChanged(self.job.state))
        ready = [record.worker for record in in_phase(self.job.state, WorkerPhase.READY)]
        if any(isinstance(command, PublishRound) for command in commands):
            ready += self.job.members
        for worker in ready:
            self.step(WorkerHeard(worker))
        alive = {record.worker for record in self.job.state.workers}
        for worker in {worker: None for worker, *_ in before if worker not in alive}:
            self.step(WorkerGone(worker))

    def pass_until(self, at: float) -> None:
        """Time passes until then: agents look once a second, and timers expire."""
        job = self.job
        while True:
            timer = next_deadline(job.state)
            # Times of the core are multiples of 1/1024 s.
            due = math.ceil(self.watch.next_deadline * 1024) / 1024
            soonest = min(due, self._look_at, math.inf if timer is None else timer)
            if soonest > at:
                break
            job.now = max(job.now, soonest)
            if timer is not None and job.now >= timer:
                commands = job.feed(TimerExpired())
                self.found += [(job.now, command) for command in commands]
                self.follow(commands)
            if job.now >= self._look_at:
                self._look_at += 1.0
                members = [worker for worker in job.state.members if worker in job.alive]
                for worker, vitals in list(self.workers.look(job.state.members, job.round_id, job.now)):
                    if worker in members:
                        self.step(VitalsSeen(worker, vitals))
            if job.now >= due:
                unheard = {host: job.now - since for host, since in self.unheard.items()}
                self.step(TimePassed(unheard))
        job.now = at

    def find_commit(self) -> None:
        """There is a commit on disk."""
        self.step(CommitFound())
