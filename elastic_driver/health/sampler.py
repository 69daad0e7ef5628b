"""Samples of the job's condition over time, for curves.

Owns the sums over the workers and the means over the time between two samples. Each consumer of samples, at whatever
times, has its own sampler.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic_driver.figures import Figures
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

# A mean over less covers a few steps only, and observations come each second: the table's own rate is better.
_LEAST_S = 5.0
# How long a worker's activity between its last two observations counts as current.
_HOLDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """The condition of the job. Unknown values are None.

    Attributes:
        steps_per_s: steps of the training, since the last sample.
        waiting: the share of their time that the workers have waited in collectives since then, 0..1.
        cpu: processors that all workers together have kept busy since then.
        memory_bytes: memory of all workers.
        gpu: mean busy share of the GPUs, 0..1.
        gpu_memory_bytes: memory in use on all GPUs.
        workers: the number of living workers.
        figures: the training's reported figures, as they are now.
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
    """The rates of one worker, between the last two samples with a new observation of it."""

    last: Vitals
    cpu: float | None = None
    waiting: float | None = None


class Sampler:
    """Takes samples. Times ``now`` are the job's, seconds.

    Args:
        table: the latest observations of the workers.
        now: the present, where the first sample begins.
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
        """Take a sample.

        Args:
            now: the present.
            members: the members of the current round.
            workers: the number of living workers.
            figures, gpu, gpu_memory_bytes: as in Sampled.
        """
        rates: dict[WorkerId, _Rates] = {}
        memory: int | None = None
        for worker, vitals in self._table:
            memory = (memory or 0) + vitals.rss_bytes
            rates[worker] = _since(self._rates.get(worker), vitals, self._table.age_s(worker, now))
        self._rates = rates
        cpu = [rate.cpu for rate in rates.values() if rate.cpu is not None]
        waiting = [rate.waiting for rate in rates.values() if rate.waiting is not None]
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
        """Return the time with standstills of the driver, which the job's clock does not count: the workers went on."""
        return now + self._table.known_lost_s


def _since(before: _Rates | None, vitals: Vitals, age_s: float) -> _Rates:
    """Return a worker's rates since the last sample; the previous ones if it was not observed since."""
    if before is None or vitals.pid != before.last.pid:
        return _Rates(vitals)
    took_s = vitals.at_s - before.last.at_s
    if took_s <= 0:
        return before if age_s <= _HOLDS_S else _Rates(vitals)
    waiting: float | None = None
    if vitals.pulse_s is not None:  # otherwise it reports nothing itself
        waited_s = _waited_s(vitals) - _waited_s(before.last)
        waiting = min(1.0, max(0.0, waited_s / took_s))
    return _Rates(vitals, max(0.0, vitals.cpu_s - before.last.cpu_s) / took_s, waiting)


def _waited_s(vitals: Vitals) -> float:
    """Return the time waited, including the current wait: otherwise a long one would count all at once, at its end."""
    return vitals.waited_s + vitals.waits_s
