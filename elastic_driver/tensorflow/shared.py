"""The data that the threads of the elastic coordinator share, under one lock.

Owns the lock and its conditions, the schedule, the workers and the per-worker values. The conditions:

- ``work``: a worker's thread waits for work.
- ``idle``: ``join()``, and a call that raises an error, wait for closures to end.
- ``room``: ``schedule()`` waits for room in the queue.
- ``moved``: ``add_worker()`` and ``remove_worker()`` wait for a worker's next phase, or an update of the runtime's
  cluster.
- ``news``: the thread that updates the runtime's cluster waits for requests.

Each wake-up slows down the threads that run closures, so no thread is woken that could not continue.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from elastic_driver.tensorflow import private
from elastic_driver.tensorflow.private import Place
from elastic_driver.tensorflow.schedule import Member, Phase, Schedule
from elastic_driver.tensorflow.values import ElasticValues, Recipe

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's thread and its state.

    Attributes:
        member: the worker in the schedule.
        place: where its closures run.
        thread: runs its closures; None without one.
        manager: cancels its current closure.
        stop: ends all its waits when set.
        silent_since: since when its server has been silent during a closure; None while it answers.
    """

    member: Member[Any]
    place: Place
    thread: threading.Thread | None = None
    manager: Any = None
    stop: threading.Event = field(default_factory=threading.Event)
    silent_since: float | None = None


class Shared:
    """The shared data. Everything except :attr:`lock` itself is used only under the lock.

    Args:
        schedule: has the initial workers.

    Attributes:
        workers: index -> worker.
        is_closed: whether the coordinator has ended.
    """

    def __init__(self, schedule: Schedule[Any]) -> None:
        self.schedule = schedule
        self.workers: dict[int, Worker] = {}
        self.is_closed = False
        self._values: list[weakref.ref[ElasticValues]] = []
        # Reentrant: the last reference to the coordinator may disappear in a thread that holds the lock.
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        self.idle = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.moved = threading.Condition(self.lock)
        self.news = threading.Condition(self.lock)

    def close(self) -> None:
        """End all waits, and thus all threads."""
        self.is_closed = True
        for worker in self.workers.values():
            worker.stop.set()
        for condition in (self.work, self.idle, self.room, self.moved, self.news):
            condition.notify_all()

    def check_open(self) -> None:
        """Raise RuntimeError if the coordinator has ended."""
        if self.is_closed:
            raise RuntimeError("the coordinator has ended")

    def worker_of(self, member: Member[Any]) -> Worker:
        """Return the worker of a member; created if it is new."""
        worker = self.workers.get(member.index)
        if worker is None:
            worker = self.workers[member.index] = Worker(member, Place(member.index))
        return worker

    def create(self, recipe: Recipe, kind: type[ElasticValues]) -> ElasticValues:
        """Create a value on each worker, and on workers that join later while the returned values are referenced."""
        values = kind(recipe)
        self._values = [ref for ref in self._values if ref() is not None]
        self._values.append(weakref.ref(values))
        for member in self.schedule.members:
            if member.phase is Phase.RUNNING:
                self.schedule.build(member.index, values.closure_for(member.index))
            elif member.phase is Phase.LOST:
                values.closure_for(member.index)
                private.set_aborted(values.get(member.index), RuntimeError("its worker is lost"))
        self.work.notify_all()
        return values

    def build_all(self, member: Member[Any]) -> None:
        """Create all per-worker values on a worker."""
        for values in self._living_values():
            self.schedule.build(member.index, values.closure_for(member.index))

    def build_missing(self, member: Member[Any]) -> None:
        """Create those per-worker values on a worker that it has not created or begun to create."""
        for values in self._living_values():
            if values.get(member.index) is None:
                self.schedule.build(member.index, values.closure_for(member.index))

    def let_go(self, index: int) -> list[Any]:
        """Remove a worker's values, and return them."""
        return [value for values in self._living_values() if (value := values.let_go(index)) is not None]

    def lose(self, worker: Worker, error: BaseException) -> None:
        """Mark an idle worker as lost, with all its values."""
        member = worker.member
        self.schedule.lost(member.index)
        for values in self._living_values():
            value = values.get(member.index)
            if value is not None:
                private.set_aborted(value, error)
        worker.place.clear()
        if member.phase is Phase.LOST:
            _log.warning("worker %d at %s is lost: %s", member.index, member.address, first_line(error))
        self.work.notify_all()

    def _living_values(self) -> list[ElasticValues]:
        return [values for ref in self._values if (values := ref()) is not None]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; TensorFlow's errors have many."""
    return str(error).partition("\n")[0]
