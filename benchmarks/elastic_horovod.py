"""The scenarios of benchmarks/elastic.py for Horovod's own workers: under elasticrun, and under horovodrun.

Stall, join and lost are those of our own workers' scenarios. Under both, hosts are asked for each second.

- requests: what all workers asked the launcher from the change (or the start) until the first step of all at the new
  size. Counted in runs of their own, in which nothing else is measured: horovod_loop.py says why.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_jobs import ElasticJob, Figures, Job, Namespaces, survivors_figures

BEFORE, AFTER = 20, 15
Scenario = Callable[[Path, int, Namespaces | None], Figures]


class HorovodJob(ElasticJob):
    """The loop under elasticrun.

    Args:
        folder: for its files.
        slots: of each host.
        hosts: how many of them there are at the start.
    """

    def __init__(self, folder: Path, slots: int, hosts: int) -> None:
        super().__init__(folder, slots, hosts, loop="horovod_loop.py")


class HorovodrunJob(ElasticJob):
    """The loop under horovodrun. Arguments as above."""

    def __init__(self, folder: Path, slots: int, hosts: int) -> None:
        super().__init__(folder, slots, hosts, loop="horovod_loop.py")

    def launcher(self) -> list[str]:
        # Without an interface it waits for a second host.
        return [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interface", "lo"]

    def found_at(self, since: float) -> float:
        return since  # it does not say


Kind = type[HorovodJob] | type[HorovodrunJob]


def first_steps(job: Job, size: int, since: float) -> float:
    """When the last rank had done its first step at this size since then."""
    found: dict[int, float] = {}
    for line in job.steps():
        if line["size"] == size and line["time"] > since:
            found.setdefault(line["rank"], line["time"])
    return max(found.values())


def finished(job: ElasticJob, at: float, size: int, figures: Figures) -> Figures:
    """With the requests, where they are counted."""
    if "REQUEST_LOG" in os.environ:
        end = first_steps(job, size, at)
        lines = Path(os.environ["REQUEST_LOG"]).read_text().splitlines()
        return Figures(requests=sum(at < json.loads(line)["time"] <= end for line in lines))
    return figures


def start(kind: Kind, folder: Path, workers: int) -> Figures:
    with kind(folder, workers // 2, 2) as job:
        job.wait_for_steps(workers)
        return finished(job, job.began, workers, Figures(join_s=first_steps(job, workers, 0.0) - job.began))


def kill(kind: Kind, folder: Path, workers: int) -> Figures:
    half = workers // 2
    with kind(folder, half, 2) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        at = time.time()
        os.kill(job.pid_of(workers - 1), signal.SIGKILL)
        job.wait_for_steps(half, steps=AFTER, since=at)
        pids = {line["pid"] for line in job.steps() if line["size"] == half and line["time"] > at}
        return finished(job, at, half, survivors_figures(job, at, pids))


def change(kind: Kind, folder: Path, workers: int, *, before: int, after: int) -> Figures:
    half = workers // 2
    with kind(folder, half, before) as job:
        job.wait_for_steps(half * before, steps=BEFORE)
        old = {line["pid"] for line in job.steps()}
        at = time.time()
        job.set_hosts(after)
        job.wait_for_steps(half * after, steps=AFTER, since=at)
        pids = old & {line["pid"] for line in job.steps() if line["size"] == half * after and line["time"] > at}
        figures = survivors_figures(job, at, pids, join_size=half * after)
        if kind is HorovodrunJob:
            figures.found_s = None
        return finished(job, at, half * after, figures)


grow, shrink = partial(change, before=1, after=2), partial(change, before=2, after=1)


def _under(kind: Kind, scenario: Callable[..., Figures]) -> Scenario:
    return lambda folder, workers, nodes: scenario(kind, folder, workers)


HOROVOD: dict[str, tuple[Scenario, Scenario | None]] = {
    name: (_under(HorovodJob, scenario), _under(HorovodrunJob, scenario))
    for name, scenario in (("start", start), ("kill", kill), ("grow", grow), ("shrink", shrink))
}
