"""Horovod's times for the calls that other benchmarks measure, where Horovod is installed; launched by ``horovod.run``.

They do not take turns with ours, as other peers' do: a process can hold only one of the two. They run directly after.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

WARM_UP, TURNS = 1, 3


def installed() -> bool:
    """Whether there is a Horovod to compare with."""
    return importlib.util.find_spec("horovod") is not None


def allreduce_us(ranks: int, calls: Mapping[int, int]) -> dict[int, float] | None:
    """The median time of an allreduce of float32 sums on rank 0.

    Args:
        ranks: how many processes.
        calls: the number of elements -> how many calls a turn.

    Returns:
        Microseconds by the number of elements; None without Horovod.
    """
    return None if not installed() else _run(_allreduce, (dict(calls),), ranks)


def step_ms(ranks: int, model: Callable[[], Any], steps: int) -> float | None:
    """The median step of a DistributedOptimizer with SGD on this model on rank 0.

    Args:
        ranks: how many processes.
        model: makes the model; what it takes is a tensor of one element.
        steps: how many count, behind two that warm up.

    Returns:
        Milliseconds; None without Horovod.
    """
    return None if not installed() else _run(_steps, (model, steps), ranks)


def _run(function: Any, args: tuple[Any, ...], ranks: int) -> Any:
    import cloudpickle
    import horovod

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not have this folder on their path
    return horovod.run(function, args=args, np=ranks, use_gloo=True)[0]


def _allreduce(calls: dict[int, int]) -> dict[int, float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    medians = {}
    for numel, count in calls.items():
        tensor = torch.ones(numel)
        times = []
        for turn in range(WARM_UP + TURNS):
            for _ in range(count):
                tensor.fill_(1.0)
                hvd.barrier()
                began = time.perf_counter()
                hvd.allreduce_(tensor, name=f"gradient.{numel}", op=hvd.Sum)
                if turn >= WARM_UP:
                    times.append(time.perf_counter() - began)
                assert float(tensor[-1]) == hvd.size()
        medians[numel] = statistics.median(times) * 1e6
    return medians


def _steps(make_model: Callable[[], Any], steps: int) -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    start = torch.ones(1, requires_grad=True)
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    distributed = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    times = []
    for turn in range(steps + 2):
        hvd.barrier()
        began = time.perf_counter()
        distributed.zero_grad()
        model(start).sum().backward()
        distributed.step()
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
