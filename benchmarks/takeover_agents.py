"""How soon a driver that takes over has a large job's agents again.

    python benchmarks/takeover_agents.py [--agents 10,100,1000] [--runs 3] [--folder DIR] [--profile FILE]

The driver is the real one, in a process of its own, with a journal; its agents are in this process, with the real link
to the driver, and each has eight simulated workers (see simulated.py). When all train, the driver is killed and another
started at once, again and again. Medians and ranges of seconds:

    took over   from SIGKILL until the driver has all agents, imports and all
    driver      processor time of the new driver until then, of which imports are those of this benchmark, too
    agents      processor time of this process, in which all agents share one processor

All workers go on in their round each time, or this ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from journal import cpu_s
from simulated import SLOTS_PER_HOST, simulation

from elastic_driver.settings.journal_place import JournalPlace


class Takeover(NamedTuple):
    """Seconds."""

    took_over_s: float
    driver_s: float
    agents_s: float


async def takeovers(agents: int, runs: int, folder: Path, profile_to: str | None) -> list[Takeover]:
    """One job, whose driver dies again and again."""
    size = agents * SLOTS_PER_HOST
    found = []
    journal = JournalPlace(folder / "journal")
    # All agents share one processor here.
    async with simulation(size, journal=journal, profile_to=profile_to, agent_timeout_s=300.0) as job:
        await job.ready()
        job.go()
        assert await job.until_all_train(1) == size
        for _ in range(runs):
            job.took_over = None
            began, used = time.perf_counter(), time.process_time()
            job.kill_driver()
            await job.begin()
            went_on = await job.until_taken_over()
            took = time.perf_counter() - began
            found.append(Takeover(took, cpu_s(job.driver_pid), time.process_time() - used))
            if went_on != (size, True):
                raise RuntimeError(f"{went_on[0]} of {size} workers went on")
            await asyncio.sleep(1.0)  # what is still on its way is not the next one's
    return found


def told(values: list[float]) -> str:
    """The median, and from which to which."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", default="10,100,1000")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--profile", help="where the last driver of each job writes what its time went into")
    arguments = parser.parse_args()
    for agents in (int(text) for text in arguments.agents.split(",")):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = asyncio.run(takeovers(agents, arguments.runs, Path(folder), arguments.profile))
        print(f"{agents} agents of {SLOTS_PER_HOST} workers, {len(found)} takeovers, seconds")
        for name, values in zip(("took over", "driver", "agents"), zip(*found, strict=True), strict=True):
            print(f"  {name:10}{told(list(values))}", flush=True)


if __name__ == "__main__":
    main()
