"""HealthWatch: the single step of the health core. The head of the package explains it.

Owns what the watches share: the current job, the schedule of their checks, and the choice of workers to check.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from elastic_driver.core.events import DrainRequested, WorkerHung
from elastic_driver.core.state import (
    JobPhase,
    Leaving,
    State,
    WorkerPhase,
    WorkerRecord,
    finishing,
    in_phase,
    record_of,
)
from elastic_driver.health.drains import Drains
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
from elastic_driver.health.findings import (
    NotDrained,
    Spared,
    StackWanted,
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.hangs import HangWatch
from elastic_driver.health.heartbeats import Heartbeats
from elastic_driver.health.limits import Limit
from elastic_driver.health.stall_watch import StallWatch
from elastic_driver.health.stalls import Stall
from elastic_driver.health.standstills import StandstillWatch
from elastic_driver.health.stragglers import StragglerWatch
from elastic_driver.health.survivors import why_spared
from elastic_driver.health.suspicions import Suspicions
from elastic_driver.hosts import WorkerId
from elastic_driver.words import HangAction, StragglerAction

LOOK_S = 0.5
"""Agents observe workers at a standstill twice a second."""
# Some beats of a worker's pulse: a worker that had one this recently is alive.
_ALIVE_S = 2.0

Finding = (
    WorkerSuspected
    | WorkerCleared
    | Spared
    | StackWanted
    | Stalled
    | StallEnded
    | StragglerFound
    | StragglerGone
    | NotDrained
    | WorkerHung
    | DrainRequested
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The user's settings.

    Attributes:
        heartbeat_timeout_s: how long a worker may be silent; 0 for no limit.
        hang_timeout_s: how long a worker may neither finish operations nor wait in one; 0 for no limit.
        hang_action: what is done with a worker that is proven to hang.
        straggler_action: what is done with one that is slow.
    """

    heartbeat_timeout_s: float = 0.0
    hang_timeout_s: float = 0.0
    hang_action: str = HangAction.END
    straggler_action: str = StragglerAction.WARN


class HealthWatch:
    """The workers of one job.

    Args:
        rules: the user's settings.
        state: the job.
        now: the job's time, seconds.

    Attributes:
        drains: the drains of slow workers; None if none is drained for being slow.
    """

    def __init__(self, rules: Rules, state: State, now: float) -> None:
        numbers = count(1)
        self._state = state
        self._is_on_disk = False
        self._hangs = HangWatch(proves=rules.hang_action == HangAction.END, numbers=numbers)
        self._suspicions = Suspicions(numbers)
        self._stalls = StallWatch(self._hangs)
        self._standstills = StandstillWatch()
        self._heartbeats = Heartbeats(rules.heartbeat_timeout_s, rules.hang_timeout_s)
        self._stragglers = StragglerWatch()
        self.drains = Drains() if rules.straggler_action == StragglerAction.DRAIN else None
        self._look_at = now + LOOK_S
        self._is_odd = False
        self._silence_at = self._next_silence(now)
        self._stalls.change(state, now, is_replaced=False)
        self._begin_round(now)

    def step(self, event: Event, now: float) -> list[Finding]:
        """Apply an event; return the new findings, in the order of their reports.

        Args:
            event: what has happened.
            now: the job's time, seconds; it does not go back.
        """
        match event:
            case JobChanged(state):
                return self._change(state, now)
            case VitalsSeen():
                self._see(event, now)
            case WorkerHeard(worker, leaving=True):
                self._heartbeats.forget(worker)
            case WorkerHeard(worker, progress, waiting):
                self._heartbeats.heard(worker, progress, waiting=waiting, now=now)
            case WorkerGone(worker):
                self._hangs.forget(worker)
                self._standstills.forget(worker)
                self._stragglers.forget(worker, now)
                self._heartbeats.forget(worker)
            case StackTaken(worker, number, text):
                self._hangs.answer(worker, number, text)
                return [*self._suspicions.answer(worker, number, text)]
            case CommitFound():
                self._is_on_disk = True
            case TimePassed():
                return self._pass_time(event, now)
        return []

    # --- queries ---------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When TimePassed is due, in the job's time."""
        return min(self._look_at, self._silence_at)

    def overdue_hosts(self, now: float) -> list[str]:
        """Return the hosts of workers that were silent, or without progress, for too long, for the next TimePassed."""
        return [] if now < self._silence_at else self._heartbeats.overdue_hosts(now)

    def suspects(self, now: float) -> list[tuple[WorkerId, int | None, str, float, float]]:
        """Return the current suspects: worker, rank, why, how long the standstill has lasted, and the limit."""
        return [*self._hangs.suspects(), *self._standstills.suspects(now)]

    @property
    def limit(self) -> Limit:
        """The time after which a standstill is suspicious now."""
        return self._hangs.limit

    @property
    def proof(self) -> Limit:
        """The time after which it would be proof."""
        return self._hangs.proof

    @property
    def stall(self) -> Stall | None:
        """The reported stall; None while the round makes progress."""
        return self._stalls.stall

    # --- events ----------------------------------------------------------------------------------------------------

    def _change(self, state: State, now: float) -> list[Finding]:
        if state is self._state:
            return []  # each of a thousand returning agents is no news, but would cost a check of all workers
        is_replaced = state.round_id != self._state.round_id
        found: list[Finding] = [*self._stalls.change(state, now, is_replaced=is_replaced)]
        self._state = state
        if is_replaced:
            # Standbys are still watched; so are the members, once they have been notified of the round.
            self._heartbeats.keep([record.worker for record in in_phase(state, WorkerPhase.READY)])
            self._begin_round(now)
        for record in state.workers:
            if record.leaving is Leaving.DISMISSED:
                self._heartbeats.forget(record.worker)
        return found

    def _begin_round(self, now: float) -> None:
        round_id, ranks = self._state.round_id, {member: rank for rank, member in enumerate(self._state.members)}
        self._hangs.begin(round_id, ranks)
        self._standstills.begin(round_id, ranks)
        self._stragglers.begin(round_id, ranks, now)

    def _see(self, event: VitalsSeen, now: float) -> None:
        worker, vitals = event.worker, event.vitals
        if record_of(self._state, worker) is None:
            return  # it has ended meanwhile
        self._hangs.take(worker, vitals, now, peer_is_ours=event.peer_is_ours)
        self._standstills.take(worker, vitals, now)
        self._stragglers.take(worker, vitals)
        if vitals.pulse_s is not None and vitals.pulse_s < _ALIVE_S:
            self._heartbeats.alive(worker, now, submitted=vitals.submitted, finished=vitals.finished)

    def _pass_time(self, event: TimePassed, now: float) -> list[Finding]:
        found: list[Finding] = []
        if now >= self._look_at:
            # A timer that fires slightly late does not shift all later checks.
            self._look_at = self._look_at + LOOK_S if now < self._look_at + LOOK_S else now + LOOK_S
            found += self._look(event, now)
        if now >= self._silence_at:
            found += self._heartbeats.find(now, audible_s=event.audible_s, excused=self._may_be_silent)
            self._silence_at = self._next_silence(now)
        return found

    def _look(self, event: TimePassed, now: float) -> list[Finding]:
        state = self._state
        trains = state.phase is JobPhase.RUNNING and not finishing(state)
        found: list[Finding] = [*self._stalls.look(state, now)]
        for finding in self._hangs.look(
            now,
            trains=lambda worker: trains and _trains(state, worker),
            lives=lambda worker: _lives(state, worker),
            spares=self._why_spared,
        ):
            found += self._suspicions.take(finding)
        # Each of the others once a second.
        self._is_odd = not self._is_odd
        if self._is_odd:
            return found + self._look_for_stragglers(now, trains=trains)
        known = {worker for worker, *_ in self._hangs.suspects()}
        for standstill in self._standstills.look(
            now,
            step_of=lambda worker: _step_of(state, worker),
            trains=lambda worker: trains and _stays(state, worker),
            unheard=event.unheard,
            silent=[silence.hostname for silence in state.silent],
            is_known=known.__contains__,
        ):
            found += self._suspicions.take(standstill)
        return found

    def _look_for_stragglers(self, now: float, *, trains: bool) -> list[Finding]:
        state = self._state

        def trains_now(worker: WorkerId) -> bool:
            return trains and _trains(state, worker)

        told = self._stragglers.look(now, trains=trains_now)
        if self.drains is None:
            return [*told]
        found: list[Finding] = []
        for news in told:
            found += (news, *self.drains.take(news, state, now))
        return [*found, *self.drains.look(state, now, trains=trains_now)]

    def _next_silence(self, now: float) -> float:
        return now + self._heartbeats.look_in_s(now) if self._heartbeats.interval_s else math.inf

    def _why_spared(self, worker: WorkerId, ended: Collection[WorkerId]) -> str:
        return why_spared(self._state, worker, ended, is_on_disk=self._is_on_disk)

    def _may_be_silent(self, worker: WorkerId) -> bool:
        """Return whether it is in a debugger, or stopped by a signal and spared, as it alone has the state."""
        is_stopped = self._hangs.is_stopped(worker)
        return self._hangs.is_debugged(worker) or (is_stopped and bool(self._why_spared(worker, ())))


def _trains(state: State, worker: WorkerId) -> bool:
    """Return whether it is a member that has reported that it trains, and is not about to leave."""
    record = record_of(state, worker)
    return record is not None and record.running and _is_to_stay(record)


def _stays(state: State, worker: WorkerId) -> bool:
    """Return whether it is a member that is not about to leave, whether or not it reports that it trains."""
    record = record_of(state, worker)
    return record is not None and record.killed is None and _is_to_stay(record)


def _is_to_stay(record: WorkerRecord) -> bool:
    return record.phase is WorkerPhase.MEMBER and record.leave_by is None and record.exit_by is None


def _step_of(state: State, worker: WorkerId) -> int | None:
    """Return the last step that a worker has reported in its current process; None if it has not."""
    record = record_of(state, worker)
    return record.commits if record is not None and record.running else None


def _lives(state: State, worker: WorkerId) -> bool:
    record = record_of(state, worker)
    return record is not None and record.phase is not WorkerPhase.LEAVING and record.killed is None
