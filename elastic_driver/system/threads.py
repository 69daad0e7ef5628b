"""Threads: pools whose threads are there from the start, and names that the kernel knows. Owns no work."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor


def name_this_thread() -> None:
    """Tells the kernel the name of the thread that calls this: so an agent knows it from the script's own."""
    name = threading.current_thread().name
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that has started its threads: one that cannot be started later is told to who asks, but the work is done.

    Raises:
        RuntimeError: they cannot be started.
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
    met = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(met.wait)
    except BaseException:
        met.abort()
        pool.shutdown(wait=False)
        raise
    return pool
