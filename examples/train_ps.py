"""Trains a small Keras model on handwritten digits with TensorFlow's parameter servers; workers may come and go.

    elasticrun --parameter-servers 1 -np 2 --min-np 1 --host-discovery-script examples/discover_hosts.sh \\
        python examples/train_ps.py                                  as many workers as the hosts file has slots

elasticrun starts the servers, and this script once: it is the coordinator, which hands steps to the workers. Without
elasticrun the same script is each task of a cluster in turn, as TF_CONFIG says:

    export TF_CONFIG='{"cluster": {"ps": ["127.0.0.1:7001"], "worker": ["127.0.0.1:7002"], "chief": ["127.0.0.1:7000"]},
                       "task": {"type": "ps", "index": 0}}'          then "worker", and at last "chief"
    python examples/train_ps.py

The variables are on the parameter servers, and each worker has its own iterator and its own table of words. Both are
made on workers that come later, too. After each epoch the coordinator writes a checkpoint to its own disk; a run that
finds one resumes from it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits
import keras
import numpy as np
import tensorflow as tf

from elastic_driver.tensorflow import ElasticClusterCoordinator

BATCH = 32
STEPS = digits.TRAIN_SAMPLES // BATCH  # an epoch; each worker shuffles by itself, so it is one on average
# Else each parameter server reads and writes its part of a checkpoint on its own machine, which may be lost with it.
ON_CHIEF = tf.train.CheckpointOptions(experimental_io_device="/job:chief/task:0/device:CPU:0")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def build_model() -> keras.Model:
    """5,000 parameters. The pictures come as they are in the data, with values from 0 to 16."""
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Rescaling(1.0 / 16.0),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(len(WORDS)),
        ]
    )


def serve(resolver: Any) -> None:
    """Is a worker or a parameter server, until it is ended."""
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


def train(resolver: Any, epochs: int, folder: Path) -> float:
    """Is the coordinator. Returns the accuracy on pictures that were not trained on."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = ElasticClusterCoordinator(strategy)
    data = digits.load()
    words = np.array(WORDS)[data.train_labels]

    with strategy.scope():
        model = build_model()
        number_of = keras.layers.StringLookup(vocabulary=list(WORDS), num_oov_indices=0)
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        epoch = tf.Variable(0, dtype=tf.int64)

    def dataset() -> Any:
        samples = tf.data.Dataset.from_tensor_slices((16.0 * data.train_images, words))
        return samples.shuffle(digits.TRAIN_SAMPLES).repeat().batch(BATCH)

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        def of_a_replica(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                scores = model(images, training=True)
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(number_of(labels), scores, from_logits=True)
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            # Keras 3 asks for the context of a replica here, and outside of strategy.run there is none.
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(of_a_replica, args=next(iterator))

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint, ON_CHIEF).assert_existing_objects_matched()
        print(f"resuming after epoch {int(epoch.numpy())}", flush=True)

    def accuracy() -> float:
        scores = model(16.0 * data.test_images, training=False)
        return float(np.mean(np.argmax(scores, axis=1) == data.test_labels))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    while epoch.numpy() < epochs:
        began = time.monotonic()
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS)]
        coordinator.join()
        epoch.assign_add(1)
        manager.save(options=ON_CHIEF)
        running = [worker.index for worker in coordinator.workers() if worker.state == "running"]
        print(
            f"epoch {int(epoch.numpy())}: loss {np.mean(coordinator.fetch(losses)):.3f}, test accuracy"
            f" {accuracy():.3f}, {STEPS / (time.monotonic() - began):.0f} steps/s, workers {running}",
            flush=True,
        )
    return accuracy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="where they are written")
    args = parser.parse_args()
    if "TF_CONFIG" not in os.environ:
        parser.error("TF_CONFIG is not set: run this with elasticrun --parameter-servers, or set it yourself")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    print(f"test accuracy {train(resolver, args.epochs, args.checkpoints):.3f}", flush=True)


if __name__ == "__main__":
    main()
