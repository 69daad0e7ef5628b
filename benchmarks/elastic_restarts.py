"""The scenarios of benchmarks/elastic.py for scripts of torchrun: elasticrun restarts them, and so does torchrun.

- stall: the gap in the steps of rank 0, whichever process that is, less a normal step.
- join: from the change until all ranks have done their first step in new processes.

A host of torchrun's is an agent of its own, and leaves as by SIGTERM to that. When a worker is killed, the job keeps
its size under both: elasticrun has a spare host, torchrun starts the worker again.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from elastic_jobs import ElasticJob, ElasticNodes, Figures, Job, Namespaces, TorchrunJob, TorchrunNodes, normal_step

BEFORE, AFTER = 20, 10
Scenario = Callable[[Path, int, Namespaces | None], Figures]


def elastic_job(folder: Path, workers: int, hosts: int) -> ElasticJob:
    """elasticrun on the script, on hosts with half of the workers each."""
    flags = ("--on-change", "restart", "--max-np", str(workers))
    return ElasticJob(folder, workers // 2, hosts, *flags, loop="torchrun_loop.py")


def wait_warm(job: ElasticJob | ElasticNodes, size: int) -> None:
    """Waits until workers can be forked, and then for steps that no import disturbs."""
    job.wait_for_steps(size)
    job.wait_for("a warmed process", lambda: '"warmed"' in job.events_file.read_text())
    job.wait_for_steps(size, steps=BEFORE, since=time.time())


def restarted(job: Job, at: float, old: set[int], size: int) -> Figures:
    """Waits until new processes train at this size; what the change at this time cost."""

    def firsts() -> dict[int, float]:
        found: dict[int, float] = {}
        for line in job.steps():
            if line["size"] == size and line["pid"] not in old and line["time"] > at:
                found.setdefault(line["rank"], line["time"])
        return found

    job.wait_for(f"new processes at size {size}", lambda: len(firsts()) == size)
    job.wait_for_steps(size, steps=AFTER, since=max(firsts().values()))
    step = normal_step(job.steps(), old, at)
    mine = [line for line in job.steps() if line["rank"] == 0]
    times = sorted(line["time"] for line in mine)
    stall = max(b - a for a, b in itertools.pairwise(times) if b > at) - step
    lost = len(mine) - len({line["step"] for line in mine})
    figures = Figures(stall, max(firsts().values()) - at, None, lost, step)
    if isinstance(job, ElasticJob | ElasticNodes):
        figures.stages = stages(job, at, old, max(firsts().values()))
    return figures


def stages(job: ElasticJob | ElasticNodes, at: float, old: set[int], last: float) -> dict[str, float]:
    """What a restart is made of, see Figures."""
    events = job.events("hosts_discovered", "worker_dying", "worker_exited", "worker_started", since=at)
    found = {
        "seen": min(event["time"] for event in events),
        "ended": max((event["time"] for event in events if event["event"] == "worker_exited"), default=at),
        "started": max(event["time"] for event in events if event["event"] == "worker_started"),
    }
    for mark in ("imported", "met", "wrapped"):
        found[mark] = max(moment for pid, moment in job.marks(mark, since=at).items() if pid not in old)
    return {name: moment - at for name, moment in {**found, "first step": last}.items()}


def pids(job: Job) -> set[int]:
    return {line["pid"] for line in job.steps()}


def started(job: Job, workers: int) -> Figures:
    job.wait_for_steps(workers)
    first = max(min(line["time"] for line in job.steps() if line["rank"] == rank) for rank in range(workers))
    return Figures(join_s=first - job.began)


def killed(job: Job, workers: int) -> Figures:
    old, at = pids(job), time.time()
    os.kill(job.pid_of(workers - 1), signal.SIGKILL)
    return restarted(job, at, old, workers)


def start(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with elastic_job(folder, workers, 2) as job:
        return started(job, workers)


def kill(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with elastic_job(folder, workers, 3) as job:
        wait_warm(job, workers)
        return killed(job, workers)


def changed(folder: Path, workers: int, *, before: int, after: int) -> Figures:
    with elastic_job(folder, workers, before) as job:
        wait_warm(job, before * workers // 2)
        old, at = pids(job), time.time()
        job.set_hosts(after)
        figures = restarted(job, at, old, after * workers // 2)
        figures.found_s = job.found_at(at) - at
        return figures


def grow(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with ElasticNodes(folder, workers // 2, 1) as job:
        wait_warm(job, workers // 2)
        old, at = pids(job), time.time()
        job.add_host()
        figures = restarted(job, at, old, workers)
        figures.found_s = job.found_at(at) - at
        return figures


def shrink(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    return changed(folder, workers, before=2, after=1)


def torchrun_start(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with TorchrunJob(folder, workers) as job:
        return started(job, workers)


def torchrun_kill(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with TorchrunJob(folder, workers) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        return killed(job, workers)


def torchrun_grow(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    """Two agents on this machine, wherever the others' hosts are."""
    with TorchrunNodes(folder, workers // 2, 1) as job:
        job.wait_for_steps(workers // 2, steps=BEFORE)
        old, at = pids(job), time.time()
        job.add_host()
        return restarted(job, at, old, workers)


def torchrun_shrink(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with TorchrunNodes(folder, workers // 2, 2) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        old, at = pids(job), time.time()
        job.remove_host()
        return restarted(job, at, old, workers // 2)


RESTARTS: dict[str, tuple[Scenario, Scenario | None]] = {
    "start": (start, torchrun_start),
    "kill": (kill, torchrun_kill),
    "grow": (grow, torchrun_grow),
    "shrink": (shrink, torchrun_shrink),
}
