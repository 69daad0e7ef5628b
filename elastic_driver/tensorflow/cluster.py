"""The shell of the elastic coordinator: the workers' threads, the runtime's cluster, and who waits for what.

Owns the lock and the threads; who does what is decided by :mod:`~elastic_driver.tensorflow.schedule`, under the lock.

- One thread a worker runs its closures. When its server is lost the same thread asks for it until it answers, so
  nobody else waits behind that. It ends when the worker has stopped.
- One thread tells the runtime of another cluster (:meth:`Cluster._tell`), for all who have asked since it did so last.
  The runtime waits for every server in it, so all are asked first, and who is silent is left out. What goes silent
  just then has its connections shut, which ends the wait.

Threads hold the cluster, and not the coordinator: what the script lets go ends them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow import private
from elastic_driver.tensorflow.failures import Judge, Verdict
from elastic_driver.tensorflow.private import Closure, Place, ResourceClosure, cancelled_by
from elastic_driver.tensorflow.probes import Probes, Server, bound, connections, sever
from elastic_driver.tensorflow.schedule import Member, Phase, Schedule
from elastic_driver.tensorflow.values import ElasticValues, Recipe

_log = logging.getLogger(__name__)

# How long a server that belongs may take to answer before the cluster is told without it.
_ANSWER_S = 5.0
# How long the runtime may take over another cluster until somebody looks what it waits for, and how long a server may
# take to answer then.
_TELLING_S = 2.0
_SEVER_PAUSE_S = 0.2
# Pauses between two tries to tell it.
_AGAIN_S = (0.05, 1.0)
# The runtime connects once a second to a server that was away. Until it has, each try fails, and leaves threads.
_CONNECT_S = 1.1
_CONNECT_PAUSE_S = 0.03
# So many tries in a row that fail by a parameter server are the script's business.
_PS_TRIES = 3
# How often who has a long closure in hand is asked whether it is there.
_LOOK_S = 5.0
# How long a closure that was cancelled may take to end until its connection is shut.
_CANCELLED_S = 5.0
# How long a lost worker may take to come back until the runtime forgets it, for the time being; and how long a removal
# waits for that.
_BACK_S = 5.0
_FORGET_S = 10.0
# A request of the runtime to a server that is away fails, instead of waiting for it. It is read at each of them.
_FAIL_FAST = "GRPC_FAIL_FAST"


@dataclass(slots=True, eq=False)
class _Worker:
    """What a member of the schedule is here.

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


class Cluster:
    """See above. All methods may be called from any thread.

    Args:
        worker_timeout_s: how long a server may be silent while it runs a closure, until that is given to another
            worker; None for ever.
    """

    def __init__(self, *, worker_timeout_s: float | None) -> None:
        os.environ[_FAIL_FAST] = "true"
        self._definition = private.server_def()
        addresses = _addresses(self._definition, "worker")
        self._parameter_servers = _addresses(self._definition, "ps")
        self._no_workers = frozenset(
            address for job in self._definition.cluster.job if job.name != "worker" for address in job.tasks.values()
        )
        self._worker_timeout_s = worker_timeout_s
        self._probes = Probes()
        self._schedule = Schedule[Any](addresses, capacity=private.QUEUE_SIZE)
        self._judge = Judge(len(addresses))
        # The last reference to the coordinator may go while a thread holds it.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # there may be something to do for a worker
        self._idle = threading.Condition(self._lock)  # closures have ended
        self._room = threading.Condition(self._lock)  # another closure may be put
        self._moved = threading.Condition(self._lock)  # a worker stands elsewhere, or the cluster was told
        self._news = threading.Condition(self._lock)  # the cluster is to be told anew
        self._put = threading.Lock()  # nobody puts a closure while somebody waits for all of them
        self._values: list[weakref.ref[ElasticValues]] = []
        self._workers: dict[int, _Worker] = {}
        self._closed = False
        self._asked = self._told = 0
        self._ps_failures = 0
        servers = self._probes.ask({*addresses.values(), *self._no_workers}, _ANSWER_S)
        # Which processes are no workers, and their addresses.
        self._serve_others = {servers[address]: address for address in self._no_workers & servers.keys()}
        with self._lock:
            for member in self._schedule.members:
                member.server = servers.get(member.address)
                self._start(member)
        self._teller = threading.Thread(target=self._tell_and_look, name="elastic-tf-cluster", daemon=True)
        self._teller.start()

    # --- what the coordinator asks -----------------------------------------------------------------------------------

    def schedule(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See ``ClusterCoordinator.schedule``."""
        closure = Closure(function, args, kwargs)
        value = closure.build_output_remote_value()
        with self._put, self._lock:
            self._check_open()
            # What is put while an error is being raised elsewhere would be cancelled, and nobody told.
            while (self._schedule.is_full or self._schedule.is_raising) and not self._closed:
                self._room.wait()
            self._schedule.put(closure)
            self._raise_error()
            self._work.notify()
        return value

    def join(self) -> None:
        """See ``ClusterCoordinator.join``."""
        with self._put, self._lock:
            while self._schedule.error is None and not self._schedule.is_done and not self._closed:
                self._idle.wait()
            self._raise_error()

    def done(self) -> bool:
        """See ``ClusterCoordinator.done``."""
        with self._lock:
            self._raise_error()
            return self._schedule.is_done

    def create(self, recipe: Recipe, kind: type[ElasticValues]) -> ElasticValues:
        """Has a value made on each worker, and on each that comes later for as long as somebody holds them."""
        with self._lock:
            values = kind(recipe)
            self._values = [ref for ref in self._values if ref() is not None]
            self._values.append(weakref.ref(values))
            for member in self._schedule.members:
                if member.phase is Phase.RUNNING:
                    self._schedule.build(member.index, values.closure_for(member.index))
                elif member.phase is Phase.LOST:
                    values.closure_for(member.index)
                    private.set_aborted(values.get(member.index), RuntimeError("its worker is lost"))
            self._work.notify_all()
            return values

    def is_for_others(self, address: str) -> bool:
        """Whether a parameter server, or this process, has this address."""
        return address in self._no_workers

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def addresses(self) -> frozenset[str]:
        """Of the workers that are not stopped, nor about to."""
        with self._lock:
            return frozenset(
                member.address
                for member in self._schedule.members
                if member.phase not in (Phase.STOPPING, Phase.STOPPED)
            )

    def members(self) -> tuple[Member[Any], ...]:
        """All workers."""
        with self._lock:
            return self._schedule.members

    def add(self, address: str, timeout_s: float) -> Member[Any]:
        """See ``ElasticClusterCoordinator.add_worker``."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._check_open()
                there = self._schedule.find(address)
                is_new = there is None or there.phase is Phase.STOPPED
                member = self._schedule.add(address)
                if is_new:
                    worker = self._workers.get(member.index)
                    if worker is None:
                        worker = self._workers[member.index] = _Worker(member, Place(member.index))
                    worker.stop = threading.Event()
                    break
                if member.phase is Phase.RUNNING:
                    self._build_missing(member)
                    self._work.notify_all()
                    self._moved.notify_all()
                    return member
                left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                if not self._moved.wait(left) and time.monotonic() >= deadline:
                    raise TimeoutError(f"worker {address} did not answer within {timeout_s:g} s")
        try:
            self._connect(worker, deadline, timeout_s)
        except BaseException:
            with self._lock:
                if member.phase is Phase.JOINING:
                    self._schedule.abandoned(member.index)
                    if not member.belongs:
                        del self._workers[member.index]
                self._work.notify_all()
                self._moved.notify_all()
            self._probes.forget(address)
            raise
        _log.info("worker %d at %s has joined", member.index, address)
        return member

    def remove(self, address: str, timeout_s: float | None, *, forget: bool = False) -> Member[Any]:
        """See ``ElasticClusterCoordinator.remove_worker``.

        Args:
            address: of its server.
            timeout_s: how long it may take to end its closure.
            forget: whether its server is about to go: the runtime then forgets it as well, before this returns.
        """
        with self._lock:
            self._check_open()
            try:
                member = self._schedule.remove(address)
            except KeyError:
                raise ValueError(f"there is no worker at {address}") from None
            worker = self._workers[member.index]
            if member.phase is not Phase.STOPPING:
                worker.stop.set()
            self._work.notify_all()
            self._moved.notify_all()
            stopped = self._await_stop(worker, timeout_s)
            manager = worker.manager
        if not stopped:
            self._end_what_it_does(worker, manager)
            # The runtime waits for a server that hangs, in whatever thread has to do with what was there.
            forget = forget or not self._probes.ask((address,), _TELLING_S)
        with self._lock:
            freed = [] if member.phase is not Phase.STOPPED else self._let_go(member.index)
        freed.clear()  # the runtime frees what they stand for: not under the lock
        if forget:
            with self._lock:
                if member.phase is Phase.STOPPED and member.belongs:
                    self._tell_and_wait(time.monotonic() + _FORGET_S)
        self._probes.forget(address)
        if member.phase is Phase.STOPPED:
            _log.info("worker %d at %s has stopped", member.index, address)
        return member

    def stop(self) -> None:
        """Ends all threads, and does not wait for them."""
        with self._lock:
            self._closed = True
            managers = [worker.manager for worker in self._workers.values() if worker.manager is not None]
            for worker in self._workers.values():
                worker.stop.set()
            for condition in (self._work, self._idle, self._room, self._moved, self._news):
                condition.notify_all()
        for manager in managers:
            manager.start_cancel()
        self._probes.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the coordinator has ended")

    def _raise_error(self) -> None:
        """Raises what is to be raised, if anything is, when no closure runs. Under the lock."""
        while self._schedule.is_raising:
            self._idle.wait()
        if self._schedule.error is None:
            return
        try:
            for index in self._schedule.begin_raising():
                self._workers[index].manager.start_cancel()
            while self._schedule.in_hand:
                self._idle.wait()
        except BaseException:  # Ctrl-C: the error is raised when somebody asks next
            self._schedule.postpone_raising()
            for condition in (self._work, self._idle, self._room):
                condition.notify_all()
            raise
        error, closures = self._schedule.end_raising()
        for closure in closures:
            closure.mark_cancelled()
        for condition in (self._work, self._idle, self._room):
            condition.notify_all()
        raise error

    # --- a worker's thread -------------------------------------------------------------------------------------------

    def _start(self, member: Member[Any]) -> None:
        worker = self._workers.get(member.index)
        if worker is None:
            worker = self._workers[member.index] = _Worker(member, Place(member.index))
        if worker.thread is None:
            thread = threading.Thread(
                target=self._run, args=(worker,), name=f"elastic-tf-worker-{member.index}", daemon=True
            )
            thread.start()
            worker.thread = thread

    def _run(self, worker: _Worker) -> None:
        try:
            self._work_on(worker)
        except BaseException as error:
            # Nobody else would hear of it, and who waits for its closure would wait for ever.
            with self._lock:
                self._schedule.fail(error)
                self._give_up(worker, error)
            raise

    def _give_up(self, worker: _Worker, error: BaseException) -> None:
        """Its thread has failed, and with it what it had in hand. Another thread goes on. Under the lock."""
        member, worker.manager, worker.thread = worker.member, None, None
        for ticket in (member.in_hand, member.building):
            if ticket is not None:
                ticket.set_error(error)
        if member.in_hand is not None:
            self._schedule.failed(member.index, error)
        if member.building is not None:
            self._schedule.built(member.index)
        if member.phase in (Phase.RUNNING, Phase.LOST) and not self._closed:
            self._start(member)
        self._idle.notify_all()
        self._moved.notify_all()

    def _work_on(self, worker: _Worker) -> None:
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
            task = None  # what nobody else holds is freed before the wait for the next

    def _next(self, worker: _Worker) -> Any:
        """What it is to do: a closure; anything when it is lost; None when it is to end."""
        member = worker.member
        while not self._closed:
            # One that is JOINING has stopped before, and gets another thread when it runs: this one would be woken for
            # closures that it cannot take.
            if member.phase in (Phase.STOPPED, Phase.JOINING):
                break
            if member.phase is Phase.LOST:
                return member
            task = self._schedule.take(member.index)
            if task is not None:
                worker.manager = private.CancellationManager()
                self._room.notify()
                return task
            self._work.wait()
        worker.thread = None
        worker.place.clear()
        self._work.notify()  # it may have been woken instead of one that runs
        self._moved.notify_all()
        return None

    def _execute(self, worker: _Worker, closure: Closure) -> None:
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
                    self._lose(worker, failure)
            # Each wake-up costs those that run closures: nobody is woken who could not go on.
            if self._schedule.error is not None or self._schedule.is_done:
                self._idle.notify_all()
            if failure is not None:
                self._work.notify()
            if member.phase is not Phase.RUNNING:
                self._moved.notify_all()
        if verdict is Verdict.FAILED and failure is not None:
            closure.set_error(failure)

    def _build(self, worker: _Worker, closure: ResourceClosure) -> None:
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
                self._lose(worker, failure)
            if member.phase is not Phase.RUNNING:
                self._moved.notify_all()
        if failure is not None and verdict is not Verdict.LOST:
            closure.set_error(failure)

    def _lose(self, worker: _Worker, error: BaseException) -> None:
        """Its server is gone, and all that was made there. Under the lock."""
        member = worker.member
        self._schedule.lost(member.index)
        for values in self._living_values():
            value = values.get(member.index)
            if value is not None:
                private.set_aborted(value, error)
        worker.place.clear()
        if member.phase is Phase.LOST:
            _log.warning("worker %d at %s is lost: %s", member.index, member.address, _first_line(error))
        self._work.notify_all()

    def _recover(self, worker: _Worker) -> None:
        """Asks for its server until it is there, or is not wanted any more."""
        member = worker.member
        server = self._probes.wait(member.address, time.monotonic() + _BACK_S, worker.stop)
        if server is None and not worker.stop.is_set():
            # Whatever is traced from now on is not for it: the runtime would say so each time.
            with self._lock:
                self._ask_anew()
            server = self._probes.wait(member.address, float("inf"), worker.stop)
        if server is None:
            return
        with self._lock:
            known_as = self._known_as(member, server)
            if known_as is None and not self._await_told(worker, float("inf")):
                return
            if known_as is None and member.phase is Phase.LOST and member.belongs:
                self._schedule.connected(member.index, server)
                self._build_all(member)
                self._moved.notify_all()
                _log.warning("worker %d at %s is back", member.index, member.address)
                return
        worker.stop.wait(_AGAIN_S[1])  # it answers, and cannot be taken in

    # --- joining and leaving -----------------------------------------------------------------------------------------

    def _connect(self, worker: _Worker, deadline: float, timeout_s: float) -> None:
        """Has a JOINING worker's server answer, and the runtime know it."""
        member = worker.member
        server: Server | None = None
        while True:
            server = self._probes.wait(member.address, deadline, worker.stop)
            with self._lock:
                known_as = None if server is None else self._known_as(member, server)
                if known_as is not None:
                    raise ValueError(f"the server at {member.address} is in the cluster already, as {known_as}")
                if server is not None and not (member.belongs and member.server == server):
                    self._await_told(worker, deadline)
                if worker.stop.is_set() or self._closed:
                    raise tf.errors.CancelledError(
                        None, None, f"worker {member.address} was removed before it had joined"
                    )
                if server is not None and member.belongs:
                    self._start(member)  # first: if no thread can be started, it has not joined
                    self._schedule.connected(member.index, server)
                    self._build_all(member)
                    self._work.notify_all()
                    self._moved.notify_all()
                    return
            if server is None or time.monotonic() >= deadline:
                where = "did not answer" if server is None else "answers, but the cluster could not take it in"
                raise TimeoutError(f"worker {member.address} {where} within {timeout_s:g} s")

    def _known_as(self, member: Member[Any], server: Server) -> str | None:
        """The other address by which this process is in the cluster; None for none. Under the lock.

        The runtime would make it somebody else, and what it was would be gone.
        """
        for other in self._schedule.members:
            if other is not member and other.server == server and other.belongs and other.phase is not Phase.STOPPED:
                return other.address
        return self._serve_others.get(server)

    def _await_told(self, worker: _Worker, deadline: float) -> bool:
        """Has the cluster told anew, and waits for that. Under the lock. Returns whether it was."""
        return self._tell_and_wait(deadline, worker.stop)

    def _tell_and_wait(self, deadline: float, stop: threading.Event | None = None) -> bool:
        number = self._ask_anew()
        while self._told < number:
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()) or self._closed:
                return False
            self._moved.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def _ask_anew(self) -> int:
        """Has the cluster told anew. Under the lock. Returns the number that :attr:`_told` reaches with that."""
        self._asked += 1
        self._news.notify_all()
        return self._asked

    def _await_stop(self, worker: _Worker, limit_s: float | None) -> bool:
        """Waits until it has stopped, or is to run again. Under the lock."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self._closed and (
            worker.member.phase in (Phase.STOPPING, Phase.JOINING)
            or (worker.member.phase is Phase.STOPPED and worker.thread is not None)
        ):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._moved.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
            if worker.member.index not in self._workers:
                break
        return True

    def _end_what_it_does(self, worker: _Worker, manager: Any) -> None:
        """Cancels what it does, and shuts its connections if that does not help."""
        while True:
            if manager is not None:
                manager.start_cancel()
            with self._lock:
                if self._await_stop(worker, _CANCELLED_S):
                    return
                manager = worker.manager
            sever((worker.member.address,))

    def _build_all(self, member: Member[Any]) -> None:
        """All that is per worker is made on this one. Under the lock."""
        for values in self._living_values():
            self._schedule.build(member.index, values.closure_for(member.index))

    def _build_missing(self, member: Member[Any]) -> None:
        for values in self._living_values():
            if values.get(member.index) is None:
                self._schedule.build(member.index, values.closure_for(member.index))

    def _living_values(self) -> list[ElasticValues]:
        return [values for ref in self._values if (values := ref()) is not None]

    def _let_go(self, index: int) -> list[Any]:
        """What a worker has of its own. Under the lock."""
        return [value for values in self._living_values() if (value := values.let_go(index)) is not None]

    # --- the runtime's cluster ---------------------------------------------------------------------------------------

    def _tell_and_look(self) -> None:
        """Tells the runtime of another cluster when somebody asks for that; looks after long closures."""
        pause = _AGAIN_S[0]
        between_looks = min(_LOOK_S, (self._worker_timeout_s or _LOOK_S) / 3)
        look_at = time.monotonic() + between_looks
        while True:
            with self._lock:
                while not self._closed and self._asked == self._told and (left := look_at - time.monotonic()) > 0:
                    self._news.wait(left)
                if self._closed:
                    return
                asked, told = self._asked, self._told
            if time.monotonic() >= look_at:
                self._look()
                self._bound()
                look_at = time.monotonic() + between_looks
            if asked == told:
                continue
            plan: _Plan | None = None
            try:
                plan = self._plan()
                self._tell(plan)
            except Exception as error:
                self._judge_telling(error)
                _log.info("the cluster could not be told anew: %s", _first_line(error))
                is_connected = plan is not None and self._await_connection(plan)
                # It may not be the one that was missing: only the first time is it taken for that.
                if not is_connected or pause > _AGAIN_S[0]:
                    time.sleep(pause)
                pause = min(2 * pause, _AGAIN_S[1])
                continue
            pause = _AGAIN_S[0]
            with self._lock:
                self._told = asked
                self._ps_failures = 0
                self._moved.notify_all()
            self._bound()  # it may have to look up names: nobody waits for that

    def _plan(self) -> _Plan:
        with self._lock:
            wanted = self._schedule.wanted()
        everybody = {*wanted.values(), *self._parameter_servers.values()}
        answers = self._probes.ask(everybody, _ANSWER_S)
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
        known = everybody | set(_addresses(private.server_def(), "worker").values())
        return _Plan(wanted, definitions, frozenset(known), tuple(silent.values()))

    def _tell(self, plan: _Plan) -> None:
        with _Watch(self._probes, plan.known, away=plan.silent):
            for definition in plan.definitions:
                private.update_server_def(definition)
        with self._lock:
            for index in self._schedule.told(plan.wanted):
                worker = self._workers.pop(index)
                self._probes.forget(worker.member.address)

    def _await_connection(self, plan: _Plan) -> bool:
        """The runtime has failed: waits until it has connected to another server, unless there is nothing to wait for.

        That is so where a server of the plan does not answer any more: the next plan goes without it.

        Returns:
            Whether it has.
        """
        servers = {*plan.wanted.values(), *self._parameter_servers.values()}
        before = connections(servers)
        if self._probes.ask(servers, _TELLING_S).keys() != servers:
            return False
        until = time.monotonic() + _CONNECT_S
        while not self._closed and time.monotonic() < until:
            if not connections(servers) <= before:
                return True
            time.sleep(_CONNECT_PAUSE_S)
        return False

    def _without_other_names(self, wanted: Mapping[int, str], answers: Mapping[str, Server]) -> dict[int, str]:
        """Each process once: as what it is already; otherwise as the first of those whose address it has."""
        with self._lock:
            self._serve_others |= {answers[address]: address for address in self._no_workers & answers.keys()}
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
            for worker in [self._workers[index] for index in silent if index in self._workers]:
                if worker.member.phase is Phase.RUNNING and worker.member.is_idle:
                    self._lose(worker, RuntimeError("its server does not answer"))

    def _judge_telling(self, error: BaseException) -> None:
        """A parameter server that is gone is the script's business; workers come back, or do not."""
        failed = private.failed_parameter_servers(error) or "/job:ps/" in str(error)
        with self._lock:
            self._ps_failures = self._ps_failures + 1 if failed else 0
            if failed and self._ps_failures % _PS_TRIES == 0:
                self._schedule.fail(error)
                self._idle.notify_all()

    def _bound(self) -> None:
        """Connections are made anew at any time; so this is done again and again."""
        if self._worker_timeout_s is not None:
            known = (_addresses(private.server_def(), job).values() for job in ("worker", "ps"))
            bound(itertools.chain(*known), self._worker_timeout_s)

    def _look(self) -> None:
        """Who has had something in hand for long, and does not answer, is severed: its closure goes to another."""
        if self._worker_timeout_s is None:
            return
        with self._lock:
            busy = {
                worker.member.address: worker
                for worker in self._workers.values()
                if not worker.member.is_idle and worker.member.phase in (Phase.RUNNING, Phase.STOPPING)
            }
        if not busy:
            return
        now = time.monotonic()
        answers = self._probes.ask(busy, min(_TELLING_S, self._worker_timeout_s))
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
        while not self._over.wait(_SEVER_PAUSE_S if self._away else _TELLING_S):
            if time.monotonic() - began >= _TELLING_S:
                answers = self._probes.ask(self._addresses, _TELLING_S)
                self._away = tuple(address for address in self._addresses if address not in answers)
            sever(self._away)


def _addresses(definition: Any, job: str) -> dict[int, str]:
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


def _start_delay_s(index: int) -> float:
    """How long a worker waits before its first closure, as TensorFlow's variables have it."""
    delay = int(os.environ.get("TF_COORDINATOR_SCHEDULE_START_DELAY", "0")) * index
    most = int(os.environ.get("TF_COORDINATOR_SCHEDULE_START_DELAY_MAX", "0"))
    return float(min(delay, most) if most else delay)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
