"""Rosters against the plain tuple and dict that they stand for, and the short form of ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_job import worker_id

from elastic_driver.core.registry import Record, WorkerState
from elastic_driver.core.roster import Roster
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import Ranks, SlotInfo, WorkerId
from elastic_driver.rendezvous.messages import RoundAssignment, parse_next_round_reply
from elastic_driver.words import Backend

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


@given(changes)
def test_a_roster_is_what_was_put(steps: list[tuple[str, WorkerId, WorkerState, bool]]) -> None:
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


def assignment(cross: Ranks) -> RoundAssignment:
    return RoundAssignment(
        7,
        SlotInfo(0, 9, 0, 1, 0, max(1, len(cross))),
        Ranks((0,)),
        cross,
        sync=True,
        commits=3,
        backend=Backend.NATIVE,
        cause="start",
    )


@given(st.lists(st.integers(0, 50), max_size=20))
def test_ranks_go_through_the_wire(ranks: list[int]) -> None:
    given_one = assignment(Ranks(ranks))
    assert parse_next_round_reply(given_one.to_json()) == given_one


def test_ranks_of_equal_hosts_take_no_more_room_when_there_are_more() -> None:
    assert Ranks(range(3, 4096, 8)).runs == [[3, 512, 8]]
    assert Ranks((5, *range(8, 4096, 8))).runs == [[5, 2, 3], [16, 510, 8]]
    assert Ranks((9,)).runs == [[9, 1, 1]]
    assert Ranks().runs == []
    few, many = (len(assignment(Ranks(range(0, number, 8))).to_json()) for number in (64, 4096))
    assert many <= few + 4


@pytest.mark.parametrize("runs", [[[0, 1]], [[0, 0, 1]], [[0, -3, 1]], [0], [[0, 1 << 40, 1]], [["a", 1, 1]], {}, None])
def test_ranks_that_cannot_be(runs: object) -> None:
    data = json.loads(assignment(Ranks((0,))).to_json()) | {"cross_members": runs}
    with pytest.raises(RendezvousProtocolError, match="cross_members"):
        parse_next_round_reply(json.dumps(data).encode())
