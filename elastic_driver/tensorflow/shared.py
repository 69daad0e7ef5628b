"""What the threads of the elastic coordinator share, all of it under one lock.

Owns the lock and its conditions, the schedule, the workers and the values that each of them has of its own. Who waits
for what:

- ``work``: a worker's thread, for something to do.
- ``idle``: ``join()``, and whoever raises an error, for closures to end.
- ``room``: ``schedule()``, to put another closure.
- ``moved``: ``add_worker()`` and ``remove_worker()``, for a worker to reach another phase or the runtime to know it.
- ``news``: the thread that updates the runtime's cluster, for a reason to.

Each wake-up costs those that run closures: nobody is woken who could not go on.
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
    """What a member of the schedule is here: a thread, and what it runs.

    Attributes:
        member: that.
        place: where its closures run.
        thread: runs them; None while there is none.
        manager: ends what it does at present.
        stop: it is to wait for nothing any more.
        silent_since: since when it has not answered, with something in hand; None while it does.
    """

    member: Member[Any]
    place: Place
    thread: threading.Thread | None = None
    manager: Any = None
    stop: threading.Event = field(default_factory=threading.Event)
    silent_since: float | None = None


class Shared:
    """See the module. All but :attr:`lock` itself is read and written under it.

    Args:
        schedule: with the workers that there are.

    Attributes:
        workers: what the schedule's members are here, by index.
        is_closed: whether the coordinator has ended.
    """

    def __init__(self, schedule: Schedule[Any]) -> None:
        self.schedule = schedule
        self.workers: dict[int, Worker] = {}
        self.is_closed = False
        self._values: list[weakref.ref[ElasticValues]] = []
        # The last reference to the coordinator may go while a thread holds it.
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        self.idle = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.moved = threading.Condition(self.lock)
        self.news = threading.Condition(self.lock)

    def close(self) -> None:
        """Ends all waits, and so all threads."""
        self.is_closed = True
        for worker in self.workers.values():
            worker.stop.set()
        for condition in (self.work, self.idle, self.room, self.moved, self.news):
            condition.notify_all()

    def check_open(self) -> None:
        """Raises RuntimeError when the coordinator has ended."""
        if self.is_closed:
            raise RuntimeError("the coordinator has ended")

    def worker_of(self, member: Member[Any]) -> Worker:
        """What a member is here; made if it is new."""
        worker = self.workers.get(member.index)
        if worker is None:
            worker = self.workers[member.index] = Worker(member, Place(member.index))
        return worker

    def create(self, recipe: Recipe, kind: type[ElasticValues]) -> ElasticValues:
        """Has a value made on each worker, and on each that comes later for as long as somebody holds them."""
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
        """All that is per worker is made on this one."""
        for values in self._living_values():
            self.schedule.build(member.index, values.closure_for(member.index))

    def build_missing(self, member: Member[Any]) -> None:
        """All that is per worker, and that this one has not made or begun to make, is made on it."""
        for values in self._living_values():
            if values.get(member.index) is None:
                self.schedule.build(member.index, values.closure_for(member.index))

    def let_go(self, index: int) -> list[Any]:
        """What a worker has of its own: it has it no more."""
        return [value for values in self._living_values() if (value := values.let_go(index)) is not None]

    def lose(self, worker: Worker, error: BaseException) -> None:
        """Its server is gone, and all that was made there."""
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
    """What an error says, without what TensorFlow adds below."""
    return str(error).partition("\n")[0]
