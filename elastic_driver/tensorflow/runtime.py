"""The cluster of TensorFlow's runtime, and its updates.

Owns the definition of the runtime's cluster, and one thread (``elastic-tf-cluster``) that updates it, once for all
requests since the last update (:meth:`RuntimeCluster.request`). During an update the runtime waits for every server in
the cluster, so the thread queries all of them first, and omits silent ones. If a server falls silent during the update,
its connections are shut down, which ends the wait. Between updates the same thread checks the workers with
long-running closures. It ends with the coordinator; until then it is woken by a request, or when the next check is due.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow import private
from elastic_driver.tensorflow.probes import Probes, Server, bound, connections, sever
from elastic_driver.tensorflow.schedule import Member, Phase
from elastic_driver.tensorflow.shared import Shared, first_line

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a server may take to answer before the cluster is updated without it, seconds."""
TELLING_S = 2.0
"""How long an update may take until its servers are queried again, and how long they may then take to answer,
seconds."""
_SEVER_PAUSE_S = 0.2
AGAIN_S = (0.05, 1.0)
"""The shortest and longest pause between two tries of an update, seconds."""
# The runtime tries to connect to an unreachable server once a second. Before it has, each update fails, and leaves
# threads behind.
_CONNECT_S = 1.1
_CONNECT_PAUSE_S = 0.03
# After each so many failures in a row due to a parameter server, the error is raised in the script.
_PS_TRIES = 3
LOOK_S = 5.0
"""How often the servers of workers with long-running closures are queried, seconds."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The next update of the runtime's cluster.

    Attributes:
        wanted: index -> address of the workers.
        definitions: the cluster definitions to apply, in this order.
        known: all servers that the runtime may wait for.
        silent: the servers that did not answer.
    """

    wanted: Mapping[int, str]
    definitions: Sequence[Any]
    known: frozenset[str]
    silent: Sequence[str]


class RuntimeCluster:
    """The runtime's cluster. Thread-safe.

    Args:
        shared: has the wanted workers.
        probes: queries servers.
        definition: the runtime's current cluster.
        worker_timeout_s: see :class:`~elastic_driver.tensorflow.cluster.Cluster`.

    Attributes:
        others: the addresses of all processes that are not workers.
    """

    def __init__(self, shared: Shared, probes: Probes, definition: Any, worker_timeout_s: float | None) -> None:
        self._shared, self._lock, self._schedule = shared, shared.lock, shared.schedule
        self._probes, self._definition = probes, definition
        self._worker_timeout_s = worker_timeout_s
        self._parameter_servers = addresses_of(definition, "ps")
        self.others = frozenset(
            address for job in definition.cluster.job if job.name != "worker" for address in job.tasks.values()
        )
        self._serve_others: dict[Server, str] = {}  # the processes that are not workers
        self._requested = self._updated = 0
        self._ps_failures = 0
        self._thread = threading.Thread(target=self._run, name="elastic-tf-cluster", daemon=True)

    def start(self, servers: Mapping[str, Server]) -> None:
        """Start the thread.

        Args:
            servers: address -> process, for all servers that answer now.
        """
        self._serve_others = {servers[address]: address for address in self.others & servers.keys()}
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------------------------------

    def update_and_wait(self, deadline: float, stop: threading.Event | None = None) -> bool:
        """Request an update of the runtime's cluster, and wait for it. Under the lock. Returns whether it was done."""
        number = self.request()
        while self._updated < number:
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()) or self._shared.is_closed:
                return False
            self._shared.moved.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def request(self) -> int:
        """Request an update of the runtime's cluster. Under the lock. Returns the value of ``_updated`` after it."""
        self._requested += 1
        self._shared.news.notify_all()
        return self._requested

    def known_as(self, member: Member[Any], server: Server) -> str | None:
        """Return another address at which this process is in the cluster already; None if it is not. Under the lock.

        Adding it under a second address would make the runtime reset it, and its first task would be lost.
        """
        for other in self._schedule.members:
            if other is not member and other.server == server and other.belongs and other.phase is not Phase.STOPPED:
                return other.address
        return self._serve_others.get(server)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Update the runtime's cluster on request, and check long-running closures."""
        pause = AGAIN_S[0]
        between_looks = min(LOOK_S, (self._worker_timeout_s or LOOK_S) / 3)
        look_at = time.monotonic() + between_looks
        while True:
            with self._lock:
                while (
                    not self._shared.is_closed
                    and self._requested == self._updated
                    and (left := look_at - time.monotonic()) > 0
                ):
                    self._shared.news.wait(left)
                if self._shared.is_closed:
                    return
                asked, told = self._requested, self._updated
            if time.monotonic() >= look_at:
                self._look()
                self._bound()
                look_at = time.monotonic() + between_looks
            if asked == told:
                continue
            plan: _Plan | None = None
            try:
                plan = self._plan()
                self._update(plan)
            except Exception as error:
                self._judge(error)
                _log.info("the cluster could not be updated: %s", first_line(error))
                is_connected = plan is not None and self._await_connection(plan)
                # The new connection may not be the missing one: only the first failure is retried without a pause.
                if not is_connected or pause > AGAIN_S[0]:
                    time.sleep(pause)
                pause = min(2 * pause, AGAIN_S[1])
                continue
            pause = AGAIN_S[0]
            with self._lock:
                self._updated = asked
                self._ps_failures = 0
                self._shared.moved.notify_all()
            self._bound()  # after the notification, since it may take long to resolve names

    def _plan(self) -> _Plan:
        with self._lock:
            wanted = self._schedule.wanted()
        everybody = {*wanted.values(), *self._parameter_servers.values()}
        answers = self._probes.ask(everybody, ANSWER_S)
        for index, address in self._parameter_servers.items():
            if address not in answers:
                raise tf.errors.UnavailableError(
                    None, None, f"parameter server /job:ps/replica:0/task:{index} at {address} does not answer"
                )
        silent = {index: address for index, address in wanted.items() if address not in answers}
        if silent:
            self._drop(silent)
        with self._lock:
            wanted = self._schedule.wanted(silent)
        # Workers that were added meanwhile, whose servers were not queried, wait for the next update.
        wanted = {index: address for index, address in wanted.items() if address in answers}
        wanted = self._without_other_names(wanted, answers)
        # A process that was unreachable and has returned lacks the functions traced meanwhile: the runtime sends them
        # only to new members, so it is removed first.
        with self._lock:
            back = {
                member.index
                for member in self._schedule.members
                if member.phase is Phase.LOST and member.belongs and member.server == answers.get(member.address)
            }
        definitions = [_with_workers(self._definition, wanted)]
        if back:
            others = {index: address for index, address in wanted.items() if index not in back}
            definitions.insert(0, _with_workers(self._definition, others))
        known = everybody | set(addresses_of(private.server_def(), "worker").values())
        return _Plan(wanted, definitions, frozenset(known), tuple(silent.values()))

    def _update(self, plan: _Plan) -> None:
        with _Watch(self._probes, plan.known, away=plan.silent):
            for definition in plan.definitions:
                private.update_server_def(definition)
        with self._lock:
            for index in self._schedule.told(plan.wanted):
                worker = self._shared.workers.pop(index)
                self._probes.forget(worker.member.address)

    def _await_connection(self, plan: _Plan) -> bool:
        """Wait, after a failed update, until the runtime has connected to one more server.

        Does not wait if a server of the plan no longer answers: the next plan omits it.

        Returns:
            Whether it has connected.
        """
        servers = {*plan.wanted.values(), *self._parameter_servers.values()}
        before = connections(servers)
        if self._probes.ask(servers, TELLING_S).keys() != servers:
            return False
        until = time.monotonic() + _CONNECT_S
        while not self._shared.is_closed and time.monotonic() < until:
            if not connections(servers) <= before:
                return True
            time.sleep(_CONNECT_PAUSE_S)
        return False

    def _without_other_names(self, wanted: Mapping[int, str], answers: Mapping[str, Server]) -> dict[int, str]:
        """Return the workers with each process once: under its current index, or else its lowest one."""
        with self._lock:
            self._serve_others |= {answers[address]: address for address in self.others & answers.keys()}
            taken = set(self._serve_others)
            known = {
                member.index
                for member in self._schedule.members
                if member.belongs and member.server == answers.get(member.address)
            }
        once: dict[int, str] = {}
        for index in sorted(wanted, key=lambda index: (index not in known, index)):
            server = answers[wanted[index]]
            if server not in taken:
                taken.add(server)
                once[index] = wanted[index]
        return dict(sorted(once.items()))

    def _drop(self, silent: Mapping[int, str]) -> None:
        """Lose silent servers: other workers get their closures, and idle workers are LOST at once."""
        sever(silent.values())
        with self._lock:
            for worker in [self._shared.workers[index] for index in silent if index in self._shared.workers]:
                if worker.member.phase is Phase.RUNNING and worker.member.is_idle:
                    self._shared.lose(worker, RuntimeError("its server does not answer"))

    def _judge(self, error: BaseException) -> None:
        """Raise the error in the script if a parameter server has failed repeatedly. Ignores failures of workers."""
        failed = private.failed_parameter_servers(error) or "/job:ps/" in str(error)
        with self._lock:
            self._ps_failures = self._ps_failures + 1 if failed else 0
            if failed and self._ps_failures % _PS_TRIES == 0:
                self._schedule.fail(error)
                self._shared.idle.notify_all()

    def _bound(self) -> None:
        """Set the timeouts of all connections. Repeated regularly, since the runtime reconnects at any time."""
        if self._worker_timeout_s is not None:
            known = (addresses_of(private.server_def(), job).values() for job in ("worker", "ps"))
            bound(itertools.chain(*known), self._worker_timeout_s)

    def _look(self) -> None:
        """Sever the servers of busy workers that have been silent for too long: other workers get their closures."""
        if self._worker_timeout_s is None:
            return
        with self._lock:
            busy = {
                worker.member.address: worker
                for worker in self._shared.workers.values()
                if not worker.member.is_idle and worker.member.phase in (Phase.RUNNING, Phase.STOPPING)
            }
        if not busy:
            return
        now = time.monotonic()
        answers = self._probes.ask(busy, min(TELLING_S, self._worker_timeout_s))
        late = []
        with self._lock:
            for address, worker in busy.items():
                if address in answers or worker.member.is_idle:
                    worker.silent_since = None
                    continue
                worker.silent_since = worker.silent_since or now
                if time.monotonic() - worker.silent_since >= self._worker_timeout_s:
                    late.append(address)
        sever(late)


class _Watch:
    """Shuts down the connections to silent servers during an update of the runtime's cluster.

    Args:
        probes: queries servers.
        addresses: the addresses of all servers that the runtime may wait for.
        away: the servers that are known not to answer.
    """

    def __init__(self, probes: Probes, addresses: Iterable[str], *, away: Iterable[str]) -> None:
        self._probes = probes
        self._addresses = tuple(addresses)
        self._away = tuple(away)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-tf-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        # If all servers answered, there is usually nothing to do.
        while not self._over.wait(_SEVER_PAUSE_S if self._away else TELLING_S):
            if time.monotonic() - began >= TELLING_S:
                answers = self._probes.ask(self._addresses, TELLING_S)
                self._away = tuple(address for address in self._addresses if address not in answers)
            sever(self._away)


def addresses_of(definition: Any, job: str) -> dict[int, str]:
    """Return index -> address of a job's tasks."""
    return {index: address for one in definition.cluster.job if one.name == job for index, address in one.tasks.items()}


def _with_workers(definition: Any, workers: Mapping[int, str]) -> Any:
    """Return the cluster with these workers, each with the device filters of the present ones."""
    new = type(definition)()
    new.CopyFrom(definition)
    for job in new.cluster.job:
        if job.name == "worker":
            job.tasks.clear()
            for index, address in workers.items():
                job.tasks[index] = address
    for filters in new.cluster_device_filters.jobs:
        if filters.name == "worker":
            sees = next((tuple(task.device_filters) for task in filters.tasks.values()), ())
            filters.tasks.clear()
            for index in workers:
                filters.tasks[index].device_filters.extend(sees)
    return new
