"""A training over torch.distributed's process group of the round: ``distributed_program.py KIND``; DDP, ZeRO or FSDP2.

All ranks train on the same data, which follow from the step, so that the losses are those of one process alone:
``expected_losses``, which ``losses-STEPS`` prints as JSON. Appends a JSON line for each step to STEP_LOG: time, pid,
rank, size, step, loss, round.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import shared_gpu
import torch
import torch.distributed as dist

STEPS = 100_000
PAUSE_S = 0.02
WIDTHS = (13, 30, 7)  # so that shards are of different sizes; tensor parallelism divides the one in the middle


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    a, b, c = WIDTHS
    return torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, c))


class Compiled(torch.nn.Module):
    """The same, as a class of the program's own: torch compiles no forward of its own modules under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        a, tanh, b = self.layers
        made: torch.Tensor = b(tanh(a(data)))
        return made


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> torch.Tensor:
    data = batch(step).to(next(model.parameters()).device)
    loss: torch.Tensor = (model(data) - data[:, : WIDTHS[-1]]).square().mean()
    return loss


def expected_losses(steps: int) -> list[float]:
    """Of one process, by step."""
    model = build()
    optimizer = adam(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Log:
    def __init__(self) -> None:
        self._file = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process

    def step(self, step: int, loss: float = 0.0, **more: Any) -> None:
        line = {"time": time.time(), "pid": os.getpid(), "rank": dist.get_rank(), "size": dist.get_world_size()}
        self._file.write(json.dumps({**line, "step": step, "loss": loss, **more}) + "\n")


def held(step: int) -> None:
    """Waits while a test holds this step: a file named after it in HOLD."""
    folder = os.environ.get("HOLD")
    while folder and (Path(folder) / str(step)).exists():
        time.sleep(0.01)


def own_gpu(hvd: Any) -> str:
    device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def ddp_state(hvd: Any, device: str = "cpu") -> Any:
    model = build().to(device)
    return hvd.elastic.DDPState(model=model, optimizer=adam(model), step=0)


def train_ddp(hvd: Any, log: Log, kind: str) -> None:
    state = ddp_state(hvd, own_gpu(hvd) if kind == "cuda" else "cpu")

    @hvd.elastic.run
    def train(state: Any) -> None:
        side = None
        if kind == "cuda":
            assert "nccl" in str(dist.get_backend_config(hvd.process_group()))
        if kind == "plain":  # as scripts do it that know of torch's default group only
            hvd.process_group()
            trained = torch.nn.parallel.DistributedDataParallel(state.model)
            side = dist.new_group(list(range(dist.get_world_size())))
            use_the_rest_of_torch()
        else:
            trained = state.ddp
        while state.step < STEPS:
            time.sleep(PAUSE_S)
            held(state.step)
            if kind == "error" and state.step == 5 and dist.get_rank() == 1:
                raise RuntimeError("an error of the user's own")
            state.optimizer.zero_grad()
            loss = loss_of(trained, state.step)
            loss.backward()
            state.optimizer.step()
            if side is not None:
                dist.all_reduce(torch.ones(1), group=side)
            log.step(state.step, loss.item())
            state.step += 1
            state.commit()

    train(state)


def train_compiled(hvd: Any, log: Log, kind: str) -> None:
    """Says at each step how many graphs torch has compiled so far.

    ``outside``: the wrapper of the round. ``ahead``: the model, for batches of any size, before it joins; its batches
    have another size in each world. ``sharded``: the model that FSDP2 shards, made anew in each round.
    """
    from torch._dynamo.utils import counters
    from torch.distributed.fsdp import fully_shard

    def make(mesh: Any) -> tuple[Any, Any]:
        sharded = Compiled()
        sharded.compile(backend="aot_eager")
        fully_shard(sharded, mesh=mesh)
        return sharded, adam(sharded)

    model = Compiled()
    if kind == "sharded":
        state = hvd.elastic.FSDPState(make, step=0)
    else:
        state = hvd.elastic.DDPState(model=model, optimizer=adam(model), step=0)
    if kind == "ahead":
        model.compile(backend="aot_eager", dynamic=True)
        hvd.compile_ahead(model, lambda model: loss_of(model, 0).backward())
        assert all(param.grad is None for param in model.parameters())
    ahead = counters["stats"]["unique_graphs"]

    @hvd.elastic.run
    def train(state: Any) -> None:
        trained = state.model if kind == "sharded" else state.ddp
        if kind == "outside":
            trained = torch.compile(trained, backend="aot_eager")
        while state.step < STEPS:
            time.sleep(PAUSE_S)
            data = batch(state.step)[: 8 - hvd.size() if kind == "ahead" else 8]
            state.optimizer.zero_grad()
            loss = (trained(data) - data[:, : WIDTHS[-1]]).square().mean()
            loss.backward()
            state.optimizer.step()
            log.step(state.step, loss.item(), graphs=counters["stats"]["unique_graphs"], ahead=ahead)
            state.step += 1
            state.commit()

    train(state)


def use_the_rest_of_torch() -> None:
    """What takes the default group by itself: device meshes, DTensor, objects, barriers, its store, a sampler."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    whole = torch.arange(12.0)
    assert torch.equal(distribute_tensor(whole, mesh["inner"], [Shard(0)]).full_tensor(), whole)
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, dist.get_rank())
    assert ranks == list(range(size))
    dist.monitored_barrier()
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    dist.barrier()
    assert store.add("here", 0) == size
    samples: Any = list(range(4 * size))
    assert len(torch.utils.data.DistributedSampler(samples)) == 4


def begin_anew(state: Any) -> None:
    """In place of a checkpoint: the model is as it was made."""
    state.step = 0


def fsdp_state(hvd: Any, *, copies: bool = True, load: Any = None, pairs: bool = False, device: str = "cpu") -> Any:
    """With ``pairs``, two neighboring ranks divide each layer by tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make(mesh: Any) -> tuple[Any, Any]:
        model = build().to(device)
        if pairs:
            both = init_device_mesh(mesh.device_type, (mesh.size() // 2, 2), mesh_dim_names=("data", "tensor"))
            parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = both["data"]
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, adam(model)

    return hvd.elastic.FSDPState(make, copies=copies, load=load, step=0)


def train_fsdp(hvd: Any, log: Log, kind: str) -> None:
    state = fsdp_state(
        hvd,
        copies=kind in ("", "pairs", "cuda"),
        pairs=kind == "pairs",
        load=begin_anew if kind == "load" else None,
        device=own_gpu(hvd) if kind == "cuda" else "cpu",
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            time.sleep(PAUSE_S)
            held(state.step)
            state.optimizer.zero_grad()
            loss = loss_of(state.model, state.step)
            loss.backward()
            state.optimizer.step()
            log.step(state.step, loss.item())
            state.step += 1
            state.commit()

    train(state)


def zero_state(hvd: Any, *, copies: bool = True, device: str = "cpu") -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = build().to(device)

    def make(group: Any) -> Any:
        options = {"process_group": group, "parameters_as_bucket_view": not copies, "lr": 1e-2}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        return optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10**9)}

    return hvd.elastic.ZeroState(model, make, copies=copies, step=0)


def train_zero(hvd: Any, log: Log, kind: str) -> None:
    state = zero_state(hvd, copies=kind != "bare", device=own_gpu(hvd) if kind == "cuda" else "cpu")

    @hvd.elastic.run
    def train(state: Any) -> None:
        model = state.ddp
        while state.step < STEPS:
            time.sleep(PAUSE_S)
            held(state.step)
            state.optimizer.zero_grad()
            loss = loss_of(model, state.step)
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
            here = len(state.optimizer.optim.state)
            log.step(state.step, loss.item(), states=here, steps=state.scheduler.last_epoch)
            state.step += 1
            state.commit()

    train(state)


RESETS = 50


def reset_often(hvd: Any, log: Log, state: Any) -> None:
    """Resets after each commit until there are RESETS, and then says what is left of all those rounds."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    process = psutil.Process()

    @hvd.elastic.run
    def train(state: Any) -> None:
        model = state.ddp if hasattr(state, "ddp") else state.model
        made.update([hvd.process_group(), model])
        state.optimizer.zero_grad()
        loss_of(model, state.step).backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        figures = {"fds": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss}
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            figures["gpu"] = total - free
        log.step(state.step, **figures)
        if state.step < RESETS:
            raise hvd.HorovodInternalError("once more")
        del model
        gc.collect()
        log.step(state.step, left=len(made), groups=len(dist.distributed_c10d._world.pg_map), hook=hook_depth())

    train(state)


def check_nothing_is_left(lines: list[dict[str, Any]]) -> None:
    """Of the rounds of ``reset_often``, by what one rank has said."""
    rounds = [line for line in lines if "fds" in line]
    # A rank may learn of the other's error before it comes to its own: which of them does so more often is chance.
    assert len(rounds) > 12
    early, late = rounds[10], rounds[-1]
    assert late["fds"] <= early["fds"] + 10  # what is being freed in the background, at most
    assert late["threads"] <= early["threads"] + 10
    assert late["rss"] <= early["rss"] + (40 << 20)
    assert late.get("gpu", 0) <= early.get("gpu", 0) + (300 << 20), "of a whole GPU: another communicator or two"
    assert lines[-1]["groups"] == 1
    assert lines[-1]["left"] <= 4, "of two objects a round, those of the last two rounds"
    assert lines[-1]["hook"] <= 2


def hook_depth() -> int:
    """How many functions stand around Python's own excepthook: torch wraps it each time."""
    depth, hook = 0, sys.excepthook
    while hook is not sys.__excepthook__ and depth < 1000:
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        hook = next((cell for cell in cells if callable(cell)), sys.__excepthook__)
        depth += 1
    return depth


def main() -> None:
    import elastic_driver.torch as hvd

    way, _, kind = sys.argv[1].partition("-")
    if way == "losses":
        print(json.dumps(expected_losses(int(kind))))
        return
    shared_gpu.allow()
    hvd.init()
    log = Log()
    make = {"ddp": ddp_state, "fsdp": fsdp_state, "zero": zero_state}.get(way)
    if kind == "resets" and make is not None:
        reset_often(hvd, log, make(hvd))
    elif kind == "cuda-resets" and make is not None:
        reset_often(hvd, log, make(hvd, device=own_gpu(hvd)))
    elif way == "ddp":
        train_ddp(hvd, log, kind)
    elif way == "compiled":
        train_compiled(hvd, log, kind)
    elif way == "zero":
        train_zero(hvd, log, kind)
    else:
        train_fsdp(hvd, log, kind)


if __name__ == "__main__":
    main()
