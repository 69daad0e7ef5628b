"""What the elastic coordinator costs, and what changes cost it, beside TensorFlow's own in the same run.

    python benchmarks/coordinator.py [--runs 5] [--closures 3000] [--scenarios rate,restart,join,leave,replace]

Servers on this machine, one parameter server, closures that add one to a variable there (about as short as one can
be, so that all else weighs most). The coordinators take turns; each run has a process and servers of its own. Per
scenario the median and the range of

- rate: closures a second with 1, 2 and 4 workers, and the processor time of the coordinator's process for one (cpu);
  the ratio is elastic / stock.
- restart: SIGKILL to one of two workers, and a server again at its address at once: until it takes closures (back),
  and the longest time that the other ended none (stall). TensorFlow's own copies what a closure has returned when
  somebody asks for it: what the dead worker had is lost then, though the closure has run (lost: how many values).
- join: add_worker, of a server that listens: until it takes its first closure (first), and the longest time that one
  of the two others ended none (stall), less the usual one.
- leave: remove_worker of one of three: until it has returned (left); stall as before.
- replace: SIGKILL to one of two workers, and add_worker with another address at once: until that one takes closures
  (first); stall of the one that is left.

TensorFlow's own coordinator can only do rate and restart. All sums are checked: exact where nobody is killed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tensorflow as tf

from elastic_driver.tensorflow import ElasticClusterCoordinator
from tests.support.processes.tensorflow_job import Job, aside, current_worker
from tests.support.processes.tensorflow_servers import Server, Servers

COORDINATORS = {"elastic": ElasticClusterCoordinator, "stock": tf.distribute.coordinator.ClusterCoordinator}
PATIENCE_S = 30.0
# Closures that are queued or run at any time in the scenarios with changes.
OUTSTANDING = 32
SETTLE_S = 0.5


class Stream:
    """Closures without end, and when each worker has ended one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._enough = threading.Event()
        self.ended: dict[int, list[float]] = collections.defaultdict(list)
        self.scheduled = 0
        self.values_lost = 0

        @tf.function
        def closure() -> Any:
            job.counter.assign_add(1)
            return current_worker(), tf.timestamp()

        self._closure = closure
        self._running = aside(self._run)

    def _run(self) -> None:
        under_way: collections.deque[Any] = collections.deque()
        while not self._enough.is_set():
            while len(under_way) < OUTSTANDING:
                under_way.append(self._job.coordinator.schedule(self._closure))
                self.scheduled += 1
            self._note(under_way.popleft())
        for value in under_way:
            self._note(value)
        self._job.coordinator.join()

    def _note(self, value: Any) -> None:
        try:
            index, at = value.fetch()
        except tf.errors.OpError:
            self.values_lost += 1
            return
        self.ended[int(index)].append(float(at))

    def until(self, index: int, after: float) -> float:
        """Waits until this worker has ended a closure after that time; returns when."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            late = [at for at in self.ended[index][-OUTSTANDING:] if at > after]
            if late:
                return min(late)
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"{type(self._job.coordinator).__name__}: worker {index} has taken no closure for {PATIENCE_S:g} s"
                )
            time.sleep(0.001)

    def settle(self, *indices: int) -> None:
        """All of them are at work, and stay so for a while."""
        for index in indices:
            self.until(index, time.time())
        time.sleep(SETTLE_S)

    def longest_gap(self, index: int, since: float, until: float) -> float:
        times = [since, *sorted(at for at in list(self.ended[index]) if since < at < until), until]
        return max(after - before for before, after in itertools.pairwise(times))

    def stall(self, indices: tuple[int, ...], since: float, until: float) -> float:
        """The longest that one of them ended none, beyond what was so in the time before."""
        usual = max(self.longest_gap(index, since - SETTLE_S, since) for index in indices)
        return max(0.0, max(self.longest_gap(index, since, until) for index in indices) - usual)

    def stop(self, *, killed: bool) -> None:
        self._enough.set()
        self._running.result(PATIENCE_S)
        done = self._job.done
        assert done >= self.scheduled, (done, self.scheduled)
        assert killed or done == self.scheduled, (done, self.scheduled)


def rate(kind: str, workers: int, closures: int) -> dict[str, float]:
    with Servers() as servers:
        job = Job(servers, workers, kind=COORDINATORS[kind])
        job.run(50 * workers)
        before = job.done
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(closures):
            job.coordinator.schedule(job.count)
        job.coordinator.join()
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        assert job.done == before + closures
        return {f"{workers} workers": closures / took_s, f"{workers} cpu": 1000 * cpu_s / closures}


def change(kind: str, scenario: str) -> dict[str, float]:
    with Servers() as servers:
        leaves = scenario == "leave"
        job = Job(servers, 3 if leaves else 2, spares=1, kind=COORDINATORS[kind])
        stream = Stream(job)
        stream.settle(*range(len(job.workers)))
        figures, others, since, until = CHANGES[scenario](job, stream)
        stream.settle(*others)
        figures["stall"] = stream.stall(others, since, max(until, time.time() - SETTLE_S / 2))
        stream.stop(killed=scenario in ("restart", "replace"))
        assert kind == "stock" or not stream.values_lost
        if scenario == "restart":
            figures["lost"] = stream.values_lost
        return figures


Changed = tuple[dict[str, float], tuple[int, ...], float, float]


def _restart(job: Job, stream: Stream) -> Changed:
    victim: Server = job.workers[0]
    victim.kill()
    since = time.time()
    victim.start_again()
    back = stream.until(0, since)
    return {"back": back - since}, (1,), since, back


def _join(job: Job, stream: Stream) -> Changed:
    since = time.time()
    worker = job.coordinator.add_worker(job.spares[0].address)
    first = stream.until(worker.index, since)
    return {"first": first - since}, (0, 1), since, first


def _leave(job: Job, stream: Stream) -> Changed:
    since = time.time()
    job.coordinator.remove_worker(job.workers[0].address)
    left = time.time()
    return {"left": left - since}, (1, 2), since, left


def _replace(job: Job, stream: Stream) -> Changed:
    job.workers[0].kill()
    since = time.time()
    worker = job.coordinator.add_worker(job.spares[0].address)
    first = stream.until(worker.index, since)
    return {"first": first - since}, (1,), since, first


CHANGES = {"restart": _restart, "join": _join, "leave": _leave, "replace": _replace}
BOTH = ("elastic", "stock")
# And how many digits after the point.
UNITS = {"workers": ("/s", 0), "cpu": (" ms", 3), "lost": ("", 0)}


def alone(function: Any, *args: Any) -> dict[str, float]:
    """In a process of its own: TensorFlow's runtime is one for a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        figures: dict[str, float] = pool.submit(function, *args).result()
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--closures", type=int, default=3000)
    parser.add_argument("--scenarios", default="rate,restart,join,leave,replace")
    args = parser.parse_args()
    for scenario in args.scenarios.split(","):
        kinds = BOTH if scenario in ("rate", "restart") else ("elastic",)
        found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for run in range(args.runs):
            # In turns, and who begins takes turns, too.
            for kind in kinds if run % 2 == 0 else kinds[::-1]:
                if scenario == "rate":
                    parts = [alone(rate, kind, workers, args.closures) for workers in (1, 2, 4)]
                else:
                    parts = [alone(change, kind, scenario)]
                for part in parts:
                    for name, value in part.items():
                        found[kind, name].append(value)
        for (kind, name), values in sorted(found.items(), key=lambda one: (one[0][1], one[0][0])):
            middle = statistics.median(values)
            unit, digits = UNITS.get(name.split()[-1], (" s", 3))
            text = f"{middle:.{digits}f}{unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"
            if kind == "elastic" and name != "lost" and (stock := found.get(("stock", name))):
                text += f", {middle / statistics.median(stock):.2f} x stock"
            print(f"{scenario:8} {name:10} {kind:8} {text}", flush=True)


if __name__ == "__main__":
    main()
