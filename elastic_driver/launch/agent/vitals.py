"""How the workers of this host are: looks at each of them now and then, and tells the driver.

Owns when it looks, what it looks at in /proc, and what the driver was told last. A worker's own word for it is its page
(vitals_page.py); what the kernel says of its process comes from here. Blames nobody, and ends nobody.
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
from elastic_driver.rendezvous.agent_messages import Said, VitalsSeen
from elastic_driver.vitals import Vitals, is_quiet

_LOOK_S = 0.5
# The driver hears of a worker of which only counters have moved each so many looks.
_LOOKS_EACH = 2
# Well before anybody is suspected.
_STILL_S = 2.0
# The threads of a process are listed again after so many looks, or when they have become more or fewer.
_LOOKS_A_LIST = 20
_OURS = "elastic-"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class WatchedWorkers(Protocol):
    """What there is to be looked at."""

    def watched(self) -> Iterable[tuple[WorkerId, int, VitalsPage | None]]:
        """Each running worker, the process that was started for it, and its page."""


class _Process:
    """What is known of one worker's process.

    Args:
        pid: its number.
        started: that of the process that was started for the worker.
        still_s: see VitalsWatch.
    """

    def __init__(self, pid: int, started: int, still_s: float) -> None:
        self.pid = pid
        self._started = started
        self._still_s = still_s
        self._ours: dict[
            int, int
        ] = {}  # threads of this project's: their CPU time so far, ns; also of those that ended
        self._living: tuple[int, ...] = ()  # of them
        self._threads = 0
        self._looks = 0
        self._counts: tuple[int, ...] = ()
        self._moved_s = 0.0
        self._done: tuple[float, float, int] | None = None  # by whom no page speaks: when, and what it had done then
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
        """A look at it now; None when it is no more, or hidden.

        Args:
            at_s: when.
            page: what it says of itself.
            written_bytes: what it has written because it was asked for its stacks.
            dumps: how often it was asked for them, and how often that was over.
            others: processes of the job's other workers here.
            table: shows all processes, for a closer look where it stands still; None for none now.
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
        # With that of its children that have ended.
        cpu_s = sum(map(int, of_stat[11:15])) * _TICK_S - sum(self._ours.values()) / 1e9
        self._count_wakes(at_s, proc.number(of_status, b"voluntary_ctxt_switches"), dumps)
        if not self._is_still(at_s, page, of_stat[0], cpu_s, proc.moved(io)):
            self._activity.forget()
            self._wait = None
        elif table is not None:
            everybody = table()
            self._activity.look(self.pid, self._started, everybody)
            self._wait = None
            if at_s - self._woke_s >= self._still_s:  # else it is a wait of a moment
                self._wait = waits.of_main_thread(
                    self.pid,
                    children=lambda: tuple(family(self.pid, self._started, everybody)),
                    others=lambda: tuple(each for each in others() if each != self.pid),
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
        """Counts how often the main thread has woken, but for what taking its stacks may have woken it."""
        is_asked = dumps != self._dumps or dumps[0] != dumps[1]
        if self._switches is None:
            self._woke_s = at_s
        elif switches != self._switches and not is_asked:
            self._wakes += max(0, switches - self._switches)
            self._woke_s = at_s
        self._switches, self._dumps = switches, dumps

    def _is_still(self, at_s: float, page: PageFacts | None, state: bytes, cpu_s: float, moved: int) -> bool:
        """Whether it has not gone on for a while. For who waits, or is stopped, that is no question."""
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
        workers: who there is.
        send: tells the driver.
        is_heard: whether the driver takes what it is told. Where it does not, it is told the latest, later.
        still_s: after how long without progress of a worker it is looked at what its children and connections do.
    """

    def __init__(
        self,
        workers: WatchedWorkers,
        send: Callable[[Said], None],
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
        """Looks from now on."""
        self._timer = self._loop.call_later(_LOOK_S, self._look_on_time)

    def close(self) -> None:
        """Looks no more."""
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
        """Looks at all now. Returns those of which there is something to tell.

        Args:
            everybody: whether that is all of them; else those that wait, and those that were stopped, traced or let go
                on since they were told last.
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
        """The processes of all other workers here, and this one, by which workers reach the job."""
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
        # Who runs Python may be a child of what was started. Anybody may have written that number.
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
        if seen is None and pid != started:  # it has ended, and the command that has started it has not
            known = self._processes[worker] = _Process(started, started, self._still_s)
            seen = known.look(round(time.monotonic(), 3), None)
        return seen


def _own_threads(pid: int) -> list[int]:
    """Those of this project in a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            if proc.read(f"/proc/{pid}/task/{thread}/comm").startswith(_OURS.encode()):
                found.append(int(thread))
    return found
