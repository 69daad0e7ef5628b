"""A script for TensorFlow's parameter server training as its guide has it: TF_CONFIG, the strategy, the coordinator.

Usage: tf_chief_program.py FOLDER STEPS. It adds one to a counter on the parameter server in each closure, STEPS times;
keeps a checkpoint after every 10; and prints where it began, and the sum. With a file FOLDER/hold it waits in between.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import tensorflow as tf


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(counter=counter)
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint)
    began = int(counter.numpy())
    print(f"begins at {began}", flush=True)

    @tf.function
    def add_one() -> tf.Tensor:
        counter.assign_add(1)
        return tf.identity(counter)

    for done in range(began, steps, 10):
        for _ in range(10):
            coordinator.schedule(add_one)
        coordinator.join()
        manager.save()
        print(f"done {done + 10}", flush=True)
        while (folder / "hold").exists():
            coordinator.schedule(add_one)  # what a lost server is noticed by
            coordinator.join()
            time.sleep(0.1)
    print(f"sum {int(counter.numpy())}", flush=True)


if __name__ == "__main__":
    main()
