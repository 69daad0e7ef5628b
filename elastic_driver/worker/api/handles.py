"""Operations in flight, by the handles (numbers) that the API returns.

A handle keeps what ``synchronize`` needs until that is called, or the operation's round is over: a loop ended by an
exception never synchronizes what it started. The engine keeps an operation's memory alive.
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
    outcome: list[Any] = field(default_factory=list)  # result of finish(), once called
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while finish() runs

    def deliver(self) -> Any:
        """Return the result for ``synchronize``, written to its caller's memory once. Blocks until done."""
        result = self.handle.result()
        with self.lock:
            if not self.outcome:
                self.outcome.append(self.context.writing.write(lambda: self.finish(result)))
            return self.outcome[0]


_lock = threading.Lock()  # guards the two below
_pending: dict[int, _Pending] = {}
_lost: set[int] = set()  # started in a round that is over, and never synchronized
_numbers = itertools.count()


class _Keeper:
    """Notified by the runtime of each new round."""

    def on_round_changed(self) -> None:
        """Forget the operations of other rounds: they are over, even if never synchronized."""
        context = current()
        with _lock:
            lost = {number: pending for number, pending in _pending.items() if pending.context is not context}
            for number in lost:
                del _pending[number]
            _lost.update(lost)
        lost.clear()  # outside the lock: freeing them may run any code


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
    """Submit an operation.

    Args:
        members: the participants.
        operation: the operation.
        finish: converts the engine's result to what ``synchronize`` returns.
        submit: submits it to the engine; by default the engine's own ``submit``.

    Returns:
        A handle for ``poll`` and ``synchronize``.

    Raises:
        HorovodInternalError: the round is broken or over.
        DuplicateNameError: an operation of this name is in flight.
        ValueError: the operation is invalid.
    """
    members.context.check()
    handle = (submit or members.context.engine.submit)(operation)
    current_round().listen(_keeper)  # a forked child has no listeners yet
    with _lock:
        number = next(_numbers)
        _pending[number] = _Pending(handle, finish, members.context)
    return number


def poll(handle: int) -> bool:
    """Return whether ``synchronize(handle)`` would return, or raise, at once.

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
        raise ValueError(f"cannot poll {handle!r}: it is not a handle, or was already synchronized")
    return pending.handle.done()


def synchronize(handle: int) -> Any:
    """Block until an asynchronous operation is done.

    Returns:
        Its result; None if there is no such handle (it was synchronized already).

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same.
        Exception: raised by a signal handler meanwhile; the handle can be used again then.
    """
    with _lock:
        pending = _pending.get(handle)
        lost = handle in _lost
        _lost.discard(handle)
    if lost:
        raise HorovodInternalError(f"operation {handle} was started in an earlier round, which is over")
    current_round().refuse_if_forked()  # the thread that completes it is in the parent
    if pending is None:
        return None
    try:
        result = pending.deliver()
    except Exception:
        if pending.handle.done():  # else a signal handler raised it, and the handle can be synchronized again
            _forget(handle)
        raise
    _forget(handle)
    return result


def _forget(handle: int) -> None:
    with _lock:
        _pending.pop(handle, None)
