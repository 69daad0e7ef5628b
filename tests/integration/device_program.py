"""Collectives on tensors of a device, run by test_cuda.py on each rank: ``device_program.collectives DEVICE``."""

from __future__ import annotations

import torch
from worker_program import say

import elastic_driver.torch as hvd
from elastic_driver.torch import device as lane
from elastic_driver.worker.process_sets import members_of


def collectives(kind: str) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    lanes = lane.takes(members_of(hvd.global_process_set), [torch.ones(1, device=device)])
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
    say(ok=True, lane=lanes)
