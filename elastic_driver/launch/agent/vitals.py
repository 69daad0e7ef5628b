"""The vitals of this host's workers: looks at each of them at intervals, and reports to the driver.

Owns when it looks, what it reads in /proc, and what was last reported to the driver. A worker's own statements are on
its page (vitals_page.py); what the kernel knows of its process comes from here. Judges no worker, and ends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent import proc, waits
from elastic_driver.launch.agent.activity import Activity, family
from elastic_driver.launch.agent.vitals_page import PageFacts, VitalsPage
from elastic_driver.rendezvous.agent_messages import AgentMessage, VitalsSeen
from elastic_driver.vitals import Vitals, is_quiet

_LOOK_S = 0.5
# A worker of which only counters have changed is reported every so many looks.
_LOOKS_EACH = 2
# Well before any worker is suspected.
_STILL_S = 2.0
# A process's threads are listed again after so many looks, or when their number has changed.
_LOOKS_A_LIST = 20
_OURS = "elastic-"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class WatchedWorkers(Protocol):
    """The workers to look at."""

    def watched(self) -> Iterable[tuple[WorkerId, int, VitalsPage | None]]:
        """Return each running worker, the PID of the process that was started for it, and its page."""


class _Process:
    """One worker's process, and its last look.

    Args:
        pid: its PID.
        started: PID of the process that was started for the worker.
        still_s: see VitalsWatch.
    """

    def __init__(self, pid: int, started: int, still_s: float) -> None:
        self.pid = pid
        self._started = started
        self._still_s = still_s
        self._ours: dict[int, int] = {}  # this project's threads: their CPU time so far, ns, also of those that ended
        self._living: tuple[int, ...] = ()  # those of them that live
        self._threads = 0
        self._looks = 0
        self._counts: tuple[int, ...] = ()
        self._moved_s = 0.0
        self._done: tuple[float, float, int] | None = None  # without a page: time and work of the last comparison
        self._activity = Activity()
        self._switches: int | None = None
        self._wakes, self._woke_s = 0, 0.0
        self._dumps = (0, 0)
        self._wait: waits.Wait | None = None

    def look(
        self,
        at_s: float,
        page: PageFacts | None,
        *,
        written_bytes: int = 0,
        dumps: tuple[int, int] = (0, 0),
        others: Callable[[], Collection[int]] = tuple,
        table: Callable[[], Mapping[int, proc.Entry]] | None = None,
    ) -> Vitals | None:
        """Look at it now; None if it no longer exists, or is hidden.

        Args:
            at_s: the time.
            page: the worker's own statements.
            written_bytes: what it has written because its stacks were requested.
            dumps: how often they were requested, and how often that was over.
            others: returns the processes of the job's other workers here.
            table: returns all processes, for a closer look if it stands still; None to skip that now.
        """
        of_status, of_stat = proc.lines(f"/proc/{self.pid}/status"), proc.stat(self.pid)
        if len(of_stat) < 13:
            return None
        threads = proc.number(of_status, b"Threads")
        self._looks += 1
        if threads != self._threads or self._looks % _LOOKS_A_LIST == 1:
            self._threads = threads
            self._living = tuple(_own_threads(self.pid))
        for thread in self._living:
            with contextlib.suppress(ValueError, IndexError):
                self._ours[thread] = int(proc.read(f"/proc/{self.pid}/task/{thread}/schedstat").split()[0])
        io = proc.lines(f"/proc/{self.pid}/io")
        # Includes the CPU time of its children that have ended.
        cpu_s = sum(map(int, of_stat[11:15])) * _TICK_S - sum(self._ours.values()) / 1e9
        self._count_wakes(at_s, proc.number(of_status, b"voluntary_ctxt_switches"), dumps)
        if not self._is_still(at_s, page, of_stat[0], cpu_s, proc.moved(io)):
            self._activity.forget()
            self._wait = None
        elif table is not None:
            everybody = table()
            self._activity.look(self.pid, self._started, everybody)
            self._wait = None
            if at_s - self._woke_s >= self._still_s:  # else it only waits for a moment
                self._wait = waits.of_main_thread(
                    self.pid,
                    children=lambda: tuple(family(self.pid, self._started, everybody)),
                    others=lambda: tuple(other for other in others() if other != self.pid),
                )
        seen = Vitals(
            at_s=at_s,
            pid=self.pid,
            state=of_stat[0].decode("ascii", "replace"),
            traced=proc.number(of_status, b"TracerPid") != 0,
            cpu_s=max(0.0, cpu_s) + self._activity.cpu_ticks * _TICK_S,
            io_bytes=max(0, proc.moved(io) - written_bytes) + self._activity.moved_bytes,
            rss_bytes=proc.number(of_status, b"VmRSS") << 10,
            wakes=self._wakes,
            awaits="" if self._wait is None else self._wait.what,
            peer="" if self._wait is None else self._wait.peer,
        )
        if page is None:
            return seen
        return replace(
            seen,
            pulse_s=page.pulse_s,
            round_id=page.round_id,
            rank=page.rank,
            steps=page.steps,
            submitted=page.submitted,
            finished=page.finished,
            waits_s=page.waits_s,
            waited_s=page.waited_s,
            commits=page.commits,
            committed_s=page.committed_s,
            traffic=page.traffic,
            waiting=page.waiting,
            can_dump=page.dump_signal != 0,
            own_s=page.own_s,
        )

    def _count_wakes(self, at_s: float, switches: int, dumps: tuple[int, int]) -> None:
        """Count how often the main thread has woken, except while its stacks are taken, which may wake it."""
        is_asked = dumps != self._dumps or dumps[0] != dumps[1]
        if self._switches is None:
            self._woke_s = at_s
        elif switches != self._switches and not is_asked:
            self._wakes += max(0, switches - self._switches)
            self._woke_s = at_s
        self._switches, self._dumps = switches, dumps

    def _is_still(self, at_s: float, page: PageFacts | None, state: bytes, cpu_s: float, moved: int) -> bool:
        """Return whether it has made no progress for a while; always false while it waits or is stopped."""
        if page is None:
            since_s, cpu_before, moved_before = self._done or (at_s, cpu_s, moved)
            if self._done is None or at_s - since_s >= self._still_s:
                if not is_quiet(at_s - since_s, cpu_s - cpu_before, moved - moved_before):
                    self._moved_s = at_s
                self._done = at_s, cpu_s, moved
            return state not in (b"T", b"t") and self._looks > 1 and at_s - self._moved_s >= self._still_s
        counts = (page.round_id, page.steps, page.submitted, page.finished, page.commits)
        if counts != self._counts or page.waits_s > 0 or state in (b"T", b"t"):
            self._counts, self._moved_s = counts, at_s
        return at_s - self._moved_s >= self._still_s


class VitalsWatch:
    """Looks at a host's workers. Used on the event loop only.

    Args:
        workers: the workers to look at.
        send: sends the driver a message.
        is_heard: returns whether the driver keeps up. While it does not, reports wait, and only the latest is sent.
        still_s: after how long without progress a worker's children and connections are looked at, too, seconds.
    """

    def __init__(
        self,
        workers: WatchedWorkers,
        send: Callable[[AgentMessage], None],
        *,
        is_heard: Callable[[], bool],
        still_s: float = _STILL_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._send = send
        self._is_heard = is_heard
        self._still_s = still_s
        self._processes: dict[WorkerId, _Process] = {}
        self._told: dict[WorkerId, tuple[object, ...]] = {}
        self._looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on."""
        self._timer = self._loop.call_later(_LOOK_S, self._look_on_time)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_on_time(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look_on_time)
        self._looks += 1
        if not self._is_heard():
            return
        news = self.look(everybody=self._looks % _LOOKS_EACH == 0)
        if news:
            self._send(VitalsSeen({worker.key: vitals for worker, vitals in news.items()}))

    def look(self, *, everybody: bool) -> dict[WorkerId, Vitals]:
        """Look at all workers now. Returns the vitals to report.

        Args:
            everybody: whether to return all; else only those of workers that wait, or that were stopped, traced or
                resumed since the last report.
        """
        seen: dict[WorkerId, Vitals] = {}
        present = set()
        table = functools.cache(proc.table) if everybody else None
        watched = list(self._workers.watched())
        for worker, started, page in watched:
            present.add(worker)
            vitals = self._look_at(
                worker, started, page, table, functools.partial(self._others, worker, watched, table)
            )
            if vitals is None:
                continue
            level = (vitals.state in "Tt", vitals.traced, vitals.pid)
            if everybody or vitals.waits_s or vitals.waiting or self._told.get(worker) != level:
                self._told[worker] = level
                seen[worker] = vitals
        for gone in self._processes.keys() - present:
            del self._processes[gone]
            self._told.pop(gone, None)
        return seen

    def _others(
        self,
        worker: WorkerId,
        watched: Iterable[tuple[WorkerId, int, VitalsPage | None]],
        table: Callable[[], Mapping[int, proc.Entry]] | None,
    ) -> Collection[int]:
        """Return the processes of all other workers here, and this one, through which workers reach the job."""
        found = {os.getpid()}
        for other, started, _ in watched:
            if other != worker:
                found |= {started, *(family(started, started, table()) if table is not None else ())}
        return found

    def _look_at(
        self,
        worker: WorkerId,
        started: int,
        page: VitalsPage | None,
        table: Callable[[], Mapping[int, proc.Entry]] | None,
        others: Callable[[], Collection[int]],
    ) -> Vitals | None:
        facts = None if page is None else page.read(time.monotonic_ns())
        known = self._processes.get(worker)
        # A child of the started process may be the one that runs Python. The number itself is not trusted.
        pid = started
        if facts is not None and facts.pid != started:
            known_pid = known is not None and known.pid == facts.pid
            pid = facts.pid if known_pid or proc.descends_from(facts.pid, started) else started
        if known is None or known.pid != pid:
            known = self._processes[worker] = _Process(pid, started, self._still_s)
        written_bytes = 0 if page is None else page.written_bytes()
        dumps = (0, 0) if page is None else (page.dumps_begun, page.dumps_ended)
        at_s = round(time.monotonic(), 3)
        seen = known.look(at_s, facts, written_bytes=written_bytes, dumps=dumps, table=table, others=others)
        if seen is None and pid != started:  # it has ended, but the command that started it has not
            known = self._processes[worker] = _Process(started, started, self._still_s)
            seen = known.look(round(time.monotonic(), 3), None)
        return seen


def _own_threads(pid: int) -> list[int]:
    """Return this project's threads in a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            if proc.read(f"/proc/{pid}/task/{thread}/comm").startswith(_OURS.encode()):
                found.append(int(thread))
    return found
