"""Monitoring of the workers: feeds the health core, and acts on its findings.

Owns the requests for stacks, and the wording of the status. Decides nothing: :mod:`elastic_driver.health` decides which
workers hang, are slow or are drained; the core decides the consequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from elastic_driver.core.events import DrainRequested, WorkerHung
from elastic_driver.driver.stepper import Stepper
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
from elastic_driver.health.findings import NotDrained, Spared, StackWanted
from elastic_driver.health.standstills import UNHEARD_S
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.health.watch import Finding, HealthWatch, Rules
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting import wording
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals

# An agent's answer may take a while; after this a suspicion is reported without it.
_STACK_S = 6.0
# Fire a little later than due: clocks are not compared for equality.
_LATE_S = 0.005
_NAMED = 2

Stacks = Callable[[WorkerId], Awaitable[str | None]]


async def no_stacks(worker: WorkerId) -> str | None:
    """Return no stack, for a driver that cannot take any."""
    return None


class Health:
    """Watches the workers of one job. Used on the event loop only.

    Args:
        stepper: has the state, and takes hung workers and drains.
        rules: the user's settings.
        chronicle: reports findings.
        clock: the job's time, seconds.
        tasks: runs the requests for stacks.
        stacks: takes a worker's Python stacks; None if they cannot be taken.
        is_of_the_job: whether an address is one of the job's hosts.
        unheard: returns, by name, how long hosts have been silent whose machines respond, if at least this long.
        works_for_s: how long a host has been heard without a gap; infinite if unknown.
        lost_s: for how long the clock has stood still so far.

    Attributes:
        table: the last observations of the workers.
        watch: the health core's state.
    """

    def __init__(
        self,
        stepper: Stepper,
        rules: Rules,
        *,
        chronicle: Chronicle,
        clock: Callable[[], float],
        tasks: Tasks,
        stacks: Stacks = no_stacks,
        is_of_the_job: Callable[[str], bool] = lambda address: False,
        unheard: Callable[[float], Mapping[str, float]] = lambda least_s: {},
        works_for_s: Callable[[str], float] = lambda hostname: float("inf"),
        lost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._tasks = tasks
        self.stacks = stacks
        self._is_of_the_job = is_of_the_job
        self._unheard = unheard
        self._works_for_s = works_for_s
        self._lost_s = lost_s
        self.table = VitalsTable()
        self.watch = HealthWatch(rules, stepper.state, clock())

    # --- events in -------------------------------------------------------------------------------------------------

    def note_step(self, now: float) -> None:
        """Feed a step of the core, before its commands are reported."""
        self._step(JobChanged(self._stepper.state), now)

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        """Feed an agent's observation of a worker."""
        now = self._clock()
        if self.table.take(worker, vitals, now, lost_s=self._lost_s()):
            peer_is_ours = bool(vitals.peer) and self._is_of_the_job(vitals.peer)
            self._step(VitalsSeen(worker, vitals, peer_is_ours), now)

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, leaving: bool = False) -> None:
        """Feed a sign of life of a worker, a WorkerHeard."""
        self._step(WorkerHeard(worker, progress, waiting, leaving), self._clock())

    def gone(self, worker: WorkerId) -> None:
        """Feed the end of a worker's process."""
        self.table.forget(worker)
        self._step(WorkerGone(worker), self._clock())

    def commit_found(self) -> None:
        """Feed that there is a commit on disk from which the job can resume."""
        self._step(CommitFound(), self._clock())

    async def watch_over(self) -> None:
        """Check the workers whenever that is due. Runs until the job is over, or it is canceled."""
        while True:
            await asyncio.sleep(max(0.0, self.watch.next_deadline - self._clock()) + _LATE_S)
            if self._stepper.is_over:
                return
            self.look()

    def look(self) -> None:
        """Check the workers now."""
        now = self._clock()
        audible_s = {hostname: self._works_for_s(hostname) for hostname in self.watch.overdue_hosts(now)}
        self._step(TimePassed(self._unheard(UNHEARD_S), audible_s), now)

    # --- findings out ----------------------------------------------------------------------------------------------

    def _step(self, event: Event, now: float) -> None:
        self._carry_out(self.watch.step(event, now))

    def _carry_out(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            match finding:
                case StackWanted():
                    self._tasks.start(self._ask(finding))
                case WorkerHung():
                    self._stepper.report(finding)
                case DrainRequested():
                    self._stepper.post(finding)
                case Spared():
                    self._chronicle.warning(wording.of_spared(finding))
                case NotDrained():
                    self._chronicle.warning(wording.of_not_drained(finding))
                case _:
                    self._chronicle.found(finding)

    async def _ask(self, wanted: StackWanted) -> None:
        text: str | None = None
        try:
            async with asyncio.timeout(_STACK_S):
                text = await self.stacks(wanted.worker)
        except TimeoutError:
            pass
        except Exception:
            self._take_stack(wanted, None)
            raise
        self._take_stack(wanted, text)

    def _take_stack(self, wanted: StackWanted, text: str | None) -> None:
        self._step(StackTaken(wanted.worker, wanted.number, text), self._clock())

    # --- queries ---------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the part of ``GET /v1/status`` on suspects, current limits, and stalls of the round."""
        watch, now = self.watch, self._clock()
        limit, proof, stall = watch.limit, watch.proof, watch.stall
        return {
            "stalled": None
            if stall is None
            else {"since_s": round(now - stall.since, 3), "waits_for": [worker.key for worker in stall.waits_for]},
            "suspected": [
                {
                    "worker": worker.key,
                    "rank": rank,
                    "why": why,
                    "since_s": round(still_s, 3),
                    "limit_s": round(limit_s, 3),
                }
                for worker, rank, why, still_s, limit_s in watch.suspects(now)
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
        """How long no worker has made progress, and which workers the others wait for, in words; "" without a stall."""
        stall = self.watch.stall
        return "" if stall is None else wording.of_stall(self._clock() - stall.since, stall.waits_for)

    @property
    def suspected(self) -> int:
        """The number of suspected workers."""
        return len(self.watch.suspects(self._clock()))

    def remark(self) -> str:
        """Describe which workers may hang; "" for none."""
        suspects = self.watch.suspects(self._clock())
        texts = [
            f"worker {worker}{'' if rank is None else f' (rank {rank})'} may hang: {why}"
            for worker, rank, why, _, _ in suspects[:_NAMED]
        ]
        more = len(suspects) - _NAMED
        return "; ".join([*texts, *([f"and {more} more"] if more > 0 else [])])
