"""horovod_program.py for TensorFlow: a training with Horovod's DistributedGradientTape.

Its state is an ObjectState: to make a TensorFlowState is a collective, in which one that comes later waits forever.

Environment: STEP_LOG (file), STEPS, STEP_S.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

STEPS = int(os.environ.get("STEPS", "100000"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))

hvd.init()
weights = tf.Variable(tf.random.stateless_normal([100], seed=[os.getpid(), 0]))
log = Path(os.environ["STEP_LOG"]).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process


@hvd.elastic.run
def train(state: Any) -> None:
    weights.assign(state.weights)
    while state.step < STEPS:
        time.sleep(STEP_S)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weights * (0.1 + state.step % 3))
        (gradient,) = tape.gradient(loss, [weights])
        state.weights = state.weights - 0.01 * gradient.numpy()
        weights.assign(state.weights)
        state.step += 1
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": hvd.rank(),
            "size": hvd.size(),
            "step": state.step,
            "weights": zlib.crc32(weights.numpy().tobytes()),
        }
        log.write(json.dumps(line) + "\n")
        state.commit()


train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, weights=weights.numpy(), step=0))
print(f"rank {hvd.rank()} of {hvd.size()} is done")
