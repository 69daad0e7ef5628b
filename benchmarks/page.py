"""What the page costs the driver: browsers that look at a job of many workers, of which every one changes all the time.

    python benchmarks/page.py [--workers 1000] [--readers 3] [--seconds 20]

The server, the feed and the site are the driver's own, in this process. The job that is shown is simulated; for each
look at it the driver's own status of so many workers, with all their vitals, is made, too, and thrown away. The readers
read over real connections, in a process of their own, and check what they get.
Printed: the processor time of this process as a share of one processor, without and with readers, and what each gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from pathlib import Path

import requests
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from large_job import LargeStatus

from elastic_driver.rendezvous.server.server import RendezvousServer
from tests.support.fakes.shown_job import ShownJob


def read(url: str, code: str, seconds: float, results: multiprocessing.Queue[tuple[int, int, int]]) -> None:
    """Reads the feed for a while. Gives bytes, frames and the workers that it knows in the end."""
    session = requests.Session()
    session.get(f"{url}/login", params={"code": code}, timeout=20)
    size = frames = 0
    workers: dict[str, object] = {}
    end = time.monotonic() + seconds
    with session.get(f"{url}/feed", stream=True, timeout=20) as answer:
        buffer = b""
        while piece := answer.raw.read1(1 << 20):
            size += len(piece)
            buffer += piece
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                data = json.loads(event.partition(b"data: ")[2])
                frames += "at" in data
                workers.update(data.get("workers", {}))
            if time.monotonic() > end:
                break
    results.put((size, frames, len(workers)))


async def measure(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    real, shown = LargeStatus(options.workers).status, ShownJob.status

    class Job(ShownJob):
        def status(self) -> dict[str, object]:
            assert len(real.document()["workers"]) == options.workers  # type: ignore[arg-type]
            return shown(self)

    job = Job(options.workers, each=8, call_later=loop.call_later)
    job.tell_start()
    began = time.perf_counter()
    for _ in range(20):
        real.document()
    print(f"a status of {options.workers} workers: {(time.perf_counter() - began) / 20 * 1e3:.1f} ms")
    server = RendezvousServer([], web=job.site)
    port = await server.start("127.0.0.1", 0)
    processes = multiprocessing.get_context("spawn")

    def share(cpu: float, wall: float) -> float:
        return 100 * (time.process_time() - cpu) / (time.monotonic() - wall)

    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(options.seconds / 4)
    print(f"no browser: {share(cpu, wall):.2f} % of a processor, {job.looks} looks at the job")
    results = processes.Queue()
    readers = [
        processes.Process(
            target=read,
            args=(f"http://127.0.0.1:{port}", job.sessions.new_code(may_act=False), options.seconds + 2, results),
        )
        for _ in range(options.readers)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 60
    while len(job.feed.streams) < options.readers:
        if time.monotonic() > deadline:
            raise SystemExit("the readers did not come")
        await asyncio.sleep(0.05)
    cpu, wall, looks = time.process_time(), time.monotonic(), job.looks
    await asyncio.sleep(options.seconds)
    print(
        f"{options.readers} browsers, {options.workers} workers: {share(cpu, wall):.2f} % of a processor, "
        f"{(job.looks - looks) / options.seconds:.2f} frames a second"
    )
    for _ in readers:
        size, frames, workers = await loop.run_in_executor(None, results.get)
        print(f"  a browser got {size / (options.seconds + 2) / 1e3:.0f} KB/s in {frames} frames, of {workers} workers")
    for reader in readers:
        await loop.run_in_executor(None, reader.join)
    job.feed.close()
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
