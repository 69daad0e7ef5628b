"""A training in numpy that says what it does: a JSON line a step. Run by the tests under elasticrun.

Environment: STEP_LOG (file), STEPS (number; or LAST, a file that says it once it is there), STEP_S (seconds of work a
step), COMMIT_EVERY, FAULT ("exception RANK STEP", "exit RANK STEP", "deadlock RANK STEP", "lost RANK STEP": what that
rank does at that step, once), WHEN (a file: not before it is there), ONCE (a file that marks that it has happened;
without it, it happens each time).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

import elastic_driver as hvd

STEPS = int(os.environ.get("STEPS", "100000"))
STEP_S = float(os.environ.get("STEP_S", "0.04"))
COMMIT_EVERY = int(os.environ.get("COMMIT_EVERY", "1"))
FAULT = os.environ.get("FAULT", "").split()
WORKER = os.environ.get("ELASTIC_DRIVER_WORKER", "")


def last_step() -> int:
    try:
        return int(Path(os.environ["LAST"]).read_text())
    except (KeyError, OSError, ValueError):
        return STEPS


def fault_is_due(step: int) -> str:
    if not FAULT or int(FAULT[1]) != hvd.rank() or int(FAULT[2]) > step:
        return ""
    if "WHEN" in os.environ and not Path(os.environ["WHEN"]).exists():
        return ""
    if "ONCE" not in os.environ:
        return FAULT[0]
    try:
        Path(os.environ["ONCE"]).touch(exist_ok=False)
    except FileExistsError:
        return ""
    return FAULT[0]


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    hvd.init()
    log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    state = hvd.elastic.ObjectState(weights=np.random.default_rng(os.getpid()).normal(size=1000), step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while state.step < last_step():
            time.sleep(STEP_S)
            gradient = np.full(1000, 0.5 + state.step % 3)
            match fault_is_due(state.step):
                case "exception":
                    raise RuntimeError("a bug in the training script")
                case "lost":
                    raise hvd.HorovodInternalError(f"a bad sample at {time.monotonic()}")
                case "exit":
                    sys.exit(0)
                case "deadlock":
                    deadlock()
            state.weights = state.weights - 0.01 * hvd.allreduce(gradient, name="gradient")
            state.step += 1
            line = {
                "time": time.time(),
                "pid": os.getpid(),
                "worker": WORKER,
                "rank": hvd.rank(),
                "size": hvd.size(),
                "local_rank": hvd.local_rank(),
                "local_size": hvd.local_size(),
                "cross_rank": hvd.cross_rank(),
                "cross_size": hvd.cross_size(),
                "step": state.step,
                "weights": hash(state.weights.tobytes()),
            }
            log.write(json.dumps(line) + "\n")
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)
    print(f"rank {hvd.rank()} done at step {state.step}")


if __name__ == "__main__":
    main()
