"""A training that writes a lot: 20 numbered lines of 1 KB a step and rank. Run under elasticrun."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

LINES = 20


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while not Path(os.environ["STOP_AT"]).exists() or state.step < int(Path(os.environ["STOP_AT"]).read_text()):
            hvd.allreduce(np.ones(4), name="x")
            state.step += 1
            for number in range(LINES):
                print(f"rank {hvd.rank()} line {(state.step - 1) * LINES + number} {'x' * 1000}", flush=True)
            line = {"time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            log.write(json.dumps(line) + "\n")
            time.sleep(float(os.environ["STEP_S"]))
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
