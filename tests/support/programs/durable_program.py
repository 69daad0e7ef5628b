"""A training whose commits go to disk, with a line for each step. Run by tests under elasticrun.

Environment: STEP_LOG (file), STEPS (number), STEP_S (seconds a step takes), STEP_GROWS (each takes so many times as
long as the one before, so that an epoch is not over before a test has done what it has to), BALLAST (bytes that each
commit has besides), LOCAL_DISKS (folder; each host has a folder of its own in it for its commits, as if on a disk of
its own),
SAMPLES (that many samples of one epoch are gone through by an ElasticSampler, and STEPS does not count), STOP (file;
when it is there, the training ends at the next step).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

if "LOCAL_DISKS" in os.environ:
    os.environ["ELASTIC_DRIVER_DURABLE_DIR"] = f"{os.environ['LOCAL_DISKS']}/{os.environ['HOROVOD_HOSTNAME']}"

import numpy as np

import elastic_driver as hvd

STEPS = int(os.environ.get("STEPS", "1000000"))
STEP_S = float(os.environ.get("STEP_S", "0.02"))
STEP_GROWS = float(os.environ.get("STEP_GROWS", "1"))
BALLAST = int(os.environ.get("BALLAST", "0"))
SAMPLES = int(os.environ.get("SAMPLES", "0"))
STOP = os.environ.get("STOP", "")
PER_STEP = 12


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    weights = np.random.default_rng(os.getpid()).normal(size=100)
    values: dict[str, Any] = {"weights": weights, "step": 0, "ballast": np.zeros(BALLAST, np.uint8)}
    if SAMPLES:
        from elastic_driver.torch.elastic import ElasticSampler, TorchState

        sampler = ElasticSampler(range(SAMPLES), shuffle=True, seed=3)
        state: Any = TorchState(sampler=sampler, **values)
    else:
        state = hvd.elastic.ObjectState(**values)

    def do_step(state: Any, samples: list[int]) -> None:
        time.sleep(STEP_S * STEP_GROWS**state.step)
        state.weights = state.weights - 0.01 * hvd.allreduce(np.full(100, 0.5 + state.step % 3), name="gradient")
        state.step += 1
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "worker": os.environ["ELASTIC_DRIVER_WORKER"],
            "rank": hvd.rank(),
            "size": hvd.size(),
            "step": state.step,
            "weights": hash(state.weights.tobytes()),
            "samples": samples,
        }
        log.write(json.dumps(line) + "\n")
        state.commit()

    def is_stopped() -> bool:
        """All ranks agree on it."""
        return bool(STOP) and hvd.allreduce(np.array([float(os.path.exists(STOP))]), name="stop")[0] > 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        if not SAMPLES:
            while state.step < STEPS and not is_stopped():
                do_step(state, [])
            return
        batch = PER_STEP // hvd.size()
        indices = list(iter(state.sampler))
        for index in range(-(-len(indices) // batch)):
            mine = indices[index * batch : (index + 1) * batch]
            state.sampler.record_batch(index, batch)
            do_step(state, mine)

    train(state)


if __name__ == "__main__":
    main()
