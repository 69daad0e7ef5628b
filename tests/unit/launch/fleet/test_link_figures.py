"""Who is barred, who is measured with whom, and which links are slow."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.launch.fleet.link_figures import Figures, barred, late_links, matchings, neighbors, slow_links

pytestmark = pytest.mark.unit

HOSTS = ["a", "b", "c", "d", "e"]


def test_nobody_is_left_out_where_all_links_work() -> None:
    assert barred(HOSTS, ["a"], []) == []


def test_a_newcomer_goes_and_not_who_was_there_before() -> None:
    # b has more broken links than c and d; they are newcomers and it is not.
    assert barred(HOSTS, ["a", "b"], [("b", "c"), ("d", "b")]) == ["c", "d"]


def test_the_newcomer_with_the_most_broken_links_goes() -> None:
    assert barred(HOSTS, [], [("a", "b"), ("a", "c"), ("d", "a")]) == ["a"]


def test_of_two_the_later_one_goes() -> None:
    assert barred(HOSTS, [], [("b", "d")]) == ["d"]
    assert barred(HOSTS, [], [("d", "b")]) == ["d"]


def test_links_to_who_goes_anyhow_count_no_more() -> None:
    # c cannot be used with a; then d has nobody left that it cannot reach.
    assert barred(HOSTS, ["a"], [("a", "c"), ("c", "d"), ("c", "e")]) == ["c"]


def test_broken_links_between_hosts_in_use_are_no_business_of_this() -> None:
    assert barred(HOSTS, ["a", "b"], [("a", "b")]) == []


_LINKS = st.sets(st.sampled_from(list(itertools.combinations("abcdefg", 2))))


@given(_LINKS, st.sets(st.sampled_from("abcdefg")))
def test_those_that_stay_reach_each_other(broken: set[tuple[str, str]], admitted: set[str]) -> None:
    gone = barred("abcdefg", admitted, broken)
    assert len(set(gone)) == len(gone)
    assert not set(gone) & admitted
    stay = set("abcdefg") - set(gone)
    assert all(set(link) <= admitted for link in broken if set(link) <= stay)
    # Nobody goes who has only working links.
    assert set(gone) <= {host for link in broken for host in link}


@given(st.integers(0, 40), st.data())
def test_turns_of_measuring(count: int, data: st.DataObject) -> None:
    hosts = [f"h{number}" for number in range(count)]
    newcomers = data.draw(st.sets(st.sampled_from(hosts))) if hosts else set()
    turns = matchings(hosts, newcomers, 5)
    assert len(turns) <= 5
    links = [link for turn in turns for link in turn]
    assert len({frozenset(link) for link in links}) == len(links), "a link comes twice"
    for turn in turns:
        busy = [host for link in turn for host in link]
        assert len(set(busy)) == len(busy), "a host is in two links at a time"
    assert all(set(link) & newcomers and hosts.index(link[0]) < hosts.index(link[1]) for link in links)
    for host in newcomers:
        partners = sum(host in link for link in links)
        # One in each turn; where the number is odd each host has one turn off.
        assert partners >= min(5, count - 1) - count % 2


@given(st.integers(0, 30), st.integers(1, 8))
def test_neighbors(count: int, most: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    near = neighbors(hosts, most)
    assert list(near) == hosts
    for host, others in near.items():
        assert host not in others
        assert len(set(others)) == len(others) == min(count - 1, 2 * most)
        assert all(host in near[other] for other in others), "both look for each other"


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_few_hosts_have_all_their_links_measured(count: int) -> None:
    hosts = HOSTS[:count]
    links = {link for turn in matchings(hosts, hosts, 5) for link in turn}
    assert links == set(itertools.combinations(hosts, 2))


def _speeds(**speeds: float) -> dict[tuple[str, str], Figures]:
    return {(name[0], name[1]): Figures(1e-4, speed) for name, speed in speeds.items()}


def test_one_link_has_nothing_to_be_compared_with() -> None:
    assert slow_links(_speeds(ab=1.0)) == {}
    assert late_links({("a", "b"): Figures(9.0)}) == {}
    assert slow_links({}) == {}


def test_a_slow_link_is_named_with_what_the_others_have() -> None:
    assert slow_links(_speeds(ab=100.0, ac=9.0, bc=110.0)) == {("a", "c"): 105.0}
    assert slow_links(_speeds(ab=100.0, ac=11.0, bc=100.0)) == {}, "not ten times"


def test_a_host_whose_links_are_all_slow() -> None:
    assert slow_links(_speeds(ab=100.0, ac=1.0, bc=2.0)) == {("a", "c"): 100.0, ("b", "c"): 100.0}


def test_what_was_not_measured_is_not_slow() -> None:
    figures = _speeds(ab=100.0, bc=100.0) | {("a", "c"): Figures(1e-4, None)}
    assert slow_links(figures) == {}


def test_a_late_link_is_late_by_more_than_noise() -> None:
    def figures(rtt_s: float) -> dict[tuple[str, str], Figures]:
        return {("a", "b"): Figures(2e-5), ("a", "c"): Figures(rtt_s), ("b", "c"): Figures(2e-5)}

    assert late_links(figures(9e-4)) == {}
    assert late_links(figures(25e-3)) == {("a", "c"): 2e-5}


@given(st.dictionaries(st.tuples(st.text(max_size=2), st.text(max_size=2)), st.floats(0, 1e12), max_size=20))
def test_slow_is_ten_times_less_than_the_median_of_the_others(speeds: dict[tuple[str, str], float]) -> None:
    expected = {
        link
        for link, speed in speeds.items()
        if len(speeds) > 1 and speed * 10 < statistics.median(other for each, other in speeds.items() if each != link)
    }
    assert slow_links({link: Figures(0.0, speed) for link, speed in speeds.items()}).keys() == expected


def test_the_better_of_two_measurements_counts() -> None:
    assert Figures(2.0, 5.0).better(Figures(1.0, None)) == Figures(1.0, 5.0)
    assert Figures(1.0, None).better(Figures(2.0, None)) == Figures(1.0, None)
    assert Figures(1.0, 5.0).better(Figures(2.0, 7.0)) == Figures(1.0, 7.0)
