"""What a change of membership costs, on the loop of elastic_loop.py.

    python benchmarks/elastic.py [--runs 5] [--workers 4] [--scenarios start,kill,...] [--no-torchrun]
        [--hosts netns] [--worker ddp|fsdp|hsdp|torchrun|horovod] [--device cuda]

Hosts are localhost and 127.0.0.1, each with half of the workers, and 127.0.0.2 for standbys; with ``--hosts netns``
three network namespaces on a bridge, the driver in the first, the others reached over ssh. Then the second host has
nothing when it joins: its agent is started over ssh, and its first workers import everything (join says so).

- start: all hosts are there.
- kill: SIGKILL to the last rank; its host goes, the other half lives on.
- kill-standby: the same with ``--standby`` for half of the workers: the job keeps its size.
- freeze: SIGSTOP to the last rank, with a heartbeat timeout of 2 s. Its stall is what comes on top of that.
- grow, shrink: the second host comes, goes. It comes by itself (``elasticrun join``), as an agent that shares no
  process with the first: nothing is imported there yet.
- grow-slot: the second host comes to have a slot more: its agent is there, and its workers can be forked.
- grow-cold: as grow, without warmed processes (``--no-preload``).

Per scenario the median and the range over the runs of

- stall: the longest gap between two steps of a process that lived through the change, less a normal step (its median);
- join: from the edit of the hosts file (or the start of the command) to the first step at the new size;
- found: how much of that went by until discovery, which is asked each second, gave the new answer;
- lost: steps that were done twice because a survivor went back to a commit.

For kill, grow and grow-slot a table follows of what that time is made of, in milliseconds: the medians of when the last
of those concerned had come to a stage (since the change), and of what it took beyond the stages before it. In each run
these add up to the whole; medians of several runs need not, and the remainder is the difference. Times are those of the
event log and of the marks of elastic_loop.py, all on one clock. The stages:

- seen: the driver knows of the death from the worker's agent; or discovery has given the new host (it is asked each
  second; a host counts when its agent is there);
- started, booted: the joiners' processes run; they ask for their round (only where hosts come);
- told: the notice has come to the survivors;
- aborted: their collective has ended (a survivor comes to one after up to 50 ms of sleep); or left: they have found the
  notice at a commit;
- asked, formed, met again: what was not committed is undone, and the driver is asked for the next round; it is formed;
  all members know it;
- connected: the engines' connections stand;
- synced: the state is equal on all ranks;
- first step: all have done one, with its 50 ms of sleep.

With ``--worker ddp`` torch's DistributedDataParallel carries the gradients, in place, over the round's process group;
with ``fsdp`` and ``hsdp`` the model is sharded, over all ranks or over pairs of them.
With ``--worker torchrun`` the loop is a DDP script for torchrun (torchrun_loop.py), which elasticrun restarts:
elastic_restarts.py says what is measured then.
With ``--worker horovod`` it is a script for Horovod, with Horovod's own workers (horovod_loop.py), where that is
installed (scripts/install-horovod). The yardstick is horovodrun then: see elastic_horovod.py.

Otherwise the yardstick in the same run is torchrun on the same loop with a checkpoint each step: the gap in rank 0's
steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elastic_horovod import HOROVOD
from elastic_jobs import ElasticJob, Figures, Job, Namespaces, TorchrunJob, normal_step, stages, survivors_figures
from elastic_restarts import RESTARTS, torchrun_grow

HEARTBEAT_S = 2.0
# Steps before a change, and after it.
BEFORE, AFTER = 20, 15

Scenario = Callable[[Path, int, Namespaces | None], Figures]


def survivors(job: Job, size: int) -> set[int]:
    """Who has trained at this size."""
    return {line["pid"] for line in job.steps() if line["size"] == size}


def start(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with ElasticJob(folder, workers // 2, 2, nodes=nodes) as job:
        job.wait_for_steps(workers)
        first = max(min(line["time"] for line in job.steps() if line["rank"] == rank) for rank in range(workers))
        return Figures(join_s=first - job.began)


def kill(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 2, nodes=nodes) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        victim = job.pid_of(workers - 1)
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        job.wait_for_steps(half, steps=AFTER, since=at)
        figures = survivors_figures(job, at, survivors(job, half))
        figures.stages = stages(job, at, survivors(job, half), half, planned=False)
        return figures


def kill_standby(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 3, "--max-np", str(workers), "--standby", str(half), nodes=nodes) as job:
        job.wait_for("standbys", lambda: job.said().count(" stands by ") == half)
        job.wait_for_steps(workers, steps=BEFORE, since=time.time())
        before, victim = survivors(job, workers), job.pid_of(workers - 1)
        at = time.time()
        os.kill(victim, signal.SIGKILL)

        def steps_after() -> list[int]:
            later: dict[int, int] = {}
            for line in job.steps():
                if line["time"] > at and line["pid"] not in before:
                    later[line["pid"]] = later.get(line["pid"], 0) + 1
            return [count for count in later.values() if count >= AFTER]

        job.wait_for("the standbys' steps", lambda: len(steps_after()) == half)
        alive = {line["pid"] for line in job.steps() if line["time"] > at + 0.5} & before
        assert {line["size"] for line in job.steps()} == {workers}, "it shrank all the same"
        return survivors_figures(job, at, alive)


def freeze(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 2, "--heartbeat-timeout", str(HEARTBEAT_S), nodes=nodes) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        victim = job.pid_of(workers - 1)
        at = time.time()
        os.kill(victim, signal.SIGSTOP)
        job.wait_for_steps(half, steps=AFTER, since=at)
        figures = survivors_figures(job, at, survivors(job, half))
        figures.stall_s = (figures.stall_s or 0.0) - HEARTBEAT_S
        return figures


def grow(folder: Path, workers: int, nodes: Namespaces | None, *flags: str) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 1, *flags, nodes=nodes) as job:
        job.wait_for_steps(half, steps=BEFORE)
        if "--no-preload" not in flags:
            job.wait_for("a warmed process", lambda: '"warmed"' in (folder / "events.jsonl").read_text())
        at = time.time()
        if nodes is None:
            job.add_host()
        else:
            job.set_hosts(2)
        job.wait_for_steps(workers, steps=AFTER, since=at)
        return grown_figures(job, at, survivors(job, half), workers)


def grown_figures(job: ElasticJob, at: float, members: set[int], size: int) -> Figures:
    figures = survivors_figures(job, at, members, join_size=size)
    figures.stages = stages(job, at, members, size, planned=True)
    return figures


def grow_cold(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    return grow(folder, workers, nodes, "--no-preload")


def grow_slot(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 1, nodes=nodes) as job:
        job.set_hosts(2, last=half - 1)
        job.wait_for_steps(workers - 1, steps=BEFORE)
        hosts = 1 if nodes is None else 2
        job.wait_for("warmed processes", lambda: (folder / "events.jsonl").read_text().count('"warmed"') >= hosts)
        at = time.time()
        job.set_hosts(2)
        job.wait_for_steps(workers, steps=AFTER, since=at)
        return grown_figures(job, at, survivors(job, workers - 1), workers)


def shrink(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    half = workers // 2
    with ElasticJob(folder, half, 2, nodes=nodes) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        at = time.time()
        job.set_hosts(1)
        job.wait_for_steps(half, steps=AFTER, since=at)
        return survivors_figures(job, at, survivors(job, half), join_size=half)


def torchrun_start(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with TorchrunJob(folder, workers, nodes=nodes) as job:
        job.wait_for_steps(workers)
        return Figures(join_s=max(line["time"] for line in job.steps()[:workers]) - job.began)


def torchrun_kill(folder: Path, workers: int, nodes: Namespaces | None) -> Figures:
    with TorchrunJob(folder, workers, nodes=nodes) as job:
        job.wait_for_steps(workers, steps=BEFORE)
        old = {line["pid"] for line in job.steps()}
        step = normal_step(job.steps(), old, time.time())
        at = time.time()
        os.kill(job.pid_of(workers - 1), signal.SIGKILL)
        job.wait_for("going on", lambda: any(line["time"] > at and line["pid"] not in old for line in job.steps()))
        times = sorted(line["time"] for line in job.steps() if line["rank"] == 0)
        stall = max(b - a for a, b in itertools.pairwise(times) if b > at) - step
        return Figures(stall_s=stall, lost=0, step_s=step)


SCENARIOS: dict[str, tuple[Scenario, Scenario | None]] = {
    "start": (start, torchrun_start),
    "kill": (kill, torchrun_kill),
    "kill-standby": (kill_standby, None),
    "freeze": (freeze, None),
    "grow": (grow, torchrun_grow),
    "grow-cold": (grow_cold, None),
    "grow-slot": (grow_slot, None),
    "shrink": (shrink, None),
}


def spread(values: list[float | int | None], form: str) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    return f"{statistics.median(present):{form}} ({min(present):{form}}..{max(present):{form}})"


def measured(scenario: Scenario, workers: int, nodes: Namespaces | None) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return scenario(Path(folder), workers, nodes)


def print_requests(name: str, ours: Scenario, peer: Scenario | None, workers: int) -> None:
    """What workers ask the launcher: one more run of each, which counts that."""
    counts = []
    for scenario in filter(None, (ours, peer)):
        with tempfile.NamedTemporaryFile() as log:
            os.environ["REQUEST_LOG"] = log.name
            try:
                counts.append(measured(scenario, workers, None).requests or 0)
            finally:
                del os.environ["REQUEST_LOG"]
    print(f"  {name}: {counts[0]} requests, {counts[-1]} under horovodrun", flush=True)


def print_stages(scenario: str, runs: list[dict[str, float]]) -> None:
    """What a change is made of, stage by stage; nothing where no run tells."""
    if not runs:
        return
    names = [name for name in max(runs, key=len) if all(name in run for run in runs)]
    taken: dict[str, list[float]] = {name: [] for name in names}
    for run in runs:
        reached = 0.0
        for name in names:
            # One that was there before those of an earlier stage has cost nothing.
            taken[name].append(max(0.0, run[name] - reached))
            reached = max(reached, run[name])
    print(f"  {scenario + ', ms':14} {'since the change':>18} {'takes':>8}")
    for name in names:
        since = statistics.median(run[name] for run in runs) * 1e3
        print(f"  {name:14} {since:18.1f} {statistics.median(taken[name]) * 1e3:8.1f}")
    total = statistics.median(run[names[-1]] for run in runs) * 1e3
    parts = sum(statistics.median(each) for each in taken.values()) * 1e3
    print(f"  {'total':14} {total:18.1f} {parts:8.1f}   remainder {total - parts:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each scenario (default 5)")
    parser.add_argument("--workers", default="4", help="comma list of even numbers (default 4)")
    parser.add_argument("--scenarios", default="", help="comma list (default all)")
    parser.add_argument("--hosts", choices=("one", "netns"), default="one", help="one machine, or network namespaces")
    parser.add_argument("--no-torchrun", action="store_true", help="leave the yardstick out, whichever it is")
    parser.add_argument(
        "--worker",
        choices=("ours", "ddp", "fsdp", "hsdp", "torchrun", "horovod"),
        default="ours",
        help="which loop (default ours)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what trains (default cpu)")
    options = parser.parse_args()
    os.environ["BENCH_DEVICE"] = options.device
    if options.device == "cuda":  # ranks that share a GPU
        os.environ |= {"SHARE_GPU": "1", "ELASTIC_DRIVER_DEVICE_LANE": "cuda"}
    if options.worker in ("torchrun", "horovod") and options.hosts == "netns":
        parser.error(f"--worker {options.worker}: on one machine only")
    os.environ["BENCH_WORKER"] = options.worker  # elastic_loop.py's
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Namespaces(3, sshd=True)) if options.hosts == "netns" else None
        run_all(options, nodes)


def run_all(options: argparse.Namespace, nodes: Namespaces | None) -> None:
    for workers in (int(text) for text in options.workers.split(",")):
        print(f"{workers} workers:", flush=True)
        print(
            f"{'scenario':16} {'stall, s':26} {'join, s':26} {'found, s':20} {'lost, steps':14} normal step, s",
            flush=True,
        )
        scenarios = {"torchrun": RESTARTS, "horovod": HOROVOD}.get(options.worker, SCENARIOS)
        yardstick = "horovodrun" if options.worker == "horovod" else "torchrun"
        for name in options.scenarios.split(",") if options.scenarios else scenarios:
            ours, peer = scenarios[name]
            figures: list[Figures] = []
            peers: list[Figures] = []
            for _ in range(options.runs):
                figures.append(measured(ours, workers, nodes))
                if peer is not None and not options.no_torchrun:
                    peers.append(measured(peer, workers, nodes))
            for label, group in ((name, figures), (f"  {yardstick} {name}", peers)):
                if group:
                    print(
                        f"{label:16} {spread([f.stall_s for f in group], '.3f'):26} "
                        f"{spread([f.join_s for f in group], '.2f'):26} {spread([f.found_s for f in group], '.2f'):20} "
                        f"{spread([f.lost for f in group], '.0f'):14} "
                        f"{spread([f.step_s for f in group], '.3f')}",
                        flush=True,
                    )
            print_stages(name, [each.stages for each in figures if each.stages])
            if peers:
                field = "join_s" if name == "start" else "stall_s"
                mine = statistics.median(getattr(f, field) for f in figures)
                theirs = statistics.median(getattr(f, field) for f in peers)
                print(f"  {name}: {theirs / max(mine, 1e-3):.1f}x less than {yardstick}", flush=True)
                if options.worker == "horovod":
                    print_requests(name, ours, peer, workers)


if __name__ == "__main__":
    main()
