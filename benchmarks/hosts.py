"""allreduce between two hosts: our engine against torch.distributed's Gloo, taking turns in one run. Needs root.

    python benchmarks/hosts.py [--ranks-per-host 1,2] [--rate 1gbit]

A host is a network namespace; a veth pair joins the two, unlimited or held to a rate by tbf. Median of the calls' times
on rank 0 in microseconds; the ratio is torch's time over ours.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
from meetings import PipeMeeting, meet

from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.native import NativeEngine
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec

fork = multiprocessing.get_context("fork")
SIZES = {"4 KB": 1 << 10, "256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}  # elements
ROUNDS = 3
NAMES = [f"eld{os.getpid()}a", f"eld{os.getpid()}b"]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]


def calls_for(numel: int) -> int:
    return 40 if numel <= 1 << 16 else 12 if numel <= 1 << 20 else 3


def ip(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Makes the namespaces and their link; removes them."""
    try:
        for name in NAMES:
            ip("ip", "netns", "add", name)
        links = ["veth0", "veth1"]
        ip("ip", "-n", NAMES[0], "link", "add", links[0], "type", "veth", "peer", links[1], "netns", NAMES[1])
        for name, link, address in zip(NAMES, links, ADDRESSES, strict=True):
            ip("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("ip", "-n", name, "link", "set", link, "up")
            ip("ip", "-n", name, "link", "set", "lo", "up")
            if rate:
                limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
                ip("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")


def rank_main(rank: int, per_host: int, file: str, pipe: Connection) -> None:
    host, size = rank // per_host, 2 * per_host
    enter(NAMES[host])
    os.environ["GLOO_SOCKET_IFNAME"] = f"veth{host}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)

    engine = NativeEngine(rank, size, ADDRESSES[host], timeout_s=60.0)
    engine.connect(PipeMeeting(pipe), timeout_s=60.0)
    for numel in SIZES.values():
        data = np.ones(numel, np.float32)
        tensor = torch.from_numpy(data)
        spec = TensorSpec(data.ctypes.data, data.nbytes, "float32", data.shape, data.ctypes.data)
        operation = Operation(Kind.ALLREDUCE, (spec,), name=f"gradient.{numel}", reduce_op=ReduceOp.SUM)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for turn in range(ROUNDS + 1):
            for name in times:
                for _ in range(calls_for(numel)):
                    data[:] = 1
                    engine.submit(Operation(Kind.BARRIER)).result()
                    began = time.perf_counter()
                    if name == "ours":
                        engine.submit(operation).result()
                    else:
                        dist.all_reduce(tensor)
                    if turn:
                        times[name].append(time.perf_counter() - began)
                    assert data[-1] == size
        if rank == 0:
            pipe.send({name: statistics.median(values) * 1e6 for name, values in times.items()})
    engine.submit(Operation(Kind.BARRIER)).result()
    engine.close()
    dist.destroy_process_group()


def measure(per_host: int, rate: str) -> None:
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate):
        pipes, processes = [], []
        for rank in range(2 * per_host):
            ours, theirs = fork.Pipe()
            processes.append(fork.Process(target=rank_main, args=(rank, per_host, f"{folder}/store", theirs)))
            processes[-1].start()
            pipes.append(ours)
        meet(pipes)
        for name in SIZES:
            medians = pipes[0].recv()
            ratio = medians["torch"] / medians["ours"]
            link = rate or "unlimited"
            print(
                f"2 x {per_host}  {link:>9}  {name:>7}  {medians['ours']:9.0f}  {medians['torch']:9.0f}  {ratio:.1f}x"
            )
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", default="1,2", help="comma list (default 1,2)")
    parser.add_argument("--rate", default=",1gbit", help="comma list of tbf rates; empty for no limit (default ,1gbit)")
    options = parser.parse_args()
    print("hosts       link     size   ours, us  torch, us  ratio")
    for rate in options.rate.split(","):
        for per_host in map(int, options.ranks_per_host.split(",")):
            measure(per_host, rate)


if __name__ == "__main__":
    main()
