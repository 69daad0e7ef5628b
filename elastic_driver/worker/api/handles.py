"""Operations under way, by the numbers that the API gives for them.

A number keeps the memory of its operation alive until it was synchronized and the operation is done, whatever happens
to whoever waits. When its round is over it lets go of the memory: a loop that was left by an exception never comes back
for what it had begun.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.byte_collectives import wait
from elastic_driver.worker.engine.protocol import Handle, Operation, Result
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.process_sets import Members


@dataclass(slots=True)
class _Pending:
    handle: Handle
    finish: Callable[[Result], Any]
    keep: object
    context: object


_lock = threading.Lock()  # guards what follows
_pending: dict[int, _Pending] = {}
_lost: set[int] = set()  # begun in a round that is over, and never synchronized
_numbers = itertools.count()


class _Keeper:
    """Told by the runtime of each new round."""

    def __init__(self) -> None:
        self.behind = False  # whether operations of another round were not done yet when they were looked at

    def on_round_changed(self) -> None:
        self.let_go(current())

    def let_go(self, context: object) -> None:
        """Frees what is kept for operations of other rounds than this context's, as far as they are done."""
        with _lock:
            others = [number for number, pending in _pending.items() if pending.context is not context]
            over = [number for number in others if _pending[number].handle.done()]
            freed = [_pending.pop(number) for number in over]
            _lost.update(over)
            self.behind = len(others) > len(over)
        freed.clear()  # outside the lock: what goes with the memory may be anything


_keeper = _Keeper()


def begin(
    members: Members,
    operation: Operation,
    *,
    keep: object,
    finish: Callable[[Result], Any],
    submit: Callable[[Operation], Handle] | None = None,
) -> int:
    """Submits an operation.

    Args:
        members: who takes part.
        operation: what is to be done.
        keep: what owns its memory.
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
    if _keeper.behind:
        _keeper.let_go(members.context)
    with _lock:
        number = next(_numbers)
        _pending[number] = _Pending(handle, finish, keep, members.context)
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
        result = wait(pending.handle, pending.keep)
    finally:
        with _lock:
            _pending.pop(handle, None)
    return pending.finish(result)
