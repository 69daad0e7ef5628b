"""Who hangs and who is slow, by what agents see of the workers: has the core decide, asks for stacks, and tells.

Owns the order in which things are told, and the pause between two drains of slow workers. Ends nobody, and decides
nothing of it: what a hang or a drain means is the core's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from elastic_driver.core.draining import why_needed
from elastic_driver.core.events import Command, DrainRequested, PublishRound, WorkerHung
from elastic_driver.core.standing import Doing, standing_of
from elastic_driver.core.state import JobPhase, State, WorkerPhase, finishing, record_of
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.dumps import debugger, innermost
from elastic_driver.health.findings import (
    Kind,
    Spared,
    StackWanted,
    StragglerFound,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.hangs import HangWatch
from elastic_driver.health.stalls import Stall
from elastic_driver.health.standstills import UNHEARD_S, StandstillWatch
from elastic_driver.health.stragglers import StragglerWatch
from elastic_driver.health.survivors import why_spared
from elastic_driver.hosts import WorkerId
from elastic_driver.report import wording
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals
from elastic_driver.words import HangAction, StragglerAction

# Agents look twice a second.
_LOOK_S = 0.5
# A link's answer may take a while; then the suspicion is told without.
_STACK_S = 6.0
# A slow worker is drained, then the others have to show how fast they are without it; and a host that is slow again
# after one of its places was drained has something that no drain cures.
DRAIN_PAUSE_S, HOST_PAUSE_S = 60.0, 3600.0
_NAMED = 2

Stacks = Callable[[WorkerId], Awaitable[str | None]]


async def no_stacks(worker: WorkerId) -> str | None:
    """Where stacks cannot be had."""
    return None


@dataclass(eq=False, slots=True)
class _Untold:
    """A suspicion that waits for a stack to be told with, and what is to be told after it."""

    suspected: WorkerSuspected
    after: list[WorkerCleared | WorkerHung | Spared] = field(default_factory=list)


class Health:
    """Watches the workers of one job. Used on the event loop only.

    Args:
        stepper: has the state, and takes who hangs and who is drained.
        chronicle: is told.
        clock: the job's time, seconds.
        tasks: runs the questions for stacks.
        stacks: takes a worker's Python stacks; None where they cannot be had.
        hang_action: what comes of a worker that is proven to hang.
        straggler_action: what comes of one that is slow.
        is_of_the_job: whether an address is one of the job's hosts.
        unheard: for how long nothing was heard of hosts whose machines answer, by name, where that is at least so long.

    Attributes:
        is_on_disc: whether there is a commit on disc that the job can go on from.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        clock: Callable[[], float],
        tasks: Tasks,
        stacks: Stacks = no_stacks,
        hang_action: str = HangAction.END,
        straggler_action: str = StragglerAction.WARN,
        is_of_the_job: Callable[[str], bool] = lambda address: False,
        unheard: Callable[[float], Mapping[str, float]] = lambda least_s: {},
    ) -> None:
        self._unheard = unheard
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._tasks = tasks
        self.stacks = stacks
        self._drains = straggler_action == StragglerAction.DRAIN
        self.is_on_disc = False
        self._hangs = HangWatch(proves=hang_action == HangAction.END)
        self._is_of_the_job = is_of_the_job
        self._standstills = StandstillWatch()
        self._stragglers = StragglerWatch()
        self._round_id = 0
        self._trains_since: float | None = None  # None while it does not train
        self._stall: Stall | None = None  # that was told
        self._untold: dict[WorkerId, _Untold] = {}
        # Slow workers that could not be drained when they were found.
        self._kept: dict[WorkerId, StragglerFound] = {}
        self._drained_at: float | None = None
        self._drained_hosts: dict[str, float] = {}

    # --- what it is fed --------------------------------------------------------------------------------------------

    def on_vitals(self, worker: WorkerId, vitals: Vitals, now: float) -> None:
        """An agent has looked at a worker. See Board."""
        state = self._stepper.state
        if record_of(state, worker) is None:
            return  # it has ended meanwhile
        self._follow_round(state, now)
        self._hangs.take(worker, vitals, now, peer_is_ours=self._is_of_the_job(vitals.peer) if vitals.peer else False)
        self._standstills.take(worker, vitals, now)
        self._stragglers.take(worker, vitals)

    def _follow_round(self, state: State, now: float) -> None:
        if state.round_id != self._round_id:
            self._round_id = state.round_id
            ranks = {member: rank for rank, member in enumerate(state.members)}
            self._hangs.begin(state.round_id, ranks)
            self._standstills.begin(state.round_id, ranks)
            self._stragglers.begin(state.round_id, ranks, now)

    def forget(self, worker: WorkerId) -> None:
        """The worker has ended."""
        self._hangs.forget(worker)
        self._standstills.forget(worker)
        self._stragglers.forget(worker, self._clock())

    async def watch_over(self) -> None:
        """Reports who hangs, and tells who is suspected or slow. Runs until it is cancelled."""
        odd = False
        while not self._stepper.is_over:
            await asyncio.sleep(_LOOK_S)
            odd = not odd
            self._look(stragglers=odd)

    def may_not_end(self, worker: WorkerId) -> bool:
        """Whether a worker that is stopped by a signal is not ended for its silence: it alone has the state."""
        return self._hangs.is_stopped(worker) and bool(self._why_spared(worker, ()))

    # --- what is asked of it ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Of ``GET /v1/status``: who is suspected, the present limits, and whether the round goes on at all."""
        limit, proof, stall = self._hangs.limit, self._hangs.proof, self._stall
        return {
            "stalled": None
            if stall is None
            else {
                "since_s": round(self._clock() - stall.since, 3),
                "waits_for": [worker.key for worker in stall.waits_for],
            },
            "suspected": [
                {
                    "worker": worker.key,
                    "rank": rank,
                    "why": why,
                    "since_s": round(still_s, 3),
                    "limit_s": round(limit_s, 3),
                }
                for worker, rank, why, still_s, limit_s in self._suspects()
            ],
            "hang_limits": {
                "suspected_s": round(limit.seconds, 3),
                "suspected_why": limit.told,
                "ended_s": round(proof.seconds, 3),
                "ended_why": proof.told,
            },
        }

    @property
    def stall(self) -> str:
        """For how long no worker has stepped, and whom they wait for, in words; "" while they step."""
        stall = self._stall
        return "" if stall is None else wording.of_stall(self._clock() - stall.since, stall.waits_for)

    @property
    def suspected(self) -> int:
        """How many workers are suspected."""
        return len(self._suspects())

    def _suspects(self) -> list[tuple[WorkerId, int | None, str, float, float]]:
        return [*self._hangs.suspects(), *self._standstills.suspects(self._clock())]

    def remark(self) -> str:
        """Who may hang, in words; "" for nobody."""
        suspects = self._suspects()
        texts = [
            f"worker {worker}{'' if rank is None else f' (rank {rank})'} may hang: {why}"
            for worker, rank, why, _, _ in suspects[:_NAMED]
        ]
        more = len(suspects) - _NAMED
        return "; ".join([*texts, *([f"and {more} more"] if more > 0 else [])])

    # --- looks -----------------------------------------------------------------------------------------------------

    def _look(self, *, stragglers: bool) -> None:
        state, now = self._stepper.state, self._clock()
        self._look_for_stall(now)
        self._follow_round(state, now)
        is_running = state.phase is JobPhase.RUNNING and not finishing(state)
        for finding in self._hangs.look(
            now,
            trains=lambda worker: is_running and _trains(state, worker),
            lives=lambda worker: _lives(state, worker),
            spares=self._why_spared,
        ):
            match finding:
                case WorkerSuspected():
                    self._take_suspicion(finding)
                case StackWanted():
                    self._ask_soon(finding)
                case WorkerCleared() | WorkerHung() | Spared():
                    self._tell_after(finding)
        if not stragglers:
            self._look_for_standstills(state, now, is_running=is_running)
            return
        for news in self._stragglers.look(now, trains=lambda worker: is_running and _trains(state, worker)):
            self._chronicle.straggler(news)
            if not isinstance(news, StragglerFound):
                self._kept.pop(news.worker, None)
            elif self._drains:
                self._drain(news, now)
        for slow in list(self._kept.values()):
            if is_running and _trains(state, slow.worker):
                self._drain(slow, now)

    def note_step(self, commands: Collection[Command], now: float) -> None:
        """The core has made a step, whose commands are not told of yet: a round may be over with it.

        What it has stalled for is told before that.
        """
        doing = standing_of(self._stepper.state).doing
        trains = doing is Doing.TRAINING
        is_replaced = any(isinstance(command, PublishRound) for command in commands)
        if (is_replaced or not trains) and self._trains_since is not None:
            is_broken = is_replaced or doing in (Doing.FORMING, Doing.WAITING_FOR_SLOTS)
            stall = self._find_stall(now, is_broken=is_broken)
            if stall is not None:
                self._take_stall(stall, now)
            self._end_stall(now, resumed=False)
            self._trains_since = None
        if trains and self._trains_since is None:
            self._trains_since = now

    def _look_for_stall(self, now: float) -> None:
        if self._trains_since is None:
            return
        stall = self._find_stall(now)
        if stall is not None:
            self._take_stall(stall, now)
        else:
            self._end_stall(now, resumed=True)

    def _find_stall(self, now: float, *, is_broken: bool = False) -> Stall | None:
        silent = [one.hostname for one in self._stepper.state.silent]
        stall = self._hangs.stall(now, lost=silent, is_broken=is_broken)
        since = self._trains_since or 0.0
        return stall if stall is None or stall.since >= since else replace(stall, since=since)

    def _take_stall(self, stall: Stall, now: float) -> None:
        """Tells of a new one; of the one that is known it may be clearer by now whom the others wait for."""
        if self._stall is None:
            self._stall = stall
            self._chronicle.stalled(now - stall.since, stall.waits_for)
        elif stall.waits_for:
            self._stall = replace(self._stall, waits_for=stall.waits_for)

    def _end_stall(self, now: float, *, resumed: bool) -> None:
        stall, self._stall = self._stall, None
        if stall is not None:
            self._chronicle.stall_ended(now - stall.since, stall.waits_for, resumed=resumed)

    def _look_for_standstills(self, state: State, now: float, *, is_running: bool) -> None:
        known = {worker for worker, *_ in self._hangs.suspects()}
        for finding in self._standstills.look(
            now,
            step_of=lambda worker: _step_of(state, worker),
            trains=lambda worker: is_running and _stays(state, worker),
            unheard=self._unheard(UNHEARD_S),
            silent=[one.hostname for one in state.silent],
            is_known=known.__contains__,
        ):
            if isinstance(finding, WorkerSuspected):
                self._take_suspicion(finding)
            else:
                self._tell_after(finding)

    def _why_spared(self, worker: WorkerId, ended: Collection[WorkerId]) -> str:
        return why_spared(self._stepper.state, worker, ended, is_on_disc=self.is_on_disc)

    def _take_suspicion(self, suspected: WorkerSuspected) -> None:
        if (earlier := self._untold.get(suspected.worker)) is not None:
            self._tell_with_all_after(earlier, None)
        if suspected.kind in (Kind.STOPPED, Kind.TRACED, Kind.UNHEARD):  # it cannot tell where it is
            self._tell(suspected, None)
            return
        self._untold[suspected.worker] = _Untold(suspected)
        if suspected.ends_s is None:  # else the core asks by itself
            self._ask_soon(StackWanted(suspected.worker, 0))

    def _ask_soon(self, wanted: StackWanted) -> None:
        self._tasks.start(self._ask(wanted, self._untold.get(wanted.worker)))

    async def _ask(self, wanted: StackWanted, untold: _Untold | None) -> None:
        text: str | None = None
        try:
            async with asyncio.timeout(_STACK_S):
                text = await self.stacks(wanted.worker)
        except TimeoutError:
            pass
        except Exception:
            self._take_stack(wanted, untold, None)
            raise
        self._take_stack(wanted, untold, text)

    def _take_stack(self, wanted: StackWanted, untold: _Untold | None, text: str | None) -> None:
        if wanted.number:
            self._hangs.answer(wanted.worker, wanted.number, text)
        if untold is not None and self._untold.get(wanted.worker) is untold:
            self._tell_with_all_after(untold, text)

    def _tell_with_all_after(self, untold: _Untold, text: str | None) -> None:
        del self._untold[untold.suspected.worker]
        self._tell(untold.suspected, text)
        for finding in untold.after:
            self._tell_after(finding)

    def _tell_after(self, finding: WorkerCleared | WorkerHung | Spared) -> None:
        """Tells, and reports, what has become of a suspicion; not before that was told itself."""
        if finding.worker in self._untold:
            self._untold[finding.worker].after.append(finding)
        elif isinstance(finding, WorkerCleared):
            self._chronicle.worker_cleared(finding)
        elif isinstance(finding, Spared):
            self._chronicle.warning(f"worker {finding.worker} hangs ({finding.why}) and is not ended: {finding.reason}")
        else:
            self._stepper.report(finding)

    def _tell(self, suspected: WorkerSuspected, stack: str | None) -> None:
        text = stack or ""
        if name := debugger(text):
            why = f"{suspected.why}; it is in a debugger ({name})"
            suspected = replace(suspected, kind=Kind.TRACED, why=why, ends_s=None)
        if suspected.kind is Kind.TRACED:
            suspected = replace(suspected, spared="")
        self._chronicle.worker_suspected(replace(suspected, stack=text, frames=innermost(text)))

    # --- drains ----------------------------------------------------------------------------------------------------

    def _drain(self, slow: StragglerFound, now: float) -> None:
        """Has a slow worker leave, where the job can do without it; else tells once why not, and has it leave later."""
        worker, state = slow.worker, self._stepper.state
        # Where places have to go in multiples, one alone would leave the host's others without use.
        slot = worker.slot if state.policy.multiple == 1 else None
        why = ""
        if self._drained_at is not None and now - self._drained_at < DRAIN_PAUSE_S:
            why = f"another slow worker was drained {now - self._drained_at:.0f} s ago"
        elif now - self._drained_hosts.get(worker.hostname, float("-inf")) < HOST_PAUSE_S:
            why = f"a place of host {worker.hostname} was drained for that already"
        why = why or why_needed(state, worker.hostname, slot)
        if why:
            if worker not in self._kept:
                self._kept[worker] = slow
                self._chronicle.warning(f"worker {worker} is slow, and is not drained: {why}")
            return
        self._kept.pop(worker, None)
        self._drained_at = now
        # Hosts of always new names may come.
        self._drained_hosts = {host: at for host, at in self._drained_hosts.items() if now - at < HOST_PAUSE_S}
        self._drained_hosts[worker.hostname] = now
        self._stepper.post(
            DrainRequested(
                worker.hostname,
                slot,
                f"it is {1 / slow.against_others:.2f} times slower than the others (--straggler-action drain)",
            )
        )


def _trains(state: State, worker: WorkerId) -> bool:
    record = record_of(state, worker)
    return (
        record is not None
        and record.phase is WorkerPhase.MEMBER
        and record.running
        and record.leave_by is None
        and record.exit_by is None
    )


def _stays(state: State, worker: WorkerId) -> bool:
    """Whether it is a member that is not about to leave, whether it has said that it trains or cannot say so."""
    record = record_of(state, worker)
    is_member = record is not None and record.phase is WorkerPhase.MEMBER and record.killed is None
    return is_member and record is not None and record.leave_by is None and record.exit_by is None


def _step_of(state: State, worker: WorkerId) -> int | None:
    """How far a worker has said that it has come, in its present process; None where it has not."""
    record = record_of(state, worker)
    return record.commits if record is not None and record.running else None


def _lives(state: State, worker: WorkerId) -> bool:
    record = record_of(state, worker)
    return record is not None and record.phase is not WorkerPhase.LEAVING and record.killed is None
