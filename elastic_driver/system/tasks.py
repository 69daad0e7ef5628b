"""Tasks that nobody awaits, and the handling of their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that nobody awaits. An error in it goes to the loop's exception handler, like those of callbacks.

    By itself asyncio only reports it when the task is deleted, which never happens to a task that is kept.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_tell)
    return task


class Tasks:
    """Such tasks of one owner, who ends them all at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start one more task; see :func:`start_task`."""
        task = start_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self) -> None:
        """Cancel those that still run. Blocks until all have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _tell(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler(
            {"message": f"task {task.get_name()} has failed", "exception": error, "task": task}
        )
