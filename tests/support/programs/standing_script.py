"""A script for torchrun whose rank 1 sleeps once, at step 150 for 40 s, while the others wait for it in gloo."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from elastic_driver import checkpoint_point

AT, SLEEPS_S, STEPS = 150, 40.0, 1_000_000


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(STEPS):
        if step == AT and dist.get_rank() == 1:
            time.sleep(SLEEPS_S)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.1)
        if checkpoint_point(step=step):
            sys.exit(0)


if __name__ == "__main__":
    main()
