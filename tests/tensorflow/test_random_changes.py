"""Random changes for a while, and sums that are exact: half a minute, or as long as --tensorflow-soak says."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import tensorflow as tf

from elastic_driver.tensorflow import WorkerState
from tests.support.processes.tensorflow_job import Job, aside
from tests.support.processes.tensorflow_servers import Server, Servers

pytestmark = [pytest.mark.faults, pytest.mark.tensorflow, pytest.mark.slow]

SERVERS = 4
# Twenty a minute, when a soak is asked for; in the short run more, so that there are some.
PAUSE_S = 3.0
SHORT_PAUSE_S = 1.0
LEAST_CHANGES = 5


@dataclass
class Training:
    """Schedules closures in a thread: of a dataset of ones, added up on a parameter server."""

    job: Job
    scheduled: int = 0
    longest_s: float = 0.0
    enough: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        job = self.job
        with job.strategy.scope():
            total = tf.Variable(0, dtype=tf.int64)

        @tf.function
        def step(iterator: Any) -> None:
            total.assign_add(next(iterator))

        ones = tf.data.Dataset.from_tensors(tf.constant(1, tf.int64)).repeat()
        while not self.enough.is_set():
            iterator = iter(job.coordinator.create_per_worker_dataset(ones))
            for _ in range(20):
                at = time.monotonic()
                for _ in range(20):
                    job.coordinator.schedule(step, args=(iterator,))
                    self.scheduled += 1
                job.coordinator.join()
                self.longest_s = max(self.longest_s, time.monotonic() - at)
        self.total = int(total.numpy())


@pytest.mark.parametrize("kills", [False, True], ids=["changes", "changes and kills"])
def test_random_changes(servers: Servers, kills: bool, soak_s: float) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 100_000))
    chance = random.Random(seed)
    print(f"SEED={seed}")
    job = Job(servers, 2, parameter_servers=2, spares=SERVERS - 2)
    everybody: list[Server] = [*job.workers, *job.spares]
    dead: set[str] = set()
    killed = 0
    training = Training(job)
    running = aside(training.run)
    pause = SHORT_PAUSE_S if soak_s < 60 else PAUSE_S
    end = time.monotonic() + soak_s
    changes = 0
    while (time.monotonic() < end or changes < LEAST_CHANGES) and not running.done():
        # How far apart they are is part of the test; nothing is waited for.
        training.enough.wait(chance.uniform(0.2, 1.8) * pause)
        server = chance.choice(everybody)
        there = {one.address: one.state for one in job.coordinator.workers()}
        alive = [one for one, state in there.items() if state is WorkerState.RUNNING and one not in dead]
        if server.address in dead:
            server.start_again()
            dead.remove(server.address)
            job.coordinator.add_worker(server.address)
        elif there.get(server.address) is not WorkerState.RUNNING:
            job.coordinator.add_worker(server.address)
        elif alive == [server.address]:
            continue  # who is left is to go on
        elif kills and chance.random() < 0.5:
            server.kill()
            dead.add(server.address)
            killed += 1
            if chance.random() < 0.5:
                job.coordinator.remove_worker(server.address, timeout_s=5)
        else:
            job.coordinator.remove_worker(server.address, timeout_s=chance.choice([None, 5.0]))
        changes += 1
    training.enough.set()
    running.result(60)
    print(
        f"{changes} changes, {killed} kills, {training.scheduled} closures, the longest 20: {training.longest_s:.2f} s"
    )
    if killed:
        # A closure that was in hand may have been counted, and is then counted again.
        assert training.scheduled <= training.total <= training.scheduled + killed
    else:
        assert training.total == training.scheduled
