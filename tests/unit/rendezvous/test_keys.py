"""Who waits for which keys, and when each is answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import StaleRoundError
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.server.keys import Keys

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Waiter:
    """Tells what it is answered; equal to others of its name that wait for the same."""

    answers: list[tuple[str, int, bytes]]
    name: str
    scope: str = "s"
    key: str | None = None
    count: int = 0
    round_id: int = 1

    def __hash__(self) -> int:
        return hash((self.name, self.scope, self.key, self.count))

    def answer(self, status: int, body: bytes) -> None:
        self.answers.append((self.name, status, body))


class World:
    """Round 1, and who waits in it."""

    def __init__(self) -> None:
        self.keys: Keys[Waiter] = Keys()
        self.keys.begin_round(1)
        self._answers: list[tuple[str, int, bytes]] = []

    def wait(self, name: str, scope: str = "s", *, key: str | None = None, count: int = 0) -> Waiter:
        waiter = Waiter(self._answers, name, scope, key, count)
        assert self.keys.find(waiter) is None
        self.keys.add(waiter)
        return waiter

    def put(self, key: str, value: bytes = b"", scope: str = "s") -> None:
        self.keys.take(1, scope, [(key, value)])

    def answered(self) -> list[tuple[str, int, bytes]]:
        answers, self._answers[:] = self._answers[:], []
        return answers


def names(answers: Sequence[tuple[str, int, bytes]]) -> list[str]:
    assert {status for _, status, _ in answers} <= {200}
    return [name for name, _, _ in answers]


def test_each_is_answered_when_what_it_waits_for_is_there() -> None:
    world = World()
    for name in ("one", "another"):
        world.wait(name, key="k")
    world.wait("elsewhere", "other", key="k")
    world.wait("two", count=2)
    world.wait("three", count=3)
    world.put("j", b"no")
    assert world.answered() == []
    world.put("k", b"yes")
    *values, (name, status, entries) = world.answered()
    assert values == [("one", 200, b"yes"), ("another", 200, b"yes")]
    assert (name, status, unpack_entries(entries)) == ("two", 200, [("j", b"no"), ("k", b"yes")])
    assert names([(waiter.name, 200, b"") for waiter in world.keys.waiting]) == ["elsewhere", "three"]
    world.put("k", b"yes again")
    assert world.answered() == [], "it is the same number of keys"
    world.put("l")
    assert names(world.answered()) == ["three"]
    world.put("k", scope="other")
    assert (names(world.answered()), world.keys.waiting) == (["elsewhere"], [])
    for count in (1, 2, 4):
        world.wait(str(count), "many", count=count)
    world.keys.take(1, "many", [(str(number), b"") for number in range(3)])
    assert names(world.answered()) == ["1", "2"]


def test_what_is_there_need_not_be_waited_for() -> None:
    world = World()
    world.put("0", b"x")
    assert world.keys.find(Waiter([], "one", key="0")) == b"x"
    assert world.keys.find(Waiter([], "one", key="1")) is None
    assert unpack_entries(world.keys.find(Waiter([], "one", count=1)) or b"") == [("0", b"x")]
    assert world.keys.find(Waiter([], "one", count=2)) is None
    with pytest.raises(StaleRoundError):
        world.keys.find(Waiter([], "one", key="0", round_id=2))


def test_equals_wait_once_and_who_is_gone_waits_for_nothing() -> None:
    world = World()
    for _ in range(2):
        world.wait("one", key="k")
        world.wait("one", count=1)
    gone = [world.wait("gone", key="k"), world.wait("gone", count=1)]
    for waiter in (*gone, *gone):
        world.keys.remove(waiter)
    world.put("k")
    assert names(world.answered()) == ["one", "one"]
    assert (world.keys._of_key, world.keys._of_count) == ({}, {})


def test_a_round_that_passes_takes_its_keys_and_those_who_wait_along() -> None:
    world = World()
    world.put("there", b"old")
    world.wait("one", key="k")
    world.wait("two", count=2)
    world.keys.begin_round(7)
    answers = world.answered()
    assert [(name, status) for name, status, _ in answers] == [("one", 409), ("two", 409)]
    assert json.loads(answers[0][2]) == {
        "error": "round 1 is not the current round 7",
        "round_id": 1,
        "current_round_id": 7,
    }
    world.put("k")  # of round 1
    assert (world.keys.waiting, world.keys.store.count(7, "s")) == ([], 0)
    with pytest.raises(ValueError, match="cannot begin round 7"):
        world.keys.begin_round(7)


_KEYS = st.sampled_from("abc")


@given(st.lists(st.tuples(st.sampled_from(["key", "count", "put", "gone"]), _KEYS, st.integers(1, 4)), max_size=30))
def test_nobody_is_forgotten_and_nobody_answered_twice(deeds: list[tuple[str, str, int]]) -> None:
    world = World()
    waiting: list[Waiter] = []
    there: set[str] = set()
    for number, (deed, key, count) in enumerate(deeds):
        if deed == "put":
            world.put(key)
            there.add(key)
            due = [waiter for waiter in waiting if waiter.key == key or (not waiter.key and waiter.count <= len(there))]
            assert sorted(names(world.answered())) == sorted(waiter.name for waiter in due)
            waiting = [waiter for waiter in waiting if waiter not in due]
        elif deed == "gone":
            for waiter in waiting[:1]:
                world.keys.remove(waiter)
            waiting = waiting[1:]
        elif (deed == "key" and key not in there) or (deed == "count" and count > len(there)):
            waiting.append(world.wait(str(number), key=key if deed == "key" else None, count=count))
        assert set(world.keys.waiting) == set(waiting)
