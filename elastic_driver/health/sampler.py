"""How the job does, as one sample after another: what curves over time are made of.

Owns the sums over the workers and the means over the time between two samples. Each of those who want samples, at
whatever times, has a sampler of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic_driver.figures import Figures
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

# A mean over less is one of a few steps only, and looks at workers come each second: the table's own rate is better.
_LEAST_S = 5.0
# What a worker did between its last two looks holds for so long.
_HOLDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """How the job does. What is not known is None.

    Attributes:
        steps_per_s: of the training, since the last sample.
        waiting: which share of their time the workers have waited in collectives since then, 0..1.
        cpu: processors that all workers together have kept busy since then.
        memory_bytes: of all workers.
        gpu: mean busy share of the GPUs, 0..1.
        gpu_memory_bytes: in use, of all GPUs.
        workers: how many live.
        figures: that the training has reported of itself, as they are now.
    """

    steps_per_s: float | None = None
    waiting: float | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    gpu: float | None = None
    gpu_memory_bytes: int | None = None
    workers: int = 0
    figures: Figures = field(default_factory=dict)


@dataclass(slots=True)
class _Rates:
    """Of one worker, between the last two samples for which it was looked at anew."""

    last: Vitals
    cpu: float | None = None
    waiting: float | None = None


class Sampler:
    """Takes samples. Times ``now`` are the job's, seconds.

    Args:
        table: the last looks at the workers.
        now: the present, from which on the first sample is.
    """

    def __init__(self, table: VitalsTable, now: float) -> None:
        self._table = table
        self._rates: dict[WorkerId, _Rates] = {}
        self._last = self._passed_s(now), table.steps

    def take(
        self,
        now: float,
        members: Collection[WorkerId],
        *,
        workers: int,
        figures: Figures | None = None,
        gpu: float | None = None,
        gpu_memory_bytes: int | None = None,
    ) -> Sampled:
        """The sample of now.

        Args:
            now: the present.
            members: of the present round.
            workers: how many live.
            figures, gpu, gpu_memory_bytes: see Sampled.
        """
        rates: dict[WorkerId, _Rates] = {}
        memory: int | None = None
        for worker, vitals in self._table:
            memory = (memory or 0) + vitals.rss_bytes
            rates[worker] = _since(self._rates.get(worker), vitals, self._table.age_s(worker, now))
        self._rates = rates
        cpu = [each.cpu for each in rates.values() if each.cpu is not None]
        waiting = [each.waiting for each in rates.values() if each.waiting is not None]
        return Sampled(
            steps_per_s=self._steps_per_s(now, members),
            waiting=sum(waiting) / len(waiting) if waiting else None,
            cpu=sum(cpu) if cpu else None,
            memory_bytes=memory,
            gpu=gpu,
            gpu_memory_bytes=gpu_memory_bytes,
            workers=workers,
            figures={} if figures is None else dict(figures),
        )

    def _steps_per_s(self, now: float, members: Collection[WorkerId]) -> float | None:
        steps, passed_s = self._table.steps, self._passed_s(now)
        (since, before), self._last = self._last, (passed_s, steps)
        if not steps:
            return None
        if passed_s - since < _LEAST_S:
            return self._table.steps_per_s(now, members)
        return max(0, steps - before) / (passed_s - since)

    def _passed_s(self, now: float) -> float:
        """With what the job's clock did not count, as the driver stood still: the workers went on then."""
        return now + self._table.known_lost_s


def _since(before: _Rates | None, vitals: Vitals, age_s: float) -> _Rates:
    """What a worker did since the last sample, or did then, where it was not looked at since."""
    if before is None or vitals.pid != before.last.pid:
        return _Rates(vitals)
    took_s = vitals.at_s - before.last.at_s
    if took_s <= 0:
        return before if age_s <= _HOLDS_S else _Rates(vitals)
    waiting: float | None = None
    if vitals.pulse_s is not None:  # else it says nothing of itself
        waited_s = _waited_s(vitals) - _waited_s(before.last)
        waiting = min(1.0, max(0.0, waited_s / took_s))
    return _Rates(vitals, max(0.0, vitals.cpu_s - before.last.cpu_s) / took_s, waiting)


def _waited_s(vitals: Vitals) -> float:
    """With the present wait: else a long one would come all at once, at its end."""
    return vitals.waited_s + vitals.waits_s
