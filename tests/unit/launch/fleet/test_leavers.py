"""Names of hosts that have left, looked up until they mean another machine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from elastic_driver.launch.fleet.leavers import Leavers
from elastic_driver.system.tasks import Tasks


def test_names_that_do_not_resolve_leave_threads_for_others() -> None:
    """A name server that is away holds each look-up for seconds, and a whole rack may leave together."""
    looking, release = threading.Semaphore(0), threading.Event()

    def addresses_of(name: str) -> list[str]:
        looking.release()
        release.wait(150)
        return []

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))  # as the driver has
        tasks = Tasks()
        leavers = Leavers(addresses_of, tasks, lambda: None)
        for index in range(100):
            leavers.leaves(f"node{index}", 60.0)
            leavers.left(f"node{index}", "10.0.0.1")
        assert await asyncio.to_thread(looking.acquire, timeout=150), "they are looked up"
        try:
            async with asyncio.timeout(150):
                assert await asyncio.get_running_loop().run_in_executor(None, lambda: "done") == "done"
        finally:
            release.set()
            await tasks.end()

    asyncio.run(scenario())
