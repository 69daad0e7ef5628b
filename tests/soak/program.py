"""What the soak trains: a small model over an ElasticSampler, with a line for each step. Run under elasticrun.

Environment: STEP_LOG (file), FAULTS (folder; a file named like this process's worker is a fault it is to commit, once),
SLOW_START (file; while it is there, starting takes as many seconds as it says).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from asked import JOB, WORKER, commit_a_fault, start_slowly

start_slowly()

import numpy as np  # noqa: E402 - slow starters are slow before everything else
import torch  # noqa: E402
from history import digest  # noqa: E402

import elastic_driver.torch as hvd  # noqa: E402
from elastic_driver.worker.rounds.current import current  # noqa: E402

SAMPLES, PER_STEP = 480, 12
COMMIT_EVERY = 3


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    torch.manual_seed(1)
    model = torch.nn.Linear(20, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    inputs, targets = torch.randn(SAMPLES, 20), torch.randn(SAMPLES, 3)
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True, seed=3)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, used=[])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            batch = PER_STEP // hvd.size()
            indices = list(iter(sampler))
            for index in range((len(indices) + batch - 1) // batch):
                mine = indices[index * batch : (index + 1) * batch]
                time.sleep(0.02)
                commit_a_fault()
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
                optimizer.step()
                sampler.record_batch(index, batch)
                samples = hvd.allgather(torch.tensor(mine)).tolist()
                state.used = state.used + samples
                state.step += 1
                line = {
                    "time": time.time(),
                    "pid": os.getpid(),
                    "job": JOB,
                    "worker": WORKER,
                    "round": current().assignment.round_id,
                    "rank": hvd.rank(),
                    "size": hvd.size(),
                    "step": state.step,
                    "epoch": state.epoch,
                    "commits": state._commits,
                    "samples": samples,
                    "weights": digest(p.detach().numpy() for p in model.parameters()),
                }
                log.write(json.dumps(line) + "\n")
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
            counts = np.bincount(state.used, minlength=SAMPLES)
            line = {
                "epoch": state.epoch,
                "missing": int((counts == 0).sum()),
                "repeated": int((counts - 1).clip(0).sum()),
            }
            log.write(json.dumps(line) + "\n")
            state.epoch += 1
            state.used = []
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
