"""The key-value store: fencing, order, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError, StaleRoundError
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.server.store import RoundStore

pytestmark = pytest.mark.unit


def store_in_round(round_id: int = 1, **bounds: int) -> RoundStore:
    store = RoundStore(**bounds)
    store.begin_round(round_id)
    return store


def test_put_get_replace() -> None:
    store = store_in_round()
    assert store.get(1, "a", "k") is None
    store.put(1, "a", "k", b"1")
    store.put(1, "b", "k", b"2")
    assert (store.get(1, "a", "k"), store.get(1, "b", "k")) == (b"1", b"2")
    store.put(1, "a", "k", b"3")
    assert (store.get(1, "a", "k"), store.count(1, "a")) == (b"3", 1)
    assert store.count(1, "b") == 1


def test_before_the_first_round_nothing_can_be_stored() -> None:
    with pytest.raises(StaleRoundError):
        RoundStore().put(1, "a", "k", b"")


@pytest.mark.parametrize("round_id", [1, 3])
def test_another_round_is_refused_by_every_operation(round_id: int) -> None:
    store = store_in_round(2)
    store.put(2, "a", "k", b"1")
    for operation in (
        lambda: store.put(round_id, "a", "k", b"2"),
        lambda: store.get(round_id, "a", "k"),
        lambda: store.count(round_id, "a"),
        lambda: store.entries(round_id, "a"),
        lambda: store.packed(round_id, "a"),
    ):
        with pytest.raises(StaleRoundError) as caught:
            operation()
        assert (caught.value.round_id, caught.value.current_round_id) == (round_id, 2)
    assert store.entries(2, "a") == [("k", b"1")]


@pytest.mark.parametrize("round_id", [1, 2])
def test_rounds_only_grow(round_id: int) -> None:
    store = store_in_round(2)
    store.put(2, "a", "k", b"1")
    with pytest.raises(ValueError, match="cannot begin round"):
        store.begin_round(round_id)
    assert store.get(2, "a", "k") == b"1"


def test_a_round_begins_empty_and_with_all_room() -> None:
    store = store_in_round(1, max_keys=1, max_bytes=4)
    store.put(1, "a", "k", b"1234")
    assert store.packed(1, "a")
    store.begin_round(5)
    assert store.entries(5, "a") == []
    assert unpack_entries(store.packed(5, "a")) == []
    store.put(5, "b", "l", b"5678")


def test_integer_keys_come_in_their_order_and_before_text() -> None:
    store = store_in_round()
    for key in ("10", "b", "9", "a", "100", "²", "٣", "9" * 5000, "-1", "007"):
        store.put(1, "a", key, b"")
    keys = [key for key, _ in store.entries(1, "a")]
    assert keys == ["007", "9", "10", "100", *sorted(["b", "a", "²", "٣", "9" * 5000, "-1"])]


def test_bounds() -> None:
    store = store_in_round(max_keys=3, max_bytes=10)
    store.put(1, "a", "0", b"12345")
    store.put(1, "b", "0", b"12345")
    with pytest.raises(RendezvousProtocolError, match=r"full \(2 keys, 10 bytes; 3 and 10 are allowed\)"):
        store.put(1, "a", "1", b"1")
    assert store.count(1, "a") == 1
    store.put(1, "a", "1", b"")
    with pytest.raises(RendezvousProtocolError, match="full"):
        store.put(1, "c", "0", b"")
    store.put(1, "a", "0", b"54321")  # replacing needs no room
    with pytest.raises(RendezvousProtocolError, match="full"):
        store.put(1, "a", "0", b"654321")
    assert store.get(1, "a", "0") == b"54321"


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "packed", "round"]),
        st.sampled_from("ab"),
        st.sampled_from(["0", "1", "x"]),
        st.binary(max_size=6),
    ),
    max_size=60,
)


@given(operations)
def test_against_a_dumb_twin(history: list[tuple[str, str, str, bytes]]) -> None:
    """Bounds, counts and packed bodies are what a flat dict says after every operation."""
    store, twin, round_id = store_in_round(1, max_keys=4, max_bytes=12), dict[tuple[str, str], bytes](), 1
    for what, scope, key, value in history:
        if what == "put":
            after = twin | {(scope, key): value}
            if len(after) <= 4 and sum(map(len, after.values())) <= 12:
                store.put(round_id, scope, key, value)
                twin = after
            else:
                with pytest.raises(RendezvousProtocolError):
                    store.put(round_id, scope, key, value)
        elif what == "round":
            round_id += 1
            store.begin_round(round_id)
            twin = {}
        expected = sorted((k, v) for (s, k), v in twin.items() if s == scope)
        assert unpack_entries(store.packed(round_id, scope)) == store.entries(round_id, scope) == expected
        assert store.count(round_id, scope) == len(expected)
        assert store.get(round_id, scope, key) == twin.get((scope, key))
