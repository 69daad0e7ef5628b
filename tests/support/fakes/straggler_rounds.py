"""Rounds of a synchronous training, simulated: what is said of their slow ranks. For tests and benchmarks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

from elastic_driver.health.findings import StragglerFound, StragglerGone
from elastic_driver.health.stragglers import StragglerWatch
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import OWN_CAP, OWN_STEPS, Vitals

Draw = Callable[[random.Random], float]


def jitter(draws: random.Random) -> float:
    """All between four fifths and six fifths are as likely."""
    return draws.uniform(0.8, 1.2)


def heavy(draws: random.Random) -> float:
    """One step of 1,000 takes 5 times as long."""
    return draws.uniform(0.8, 1.2) * (5.0 if draws.random() < 0.001 else 1.0)


def taken(own: deque[float]) -> float | None:
    """As an agent takes it from a worker's page."""
    if len(own) < OWN_STEPS:
        return None
    cap_s = OWN_CAP * median_low(own)
    return sum(min(each_s, cap_s) for each_s in own) / OWN_STEPS


@dataclass
class Reported:
    """What was said, at which second and in which step."""

    at_s: float
    step: int
    news: StragglerFound | StragglerGone


def simulate(
    size: int,
    steps: int,
    step_s: float,
    draw: Draw,
    *,
    slow: dict[int, tuple[int, int, float]] | None = None,
    seed: int = 1,
    look_s: float = 1.0,
) -> tuple[list[Reported], dict[int, float]]:
    """Ranks that begin each step together; each looked at once a second, at its own moment of it.

    Args:
        slow: of a rank, from which step to which it is so many times slower.

    Returns:
        What is told, and when each step began.
    """
    draws = random.Random(seed)
    workers = [WorkerId(f"h{rank}", 0, 0) for rank in range(size)]
    watch = StragglerWatch()
    watch.begin(1, {worker: rank for rank, worker in enumerate(workers)}, 0.0)
    waited = [0.0] * size
    last = [deque[float](maxlen=OWN_STEPS) for _ in range(size)]
    due = [look_s * draws.random() for _ in range(size)]
    now, judged, told, began = 0.0, 0.0, [], {}
    for step in range(steps):
        began[step] = now
        own = [step_s * draw(draws) for _ in range(size)]
        for rank, (first, until, factor) in (slow or {}).items():
            if first <= step < until:
                own[rank] *= factor
        end = now + max(own)
        for rank in range(size):
            while due[rank] < end:
                into = due[rank] - now
                look = Vitals(
                    due[rank] + 100 * rank,
                    pid=1,
                    pulse_s=0.1,
                    round_id=1,
                    rank=rank,
                    steps=step,
                    waited_s=waited[rank],
                    waits_s=max(0.0, into - own[rank]),
                    own_s=taken(last[rank]),
                )
                watch.take(workers[rank], look)
                watch.take(workers[rank], look)
                due[rank] += look_s
            waited[rank] += end - now - own[rank]
            last[rank].append(own[rank])
        now = end
        if now - judged >= look_s:
            judged = now
            told += [Reported(now, step, news) for news in watch.look(now)]
    return told, began
