"""Rosters against the plain tuple and dict that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_driver.core import roster as roster_module
from elastic_driver.core.registry import Record, WorkerState
from elastic_driver.core.roster import Roster
from elastic_driver.hosts import WorkerId
from tests.support.fakes.membership_job import worker_id

pytestmark = pytest.mark.unit

WORKERS = [worker_id(f"{name}[{slot}]") for name in "abc" for slot in range(2)]
STATES = list(WorkerState)

changes = st.lists(
    st.tuples(st.sampled_from(["put", "without"]), st.sampled_from(WORKERS), st.sampled_from(STATES), st.booleans()),
    max_size=30,
)


def check(roster: Roster[Record], plain: dict[WorkerId, WorkerState]) -> None:
    assert list(roster) == list(plain.items())
    same = Roster(Record(worker, state) for worker, state in plain.items())
    assert (roster, hash(roster), len(roster)) == (same, hash(same), len(plain))
    for worker in WORKERS:
        found = roster.find(worker)
        assert (None if found is None else found.state) == plain.get(worker)
    for hostname in {worker.hostname for worker in WORKERS}:
        of_host = [record for record in same if record.worker.hostname == hostname]
        assert list(roster.by_host.get(hostname, ())) == of_host
    assert all(roster.by_host.values())


@pytest.fixture(autouse=True, params=[(0, -1), (2, -1), (64, -1), (64, 3), (64, 64)])
def when_changes_are_merged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be put among the items at any time."""
    most_changes, few_items = request.param
    monkeypatch.setattr(roster_module, "_MOST_CHANGES", most_changes)
    monkeypatch.setattr(roster_module, "_FEW_ITEMS", few_items)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes, st.booleans())
def test_a_roster_is_what_was_put(steps: list[tuple[str, WorkerId, WorkerState, bool]], looks: bool) -> None:
    """Old rosters stay what they were, also when others were made from them in two ways."""
    history: list[tuple[Roster[Record], dict[WorkerId, WorkerState]]] = [(Roster(), {})]
    for kind, worker, state, goes_back in steps:
        roster, plain = history[len(history) // 2] if goes_back else history[-1]
        plain = dict(plain)
        if kind == "put":
            roster = roster.put(Record(worker, state))
            plain[worker] = state
        else:
            roster = roster.without(worker)
            plain.pop(worker, None)
        history.append((roster, plain))
        assert len(roster) == len(plain)
        for one in history if looks else ():  # who looks at all items puts them together
            check(*one)
    for one in history:
        check(*one)


def test_many_at_once() -> None:
    roster = Roster(Record(worker, WorkerState.READY) for worker in WORKERS)
    changed = roster.put(*(Record(worker, WorkerState.FAILURE) for worker in WORKERS[1:3]))
    check(changed, {w: WorkerState.FAILURE if w in WORKERS[1:3] else WorkerState.READY for w in WORKERS})
    check(roster, dict.fromkeys(WORKERS, WorkerState.READY))
    check(changed.without(*WORKERS[1:]), {WORKERS[0]: WorkerState.READY})
    assert roster != changed
    assert roster != Roster(reversed(tuple(roster)))
