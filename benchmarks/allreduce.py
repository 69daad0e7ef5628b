"""allreduce of float32 sums: our engine and our Gloo contexts against torch.distributed's Gloo, taking turns.

    python benchmarks/allreduce.py [--ranks 2,4]

Each rank is a process on this machine. Median of the calls' times on rank 0, after a barrier and a warm-up, in
microseconds; the ratios are torch's time over the engine's and over the contexts'. The engine's time is a whole call:
submitting, agreeing with the other ranks, reducing, waking the caller. "copy" is the yardstick: each rank copying that
much memory at the same time; the last column is the engine's distance to it. Where Horovod is installed, its time and
the ratio to ours follow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import horovod_peer
import numpy as np
import torch
import torch.distributed as dist

from elastic_driver.worker.engine import native_loader
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec

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
    engine: Any = native.Engine(
        rank,
        size,
        fusion_bytes=0,
        stall_warn_s=0,
        stall_fail_s=0,
        timeout_s=60.0,
        shared_memory=True,
        direct_reads=True,
    )
    pipe.send((group.prepare(), engine.prepare("127.0.0.1")))
    blobs = pipe.recv()
    group.connect([pair[0] for pair in blobs], 60.0)
    engine.connect(blobs[0][1], 60.0)
    engine.add_process_set(0, range(size), None)
    engine.start()
    for numel in SIZES.values():
        data = np.ones(numel, np.float32)
        tensor = torch.from_numpy(data)
        other = np.ones(numel, np.float32)
        spec = TensorSpec(data.ctypes.data, data.nbytes, "float32", data.shape, data.ctypes.data)
        operation = Operation(Kind.ALLREDUCE, (spec,), name=f"gradient.{numel}")
        times: dict[str, list[float]] = {"engine": [], "contexts": [], "torch": [], "copy": []}
        for turn in range(ROUNDS + 1):
            for name in times:
                for _ in range(calls_for(numel)):
                    data[:] = 1
                    engine.submit(Operation(Kind.BARRIER)).wait()
                    began = time.perf_counter()
                    if name == "engine":
                        engine.submit(operation).wait()
                    elif name == "contexts":
                        group.allreduce("global", data, "float32", "sum", 60.0)
                    elif name == "torch":
                        dist.all_reduce(tensor)
                    else:
                        np.copyto(other, data)
                    if turn:  # the first turn warms up
                        times[name].append(time.perf_counter() - began)
                    assert name == "copy" or data[-1] == size
        if rank == 0:
            pipe.send({name: statistics.median(values) * 1e6 for name, values in times.items()})
    engine.submit(Operation(Kind.BARRIER)).wait()
    engine.close()
    group.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="comma list of numbers of ranks (default 2,4)")
    options = parser.parse_args()
    names = ("engine", "contexts", "torch", "copy")
    print(
        f"{'ranks':>5}  {'size':>7}  "
        + "  ".join(f"{name:>8}" for name in names)
        + "  ratio: engine  contexts  engine/copy"
    )
    for size in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(size):
                ours, theirs = fork.Pipe()
                processes.append(fork.Process(target=rank_main, args=(rank, size, f"{folder}/store", theirs)))
                processes[-1].start()
                pipes.append(ours)
            blobs = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(blobs)
            found = [pipes[0].recv() for _ in SIZES]
            for process in processes:
                process.join()
            calls = {numel: calls_for(numel) for numel in SIZES.values()}
            horovod = horovod_peer.allreduce_us(size, calls)
            for (name, numel), medians in zip(SIZES.items(), found, strict=True):
                ratios = [f"{medians['torch'] / medians[each]:.1f}x" for each in ("engine", "contexts")]
                values = "  ".join(f"{medians[each]:8.0f}" for each in names)
                distance = f"{medians['engine'] / medians['copy']:.1f}x"
                peer = ""
                if horovod is not None:
                    peer = f"  horovod {horovod[numel]:.0f}, {horovod[numel] / medians['engine']:.1f}x"
                print(
                    f"{size:5}  {name:>7}  {values}  {ratios[0]:>13}  {ratios[1]:>8}  {distance:>11}{peer}", flush=True
                )


if __name__ == "__main__":
    main()
