"""Tables and variables of each worker: made for who joins, left alone with the others, made anew after a loss."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import keras
import pytest
import tensorflow as tf

from elastic_driver.tensorflow import private
from tests.support.processes.tensorflow_job import Job, current_worker, until
from tests.support.processes.tensorflow_servers import Servers

pytestmark = [pytest.mark.integration, pytest.mark.tensorflow]


class Made:
    """How often something was made on which worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.on: Counter[int] = Counter()
        execute = private.ResourceClosure.execute_on

        def counted(closure: Any, worker: Any) -> None:
            execute(closure, worker)
            with self._lock:
                self.on[worker.worker_index] += 1

        monkeypatch.setattr(private.ResourceClosure, "execute_on", counted)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def changes(job: Job, made: Made, use: Any) -> None:
    """Another joins, one is lost and is back, one leaves and comes back: each time only that one's are made."""
    use()
    until(lambda: set(made.on) == {0, 1}, "they are made")
    each = made.on[0]
    assert made.on == {0: each, 1: each}
    job.coordinator.add_worker(job.spares[0].address)
    job.until_taken_by(2)
    use()
    assert made.on == {0: each, 1: each, 2: each}
    job.workers[0].kill()
    use()
    job.run(20)
    until(lambda: job.states()[0] == "lost", "it is lost")
    job.workers[0].start_again()
    until(lambda: job.states()[0] == "running", "it is back")
    job.until_taken_by(0)
    use()
    assert made.on == {0: 2 * each, 1: each, 2: each}
    job.coordinator.remove_worker(job.workers[1].address)
    job.coordinator.add_worker(job.workers[1].address)
    job.until_taken_by(1)
    use()
    assert made.on == {0: 2 * each, 1: 2 * each, 2: each}


def everywhere(job: Job, function: Any, *args: Any) -> list[tuple[int, Any]]:
    """Runs a function that returns its worker and a value until all running workers have; returns what they say."""
    said: list[tuple[int, Any]] = []
    # Asked for each time: one that was killed may not be known as lost yet.
    while not {index for index, state in job.states().items() if state == "running"} <= {index for index, _ in said}:
        values = [job.coordinator.schedule(function, args=args) for _ in range(8)]
        job.coordinator.join()
        said += [(int(index), value) for index, value in (one.fetch() for one in values)]
    return said


def test_a_table(servers: Servers, made: Made) -> None:
    job = Job(servers, 2, spares=1)
    with job.strategy.scope():
        words = tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], tf.constant([1, 2, 3], tf.int64))
        table = tf.lookup.StaticHashTable(words, -1)

    @tf.function
    def look_up(words: Any) -> Any:
        return current_worker(), table.lookup(words)

    def use() -> None:
        for _, numbers in everywhere(job, look_up, tf.constant(["b", "c", "x"])):
            assert list(numbers) == [2, 3, -1]

    changes(job, made, use)


def test_a_preprocessing_layer_of_keras(servers: Servers, made: Made) -> None:
    job = Job(servers, 2, spares=1)
    with job.strategy.scope():
        layer = keras.layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=0)

    @tf.function
    def look_up(words: Any) -> Any:
        return current_worker(), layer(words)

    def use() -> None:
        for _, numbers in everywhere(job, look_up, tf.constant(["b", "c"])):
            assert list(numbers) == [1, 2]

    changes(job, made, use)


def test_a_variable_of_each_worker(servers: Servers, made: Made) -> None:
    job = Job(servers, 2, spares=1)
    with job.strategy.scope():
        mine = tf.Variable(0, per_worker_variable=True)

    @tf.function
    def step() -> Any:
        mine.assign_add(1)
        # May be read before the write, with TensorFlow's own coordinator as well: each use of such a variable in a
        # function takes its handle as another input, and TensorFlow orders reads and writes by input. Within
        # tf.control_dependencies of the write that input would wait for it, and the read itself would not.
        return current_worker(), mine.read_value()

    last: dict[int, int] = {}

    def use() -> None:
        for index, number in everywhere(job, step):
            # It goes on with each worker, and begins again where it was made anew.
            last[index] = max(last.get(index, 0), int(number))

    changes(job, made, use)
    assert set(last) == {0, 1, 2}
    assert min(last.values()) >= 1


def test_an_iterator(servers: Servers, made: Made) -> None:
    job = Job(servers, 2, spares=1)
    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(1_000_000)))

    @tf.function
    def step(iterator: Any) -> Any:
        return current_worker(), next(iterator)

    def use() -> None:
        everywhere(job, step, iterator)

    changes(job, made, use)
