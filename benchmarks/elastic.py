"""What a change of membership costs: start, kill, grow, shrink, on the loop of elastic_loop.py.

    python benchmarks/elastic.py [--runs 5] [--scenarios start,kill,grow,shrink] [--no-torchrun]

Hosts are localhost:2 and 127.0.0.1:2, so 4 workers at most. Per scenario the median and the range over the runs of

- stall: the longest gap between two steps of a process that lived through the change, less a normal step (its median);
- join: from the edit of the hosts file (or the start of the command) to the first step at the new size;
- lost: steps that were done twice because a survivor went back to a commit.

The yardstick in the same run is torchrun on the same loop with a checkpoint each step: the gap in rank 0's steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BOTH = "localhost:2\n127.0.0.1:2\n"
ONE = "localhost:2\n"
PATIENCE_S = 120.0


@dataclass
class Figures:
    """One run: seconds, and a count of steps. None where the scenario has no such figure."""

    stall_s: float | None = None
    join_s: float | None = None
    lost: int | None = None
    step_s: float | None = None


class Job:
    """A running command and the step lines its workers write."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.steps_file = folder / "steps.jsonl"
        self.steps_file.touch()
        self.output = (folder / "output.txt").open("wb")
        self.began = time.time()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **env, "STEP_LOG": str(self.steps_file), "PYTHONPATH": str(ROOT)},
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def steps(self) -> list[dict[str, Any]]:
        lines = self.steps_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, what: str, found: Callable[[list[dict[str, Any]]], Any]) -> Any:
        end = time.time() + PATIENCE_S
        while time.time() < end:
            answer = found(self.steps())
            if answer:
                return answer
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.output.flush()
        tail = Path(self.output.name).read_text(errors="replace")[-3000:]
        raise SystemExit(f"{what}: did not happen (exit code {self.process.poll()}); output:\n{tail}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()


def elastic_job(folder: Path, hosts: str) -> tuple[Job, Path]:
    hosts_file = folder / "hosts.txt"
    write_hosts(hosts_file, hosts)
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts_file}\n")
    script.chmod(0o755)
    command = [sys.executable, "-m", "elastic_driver", "-np", "2", "--min-np", "2"]
    command += ["--host-discovery-script", str(script), "--event-log", str(folder / "events.jsonl")]
    return Job([*command, sys.executable, str(HERE / "elastic_loop.py")], folder, {}), hosts_file


def write_hosts(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def at_size(size: int, *, ranks: int, steps: int = 1, since: float = 0.0) -> Callable[[list[dict[str, Any]]], Any]:
    """Whether ``ranks`` ranks have done that many steps at this size since then."""

    def found(lines: list[dict[str, Any]]) -> bool:
        counts: dict[int, int] = {}
        for line in lines:
            if line["size"] == size and line["time"] > since:
                counts[line["rank"]] = counts.get(line["rank"], 0) + 1
        return len(counts) >= ranks and min(counts.values()) >= steps

    return found


def gaps(lines: list[dict[str, Any]], pid: int, since: float, until: float) -> list[float]:
    times = sorted(line["time"] for line in lines if line["pid"] == pid)
    return [b - a for a, b in itertools.pairwise(times) if b > since and a < until]


def normal_step(lines: list[dict[str, Any]], pids: set[int], before: float) -> float:
    times = [sorted(line["time"] for line in lines if line["pid"] == pid and line["time"] < before) for pid in pids]
    every = [b - a for one in times for a, b in itertools.pairwise(one)][-200:]
    return statistics.median(every)


def survivors_figures(job: Job, at: float, pids: set[int], join_size: int | None) -> Figures:
    lines = job.steps()
    step = normal_step(lines, pids, at)
    stall = max(max(gaps(lines, pid, at, at + 60)) for pid in pids) - step
    lost = 0
    for pid in pids:
        steps = [line["step"] for line in lines if line["pid"] == pid]
        lost = max(lost, len(steps) - len(set(steps)))
    join = None
    if join_size is not None:
        join = min(line["time"] for line in lines if line["size"] == join_size and line["time"] > at) - at
    return Figures(stall, join, lost, step)


def start(folder: Path) -> Figures:
    job, _ = elastic_job(folder, BOTH)
    try:
        job.wait_for("start", at_size(4, ranks=4))
        first = max(min(line["time"] for line in job.steps() if line["rank"] == rank) for rank in range(4))
        return Figures(join_s=first - job.began)
    finally:
        job.stop()


def kill(folder: Path) -> Figures:
    job, _ = elastic_job(folder, BOTH)
    try:
        job.wait_for("start", at_size(4, ranks=4, steps=20))
        victim = next(line["pid"] for line in reversed(job.steps()) if line["rank"] == 3)
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        job.wait_for("going on after the kill", at_size(2, ranks=2, steps=15, since=at))
        return survivors_figures(job, at, {x["pid"] for x in job.steps() if x["size"] == 2}, None)
    finally:
        job.stop()


def grow(folder: Path) -> Figures:
    job, hosts_file = elastic_job(folder, ONE)
    try:
        job.wait_for("start", at_size(2, ranks=2, steps=20))
        at = time.time()
        write_hosts(hosts_file, BOTH)
        job.wait_for("growing", at_size(4, ranks=4, steps=15, since=at))
        return survivors_figures(job, at, {x["pid"] for x in job.steps() if x["size"] == 2}, 4)
    finally:
        job.stop()


def shrink(folder: Path) -> Figures:
    job, hosts_file = elastic_job(folder, BOTH)
    try:
        job.wait_for("start", at_size(4, ranks=4, steps=20))
        at = time.time()
        write_hosts(hosts_file, ONE)
        job.wait_for("shrinking", at_size(2, ranks=2, steps=15, since=at))
        return survivors_figures(job, at, {x["pid"] for x in job.steps() if x["size"] == 2}, 2)
    finally:
        job.stop()


def torchrun_job(folder: Path) -> Job:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=9"]
    # Without this a job of four does not come back from a failure at all: the restarted workers meet the old keys.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job([*command, str(HERE / "torchrun_loop.py")], folder, env)


def torchrun_start(folder: Path) -> Figures:
    job = torchrun_job(folder)
    try:
        job.wait_for("torchrun's start", at_size(4, ranks=4))
        return Figures(join_s=max(line["time"] for line in job.steps()[:4]) - job.began)
    finally:
        job.stop()


def torchrun_kill(folder: Path) -> Figures:
    job = torchrun_job(folder)
    try:
        job.wait_for("torchrun's start", at_size(4, ranks=4, steps=20))
        lines = job.steps()
        victim = next(line["pid"] for line in reversed(lines) if line["rank"] == 3)
        step = normal_step(lines, {line["pid"] for line in lines}, time.time())
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        job.wait_for(
            "torchrun going on",
            lambda all_lines: any(
                line["time"] > at and line["pid"] not in {x["pid"] for x in lines} for line in all_lines
            ),
        )
        times = sorted(line["time"] for line in job.steps() if line["rank"] == 0)
        stall = max(b - a for a, b in itertools.pairwise(times) if b > at) - step
        return Figures(stall_s=stall, lost=0, step_s=step)
    finally:
        job.stop()


SCENARIOS: dict[str, tuple[Callable[[Path], Figures], Callable[[Path], Figures] | None]] = {
    "start": (start, torchrun_start),
    "kill": (kill, torchrun_kill),
    "grow": (grow, None),
    "shrink": (shrink, None),
}


def spread(values: list[float | int | None], form: str) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    return f"{statistics.median(present):{form}} ({min(present):{form}}..{max(present):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each scenario (default 5)")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="comma list (default all)")
    parser.add_argument("--no-torchrun", action="store_true", help="leave the yardstick out")
    options = parser.parse_args()
    print(f"{'scenario':16} {'stall, s':26} {'join, s':26} {'lost, steps':14} normal step, s", flush=True)
    for name in options.scenarios.split(","):
        ours, peer = SCENARIOS[name]
        figures: list[Figures] = []
        peers: list[Figures] = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                figures.append(ours(Path(folder)))
            if peer is not None and not options.no_torchrun:
                with tempfile.TemporaryDirectory() as folder:
                    peers.append(peer(Path(folder)))
        for label, group in ((name, figures), (f"  torchrun {name}", peers)):
            if group:
                print(
                    f"{label:16} {spread([f.stall_s for f in group], '.3f'):26} "
                    f"{spread([f.join_s for f in group], '.2f'):26} {spread([f.lost for f in group], '.0f'):14} "
                    f"{spread([f.step_s for f in group], '.3f')}",
                    flush=True,
                )
        if peers:
            field = "join_s" if name == "start" else "stall_s"
            mine = statistics.median(getattr(f, field) for f in figures)
            theirs = statistics.median(getattr(f, field) for f in peers)
            print(f"  {name}: {theirs / max(mine, 1e-3):.1f}x less than torchrun", flush=True)


if __name__ == "__main__":
    main()
