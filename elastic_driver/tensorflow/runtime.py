"""What TensorFlow's runtime is told of the cluster, and by whom.

Owns the cluster as the runtime has it, and one thread (``elastic-tf-cluster``) that tells the runtime of another, for
all who have asked since it did so last (:meth:`RuntimeCluster.request`). The runtime waits for every server in it, so
all are asked first, and who is silent is left out. What goes silent just then has its connections shut, which ends the
wait. Between two updates the same thread looks after workers that have had a closure for long. It ends when the
coordinator does; until then a request, or the time for the next look, wakes it.
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
"""How long a server that belongs may take to answer before the cluster is told without it."""
TELLING_S = 2.0
"""How long the runtime may take over another cluster until somebody looks what it waits for, and how long a server may
take to answer then."""
_SEVER_PAUSE_S = 0.2
AGAIN_S = (0.05, 1.0)
"""Pauses between two tries to tell it."""
# The runtime connects once a second to a server that was away. Until it has, each try fails, and leaves threads.
_CONNECT_S = 1.1
_CONNECT_PAUSE_S = 0.03
# So many tries in a row that fail by a parameter server are the script's business.
_PS_TRIES = 3
LOOK_S = 5.0
"""How often who has a long closure in hand is asked whether it is there."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the runtime is to be told.

    Attributes:
        wanted: the workers, by index.
        definitions: of the cluster, in turn.
        known: all servers that the runtime may wait for.
        silent: those that are known not to answer.
    """

    wanted: Mapping[int, str]
    definitions: Sequence[Any]
    known: frozenset[str]
    silent: Sequence[str]


class RuntimeCluster:
    """See the module. All methods may be called from any thread.

    Args:
        shared: with the workers as they are wanted.
        probes: ask servers.
        definition: of the cluster, as the runtime has it at first.
        worker_timeout_s: see :class:`~elastic_driver.tensorflow.cluster.Cluster`.

    Attributes:
        others: the addresses of all processes that are no workers.
    """

    def __init__(self, shared: Shared, probes: Probes, definition: Any, worker_timeout_s: float | None) -> None:
        self._shared, self._lock, self._schedule = shared, shared.lock, shared.schedule
        self._probes, self._definition = probes, definition
        self._worker_timeout_s = worker_timeout_s
        self._parameter_servers = addresses_of(definition, "ps")
        self.others = frozenset(
            address for job in definition.cluster.job if job.name != "worker" for address in job.tasks.values()
        )
        self._serve_others: dict[Server, str] = {}  # which processes are no workers, and their addresses
        self._requested = self._updated = 0
        self._ps_failures = 0
        self._thread = threading.Thread(target=self._run, name="elastic-tf-cluster", daemon=True)

    def start(self, servers: Mapping[str, Server]) -> None:
        """Begins.

        Args:
            servers: which processes answer now, by address.
        """
        self._serve_others = {servers[address]: address for address in self.others & servers.keys()}
        self._thread.start()

    # --- what others ask ---------------------------------------------------------------------------------------------

    def update_and_wait(self, deadline: float, stop: threading.Event | None = None) -> bool:
        """Has the runtime's cluster updated, and waits for that. Under the lock. Returns whether it was."""
        number = self.request()
        while self._updated < number:
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()) or self._shared.is_closed:
                return False
            self._shared.moved.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def request(self) -> int:
        """Has the runtime's cluster updated. Under the lock. Returns the number that ``_updated`` reaches with that."""
        self._requested += 1
        self._shared.news.notify_all()
        return self._requested

    def known_as(self, member: Member[Any], server: Server) -> str | None:
        """The other address by which this process is in the cluster; None for none. Under the lock.

        The runtime would make it somebody else, and what it was would be gone.
        """
        for other in self._schedule.members:
            if other is not member and other.server == server and other.belongs and other.phase is not Phase.STOPPED:
                return other.address
        return self._serve_others.get(server)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Tells the runtime of another cluster when somebody asks for that; looks after long closures."""
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
                _log.info("the cluster could not be told anew: %s", first_line(error))
                is_connected = plan is not None and self._await_connection(plan)
                # It may not be the one that was missing: only the first time is it taken for that.
                if not is_connected or pause > AGAIN_S[0]:
                    time.sleep(pause)
                pause = min(2 * pause, AGAIN_S[1])
                continue
            pause = AGAIN_S[0]
            with self._lock:
                self._updated = asked
                self._ps_failures = 0
                self._shared.moved.notify_all()
            self._bound()  # it may have to look up names: nobody waits for that

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
        # Who has asked since, and was not asked itself, waits for the next time.
        wanted = {index: address for index, address in wanted.items() if address in answers}
        wanted = self._without_other_names(wanted, answers)
        # A process that was cut off, and is back, lacks the functions that were traced meanwhile: the runtime gives
        # them only to who is new to it.
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
        """The runtime has failed: waits until it has connected to another server, unless there is nothing to wait for.

        That is so where a server of the plan does not answer any more: the next plan goes without it.

        Returns:
            Whether it has.
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
        """Each process once: as what it is already; otherwise as the first of those whose address it has."""
        with self._lock:
            self._serve_others |= {answers[address]: address for address in self.others & answers.keys()}
            taken = set(self._serve_others)
            known = {
                one.index for one in self._schedule.members if one.belongs and one.server == answers.get(one.address)
            }
        once: dict[int, str] = {}
        for index in sorted(wanted, key=lambda index: (index not in known, index)):
            server = answers[wanted[index]]
            if server not in taken:
                taken.add(server)
                once[index] = wanted[index]
        return dict(sorted(once.items()))

    def _drop(self, silent: Mapping[int, str]) -> None:
        """Servers do not answer: what they have in hand goes to others, and who has nothing is lost at once."""
        sever(silent.values())
        with self._lock:
            for worker in [self._shared.workers[index] for index in silent if index in self._shared.workers]:
                if worker.member.phase is Phase.RUNNING and worker.member.is_idle:
                    self._shared.lose(worker, RuntimeError("its server does not answer"))

    def _judge(self, error: BaseException) -> None:
        """A parameter server that is gone is the script's business; workers come back, or do not."""
        failed = private.failed_parameter_servers(error) or "/job:ps/" in str(error)
        with self._lock:
            self._ps_failures = self._ps_failures + 1 if failed else 0
            if failed and self._ps_failures % _PS_TRIES == 0:
                self._schedule.fail(error)
                self._shared.idle.notify_all()

    def _bound(self) -> None:
        """Connections are made anew at any time; so this is done again and again."""
        if self._worker_timeout_s is not None:
            known = (addresses_of(private.server_def(), job).values() for job in ("worker", "ps"))
            bound(itertools.chain(*known), self._worker_timeout_s)

    def _look(self) -> None:
        """Who has had something in hand for long, and does not answer, is severed: its closure goes to another."""
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
    """While the runtime is told of another cluster: who does not answer then has its connections shut.

    Args:
        probes: ask.
        addresses: of all servers that it may wait for.
        away: those that are known not to answer.
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
        # Without any that is away there is nothing to do, mostly.
        while not self._over.wait(_SEVER_PAUSE_S if self._away else TELLING_S):
            if time.monotonic() - began >= TELLING_S:
                answers = self._probes.ask(self._addresses, TELLING_S)
                self._away = tuple(address for address in self._addresses if address not in answers)
            sever(self._away)


def addresses_of(definition: Any, job: str) -> dict[int, str]:
    """The addresses of a job's tasks, by index."""
    return {index: address for one in definition.cluster.job if one.name == job for index, address in one.tasks.items()}


def _with_workers(definition: Any, workers: Mapping[int, str]) -> Any:
    """The cluster with these workers; each sees the devices of the parameter servers and of the coordinator."""
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
