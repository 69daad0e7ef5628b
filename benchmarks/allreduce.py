"""allreduce of float32 sums: our Gloo contexts against torch.distributed's Gloo, the two taking turns in one run.

    python benchmarks/allreduce.py [--ranks 2,4]

Each rank is a process on this machine. Median of the calls' times on rank 0, after a barrier and a warm-up, in
microseconds; the ratio is torch's time over ours.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_driver import native_loader

fork = multiprocessing.get_context("fork")
SIZES = {"4 KB": 1 << 10, "256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}  # elements
ROUNDS = 3


def calls_for(numel: int) -> int:
    return 60 if numel <= 1 << 16 else 20 if numel <= 1 << 20 else 5


def rank_main(rank: int, size: int, file: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    native: Any = native_loader.load()
    group = native.ContextGroup([("global", list(range(size)), rank)], host="127.0.0.1")
    pipe.send_bytes(group.prepare())
    group.connect(pipe.recv(), 60.0)
    for numel in SIZES.values():
        data = np.ones(numel, np.float32)
        tensor = torch.from_numpy(data)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for turn in range(ROUNDS + 1):
            for name in times:
                for _ in range(calls_for(numel)):
                    data[:] = 1
                    group.barrier("global", 60.0)
                    began = time.perf_counter()
                    if name == "ours":
                        group.allreduce("global", data, "float32", "sum", 60.0)
                    else:
                        dist.all_reduce(tensor)
                    if turn:  # the first turn warms up
                        times[name].append(time.perf_counter() - began)
                    assert data[-1] == size
        if rank == 0:
            pipe.send({name: statistics.median(values) * 1e6 for name, values in times.items()})
    group.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="comma list of numbers of ranks (default 2,4)")
    options = parser.parse_args()
    print(f"{'ranks':>5}  {'size':>7}  {'ours, us':>10}  {'torch, us':>10}  ratio", flush=True)
    for size in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(size):
                ours, theirs = fork.Pipe()
                processes.append(fork.Process(target=rank_main, args=(rank, size, f"{folder}/store", theirs)))
                processes[-1].start()
                pipes.append(ours)
            blobs = [pipe.recv_bytes() for pipe in pipes]
            for pipe in pipes:
                pipe.send(blobs)
            for name in SIZES:
                medians = pipes[0].recv()
                ratio = medians["torch"] / medians["ours"]
                print(
                    f"{size:5}  {name:>7}  {medians['ours']:10.0f}  {medians['torch']:10.0f}  {ratio:.1f}x", flush=True
                )
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
