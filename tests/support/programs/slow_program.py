"""A training in which one worker takes longer for its steps than the others, for as long as a file says so.

Run by the tests under elasticrun. Environment: STEP_LOG (file: a JSON line a step), STEP_S (seconds of work a step),
SLOW_FILE (a worker's host and slot, and how many times as long it takes: "127.0.0.1[1] 2.0"; may be missing).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

STEP_S = float(os.environ.get("STEP_S", "0.05"))
SLOW_FILE = Path(os.environ["SLOW_FILE"])
WORKER = os.environ["ELASTIC_DRIVER_WORKER"]


def factor() -> float:
    try:
        place, number = SLOW_FILE.read_text().split()
    except FileNotFoundError:
        return 1.0
    return float(number) if WORKER.startswith(f"{place}#") else 1.0


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    state = hvd.elastic.ObjectState(weights=np.ones(100), step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while True:
            time.sleep(STEP_S * factor())
            state.weights = hvd.allreduce(state.weights, name="weights")
            state.step += 1
            line = {"time": time.time(), "pid": os.getpid(), "worker": WORKER, "rank": hvd.rank(), "size": hvd.size()}
            log.write(json.dumps({**line, "step": state.step}) + "\n")
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
