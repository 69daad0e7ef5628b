"""``horovod.runner.util.threads``: functions in threads of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
    silent: bool = False,  # noqa: FBT001, FBT002
) -> threading.Thread:
    """Calls a function in a new thread, which has been started.

    Args:
        target: the function.
        args: its arguments.
        name: of the thread.
        daemon: whether the process may end before it.
        silent: whether exceptions are swallowed.

    Raises:
        ValueError: ``args`` is no tuple.
    """
    _check_args(args)

    def quiet() -> None:
        with contextlib.suppress(BaseException):
            target(*args)

    thread = threading.Thread(target=quiet if silent else target, args=() if silent else args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
    silent: bool = False,  # noqa: FBT001, FBT002
) -> threading.Thread:
    """Calls a function once an event is set, in a thread that waits for it.

    Args:
        event: what is waited for.
        func: the function.
        args: its arguments.
        stop: ends the thread, if it is set first.
        check_stop_interval_s: how often ``stop`` is looked at.
        daemon: whether the process may end before the thread; without that there must be a ``stop``.
        silent: whether exceptions are swallowed.

    Raises:
        ValueError: arguments of the wrong kind.
    """
    if event is None:
        raise ValueError("Event must not be None")
    _check_args(args)
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        while not event.wait(check_stop_interval_s if stop is not None else None):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls a function with each of some arguments, in several threads.

    Returns:
        What came of each, by its place in the list; None when the calls are not waited for.

    Raises:
        RuntimeError: one of the calls has failed. Only when they are waited for.
    """
    left: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for numbered in enumerate(args_list):
        left.put(numbered)
    results: dict[int, Any] = {}

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number, args = left.get_nowait()
                results[number] = fn(*args)

    count = min(max_concurrent_executions, len(args_list))
    threads = [in_thread(work, daemon=not block_until_all_done) for _ in range(count)]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if len(results) < len(args_list):
        raise RuntimeError(f"Some threads for func {getattr(fn, '__name__', fn)} did not complete successfully.")
    return results


def _check_args(args: object) -> None:
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")
