"""How long a worker takes from the request to start it until it is READY in ``init()``: afresh, and forked.

    python benchmarks/warm.py [--starts 10] [--preload torch,elastic_driver.torch]

The script imports torch and ``elastic_driver.torch`` and calls ``hvd.init()``, whose request for a round ends the time.
Seconds: median, least and most of the starts, one at a time, and how many times quicker the forked ones are. Also what
the warmed process costs: the time it takes, and its memory that no worker shares.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Literal

import psutil

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.authentication import MAGIC
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS, ENV_ROUND, ENV_WORKER
from elastic_driver.system.local_socket import SocketFolder, url_of
from elastic_driver.words import Bar

_SCRIPT = """\
import torch
import elastic_driver.torch as hvd
hvd.init()
"""


class _Sink:
    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """See OutputSink."""

    def write(self, worker: WorkerId, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        sys.stderr.buffer.write(data)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """See OutputSink."""

    def end(self, worker: WorkerId) -> None:
        """See OutputSink."""


class _Listener:
    """A ProcessListener that waits for the next process."""

    def __init__(self) -> None:
        self.runs: asyncio.Queue[ProcessTree] = asyncio.Queue()

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """See ProcessListener."""
        self.runs.put_nowait(process)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """See ProcessListener."""
        sys.exit(str(error))

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """See ProcessListener."""

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """See ProcessListener."""

    def finished(self, worker: WorkerId) -> None:
        """See ProcessListener."""


class _Rendezvous:
    """Takes the first request of each worker, and answers none."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.folder = SocketFolder.new()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._take, sock=self.folder.listen("agent.sock"))

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line.startswith(MAGIC):
            self.asked.set()
        while await reader.read(4096):
            pass
        writer.close()


async def measure(starts: int, preload: list[str] | None) -> None:
    """Prints one line for each way."""
    rendezvous = _Rendezvous()
    server = await rendezvous.serve()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        ENV_RENDEZVOUS: url_of(rendezvous.folder.path / "agent.sock"),
        ENV_WORKER: "localhost[0]#0",
        ENV_ROUND: "0",
    }
    medians = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_SCRIPT)

        async def launch() -> Launch:
            return Launch([sys.executable, str(script)], env)

        for warm in (False, True):
            listener = _Listener()
            keeper = ProcessKeeper(
                _Sink(),
                listener,
                prefix_timestamp=False,
                mark=uuid.uuid4().hex,
                warm=warm,
                preload=preload,
                warn=lambda text: print(text, file=sys.stderr),
            )
            times = []
            try:
                for number in range(starts + 1):
                    rendezvous.asked.clear()
                    begin = time.perf_counter()
                    keeper.start(WorkerId("localhost", 0, number), "0", launch)
                    process = await listener.runs.get()
                    await asyncio.wait_for(rendezvous.asked.wait(), 60)
                    times.append(time.perf_counter() - begin)
                    process.kill()
                    await process.wait()
                    if warm and number == 0:
                        await _warm_up(keeper)
            finally:
                await keeper.close()
            # The first reads the files from disk, and is never forked.
            rest = times[1:]
            medians.append(statistics.median(rest))
            print(
                f"{'forked' if warm else 'fresh '}: median {medians[-1]:.3f} s, "
                f"{min(rest):.3f} to {max(rest):.3f}, {len(rest)} starts"
            )
    print(f"ratio: {medians[0] / medians[1]:.1f}")
    server.close()
    rendezvous.folder.close()


async def _warm_up(keeper: ProcessKeeper) -> None:
    keeper.warm_up()
    begin = time.perf_counter()
    async with asyncio.timeout(60):
        while keeper.warm is None or not keeper.warm.is_ready():
            await asyncio.sleep(0.01)
    memory = psutil.Process(keeper.warm.pid).memory_full_info()
    took_s = time.perf_counter() - begin
    print(f"warming up: {took_s:.3f} s, {memory.rss / 2**20:.0f} MiB, of which {memory.uss / 2**20:.0f} MiB its own")


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--preload", help="default: chosen by the script")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.starts, arguments.preload.split(",") if arguments.preload else None))


if __name__ == "__main__":
    main()
