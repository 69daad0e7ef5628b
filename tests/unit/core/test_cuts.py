"""Which hosts go when workers cannot reach each other, and for how long."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.core.cuts import FORGOTTEN_AFTER_S, LEFT_OUT_RANGE_S, Accusation, Accused, Cuts, hosts_that_go
from elastic_driver.hosts import WorkerId

pytestmark = pytest.mark.unit

ORDER = ("a", "b", "c", "d", "e")
LOW, HIGH = LEFT_OUT_RANGE_S


def accusations(*texts: str) -> list[Accusation]:
    """Of "a b": a[0] cannot reach b[0]; of "a1 b*2": a[1] cannot reach two workers of b."""
    made = []
    for text in texts:
        accuser, _, accused = text.partition(" ")
        host, _, number = accused.partition("*")
        worker = WorkerId(accuser[0], int(accuser[1:] or 0), 0)
        made.append(Accusation(worker, Accused(WorkerId(host, 0, 0), int(number or 1))))
    return made


@pytest.mark.parametrize(
    ("said", "going"),
    [
        ((), ""),
        (("a b", "b a"), "b"),  # equals: the later one
        (("b a",), "a"),  # one way only: the one that cannot be reached
        (("a b", "a1 b", "b a*2"), "b"),  # from which more workers are cut off
        (("b a*2",), "b"),  # though only one of the two ends was asked
        (("a b*2", "b a"), "a"),  # the one end names fewer than the other
        (("a b", "a c", "a d"), "a"),  # who complains of all, and nobody of it
        (("b a", "c a", "d a"), "a"),
        (("a c", "a d", "b c", "b d", "c a", "c b", "d a", "d b"), "dc"),  # halves: that with the first host stays
        (
            ("a c", "b c", "c a", "c b", "a d", "b d", "d a", "d b", "a e", "b e", "e a", "e b"),
            "ba",
        ),  # the larger stays
        (("a b", "c d"), "db"),  # two cuts that have nothing to do with each other
        (("b c", "c b", "d a", "a d"), "dc"),  # a ring sees no more of a partition
    ],
)
def test_who_goes(said: tuple[str, ...], going: str) -> None:
    assert hosts_that_go(accusations(*said), ORDER) == tuple(going)
    assert hosts_that_go(accusations(*reversed(said)), ORDER) == tuple(going), "the order of reports matters"


def test_an_order_of_hosts_is_that_of_the_lister() -> None:
    assert hosts_that_go(accusations("a b", "b a"), ("b", "a")) == ("a",)


@pytest.mark.parametrize(
    ("said", "going", "kept"),
    [
        (("c a",), "c", "c"),  # the newcomer, though nobody accuses it
        (("b a",), "a", "a"),  # both have the state
        (("c a", "c1 a"), "a", "c"),  # more newcomers than those who are there
        (("a b", "c b", "d b"), "b", "dcb"),  # cut off from all: the newcomers go first only where they must
        (("c d", "d c"), "d", "d"),
    ],
)
def test_among_equals_newcomers_go_and_where_they_must_before_the_others(
    said: tuple[str, ...], going: str, kept: str
) -> None:
    assert hosts_that_go(accusations(*said), ORDER, stateful="ab") == tuple(going)
    # An accusation between those with the state is left to the end.
    assert hosts_that_go(accusations(*said), ORDER, stateful="ab", kept=True) == tuple(kept)


@pytest.mark.parametrize(
    ("said", "protected", "going"),
    [
        (("c d", "d c"), "d", "c"),  # in place of the last in the order
        (("c d",), "d", "d"),  # one way: it cannot be reached
        (("c d", "d c"), "cd", "d"),
        (("a c", "b c", "d c"), "c", "c"),  # no tie
    ],
)
def test_a_tie_spares_protected_hosts(said: tuple[str, ...], protected: str, going: str) -> None:
    assert hosts_that_go(accusations(*said), ORDER, protected=protected) == tuple(going)


pairs = st.tuples(st.sampled_from(ORDER), st.integers(0, 2), st.sampled_from(ORDER), st.integers(1, 3)).filter(
    lambda pair: pair[0] != pair[2]
)


@given(
    st.lists(pairs, max_size=20, unique_by=lambda pair: pair[:3]), st.frozensets(st.sampled_from(ORDER)), st.booleans()
)
def test_no_accusation_is_left_and_nobody_goes_without_one(
    said: list[tuple[str, int, str, int]], stateful: frozenset[str], kept: bool
) -> None:
    made = [Accusation(WorkerId(a, slot, 0), Accused(WorkerId(b, 0, 0), number)) for a, slot, b, number in said]
    going = hosts_that_go(made, ORDER, stateful=stateful, kept=kept)
    assert len(set(going)) == len(going)
    between = {frozenset((a, b)) for a, _, b, _ in said}
    stays = [host for host in ORDER if host not in going]
    assert not any(frozenset(two) in between for two in combinations(stays, 2))
    for index, host in enumerate(going):
        left = {*stays, *going[index:]}
        assert any(host in two and two <= left for two in between), "one goes that nobody is cut off from"


def test_a_host_is_left_out_for_longer_each_time() -> None:
    cuts, now, waits = Cuts(), 0.0, []
    for _ in range(7):
        cuts = cuts.leave_out(("a",), now)
        until = cuts.next_expiry()
        assert until is not None
        waits.append(until - now)
        assert cuts.expire(until - 0.5).out == {"a"}
        now = until
        cuts = cuts.expire(now)
        assert (cuts.out, cuts.next_expiry()) == (frozenset(), None)
        assert cuts.expire(now) is cuts
    assert waits == [LOW, 2 * LOW, 4 * LOW, 8 * LOW, 16 * LOW, HIGH, HIGH]
    assert cuts.expire(now + FORGOTTEN_AFTER_S - 1).hosts
    assert cuts.expire(now + FORGOTTEN_AFTER_S) == Cuts()


def test_what_leaves_the_list_is_forgotten() -> None:
    cuts = Cuts().leave_out(("a", "b"), 0.0)
    assert cuts.forget_absent(("a", "b", "c")) is cuts
    assert cuts.forget_absent(("b",)).out == {"b"}


def test_pauses_grow_and_are_forgotten() -> None:
    cuts, ends = Cuts(), []
    for _ in range(4):
        cuts = cuts.pause(100.0, (2.0, 10.0))
        ends.append(cuts.until)
    assert ends == [102.0, 104.0, 108.0, 110.0]
    assert (cuts.pauses, cuts.since) == (4, 100.0)
    assert cuts.expire(110.0 + FORGOTTEN_AFTER_S - 1) is cuts
    assert cuts.expire(110.0 + FORGOTTEN_AFTER_S) == cuts.forget_pauses() == cuts.leave_out((), 0.0) == Cuts()
    assert Cuts().forget_pauses() == Cuts()
