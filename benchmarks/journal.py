"""What --journal costs a round.

    python benchmarks/journal.py [--workers 8,512] [--rounds 5] [--runs 3] [--folder DIR]

Two drivers run side by side, one with a journal and one without, each with simulated agents (see simulated.py). In turn
each loses a worker, so that the others form a new round. Measured, as medians over all rounds:

    wall     from the death until the driver knows that all that are left train
    cpu      of the driver's process meanwhile, all threads
    disk     a write of 600 bytes into zeros and an fdatasync, in the same folder, before and after the rounds

A round with a journal waits for three writes or so, one after the other. The folder has to be on the disk that is asked
about: /tmp may be memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated import SLOTS_PER_HOST, Simulation, simulation

from elastic_driver.settings.journal_place import JournalPlace

WRITES, BYTES, AHEAD = 200, 600, 1 << 20


class Round(NamedTuple):
    """Seconds."""

    wall_s: float
    cpu_s: float


def cpu_s(pid: int) -> float:
    """What all threads of a process have computed, as exactly as the kernel knows it."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def disk_s(folder: Path) -> list[float]:
    """Of each of some bare writes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.pwrite(file.fileno(), bytes(AHEAD), 0)
        os.fsync(file.fileno())
        took = []
        for number in range(WRITES):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * BYTES, number * BYTES)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
        return took


async def lose_one(job: Simulation, round_id: int) -> Round:
    """A worker dies."""
    job.commits += 1  # each round has come further, so none counts towards the no-progress rule
    cpu, began = cpu_s(job.driver_pid), time.perf_counter()
    job.kill(sorted(job.workers)[len(job.workers) // 2])
    await job.until_all_train(round_id)
    return Round(time.perf_counter() - began, cpu_s(job.driver_pid) - cpu)


async def one_run(size: int, rounds: int, folder: Path) -> tuple[list[Round], list[Round]]:
    """Rounds without and with a journal."""
    # A host goes with its worker: of few workers each has its own.
    slots = SLOTS_PER_HOST if size >= SLOTS_PER_HOST * (rounds + 2) else 1
    async with (
        simulation(size, slots_per_host=slots) as plain,
        simulation(size, slots_per_host=slots, journal=JournalPlace(folder / "journal")) as kept,
    ):
        for job in (plain, kept):
            await job.ready()
            job.go()
            await job.until_all_train(1)
        found: tuple[list[Round], list[Round]] = ([], [])
        for number in range(rounds):
            for job, into in zip((plain, kept), found, strict=True):
                into.append(await lose_one(job, 2 + number))
                await asyncio.sleep(0.2)  # what is still on its way is not the next one's
        return found


def told(values: list[float]) -> str:
    """Milliseconds: the median, and from which to which."""
    return f"{1000 * statistics.median(values):8.1f} ({1000 * min(values):.1f} to {1000 * max(values):.1f})"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="8,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    arguments = parser.parse_args()
    sizes = [int(text) for text in arguments.workers.split(",")]
    if arguments.rounds >= min(sizes):
        parser.error(f"each round loses a worker: {min(sizes)} last for {min(sizes) - 1} rounds at most")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        disk = disk_s(folder)
        for size in sizes:
            plain: list[Round] = []
            kept: list[Round] = []
            for run in range(arguments.runs):
                inside = folder / f"{size}-{run}"
                inside.mkdir(mode=0o700)
                for into, more in zip((plain, kept), asyncio.run(one_run(size, arguments.rounds, inside)), strict=True):
                    into += more
            print(f"{size} workers, {len(plain)} rounds each, ms")
            for what, rounds in (("without", plain), ("with", kept)):
                walls, cpus = [each.wall_s for each in rounds], [each.cpu_s for each in rounds]
                print(f"  {what:8} wall {told(walls)}   cpu {told(cpus)}", flush=True)
        disk += disk_s(folder)
    print(f"a bare write and fdatasync, ms: {told(disk)}")


if __name__ == "__main__":
    main()
