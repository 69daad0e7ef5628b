"""Standstills that no worker reports: silent agents, and scripts that do not use this library.

Owns what is known of them, and names the worker at fault as far as that can be seen. Pure; kills nothing. Workers that
use this library report their waits: :mod:`elastic_driver.health.hangs`.

An agent that is silent while its machine acknowledges packets is stopped, or gets no processor. The state of its
workers is unknown.

Of a script, only its agent's observations from outside are known (CPU time, I/O, what its main thread waits for in the
kernel), and the step, if it reports that (``checkpoint_point(step=...)``). It is at a standstill when it makes no more
steps and some of its ranks do nothing at all. At fault is a rank that is behind the others; else one that waits for
something outside the job; else one that computes while most wait, or does nothing while most compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic_driver.health.findings import Kind, WorkerCleared, WorkerSuspected
from elastic_driver.health.limits import LEARNED_FROM, START_LIMIT_S, TIMES_SLOWEST, Limit
from elastic_driver.health.seen import STALE_S
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import DEBUGGED, QUIET_BLOCK_S, STOPPED, Vitals, is_quiet
from elastic_driver.words import in_seconds

UNHEARD_S = 10.0
"""An agent sends twice a second, even on a busy machine."""
LEAST_STEPS_S = 10.0
"""The least limit for steps: the driver gets them once a second."""
_TIMES_LONGEST = 2.0
_UNHEARD = Limit(UNHEARD_S, f"{UNHEARD_S:g} s without a message")
_NOT_ENDED = "what such a script does is not visible from outside"

Finding = WorkerSuspected | WorkerCleared


@dataclass(slots=True)
class _Looked:
    """A worker as its agent last observed it. Times ending in ``_s`` are the agent's, ``seen_at`` is the job's.

    Attributes:
        vitals, seen_at: the last observation.
        quiet_s: since when it does nothing.
        counted_s, cpu_s, io_bytes: since when its activity is measured, and its totals at that time.
    """

    vitals: Vitals
    seen_at: float
    quiet_s: float
    counted_s: float
    cpu_s: float
    io_bytes: int

    @classmethod
    def first(cls, vitals: Vitals, now: float) -> _Looked:
        return cls(vitals, now, vitals.at_s, vitals.at_s, vitals.cpu_s, vitals.io_bytes)

    def take(self, vitals: Vitals, now: float) -> None:
        since_s = vitals.at_s - self.counted_s
        quiet = is_quiet(since_s, vitals.cpu_s - self.cpu_s, vitals.io_bytes - self.io_bytes)
        if not quiet or vitals.at_s - self.vitals.at_s > STALE_S:
            self.quiet_s = vitals.at_s
        if vitals.at_s == self.quiet_s or since_s >= QUIET_BLOCK_S:
            self.counted_s, self.cpu_s, self.io_bytes = vitals.at_s, vitals.cpu_s, vitals.io_bytes
        self.vitals, self.seen_at = vitals, now

    @property
    def idle_s(self) -> float:
        return self.vitals.at_s - self.quiet_s


@dataclass(slots=True)
class _Reported:
    """A reported standstill.

    Attributes:
        began: when it began, the job's time.
        suspects: the workers named for it, and why.
        limit: the one that it exceeded.
    """

    began: float
    suspects: dict[WorkerId, str]
    limit: Limit


class StandstillWatch:
    """The workers of a job, and their hosts."""

    def __init__(self) -> None:
        self._ranks: dict[WorkerId, int] = {}
        self._tell_themselves = False  # whether a member of the round uses this library
        self._looked: dict[WorkerId, _Looked] = {}
        self._unheard: dict[str, int] = {}  # by host: in how many checks
        self._of_hosts: dict[str, _Reported] = {}
        self._of_round: _Reported | None = None
        self._ended: list[Finding] = []
        self._now = 0.0
        self._longest_s = 0.0  # of the standstills of this job that ended by themselves
        self._begin_steps()

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int]) -> None:
        """Begin a round with these members and ranks."""
        self._end_of_round("a new round began")
        self._ranks = dict(ranks)
        self._looked = {worker: looked for worker, looked in self._looked.items() if worker in ranks}
        self._tell_themselves = any(looked.vitals.pulse_s is not None for looked in self._looked.values())
        self._begin_steps()

    def take(self, worker: WorkerId, vitals: Vitals, now: float) -> None:
        """Record an observation of a worker."""
        if vitals.pulse_s is not None and not self._tell_themselves:
            self._tell_themselves = True
            self._end_of_round("it uses elastic_driver, and reports itself what it waits for")
        looked = self._looked.get(worker)
        if looked is None or looked.vitals.pid != vitals.pid:
            self._looked[worker] = _Looked.first(vitals, now)
        elif vitals.at_s > looked.vitals.at_s:
            looked.take(vitals, now)

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has ended."""
        self._looked.pop(worker, None)
        for told in self._every_told():
            if told.suspects.pop(worker, None) is not None:
                took_s = self._now - told.began
                self._ended.append(WorkerCleared(worker, self._ranks.get(worker), "it has ended", took_s))

    def look(
        self,
        now: float,
        *,
        step_of: Callable[[WorkerId], int | None] = lambda worker: None,
        trains: Callable[[WorkerId], bool] = lambda worker: True,
        unheard: Mapping[str, float] | None = None,
        silent: Collection[str] = (),
        is_known: Callable[[WorkerId], bool] = lambda worker: False,
    ) -> list[Finding]:
        """Return new findings. To be called once a second.

        Args:
            now: the present, in the job's time, seconds.
            step_of: the last step that a worker has reported in this process; None if it has not.
            trains: whether a worker is a member of the current round that is not about to leave.
            unheard: by name, how long hosts have been silent whose machines acknowledge nevertheless; hosts that are
                heard may be missing.
            silent: hosts whose machines do not acknowledge either, which are reported elsewhere.
            is_known: whether another rule suspects a worker.
        """
        self._now = now
        self._look_at_hosts(now, unheard or {}, silent)
        self._look_at_round(now, step_of, trains, is_known)
        found, self._ended = self._ended, []
        return found

    def suspects(self, now: float) -> list[tuple[WorkerId, int | None, str, float, float]]:
        """Return the current suspects, as HangWatch does: worker, rank, why, for how long, and the limit."""
        return [
            (worker, self._ranks.get(worker), why, now - told.began, told.limit.seconds)
            for told in self._every_told()
            for worker, why in told.suspects.items()
        ]

    def _every_told(self) -> list[_Reported]:
        return [*self._of_hosts.values(), *([] if self._of_round is None else [self._of_round])]

    # --- hosts -----------------------------------------------------------------------------------------------------

    def _look_at_hosts(self, now: float, unheard: Mapping[str, float], silent: Collection[str]) -> None:
        # Only at the second check: a driver that was stopped has not read what has arrived meanwhile.
        self._unheard = {
            host: self._unheard.get(host, 0) + 1 for host, unheard_s in unheard.items() if unheard_s >= UNHEARD_S
        }
        for host in [host for host in self._of_hosts if host not in self._unheard]:
            told = self._of_hosts.pop(host)
            why = "its host does not respond at all" if host in silent else "its host's agent reports again"
            for worker in told.suspects:
                self._ended.append(WorkerCleared(worker, self._ranks.get(worker), why, now - told.began))
        if not self._unheard:
            return
        by_host: dict[str, list[WorkerId]] = {}
        for worker in self._ranks:
            by_host.setdefault(worker.hostname, []).append(worker)
        for host, looks in self._unheard.items():
            if looks >= 2 and host in by_host and host not in self._of_hosts:
                first, *others = by_host[host]
                why = (
                    f"its host's agent has not reported for {unheard[host]:.0f} s, although the machine responds: "
                    "the worker and the agent may be stopped"
                )
                self._of_hosts[host] = _Reported(now - unheard[host], {first: why}, _UNHEARD)
                self._suspect(first, Kind.UNHEARD, why, unheard[host], _UNHEARD, len(others), "it may be training")

    # --- scripts ---------------------------------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        self._top: int | None = None
        self._top_at = 0.0
        self._gaps = 0
        self._slowest_s = 0.0

    def _note_step(self, step: int | None, now: float) -> None:
        if step is None or (self._top is not None and step <= self._top):
            return
        if self._top is not None:
            self._gaps += 1
            self._slowest_s = max(self._slowest_s, now - self._top_at)
        self._top, self._top_at = step, now

    def _limit(self) -> Limit:
        if self._gaps < LEARNED_FROM:
            known = "" if self._top is None else f", until {LEARNED_FROM} steps of the round have been reported"
            limit = Limit(START_LIMIT_S, f"{START_LIMIT_S:g} s{known}")
        elif (learned_s := TIMES_SLOWEST * self._slowest_s) < LEAST_STEPS_S:
            limit = Limit(LEAST_STEPS_S, f"{LEAST_STEPS_S:g} s, the minimum")
        else:
            limit = Limit(
                learned_s,
                f"{TIMES_SLOWEST:g} times the longest time without a report of a step, "
                f"{in_seconds(self._slowest_s, 2)}",
            )
        # An evaluation that was mistaken for a standstill recurs, also in later rounds.
        longest_s = _TIMES_LONGEST * self._longest_s
        if longest_s <= limit.seconds:
            return limit
        return Limit(
            longest_s, f"{_TIMES_LONGEST:g} times the longest standstill so far, {in_seconds(self._longest_s)}"
        )

    def _look_at_round(
        self,
        now: float,
        step_of: Callable[[WorkerId], int | None],
        trains: Callable[[WorkerId], bool],
        is_known: Callable[[WorkerId], bool],
    ) -> None:
        if self._tell_themselves:
            return
        members = [worker for worker in self._ranks if trains(worker)]
        steps = {worker: step_of(worker) for worker in members}
        said = [step for step in steps.values() if step is not None]
        self._note_step(max(said, default=None), now)
        looked = {worker: self._looked[worker] for worker in members if worker in self._looked}
        if len(looked) < len(self._ranks) or not looked:
            self._end_of_round("its round is over, or it is leaving")
            return
        if any(now - one.seen_at > STALE_S for one in looked.values()):
            return  # the state of the round is unknown
        if any(one.vitals.state in (STOPPED, DEBUGGED) for one in looked.values()):
            self._end_of_round("another worker is at fault")
            return
        limit = self._limit()
        quiet = [worker for worker, one in looked.items() if one.idle_s >= limit.seconds]
        is_still = bool(quiet) and (self._top is None or now - self._top_at >= limit.seconds)
        if self._of_round is not None:
            if not quiet or (self._top is not None and self._top_at > self._of_round.began):
                self._longest_s = max(self._longest_s, now - self._of_round.began)
                self._end_of_round("it makes progress again")
        elif is_still and not any(map(is_known, members)):
            began = now - (max(looked[worker].idle_s for worker in quiet) if self._top is None else now - self._top_at)
            self._name(now, began, limit, looked, steps, quiet)

    def _name(
        self,
        now: float,
        began: float,
        limit: Limit,
        looked: Mapping[WorkerId, _Looked],
        steps: Mapping[WorkerId, int | None],
        quiet: Sequence[WorkerId],
    ) -> None:
        """Report a standstill, and the worker at fault."""
        still_s = now - began
        named, why, kind = self._at_fault(still_s, looked, steps, quiet)
        rest = len(named) - 1
        first = min(named, key=lambda worker: self._ranks[worker])
        self._of_round = _Reported(began, {first: why}, limit)
        self._suspect(first, kind, why, still_s, limit, rest, _NOT_ENDED)

    def _at_fault(
        self,
        still_s: float,
        looked: Mapping[WorkerId, _Looked],
        steps: Mapping[WorkerId, int | None],
        quiet: Sequence[WorkerId],
    ) -> tuple[Sequence[WorkerId], str, Kind]:
        said = [step for step in steps.values() if step is not None]
        if len(said) == len(steps) and min(said) < max(said):
            behind = [worker for worker, step in steps.items() if step == min(said)]
            does = "is idle" if behind[0] in quiet else "is computing or doing I/O"
            text = f"it is at step {min(said)} and {does}; others have been at step {max(said)} for {still_s:.0f} s"
            return behind, text, Kind.LACKS
        nothing = f"it has used no CPU and done no I/O for {looked[quiet[0]].idle_s:.0f} s"
        at = "" if self._top is None else f"; no rank has reported a step after {self._top} for {still_s:.0f} s"
        outside = [worker for worker in quiet if looked[worker].vitals.awaits]
        if outside and len(outside) < len(looked):
            what = looked[outside[0]].vitals.awaits
            return outside, f"its main thread waits for {what}, and others are idle{at}", Kind.LACKS
        busy = [worker for worker in looked if worker not in quiet]
        if busy and len(busy) < len(quiet):
            others = f"{len(quiet)} others have been idle for {still_s:.0f} s, and may be waiting for it"
            return busy, f"it is computing or doing I/O; {others}{at}", Kind.LACKS
        if busy:
            return quiet, f"{nothing}, while others are computing{at}", Kind.LACKS
        unknown = "; neither has any other worker, and which of them the others wait for is not visible from outside"
        return quiet, f"{nothing}{unknown if len(looked) > 1 else ''}{at}", Kind.IDLE

    def _suspect(
        self, worker: WorkerId, kind: Kind, why: str, still_s: float, limit: Limit, more: int, spared: str
    ) -> None:
        rank = self._ranks.get(worker)
        self._ended.append(
            WorkerSuspected(worker, rank, kind, why, "", "", (), still_s, limit.seconds, limit.told, None, more, spared)
        )

    def _end_of_round(self, why: str) -> None:
        """End the reported standstill."""
        told, self._of_round = self._of_round, None
        if told is not None:
            took_s = self._now - told.began
            self._ended += [WorkerCleared(worker, self._ranks.get(worker), why, took_s) for worker in told.suspects]
