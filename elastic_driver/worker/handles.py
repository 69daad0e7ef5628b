"""Operations under way, by the numbers that the API gives for them.

A number keeps the memory of its operation alive until it was synchronized and the operation is done, whatever happens
to whoever waits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_driver.worker.engine import Handle, Operation, Result
from elastic_driver.worker.messages import wait
from elastic_driver.worker.process_sets import Members


@dataclass(slots=True)
class _Pending:
    handle: Handle
    finish: Callable[[Result], Any]
    keep: object


_lock = threading.Lock()  # guards what follows
_pending: dict[int, _Pending] = {}
_numbers = itertools.count()


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
    with _lock:
        number = next(_numbers)
        _pending[number] = _Pending(handle, finish, keep)
    return number


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return, or raise, at once.

    Raises:
        ValueError: there is no such handle: it was synchronized already.
    """
    with _lock:
        pending = _pending.get(handle)
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
    if pending is None:
        return None
    try:
        result = wait(pending.handle, pending.keep)
    finally:
        with _lock:
            _pending.pop(handle, None)
    return pending.finish(result)
