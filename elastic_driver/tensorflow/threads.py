"""The threads of the workers: one per worker, which runs the worker's closures.

When the worker's server is lost, the same thread queries it until it answers, so that no other thread is blocked by it.
The thread ends with its worker or the coordinator; a closure for it, or a change of the worker's phase, wakes it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from elastic_driver.tensorflow import private
from elastic_driver.tensorflow.failures import Judge, Verdict
from elastic_driver.tensorflow.private import Closure, ResourceClosure, cancelled_by
from elastic_driver.tensorflow.probes import Probes, sever
from elastic_driver.tensorflow.runtime import AGAIN_S, RuntimeCluster
from elastic_driver.tensorflow.schedule import Member, Phase
from elastic_driver.tensorflow.shared import Shared, Worker

_log = logging.getLogger(__name__)

# How long a canceled closure may take to end before the connections to its server are shut down.
_CANCELLED_S = 5.0
# How long a lost worker may take to return before it is removed from the runtime's cluster until it does.
_BACK_S = 5.0


class WorkerThreads:
    """The threads of all workers.

    Args:
        shared: has the workers.
        probes: queries servers.
        runtime: the runtime's cluster, to which workers that have returned are added again.
        judge: classifies the errors of closures.
    """

    def __init__(self, shared: Shared, probes: Probes, runtime: RuntimeCluster, judge: Judge) -> None:
        self._shared, self._lock, self._schedule = shared, shared.lock, shared.schedule
        self._probes, self._runtime, self._judge = probes, runtime, judge

    def start(self, member: Member[Any]) -> None:
        """Start a worker's thread unless it is running. Under the lock."""
        worker = self._shared.worker_of(member)
        if worker.thread is None:
            thread = threading.Thread(
                target=self._run, args=(worker,), name=f"elastic-tf-worker-{member.index}", daemon=True
            )
            thread.start()
            worker.thread = thread

    def await_stop(self, worker: Worker, limit_s: float | None) -> bool:
        """Wait until a worker has stopped, or was added again. Under the lock. Returns False after the time limit."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self._shared.is_closed and (
            worker.member.phase in (Phase.STOPPING, Phase.JOINING)
            or (worker.member.phase is Phase.STOPPED and worker.thread is not None)
        ):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._shared.moved.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
            if worker.member.index not in self._shared.workers:
                break
        return True

    def end(self, worker: Worker, manager: Any) -> None:
        """Cancel a worker's closure, and shut down its server's connections if that does not end it."""
        while True:
            if manager is not None:
                manager.start_cancel()
            with self._lock:
                if self.await_stop(worker, _CANCELLED_S):
                    return
                manager = worker.manager
            sever((worker.member.address,))

    # --- a thread ----------------------------------------------------------------------------------------------------

    def _run(self, worker: Worker) -> None:
        try:
            self._work_on(worker)
        except BaseException as error:
            # Otherwise the error would go unnoticed, and the callers that wait for its closure would wait forever.
            with self._lock:
                self._schedule.fail(error)
                self._give_up(worker, error)
            raise

    def _give_up(self, worker: Worker, error: BaseException) -> None:
        """Fail the closure of a worker whose thread has failed, and start another thread for it. Under the lock."""
        member, worker.manager, worker.thread = worker.member, None, None
        for ticket in (member.in_hand, member.building):
            if ticket is not None:
                ticket.set_error(error)
        if member.in_hand is not None:
            self._schedule.failed(member.index, error)
        if member.building is not None:
            self._schedule.built(member.index)
        if member.phase in (Phase.RUNNING, Phase.LOST) and not self._shared.is_closed:
            self.start(member)
        self._shared.idle.notify_all()
        self._shared.moved.notify_all()

    def _work_on(self, worker: Worker) -> None:
        member = worker.member
        worker.stop.wait(_start_delay_s(member.index))
        while True:
            with self._lock:
                task = self._next(worker)
            if task is None:
                return
            if member.phase is Phase.LOST:
                self._recover(worker)
            elif isinstance(task, ResourceClosure):
                self._build(worker, task)
            else:
                self._execute(worker, task)
            task = None  # free the closure, if there is no other reference, before waiting for the next one

    def _next(self, worker: Worker) -> Any:
        """Wait for the worker's next closure, and return it; any value for a LOST worker; None to end the thread."""
        member = worker.member
        while not self._shared.is_closed:
            # A JOINING worker had stopped before, and gets another thread when it runs: this one would be woken for
            # closures that it cannot take.
            if member.phase in (Phase.STOPPED, Phase.JOINING):
                break
            if member.phase is Phase.LOST:
                return member
            task = self._schedule.take(member.index)
            if task is not None:
                worker.manager = private.CancellationManager()
                self._shared.room.notify()
                return task
            self._shared.work.wait()
        worker.thread = None
        worker.place.clear()
        self._shared.work.notify()  # this thread may have got a wake-up meant for a running one
        self._shared.moved.notify_all()
        return None

    def _execute(self, worker: Worker, closure: Closure) -> None:
        member, manager = worker.member, worker.manager
        failure: BaseException | None = None
        try:
            with cancelled_by(manager):
                closure.execute_on(worker.place)
        except Exception as error:
            failure = error
        with self._lock:
            worker.manager, worker.silent_since = None, None
            verdict = None
            if failure is None:
                self._schedule.finished(member.index)
            else:
                verdict = self._judge.judge(failure, cancelled=manager.is_cancelled)
                if verdict is Verdict.FAILED:
                    self._schedule.failed(member.index, failure)
                elif (cancelled := self._schedule.put_back(member.index)) is not None:
                    cancelled.mark_cancelled()
                if verdict is Verdict.LOST:
                    self._shared.lose(worker, failure)
            # Each wake-up slows down the threads that run closures, so none is woken that could not continue.
            if self._schedule.error is not None or self._schedule.is_done:
                self._shared.idle.notify_all()
            if failure is not None:
                self._shared.work.notify()
            if member.phase is not Phase.RUNNING:
                self._shared.moved.notify_all()
        if verdict is Verdict.FAILED and failure is not None:
            closure.set_error(failure)

    def _build(self, worker: Worker, closure: ResourceClosure) -> None:
        member, manager = worker.member, worker.manager
        failure: BaseException | None = None
        verdict: Verdict | None = None
        while closure.is_wanted:
            failure = None
            try:
                with cancelled_by(manager):
                    closure.execute_on(worker.place)
            except Exception as error:
                failure = error
            if failure is None:
                break
            with self._lock:
                verdict = self._judge.judge(failure, cancelled=manager.is_cancelled)
            if verdict is not Verdict.AGAIN or manager.is_cancelled:
                break
        with self._lock:
            worker.manager, worker.silent_since = None, None
            self._schedule.built(member.index)
            if failure is not None and verdict is Verdict.LOST:
                self._shared.lose(worker, failure)
            if member.phase is not Phase.RUNNING:
                self._shared.moved.notify_all()
        if failure is not None and verdict is not Verdict.LOST:
            closure.set_error(failure)

    def _recover(self, worker: Worker) -> None:
        """Query a LOST worker's server until it answers, or the worker is no longer wanted."""
        member = worker.member
        server = self._probes.wait(member.address, time.monotonic() + _BACK_S, worker.stop)
        if server is None and not worker.stop.is_set():
            # Remove it from the runtime's cluster: otherwise each function traced from now on would fail to reach it.
            with self._lock:
                self._runtime.request()
            server = self._probes.wait(member.address, float("inf"), worker.stop)
        if server is None:
            return
        with self._lock:
            known_as = self._runtime.known_as(member, server)
            if known_as is None and not self._runtime.update_and_wait(float("inf"), worker.stop):
                return
            if known_as is None and member.phase is Phase.LOST and member.belongs:
                self._schedule.connected(member.index, server)
                self._shared.build_all(member)
                self._shared.moved.notify_all()
                _log.warning("worker %d at %s is back", member.index, member.address)
                return
        worker.stop.wait(AGAIN_S[1])  # its server answers, but cannot be added now


def _start_delay_s(index: int) -> float:
    """Return how long a worker waits before its first closure, from TensorFlow's variables, seconds."""
    delay = int(os.environ.get("TF_COORDINATOR_SCHEDULE_START_DELAY", "0")) * index
    most = int(os.environ.get("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX", "0"))
    return float(min(delay, most) if most else delay)
