"""Operations under way, by the numbers that the API gives for them.

A number keeps what ``synchronize`` needs until that was called, or the operation's round is over: a loop that was left
by an exception never comes back for what it had begun. The memory of an operation is the engine's to keep.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_driver.errors import ElasticError, HorovodInternalError
from elastic_driver.worker.engine.protocol import Handle, Operation, Result
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.process_sets import Members


@dataclass(slots=True)
class _Pending:
    handle: Handle
    finish: Callable[[Result], Any]
    context: Context
    outcome: list[Any] = field(default_factory=list)  # what finish() returned, once it has
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it runs

    def deliver(self) -> Any:
        """What ``synchronize`` returns; results are written to where they were asked for, once. Blocks until done."""
        result = self.handle.result()
        with self.lock:
            if not self.outcome:
                self.outcome.append(self.context.writing.write(lambda: self.finish(result)))
            return self.outcome[0]


_lock = threading.Lock()  # guards what follows
_pending: dict[int, _Pending] = {}
_lost: set[int] = set()  # begun in a round that is over, and never synchronized
_numbers = itertools.count()


class _Keeper:
    """Told by the runtime of each new round."""

    def on_round_changed(self) -> None:
        """Forgets the operations of other rounds: they are over, whoever comes for them."""
        context = current()
        with _lock:
            lost = {number: pending for number, pending in _pending.items() if pending.context is not context}
            for number in lost:
                del _pending[number]
            _lost.update(lost)
        lost.clear()  # outside the lock: what goes with them may be anything


_keeper = _Keeper()


def _deliver(context: Context) -> None:
    with _lock:
        left = [pending for pending in _pending.values() if pending.context is context]
    failures: list[Exception] = []
    for pending in left:
        if not pending.handle.done():
            continue
        try:
            pending.handle.result()
        except (ElasticError, MemoryError, RuntimeError):  # synchronize() raises it
            continue
        try:
            pending.deliver()
        except Exception as error:  # the others are delivered all the same
            failures.append(error)
    if failures:
        raise failures[0]


current_round().deliverers.append(_deliver)


def begin(
    members: Members,
    operation: Operation,
    *,
    finish: Callable[[Result], Any],
    submit: Callable[[Operation], Handle] | None = None,
) -> int:
    """Submits an operation.

    Args:
        members: who takes part.
        operation: what is to be done.
        finish: makes of the engine's result what ``synchronize`` returns.
        submit: hands it to the engine; by default the engine's own ``submit``.

    Returns:
        A number for ``poll`` and ``synchronize``.

    Raises:
        HorovodInternalError: the round is broken or over.
        DuplicateNameError: an operation of this name is under way.
        ValueError: the operation itself cannot be.
    """
    members.context.check()
    handle = (submit or members.context.engine.submit)(operation)
    current_round().listen(_keeper)  # in a forked child nobody listens yet
    with _lock:
        number = next(_numbers)
        _pending[number] = _Pending(handle, finish, members.context)
    return number


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return, or raise, at once.

    Raises:
        ValueError: there is no such handle: it was synchronized already.
    """
    with _lock:
        pending = _pending.get(handle)
        lost = handle in _lost
    if lost:
        return True
    current_round().refuse_if_forked()
    if pending is None:
        raise ValueError(f"cannot poll {handle!r}: it is no handle, or was synchronized already")
    return pending.handle.done()


def synchronize(handle: int) -> Any:
    """Blocks until an asynchronous operation is done.

    Returns:
        Its result; None when there is no such handle (it was synchronized already).

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same.
        Exception: what a signal's handler raises meanwhile; the handle can be used again then.
    """
    with _lock:
        pending = _pending.get(handle)
        lost = handle in _lost
        _lost.discard(handle)
    if lost:
        raise HorovodInternalError(f"operation {handle} was begun in another round, which is over")
    current_round().refuse_if_forked()  # the thread that ends it is in the parent
    if pending is None:
        return None
    try:
        result = pending.deliver()
    except Exception:
        if pending.handle.done():  # else a signal handler has raised, and the handle can be synchronized again
            _forget(handle)
        raise
    _forget(handle)
    return result


def _forget(handle: int) -> None:
    with _lock:
        _pending.pop(handle, None)
