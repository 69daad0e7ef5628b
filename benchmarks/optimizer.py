"""A training step of 25 million parameters: DistributedOptimizer against DistributedDataParallel on Gloo.

    python benchmarks/optimizer.py [--ranks 2,4] [--steps 8]

The model has the 161 parameters of a ResNet-50 and next to no computing: its backward pass makes each gradient once, in
the usual order. A step is zero_grad, forward, backward and SGD's step. "grouped" is an allreduce of the 161 gradients
alone: grouped_allreduce_ against torch's all_reduce of each (async, then all waited for) and its all_reduce_coalesced.
Each rank is a process on this machine, with one thread; the competitors take turns. Median of rank 0's times in
milliseconds, each after a barrier; ratios are torch's time over ours. Where Horovod is installed, its step as well.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import horovod_peer
import torch
import torch.distributed as dist

import elastic_driver
import elastic_driver.torch as hvd


def shapes() -> Iterator[tuple[int, ...]]:
    """The parameters of a ResNet-50, in order."""

    def convolution(out: int, into: int, width: int) -> Iterator[tuple[int, ...]]:
        yield from ((out, into, width, width), (out,), (out,))  # and the weight and bias of its norm

    yield from convolution(64, 3, 7)
    into = 64
    for blocks, planes in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            yield from convolution(planes, into, 1)
            yield from convolution(planes, planes, 3)
            yield from convolution(planes * 4, planes, 1)
            if block == 0:
                yield from convolution(planes * 4, into, 1)
            into = planes * 4
    yield from ((1000, 2048), (1000,))


def with_adams_state(device: str = "cpu") -> tuple[torch.nn.ParameterList, torch.optim.Adam]:
    """Such a model of 100 MB, and its optimizer, which has its state: 300 MB in all."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes()])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Touch(torch.autograd.Function):
    """Passes its input on; the parameter gets a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.like = param.detach()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], torch.ones_like(ctx.like)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes()])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for param in self.params:
            value = Touch.apply(value, param)
        return value


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def stepper(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> Callable[[], None]:
    """A step of the training."""
    start = torch.ones(1, requires_grad=True, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(start).sum().backward()
        optimizer.step()

    return step


def rank_main(file: str, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size())
    ours, alone = Model(), Model()
    models = [
        torch.nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=view) for view in (False, True)
    ]
    tensors = [torch.ones(shape) for shape in shapes()]
    assert len(tensors) == 161
    assert sum(tensor.numel() for tensor in tensors) == 25_557_032

    def one_by_one() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def coalesced() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it says that it may change
            dist.all_reduce_coalesced(tensors)

    competitors: dict[str, Callable[[], object]] = {
        "step": stepper(ours, hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters())),
        "ddp": stepper(models[0], sgd(models[0])),
        "ddp views": stepper(models[1], sgd(models[1])),
        "alone": stepper(alone, sgd(alone)),
        "grouped": lambda: hvd.grouped_allreduce_(tensors, name="gradients", op=hvd.Max),
        "torch each": one_by_one,
        "torch coalesced": coalesced,
    }
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for turn in range(steps + 2):
        for name, run in competitors.items():
            if "torch" in name:
                for tensor in tensors:
                    tensor.fill_(1.0)
            hvd.barrier()
            began = time.perf_counter()
            run()
            if turn >= 2:  # the first two warm up: DDP lays its buckets out anew after the first
                times[name].append(time.perf_counter() - began)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), models[0].parameters(), strict=True))
    hvd.barrier()
    dist.destroy_process_group()
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="comma list of numbers of ranks (default 2,4)")
    parser.add_argument("--steps", type=int, default=8, help="turns that count (default 8)")
    options = parser.parse_args()
    for size in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            medians = elastic_driver.run(rank_main, args=(f"{folder}/store", options.steps), np=size)[0]
        horovod = horovod_peer.step_ms(size, Model, options.steps)
        if horovod is not None:
            medians["horovod"] = horovod
        print(f"{size} ranks: " + "  ".join(f"{name} {value:.0f} ms" for name, value in medians.items()))
        ratios = [("ddp", "step"), ("ddp views", "step"), ("torch each", "grouped"), ("torch coalesced", "grouped")]
        ratios += [("horovod", "step")] if horovod is not None else []
        print("   " + "  ".join(f"{a} / {b} {medians[a] / medians[b]:.2f}x" for a, b in ratios), flush=True)


if __name__ == "__main__":
    main()
