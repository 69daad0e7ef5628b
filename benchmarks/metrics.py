"""What a look at /metrics costs the driver of a large job.

    python benchmarks/metrics.py [--workers 4096] [--runs 5] [--looks 20]

The state is the core's own, brought there by its own steps: hosts of eight slots each, all of whose workers train, and
of each of which an agent has told.
Measured is what the driver's only thread does for a scrape: the status of all workers, and the text that is made of it.
Each run is a process of its own; printed are the medians of its looks, their median, and its ratio to 100 ms, which is
what a scrape may take. In a running job nothing else is done meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from large_job import LargeStatus

from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest
from elastic_driver.reporting.metrics import MetricsPage
from elastic_driver.reporting.tally import Tally

ALLOWED_MS = 100.0
_OPEN = "application/openmetrics-text; version=1.0.0"


async def _look(workers: int, looks: int) -> tuple[float, float, int]:
    status = LargeStatus(workers).status
    page = MetricsPage(Tally(), status.document, b"Bearer x", "1")
    request = WebRequest("GET", "/metrics", headers={"authorization": "Bearer x", "accept": _OPEN})
    took: list[float] = []
    answer = WebAnswer(0)
    for _ in range(looks + 1):
        began = time.perf_counter()
        answer = page.answer(request)
        took.append(time.perf_counter() - began)
    assert f'elastic_driver_workers{{phase="member"}} {workers}.0' in answer.body.decode(), "not all of them train"
    return statistics.median(took[1:]) * 1e3, took[0] * 1e3, len(answer.body)


def _run(workers: int, looks: int, queue: Any) -> None:
    queue.put(asyncio.run(_look(workers, looks)))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--looks", type=int, default=20)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    medians = []
    for run in range(arguments.runs):
        process = spawn.Process(target=_run, args=(arguments.workers, arguments.looks, queue))
        process.start()
        median_ms, first_ms, size = queue.get(timeout=300)
        process.join()
        medians.append(median_ms)
        first = f"the first, which loads the library, {first_ms:.0f} ms"
        print(f"run {run + 1}: {median_ms:.1f} ms a look; {first}; {size} bytes")
    median = statistics.median(medians)
    print(f"{arguments.workers} workers: {median:.1f} ms, {median / ALLOWED_MS:.2f} of {ALLOWED_MS:g} ms")


if __name__ == "__main__":
    main()
