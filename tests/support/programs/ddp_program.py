"""A plain DDP script, as it is written for torchrun, for tests: of elastic_driver it knows one question.

Logs a JSON line a step to STEP_LOG: time, pid, rank, size, step, and what it was told of its start. Resumes from the
checkpoint file CHECKPOINT. With ASK it writes one only when a change is due, else after each step. It ends well at step
STEPS or when the file STOP is there, and badly, on rank 1, when the file FAIL is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

WARM = "torch._dynamo" in sys.modules
TOLD = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS")


@record
def main() -> None:
    checkpoint, stop, fail = (Path(os.environ[name]) for name in ("CHECKPOINT", "STOP", "FAIL"))
    asks = os.environ.get("ASK") == "1"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["model"])
        step = saved["step"]

    def save() -> None:
        if dist.get_rank() == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": net.state_dict(), "step": step}, new)
            new.replace(checkpoint)

    told = {name: os.environ.get(name) for name in TOLD}
    with open(os.environ["STEP_LOG"], "a", buffering=1) as log:
        while step < int(os.environ.get("STEPS", "1000000")):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(torch.full((4, 8), float(step % 7))).square().mean().backward()
            optimizer.step()
            step += 1
            line = {"time": time.time(), "pid": os.getpid(), "step": step, "warm": WARM, "args": sys.argv[1:]}
            line |= {"rank": dist.get_rank(), "size": dist.get_world_size(), **told}
            log.write(json.dumps(line) + "\n")
            if asks:
                import elastic_driver

                if elastic_driver.checkpoint_point(step=step):
                    save()
                    sys.exit(0)
            else:
                save()
            ends = torch.tensor([stop.exists(), fail.exists()], dtype=torch.int32)
            dist.broadcast(ends, 0)
            if ends[1]:
                if dist.get_rank() == 1:
                    fail.unlink()
                    raise ValueError("on purpose")
                time.sleep(0.1)
            if ends[0]:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
