"""Operations on tensors of a device, run by test_cuda.py and test_device_lane.py on each rank."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import shared_gpu
import torch
from worker_program import hold, say

import elastic_driver.torch as hvd
from elastic_driver.errors import DeviceLaneError
from elastic_driver.torch.device import groups as device_groups
from elastic_driver.torch.device import lane as lane
from elastic_driver.torch.device.groups import Store
from elastic_driver.worker.engine.collectives import Group
from elastic_driver.worker.engine.torch_collectives import TorchCollectives
from elastic_driver.worker.rounds.process_sets import members_of

shared_gpu.allow()


def collectives(kind: str) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    lanes = lane.torch_lane.takes(members_of(hvd.global_process_set), [torch.ones(1, device=device)])
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for count in (0, 1, 1000, 300_000):
            mine = torch.full((count,), rank + 1, dtype=dtype, device=device)
            summed = hvd.allreduce(mine, op=hvd.Sum)
            assert summed.device == device
            assert summed.dtype == dtype
            assert (summed == sum(range(1, size + 1))).all()
            assert (hvd.allreduce(mine, op=hvd.Max) == size).all()
            hvd.allreduce_(mine, op=hvd.Min, name=f"{dtype}{count}")
            assert (mine == 1).all()
    rows = torch.full((rank + 1, 3), float(rank), device=device)
    gathered = hvd.allgather(rows)
    assert gathered[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    assert (hvd.broadcast(rows[:1], root_rank=1) == 1).all()
    received, splits = hvd.alltoall(torch.arange(size * 2, device=device) + 100 * rank, torch.full((size,), 2))
    assert splits.tolist() == [2] * size
    assert received.tolist() == [100 * r + 2 * rank + k for r in range(size) for k in (0, 1)]
    part = hvd.reducescatter(torch.ones((size * 2, 2), device=device), op=hvd.Sum)
    assert part.shape == (2, 2)
    assert (part == size).all()
    several = hvd.grouped_allreduce([torch.full((n,), rank + 1.0, device=device) for n in (1, 5000)], op=hvd.Average)
    assert all((each == (size + 1) / 2).all() for each in several)
    # Work under way on the caller's stream is waited for, and what comes after waits for the result.
    big = torch.ones((500, 500), device=device)
    for _ in range(5):
        big = hvd.allreduce(big @ big / 500, op=hvd.Average)
    assert torch.allclose(big, torch.ones_like(big))
    weight = torch.ones(3, device=device, requires_grad=True)
    hvd.allreduce(weight * (rank + 1), op=hvd.Average).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == device
    say(ok=True, on_device=lanes, gpus=torch.cuda.device_count())


class FakeGroup:
    """A fast group for CPU tensors: Gloo, with the faults that a test asks for.

    Args:
        store: as the fast group gets it.
        index: of this process.
        size: members.
        fault: "", or what goes wrong in this process.
    """

    def __init__(self, store: Store, index: int, size: int, fault: str) -> None:
        if fault == "fails":
            raise RuntimeError("no transport\nand a second line")
        # As NCCL's process group does: the first member gives all others an id.
        if index == 0:
            store.set("0", b"the id")
        assert store.get("0") == b"the id"
        store.set("exception_dump", b"of no interest to others")
        self._gloo = TorchCollectives(Group("fake", tuple(range(size)), index), "127.0.0.1")
        self._gloo.connect(store._exchange, timeout_s=3600.0)
        self._group = self._gloo.process_group
        self._fault = fault
        self._calls = 0

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> object:
        self._calls += 1
        if self._fault == "hangs":
            threading.Event().wait()
        work = self._group.allreduce(tensors, options)
        if self._fault == "wrong":
            work.wait()
            tensors[0].add_(1)
        return Late(work) if self._fault == "late" and self._calls > 1 else work

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def abort(self) -> None:
        self._gloo.abort("aborted")
        self._gloo.close()


class Late:
    """An operation whose failure shows when the device has finished."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()
        if timeout is not None:
            raise RuntimeError("remote process exited")


def agreement(fault: str, strict: str = "") -> None:
    """All ranks go the same way when one's fast group has a fault; rank 1 has it."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic_driver.worker").addHandler(handler)

    def make(store: Store, index: int, size: int, timeout_s: float) -> FakeGroup:
        return FakeGroup(store, index, size, fault if index == 1 else "")

    device_groups.fast_groups["cpu"] = make
    if fault == "shared":
        device_groups._identity = lambda device: "the only one"  # type: ignore[assignment]
    if strict:
        lane._strict = lambda context: True  # type: ignore[assignment]
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    errors = []
    for _ in range(3):
        try:
            assert hvd.allreduce(torch.full((5,), rank + 1.0), op=hvd.Sum).tolist() == [size * (size + 1) / 2] * 5
            assert hvd.allgather(torch.full((rank, 2), rank)).shape == (size * (size - 1) // 2, 2)
        except DeviceLaneError as error:
            errors.append(str(error))
        except hvd.HorovodInternalError as error:
            errors.append(f"internal: {error}")
            break
    peers = [] if errors else list(members_of(hvd.global_process_set).context.engine.device_runner._peers.values())
    say(ok=True, warnings=warnings, errors=errors, fast=[each._gloo is None for each in peers])


def absent_from_a_set() -> None:
    """A rank that has joined takes part in the operations of a set that it has never used."""
    hvd.init()
    some = hvd.add_process_set([0, 1])
    rank = hvd.rank()
    if rank == 0:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=some).tolist() == [1, 1, 1]
        assert hvd.allreduce(torch.ones(3, dtype=torch.bfloat16), op=hvd.Sum).tolist() == [1, 1, 1]
    say(ok=True, last=hvd.join())


def removed_sets() -> None:
    """The groups of process sets go with them."""
    hvd.init()
    hvd.allreduce(torch.ones(1))
    engine = members_of(hvd.global_process_set).context.engine
    for _ in range(3):
        some = hvd.add_process_set([0, 1])
        if hvd.rank() < 2:
            hvd.allreduce(torch.ones(3), process_set=some)
        hvd.remove_process_set(some)
    deadline = time.monotonic() + 150
    while len(engine.device_runner._peers) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    say(ok=True, left=len(engine.device_runner._peers))
    hvd.barrier()


def ways() -> None:
    """Whether CUDA tensors go on the device, under what the environment says; two processes share a GPU if need be."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    error, on_device = "", False
    try:
        tensor = torch.full((1000,), rank + 1.0, device=device)
        on_device = lane.torch_lane.takes(members_of(hvd.global_process_set), [tensor])
        assert (hvd.allreduce(tensor, op=hvd.Sum) == size * (size + 1) / 2).all()
        model = torch.nn.Linear(30, 1).to(device)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((8, 30), float(rank + step), device=device)).mean().backward()
            optimizer.step()
        weights = hvd.allgather(model.weight.detach())
        assert all(torch.equal(weights[:1], weights[each : each + 1]) for each in range(size))
    except DeviceLaneError as raised:
        error = str(raised)
    say(ok=True, on_device=on_device, error=error, gpus=torch.cuda.device_count())


def _inject(fault: str, at: int) -> None:
    """A fault of this process at its call number ``at`` of the group's allreduce: all have agreed on it by then."""
    calls = 0
    reduce = device_groups.Peers.allreduce

    def allreduce(self: device_groups.Peers, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            if fault in ("kill", "stop"):
                say(fault=fault)
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "never joins":
                say(fault=fault)
                threading.Event().wait()
            if fault == "raises":
                raise RuntimeError("on purpose")
            if fault == "long kernel":
                say(fault=fault)
                torch.cuda._sleep(int(1e12))  # about ten minutes
        reduce(self, *args)

    device_groups.Peers.allreduce = allreduce  # type: ignore[method-assign]


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(step))


def expected_losses(steps: int) -> list[float]:
    """Of one process alone on a CPU, by step: all ranks of ``train`` train on the same data."""
    model, optimizer = _model("cpu")
    return [_turn(model, optimizer, step) for step in range(steps)]


def _model(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def _turn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    data = inputs_of(step).to(next(model.parameters()).device)
    optimizer.zero_grad()
    loss = (model(data) - data[:, :3]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(kind: str, steps: str, fault: str = "", at: str = "0") -> None:
    """An elastic training on tensors of a kind, with a fault of this process in the midst of an operation on them."""
    if fault:
        _inject(fault, int(at))
    hvd.init()
    device = kind
    if kind == "cuda":
        device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    model, base = _model(device)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        on_device = hvd.size() > 1 and lane.torch_lane.takes(
            members_of(hvd.global_process_set), [next(model.parameters())]
        )
        while state.step < int(steps):
            hold(state.step)
            loss = _turn(model, optimizer, state.step)
            say(step=state.step, loss=loss, size=hvd.size(), pid=os.getpid(), on_device=on_device, at=time.time())
            state.step += 1
            state.commit()

    loop(state)
    assert all(param.device == torch.device(device) for param in model.parameters())
    say(done=True, threads=sorted(thread.name for thread in threading.enumerate()))
