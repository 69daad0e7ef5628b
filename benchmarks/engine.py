"""How soon the engine's waits end, and what a step's negotiation costs.

    python benchmarks/engine.py [--trials 30]

- abort: from abort() on another thread to the end of a blocked wait, in milliseconds: of an operation that others have
  not submitted, and of one inside shared memory whose peer is stopped (SIGSTOP).
- death: from SIGKILL of a peer to the end of the others' waits.
- step: 161 small tensors submitted one by one and waited for, as a training step does, against the same tensors through
  torch.distributed's Gloo one by one. 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from meetings import PipeMeeting, meet

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.native import NativeEngine
from elastic_driver.worker.engine.protocol import Kind, Operation, TensorSpec

fork = multiprocessing.get_context("fork")
Body = Callable[[NativeEngine, int, int, Connection], None]


def summed(array: np.ndarray[Any, Any], name: str) -> Operation:
    spec = TensorSpec(array.ctypes.data, array.nbytes, array.dtype.name, array.shape, array.ctypes.data)
    return Operation(Kind.ALLREDUCE, (spec,), name=name)


def main_of_rank(rank: int, size: int, pipe: Connection, body: Body) -> None:
    engine = NativeEngine(rank, size, "127.0.0.1", timeout_s=60.0)
    engine.connect(PipeMeeting(pipe), timeout_s=60.0)
    body(engine, rank, size, pipe)
    engine.close()


def world(size: int, body: Body) -> tuple[list[Any], list[Connection]]:
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        processes.append(fork.Process(target=main_of_rank, args=(rank, size, theirs, body)))
        processes[-1].start()
        pipes.append(ours)
    meet(pipes)
    return processes, pipes


def report(what: str, values: list[float]) -> None:
    print(f"{what:42}  median {statistics.median(values) * 1e3:6.2f} ms, worst {max(values) * 1e3:6.2f} ms", flush=True)


def aborted(engine: NativeEngine, rank: int, size: int, pipe: Connection) -> None:
    if rank == 0:
        array = np.ones(10, np.float32)
        handle = engine.submit(summed(array, "alone"))
        at = [0.0]

        def abort() -> None:
            time.sleep(0.05)
            at[0] = time.perf_counter()
            engine.abort("a benchmark")

        threading.Thread(target=abort).start()
        try:
            handle.result()
        except HorovodInternalError:
            pipe.send(time.perf_counter() - at[0])
    pipe.recv()


def inside(engine: NativeEngine, rank: int, size: int, pipe: Connection) -> None:
    """Allreduces until it fails. A message is the word to abort."""
    array = np.ones(1 << 22, np.float32)
    at = [0.0]

    def abort() -> None:
        pipe.recv()
        at[0] = time.perf_counter()
        engine.abort("a benchmark")

    threading.Thread(target=abort, daemon=True).start()
    try:
        for step in range(10**9):
            if step == 3:
                pipe.send("goes")
            engine.submit(summed(array, "step")).result()
    except HorovodInternalError:
        pipe.send((time.perf_counter() - at[0] if at[0] else 0.0, time.time()))


def step_of(engine: NativeEngine, rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    arrays = [np.ones(256 + 16 * i, np.float32) for i in range(161)]
    tensors = [torch.from_numpy(array) for array in arrays]
    operations = [summed(array, f"grad.{i}") for i, array in enumerate(arrays)]
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for turn in range(21):
        for name in times:
            engine.submit(Operation(Kind.BARRIER)).result()
            began = time.perf_counter()
            if name == "ours":
                for handle in [engine.submit(operation) for operation in operations]:
                    handle.result()
            else:
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()
            if turn:
                times[name].append(time.perf_counter() - began)
    if rank == 0:
        pipe.send({name: statistics.median(values) for name, values in times.items()})
    engine.submit(Operation(Kind.BARRIER)).result()
    dist.destroy_process_group()


def end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    options = parser.parse_args()

    waits: list[float] = []
    frozen: list[float] = []
    dead: list[float] = []
    for trial in range(options.trials):
        processes, pipes = world(3, aborted)
        waits.append(pipes[0].recv())
        end(processes)

        processes, pipes = world(3, inside)
        for pipe in pipes:
            pipe.recv()
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(0.1)
        pipes[0].send("abort")
        frozen.append(pipes[0].recv()[0])
        end(processes)

        processes, pipes = world(3, inside)
        for pipe in pipes:
            pipe.recv()
        victim = trial % 3
        processes[victim].kill()
        at = time.time()
        dead += [pipe.recv()[1] - at for rank, pipe in enumerate(pipes) if rank != victim]
        end(processes)
    report("abort of an operation that others lack", waits)
    report("abort inside shared memory, peer stopped", frozen)
    report("SIGKILL of a peer until the others' error", dead)

    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["STORE"] = f"{folder}/store"
            processes, pipes = world(size, step_of)
            medians = pipes[0].recv()
            for process in processes:
                process.join()
        ours, theirs = medians["ours"] * 1e3, medians["torch"] * 1e3
        print(f"step of 161 tensors, {size} ranks: ours {ours:.2f} ms, torch {theirs:.2f} ms, {theirs / ours:.1f}x")


if __name__ == "__main__":
    main()
