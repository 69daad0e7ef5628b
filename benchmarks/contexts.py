"""How long the contexts of a round take to build, and an abort to be felt.

    python benchmarks/contexts.py [--ranks 2,4,8,16,32] [--runs 5]

Each rank is a process; 8 ranks (a quarter at most) play a host, so that there are global, local and cross contexts.
Addresses go through the real rendezvous server, one request a rank. The time is that of the slowest rank, from a common
start until its contexts stand. The yardstick in the same run is torch.distributed's ProcessGroupGloo over a TCPStore,
three groups.

Abort: all ranks but one are blocked in an allreduce of 16 MB; each is told by a thread of its own, as the watch thread
of a worker does it; the time is from the call of abort() until the collective has raised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.distributed as dist
import uvloop

from elastic_driver.errors import StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.local_socket import SocketFolder, url_of
from elastic_driver.torch_private.groups import c10d
from elastic_driver.worker.engine import native_loader

fork = multiprocessing.get_context("fork")
KEY = JobKey.new()
LIMIT_S = 60.0


def groups_of(rank: int, size: int) -> list[tuple[str, list[int], int]]:
    per_host = min(8, max(1, size // 4))
    host, local = divmod(rank, per_host)
    hosts = size // per_host
    return [
        ("global", list(range(size)), rank),
        ("local", list(range(host * per_host, (host + 1) * per_host)), local),
        ("cross", [other * per_host + local for other in range(hosts)], host),
    ]


def serve(pipe: Connection) -> None:
    """The rendezvous server in a process of its own; a message begins a round."""

    async def main() -> None:
        keys = KeyRoutes()
        server = RendezvousServer(keys.routes, key_of=KEY.of, admits=lambda identity: True)
        folder = SocketFolder.new()
        await server.start_local(folder.listen("workers.sock"), workers=4096)
        pipe.send(url_of(folder.path / "workers.sock"))
        loop = asyncio.get_running_loop()
        while (round_id := await loop.run_in_executor(None, pipe.recv)) is not None:
            keys.begin_round(round_id)
            pipe.send("begun")
        await server.close()
        folder.close()

    uvloop.run(main())


def native_rank(rank: int, size: int, url: str, pipe: Connection) -> None:
    native: Any = native_loader.load()
    worker = WorkerId("localhost", rank, 0)
    client = RendezvousClient(url, Credential(Identity(Role.WORKER, worker)))
    with contextlib.suppress(StaleRoundError):
        client.get(0, "warm", "up")  # opens the connection; no worker opens one when it resets
    while (round_id := pipe.recv()) is not None:
        began = time.monotonic()
        group = native.ContextGroup(groups_of(rank, size), host="127.0.0.1")
        blobs = client.exchange(round_id, "contexts", rank, size, group.prepare(), timeout_s=LIMIT_S)
        group.connect(blobs, LIMIT_S)
        built = time.monotonic()
        pipe.send((began, built))
        pipe.recv()
        group.close()
        pipe.send(time.monotonic())


def torch_rank(rank: int, size: int, port: int, pipe: Connection) -> None:
    store = c10d.TCPStore("127.0.0.1", port, is_master=False)
    gloo: Any = dist.ProcessGroupGloo
    while (round_id := pipe.recv()) is not None:
        began = time.monotonic()
        built = []
        for name, members, index in groups_of(rank, size):
            prefix = c10d.PrefixStore(f"{round_id}/{name}/{members[0]}", store)
            built.append(gloo(prefix, index, len(members), timedelta(seconds=LIMIT_S)))
        pipe.send((began, time.monotonic()))
        pipe.recv()
        del built
        pipe.send(time.monotonic())


def measure(rank_main: Any, size: int, where: str | int, runs: int, begin: Any) -> tuple[list[float], list[float]]:
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        processes.append(fork.Process(target=rank_main, args=(rank, size, where, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    time.sleep(0.2 + size * 0.02)  # until all have loaded what they need; not part of what is measured
    builds, closes = [], []
    for run in range(runs + 1):
        round_id = begin()
        for pipe in pipes:
            pipe.send(round_id)
        times = [pipe.recv() for pipe in pipes]
        asked = time.monotonic()
        for pipe in pipes:
            pipe.send("close")
        closed = [pipe.recv() for pipe in pipes]
        if run:  # the first one warms up
            builds.append(max(end for _, end in times) - min(start for start, _ in times))
            closes.append(max(closed) - asked)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return builds, closes


def aborted_rank(rank: int, size: int, pipe: Connection) -> None:
    native: Any = native_loader.load()
    group = native.ContextGroup([("global", list(range(size)), rank)], host="127.0.0.1")
    pipe.send_bytes(group.prepare())
    group.connect(pipe.recv(), LIMIT_S)
    data = np.ones(4 << 20, np.float32)
    group.allreduce("global", data, "float32", "max", LIMIT_S)
    called = [0.0]
    heard = threading.Event()

    def watch() -> None:
        pipe.recv()
        called[0] = time.monotonic()
        group.abort("told")
        heard.set()

    pipe.send("ready")
    if rank:
        threading.Thread(target=watch, daemon=True).start()
        try:
            group.allreduce("global", data, "float32", "max", LIMIT_S)
        except native.CollectiveError:
            raised = time.monotonic()
            heard.wait()
            # A peer's abort may have ended it before this rank's own.
            pipe.send(max(0.0, raised - called[0]))
    pipe.recv()
    os._exit(0)


def measure_abort(size: int) -> list[float]:
    pipes = []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        fork.Process(target=aborted_rank, args=(rank, size, theirs), daemon=True).start()
        pipes.append(ours)
    blobs = [pipe.recv_bytes() for pipe in pipes]
    for pipe in pipes:
        pipe.send(blobs)
    for pipe in pipes:
        pipe.recv()
    time.sleep(0.3)  # all are blocked by now
    for pipe in pipes[1:]:
        pipe.send("abort")
    times: list[float] = [pipe.recv() for pipe in pipes[1:]]
    for pipe in pipes:
        pipe.send("end")
    return times


def spread(values: list[float]) -> str:
    ms = [value * 1e3 for value in values]
    return f"{statistics.median(ms):8.1f} ({min(ms):.1f}..{max(ms):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32", help="comma list of numbers of ranks")
    parser.add_argument("--runs", type=int, default=5, help="builds of each, after one to warm up (default 5)")
    options = parser.parse_args()
    ours, theirs = fork.Pipe()
    server = fork.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = ours.recv()
    rounds = [1]
    ours.send(1)
    ours.recv()

    def begin() -> int:
        rounds[0] += 1
        ours.send(rounds[0])
        ours.recv()
        return rounds[0]

    print(
        f"{'ranks':>5}  {'ours, build ms':>26}  {'torch, build ms':>26}  {'ratio':>6}  {'ours, close ms':>24}",
        flush=True,
    )
    for size in map(int, options.ranks.split(",")):
        builds, closes = measure(native_rank, size, url, options.runs, begin)
        store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        peers, _ = measure(torch_rank, size, store.port, options.runs, begin)
        ratio = statistics.median(peers) / statistics.median(builds)
        print(f"{size:5}  {spread(builds):>26}  {spread(peers):>26}  {ratio:5.1f}x  {spread(closes):>24}", flush=True)
    ours.send(None)
    server.join()
    for size in (2, 4, 8):
        times = [one for _ in range(options.runs) for one in measure_abort(size)]
        print(f"abort felt, {size} ranks, ms: {spread(times)}", flush=True)


if __name__ == "__main__":
    main()
