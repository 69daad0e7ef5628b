"""Who is suspected to hang, and who is proven to: from what agents see of the workers' processes.

Owns the limits, which it learns from the training, the suspicions and the evidence. Reads no clock and does no I/O:
looks at workers and answers come in, findings go out. All durations are differences of one agent's own clock, so that
neither a driver nor a host that stands still makes anybody look slow; the job's time says only whether a look is old.

To suspect somebody takes time; to end somebody takes proof. A suspicion is of a member that others wait for, and that
does not go on itself; whoever waits is innocent, however long. Proof is that the process is stopped by a signal and
nobody debugs it, or that for a whole deadline neither its CPU time nor its I/O nor any of its stacks has moved, its
main thread has not woken, and did not wait for anything outside the job. Nobody is ended who alone has the training's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from elastic_driver.health.dumps import alike, debugger
from elastic_driver.health.findings import Kind, ProvenHung, Spared, StackWanted, WorkerCleared, WorkerSuspected
from elastic_driver.health.stalls import LEAST_S, Sight, Stall, stall_of
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import DEBUGGED, QUIET_BLOCK_S, RUNNABLE, STOPPED, Vitals, Waiting, is_quiet

LEAST_LIMIT_S = 5.0
"""Nobody is suspected before: collections of garbage, writes to slow discs and busy machines take seconds."""
TIMES_SLOWEST = 10.0
"""How many times the slowest of the last steps a standstill is suspicious."""
START_LIMIT_S = 60.0
"""While too few steps are counted to learn from: the first ones load data and compile, and most are there by then."""
LEAST_PROOF_S = 60.0
"""The shortest deadline of the proof: what is retried, polled or written back is so at least once a minute (kernels
report a task as hung after 120 s, networks retry after at most 64 s)."""
TIMES_LIMIT = 6.0
"""The deadline of the proof is so many times the limit: 60 of the slowest steps."""
STOPPED_PROOF_S = 10.0
"""A process that is stopped for so long is not about to go on: whoever stops one for a moment (a snapshot, a scheduler)
goes on sooner."""

LEARNED_FROM, _WINDOW = 10, 100
# Looks come about once a second. Between two that are further apart than this nobody knows what has happened.
STALE_S = 3.0
# A stand-still of thousands is told by some of them.
_MOST_SUSPECTS = 8
# A suspicion is cleared when it was not confirmed for so long: looks of two workers are not of one moment.
_UNCONFIRMED_S = 2.0


@dataclass(frozen=True, slots=True)
class Limit:
    """After how long a standstill is suspicious, and how that is derived, in words."""

    seconds: float
    told: str


Finding = WorkerSuspected | WorkerCleared | ProvenHung | Spared | StackWanted


class _Window:
    """The slowest of the last steps of all members. Members count from the beginning of the round, each for itself."""

    def __init__(self) -> None:
        self.top = 0
        self.slowest_s = 0.0
        self._samples: dict[int, float] = {}

    def add(self, index: int, took_s: float) -> bool:
        """Takes a step's duration. Returns whether the slowest, or the number of steps, has changed."""
        if index <= self.top - _WINDOW or self._samples.get(index, -1.0) >= took_s:
            return False
        self._samples[index] = took_s
        if index <= self.top and took_s <= self.slowest_s:
            return False
        if index > self.top:
            self.top = index
            for old in [each for each in self._samples if each <= index - _WINDOW]:
                del self._samples[old]
        self.slowest_s = max(self._samples.values())
        return True


@dataclass(slots=True)
class _Suspicion:
    """Of one worker, for one standstill. Times are of its agent's clock."""

    kind: Kind
    why: str
    collective: str
    limit: Limit
    began_s: float
    confirmed_s: float
    # The evidence: since when it is collected, what the worker had done until then, the stacks since then, and the
    # question that is open.
    window_s: float
    cpu_s: float
    io_bytes: int
    # When it was looked at last, and whether it was told that it is spared.
    followed_s: float
    is_first: bool = True
    is_spared: bool = False
    stacks: list[str] = field(default_factory=list)
    open: int | None = None


@dataclass(slots=True)
class _Seen:
    """A worker as it was seen last. Times ending in ``_s`` are of its agent's clock, ``seen_at`` is the job's.

    Attributes:
        vitals, seen_at: the last look, and when it came.
        moved_s: when it went on last.
        stepped_s, finished_s: when a step, and a collective, was finished last.
        quiet_s: since when it neither waits nor does anything.
        alone_s: since when its main thread has neither woken, nor been ready to run, nor waited for anything outside
            the job.
        heard_s: since when nothing was missed of it.
        counted_s, cpu_s, io_bytes: since when what it does is measured, and what it had done until then.
        steps, gaps: that were counted.
        halted_s, halted_looks: since when it is stopped by a signal, and in how many looks it was stopped by anybody.
        told: the last standstill that was told.
    """

    vitals: Vitals
    seen_at: float
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
    suspicion: _Suspicion | None = None


class HangWatch:
    """The workers of a job, as agents see them.

    Args:
        proves: whether anybody is proven to hang, and so ended; otherwise they are named only.
        is_of_the_job: whether an address is one of the job's hosts.
    """

    def __init__(self, *, proves: bool = True, is_of_the_job: Callable[[str], bool] = lambda address: False) -> None:
        self._proves = proves
        self._is_of_the_job = is_of_the_job
        self._spares: Callable[[WorkerId], str] = lambda worker: ""
        self._seen: dict[WorkerId, _Seen] = {}
        self._gone: dict[WorkerId, _Seen] = {}  # members of the round that have ended, as they were seen last
        self._ranks: dict[WorkerId, int] = {}
        self._round_id = 0
        self._number = 0
        self._ended: list[Finding] = []
        # Of each of these, who is so: those who stand still for longer than the limit, are stopped, are suspected.
        self._still: dict[WorkerId, None] = {}
        self._halted: dict[WorkerId, None] = {}
        self._suspects: dict[WorkerId, None] = {}
        self._proven: set[WorkerId] = set()
        self._learn_anew()

    # --- what is fed -----------------------------------------------------------------------------------------------

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int]) -> None:
        """A round begins: its members, and their ranks. Limits are learned anew."""
        self._round_id, self._ranks = round_id, dict(ranks)
        self._gone.clear()
        self._learn_anew()
        self._still.clear()
        for worker in sorted(self._suspects, key=self._order):
            suspicion = self._seen[worker].suspicion
            if suspicion is not None and suspicion.kind is not Kind.STOPPED:
                self._clear(worker, "a new round began")

    def forget(self, worker: WorkerId) -> None:
        """It has ended."""
        if worker in self._suspects:
            self._clear(worker, "it has ended")
        self._drop(worker)
        self._proven.discard(worker)

    def take(self, worker: WorkerId, vitals: Vitals, now: float) -> None:
        """A look at a worker. One that is not later than the last one changes nothing."""
        seen = self._seen.get(worker)
        if worker in self._proven:
            return
        if seen is None or vitals.pid != seen.vitals.pid or vitals.round_id != seen.vitals.round_id:
            self._take_anew(worker, vitals, now)
            return
        before = seen.vitals
        if vitals.at_s <= before.at_s:
            return
        if vitals.at_s - before.at_s > STALE_S:
            # Nobody knows what it did meanwhile.
            if worker in self._suspects:
                self._clear(worker, f"nothing was heard of it for {vitals.at_s - before.at_s:.0f} s")
            self._begin_evidence(seen, vitals)
        at = vitals.at_s
        if vitals.steps != before.steps:
            self._note_steps(seen, vitals, before)
        if vitals.finished != before.finished:
            self._note_gap(seen, at)
        if (vitals.submitted, vitals.finished, vitals.steps, vitals.commits) != (
            before.submitted,
            before.finished,
            before.steps,
            before.commits,
        ):
            seen.moved_s = at
            self._still.pop(worker, None)
        elif at - seen.moved_s >= self.limit.seconds:
            self._still[worker] = None
        self._note_quiet(seen, vitals)
        # Who is ready to run and has not run has had no processor: a busy or throttled machine's doing.
        if vitals.wakes != before.wakes or vitals.state == RUNNABLE or self._awaits(vitals):
            seen.alone_s = at
        if _has_run(before, vitals):
            # Who is stopped and let go on in turn (as it is by who limits its share of a processor, or traces its
            # system calls) is not stopped.
            seen.halted_s, seen.halted_looks = None, 0
        seen.vitals, seen.seen_at = vitals, now
        self._note_halt(worker, seen)

    def answer(self, worker: WorkerId, number: int, text: str | None) -> None:
        """The stack that was wanted; None where it cannot be had, which proves nothing.

        Nor does that of a worker that waits for what a person tells its debugger.
        """
        seen = self._seen.get(worker)
        suspicion = None if seen is None else seen.suspicion
        if seen is None or suspicion is None or suspicion.open != number:
            return
        suspicion.open = None
        if text is None or debugger(text):
            self._restart(suspicion, seen.vitals.at_s, seen.vitals)
            return
        if suspicion.stacks and not alike(suspicion.stacks[0], text):
            self._restart(suspicion, seen.vitals.at_s, seen.vitals)
        suspicion.stacks.append(text)

    # --- what is found ---------------------------------------------------------------------------------------------

    def look(
        self,
        now: float,
        *,
        trains: Callable[[WorkerId], bool] = lambda worker: True,
        lives: Callable[[WorkerId], bool] = lambda worker: True,
        spares: Callable[[WorkerId, Collection[WorkerId]], str] = lambda worker, ended: "",
    ) -> list[Finding]:
        """What is new. To be called twice a second.

        Args:
            now: the present, of the job's time, seconds.
            trains: whether a worker is a member of the present round that trains in it, and is not about to leave.
            lives: whether nobody has told a worker to end.
            spares: why a worker may not be ended though it hangs, in words, when these others are; "" where it may.
        """
        found, self._ended = self._ended, []
        self._spares = lambda worker: spares(worker, self._proven)
        known = self._cases(now, trains) if self._still or self._suspects else {}
        cases = {} if known is None else known
        for worker in self._halted:
            seen = self._seen[worker]
            if seen.halted_looks >= 2 and self._is_fresh(seen, now):
                cases[worker] = self._case_of_halt(seen)
        cases = {worker: case for worker, case in cases.items() if lives(worker)}
        news = [worker for worker in cases if worker not in self._suspects and self._is_news(worker, cases[worker][0])]
        news.sort(key=self._order)
        # Who is stopped is so by itself; the others are cases of one standstill.
        halted = [worker for worker in news if worker in self._halted]
        others = [worker for worker in news if worker not in self._halted]
        room = max(0, _MOST_SUSPECTS - len(self._suspects))
        for worker in halted:
            found.append(self._suspect(worker, *cases[worker]))
        for worker in others[:room]:
            rest = len(others) - room if worker is others[:room][-1] else 0
            found.append(self._suspect(worker, *cases[worker], more=max(0, rest)))
        for worker in sorted(self._suspects, key=self._order):
            seen = self._seen[worker]
            if not lives(worker):
                self._clear(worker, "it was told to end")
            elif self._is_fresh(seen, now):
                gone = not (worker in self._halted or trains(worker))
                if known is None and worker not in cases and not gone and _is_awaited(seen):
                    _pass_over(seen)
                else:
                    self._follow(worker, seen, cases.get(worker), found, gone=gone)
        found += self._ended
        self._ended = []
        return found

    def suspects(self) -> list[tuple[WorkerId, int | None, str, float, float]]:
        """Who is suspected now: worker, rank, why, for how long it stands still, and the limit; by ranks."""
        listed = []
        for worker in sorted(self._suspects, key=self._order):
            seen = self._seen[worker]
            if (one := seen.suspicion) is not None:
                still_s = seen.vitals.at_s - one.began_s
                listed.append((worker, self._ranks.get(worker), one.why, still_s, one.limit.seconds))
        return listed

    def is_stopped(self, worker: WorkerId) -> bool:
        """Whether it was stopped by a signal, and not by a debugger, when it was looked at last."""
        seen = self._seen.get(worker)
        return seen is not None and seen.halted_s is not None

    def stall(self, now: float, *, lost: Collection[str] = (), is_broken: bool = False) -> Stall | None:
        """The stall that the round is in; None where it goes on, or nobody can know.

        Args:
            now: the present, of the job's time, seconds.
            lost: hosts that are not heard.
            is_broken: whether the round has just been broken: who is not heard any more is what broke it.
        """
        sights = []
        for worker in self._ranks:
            seen = self._seen.get(worker) or self._gone.get(worker)
            if seen is None or seen.vitals.pulse_s is None or seen.vitals.round_id != self._round_id:
                return None
            vitals, is_fresh = seen.vitals, worker in self._seen and self._is_fresh(seen, now)
            idle_s = 0.0 if vitals.state == RUNNABLE else vitals.at_s - max(seen.moved_s, seen.quiet_s)
            waits = vitals.waits_s > 0
            is_stopped = seen.halted_s is not None and seen.halted_looks >= 2
            active_at = seen.seen_at - (vitals.waits_s if waits else idle_s)
            if now - active_at < LEAST_S:
                return None  # as a rule that of the first: large jobs are looked at twice a second, too
            sights.append(Sight(worker, active_at, waits, is_fresh and worker.hostname not in lost, is_stopped))
        is_lost = any(worker.hostname in lost for worker in self._ranks)
        is_lost = is_lost or (is_broken and not all(sight.is_fresh for sight in sights))
        # A script may commit seldom, and tell of no other steps.
        by_gaps = limit_of(self._gaps.top, self._gaps.slowest_s, "gaps between collectives")
        return stall_of(sights, now, limit_s=min(self.limit.seconds, by_gaps.seconds), lost=is_lost)

    @property
    def proof(self) -> Limit:
        """For how long a suspect may neither compute, read, write nor move, with the present limit."""
        return proof_of(self.limit)

    # --- what is learned -------------------------------------------------------------------------------------------

    def _learn_anew(self) -> None:
        self._steps, self._gaps = _Window(), _Window()
        self.limit = limit_of(0, 0.0, "steps")

    def _note_steps(self, seen: _Seen, vitals: Vitals, before: Vitals) -> None:
        done = vitals.steps - before.steps
        if done > 0:
            # The first of them took at least as long as no step was seen: those that came after it do not make it
            # shorter, and it is forgotten a hundred steps after it, not after them.
            is_new = self._steps.add(seen.steps + 1, before.at_s - seen.stepped_s)
            seen.steps += done
            if self._steps.add(seen.steps, (vitals.at_s - seen.stepped_s) / done) or is_new:
                self._derive()
        seen.stepped_s = vitals.at_s

    def _note_gap(self, seen: _Seen, at: float) -> None:
        seen.gaps += 1
        if self._gaps.add(seen.gaps, at - seen.finished_s) and not self._steps.top:
            self._derive()
        seen.finished_s = at

    def _derive(self) -> None:
        if self._steps.top:
            self.limit = limit_of(self._steps.top, self._steps.slowest_s, "steps")
        else:
            self.limit = limit_of(self._gaps.top, self._gaps.slowest_s, "gaps between collectives")

    # --- evidence --------------------------------------------------------------------------------------------------

    def _take_anew(self, worker: WorkerId, vitals: Vitals, now: float) -> None:
        """The first look at a worker, at another process of it, or at it in another round."""
        known = self._seen.get(worker)
        if known is not None and vitals.pid == known.vitals.pid and vitals.at_s <= known.vitals.at_s:
            return
        at = vitals.at_s
        if worker in self._suspects:
            self._clear(worker, "it goes on")
        self._drop(worker)
        self._seen[worker] = seen = _Seen(vitals, now, at, at, at, at, at, at, at, vitals.cpu_s, vitals.io_bytes)
        if known is not None and known.vitals.pid == vitals.pid and vitals.at_s - known.vitals.at_s <= STALE_S:
            seen.halted_s, seen.halted_looks = known.halted_s, known.halted_looks
        self._note_halt(worker, seen)

    def _begin_evidence(self, seen: _Seen, vitals: Vitals) -> None:
        at = vitals.at_s
        seen.moved_s = seen.stepped_s = seen.finished_s = seen.quiet_s = seen.alone_s = seen.heard_s = at
        self._measure_from(seen, vitals)
        seen.halted_s, seen.halted_looks = None, 0

    def _note_quiet(self, seen: _Seen, vitals: Vitals) -> None:
        since_s = vitals.at_s - seen.counted_s
        cpu_s, done = vitals.cpu_s - seen.cpu_s, vitals.io_bytes - seen.io_bytes
        if not is_quiet(since_s, cpu_s, done) or vitals.waits_s > 0:
            seen.quiet_s = vitals.at_s
            self._measure_from(seen, vitals)
        elif since_s >= QUIET_BLOCK_S:
            self._measure_from(seen, vitals)

    def _measure_from(self, seen: _Seen, vitals: Vitals) -> None:
        seen.counted_s, seen.cpu_s, seen.io_bytes = vitals.at_s, vitals.cpu_s, vitals.io_bytes

    def _note_halt(self, worker: WorkerId, seen: _Seen) -> None:
        state = seen.vitals.state
        if state not in (STOPPED, DEBUGGED):
            seen.halted_s, seen.halted_looks = None, 0
            self._halted.pop(worker, None)
            return
        if seen.vitals.traced or state != STOPPED:
            seen.halted_s = None  # a debugger's doing
        elif seen.halted_s is None:
            seen.halted_s = seen.vitals.at_s
        seen.halted_looks += 1
        self._halted[worker] = None

    def _restart(self, suspicion: _Suspicion, at: float, vitals: Vitals) -> None:
        suspicion.window_s, suspicion.is_first = at, False
        suspicion.cpu_s, suspicion.io_bytes = vitals.cpu_s, vitals.io_bytes
        suspicion.stacks, suspicion.open = [], None

    # --- suspicions ------------------------------------------------------------------------------------------------

    def _cases(self, now: float, trains: Callable[[WorkerId], bool]) -> dict[WorkerId, tuple[Kind, str, str]] | None:
        """Who stands still now though others wait, or for no reason that is seen: kind, why, collective.

        None where nobody can know, since somebody is not heard who would.
        """
        members = {}
        for worker in self._ranks:
            seen = self._seen.get(worker)
            if seen is not None and seen.vitals.round_id == self._round_id and self._is_fresh(seen, now):
                members[worker] = seen
        if not any(map(trains, members)):
            return {}
        limit_s = self.limit.seconds
        by_rank = {self._ranks[worker]: worker for worker in members}
        root = members.get(by_rank[0]) if 0 in by_rank else None
        listed = () if root is None else root.vitals.waiting
        # What rank 0 has slept through with its host is no wait for anybody.
        heard_s = 0.0 if root is None else root.vitals.at_s - root.heard_s
        overdue = [one for one in listed if min(one.since_s, heard_s) >= limit_s]
        cases: dict[WorkerId, tuple[Kind, str, str]] | None
        if overdue:
            cases = self._cases_of_waiting(overdue, members, by_rank)
        elif not listed:
            cases = self._cases_by_counts(members)
        else:
            cases = None if any(one.since_s >= limit_s for one in listed) else {}
        if cases is None:
            return None
        return {worker: case for worker, case in cases.items() if trains(worker)}

    def _cases_of_waiting(
        self, overdue: Collection[Waiting], members: Mapping[WorkerId, _Seen], by_rank: Mapping[int, WorkerId]
    ) -> dict[WorkerId, tuple[Kind, str, str]]:
        """With what rank 0 knows."""
        cases: dict[WorkerId, tuple[Kind, str, str]] = {}
        all_wait = True
        for one in sorted(overdue, key=lambda one: (-one.since_s, one.name)):
            for rank in one.missing:
                worker = by_rank.get(rank)
                if worker is None:
                    all_wait = False
                    continue
                seen = members[worker]
                if seen.vitals.waits_s > 0:
                    all_wait = all_wait and _waits_s(seen) >= self.limit.seconds
                    continue
                all_wait = False
                if self._is_still(seen) and worker not in cases:
                    text = f"it has not submitted {one.name}, in which others have waited for {one.since_s:.0f} s"
                    cases[worker] = self._awaited(seen, text, one.name)
        if not cases and all_wait:
            # Which of them are in the wrong nobody can know; the fewest are named.
            one = min(overdue, key=lambda one: (len(one.missing), -one.since_s, one.name))
            for rank in one.missing:
                text = (
                    f"it has not submitted {one.name}, in which others have waited for {one.since_s:.0f} s, and waits "
                    "for others itself: the ranks wait for each other"
                )
                cases[by_rank[rank]] = Kind.DEADLOCK, text, one.name
        return cases

    def _cases_by_counts(self, members: Mapping[WorkerId, _Seen]) -> dict[WorkerId, tuple[Kind, str, str]] | None:
        """Without: the member that does not wait while all others do; who has submitted fewest.

        None where some are not heard, or were not until a moment ago, who may wait or be waited for.
        """
        if len(members) < len(self._ranks):
            return None
        limit_s = self.limit.seconds
        known = {worker: seen for worker, seen in members.items() if seen.vitals.pulse_s is not None}
        waiters = [worker for worker, seen in known.items() if seen.vitals.waits_s > 0]
        if not waiters:
            return {
                worker: (Kind.IDLE, f"{_does_nothing(seen)}, and nobody waits for it", "")
                for worker, seen in known.items()
                if self._is_still(seen) and seen.vitals.at_s - seen.quiet_s >= limit_s
            }
        if len(known) < len(self._ranks) or any(known[worker].vitals.waits_s < limit_s for worker in waiters):
            return {}
        if any(_waits_s(known[worker]) < limit_s for worker in waiters):
            return None
        others = [worker for worker in known if worker not in dict.fromkeys(waiters)]
        counts = {worker: known[worker].vitals.submitted for worker in (others or waiters)}
        fewest = min(counts.values())
        waited_s = min(known[worker].vitals.waits_s for worker in waiters)
        if others:
            text = f"it waits in no collective, and all others have waited for {waited_s:.0f} s"
            return {
                worker: self._awaited(known[worker], text, "")
                for worker, count in counts.items()
                if count == fewest and self._is_still(known[worker])
            }
        if fewest == max(counts.values()):
            return {}  # it is the collective itself that does not get on
        text = f"it has submitted {fewest} collectives, others more, and all have waited for {waited_s:.0f} s"
        return {
            worker: (Kind.DEADLOCK, f"{text}: the ranks wait for each other", "")
            for worker, count in counts.items()
            if count == fewest
        }

    def _awaited(self, seen: _Seen, text: str, collective: str) -> tuple[Kind, str, str]:
        vitals = seen.vitals
        if vitals.traced:
            return Kind.TRACED, f"{text}; a debugger holds it", collective
        if vitals.state == "D":
            text += "; it is in a system call that cannot be interrupted (state D): a disc, mostly"
        return Kind.LACKS, text, collective

    def _case_of_halt(self, seen: _Seen) -> tuple[Kind, str, str]:
        vitals = seen.vitals
        if vitals.state == STOPPED and not vitals.traced:
            return Kind.STOPPED, "it is stopped by a signal (state T)", ""
        return Kind.TRACED, f"it is stopped by a debugger (state {vitals.state})", ""

    def _is_news(self, worker: WorkerId, kind: Kind) -> bool:
        # A suspicion that may end in a proof is taken up as often as it was dropped.
        seen = self._seen[worker]
        return kind in (Kind.STOPPED, Kind.TRACED, Kind.LACKS) or seen.told != (seen.moved_s, kind)

    def _suspect(self, worker: WorkerId, kind: Kind, why: str, collective: str, *, more: int = 0) -> WorkerSuspected:
        seen = self._seen[worker]
        at = seen.vitals.at_s
        began = seen.halted_s if kind is Kind.STOPPED and seen.halted_s is not None else seen.moved_s
        seen.told = seen.moved_s, kind
        cpu_s, io_bytes = seen.vitals.cpu_s, seen.vitals.io_bytes
        seen.suspicion = one = _Suspicion(kind, why, collective, self.limit, began, at, at, cpu_s, io_bytes, at)
        self._measure_from(seen, seen.vitals)
        self._suspects[worker] = None
        ends_s, spared = None, ""
        if self._proves and (kind is Kind.STOPPED or self._may_prove(seen, one)):
            awaits = "" if kind is Kind.STOPPED else self._awaits(seen.vitals)
            spared = (awaits and f"its main thread waits for {awaits}") or self._spares(worker)
        if not spared and self._proves and kind is Kind.STOPPED:
            ends_s = STOPPED_PROOF_S - (at - began)
        elif not spared and self._may_prove(seen, one):
            ends_s = proof_of(self.limit).seconds
        rank = self._ranks.get(worker)
        limit, still_s = self.limit, at - began
        return WorkerSuspected(
            worker, rank, kind, why, collective, "", (), still_s, limit.seconds, limit.told, ends_s, more, spared
        )

    def _follow(
        self, worker: WorkerId, seen: _Seen, case: tuple[Kind, str, str] | None, found: list[Finding], *, gone: bool
    ) -> None:
        """What has become of a suspicion, with the last look."""
        one, at = seen.suspicion, seen.vitals.at_s
        if one is None:
            return
        one.followed_s = at
        if case is not None:
            one.confirmed_s = at
            if case[0] is Kind.LACKS and one.kind is not Kind.LACKS:
                self._restart(one, at, seen.vitals)
                one.is_first = True
            one.kind, one.why, one.collective = case
        elif gone and one.kind is not Kind.STOPPED:  # a script that does not use this library never says that it trains
            self._clear(worker, "its round is over, or it leaves")
            return
        elif seen.moved_s > one.began_s or one.kind is Kind.STOPPED or at - one.confirmed_s >= _UNCONFIRMED_S:
            self._clear(worker, "it goes on")
            return
        if not self._proves:
            return
        if one.kind is Kind.STOPPED:
            since = seen.halted_s
            if since is not None and seen.halted_looks >= 2 and at - since >= STOPPED_PROOF_S:
                self._prove(worker, one, f"stopped by a signal (state T) for {at - since:.1f} s", found, silent=True)
        elif case is not None and self._may_prove(seen, one):
            self._collect(worker, seen, one, found)

    def _may_prove(self, seen: _Seen, one: _Suspicion) -> bool:
        return self._proves and one.kind is Kind.LACKS and not seen.vitals.traced and seen.vitals.pulse_s is not None

    def _collect(self, worker: WorkerId, seen: _Seen, one: _Suspicion, found: list[Finding]) -> None:
        """Goes on with the evidence against a worker that others wait for."""
        at, deadline = seen.vitals.at_s, proof_of(one.limit)
        since = max(seen.quiet_s, seen.alone_s)
        if since > one.window_s:
            self._restart(one, since, seen.vitals)
        whole_s = deadline.seconds
        due = (0.0 if one.is_first else whole_s / 12, whole_s / 2, whole_s)
        taken = len(one.stacks)
        if taken == len(due):
            cpu_s, did = seen.vitals.cpu_s - one.cpu_s, seen.vitals.io_bytes - one.io_bytes
            text = (
                f"{one.why}; for {at - one.window_s:.0f} s it has used {max(0.0, cpu_s):.2f} s of CPU time and moved "
                f"{max(0, did)} bytes, its main thread has not woken, and its stacks are the same ({deadline.told}); "
                "--hang-action warn would only name it"
            )
            self._prove(worker, one, text, found, silent=False)
        elif one.open is None and at - one.window_s >= due[taken]:
            self._number += 1
            one.open = self._number
            found.append(StackWanted(worker, self._number))

    def _prove(self, worker: WorkerId, one: _Suspicion, why: str, found: list[Finding], *, silent: bool) -> None:
        """It hangs. Where the state would be lost with it, that is told once, and may be otherwise later."""
        if reason := self._spares(worker):
            if not one.is_spared:
                one.is_spared = True
                found.append(Spared(worker, why, reason))
            return
        found.append(ProvenHung(worker, why, silent))
        self._drop(worker)
        self._proven.add(worker)

    def _awaits(self, vitals: Vitals) -> str:
        """What a worker's main thread waits for outside the job, in words; "" for nothing that is known."""
        return "" if vitals.peer and self._is_of_the_job(vitals.peer) else vitals.awaits

    def _clear(self, worker: WorkerId, why: str) -> None:
        seen = self._seen[worker]
        one, seen.suspicion = seen.suspicion, None
        del self._suspects[worker]
        if one is not None:
            took_s = max(0.0, seen.vitals.at_s - one.began_s)
            self._ended.append(WorkerCleared(worker, self._ranks.get(worker), why, took_s))

    def _drop(self, worker: WorkerId) -> None:
        for kept in (self._still, self._halted, self._suspects):
            kept.pop(worker, None)
        seen = self._seen.pop(worker, None)
        if seen is not None and worker in self._ranks:
            self._gone[worker] = seen

    def _is_still(self, seen: _Seen) -> bool:
        return seen.vitals.pulse_s is not None and seen.vitals.at_s - seen.moved_s >= self.limit.seconds

    def _is_fresh(self, seen: _Seen, now: float) -> bool:
        return now - seen.seen_at <= STALE_S

    def _order(self, worker: WorkerId) -> tuple[bool, int, str]:
        rank = self._ranks.get(worker)
        return rank is None, rank or 0, worker.key


def limit_of(counted: int, slowest_s: float, what: str) -> Limit:
    """The limit that follows from so many steps (or gaps), the slowest of which took so long.

    Args:
        counted: of them so far in this round.
        slowest_s: of the last ones, seconds.
        what: "steps", or what takes their place.
    """
    learned_s = TIMES_SLOWEST * slowest_s
    said = f"{TIMES_SLOWEST:g} times the slowest of the last {min(counted, _WINDOW)} {what}, {slowest_s:.2g} s,"
    if counted < LEARNED_FROM:
        if learned_s > START_LIMIT_S:
            return Limit(learned_s, f"{said} is {learned_s:.3g} s")
        return Limit(START_LIMIT_S, f"{START_LIMIT_S:g} s, until {LEARNED_FROM} steps of the round are counted")
    if learned_s < LEAST_LIMIT_S:
        return Limit(LEAST_LIMIT_S, f"{LEAST_LIMIT_S:g} s, the least; {said} is less")
    return Limit(learned_s, f"{said} is {learned_s:.3g} s")


def proof_of(limit: Limit) -> Limit:
    """The deadline of the proof that follows from a limit."""
    derived_s = TIMES_LIMIT * limit.seconds
    if derived_s <= LEAST_PROOF_S:
        return Limit(LEAST_PROOF_S, f"the deadline is {LEAST_PROOF_S:g} s, the least")
    return Limit(derived_s, f"the deadline is {TIMES_LIMIT:g} times the limit of {limit.seconds:.3g} s")


def _has_run(before: Vitals, after: Vitals) -> bool:
    """Whether a process has run between two looks at it."""
    return (before.cpu_s, before.io_bytes, before.steps, before.submitted, before.finished, before.commits) != (
        after.cpu_s,
        after.io_bytes,
        after.steps,
        after.submitted,
        after.finished,
        after.commits,
    )


def _is_awaited(seen: _Seen) -> bool:
    """Whether it is suspected since others wait for it, and has not gone on since."""
    one = seen.suspicion
    return one is not None and one.kind in (Kind.LACKS, Kind.DEADLOCK) and seen.moved_s <= one.began_s


def _pass_over(seen: _Seen) -> None:
    """Leaves a suspicion as it is, while nobody can know what has become of it: that time is no evidence."""
    if (one := seen.suspicion) is not None:
        missed_s, one.followed_s = seen.vitals.at_s - one.followed_s, seen.vitals.at_s
        one.window_s += missed_s
        one.confirmed_s += missed_s


def _waits_s(seen: _Seen) -> float:
    """For how long it has waited, as far as it was looked at."""
    return min(seen.vitals.waits_s, seen.vitals.at_s - seen.heard_s)


def _does_nothing(seen: _Seen) -> str:
    quiet_s = seen.vitals.at_s - seen.quiet_s
    text = f"it has neither computed, read nor written anything for {quiet_s:.0f} s"
    return f"{text} (state D: a disc, mostly)" if seen.vitals.state == "D" else text
