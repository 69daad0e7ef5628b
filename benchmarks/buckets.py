"""What the size of gradient buckets costs or saves: a training step of two ranks with 32 MB of gradients.

    python benchmarks/buckets.py [--ranks 2] [--turns 8] [--megabytes 1,4,8,25]

The sizes take turns within one job, so that a busy moment of the machine falls on all of them. Printed for each size:
the median of rank 0's steps in milliseconds and the quarters around it. A step is forward, backward and the optimizer's
step of eight linear layers of 4 MB; the first bucket has 1 MB where the others are larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WARM_UP = 3
STEPS = 10
WIDTH = 1024
LAYERS = 8


def train(turns: int, sizes: list[float]) -> None:
    """What each rank runs."""
    import torch

    import elastic_driver.torch as hvd
    from elastic_driver.torch.optimizer import reducer

    hvd.init()
    torch.set_num_threads(1)
    data = torch.randn(8, WIDTH)
    times: dict[float, list[float]] = {size: [] for size in sizes}
    for turn in range(turns):
        for size in sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]:
            reducer.BUCKET_BYTES = int(size * (1 << 20))
            reducer.FIRST_BUCKET_BYTES = min(1 << 20, reducer.BUCKET_BYTES)
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
            )
            for step in range(WARM_UP + STEPS):
                hvd.barrier()
                began = time.perf_counter()
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
                if step >= WARM_UP:
                    times[size].append(time.perf_counter() - began)
    if hvd.rank() == 0:
        for size, taken in times.items():
            low, middle, high = statistics.quantiles(taken, n=4)
            print(f"{size:5g} MB: {middle * 1e3:6.1f} ms ({low * 1e3:.1f}..{high * 1e3:.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--megabytes", default="1,4,8,25")
    options = parser.parse_args()
    if "ELASTIC_DRIVER_WORKER" in os.environ:
        train(options.turns, [float(size) for size in options.megabytes.split(",")])
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"{options.ranks} ranks on {cores} cores, load {load:.1f} before the start", flush=True)
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "elastic_driver", "-np", str(options.ranks), sys.executable, *sys.argv]
    env = {**os.environ, "PYTHONPATH": str(root), "ELASTIC_DRIVER_HISTORY": "off"}
    sys.exit(subprocess.run(command, env=env, check=False).returncode)


if __name__ == "__main__":
    main()
