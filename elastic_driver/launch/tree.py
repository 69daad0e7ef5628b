"""Which processes belong to a worker or a job, and how they are ended. psutil does the looking and the signalling.

A process belongs to a worker when it descends from it, is in its session, or carries the job's marks in its
environment: so data-loader children are found after their parent's death, and a child that made a session of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil

from elastic_driver.rendezvous.messages import ENV_JOB, ENV_WORKER

# A process that forks while it is being killed can leave a child behind: look again, this often.
_SWEEPS = 20


def processes_of(job_id: str, *, worker_key: str | None, leaders: Iterable[int]) -> list[psutil.Process]:
    """The living processes of a worker (or of the whole job), itself included; never this process.

    Args:
        job_id: the mark in their environment.
        worker_key: of one worker; None for all of the job.
        leaders: pids of the workers that were started, living or not; each leads a session.
    """
    sessions = frozenset(leaders)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in sessions or _session(process.pid) in sessions or _marked(process, job_id, worker_key):
                found[process.pid] = process
                for child in process.children(recursive=True):
                    found[child.pid] = child
        except (psutil.Error, OSError):
            continue  # it ended while we looked, or is another user's
    found.pop(os.getpid(), None)
    return list(found.values())


def _session(pid: int) -> int:
    return os.getsid(pid)


def _marked(process: psutil.Process, job_id: str, worker_key: str | None) -> bool:
    environ = process.environ()
    if environ.get(ENV_JOB) != job_id:
        return False
    return worker_key is None or environ.get(ENV_WORKER) == worker_key


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signals each; one that has ended meanwhile is no error, and its pid's next owner is left alone."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def kill_all(job_id: str, *, worker_key: str | None, leaders: Iterable[int], pause_s: float = 0.05) -> None:
    """Kills until nothing is left, also what was forked meanwhile. Blocks, a second at most."""
    sessions = tuple(leaders)
    for _ in range(_SWEEPS):
        left = processes_of(job_id, worker_key=worker_key, leaders=sessions)
        if not left:
            return
        send(left, signal.SIGKILL)
        psutil.wait_procs([process for process in left if process.ppid() != os.getpid()], timeout=pause_s)
