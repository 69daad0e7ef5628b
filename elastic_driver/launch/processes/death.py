"""Detects the ends of processes: on the event loop, at once, and without polling if the system has pidfds.

A killed process is dead for its parent only when all of its memory has been freed, which takes seconds for a large one.
Its threads end at once, which Linux 6.9 and later can report, too.

Owns the descriptors it opens, and closes them. Signals and reaps nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable

import psutil

from elastic_driver.launch.words import ExitStatus
from elastic_driver.system.kernel import end_of_child, has_pidfds, pidfd_open
from elastic_driver.system.process_name import ProcessName, stat_of

# Linux 6.9: a pidfd of one thread. The same number as O_EXCL by definition.
PIDFD_THREAD = os.O_EXCL
# From /proc/PID/stat: the task no longer runs user code. (include/linux/sched.h)
_PF_EXITING = 0x4
# Stands for the exit code of a child that was reaped elsewhere. Not 0: it may have failed.
_UNKNOWN = 255
# Without pidfds the end of a process that is not our child can only be looked for: of those that are being killed, and
# of one that may live for weeks.
_POLL_S, _RARE_POLL_S = 0.02, 0.5
# Number of the system call, as the kernel's headers have it.
_SIGTIMEDWAIT = {"x86_64": "128", "aarch64": "137"}


def exit_status(pid: int) -> ExitStatus | None:
    """Return how a child ended, leaving it a zombie: neither its PID nor its session's id can be reused yet.

    Returns:
        None while it runs.
    """
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return ExitStatus(_UNKNOWN)
    if result is None:
        return None
    return ExitStatus(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)


def watch_child(pid: int, on_death: Callable[[], None]) -> None:
    """Call ``on_death`` once on the running loop when the child is dead (and still a zombie).

    Raises:
        OSError: no descriptor is free.
    """
    loop = asyncio.get_running_loop()
    descriptor = end_of_child(pid)

    def readable() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_death()

    loop.add_reader(descriptor, readable)


def watch_thread(thread: int, on_end: Callable[[], None]) -> Callable[[], None]:
    """Call ``on_end`` once on the running loop when a thread of any process of this machine has ended.

    Returns:
        A function that ends the watch; harmless after the call.

    Raises:
        OSError: there is no such thread, the system is too old, or no descriptor is free.
    """
    if not has_pidfds():
        raise OSError("no pidfds")
    loop = asyncio.get_running_loop()
    descriptor = pidfd_open(thread, PIDFD_THREAD)
    watching = True

    def close() -> None:
        nonlocal watching
        if watching:
            watching = False
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def readable() -> None:
        close()
        on_end()

    loop.add_reader(descriptor, readable)
    return close


def dying(pid: int) -> ExitStatus | str | None:
    """Return how a process that is not yet dead is about to end.

    Returns:
        None if it is not, or that is not known yet; a text if its exit code is not known.
    """
    try:
        _, fields = stat_of(pid)  # the state is field 3, the flags 9, the exit code the last
        with open(f"/proc/{pid}/status", "rb") as file:
            dumps_core = b"\nCoreDumping:\t1" in file.read()
    except OSError:
        return None
    if dumps_core:
        return "crashed (it is dumping core)"
    if fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING:
        return ExitStatus(os.waitstatus_to_exitcode(int(fields[-1])))
    return None


def set_once(future: asyncio.Future[None]) -> None:
    """Resolve a future that several callers may resolve."""
    if not future.done():
        future.set_result(None)


def heeds_signal(pid: int, number: signal.Signals) -> tuple[bool, bool]:
    """Return whether a process handles a signal or is in sigwait for it, and whether it blocks it.

    A process that waits for a signal in another way blocks it; and so does, for a moment, one that starts a child.

    Raises:
        OSError: there is no such process, or no descriptor is free.
    """
    bits = {}
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name in ("SigBlk", "SigCgt"):
                bits[name] = int(value, 16) >> number - 1 & 1 == 1
    return bits.get("SigCgt", False) or _sigwaits(pid, number), bits.get("SigBlk", False)


def _sigwaits(pid: int, number: signal.Signals) -> bool:
    """Return whether its main thread is in sigwait: the kernel then lists the awaited signals as not blocked."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call, *arguments = file.read().split()
        if call == _SIGTIMEDWAIT.get(platform.machine()):
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(int(arguments[0], 16))
                return bool(int.from_bytes(memory.read(8), sys.byteorder) >> number - 1 & 1)
    return False


def is_alive(process: psutil.Process) -> bool:
    """Return whether it still runs, and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    except OSError:  # no descriptor is free: as far as we know, it runs
        return True


def watch_process(name: str, on_death: Callable[[], None]) -> Callable[[], None]:
    """Call ``on_death`` on the running loop when a process of this machine, not necessarily a child, is dead.

    Args:
        name: as in :mod:`elastic_driver.system.process_name`; a process of another machine is not watched.
        on_death: called at once if it is dead already.

    Returns:
        A function that ends the watch.
    """
    process = ProcessName.parse(name)
    if process is None or not process.is_of_this_place:
        return lambda: None
    try:
        descriptor = pidfd_open(process.pid)
    except ProcessLookupError:
        on_death()
        return lambda: None
    except OSError:  # no descriptor is free, or the kernel has no pidfds
        return _watch_polling(process, on_death)
    loop = asyncio.get_running_loop()

    def died() -> None:
        loop.remove_reader(descriptor)
        on_death()

    def close() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    loop.add_reader(descriptor, died)
    if process.state() is None:  # its PID has been reused
        died()
    return close


def _watch_polling(process: ProcessName, on_death: Callable[[], None]) -> Callable[[], None]:
    if process.state() is None:
        on_death()
        return lambda: None
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if process.state() is None:
            on_death()
        else:
            timer = loop.call_later(_RARE_POLL_S, look)

    timer = loop.call_later(_RARE_POLL_S, look)
    return lambda: timer.cancel()


async def wait_gone(processes: Iterable[psutil.Process], until: asyncio.Future[None]) -> None:
    """Wait until all the processes are dead (zombies count as dead) or ``until`` is done."""
    for process in processes:
        if until.done():
            return
        if has_pidfds():
            await _wait_pidfd(process, until)
        else:
            await _wait_polling(process, until)


async def _wait_pidfd(process: psutil.Process, until: asyncio.Future[None]) -> None:
    loop = asyncio.get_running_loop()
    try:
        descriptor = pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # no descriptor is free
        await _wait_polling(process, until)
        return
    try:
        with contextlib.suppress(OSError):  # no descriptor is free: as far as we know, it runs
            if not process.is_running():  # its PID has been reused
                return
        dead: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, set_once, dead)
        try:
            await asyncio.wait((dead, until), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


async def _wait_polling(process: psutil.Process, until: asyncio.Future[None]) -> None:
    # Not psutil's own wait, which would reap the process if it is our child.
    while not until.done() and is_alive(process):
        await asyncio.wait((until,), timeout=_POLL_S)
