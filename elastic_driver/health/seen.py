"""The last observation of one worker, and the conclusions from all so far on its progress and activity.

Owns that evidence; :mod:`elastic_driver.health.hangs` raises suspicions from it. Times ending in ``_s`` are of the
agent's clock, so that a driver or a host that stops for a while makes no worker look slow; ``seen_at`` is the job's
time, and only shows whether an observation is old.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_driver.health.findings import Kind
from elastic_driver.health.limits import Limit, Pace
from elastic_driver.vitals import DEBUGGED, QUIET_BLOCK_S, RUNNABLE, STOPPED, Vitals, is_quiet

STALE_S = 3.0
"""Observations come about once a second. If two are further apart than this, what happened between them is unknown."""


@dataclass(slots=True)
class Suspicion:
    """The suspicion of one worker, for one standstill.

    Attributes:
        kind, why, collective, limit: as reported.
        began_s, confirmed_s: since when it is at a standstill, and when that was last observed.
        window_s, cpu_s, io_bytes, stacks: the evidence: since when it is collected, the worker's totals at that time,
            and the stacks since then.
        followed_s: when it was last observed.
        is_first: whether no evidence was dropped yet.
        is_spared: whether it was reported as spared.
        open: the number of the requested stack that has not come.
    """

    kind: Kind
    why: str
    collective: str
    limit: Limit
    began_s: float
    confirmed_s: float
    window_s: float
    cpu_s: float
    io_bytes: int
    followed_s: float
    is_first: bool = True
    is_spared: bool = False
    stacks: list[str] = field(default_factory=list)
    open: int | None = None

    def restart(self, at_s: float, vitals: Vitals) -> None:
        """Drop the evidence so far."""
        self.window_s, self.is_first = at_s, False
        self.cpu_s, self.io_bytes = vitals.cpu_s, vitals.io_bytes
        self.stacks, self.open = [], None


@dataclass(slots=True)
class Seen:
    """A worker as last observed.

    Attributes:
        vitals, seen_at: the last observation, and when it came.
        awaits: what its main thread waits for outside the job, in words; "" for nothing known.
        moved_s: when it last made progress.
        stepped_s, finished_s: when a step, and a collective, was last finished.
        quiet_s: since when it neither waits nor does anything.
        alone_s: since when its main thread has neither woken, nor been ready to run, nor waited for anything outside
            the job.
        heard_s: since when no observation was missed.
        counted_s, cpu_s, io_bytes: since when its activity is measured, and its totals at that time.
        steps, gaps: how many were counted.
        halted_s, halted_looks: since when it is stopped by a signal, and the number of observations of it stopped by
            anything.
        told: the last reported standstill.
    """

    vitals: Vitals
    seen_at: float
    awaits: str
    moved_s: float
    stepped_s: float
    finished_s: float
    quiet_s: float
    alone_s: float
    heard_s: float
    counted_s: float
    cpu_s: float
    io_bytes: int
    steps: int = 0
    gaps: int = 0
    halted_s: float | None = None
    halted_looks: int = 0
    told: tuple[float, Kind] | None = None
    suspicion: Suspicion | None = None

    @classmethod
    def first(cls, vitals: Vitals, now: float, awaits: str) -> Seen:
        """Create the record from the first observation of a worker, of another process of it, or in another round."""
        at = vitals.at_s
        return cls(vitals, now, awaits, at, at, at, at, at, at, at, vitals.cpu_s, vitals.io_bytes)

    # --- observations ----------------------------------------------------------------------------------------------

    def take(self, vitals: Vitals, now: float, awaits: str, pace: Pace) -> None:
        """Record a later observation of the same process, in the same round."""
        before, at = self.vitals, vitals.at_s
        if vitals.steps != before.steps:
            self._note_steps(vitals, pace)
        if vitals.finished != before.finished:
            self.gaps += 1
            pace.add_gap(self.gaps, at - self.finished_s)
            self.finished_s = at
        if (vitals.submitted, vitals.finished, vitals.steps, vitals.commits) != (
            before.submitted,
            before.finished,
            before.steps,
            before.commits,
        ):
            self.moved_s = at
        self._note_quiet(vitals)
        # A thread that is ready to run but has not run got no processor: the machine is busy or throttled.
        if vitals.wakes != before.wakes or vitals.state == RUNNABLE or awaits:
            self.alone_s = at
        if _has_run(before, vitals):
            # A process that is stopped and continued in turn (by a limiter of its processor share, or a tracer of its
            # system calls) is not stopped.
            self.halted_s, self.halted_looks = None, 0
        self.vitals, self.seen_at, self.awaits = vitals, now, awaits
        if self.halted_looks or vitals.state in (STOPPED, DEBUGGED):
            self.note_halt()

    def begin_evidence(self, vitals: Vitals) -> None:
        """Start the evidence anew: it is unknown what the worker did since the previous observation."""
        at = vitals.at_s
        self.moved_s = self.stepped_s = self.finished_s = self.quiet_s = self.alone_s = self.heard_s = at
        self.measure_from(vitals)
        self.halted_s, self.halted_looks = None, 0

    def _note_steps(self, vitals: Vitals, pace: Pace) -> None:
        done, took_s = vitals.steps - self.vitals.steps, vitals.at_s - self.stepped_s
        if done > 0:
            first = self.steps + 1
            self.steps += done
            pace.add_steps(first, self.vitals.at_s - self.stepped_s, self.steps, took_s / done)
        self.stepped_s = vitals.at_s

    def _note_quiet(self, vitals: Vitals) -> None:
        since_s = vitals.at_s - self.counted_s
        cpu_s, done = vitals.cpu_s - self.cpu_s, vitals.io_bytes - self.io_bytes
        if not is_quiet(since_s, cpu_s, done) or vitals.waits_s > 0:
            self.quiet_s = vitals.at_s
            self.measure_from(vitals)
        elif since_s >= QUIET_BLOCK_S:
            self.measure_from(vitals)

    def measure_from(self, vitals: Vitals) -> None:
        """Measure its activity from this observation on."""
        self.counted_s, self.cpu_s, self.io_bytes = vitals.at_s, vitals.cpu_s, vitals.io_bytes

    def note_halt(self) -> None:
        """Count an observation in which it was stopped."""
        vitals = self.vitals
        if vitals.state not in (STOPPED, DEBUGGED):
            self.halted_s, self.halted_looks = None, 0
            return
        if vitals.traced or vitals.state != STOPPED:
            self.halted_s = None  # a debugger has stopped it
        elif self.halted_s is None:
            self.halted_s = vitals.at_s
        self.halted_looks += 1

    # --- conclusions -----------------------------------------------------------------------------------------------

    @property
    def at_s(self) -> float:
        """When it was last observed."""
        return self.vitals.at_s

    @property
    def waits_s(self) -> float:
        """For how long it has waited in a collective, as far as it was observed."""
        return min(self.vitals.waits_s, self.at_s - self.heard_s)

    @property
    def active_at(self) -> float:
        """When it last did something other than wait in a collective, in the job's time."""
        vitals = self.vitals
        idle_s = 0.0 if vitals.state == RUNNABLE else vitals.at_s - max(self.moved_s, self.quiet_s)
        return self.seen_at - (vitals.waits_s if vitals.waits_s > 0 else idle_s)

    def is_still(self, limit_s: float) -> bool:
        """Return whether it has made no progress for this long, and would report it."""
        return self.vitals.pulse_s is not None and self.at_s - self.moved_s >= limit_s

    def is_fresh(self, now: float) -> bool:
        """Return whether the last observation is recent, in the job's time."""
        return now - self.seen_at <= STALE_S

    def is_awaited(self) -> bool:
        """Return whether it is suspected since others wait for it, and has made no progress since."""
        one = self.suspicion
        return one is not None and one.kind in (Kind.LACKS, Kind.DEADLOCK) and self.moved_s <= one.began_s

    def pass_over(self) -> None:
        """Keep a suspicion while its state is unknown: that time is no evidence."""
        if (one := self.suspicion) is not None:
            missed_s, one.followed_s = self.at_s - one.followed_s, self.at_s
            one.window_s += missed_s
            one.confirmed_s += missed_s


def _has_run(before: Vitals, after: Vitals) -> bool:
    """Return whether a process has run between two observations."""
    return (before.cpu_s, before.io_bytes, before.steps, before.submitted, before.finished, before.commits) != (
        after.cpu_s,
        after.io_bytes,
        after.steps,
        after.submitted,
        after.finished,
        after.commits,
    )
