"""A job that a page shows, without any process: a status that changes as the test says. For tests and benchmarks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic_driver.hosts import Host, WorkerId
from elastic_driver.reporting.happenings import (
    HostLost,
    HostReady,
    HostsChanged,
    JobStarted,
    Member,
    NoticeGiven,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
)
from elastic_driver.reporting.page.curves import Curves
from elastic_driver.reporting.page.feed import Feed
from elastic_driver.reporting.page.sessions import Sessions
from elastic_driver.reporting.page.site import Actions, Site
from elastic_driver.words import Backend, NoticeKind

JOB = "53c682932df80430"


class ShownJob:
    """See above.

    Args:
        workers: how many, in the first round.
        each: on a host.
        call_later: of the event loop.
        clock: seconds since the epoch; a test may have its own.

    Attributes:
        site: to be given to a server.
        curves, feed: of the site.
        sessions: of the site.
        done: what an operator has had done.
        output: of workers, by their keys.
        looks: how often the status was asked for.
    """

    def __init__(
        self,
        workers: int = 4,
        *,
        each: int = 2,
        call_later: Callable[[float, Callable[[], None]], Any],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.began = clock()
        self.each = each
        self.looks = 0
        self.done: list[tuple[str, str]] = []
        self.is_on_disk = asyncio.Event()
        self.is_on_disk.set()
        self.output: dict[str, Sequence[str]] = {}
        self.drained: set[str] = set()
        self.drained_slots: dict[str, list[int]] = {}
        self.blacklisted: dict[str, float] = {}
        self.explain = f"round 1 runs with {workers} workers"
        self.round_id = 1
        self.phase = "running"
        self.running = True
        self.random = random.Random(1)
        self.more: dict[str, object] = {}
        self.hosts = [f"node{index:03}" for index in range(-(-workers // each))]
        self.workers = [WorkerId(self.hosts[index // each], index % each, 0) for index in range(workers)]
        self.curves = Curves()
        self.feed = Feed(self.status, curves=self.curves, call_later=call_later, clock=clock)
        self.sessions = Sessions(clock)
        actions = Actions(
            lambda host: self._drain(host, undo=False),
            lambda host: self._drain(host, undo=True),
            self._end,
            self._stacks,
        )
        self.site = Site(JOB, self.feed, self.sessions, actions, output=self.output.get, names=["driver.example"])

    async def _drain(self, host: str, *, undo: bool) -> str:
        if host not in self.hosts:
            return f"the job has no host {host}"
        self.done.append(("undo" if undo else "drain", host))
        (self.drained.discard if undo else self.drained.add)(host)
        return f"host {host} {'may have workers again' if undo else 'is drained'}"

    async def _end(self) -> str:
        self.done.append(("end", ""))
        await self.is_on_disk.wait()
        return "the job is ending"

    async def _stacks(self) -> str:
        return "all ranks: train.py:12 step()"

    def tell_start(self) -> None:
        """What happens at the start of such a job."""
        self.feed.hear(JobStarted("http://127.0.0.1:1", JOB))
        self.tell_hosts()
        for host in self.hosts:
            self.feed.hear(HostReady(host, "127.0.0.1", 0))
        for worker in self.workers:
            self.feed.hear(ProcessStarted(worker, 4711))
        self.tell_round("start", 0, 1.4)

    def tell_hosts(self) -> None:
        """Discovery answers."""
        self.feed.hear(HostsChanged([Host(name, self.each) for name in self.hosts]))

    def tell_round(self, cause: str, old: int, took_s: float) -> None:
        """A round of all workers begins."""
        members = [Member(rank, worker, 4711) for rank, worker in enumerate(self.workers)]
        self.feed.hear(RoundFormed(self.round_id, old, cause, 120, True, Backend.TORCH, took_s, members, reinit=False))
        self.feed.hear(RoundResumed(self.round_id, 120, took_s))
        self.explain = f"round {self.round_id} runs with {len(self.workers)} workers"

    def lose_host(self, host: str) -> None:
        """A host dies, and the others go on."""
        old = len(self.workers)
        gone = [worker for worker in self.workers if worker.hostname == host]
        for worker in gone:
            self.feed.hear(ProcessEnded(worker, 4711, "0", -9, "killed by SIGKILL", expected=False, foretold=False))
        self.feed.hear(HostLost(host, "its agent is not heard any more"))
        self.feed.hear(NoticeGiven(self.round_id, NoticeKind.ABORT, f"host {host} is lost"))
        self.feed.hear(Remark(f"host {host} is blacklisted", warning=True))
        self.workers = [worker for worker in self.workers if worker not in gone]
        self.blacklisted[host] = self.clock() + 90
        self.round_id += 1
        self.tell_round(f"host {host} lost", old, 0.8)

    def status(self) -> dict[str, object]:
        """As the driver's side gives it."""
        self.looks += 1
        now = self.clock()
        age_s = now - self.began
        draw = self.random.random
        hosts: list[dict[str, object]] = []
        for name in self.hosts:
            row: dict[str, object] = {"name": name, "slots": self.each, "labels": []}
            if name in self.blacklisted:
                row |= {"blacklisted": True, "ready_in_s": max(0.0, self.blacklisted[name] - now)}
            if name in self.drained:
                row["drained"] = True
            if name in self.drained_slots:
                row["drained_slots"] = self.drained_slots[name]
            hosts.append(row)
        return {
            "job_id": JOB,
            "command": ["python", "train.py"],
            "explain": self.explain,
            "age_s": age_s,
            "phase": self.phase,
            "round_id": self.round_id,
            "commits": 0,
            "newest_commit": int(age_s * 2),
            "tells_commits": True,
            "resets": self.round_id - 1,
            "unused": "",
            "durable": [{"where": "/data/commits", "written": int(age_s), "commits": int(age_s * 2), "trouble": ""}],
            "steps_per_s": round(20 + draw(), 2),
            "goodput": {"seconds": {"training": age_s, "start": 2.0, "reset": 1.0, "recomputed": 0.5}, "share": 0.93},
            "hosts": hosts,
            "workers": [
                {
                    "worker": worker.key,
                    "host": worker.hostname,
                    "slot": worker.slot,
                    "phase": "member",
                    "since_s": age_s,
                    "rank": rank,
                    "round_id": self.round_id,
                    "running": self.running,
                    "commits": int(age_s * 2),
                    "pid": 4711,
                    "vitals": {
                        "state": "R",
                        "traced": False,
                        "cpu": 0.97 + draw() / 50,
                        "rss_bytes": (900 << 20) + int(draw() * (4 << 20)),
                        "steps": int(age_s * 20),
                        "steps_per_s": 20 + draw(),
                        "waits_s": 0.0,
                        "waited_s": age_s / 50,
                        "commits": int(age_s * 2),
                        "committed_s": age_s % 0.5,
                        "pulse_s": 0.2,
                        "can_dump": True,
                    },
                }
                for rank, worker in enumerate(self.workers)
            ],
            **self.more,
        }
