"""An engine over a backend's four collectives: operations run in the order of submission.

For processes without the native extension, and for jobs of one process. It does not negotiate: before each operation
the members compare their plans (one small allgather), so that a program whose ranks differ gets an error on every rank
instead of wrong results or a hang.

Each process set has a runner: a queue, a thread that runs the operations, and collectives over its members alone. The
global set's thread ("elastic-comm-ROUND") also starts and ends the other runners. Runners of one member have no thread:
their operations run at once, in the submitting thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_driver.errors import DuplicateNameError, HorovodInternalError, MismatchError, in_words
from elastic_driver.worker.engine import plain_plan as plans
from elastic_driver.worker.engine.collectives import (
    DTYPES,
    Collectives,
    Exchange,
    Group,
    ReduceOp,
    SoloCollectives,
)
from elastic_driver.worker.engine.gate import Inside, WriteGate
from elastic_driver.worker.engine.plain_kinds import Link, control_text, itemsize, run, serve
from elastic_driver.worker.engine.protocol import GLOBAL_SET, Handle, Kind, Operation, Result
from elastic_driver.worker.engine.trace import Trace, activity, row

Make: TypeAlias = Callable[[Group], Collectives]
"""Makes a backend's collectives, not yet connected."""

_ACTIVE, _JOINED, _LEAVING = 0, 1, 2
_log = logging.getLogger("elastic_driver.worker")

# How long an aborted collective may take to end; it takes milliseconds.
_GIVE_UP_S = 2.0
_REDUCTIONS = (Kind.ALLREDUCE, Kind.REDUCESCATTER)
_SPLIT = (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER)  # split along the first dimension


class _Outcome:
    """The outcome of work, for any thread to wait for.

    Uses only locks: a condition is Python code, and a signal handler that raises there would leave it locked.
    """

    __slots__ = ("_known", "_lock", "_pending")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _known
        self._known: list[tuple[Any, BaseException | None]] = []
        self._pending = threading.Lock()  # held until the outcome is known
        self._pending.acquire()

    def settle(self, result: Any, failure: BaseException | None) -> None:
        """Set the outcome, unless it is set already."""
        with self._lock:
            if not self._known:
                self._known.append((result, failure))
                self._pending.release()

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return bool(self._known)

    def result(self) -> Any:
        """Block until the outcome is known; signals are handled meanwhile. Raises the work's failure."""
        if not self._known:
            with self._pending:
                pass  # each waiting thread lets the next one in
        result, failure = self._known[0]
        try:
            if failure is not None:
                raise failure
            return result
        finally:
            failure = None  # its traceback holds this frame, which would hold it


@dataclass(slots=True, eq=False)
class _Work:
    """Work for a runner's thread, to do once its members have agreed on the text."""

    text: str
    act: Callable[[Link], Any]
    state: int = _ACTIVE
    name: tuple[bool, str] | None = None  # as in Operation: whether it is the library's own, and its name, if any
    title: str = ""
    row: str = ""  # for the timeline, like the next; operations only
    activity: str = ""
    outcome: _Outcome = field(default_factory=_Outcome)
    submitted: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> object:
        """Identifies the work while in flight: its name, or itself."""
        return self.name or self


class PlainHandle:
    """A Handle of the plain engine."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: _Outcome) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        """Return whether the operation is done."""
        return self._outcome.done()

    def result(self) -> Result:
        """Block until the operation is done, and return its result."""
        result: Result = self._outcome.result()
        return result


class _Leaving:
    """The Handle of leaving."""

    def __init__(self, outcomes: list[_Outcome], engine: PlainEngine) -> None:
        self._outcomes, self._engine = outcomes, engine

    def done(self) -> bool:
        """Return whether this rank has left."""
        return all(outcome.done() for outcome in self._outcomes) and not self._engine.progress()[1]

    def result(self) -> Result:
        """Block until this rank has left."""
        for outcome in self._outcomes:
            outcome.result()
        # In a process set of one member operations run in the submitting threads.
        while not self.done():
            self._engine.check()
            time.sleep(0.0005)
        return Result()


class _Runner:
    """One process set, as seen by this member.

    Work is in one table from its submission until it is over: whatever a signal handler raises during a submission,
    work is either there, with its name and its place in the order, or not at all.
    """

    def __init__(self, link: Link, thread_name: str, engine: PlainEngine) -> None:
        self.link = link
        self.works: dict[object, _Work] = {}  # in the order of submission; the engine's lock guards this and the next
        self.ended = False
        self.alone = Inside()  # operations of a set of one member
        self.current: _Work | None = None  # the work that the thread runs
        self.acts = False  # whether the members have agreed on it
        self.stuck = False  # whether the thread was given up
        self._engine = engine
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # at least one for each work, and one for the end
        self._joined: set[int] = set()  # indices; as of the last agreement, so the same on all members
        self._thread: threading.Thread | None = None
        if link.size > 1:
            # A daemon, because a collective may block in it when the process ends. Work wakes it; end() ends it.
            self._thread = threading.Thread(target=self._serve, name=thread_name, daemon=True)

    def start(self) -> None:
        """Start running the queued work."""
        if self._thread is not None:
            self._thread.start()

    def put(self, work: _Work) -> None:
        """Queue work. Call it with the engine's lock, which the thread needs to see why it was woken."""
        self._wake.put(None)
        self.works[work.key] = work

    @property
    def busy(self) -> bool:
        """Whether any work is in flight."""
        return bool(self.works) or self.alone.busy

    @property
    def threaded(self) -> bool:
        """Whether work is queued for a thread."""
        return self._thread is not None

    def end(self) -> None:
        """End the thread after the queued work, and close the collectives. Nothing may be queued afterwards."""
        if self._thread is not None and self._thread.ident is not None:
            self._wake.put(None)
        else:
            self.link.collectives.close()
            self._fail_queued()

    def join(self) -> None:
        """Block until the thread has ended, or is given up."""
        while (
            self._thread is not None and self._thread.ident is not None and self._thread.is_alive() and not self.stuck
        ):
            self._thread.join(0.1)

    def give_up(self, error: BaseException) -> None:
        """Fail the work in flight, from which the thread does not return, and the queued work."""
        work = self.current
        if work is None or work.outcome.done():
            return
        self.stuck = True
        _log.warning(
            "elastic_driver: an aborted collective (%s) did not end; continuing without its thread", work.title
        )
        work.outcome.settle(None, error)
        for behind in self._engine.take_all(self):
            behind.outcome.settle(None, error)

    def _serve(self) -> None:
        while True:
            self._wake.get()
            work = self._engine.next_of(self)
            if work is not None:
                self.perform(work)
            elif self.ended:
                break
            del work  # or the last buffers would live until the next
        with contextlib.suppress(Exception):
            self.link.collectives.close()
        self._fail_queued()

    def _fail_queued(self) -> None:
        while (work := self._engine.next_of(self)) is not None:
            self.perform(work)  # fails: the engine is broken by now

    def perform_alone(self, work: _Work) -> None:
        """Run work of a set of one member in the submitting thread: an exception of a signal handler passes through."""
        result: Any = None
        failure: BaseException | None = None
        begun = time.monotonic()

        def act() -> Any:
            self._engine.check()
            return work.act(self.link)

        try:
            result = self.alone.call(act)
        except (MismatchError, HorovodInternalError, MemoryError) as error:
            failure = error
        self._engine.finished(self, work, begun, begun)
        work.outcome.settle(result, failure)
        failure = None  # its traceback holds this frame, which would hold it

    def perform(self, work: _Work) -> None:
        """Run work and set its outcome."""
        result: Any = None
        failure: BaseException | None = None
        begun = agreed = time.monotonic()
        self.current = work
        try:
            self._engine.check()
            if work.state == _JOINED:
                result = Result(last_joined=self._join(work))
            else:
                self._agree(work.text, work.state)
                agreed = time.monotonic()
                self.acts = True
                result = work.act(self.link)
        except MismatchError as error:
            failure = error
        except BaseException as error:
            # At the first error, before anything else: closing our own connections notifies ranks that are no
            # neighbors of the dead one. An error of another kind leaves this rank out of step with its peers.
            if isinstance(error, MemoryError):
                self._engine.note_out_of_memory()
            self._engine.abort(in_words(error))
            failure = error
        self.current = None
        self._engine.finished(self, work, begun, agreed)
        self.acts = False  # only once it is counted: an observer in between must not see an idle engine
        work.outcome.settle(result, failure)
        failure = None  # its traceback holds this frame, which would hold it

    def _agree(self, text: str, state: int) -> str:
        """Compare plans with the members.

        Returns:
            For a rank that has joined: the plan to serve, "" if there is none. For others: nothing of interest.

        Raises:
            MismatchError: the members that have not joined have different plans, or one that joined ranks cannot serve.
            HorovodInternalError: some have left.
        """
        link = self.link
        table = link.gather_rows([plans.digest(text), state])
        states = table[:, 1].tolist()
        leaving = [link.members[place] for place, member_state in enumerate(states) if member_state == _LEAVING]
        if leaving and (state == _JOINED or len(leaving) + states.count(_JOINED) < link.size):
            raise HorovodInternalError(f"{plans.ranks_text(leaving)} left the round")
        if leaving:
            return ""
        joined = {place for place, member_state in enumerate(states) if member_state == _JOINED}
        newly, self._joined = joined - self._joined, joined
        active = [place for place in range(link.size) if place not in joined]
        if not active:
            self._joined = set()
            return f"{link.members[max(newly)]}"
        if not joined and len({int(table[place, 0]) for place in active}) == 1:
            return ""
        texts = link.gather_texts(text if state != _JOINED else "")
        wrong = ""
        if len({texts[place] for place in active}) > 1:
            wrong = plans.disagreement([(link.members[place], texts[place]) for place in active])
        elif joined:
            wrong = plans.objection(json.loads(texts[active[0]]), [link.members[place] for place in sorted(joined)])
        if state == _JOINED:
            return "" if wrong else texts[active[0]]
        if wrong:
            raise MismatchError(wrong)
        return ""

    def _join(self, work: _Work) -> int:
        """Serve the others until all have joined; return the rank that joined last."""
        while True:
            answer = self._agree(work.text, _JOINED)
            if answer.isdigit():
                return int(answer)
            if answer:
                serve(self.link, json.loads(answer))


class PlainEngine:
    """The plain engine of one round (the module explains it).

    Args:
        make: makes the backend's collectives; called once for all ranks, and once for each further process set.
        rank: this process's rank.
        size: of the job.
        round_id: for messages.
        build_s: time limit for connecting the members of a process set.
        collective_s: time limit of a collective.
    """

    def __init__(
        self, make: Make, *, rank: int, size: int, round_id: int = 0, build_s: float, collective_s: float
    ) -> None:
        self._make = make
        self._rank, self._size, self._round_id = rank, size, round_id
        self._build_s, self._collective_s = build_s, collective_s
        self._exchange: Exchange | None = None
        self._gate = WriteGate()
        self._lock = threading.Lock()  # guards the following attributes
        self._broken = ""
        self._left = False
        self._out_of_memory = False  # the reason that it broke
        self._closed = False
        self._runners: dict[int, _Runner] = {}
        self._ranks: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._building: Collectives | None = None
        self._trace: Trace | None = None
        self._sets_made = 0
        self._timer: threading.Timer | None = None
        self._finished = 0

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Connect to the peers. Blocks until all are connected or the time limit has passed. Raises
        HorovodInternalError.
        """
        self._exchange = exchange
        self._build(GLOBAL_SET, tuple(range(self._size)), exchange, timeout_s)

    def _build(self, number: int, members: tuple[int, ...], exchange: Exchange, timeout_s: float) -> None:
        index = members.index(self._rank)
        if len(members) == 1:
            collectives: Collectives = SoloCollectives()
        else:
            collectives = self._make(Group("set", tuple(range(len(members))), index))
            with self._lock:
                self._building = collectives
                broken = self._broken
            if broken:
                collectives.abort(broken)
            try:
                collectives.connect(exchange, timeout_s=timeout_s)
            except BaseException:
                with self._lock:
                    self._building = None
                collectives.close()
                raise
        name = f"elastic-comm-{self._round_id}" + (f".{number}" if number else "")
        runner = _Runner(Link(collectives, members, index, self._collective_s, self._gate), name, self)
        with self._lock:
            self._building = None
            self._runners[number] = runner
            broken = self._broken
        if broken:
            collectives.abort(broken)
        runner.start()

    def check(self) -> None:
        """Raise HorovodInternalError if the engine is broken."""
        if self._broken:
            raise self._error()

    def _error(self) -> HorovodInternalError | MemoryError:
        text = f"cannot continue: {self._broken}"
        return MemoryError(text) if self._out_of_memory else HorovodInternalError(text)

    def note_out_of_memory(self) -> None:
        """Note, before the abort, that memory ran out: a fault of the program, which another round would not fix."""
        with self._lock:
            self._out_of_memory = not self._broken

    def submit(self, operation: Operation) -> PlainHandle:
        """Submit an operation."""
        runner = self._runner_of(operation)
        self._validate(operation, runner.link.members)
        work = _Work(
            plans.encode(operation),
            lambda link: run(link, operation),
            _JOINED if operation.kind is Kind.JOIN else _ACTIVE,
            (operation.own, operation.name) if operation.name else None,
            operation.name or operation.kind.name.lower(),
            row(operation),
            activity(operation),
        )
        return PlainHandle(self._enter(runner, work))

    def _enter(self, runner: _Runner, work: _Work) -> _Outcome:
        with self._lock:
            if self._broken:
                raise self._error()
            if self._left and work.state != _LEAVING:
                raise HorovodInternalError("cannot continue: this rank has left the round")
            if runner.ended:
                raise ValueError(f"cannot submit '{work.title}': its process set was removed")
            if work.key in runner.works:
                raise DuplicateNameError(f"cannot submit '{work.title}': an operation of this name is under way")
            if runner.threaded:
                runner.put(work)
        if not runner.threaded:
            runner.perform_alone(work)
        return work.outcome

    def next_of(self, runner: _Runner) -> _Work | None:
        """Return the next work of a runner's thread, after its last one is over."""
        with self._lock:
            return next(iter(runner.works.values()), None)

    def take_all(self, runner: _Runner) -> list[_Work]:
        """Remove and return all work of a runner."""
        with self._lock:
            works = list(runner.works.values())
            runner.works.clear()
        return works

    def _runner_of(self, operation: Operation) -> _Runner:
        with self._lock:
            if self._broken:
                raise self._error()
            runner = self._runners.get(operation.process_set)
            members = self._ranks.get(operation.process_set)
        if members is None:
            raise ValueError(f"cannot use process set {operation.process_set}: it does not exist")
        if runner is None:
            raise ValueError(
                f"cannot use process set {operation.process_set}: rank {self._rank} is not one of its ranks "
                f"{list(members)}"
            )
        return runner

    def _validate(self, operation: Operation, members: tuple[int, ...]) -> None:
        kind = operation.kind
        failure = f"cannot {kind.name.lower()} '{operation.name or kind.name.lower()}'"
        if kind is Kind.BROADCAST and operation.root not in members:
            raise ValueError(f"{failure}: the root, rank {operation.root}, is not one of the ranks {list(members)}")
        if kind is Kind.JOIN and operation.process_set != GLOBAL_SET:
            raise ValueError(f"{failure}: only all ranks together can join")
        if kind is Kind.ALLTOALL and len(operation.splits) != len(operation.tensors):
            raise ValueError(f"{failure}: it needs splits for each tensor")
        for number, spec in enumerate(operation.tensors):
            itemsize(spec.dtype)
            if spec.nbytes and not spec.address:
                raise ValueError(f"{failure}: a tensor of {spec.nbytes} bytes has no address")
            if kind in _REDUCTIONS and spec.dtype not in DTYPES:
                raise ValueError(f"{failure}: values of dtype {spec.dtype} cannot be reduced")
            if kind in _REDUCTIONS and operation.reduce_op is ReduceOp.ADASUM and "float" not in spec.dtype:
                raise ValueError(f"{failure}: Adasum is for floating point only, not for {spec.dtype}")
            if kind in _SPLIT and not spec.shape:
                raise ValueError(f"{failure}: a tensor without dimensions cannot be split or joined")
            if kind is Kind.ALLTOALL:
                splits = operation.splits[number]
                if len(splits) != len(members) or min(splits) < 0 or sum(splits) != spec.shape[0]:
                    raise ValueError(
                        f"{failure}: the splits {list(splits)} are not {len(members)} counts of rows that add up to "
                        f"{spec.shape[0]}"
                    )

    def finished(self, runner: _Runner, work: _Work, begun: float, agreed: float) -> None:
        """Note that a runner's work is over."""
        with self._lock:
            self._finished += 1
            runner.works.pop(work.key, None)
            trace = self._trace
        if trace is not None and work.activity:
            trace.operation(work.row, work.activity, work.submitted, begun, agreed)

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Add a process set."""
        members = tuple(ranks)
        if number in self._ranks:
            raise ValueError(f"cannot add process set {number}: it already exists")
        if not members or len(set(members)) < len(members) or not all(0 <= rank < self._size for rank in members):
            raise ValueError(f"cannot add a process set of ranks {list(members)}: the job has {self._size} ranks")
        self._sets_made += 1
        scope_end = f".set.{self._sets_made}.{number}"

        def within(scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
            assert self._exchange is not None
            return self._exchange(scope + scope_end, key=key, count=count, value=value)

        def build(link: Link) -> None:
            if self._rank in members:
                self._build(number, members, within, self._build_s)
            with self._lock:
                self._ranks[number] = members
            if link.size > 1:
                link.gather_rows([number])  # until all are connected

        self._control("add process set", build, number=number, ranks=list(members))

    def remove_process_set(self, number: int) -> None:
        """Remove a process set."""
        if number == GLOBAL_SET or number not in self._ranks:
            raise ValueError(f"cannot remove process set {number}")

        def end(link: Link) -> None:
            with self._lock:
                runner = self._runners.pop(number, None)
                self._ranks.pop(number, None)
                if runner is not None:
                    runner.ended = True
            if runner is not None:
                runner.end()
                runner.join()

        self._control("remove process set", end, number=number)

    def _control(self, title: str, act: Callable[[Link], None], **details: object) -> None:
        work = _Work(control_text(title, **details), act, title=title)
        self._enter(self._runners[GLOBAL_SET], work).result()

    def leave(self) -> Handle:
        """Start leaving each process set, since each has a queue."""
        with self._lock:
            if self._broken:
                raise self._error()
            self._left = True
            runners = list(self._runners.values())
        works = [_Work(control_text("leave"), lambda _: Result(), _LEAVING, title="leave") for _ in runners]
        return _Leaving([self._enter(runner, work) for runner, work in zip(runners, works, strict=True)], self)

    def quiesce(self, limit_s: float) -> bool:
        """Shut the gate and wait. A thread stuck in a backend uses only its own memory."""
        self._gate.shut(self._broken or "the round is over")
        return self._gate.wait(limit_s)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed memory."""
        return np.zeros(nbytes, np.uint8)

    def progress(self) -> tuple[int, bool]:
        """Return how many operations are finished, and whether others are in flight."""
        with self._lock:
            return self._finished, any(runner.busy for runner in self._runners.values())

    def carries_out(self) -> bool:
        """Return whether this process is running an operation that all members have submitted."""
        with self._lock:
            return any(runner.acts or runner.alone.busy for runner in self._runners.values())

    def own_finished(self) -> int:
        """Return how many operations are over."""
        with self._lock:
            return self._finished

    def unreachable(self) -> tuple[int, ...]:
        """Return (): torch's Gloo owns the connections, so they are not watched."""
        return ()

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start a trace. A cycle is one operation."""
        trace = Trace(path, self._rank, mark_cycles=mark_cycles)
        with self._lock:
            former, self._trace = self._trace, trace
        if former is not None:
            former.close()

    def stop_timeline(self) -> None:
        """Complete the trace."""
        with self._lock:
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()

    def abort(self, reason: str) -> None:
        """Make every operation, in flight or later, fail. Peers that wait for this process notice by closed
        connections.
        """
        with self._lock:
            self._broken = self._broken or reason or "aborted"
            collectives = [runner.link.collectives for runner in self._runners.values()]
            if self._building is not None:
                collectives.append(self._building)
        for backend in collectives:
            backend.abort(self._broken)
        with self._lock:
            if self._timer is not None or not any(runner.current for runner in self._runners.values()):
                return
            # A pair of torch's Gloo that fails in the middle of a message does not notify its waiters: such a wait
            # never ends.
            self._timer = threading.Timer(_GIVE_UP_S, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self) -> None:
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            runner.give_up(self._error())

    def close(self) -> None:
        """Free all resources. Blocks until the threads have ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = self._building is not None or any(runner.busy for runner in self._runners.values())
        if unfinished:
            self.abort("the library was shut down in this process")
        with self._lock:
            self._broken = self._broken or "the round is over in this process"
            runners = list(self._runners.values())
            for runner in runners:
                runner.ended = True
        for runner in runners:
            runner.end()
        for runner in runners:
            runner.join()
        if self._timer is not None:
            self._timer.cancel()
        self.stop_timeline()

    def abandon(self) -> None:
        """In a forked child: leave the parent's resources untouched."""
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        for runner in self._runners.values():
            runner.link.collectives.abandon()
        if self._building is not None:
            self._building.abandon()
