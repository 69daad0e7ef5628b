"""The same loop as elastic_loop.py for torchrun: DDP over gloo, a checkpoint file of the step each step.

It is the yardstick of benchmarks/elastic.py: what the same change costs with the launcher that comes with torch; and
with ``--worker torchrun`` elasticrun restarts it, too. Appends to MARK_LOG, if that is given, when its process has come
to the script, has met the others, and has wrapped its model.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

NUMEL = 1 << 20
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")


def mark(name: str) -> None:
    if "MARK_LOG" in os.environ:
        with open(os.environ["MARK_LOG"], "a") as log:
            log.write(json.dumps({"time": time.time(), "pid": os.getpid(), "mark": name}) + "\n")


def main() -> None:
    mark("imported")
    device = torch.device("cpu")
    if DEVICE == "cuda":
        from tests.support.programs import shared_gpu

        shared_gpu.look_like_a_machine()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mark("met")
    torch.manual_seed(0)
    net = torch.nn.Linear(1024, NUMEL // 1024, bias=False, device=device)
    model = torch.nn.parallel.DistributedDataParallel(net)
    mark("wrapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checkpoint = Path(os.environ["STEP_LOG"] + ".step")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(4, 1024, device=device)
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
