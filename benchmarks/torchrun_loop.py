"""The same loop as elastic_loop.py for torchrun: DDP over gloo, a checkpoint file of the step each step.

It is the yardstick of benchmarks/elastic.py: what the same change costs with the launcher that comes with torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

NUMEL = 1 << 20


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, NUMEL // 1024, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checkpoint = Path(os.environ["STEP_LOG"] + ".step")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(4, 1024)
    while True:
        time.sleep(0.05)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        step += 1
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "step": step,
        }
        log.write(json.dumps(line) + "\n")
        if dist.get_rank() == 0:
            new = checkpoint.with_suffix(".new")
            new.write_text(str(step))
            new.replace(checkpoint)


if __name__ == "__main__":
    main()
