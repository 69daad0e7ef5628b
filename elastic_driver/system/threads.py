"""Pools of threads whose threads are there from the start. Owns no work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


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
