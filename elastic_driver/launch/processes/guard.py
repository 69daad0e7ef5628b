"""Finds and ends all processes of a job; run as a program, does so when the driver is dead.

A process belongs to a worker if it is the worker's process, in its session, a descendant, or carries the job's marks in
its environment (a daemon that left both session and parent still does).

The keeper starts this file by its path with ``python -I -S``, so that the guard costs little memory and starts at once:
it imports the standard library and psutil, and nothing of this package. Its standard input is a pipe whose other end
only the driver holds. The end of that pipe therefore means that the driver is dead, and also that no half-started
worker is left: until exec a child holds the pipe as well (see spawn.py), and after exec it carries the marks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping

if __name__ == "__main__":
    # -S omits site-packages; the keeper passes the folder of psutil.
    sys.path.append(sys.argv[2])

import psutil

# The same names as in elastic_driver.rendezvous.environment (a test compares them).
ENV_MARK = "ELASTIC_DRIVER_MARK"
ENV_WORKER = "ELASTIC_DRIVER_WORKER"

# Signals that a terminal or a service manager sends to all processes of a job: the guard has to outlive the driver.
UNHEARD = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)

# The guard's grace for workers between SIGTERM and SIGKILL: enough for multiprocessing's resource tracker to remove its
# shared memory, and everything is gone within two seconds of the driver's death.
_GRACE_S = 0.5
# How long the guard continues to kill: a process in an uninterruptible system call dies only when that returns.
_GIVE_UP_S = 60.0
# Between two scans, and how long nothing must be found before the guard believes it: in the middle of exec a process
# shows no environment for a moment.
_SCAN_GAP_S = 0.05
_CLEAN_S = 1.0


class _Seen:
    """A process as proc(5) shows it; a later process with the same PID has another start time.

    Not a dataclass: importing that costs the guard more than everything else.
    """

    __slots__ = ("began", "is_zombie", "parent", "session")

    def __init__(self, stat: bytes) -> None:
        # The name before may contain brackets and spaces.
        state, parent, _, session, *others = stat.rpartition(b")")[2].split(maxsplit=20)
        self.parent, self.session, self.began = int(parent), int(session), int(others[15])
        self.is_zombie = state == b"Z"


def find_processes(mark: str, leaders: Mapping[str, psutil.Process]) -> dict[str, list[psutil.Process]]:
    """Find the job's processes among all of the machine. Takes about 0.03 ms for each, so the driver uses a thread.

    Args:
        mark: in their environment.
        leaders: the processes that were started as workers (each leads a session), by worker key.

    Returns:
        The living processes of the job by worker key; under "" those that carry the job's mark and no worker's. Never
        the calling process.

    Raises:
        OSError: no file descriptor is free.
    """
    seen = {pid: process for pid in psutil.pids() if (process := _look(pid)) is not None}
    parent_of = {pid: process.parent for pid, process in seen.items()}
    me = os.getpid()
    alive = {pid: process for pid, process in seen.items() if pid != me and not process.is_zombie}
    # A worker's PID stays taken while its session has members. If another process has it now, the worker's session was
    # empty before, and this one is a stranger's.
    sessions = {
        leader.pid: key
        for key, leader in leaders.items()
        if leader.pid not in alive or _process(leader.pid, alive[leader.pid]) in (leader, None)
    }
    owner_of = {pid: sessions[process.session] for pid, process in alive.items() if process.session in sessions}
    _add_descendants(owner_of, alive, parent_of)
    for pid in alive:
        if pid not in owner_of:
            key = _marked_key(pid, mark)
            if key is not None:
                owner_of[pid] = key
    _add_descendants(owner_of, alive, parent_of)
    processes_of: dict[str, list[psutil.Process]] = {}
    for pid, key in owner_of.items():
        found = _process(pid, alive[pid])
        if found is not None:
            processes_of.setdefault(key, []).append(found)
    return processes_of


def _look(pid: int) -> _Seen | None:
    """Return the process; None if it has ended, or is hidden from us."""
    try:
        # Not with psutil, which takes five times as long: there may be thousands of processes.
        return _Seen(_read(f"/proc/{pid}/stat"))
    except OSError as error:
        _check_descriptors(error)
        return None


def _process(pid: int, seen: _Seen) -> psutil.Process | None:
    """Return a handle to signal it, however late. None if it has ended since it was seen."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        now = _look(pid)
        if now is not None and now.began == seen.began:
            return process
    return None


def _marked_key(pid: int, mark: str) -> str | None:
    try:
        variables = _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError as error:
        _check_descriptors(error)
        return None  # it is between two programs, is ending, or belongs to another user
    if f"{ENV_MARK}={mark}".encode() not in variables:
        return None
    start = f"{ENV_WORKER}=".encode()
    return next((os.fsdecode(variable.removeprefix(start)) for variable in variables if variable.startswith(start)), "")


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _check_descriptors(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise error


def _add_descendants(owner_of: dict[int, str], alive: Iterable[int], parent_of: Mapping[int, int]) -> None:
    for pid in alive:
        line: list[int] = []
        ancestor = pid
        # A PID that is reused during the scan could close a circle.
        while ancestor not in owner_of and ancestor in parent_of and ancestor not in line:
            line.append(ancestor)
            ancestor = parent_of[ancestor]
        key = owner_of.get(ancestor)
        if key is not None:
            owner_of.update((pid, key) for pid in line if pid in alive)


def send_signal(process: psutil.Process, number: signal.Signals) -> None:
    """Signal a process, unless it is gone or its PID has been reused."""
    with contextlib.suppress(psutil.Error, OSError):
        try:
            # The descriptor fixes the process; is_running() then compares the creation time.
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):  # Python was built without it, the kernel refuses it, or none is free
            process.send_signal(number)
            return
        try:
            if process.is_running():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):  # opening is allowed, but not this; the PID cannot be reused meanwhile
            process.send_signal(number)
        finally:
            os.close(descriptor)


def end_job(mark: str, leaders: Mapping[str, psutil.Process]) -> bool:
    """Send SIGTERM to every process of the job, then after a short grace SIGKILL until nothing is left. Blocks.

    Returns:
        Whether nothing is left; False only for processes that even SIGKILL does not end.
    """
    first = _flat(find_processes(mark, leaders))
    for process in first:
        send_signal(process, signal.SIGTERM)
    psutil.wait_procs(first, timeout=_GRACE_S)
    give_up = time.monotonic() + _GIVE_UP_S
    clean_since = time.monotonic()
    while (now := time.monotonic()) < give_up:
        remaining = _flat(find_processes(mark, leaders))
        for process in remaining:
            send_signal(process, signal.SIGKILL)
        if remaining:
            clean_since = now
        elif now - clean_since > _CLEAN_S:
            return True
        time.sleep(_SCAN_GAP_S)
    return False


def _flat(processes_of: Mapping[str, list[psutil.Process]]) -> list[psutil.Process]:
    return [process for processes in processes_of.values() for process in processes]


def main(mark: str) -> int:
    """Run the guard: track the workers until the driver sends ``quit`` or dies.

    Lines on standard input: ``+ PID`` a worker was started, ``- PID`` it is gone with all its descendants, ``quit``.
    """
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    leaders: dict[str, psutil.Process] = {}
    for line in sys.stdin.buffer:
        match line.split():
            case [b"+", pid]:
                # One that has already ended can be recognized by its mark only.
                with contextlib.suppress(psutil.Error):
                    leaders[pid.decode()] = psutil.Process(int(pid))
            case [b"-", pid]:
                leaders.pop(pid.decode(), None)
            case [b"quit"]:
                return 0
            case _:
                pass
    return 0 if end_job(mark, leaders) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
