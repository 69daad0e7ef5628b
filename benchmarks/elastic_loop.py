"""The training loop that benchmarks/elastic.py measures: 4 MB of gradient, 50 ms of sleep, a commit each step.

BENCH_WORKER says what carries the gradients: "ours" (the default), DistributedOptimizer; or "ddp", torch's
DistributedDataParallel in place, over the round's process group; or "fsdp" and "hsdp", where the model is sharded over
all ranks, or over pairs of them. With BENCH_DEVICE=cuda it trains on GPUs (but for "fsdp" and "hsdp"), over NCCL where
that is possible.

Appends a JSON line for each step to STEP_LOG: time (unix s), pid, rank, size, step; and one for each stage of a change
to MARK_LOG, if that is given: time, pid, mark. The marks, in the order of a change:

    told       the driver's notice has come
    left       the training function was left: the collective under way has failed, or a commit has found the notice
    asked      what was done since the last commit is undone, and the driver is asked for the next round
    met        it has answered
    connected  the engine of the new round stands
    synced     the state is equal on all ranks, and the training function is called again
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import elastic_driver.torch as hvd
from elastic_driver.errors import HostsUpdatedInterrupt
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.runtime import Runtime

STEPS = int(os.environ.get("BENCH_STEPS", "100000"))
COMPUTE_S = 0.05
NUMEL = 1 << 20  # float32: 4 MB
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")


def marking() -> Callable[[str], None]:
    """What writes a mark; nothing where there is no file for them."""
    if "MARK_LOG" not in os.environ:
        return lambda name: None
    log = open(os.environ["MARK_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    def mark(name: str) -> None:
        log.write(json.dumps({"time": time.time(), "pid": os.getpid(), "mark": name}) + "\n")

    # What comes of the driver passes through these two, and nothing that a script can hook into tells of it.
    on_abort, on_hosts_updated, ask = Context.on_abort, Context.on_hosts_updated, Runtime._ask

    def aborts(self: Context, reason: str) -> None:
        mark("told")
        on_abort(self, reason)

    def changes(self: Context, *, leave: bool, reason: str) -> None:
        if leave:
            mark("told")
        on_hosts_updated(self, leave=leave, reason=reason)

    def asks(self: Runtime, *args: Any, **more: Any) -> Any:
        mark("asked")
        answer = ask(self, *args, **more)
        mark("met")
        return answer

    for owner, name, function in (
        (Context, "on_abort", aborts),
        (Context, "on_hosts_updated", changes),
        (Runtime, "_ask", asks),
    ):
        setattr(owner, name, function)
    return mark


def sharded(mesh: Any) -> Any:
    """The same model by FSDP2, on a mesh of all ranks, or of pairs of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if os.environ["BENCH_WORKER"] == "hsdp":
        mesh = init_device_mesh("cpu", (hvd.size() // 2, 2), mesh_dim_names=("copies", "shards"))
    model = torch.nn.Sequential(torch.nn.Linear(1024, NUMEL // 1024, bias=False))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def main() -> None:
    mark = marking()
    if DEVICE == "cuda":
        from tests.support.programs import shared_gpu

        shared_gpu.allow()
    hvd.init()
    device = torch.device("cpu")
    if DEVICE == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    kind = os.environ.get("BENCH_WORKER")
    is_ddp, is_sharded = kind == "ddp", kind in ("fsdp", "hsdp")
    model: Any = None
    optimizer: Any = None
    state: Any
    if is_sharded:
        state = hvd.elastic.FSDPState(sharded, step=0)
    else:
        model = torch.nn.Linear(1024, NUMEL // 1024, bias=False, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if is_ddp:
        state = hvd.elastic.DDPState(model=model, optimizer=optimizer, step=0)
    elif not is_sharded:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(4, 1024, device=device)
    state.register_reset_callbacks([lambda: mark("connected")])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        mark("synced")
        try:
            steps(state)
        except (RuntimeError, HostsUpdatedInterrupt):  # of which HorovodInternalError is one
            mark("left")
            raise

    def steps(state: hvd.elastic.TorchState) -> None:
        trained = state.ddp if is_ddp else state.model if is_sharded else model
        updates = state.optimizer if is_sharded else optimizer
        while state.step < STEPS:
            time.sleep(COMPUTE_S)
            updates.zero_grad()
            trained(data).square().mean().backward()
            updates.step()
            state.step += 1
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
