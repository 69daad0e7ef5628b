"""What a commit of FSDPState costs, with copies on the next host and without, next to a step of training.

    python benchmarks/shards.py [--workers 4] [--megabytes 16] [--turns 10]

Half of the workers are on localhost, half on 127.0.0.1, which count as two hosts; so the copies cross from one process
to another over loopback, and not over a network. A model of so many megabytes is trained by FSDP2 with AdamW, whose
state is twice that. The ways take turns of five steps each, in one job. Median milliseconds on rank 0:

- step: forward, backward and the optimizer;
- commit: the call;
- both: a step and the commit after it. Copies travel during the step that follows, so that what they cost shows here.

Then each way's ``both`` as a multiple of that without any commit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

WAYS = ("none", "without", "with")
STEPS = 5


def train(megabytes: int, turns: int) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    import elastic_driver.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    width = 1024
    layers = max(1, megabytes * (1 << 20) // (4 * width * width))

    def make(mesh: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    state = hvd.elastic.FSDPState(make)
    data = torch.randn(8, width)
    figures: dict[str, dict[str, list[float]]] = {way: {"step": [], "commit": [], "both": []} for way in WAYS}

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for turn in range(turns + 1):
            for way in WAYS:
                state._settle()
                state._copies = way == "with"
                for step in range(STEPS):
                    hvd.barrier()
                    began = time.perf_counter()
                    state.optimizer.zero_grad()
                    state.model(data).square().mean().backward()
                    state.optimizer.step()
                    stepped = time.perf_counter()
                    if way != "none":
                        state.commit()
                    ended = time.perf_counter()
                    if turn and step:  # the first pays for what was before it
                        mine = figures[way]
                        mine["step"].append(stepped - began)
                        mine["commit"].append(ended - stepped)
                        mine["both"].append(ended - began)

    loop(state)
    if hvd.rank() == 0:
        medians = {way: {name: statistics.median(times) * 1e3 for name, times in figures[way].items()} for way in WAYS}
        print(f"{3 * megabytes / hvd.size():.0f} MB of state a worker, {hvd.size()} workers")
        print(f"{'copies':10}{'step, ms':>10}{'commit, ms':>12}{'both, ms':>10}{'x none':>8}")
        for way, found in medians.items():
            ratio = found["both"] / medians["none"]["both"]
            print(f"{way:10}{found['step']:10.1f}{found['commit']:12.1f}{found['both']:10.1f}{ratio:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="an even number (default 4)")
    parser.add_argument("--megabytes", type=int, default=16, help="of the model's weights (default 16)")
    parser.add_argument("--turns", type=int, default=10, help="turns that count (default 10)")
    options = parser.parse_args()
    if "ELASTIC_DRIVER_RENDEZVOUS" in os.environ:
        train(options.megabytes, options.turns)
        return
    half = options.workers // 2
    command = [sys.executable, "-m", "elastic_driver", "-np", str(options.workers)]
    command += ["-H", f"localhost:{half},127.0.0.1:{half}", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
