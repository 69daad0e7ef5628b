"""Every order of events of small worlds, to a stated depth, with the same audit as the random ones.

They are walked to their whole depth at a release (or without --group); before it to two events or three less, each of
which takes a third of the time or a quarter. There the promises are tried at every third leaf, and the driver dies at
every tenth step.

A world is a list of answers of discovery and the limits. From each state every event that could happen next is fed:
each worker asks, trains, ends well or badly; discovery gives each of its answers; the timer fires. States that were
seen before (times and all) are not walked again. At the leaves the two promises are tried: obedience and silence both
end somewhere; where a leaf's way meets that of another it is known how it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import (
    Event,
    HostHeard,
    HostsDiscovered,
    HostSilent,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerRunning,
    WorkerStarted,
)
from elastic_driver.core.state import JobPhase, State, WorkerPhase, finishing
from elastic_driver.hosts import Host, parse_host
from elastic_driver.words import NoticeKind, OnChange, ReadyCause
from tests.support import extent
from tests.support.fakes.membership_job import BOTH, Job

pytestmark = pytest.mark.property


@dataclass(frozen=True)
class World:
    """What is explored.

    Attributes:
        answers: the lists that discovery can give; the first is given at the start.
        limits: of the job.
        trained: whether the walk begins with a running round after one commit; else with the start of the job.
        depth: how many events.
        spared: how many fewer before a release.
        silent: a host that may be silent, first in doubt, and be heard again.
        cut: whether members may say that they cannot reach the next one by rank.
        states: how many different states a walk before a release finds at least; one that finds fewer has gone wrong.
    """

    answers: tuple[str, ...]
    limits: dict[str, object]
    trained: bool
    depth: int
    states: int
    silent: str = ""
    cut: bool = False
    spared: int = 2


def limits(least: int, wanted: int, most: int | None = None, **others: object) -> dict[str, object]:
    return {
        "num_proc": wanted,
        "min_num_proc": least,
        "max_num_proc": most,
        "elastic_timeout_s": 40.0,
        "start_timeout_s": 15.0,
        "drain_timeout_s": 5.0,
        **others,
    }


COOLDOWN: tuple[float, float] = (1.0, 8.0)

WORLDS = {
    "one host, from the start": World(("a:2", "a:1", ""), limits(1, 2), False, 6, 380),
    "two hosts, from the start": World(
        ("a:1 b:1", "a:1"), limits(2, 2, cooldown_range_s=COOLDOWN), False, 7, 270, spared=3
    ),
    "shrink and come back": World(("a:1 b:1", "a:1", "b:1"), limits(1, 2), True, 6, 350, spared=3),
    "below min-np": World(("a:1 b:1", "a:1"), limits(2, 2, cooldown_range_s=COOLDOWN), True, 7, 700, spared=3),
    "one worker moves": World(("a:1", "b:1"), limits(1, 1, 1), True, 7, 190, spared=3),
    "all hosts replaced": World(("a:2", "b:2"), limits(1, 2, 2), True, 5, 45, spared=3),
    "reset limit": World(("a:1 b:1", "a:1 b:1 c:1"), limits(1, 2, 2, reset_limit=1), True, 7, 820),
    "a standby": World(("a:1 b:1 c:1", "a:1 c:1"), limits(1, 2, 2, num_standby=1), True, 5, 100, spared=3),
    "all lost, commits on disk": World(
        ("a:1 b:1", "a:1"), limits(1, 2, durable=True, cooldown_range_s=COOLDOWN), True, 6, 260, spared=3
    ),
    "fails again and again": World(
        ("a:1 b:1", "a:1 b:1 c:1", "a:1"),
        limits(1, 2, 2, setbacks_limit=2, pause_range_s=(1.0, 4.0)),
        True,
        6,
        300,
        spared=3,
    ),
    "restarted, from the start": World(
        ("a:1 b:1", "a:1"), limits(1, 2, on_change=OnChange.RESTART, cooldown_range_s=COOLDOWN), False, 5, 45
    ),
    "restarted, grows and shrinks": World(
        ("a:1 b:1", "a:1", "b:1 c:1"), limits(1, 2, 2, on_change=OnChange.RESTART), True, 5, 140
    ),
    "restarted, below min-np": World(
        ("a:1 b:1", "a:1"),
        limits(2, 2, on_change=OnChange.RESTART, cooldown_range_s=COOLDOWN, setbacks_limit=2, reset_limit=2),
        True,
        6,
        170,
    ),
    "restarted, until init()": World(
        ("a:1 b:1", "a:1"),
        limits(1, 2, on_change=OnChange.RESTART, becomes_in_place=True, last_call_s=0.0),
        True,
        5,
        160,
    ),
    "restarted, grows in a moment": World(
        ("a:1 b:1", "a:1 b:1 c:1", "b:1 c:1"), limits(1, 2, 4, on_change=OnChange.RESTART), True, 5, 130
    ),
    "in place, or without init()": World(("a:1 b:1", "a:1"), limits(1, 2, must_init=False), False, 5, 110),
    "no rounds": World(
        ("a:1 b:1", "a:1", "b:1 c:1"), limits(1, 2, 2, on_change=OnChange.NO_ROUNDS, setbacks_limit=3), True, 5, 180
    ),
    "no rounds, below min-np": World(
        ("a:1 b:1", "a:1"), limits(2, 2, on_change=OnChange.NO_ROUNDS, cooldown_range_s=COOLDOWN), False, 5, 180
    ),
    "a multiple of two": World(("a:1 b:1 c:1", "b:1 c:1 d:1 e:1"), limits(2, 2, num_proc_multiple=2), True, 4, 80),
    "two a host, all hosts replaced": World(
        ("a:2", "b:3"), limits(2, 2, 2, ranks_per_host_multiple=2), True, 5, 45, spared=3
    ),
    "one is silent": World(("a:1 b:1", "a:1"), limits(1, 2), True, 5, 400, silent="b"),
    "the first is silent, below min-np": World(("a:1 b:1 c:1", "b:1 c:1"), limits(3, 3, 3), True, 4, 180, silent="a"),
    "all but a joiner are silent": World(("a:1", "a:1 c:1"), limits(1, 1, 2), True, 6, 310, silent="a"),
    "restarted, one is silent": World(
        ("a:1 b:1", "a:1"), limits(1, 2, on_change=OnChange.RESTART), True, 6, 550, silent="b"
    ),
    "no rounds, one is silent": World(
        ("a:1 b:1", "a:1"), limits(1, 2, on_change=OnChange.NO_ROUNDS), True, 6, 310, silent="b"
    ),
    "cut off": World(("a:1 b:1 c:1", "a:1 b:1"), limits(2, 3, 3), True, 4, 210, cut=True),
    "cut off, below min-np": World(("a:1 b:1",), limits(2, 2), True, 7, 350, cut=True),
    "three hosts of two": World(("a:2 b:2 c:2", "a:2 c:1"), limits(2, 4, 5), True, 3, 22),
}


def hosts_of(answer: str) -> tuple[Host, ...]:
    return tuple(parse_host(text, default_slots=None) for text in answer.split())


def possible(job: Job, world: World) -> Iterator[Event]:
    """What can happen next in this world."""
    answers, silent = world.answers, world.silent
    asks = job.kind is OnChange.IN_PLACE
    for record in job.state.workers:
        worker = record.worker
        match record.phase:
            case WorkerPhase.BOOTING if not asks:
                yield WorkerStarted(worker)
                yield WorkerExited(worker, 1, "exited with code 1", 0.5)
                yield WorkerNotStarted(worker, "no such host", 0.5, bad_command=False)
            case WorkerPhase.READY | WorkerPhase.MEMBER if not asks:
                if job.policy.becomes_in_place:
                    yield WorkerReady(worker, 0, 0, ReadyCause.START, "", BOTH)
                yield WorkerExited(worker, 1, "exited with code 1", 0.5)
                yield WorkerDying(worker, -9, "killed by SIGKILL", 0.5)
                yield WorkerExited(worker, 0, "exited with code 0", 0.5)
            case WorkerPhase.BOOTING:
                yield WorkerReady(worker, 0, 0, ReadyCause.START, "", BOTH)
                if not job.policy.must_init:
                    yield WorkerExited(worker, 0, "exited with code 0", 0.5)
                yield WorkerExited(worker, 1, "exited with code 1", 0.5)
            case WorkerPhase.READY:
                yield WorkerExited(worker, -9, "killed by SIGKILL", 0.5)
            case WorkerPhase.LEAVING:
                yield WorkerExited(worker, 0, "exited with code 0", 0.5)
            case WorkerPhase.MEMBER:
                yield WorkerExited(worker, -9, "killed by SIGKILL", 0.5)
                yield WorkerDying(worker, -9, "killed by SIGKILL", 0.5)
                yield WorkerExited(worker, 0, "exited with code 0", 0.5)
                yield WorkerReady(worker, job.round_id, record.commits, ReadyCause.INTERNAL_ERROR, "", BOTH)
                if world.cut:
                    rank = (record.rank + 1) % len(job.members)
                    commits, cause = record.commits, ReadyCause.INTERNAL_ERROR
                    yield WorkerReady(worker, job.round_id, commits, cause, "", BOTH, unreachable=(rank,))
                if job.state.notice_kind is NoticeKind.HOSTS_UPDATED and record.running:
                    # All leave at one commit: the next after what they had.
                    commits = job.round_commits + 1
                    yield WorkerReady(worker, job.round_id, commits, ReadyCause.HOSTS_UPDATED, "", BOTH)
                if not record.running and job.state.phase is JobPhase.RUNNING and not finishing(job.state):
                    yield WorkerRunning(worker, job.round_id, job.round_commits)
    for answer in answers:
        if frozenset(hosts_of(answer)) != frozenset(job.state.hosts):
            yield HostsDiscovered(hosts_of(answer))
    known = next((one for one in job.state.silent if one.hostname == silent), None)
    if known is not None:
        yield HostHeard(silent)
    if silent and (known is None or not known.sure):
        yield HostSilent(silent, 5.0)
        if known is None:
            yield HostSilent(silent, 2.0, sure=False)
    if next_deadline(job.state) is not None:
        yield TimerExpired()


@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_events(name: str) -> None:
    world = WORLDS[name]
    job = Job(**world.limits)
    job.rereads_each = 50  # the random histories are read again at every step
    job.dies_each = 1 if extent.is_whole else 10
    if world.trained:
        job.train(*world.answers[0].split(), commits=1)
    else:
        job.feed(HostsDiscovered(hosts_of(world.answers[0])))
    frontier = [job]
    seen: set[tuple[State, float]] = {(job.state, job.now)}
    obeyed: set[tuple[State, float]] = set()
    silent: set[tuple[State, float]] = set()
    last = world.depth - (0 if extent.is_whole else world.spared)
    for depth in range(1, last + 1):
        reached = []
        for here in frontier:
            for event in possible(here, world):
                there = here.fork()
                at = next_deadline(here.state) if isinstance(event, TimerExpired) else here.now
                there.feed(event, at=at)
                if (there.state, there.now) in seen:
                    continue
                seen.add((there.state, there.now))
                if there.state.phase is not JobPhase.ENDED:
                    reached.append(there)
                if depth == last and (extent.is_whole or len(seen) % 3 == 0):
                    there.fork().cooperate(obeyed)
                    there.fork().fall_silent(silent)
        frontier = reached
    assert len(seen) >= world.states
