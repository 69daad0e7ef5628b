"""Suspected and proven hangs, from the agents' observations of the workers' processes.

Owns the suspicions, and the standard of proof. Observations and stacks go in, findings come out.

A suspicion takes time; a kill takes proof. A member is suspected if others wait for it and it makes no progress itself;
a waiting member is innocent, however long it waits. Proof is that the process is stopped by a signal without a
debugger, or that for a whole deadline its CPU time, its I/O and all of its stacks have stood still, and its main thread
has not woken, and did not wait for anything outside the job. A worker is not killed if it alone has the training's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.cases import Case, Cases, case_of_halt, cases_of_round
from elastic_driver.health.dumps import alike, debugger
from elastic_driver.health.findings import Kind, Spared, StackWanted, WorkerCleared, WorkerSuspected
from elastic_driver.health.limits import Limit, Pace, proof_of
from elastic_driver.health.seen import STALE_S, Seen, Suspicion
from elastic_driver.health.stalls import LEAST_S, Sight, Stall, stall_of
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import DEBUGGED, Vitals

STOPPED_PROOF_S = 10.0
"""A process that is stopped for this long is not about to continue: a brief stop (for a snapshot, by a scheduler) ends
sooner."""

# A standstill of thousands of workers is reported by naming some of them.
_MOST_SUSPECTS = 8
# A suspicion is cleared when it was not confirmed for this long: observations of two workers are not simultaneous.
_UNCONFIRMED_S = 2.0

Finding = WorkerSuspected | WorkerCleared | WorkerHung | Spared | StackWanted


class HangWatch:
    """The workers of a job, as their agents observe them.

    Args:
        proves: whether workers are proven to hang, and so killed; otherwise they are only named.
        numbers: the numbers of requested stacks, each different.
    """

    def __init__(self, *, proves: bool = True, numbers: Iterator[int] | None = None) -> None:
        self._proves = proves
        self._numbers = count(1) if numbers is None else numbers
        self._spares: Callable[[WorkerId], str] = lambda worker: ""
        self._seen: dict[WorkerId, Seen] = {}
        self._gone: dict[WorkerId, Seen] = {}  # members of the round that have ended, as last observed
        self._ranks: dict[WorkerId, int] = {}
        self._round_id = 0
        self._ended: list[Finding] = []
        # The workers at a standstill for longer than the limit, the stopped ones, and the suspected ones.
        self._still: dict[WorkerId, None] = {}
        self._halted: dict[WorkerId, None] = {}
        self._suspects: dict[WorkerId, None] = {}
        self._proven: set[WorkerId] = set()
        self._pace = Pace()

    # --- input -----------------------------------------------------------------------------------------------------

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int]) -> None:
        """Begin a round with these members and ranks. Limits are learned anew."""
        self._round_id, self._ranks = round_id, dict(ranks)
        self._gone.clear()
        self._pace = Pace()
        self._still.clear()
        for worker in sorted(self._suspects, key=self._order):
            suspicion = self._seen[worker].suspicion
            if suspicion is not None and suspicion.kind is not Kind.STOPPED:
                self._clear(worker, "a new round began")

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has ended."""
        if worker in self._suspects:
            self._clear(worker, "it has ended")
        self._drop(worker)
        self._proven.discard(worker)

    def take(self, worker: WorkerId, vitals: Vitals, now: float, *, peer_is_ours: bool = False) -> None:
        """Record an observation of a worker. One that is not later than the last one changes nothing.

        Args:
            worker: the worker.
            vitals: what its agent has observed.
            now: the present, in the job's time, seconds.
            peer_is_ours: whether the other end of the connection that it waits for is one of the job's hosts.
        """
        if worker in self._proven:
            return
        seen = self._seen.get(worker)
        awaits = "" if peer_is_ours else vitals.awaits
        if seen is None or vitals.pid != seen.vitals.pid or vitals.round_id != seen.vitals.round_id:
            self._take_anew(worker, vitals, now, awaits)
            return
        missed_s = vitals.at_s - seen.vitals.at_s
        if missed_s <= 0:
            return
        if missed_s > STALE_S:
            # It is unknown what it did meanwhile.
            if worker in self._suspects:
                self._clear(worker, f"it did not report for {missed_s:.0f} s")
            seen.begin_evidence(vitals)
        seen.take(vitals, now, awaits, self._pace)
        if seen.moved_s == vitals.at_s:
            self._still.pop(worker, None)
        elif vitals.at_s - seen.moved_s >= self._pace.limit.seconds:
            self._still[worker] = None
        self._note_halt(worker, seen)

    def answer(self, worker: WorkerId, number: int, text: str | None) -> None:
        """Record the requested stack; None if it cannot be taken, which proves nothing.

        The stack of a worker whose debugger waits for input proves nothing either.
        """
        seen = self._seen.get(worker)
        suspicion = None if seen is None else seen.suspicion
        if seen is None or suspicion is None or suspicion.open != number:
            return
        suspicion.open = None
        if text is None or debugger(text):
            suspicion.restart(seen.at_s, seen.vitals)
            return
        if suspicion.stacks and not alike(suspicion.stacks[0], text):
            suspicion.restart(seen.at_s, seen.vitals)
        suspicion.stacks.append(text)

    # --- output ----------------------------------------------------------------------------------------------------

    def look(
        self,
        now: float,
        *,
        trains: Callable[[WorkerId], bool] = lambda worker: True,
        lives: Callable[[WorkerId], bool] = lambda worker: True,
        spares: Callable[[WorkerId, Collection[WorkerId]], str] = lambda worker, ended: "",
    ) -> list[Finding]:
        """Return new findings. To be called twice a second.

        Args:
            now: the present, in the job's time, seconds.
            trains: whether a worker is a member of the current round that trains in it, and is not about to leave.
            lives: whether a worker has not been told to end.
            spares: why a worker may not be killed though it hangs, in words, if these others are; "" if it may.
        """
        found, self._ended = self._ended, []
        self._spares = lambda worker: spares(worker, self._proven)
        known = self._cases(now, trains) if self._still or self._suspects else {}
        cases = {} if known is None else known
        for worker in self._halted:
            seen = self._seen[worker]
            if seen.halted_looks >= 2 and seen.is_fresh(now):
                cases[worker] = case_of_halt(seen)
        cases = {worker: case for worker, case in cases.items() if lives(worker)}
        news = [
            worker for worker in cases if worker not in self._suspects and self._is_news(worker, cases[worker].kind)
        ]
        news.sort(key=self._order)
        # Each stopped worker is a case of its own; the others are cases of one standstill.
        halted = [worker for worker in news if worker in self._halted]
        others = [worker for worker in news if worker not in self._halted]
        room = max(0, _MOST_SUSPECTS - len(self._suspects))
        for worker in halted:
            found.append(self._suspect(worker, cases[worker]))
        for worker in others[:room]:
            rest = len(others) - room if worker is others[:room][-1] else 0
            found.append(self._suspect(worker, cases[worker], more=max(0, rest)))
        for worker in sorted(self._suspects, key=self._order):
            seen = self._seen[worker]
            if not lives(worker):
                self._clear(worker, "it is being stopped")
            elif seen.is_fresh(now):
                gone = not (worker in self._halted or trains(worker))
                if known is None and worker not in cases and not gone and seen.is_awaited():
                    seen.pass_over()
                else:
                    self._follow(worker, seen, cases.get(worker), found, gone=gone)
        found += self._ended
        self._ended = []
        return found

    def suspects(self) -> list[tuple[WorkerId, int | None, str, float, float]]:
        """Return the current suspects: worker, rank, why, how long it has stood still, and the limit; by rank."""
        listed = []
        for worker in sorted(self._suspects, key=self._order):
            seen = self._seen[worker]
            if (one := seen.suspicion) is not None:
                still_s = seen.at_s - one.began_s
                listed.append((worker, self._ranks.get(worker), one.why, still_s, one.limit.seconds))
        return listed

    def is_stopped(self, worker: WorkerId) -> bool:
        """Return whether a signal, and not a debugger, had stopped it at the last observation."""
        seen = self._seen.get(worker)
        return seen is not None and seen.halted_s is not None

    def stall(self, now: float, *, lost: Collection[str] = (), is_broken: bool = False) -> Stall | None:
        """Return the current stall of the round; None if it makes progress, or that is unknown.

        Args:
            now: the present, in the job's time, seconds.
            lost: hosts that are silent.
            is_broken: whether the round has just been broken: a silent worker is what broke it.
        """
        sights = []
        for worker in self._ranks:
            seen = self._seen.get(worker) or self._gone.get(worker)
            if seen is None or seen.vitals.pulse_s is None or seen.vitals.round_id != self._round_id:
                return None
            if now - seen.active_at < LEAST_S:
                return None  # as a rule that of the first: large jobs are checked twice a second, too
            is_fresh = worker in self._seen and seen.is_fresh(now) and worker.hostname not in lost
            is_stopped = seen.halted_s is not None and seen.halted_looks >= 2
            sights.append(Sight(worker, seen.active_at, seen.vitals.waits_s > 0, is_fresh, is_stopped))
        # A worker that is proven to hang is being killed, and does nothing any more.
        is_lost = any(worker.hostname in lost or worker in self._proven for worker in self._ranks)
        is_lost = is_lost or (is_broken and not all(sight.is_fresh for sight in sights))
        return stall_of(sights, now, limit_s=self._pace.stall_s, lost=is_lost)

    @property
    def limit(self) -> Limit:
        """After how long a standstill is suspicious now."""
        return self._pace.limit

    @property
    def proof(self) -> Limit:
        """For how long a suspect may neither compute, do I/O nor make progress, with the current limit."""
        return self._pace.proof

    def is_debugged(self, worker: WorkerId) -> bool:
        """Return whether a debugger had stopped it at the last observation."""
        seen = self._seen.get(worker)
        return seen is not None and seen.vitals.state == DEBUGGED

    def _take_anew(self, worker: WorkerId, vitals: Vitals, now: float, awaits: str) -> None:
        """Record the first observation of a worker, of another process of it, or in another round."""
        known = self._seen.get(worker)
        is_same = known is not None and vitals.pid == known.vitals.pid
        if known is not None and is_same and vitals.at_s <= known.at_s:
            return
        if worker in self._suspects:
            self._clear(worker, "it makes progress again")
        self._drop(worker)
        self._seen[worker] = seen = Seen.first(vitals, now, awaits)
        if known is not None and is_same and vitals.at_s - known.at_s <= STALE_S:
            seen.halted_s, seen.halted_looks = known.halted_s, known.halted_looks
        seen.note_halt()
        self._note_halt(worker, seen)

    def _note_halt(self, worker: WorkerId, seen: Seen) -> None:
        if seen.halted_looks:
            self._halted[worker] = None
        else:
            self._halted.pop(worker, None)

    # --- suspicions ------------------------------------------------------------------------------------------------

    def _cases(self, now: float, trains: Callable[[WorkerId], bool]) -> Cases | None:
        """Return the cases among the members that train; None if unknown."""
        members = {}
        for worker in self._ranks:
            seen = self._seen.get(worker)
            if seen is not None and seen.vitals.round_id == self._round_id and seen.is_fresh(now):
                members[worker] = seen
        if not any(map(trains, members)):
            return {}
        cases = cases_of_round(members, self._ranks, self.limit.seconds)
        return None if cases is None else {worker: case for worker, case in cases.items() if trains(worker)}

    def _is_news(self, worker: WorkerId, kind: Kind) -> bool:
        if worker in self._suspects:
            return False
        # A suspicion that may end in a proof is raised again as often as it was dropped.
        seen = self._seen[worker]
        return kind in (Kind.STOPPED, Kind.TRACED, Kind.LACKS) or seen.told != (seen.moved_s, kind)

    def _suspect(self, worker: WorkerId, case: Case, *, more: int = 0) -> WorkerSuspected:
        seen, limit = self._seen[worker], self.limit
        at, vitals = seen.at_s, seen.vitals
        is_stopped = case.kind is Kind.STOPPED
        began = seen.halted_s if is_stopped and seen.halted_s is not None else seen.moved_s
        seen.told = seen.moved_s, case.kind
        seen.suspicion = one = Suspicion(*case, limit, began, at, at, vitals.cpu_s, vitals.io_bytes, at)
        seen.measure_from(vitals)
        self._suspects[worker] = None
        ends_s, spared = None, ""
        if self._proves and (is_stopped or self._may_prove(seen, one)):
            awaits = "" if is_stopped else seen.awaits
            spared = (awaits and f"its main thread waits for {awaits}") or self._spares(worker)
            if not spared:
                ends_s = STOPPED_PROOF_S - (at - began) if is_stopped else self.proof.seconds
        rank = self._ranks.get(worker)
        limits = limit.seconds, limit.told, ends_s
        return WorkerSuspected(worker, rank, *case, "", (), at - began, *limits, more, spared)

    def _follow(self, worker: WorkerId, seen: Seen, case: Case | None, found: list[Finding], *, gone: bool) -> None:
        """Update a suspicion with the last observation."""
        one, at = seen.suspicion, seen.at_s
        if one is None:
            return
        one.followed_s = at
        if case is not None:
            one.confirmed_s = at
            if case.kind is Kind.LACKS and one.kind is not Kind.LACKS:
                one.restart(at, seen.vitals)
                one.is_first = True
            one.kind, one.why, one.collective = case
        elif gone and one.kind is not Kind.STOPPED:  # a script without this library never reports that it trains
            self._clear(worker, "its round is over, or it is leaving")
            return
        elif seen.moved_s > one.began_s or one.kind is Kind.STOPPED or at - one.confirmed_s >= _UNCONFIRMED_S:
            self._clear(worker, "it makes progress again")
            return
        if not self._proves:
            return
        if one.kind is Kind.STOPPED:
            since = seen.halted_s
            if since is not None and seen.halted_looks >= 2 and at - since >= STOPPED_PROOF_S:
                self._prove(worker, one, f"stopped by a signal (state T) for {at - since:.1f} s", found, silent=True)
        elif case is not None and self._may_prove(seen, one):
            self._collect(worker, seen, one, found)

    def _may_prove(self, seen: Seen, one: Suspicion) -> bool:
        return self._proves and one.kind is Kind.LACKS and not seen.vitals.traced and seen.vitals.pulse_s is not None

    def _collect(self, worker: WorkerId, seen: Seen, one: Suspicion, found: list[Finding]) -> None:
        """Collect more evidence against a worker that others wait for."""
        at, deadline = seen.at_s, proof_of(one.limit)
        since = max(seen.quiet_s, seen.alone_s)
        if since > one.window_s:
            one.restart(since, seen.vitals)
        whole_s = deadline.seconds
        due = (0.0 if one.is_first else whole_s / 12, whole_s / 2, whole_s)
        taken = len(one.stacks)
        if taken == len(due):
            cpu_s, did = seen.vitals.cpu_s - one.cpu_s, seen.vitals.io_bytes - one.io_bytes
            text = (
                f"{one.why}; for {at - one.window_s:.0f} s it has used {max(0.0, cpu_s):.2f} s of CPU time and moved "
                f"{max(0, did)} bytes, its main thread has not woken, and its stacks are the same ({deadline.told}); "
                "--hang-action warn would only report it"
            )
            self._prove(worker, one, text, found, silent=False)
        elif one.open is None and at - one.window_s >= due[taken]:
            one.open = next(self._numbers)
            found.append(StackWanted(worker, one.open))

    def _prove(self, worker: WorkerId, one: Suspicion, why: str, found: list[Finding], *, silent: bool) -> None:
        """Declare a worker hung; if the state would be lost with it, report that once, as that may change."""
        if reason := self._spares(worker):
            if not one.is_spared:
                one.is_spared = True
                found.append(Spared(worker, why, reason))
            return
        found.append(WorkerHung(worker, why, silent))
        self._drop(worker)
        self._proven.add(worker)

    def _clear(self, worker: WorkerId, why: str) -> None:
        seen = self._seen[worker]
        one, seen.suspicion = seen.suspicion, None
        del self._suspects[worker]
        if one is not None:
            took_s = max(0.0, seen.at_s - one.began_s)
            self._ended.append(WorkerCleared(worker, self._ranks.get(worker), why, took_s))

    def _drop(self, worker: WorkerId) -> None:
        for kept in (self._still, self._halted, self._suspects):
            kept.pop(worker, None)
        seen = self._seen.pop(worker, None)
        if seen is not None and worker in self._ranks:
            self._gone[worker] = seen

    def _order(self, worker: WorkerId) -> tuple[bool, int, str]:
        rank = self._ranks.get(worker)
        return rank is None, rank or 0, worker.key
