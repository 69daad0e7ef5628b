"""The cluster of the elastic coordinator: it runs closures, and adds and removes workers.

Owns the waits of the callers. :mod:`~elastic_driver.tensorflow.schedule` assigns the closures, under one lock
(:mod:`~elastic_driver.tensorflow.shared`). Closures run in :mod:`~elastic_driver.tensorflow.threads`; the runtime's
cluster is in :mod:`~elastic_driver.tensorflow.runtime`.

Threads refer to these parts, not to the coordinator: they end when the script drops the coordinator.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow import private
from elastic_driver.tensorflow.failures import Judge
from elastic_driver.tensorflow.private import Closure
from elastic_driver.tensorflow.probes import Probes, Server
from elastic_driver.tensorflow.runtime import ANSWER_S, TELLING_S, RuntimeCluster, addresses_of
from elastic_driver.tensorflow.schedule import Member, Phase, Schedule
from elastic_driver.tensorflow.shared import Shared, Worker
from elastic_driver.tensorflow.threads import WorkerThreads
from elastic_driver.tensorflow.values import ElasticValues, Recipe

_log = logging.getLogger(__name__)

# How long a removal waits until the runtime has forgotten a worker.
_FORGET_S = 10.0
# With it, a request of the runtime to an unreachable server fails instead of waiting. It is read at each request.
_FAIL_FAST = "GRPC_FAIL_FAST"


class Cluster:
    """The cluster of one coordinator. All methods may be called from any thread.

    Args:
        worker_timeout_s: how long a server may be silent while it runs a closure, before another worker gets that
            closure, seconds; None for no limit.
    """

    def __init__(self, *, worker_timeout_s: float | None) -> None:
        os.environ[_FAIL_FAST] = "true"
        definition = private.server_def()
        addresses = addresses_of(definition, "worker")
        self._schedule = Schedule[Any](addresses, capacity=private.QUEUE_SIZE)
        self._shared = Shared(self._schedule)
        self._lock = self._shared.lock
        self._put = threading.Lock()  # held to put a closure, and to wait for all closures
        self._probes = Probes()
        self._runtime = RuntimeCluster(self._shared, self._probes, definition, worker_timeout_s)
        self._threads = WorkerThreads(self._shared, self._probes, self._runtime, Judge(len(addresses)))
        servers = self._probes.ask({*addresses.values(), *self._runtime.others}, ANSWER_S)
        self._runtime.start(servers)
        with self._lock:
            for member in self._schedule.members:
                member.server = servers.get(member.address)
                self._threads.start(member)

    def schedule(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Schedule a closure, as ``ClusterCoordinator.schedule`` does."""
        closure = Closure(function, args, kwargs)
        value = closure.build_output_remote_value()
        with self._put, self._lock:
            self._shared.check_open()
            # A closure queued while an error is being raised elsewhere would be canceled silently.
            while (self._schedule.is_full or self._schedule.is_raising) and not self._shared.is_closed:
                self._shared.room.wait()
            self._schedule.put(closure)
            self._raise_error()
            self._shared.work.notify()
        return value

    def join(self) -> None:
        """Wait for all closures, as ``ClusterCoordinator.join`` does."""
        with self._put, self._lock:
            while self._schedule.error is None and not self._schedule.is_done and not self._shared.is_closed:
                self._shared.idle.wait()
            self._raise_error()

    def done(self) -> bool:
        """Return whether all closures have finished, as ``ClusterCoordinator.done`` does."""
        with self._lock:
            self._raise_error()
            return self._schedule.is_done

    def create(self, recipe: Recipe, kind: type[ElasticValues]) -> ElasticValues:
        """Create a value on each worker, and on workers that join later while the values are referenced."""
        with self._lock:
            return self._shared.create(recipe, kind)

    def is_for_others(self, address: str) -> bool:
        """Return whether a parameter server, or this process, has this address."""
        return address in self._runtime.others

    @property
    def is_closed(self) -> bool:
        """Whether the cluster is closed."""
        return self._shared.is_closed

    def addresses(self) -> frozenset[str]:
        """Return the addresses of the workers that are neither stopped nor stopping."""
        with self._lock:
            return frozenset(
                member.address
                for member in self._schedule.members
                if member.phase not in (Phase.STOPPING, Phase.STOPPED)
            )

    def members(self) -> tuple[Member[Any], ...]:
        """Return all workers."""
        with self._lock:
            return self._schedule.members

    def add(self, address: str, timeout_s: float) -> Member[Any]:
        """Add a worker; see ``ElasticClusterCoordinator.add_worker``."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._shared.check_open()
                there = self._schedule.find(address)
                is_new = there is None or there.phase is Phase.STOPPED
                member = self._schedule.add(address)
                if is_new:
                    worker = self._shared.worker_of(member)
                    worker.stop = threading.Event()
                    break
                if member.phase is Phase.RUNNING:
                    self._shared.build_missing(member)
                    self._shared.work.notify_all()
                    self._shared.moved.notify_all()
                    return member
                left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                if not self._shared.moved.wait(left) and time.monotonic() >= deadline:
                    raise TimeoutError(f"worker {address} did not answer within {timeout_s:g} s")
        try:
            self._connect(worker, deadline, timeout_s)
        except BaseException:
            with self._lock:
                if member.phase is Phase.JOINING:
                    self._schedule.abandoned(member.index)
                    if not member.belongs:
                        del self._shared.workers[member.index]
                self._shared.work.notify_all()
                self._shared.moved.notify_all()
            self._probes.forget(address)
            raise
        _log.info("worker %d at %s has joined", member.index, address)
        return member

    def remove(self, address: str, timeout_s: float | None, *, forget: bool = False) -> Member[Any]:
        """Remove a worker; see ``ElasticClusterCoordinator.remove_worker``.

        Args:
            address: the address of its server.
            timeout_s: how long it may take to finish its closure, seconds.
            forget: whether its server is about to end: then it is also removed from the runtime's cluster before this
                returns.
        """
        with self._lock:
            self._shared.check_open()
            try:
                member = self._schedule.remove(address)
            except KeyError:
                raise ValueError(f"there is no worker at {address}") from None
            worker = self._shared.workers[member.index]
            if member.phase is not Phase.STOPPING:
                worker.stop.set()
            self._shared.work.notify_all()
            self._shared.moved.notify_all()
            stopped = self._threads.await_stop(worker, timeout_s)
            manager = worker.manager
        if not stopped:
            self._threads.end(worker, manager)
            # Otherwise the runtime would wait for a hung server in any thread that uses or frees its values.
            forget = forget or not self._probes.ask((address,), TELLING_S)
        with self._lock:
            freed = [] if member.phase is not Phase.STOPPED else self._shared.let_go(member.index)
        freed.clear()  # not under the lock: the runtime frees the values on the server
        if forget:
            with self._lock:
                if member.phase is Phase.STOPPED and member.belongs:
                    self._runtime.update_and_wait(time.monotonic() + _FORGET_S)
        self._probes.forget(address)
        if member.phase is Phase.STOPPED:
            _log.info("worker %d at %s has stopped", member.index, address)
        return member

    def stop(self) -> None:
        """End all threads, without waiting for them."""
        with self._lock:
            managers = [worker.manager for worker in self._shared.workers.values() if worker.manager is not None]
            self._shared.close()
        for manager in managers:
            manager.start_cancel()
        self._probes.close()

    def _raise_error(self) -> None:
        """Raise the pending error, if any, once no closure runs. Under the lock."""
        while self._schedule.is_raising:
            self._shared.idle.wait()
        if self._schedule.error is None:
            return
        try:
            for index in self._schedule.begin_raising():
                self._shared.workers[index].manager.start_cancel()
            while self._schedule.in_hand:
                self._shared.idle.wait()
        except BaseException:  # Ctrl-C: the next call raises the error
            self._schedule.postpone_raising()
            for condition in (self._shared.work, self._shared.idle, self._shared.room):
                condition.notify_all()
            raise
        error, closures = self._schedule.end_raising()
        for closure in closures:
            closure.mark_cancelled()
        for condition in (self._shared.work, self._shared.idle, self._shared.room):
            condition.notify_all()
        raise error

    def _connect(self, worker: Worker, deadline: float, timeout_s: float) -> None:
        """Wait until a JOINING worker's server answers and the runtime has it in its cluster."""
        member = worker.member
        server: Server | None = None
        while True:
            server = self._probes.wait(member.address, deadline, worker.stop)
            with self._lock:
                known_as = None if server is None else self._runtime.known_as(member, server)
                if known_as is not None:
                    raise ValueError(f"the server at {member.address} is already in the cluster, as {known_as}")
                if server is not None and not (member.belongs and member.server == server):
                    self._runtime.update_and_wait(deadline, worker.stop)
                if worker.stop.is_set() or self._shared.is_closed:
                    raise tf.errors.CancelledError(None, None, f"worker {member.address} was removed before it joined")
                if server is not None and member.belongs:
                    self._threads.start(member)  # first: if no thread can be started, it has not joined
                    self._schedule.connected(member.index, server)
                    self._shared.build_all(member)
                    self._shared.work.notify_all()
                    self._shared.moved.notify_all()
                    return
            if server is None or time.monotonic() >= deadline:
                where = "did not answer" if server is None else "answers, but could not be added to the cluster"
                raise TimeoutError(f"worker {member.address} {where} within {timeout_s:g} s")
