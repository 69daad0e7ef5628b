"""A training in numpy that starts quickly and tells all that history.py looks at: a line a step. Run under elasticrun.

Environment: STEP_LOG (file), STEP_S (seconds of work a step), FAULTS and SLOW_START as for program.py, if at all.

What a step does to the weights depends on the round, so that two rounds that train from the same commit differ. The
state says which rounds have made it (``trail``: each round's job, number and first step); so does each commit on disk.
"""

from __future__ import annotations

import json
import os
import sys
import time

from asked import JOB, WORKER, commit_a_fault, start_slowly

start_slowly()

import numpy as np  # noqa: E402 - slow starters are slow before everything else
from history import digest  # noqa: E402

import elastic_driver as hvd  # noqa: E402
from elastic_driver.worker.rounds.current import current  # noqa: E402

SAMPLES, PER_STEP = 480, 12
PER_EPOCH = SAMPLES // PER_STEP
COMMIT_EVERY = 2
# Rounds that a state remembers: more than there are in the commits that are kept.
TRAIL = 200
STEP_S = float(os.environ.get("STEP_S", "0.02"))


def main() -> None:
    hvd.init()
    log = os.open(os.environ["STEP_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    state = hvd.elastic.ObjectState(weights=np.zeros(2000), step=0, trail=[])

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        round_id = current().assignment.round_id
        state.trail = [*state.trail[-TRAIL:], [JOB, round_id, state.step + 1]]
        while True:
            time.sleep(STEP_S)
            commit_a_fault()
            begin = state.step * PER_STEP % SAMPLES
            mine = [begin + index for index in range(hvd.rank(), PER_STEP, hvd.size())]
            gradient = hvd.allreduce(np.full(2000, 0.5 + state.step % 3 + round_id / 8), name="gradient")
            samples = hvd.allgather(np.array(mine), name="samples").tolist()
            state.weights = state.weights - 0.01 * gradient
            state.step += 1
            line = {
                "time": time.time(),
                "pid": os.getpid(),
                "job": JOB,
                "worker": WORKER,
                "round": round_id,
                "rank": hvd.rank(),
                "size": hvd.size(),
                "step": state.step,
                "epoch": (state.step - 1) // PER_EPOCH,
                "commits": state._commits,
                "samples": samples,
                "weights": digest([state.weights]),
            }
            # Whole, and behind the others': the lines' order is that in which they were written.
            os.write(log, json.dumps(line).encode() + b"\n")
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


if __name__ == "__main__":
    sys.exit(main())
