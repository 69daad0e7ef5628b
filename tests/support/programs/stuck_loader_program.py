"""A training with an optimizer, in which rank 1's reader of data comes to a lock that nobody opens. Run by the tests.

Environment: STEP_LOG (file: a JSON line a step), MARK_FILE (gets a line when it stands), ONCE (a file that marks it).
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import torch

import elastic_driver.torch as hvd

# A suspicion comes after ten times the slowest of the last 100 steps. So all of them have to be quick by then, also
# where a busy machine makes some slow.
STEP_S, QUICK_S, QUICK_STEPS = 0.02, 1.0, 110
quick = 0


def next_batch() -> torch.Tensor:
    """As a loader that waits for its workers' batch."""
    time.sleep(STEP_S)
    if quick >= QUICK_STEPS and hvd.rank() == 1 and not Path(os.environ["ONCE"]).exists():
        Path(os.environ["ONCE"]).touch()
        with Path(os.environ["MARK_FILE"]).open("a") as mark:
            mark.write(f"1 {os.getpid()} {time.time()} inf\n")
        lock = threading.Lock()
        with lock:
            lock.acquire()
    return torch.ones(4, 8)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    model = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        global quick
        while True:
            began = time.monotonic()
            optimizer.zero_grad()
            model(next_batch()).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")
            quick = quick + 1 if time.monotonic() - began < QUICK_S else 0

    train(state)


main()
