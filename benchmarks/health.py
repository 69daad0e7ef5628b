"""What it costs to know how each worker is: in the worker, in its agent, and in the driver of a large job.

    python benchmarks/health.py [--workers 1000] [--local 8] [--runs 5] [--seconds 10]

Measured are the product's own parts:

    step      a worker's step() on its page, as a share of a step of 10 ms; yardstick: a read of the clock
    pulse     the thread of a worker that says that it lives, as a share of a processor; yardstick: the same process
              without a page
    agent     an agent's looks at its workers, two a second, as a share of a processor; yardstick: psutil's look at the
              same figures of the same processes
    driver    a second of the driver of a large job: what its agents tell is read, taken, and looked at twice, for hangs
              and for slow workers; yardstick: what reading the same JSON takes alone

Each figure is the median of the runs, with the range in brackets. Its ratio to the yardstick, in the same run, depends
less on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from large_job import SLOTS_PER_HOST, a_large_job

from elastic_driver.codec import encode, from_data, from_text
from elastic_driver.driver.health import Health
from elastic_driver.health.findings import StragglerFound
from elastic_driver.health.stragglers import StragglerWatch
from elastic_driver.health.watch import Rules
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.vitals import VitalsWatch
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.rendezvous.agent_messages import VitalsSeen
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import OWN_STEPS, Vitals
from tests.support.fakes.straggler_rounds import Draw, jitter, simulate

LOOKS_A_SECOND = 2
JUDGED_EVERY_S = 1
STEP_S = 0.1

# Run with the page's path, or "", what to do, and for how long; prints what it found.
WORKER = """
import sys, time
from elastic_driver.worker.engine.native_loader import load
path, what, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
native = load()
if path:
    assert native.vitals_open(path), "no page"
    native.vitals_round(1, 0)
if what == "steps":
    print("ready", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        native.vitals_step()
        time.sleep(0.02)
elif what == "still":
    time.sleep(0.2)
    cpu, began = time.process_time(), time.monotonic()
    time.sleep(seconds)
    print((time.process_time() - cpu) / (time.monotonic() - began))
else:
    def took(act, count=200_000):
        began = time.perf_counter()
        for _ in range(count):
            act()
        return (time.perf_counter() - began) / count
    print(took(native.vitals_step), took(time.monotonic_ns))
"""


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1000, help="of the large job (default 1000)")
    parser.add_argument("--local", type=int, default=8, help="that an agent looks at (default 8)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of pulse and agent (default 10)")
    options = parser.parse_args()

    steps = [step() for _ in range(options.runs)]
    tell("step", [ours for ours, _ in steps], 1e9, "ns", [ours / clock for ours, clock in steps], "reads of the clock")
    print(f"        {100 * statistics.median(ours for ours, _ in steps) / 0.01:.4f} % of a step of 10 ms")

    pulses = [pulse(options.seconds) for _ in range(options.runs)]
    tell("pulse", [100 * (ours - without) for ours, without in pulses], 1, "% of a processor", None, "")

    agents = [asyncio.run(agent(options.local, options.seconds)) for _ in range(options.runs)]
    tell(
        f"agent, {options.local} workers",
        [100 * LOOKS_A_SECOND * ours for ours, _ in agents],
        1,
        "% of a processor",
        [ours / theirs for ours, theirs in agents],
        "psutil's looks",
    )

    seconds = [asyncio.run(driver(options.workers, seed)) for seed in range(options.runs)]
    for part in ("read", "take", "look", "stragglers", "all"):
        tell(
            f"driver, {options.workers} workers: {part}",
            [100 * parts[part] for parts in seconds],
            1,
            "% of a processor",
            [parts[part] / parts["json"] for parts in seconds],
            "readings of the same JSON",
        )

    for size, step_s in ((2, 0.1), (8, 0.1), (8, 0.7), (64, 0.7), (8, 5.0)):
        for draw in (ten_percent, jitter, outliers):
            named = [until_named(size, step_s, draw, seed) for seed in range(options.runs)]
            steps_least = [max(OWN_STEPS * step_s, 2 * JUDGED_EVERY_S) / step_s] * len(named)
            ratios = [taken / least for (taken, _), least in zip(named, steps_least, strict=True)]
            what = f"named, {size} ranks, steps of {step_s} s, {draw.__name__}"
            tell(what, [taken for taken, _ in named], 1, "steps", ratios, "of what the window and two looks take")
            tell("      after", [seconds for _, seconds in named], 1, "s", None, "")
    for draw in (ten_percent, jitter, outliers):
        falsely, hours = zip(*(named_by_chance(draw, seed) for seed in range(options.runs)), strict=True)
        print(f"named by chance, {draw.__name__}: {sum(falsely)} in {sum(hours):.0f} rank-hours")


def tell(
    what: str, values: Sequence[float], scale: float, unit: str, ratios: Sequence[float] | None, yardstick: str
) -> None:
    """One line: the median, its range, and the ratio."""
    scaled = sorted(value * scale for value in values)
    line = f"{what}: {statistics.median(scaled):.3g} {unit} ({scaled[0]:.3g} to {scaled[-1]:.3g})"
    if ratios:
        line += f"; {statistics.median(ratios):.2f} {yardstick}"
    print(line, flush=True)


# --- the worker ------------------------------------------------------------------------------------------------------


def worker(path: str, what: str, seconds: float) -> subprocess.Popen[str]:
    """A process with a page, or none."""
    command = [sys.executable, "-c", WORKER, path, what, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1])


def said_by(process: subprocess.Popen[str]) -> list[float]:
    """What it has found, when it has ended."""
    said, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"a worker failed with exit code {process.returncode}")
    return [float(word) for word in said.split()]


def step() -> tuple[float, float]:
    """Seconds of a step() and of a read of the clock."""
    page = VitalsPage()
    ours, clock = said_by(worker(page.path, "cost", 0))
    page.close()
    return ours, clock


def pulse(seconds: float) -> tuple[float, float]:
    """Shares of a processor of a process that sleeps, with a page and without."""
    page = VitalsPage()
    both = [worker(page.path, "still", seconds), worker("", "still", seconds)]
    (ours,), (without,) = map(said_by, both)
    page.close()
    return ours, without


# --- the agent -------------------------------------------------------------------------------------------------------


class _Watched:
    """Processes that an agent has started."""

    def __init__(self, workers: Iterable[tuple[WorkerId, int, VitalsPage]]) -> None:
        self._workers = list(workers)

    def watched(self) -> Iterable[tuple[WorkerId, int, VitalsPage]]:
        return self._workers


async def agent(number: int, seconds: float) -> tuple[float, float]:
    """Processor time of a look at that many workers that step, and of psutil's; means of many."""
    pages = [VitalsPage() for _ in range(number)]
    processes = [worker(page.path, "steps", seconds + 30) for page in pages]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        watch = VitalsWatch(
            _Watched((WorkerId("a", slot, 0), one.pid, pages[slot]) for slot, one in enumerate(processes)),
            lambda message: None,
            is_heard=lambda: True,
        )
        theirs = [psutil.Process(one.pid) for one in processes]
        ours_s = theirs_s = 0.0
        looks = int(seconds * LOOKS_A_SECOND)
        for look in range(looks):
            began = time.thread_time()
            seen = watch.look(everybody=look % 2 == 0)
            if look % 2 == 0:
                assert len(seen) == number
                VitalsSeen({one.key: vitals for one, vitals in seen.items()}).message().pack()
            between = time.thread_time()
            for one in theirs:
                one.as_dict(["status", "cpu_times", "memory_info", "io_counters", "num_threads"])
            ours_s += between - began
            theirs_s += time.thread_time() - between
            await asyncio.sleep(1 / LOOKS_A_SECOND)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for page in pages:
            page.close()
    return ours_s / looks, theirs_s / looks


# --- the driver ------------------------------------------------------------------------------------------------------


async def driver(size: int, seed: int, seconds: int = 60) -> dict[str, float]:
    """Processor seconds of one second of the job, by part; means over a minute of it, after a minute to learn in."""
    dice = random.Random(seed)
    now = 1000.0
    stepper, members = a_large_job(size, lambda: now)
    told: list[object] = []
    by_key = {worker.key: worker for worker in members}

    class Ear:
        live = False

        def hear(self, happening: object) -> None:
            told.append(happening)

    health = Health(stepper, Rules(), chronicle=Chronicle(Ear()), clock=lambda: now, tasks=Tasks())
    waited = [0.0] * size
    spent = dict.fromkeys(("json", "read", "take", "look", "stragglers"), 0.0)
    watch = StragglerWatch()
    watch.begin(1, {worker: rank for rank, worker in enumerate(members)}, now)
    for second in range(2 * seconds):
        messages = []
        for first in range(0, size, SLOTS_PER_HOST):
            seen = {}
            for rank in range(first, min(first + SLOTS_PER_HOST, size)):
                waited[rank] += 0.2 + 0.02 * dice.random()
                own_s = STEP_S * dice.gauss(0.7, 0.02)
                seen[members[rank].key] = a_look(now, rank, second, waited[rank], own_s)
            messages.append(encode(VitalsSeen, VitalsSeen(seen)))
        marks = [time.thread_time()]
        for message in messages:
            from_text(message)
        marks.append(time.thread_time())
        read = [from_data(VitalsSeen, from_text(message)).workers for message in messages]
        marks.append(time.thread_time())
        for seen in read:
            for key, vitals in seen.items():
                health.seen(WorkerId.parse(key), vitals)
        marks.append(time.thread_time())
        for _ in range(2):
            now += 0.5
            health.look()
        marks.append(time.thread_time())
        # Once more, what "take" and "look" do of that for stragglers alone.
        for seen in read:
            for key, vitals in seen.items():
                watch.take(by_key[key], vitals)
        watch.look(now)
        marks.append(time.thread_time())
        if second >= seconds:
            for part, since, until in zip(spent, marks, marks[1:], strict=False):
                spent[part] += (until - since) / seconds
    assert not told, f"nobody was slow, and nobody hung: {told[:3]}"
    return {**spent, "all": spent["read"] + spent["take"] + spent["look"]}


def a_look(now: float, rank: int, second: int, waited_s: float, own_s: float) -> Vitals:
    """At a worker that has made ten steps a second."""
    steps = int(second / STEP_S) + 1
    return Vitals(
        at_s=round(now, 3),
        pid=1000 + rank,
        state="R",
        cpu_s=0.8 * second,
        rss_bytes=1 << 30,
        pulse_s=0.1,
        round_id=1,
        rank=rank,
        steps=steps,
        submitted=20 * steps,
        finished=20 * steps,
        waited_s=round(waited_s, 6),
        own_s=round(own_s, 6),
        commits=steps,
        committed_s=0.05,
        can_dump=True,
    )


# --- stragglers ------------------------------------------------------------------------------------------------------


def ten_percent(draws: random.Random) -> float:
    """Normally distributed by a tenth."""
    return max(0.5, draws.gauss(1, 0.1))


def outliers(draws: random.Random) -> float:
    """One step of a hundred takes ten times as long."""
    return draws.gauss(1, 0.07) * (10.0 if draws.random() < 0.01 else 1.0)


def until_named(size: int, step_s: float, draw: Draw, seed: int) -> tuple[float, float]:
    """Steps, and seconds, from when a rank becomes slow to when it is named; so many as there are, where it is not."""
    first = max(60, int(8 / step_s))
    steps = first + max(100, int(20 / step_s))
    told, began = simulate(size, steps, step_s, draw, slow={1: (first, steps, 1.3)}, seed=seed)
    for one in told:
        if isinstance(one.news, StragglerFound) and one.news.rank == 1 and one.at_s >= began[first]:
            return one.step - first, one.at_s - began[first]
    return steps - first, began[steps - 1] - began[first]


def named_by_chance(draw: Draw, seed: int) -> tuple[int, float]:
    """How many are named, though none is slow; and for how many hours, of all ranks together."""
    falsely, hours = 0, 0.0
    for size, step_s, steps in ((2, 0.3, 6000), (8, 0.1, 6000), (64, 0.7, 1200)):
        told, began = simulate(size, steps, step_s, draw, seed=1000 + seed)
        falsely += sum(isinstance(one.news, StragglerFound) for one in told)
        hours += size * began[steps - 1] / 3600
    return falsely, hours


if __name__ == "__main__":
    main()
