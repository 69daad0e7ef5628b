"""What a commit of FSDPState or ZeroState costs, with copies on the next host and without, next to a step of training.

    python benchmarks/shards.py [--state fsdp] [--workers 4] [--megabytes 16] [--turns 10]

Half of the workers are on localhost, half on 127.0.0.1, which count as two hosts; so the copies cross from one process
to another over loopback, and not over a network. A model of so many megabytes is trained by FSDP2 with AdamW, whose
state is twice that; with ``--state zero`` by DDP, and only AdamW's state is divided, by ZeroRedundancyOptimizer. The
ways take turns of five steps each, in one job. Median milliseconds on rank 0:

- step: forward, backward and the optimizer;
- commit: the call;
- both: a step and the commit after it. Copies travel during the step that follows, so that what they cost shows here.

``--state zero`` has a fourth way: torch's own, ``consolidate_state_dict`` to rank 0 after each step.

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


def train(kind: str, megabytes: int, turns: int) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import elastic_driver.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    width = 1024
    layers = max(1, megabytes * (1 << 20) // (4 * width * width))

    def build() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))

    def make(mesh: Any) -> Any:
        model = build()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def make_optimizer(group: Any) -> Any:
        return ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4)

    if kind == "zero":
        whole = build()
        state: Any = hvd.elastic.ZeroState(whole, make_optimizer)
    else:
        state = hvd.elastic.FSDPState(make)
    ways = (*WAYS, "consolidate") if kind == "zero" else WAYS
    data = torch.randn(8, width)
    figures: dict[str, dict[str, list[float]]] = {way: {"step": [], "commit": [], "both": []} for way in ways}

    @hvd.elastic.run
    def loop(state: Any) -> None:
        model = state.ddp if kind == "zero" else state.model
        for turn in range(turns + 1):
            for way in ways:
                state._settle()
                state._copies = way == "with"
                for step in range(STEPS):
                    hvd.barrier()
                    began = time.perf_counter()
                    state.optimizer.zero_grad()
                    model(data).square().mean().backward()
                    state.optimizer.step()
                    stepped = time.perf_counter()
                    if way == "consolidate":
                        state.optimizer.consolidate_state_dict()
                    elif way != "none":
                        state.commit()
                    ended = time.perf_counter()
                    if turn and step:  # the first pays for what was before it
                        mine = figures[way]
                        mine["step"].append(stepped - began)
                        mine["commit"].append(ended - stepped)
                        mine["both"].append(ended - began)

    loop(state)
    if hvd.rank() == 0:
        medians = {way: {name: statistics.median(times) * 1e3 for name, times in figures[way].items()} for way in ways}
        divided = 2 if kind == "zero" else 3
        print(f"{divided * megabytes / hvd.size():.0f} MB of divided state a worker, {hvd.size()} workers")
        print(f"{'copies':12}{'step, ms':>10}{'commit, ms':>12}{'both, ms':>10}{'x none':>8}")
        for way, found in medians.items():
            ratio = found["both"] / medians["none"]["both"]
            print(f"{way:12}{found['step']:10.1f}{found['commit']:12.1f}{found['both']:10.1f}{ratio:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=["fsdp", "zero"], default="fsdp", help="what is divided (default fsdp)")
    parser.add_argument("--workers", type=int, default=4, help="an even number (default 4)")
    parser.add_argument("--megabytes", type=int, default=16, help="of the model's weights (default 16)")
    parser.add_argument("--turns", type=int, default=10, help="turns that count (default 10)")
    options = parser.parse_args()
    if "ELASTIC_DRIVER_RENDEZVOUS" in os.environ:
        train(options.state, options.megabytes, options.turns)
        return
    half = options.workers // 2
    command = [sys.executable, "-m", "elastic_driver", "-np", str(options.workers)]
    command += ["-H", f"localhost:{half},127.0.0.1:{half}", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env={**os.environ, "ELASTIC_DRIVER_HISTORY": "off"}, check=False).returncode)


if __name__ == "__main__":
    main()
