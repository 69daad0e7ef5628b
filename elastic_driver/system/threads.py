"""Thread pools whose threads run from the start, and thread names for the kernel. Owns no work."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor


def name_this_thread() -> None:
    """Set the kernel's name of the calling thread: so an agent can tell it from the script's own."""
    name = threading.current_thread().name
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with all of its threads started.

    A thread that cannot be started later would make submit() raise, although the work is done all the same.

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
