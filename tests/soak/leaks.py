"""Looks for what a job leaves behind or gathers: descriptors, threads, memory, shared memory, processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def by(cls, pid: int) -> Held | None:
        """What this one holds; None when it is gone."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)
        except psutil.Error:
            return None


class Gathering:
    """What processes hold more than when they were seen first, in the same circumstances.

    Args:
        descriptors: how many more are too many.
        threads: how many more are too many.
        memory_mb: how much more is too much.
    """

    def __init__(self, *, descriptors: int, threads: int, memory_mb: int) -> None:
        self._limit = Held(descriptors, threads, memory_mb * _MB)
        self._first: dict[tuple[int, object], Held] = {}
        self.most = Held(0, 0, 0)

    def look(self, who: str, pid: int, circumstances: object = None) -> None:
        """Compares a process with itself before.

        Raises:
            AssertionError: it holds too much more.
        """
        now = Held.by(pid)
        if now is None:
            return
        first = self._first.setdefault((pid, circumstances), now)
        more = Held(now.descriptors - first.descriptors, now.threads - first.threads, now.memory - first.memory)
        within = (
            more.descriptors <= self._limit.descriptors
            and more.threads <= self._limit.threads
            and more.memory <= self._limit.memory
        )
        assert within, f"{who} (pid {pid}) gathers: {first} became {now}; descriptors: {_descriptors(pid)}"
        self.most = Held(
            max(self.most.descriptors, more.descriptors),
            max(self.most.threads, more.threads),
            max(self.most.memory, more.memory),
        )

    def __str__(self) -> str:
        return f"{self.most.descriptors} descriptors, {self.most.threads} threads, {self.most.memory / _MB:.1f} MB"


def _descriptors(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


def shared_names() -> set[str]:
    """What there is in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def left_in_shared_memory(before: Iterable[str], *, within_s: float = 10.0) -> list[str]:
    """Names in /dev/shm that were not there before, stay, and that no living process uses (others may run here)."""
    end = time.monotonic() + within_s
    while True:
        new = shared_names() - set(before)
        if new:
            new -= _used()
        if not new or time.monotonic() > end:
            return sorted(new)
        time.sleep(0.2)


def _used() -> set[str]:
    used = set()
    for process in psutil.process_iter():
        try:
            paths = [found.path for found in process.memory_maps()]
            paths += [os.readlink(f"/proc/{process.pid}/fd/{name}") for name in os.listdir(f"/proc/{process.pid}/fd")]
        except (psutil.Error, OSError):
            continue
        used |= {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/")}
    return used


def zombies(pid: int) -> list[int]:
    """Children that have ended and that nobody has waited for."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.Error:
            continue
    return found
