"""The training loop that benchmarks/elastic.py measures: 4 MB of gradient, 50 ms of sleep, a commit each step.

Appends a JSON line for each step to STEP_LOG: time (unix s), pid, rank, size, step.
"""

from __future__ import annotations

import json
import os
import time

import torch

import elastic_driver.torch as hvd

STEPS = int(os.environ.get("BENCH_STEPS", "100000"))
COMPUTE_S = 0.05
NUMEL = 1 << 20  # float32: 4 MB


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, NUMEL // 1024, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    log = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    data = torch.randn(4, 1024)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            time.sleep(COMPUTE_S)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            state.step += 1
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
