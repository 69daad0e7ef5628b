"""``horovod.runner.util.threads``: calls of functions in new threads."""

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
    """Call a function in a new thread. Returns the started thread.

    Args:
        target: the function.
        args: its arguments.
        name: the thread's name.
        daemon: whether the process may end before the thread.
        silent: whether to suppress exceptions.

    Raises:
        ValueError: ``args`` is not a tuple.
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
    """Call a function once an event is set, in a new thread that waits for the event. Returns the thread.

    Args:
        event: the event.
        func: the function.
        args: its arguments.
        stop: ends the thread without the call, if it is set first.
        check_stop_interval_s: how often to check ``stop``, seconds.
        daemon: whether the process may end before the thread. If not, ``stop`` is required.
        silent: whether to suppress exceptions.

    Raises:
        ValueError: ``event`` is None, ``args`` is not a tuple, or ``stop`` is missing.
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
    """Call a function once for each tuple of arguments in a list, in several threads.

    Args:
        fn: the function.
        args_list: the arguments of each call.
        block_until_all_done: whether to wait for all calls.
        max_concurrent_executions: the limit of threads.

    Returns:
        Index in the list -> result; None without waiting.

    Raises:
        RuntimeError: a call has failed. Only with waiting.
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
