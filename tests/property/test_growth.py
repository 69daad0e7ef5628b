"""Hosts of always new names, as pods and spot machines have them: what the core keeps does not grow."""

from __future__ import annotations

import pickle

import pytest

from elastic_driver.core import attempts, blacklist
from elastic_driver.core.events import (
    Command,
    Event,
    HostsDiscovered,
    StartWorker,
    TimerExpired,
    WorkerExited,
    WorkerReady,
    WorkerRunning,
)
from elastic_driver.core.membership import Policy, check_invariants, new_state, step
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support import extent

pytestmark = pytest.mark.property

REMEMBERED = 64
# Those that are looked at last come after several times as many as are remembered.
NAMES, NAMES_OF_A_RELEASE = 400, 1000


@pytest.mark.parametrize("cooldown", [pytest.param(None, marks=pytest.mark.release), (1.0, 8.0)])
def test_thousands_of_new_names(monkeypatch: pytest.MonkeyPatch, cooldown: tuple[float, float] | None) -> None:
    """One host stays; beside it another comes, joins, fails and is gone for good. Now and then a name comes back."""
    monkeypatch.setattr(attempts, "MOST_REMEMBERED", REMEMBERED)
    monkeypatch.setattr(blacklist, "MOST_REMEMBERED", REMEMBERED)
    policy = Policy(num_proc=1, min_num_proc=1, cooldown_range_s=cooldown)
    state, now = new_state(policy, 0.0), 0.0
    started: set[WorkerId] = set()
    sizes: list[int] = []

    def feed(event: Event) -> list[WorkerId]:
        nonlocal state
        commands: list[Command]
        state, commands = step(state, event, now)
        fresh = [command.worker for command in commands if isinstance(command, StartWorker)]
        assert started.isdisjoint(fresh), "a name is given again"
        started.update(fresh)
        return fresh

    def ready(worker: WorkerId, after: int, cause: ReadyCause, commits: int = 0) -> None:
        feed(WorkerReady(worker, after, commits, cause, "", (Backend.NATIVE,)))

    (stays,) = feed(HostsDiscovered((Host("stays", 1),)))
    ready(stays, 0, ReadyCause.START)
    feed(WorkerRunning(stays, 1, 0))
    for number in range(NAMES_OF_A_RELEASE if extent.is_whole else NAMES):
        now += 10.0
        name = f"pod-{number if number % 7 else number // 2:06}"
        (fresh,) = feed(HostsDiscovered((Host("stays", 1), Host(name, 1))))
        ready(fresh, 0, ReadyCause.START)
        assert state.notice_kind is NoticeKind.HOSTS_UPDATED
        ready(stays, state.round_id, ReadyCause.HOSTS_UPDATED, commits=number)
        assert state.members == (stays, fresh)
        feed(WorkerExited(fresh, -9 if number % 3 else 1, "died", 0.5))
        ready(stays, state.round_id, ReadyCause.INTERNAL_ERROR, commits=number)
        feed(HostsDiscovered((Host("stays", 1),)))
        now += 300.0
        feed(TimerExpired())
        assert state.members == (stays,)
        check_invariants(state)
        if number % 10 == 0:
            sizes.append(len(pickle.dumps(state)))
    # Integers are longer when they are large: no more than that.
    assert max(sizes[-20:]) <= max(sizes[:20]) * 1.05
