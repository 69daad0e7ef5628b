"""The stacks of this host's workers, taken on the driver's request.

Owns how they are taken: each process is sent the signal that makes it write its stacks into the file after its page
(worker/rounds/stacks.py), which is then read. A worker without stacks is reported with the reason. A process that the
signal would kill is not sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent import proc
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.launch.processes.death import PIDFD_THREAD
from elastic_driver.rendezvous.agent_messages import AgentMessage, Stacked, StacksTold, TakeStacks, worker_named
from elastic_driver.system.kernel import pidfd_open, pidfd_send_signal
from elastic_driver.system.tasks import Tasks

# Limits per process. It writes in milliseconds once it runs and has Python's lock; when nothing has arrived for a
# while, the lock is not available, and it is asked to write without.
_LIMIT_S, _LOCK_S = 3.0, 1.5
_LOOK_S = 0.01
# It is done when nothing has arrived for so long: microseconds pass between two lines. If its main thread runs, or
# waits for a disk, a busy machine may have preempted the writing thread.
_QUIET_S, _QUIET_WHILE_RUNNING_S = 0.05, 0.5


class WatchedWorkers(Protocol):
    """The workers to ask."""

    def watched(self) -> Iterable[tuple[WorkerId, int, VitalsPage | None]]:
        """Return each running worker, the PID of the process that was started for it, and its page."""


class StackTaker:
    """Takes stacks for the driver. Used on the event loop only.

    Args:
        workers: the workers to ask.
        send: sends the driver a message.
        tasks: runs background tasks.
    """

    def __init__(self, workers: WatchedWorkers, send: Callable[[AgentMessage], None], tasks: Tasks) -> None:
        self._workers = workers
        self._send = send
        self._tasks = tasks
        self._under_way: dict[WorkerId, asyncio.Task[Stacked]] = {}

    def take(self, message: AgentMessage) -> bool:
        """Carry out an order. Returns whether the message was one.

        Raises:
            RendezvousProtocolError: it names no worker.
        """
        match message:
            case TakeStacks(number, keys):
                self._tasks.start(self._answer(number, {worker_named(key) for key in keys}))
            case _:
                return False
        return True

    async def _answer(self, number: int, wanted: set[WorkerId]) -> None:
        there = [each for each in self._workers.watched() if not wanted or each[0] in wanted]
        for told in await asyncio.gather(*(self._once(*each) for each in there)):
            self._send(
                Stacked(number, told.worker, told.pid, told.state, told.reason, told.syscall, told.wchan, told.blob)
            )
        self._send(StacksTold(number))

    async def _once(self, worker: WorkerId, started: int, page: VitalsPage | None) -> Stacked:
        """Take the stacks of one worker; requests made meanwhile get the same ones."""
        task = self._under_way.get(worker)
        if task is None:
            task = self._under_way[worker] = asyncio.create_task(take_stacks(worker, started, page))
            task.add_done_callback(lambda _: self._under_way.pop(worker, None))
        return await asyncio.shield(task)


async def take_stacks(worker: WorkerId, started: int, page: VitalsPage | None) -> Stacked:
    """Return the stacks of one worker, or why there are none. Blocks for three seconds at most.

    Args:
        worker: the worker.
        started: PID of the process that was started for it.
        page: its page.
    """
    facts = None if page is None else page.read(time.monotonic_ns())
    pid = started if facts is None or not proc.descends_from(facts.pid, started) else facts.pid
    text, reason = "", ""
    if page is None or facts is None or facts.pid != pid:
        reason = "its script does not use elastic_driver"
    elif not facts.dump_signal:
        reason = "cannot request its stacks: its script handles the signal used for that"
    else:
        page.dumps_begun += 1
        try:
            text, reason = await _dump(pid, facts.dump_signal, page)
        finally:
            page.dumps_ended += 1
    return Stacked(
        0,
        worker.key,
        pid,
        _state(pid),
        reason,
        _word(f"/proc/{pid}/syscall"),
        _word(f"/proc/{pid}/wchan"),
        text.encode(),
    )


async def _dump(pid: int, number: int, page: VitalsPage) -> tuple[str, str]:
    """Return the stacks, or the reason why there are none."""
    state = _state(pid)
    if not state or state in "ZX":
        return "", "it has ended"
    if state in "Tt":
        return "", f"stopped (state {state}): it cannot respond"
    page.forget_stacks()
    if reason := _ask(pid, number):
        return "", reason
    loop = asyncio.get_running_loop()
    began = since = loop.time()
    size, asked_again = 0, False
    while (now := loop.time()) < began + _LIMIT_S:
        more = page.stack_bytes()
        if more != size:
            size, since = more, now
        elif size and now - since >= (_QUIET_WHILE_RUNNING_S if _state(pid) in ("R", "D") else _QUIET_S):
            break
        if not size and not asked_again and now >= began + _LOCK_S:
            asked_again = True
            if reason := _ask(pid, number):
                return "", reason
        await asyncio.sleep(_LOOK_S)
    text = page.stacks()
    page.forget_stacks()
    if not text:
        return "", f"it did not answer within {_LIMIT_S:.0f} s (state {_state(pid) or 'unknown'})"
    return text, ""


def _ask(pid: int, number: int) -> str:
    """Send the signal. Returns why that is impossible; "" if it was sent, or the one before is still pending."""
    try:
        # Held open while it is examined, so that its PID is not reused.
        process, is_thread = _held(pid, number)
    except ProcessLookupError:
        return "it has ended"
    except OSError as error:  # the kernel has no pidfds, or no descriptor is free
        return f"cannot request its stacks: {in_words(error)}"
    try:
        values = proc.lines(f"/proc/{pid}/status")
        # A program that it has become by exec has no handler, and the signal would kill it.
        if not proc.number(values, b"SigCgt", base=16) >> (number - 1) & 1:
            return "it has replaced itself with another program"
        # Two handled at once would make it look as if a call held the lock, see native/vitals/stacks.h.
        if is_thread or not proc.number(values, b"ShdPnd", base=16) >> (number - 1) & 1:
            pidfd_send_signal(process, number)
    except OSError as error:
        return f"cannot request its stacks: {in_words(error)}"
    finally:
        os.close(process)
    return ""


def _held(pid: int, number: int) -> tuple[int, bool]:
    """Return a pidfd to send the signal to, and whether it is another thread's: the first may be unable to take it.

    The kernel would choose the first thread, which takes none while it waits for a disk. Any thread can write all
    stacks.

    Raises:
        OSError: it has ended.
    """
    if _state(pid) == "D":
        with contextlib.suppress(OSError):
            for thread in map(int, sorted(os.listdir(f"/proc/{pid}/task"))):
                values = proc.lines(f"/proc/{pid}/task/{thread}/status")
                blocks = proc.number(values, b"SigBlk", base=16) >> (number - 1) & 1
                if thread != pid and not blocks and values.get(b"State", b"D").split()[0] != b"D":
                    return pidfd_open(thread, PIDFD_THREAD), True  # needs Linux 6.9
    return pidfd_open(pid), False


def _state(pid: int) -> str:
    return b"".join(proc.stat(pid)[:1]).decode("ascii", "replace")


def _word(path: str) -> str:
    """Return the first word of a file that says where in the kernel a thread is; "" if nowhere, or hidden."""
    found = b"".join(proc.read(path).split()[:1]).decode("ascii", "replace")
    return "" if found in ("0", "-1", "running") and path.endswith("wchan") else found[:64]
