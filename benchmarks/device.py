"""CUDA tensors: allreduce and a step by the device lane and on copies against torch's NCCL; commit() and restore().

    python benchmarks/device.py [--turns 20]

Two ranks on this machine. Where it has one GPU they share it: each is then a machine of its own to NCCL, which connects
them by TCP on loopback (tests/support/programs/shared_gpu.py), so that only the ratios mean something.

allreduce: float32 sums; a call from its submission until the device has the result, median of rank 0 in microseconds.
"nccl" is torch.distributed's group on the same GPUs, "lane" our device lane, "copies" the engine on copies in the
host's memory. The ratio is ours over nccl's. step: zero_grad, forward, backward and SGD of 25 million parameters in 161
tensors by DistributedOptimizer, and by DistributedDataParallel over NCCL. commit: 100 MB of parameters with Adam's
state, 300 MB in all, on the GPU: TorchState's commit; ``copy.deepcopy`` of the state dicts, which stays on the GPU, as
Horovod's state has it; and the bare copy of the same bytes to the host, into pageable memory and into pinned.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import elastic_driver

PATHS = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
SIZES = {"4 KB": 1 << 10, "256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}  # elements


def timed(run: Callable[[], object], turns: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for turn in range(turns + 2):
        before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def rank_main(paths: list[str], turns: int) -> dict[str, float]:
    sys.path[:0] = paths
    import torch.distributed as dist
    from optimizer import Model, sgd, stepper

    import elastic_driver.torch as hvd
    from elastic_driver.torch.device import lane
    from elastic_driver.worker.rounds.process_sets import members_of
    from tests.support.programs import shared_gpu

    shared_gpu.allow()
    hvd.init()
    device = torch.device("cuda", hvd.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    by_lane = lane.torch_lane.takes(members_of(hvd.global_process_set), [torch.ones(1, device=device)])
    way = "lane" if by_lane else "copies"
    group = hvd.process_group() if by_lane else None
    found: dict[str, float] = {}
    for name, count in SIZES.items():
        data = torch.ones(count, device=device)
        few = max(5, turns // 4) if count >= 1 << 20 else turns
        found[f"{way} {name}"] = timed(partial(hvd.allreduce_, data, op=hvd.Max, name=name), few, hvd.barrier) * 1e6
        if group is not None:
            maximum = partial(dist.all_reduce, data, op=dist.ReduceOp.MAX, group=group)
            found[f"nccl {name}"] = timed(maximum, few, hvd.barrier) * 1e6
            found[f"nccl sum {name}"] = timed(partial(dist.all_reduce, data, group=group), few, hvd.barrier) * 1e6
        total = partial(hvd.allreduce_, data, op=hvd.Sum, name=f"sum {name}")
        found[f"{way} sum {name}"] = timed(total, few, hvd.barrier) * 1e6
    ours = Model().to(device)
    step = stepper(ours, hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters()), "cuda")
    found[f"{way} step"] = timed(step, 5, hvd.barrier) * 1e6
    if group is not None:
        ddp = torch.nn.parallel.DistributedDataParallel(Model().to(device), process_group=group)
        found["nccl step"] = timed(stepper(ddp, sgd(ddp), "cuda"), 5, hvd.barrier) * 1e6
    hvd.barrier()
    return found


def commits(turns: int) -> dict[str, float]:
    from optimizer import with_adams_state

    import elastic_driver.torch as hvd

    hvd.init()
    model, optimizer = with_adams_state("cuda")
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    sources = [param.detach() for _ in range(3) for param in model.parameters()]
    hosts = {
        "pageable": [torch.zeros_like(source, device="cpu") for source in sources],
        "pinned": [torch.zeros_like(source, device="cpu").pin_memory() for source in sources],
    }

    def bare(kind: str) -> None:
        for host, source in zip(hosts[kind], sources, strict=True):
            host.copy_(source, non_blocking=kind == "pinned")

    kept: list[object] = [None]

    def deep() -> None:
        kept[0] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    return {
        "commit": timed(state.commit, turns) * 1e3,
        "deepcopy": timed(deep, turns) * 1e3,
        "bare pageable": timed(lambda: bare("pageable"), turns) * 1e3,
        "bare pinned": timed(lambda: bare("pinned"), turns) * 1e3,
        "restore": timed(state.restore, turns) * 1e3,
        "commit again": timed(state.commit, turns) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="turns that count (default 20)")
    options = parser.parse_args()
    enough = torch.cuda.device_count() >= 2
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    for name, value in commits(options.turns).items():
        print(f"{name:16} {value:8.1f} ms")
    found: dict[str, float] = {}
    for device_lane in ("cuda", "off"):
        env = {"ELASTIC_DRIVER_DEVICE_LANE": device_lane} | ({} if enough else {"SHARE_GPU": "1"})
        where = {"np": 2} if enough else {"np": 2, "hosts": "localhost:1,127.0.0.1:1"}
        found |= elastic_driver.run(rank_main, args=(sys.path[:2], options.turns), env={**os.environ, **env}, **where)[
            0
        ]
    for name in [*SIZES, *(f"sum {name}" for name in SIZES), "step"]:
        nccl, lane, copies = (found[f"{way} {name}"] for way in ("nccl", "lane", "copies"))
        print(
            f"{name:12} nccl {nccl:9.0f} us   lane {lane:9.0f} us {lane / nccl:5.2f}x"
            f"   copies {copies:9.0f} us {copies / nccl:5.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
