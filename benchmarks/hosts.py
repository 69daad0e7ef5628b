"""allreduce between hosts: our engine, torch.distributed's Gloo, and a plain copy over sockets, taking turns.

    python benchmarks/hosts.py [--shapes 2x1,2x2,3x2] [--rate ,1gbit] [--turns 5]

Hosts are network namespaces on one bridge, unlimited or each held to a rate by tbf; a shape is hosts x ranks on each.
Needs root. "copy" is the limit: to allreduce N bytes over H hosts each of them must send 2 (H-1) / H * N bytes, and
receive as many. One process of each host sends that much to the next host and receives as much, over one connection,
and adds nothing up. Of the small sizes it says little: what the host before has sent may be there when a copy begins.

Medians of the calls on rank 0 in microseconds, over turns that change places. The first turn warms up. "torch" is
torch's time over ours: more is better for us; "of the limit" is the copy's time over ours: 1 is as fast as can be.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import select
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from meetings import PipeMeeting, meet

from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.native import EngineSettings, NativeEngine
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.network.namespaces import NamespaceHost, Namespaces

fork = multiprocessing.get_context("fork")
SIZES = {"4 KB": 1 << 10, "256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}  # elements
_PORT = 4711
_HOST_TIMEOUT_S = 5.0  # as jobs have it


def calls_for(numel: int) -> int:
    return 40 if numel <= 1 << 16 else 10 if numel <= 1 << 20 else 2


class Ring:
    """A connection of each host's first rank to the next host's, and one from the host before."""

    def __init__(self, host: int, hosts: list[NamespaceHost]) -> None:
        self._count = len(hosts)
        listener = socket.create_server((hosts[host].ipv4, _PORT))
        self._next = _dial((hosts[(host + 1) % len(hosts)].ipv4, _PORT))
        self._before, _ = listener.accept()
        listener.close()
        for end in (self._next, self._before):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)

    def copy(self, out: memoryview, into: memoryview) -> None:
        """Sends and receives what an allreduce of as many bytes must."""
        share = 2 * (self._count - 1) * len(out) // self._count
        sent = received = 0
        while sent < share or received < share:
            if received < share:
                at = received % len(into)
                with contextlib.suppress(BlockingIOError):
                    received += self._before.recv_into(into[at : at + min(len(into) - at, share - received)])
            if sent < share:
                at = sent % len(out)
                with contextlib.suppress(BlockingIOError):
                    sent += self._next.send(out[at : at + min(len(out) - at, share - sent)])
                    continue
            if received < share:
                select.select([self._before], [self._next] if sent < share else [], [])
            elif sent < share:
                select.select([], [self._next], [])


def _dial(place: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(place, 30)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def rank_main(rank: int, per_host: int, hosts: list[NamespaceHost], turns: int, file: str, pipe: Connection) -> None:
    place, size = rank // per_host, len(hosts) * per_host
    host = hosts[place]
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    settings = EngineSettings(machine=host.name, host_timeout_s=_HOST_TIMEOUT_S)
    engine = NativeEngine(rank, size, host.ipv4, timeout_s=60.0, settings=settings)
    engine.connect(PipeMeeting(pipe), timeout_s=60.0)
    ring = Ring(place, hosts) if rank % per_host == 0 else None
    names = ["ours", "torch", "copy"]
    for numel in SIZES.values():
        data = np.ones(numel, np.float32)
        tensor, other = torch.from_numpy(data), np.ones(numel, np.float32)
        out, into = data.data.cast("B"), other.data.cast("B")
        spec = TensorSpec(data.ctypes.data, data.nbytes, "float32", data.shape, data.ctypes.data)
        operation = Operation(Kind.ALLREDUCE, (spec,), name=f"gradient.{numel}", reduce_op=ReduceOp.SUM)
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns + 1):
            for name in names[turn % 3 :] + names[: turn % 3]:
                for _ in range(calls_for(numel)):
                    data[:] = 1
                    engine.submit(Operation(Kind.BARRIER)).result()
                    began = time.perf_counter()
                    if name == "ours":
                        engine.submit(operation).result()
                    elif name == "torch":
                        dist.all_reduce(tensor)
                    elif ring is not None:
                        ring.copy(out, into)
                    if turn:
                        times[name].append(time.perf_counter() - began)
                    assert data[-1] == (1 if name == "copy" else size)
        if rank == 0:
            pipe.send({name: statistics.median(values) * 1e6 for name, values in times.items()})
    engine.submit(Operation(Kind.BARRIER)).result()
    engine.close()
    dist.destroy_process_group()


def measure(count: int, per_host: int, rate: str, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Namespaces(count) as hosts:
        for host in hosts if rate else ():
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            host.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit], check=True)
        pipes, processes = [], []
        for rank in range(count * per_host):
            ours, theirs = fork.Pipe()
            what = (rank, per_host, list(hosts), turns, f"{folder}/store", theirs)
            processes.append(fork.Process(target=rank_main, args=what))
            processes[-1].start()
            pipes.append(ours)
        meet(pipes)
        for name in SIZES:
            medians = pipes[0].recv()
            ours = medians["ours"]
            print(
                f"{count} x {per_host}  {rate or 'unlimited':>9}  {name:>7}  {ours:9.0f}  {medians['torch']:9.0f}  "
                f"{medians['copy']:9.0f}  {medians['torch'] / ours:4.1f}x  {medians['copy'] / ours:12.2f}",
                flush=True,
            )
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x1,2x2,3x2", help="comma list of hosts x ranks (default 2x1,2x2,3x2)")
    parser.add_argument("--rate", default="", help="comma list of tbf rates; empty for no limit, the default")
    parser.add_argument("--turns", type=int, default=5, help="after the one that warms up (default 5)")
    options = parser.parse_args()
    print("hosts       link     size   ours, us  torch, us   copy, us  torch  of the limit")
    for rate in options.rate.split(","):
        for shape in options.shapes.split(","):
            count, per_host = map(int, shape.split("x"))
            measure(count, per_host, rate, options.turns)


if __name__ == "__main__":
    main()
