"""A training over TensorFlow's servers that can be counted and held, for tests of the elastic coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow import ElasticClusterCoordinator
from tests.support.processes.tensorflow_servers import Server, Servers, a_strategy

PATIENCE_S = 40.0
_BETWEEN_LOOKS_S = 0.01

current_worker = tf.distribute.coordinator.experimental_get_current_worker_index


def until(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """Looks until it holds; returns what it then is."""
    deadline = time.monotonic() + within_s
    while not (there := condition()):
        assert time.monotonic() < deadline, f"not so after {within_s:g} s: {what}"
        time.sleep(_BETWEEN_LOOKS_S)
    return there


def aside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Calls it in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"aside-{function.__name__}", daemon=True).start()
    return future


class Job:
    """Servers, the strategy over them, its coordinator; and closures that count what was done.

    Attributes:
        workers: their servers, as they were started.
        parameter_servers: the same of those.
        counter: how many closures have ended, on a parameter server.
        begun: how many held closures have begun.
    """

    def __init__(
        self,
        servers: Servers,
        workers: int,
        *,
        parameter_servers: int = 1,
        spares: int = 0,
        kind: Any = None,
        **options: Any,
    ) -> None:
        there = servers.start_all(*["ps"] * parameter_servers, *["worker"] * (workers + spares))
        self.servers = servers
        self.parameter_servers: list[Server] = there[:parameter_servers]
        self.workers: list[Server] = there[parameter_servers : parameter_servers + workers]
        self.spares: list[Server] = there[parameter_servers + workers :]
        self.strategy = a_strategy(self.parameter_servers, self.workers)
        self.coordinator: Any = (kind or ElasticClusterCoordinator)(self.strategy, **options)
        with self.strategy.scope():
            self.counter = tf.Variable(0, dtype=tf.int64)
            self.begun = tf.Variable(0, dtype=tf.int64)
            self._held = tf.Variable(0, dtype=tf.int64)  # those up to this number are held

        @tf.function
        def count() -> Any:
            self.counter.assign_add(1)
            return current_worker()

        @tf.function
        def hold(number: Any) -> Any:
            self.begun.assign_add(1)
            held = self._held.read_value()
            while number <= held:
                held = self._held.read_value()
            # Of the loop's result, or it would not wait for the loop.
            self.counter.assign_add(tf.where(held < number, tf.constant(1, tf.int64), 0))
            return current_worker()

        self.count = count
        self._hold = hold

    @property
    def done(self) -> int:
        """How many closures have ended."""
        return int(self.counter.numpy())

    def schedule(self, times: int = 1) -> list[Any]:
        """Schedules closures that add one to the counter and return the index of their worker."""
        return [self.coordinator.schedule(self.count) for _ in range(times)]

    def run(self, times: int) -> set[int]:
        """The same, and waits; returns who has run them."""
        values = self.schedule(times)
        self.coordinator.join()
        return {int(value.fetch()) for value in values}

    def hold(self, *, times: int = 1) -> list[Any]:
        """Schedules closures that run until they are let go, and waits until all have begun."""
        before = int(self.begun.numpy())
        self._held.assign(1)
        values = [self.coordinator.schedule(self._hold, args=(tf.constant(1, tf.int64),)) for _ in range(times)]
        until(lambda: self.begun.numpy() >= before + times, f"{times} closures have begun")
        return values

    def let_go(self) -> None:
        """Those that were held end."""
        self._held.assign(0)

    def until_taken_by(self, index: int, within_s: float = PATIENCE_S) -> int:
        """Schedules closures until this worker has run one; returns how many."""
        deadline = time.monotonic() + within_s
        count = 0
        while True:
            count += 8
            if index in self.run(8):
                return count
            assert time.monotonic() < deadline, f"worker {index} has taken none of {count}"

    def states(self) -> dict[int, str]:
        """Of the workers, by index."""
        return {worker.index: str(worker.state) for worker in self.coordinator.workers()}
