"""Which hosts get no workers, and until when."""

from __future__ import annotations

import pytest

from elastic_driver.core import blacklist as blacklist_module
from elastic_driver.core.blacklist import Blacklist

pytestmark = pytest.mark.unit


def failed(blacklist: Blacklist, times: int, *, draw: float = 0.0, high: float = 1e9) -> list[float]:
    """How long each of so many failures keeps the host out."""
    delays = []
    now = 0.0
    for _ in range(times):
        blacklist = blacklist.fail("a", now=now, draw=draw)
        until = blacklist.next_expiry()
        assert until is not None
        delays.append(until - now)
        now = until
        blacklist = blacklist.expire(now)
        assert not blacklist.is_blacklisted("a")
    return delays


def test_without_a_range_a_host_is_out_for_good() -> None:
    blacklist = Blacklist().fail("a", now=5.0, draw=0.5)
    assert blacklist.is_blacklisted("a")
    assert blacklist.is_out_for_good("a")
    assert not blacklist.is_blacklisted("b")
    assert blacklist.next_expiry() is None
    assert blacklist.expire(1e12).is_blacklisted("a")


def test_a_host_that_is_lost_comes_back_later_each_time() -> None:
    blacklist, now, pauses = Blacklist(), 0.0, []
    for _ in range(8):
        blacklist = blacklist.fail("a", now=now, draw=0.0, lost=True)
        until = blacklist.next_expiry()
        assert until is not None
        pauses.append(until - now)
        blacklist, now = blacklist.expire(until), until + 1000.0
    assert pauses == [1, 30, 60, 120, 240, 480, 600, 600]
    assert blacklist.fail("a", now=now, draw=0.0).is_out_for_good("a"), "a failure of a worker is something else"
    ranged = Blacklist((10.0, 1000.0))
    assert ranged.fail("a", now=0.0, draw=0.0, lost=True) == ranged.fail("a", now=0.0, draw=0.0)


def test_what_failed_just_before_its_host_was_down_is_a_loss_of_the_host() -> None:
    late = Blacklist().fail("a", now=0.0, draw=0.0)
    assert late.go_down(["a", "b"], 30.0).next_expiry() == 31.0
    assert late.go_down(["a"], 30.1).is_out_for_good("a")
    ranged = Blacklist((10.0, 1000.0)).fail("a", now=0.0, draw=0.0)
    assert ranged.go_down(["a"], 1.0) == ranged


def test_the_first_cooldown_is_the_shortest_and_each_next_is_twice_as_long() -> None:
    assert failed(Blacklist((10.0, 1000.0)), 4) == [10, 20, 40, 80]


def test_the_draw_adds_up_to_the_shortest_time_from_the_second_failure_on() -> None:
    assert failed(Blacklist((10.0, 1000.0)), 3, draw=1.0) == [10, 30, 50]
    assert failed(Blacklist((10.0, 1000.0)), 3, draw=0.5) == [10, 25, 45]


def test_no_cooldown_is_longer_than_the_longest() -> None:
    assert failed(Blacklist((10.0, 25.0)), 4, draw=1.0) == [10, 25, 25, 25]


def test_the_power_never_overflows() -> None:
    assert failed(Blacklist((1.0, 3600.0)), 2000)[-1] == 3600


def test_a_failure_of_a_host_that_is_out_already_is_the_same_failure() -> None:
    once = Blacklist((10.0, 100.0)).fail("a", now=0.0, draw=0.0)
    assert once.fail("a", now=5.0, draw=1.0) == once
    again = once.expire(10.0).fail("a", now=11.0, draw=0.0)
    assert again.next_expiry() == 11 + 20


def test_the_end_of_the_cooldown_is_its_first_moment_outside() -> None:
    blacklist = Blacklist((10.0, 100.0)).fail("a", now=0.0, draw=0.0)
    assert blacklist.expire(9.999).is_blacklisted("a")
    assert not blacklist.is_out_for_good("a")
    assert not blacklist.expire(10.0).is_blacklisted("a")
    assert blacklist.expire(10.0).next_expiry() is None


def test_the_next_expiry_is_the_first_of_those_that_run() -> None:
    blacklist = Blacklist((10.0, 100.0)).fail("a", now=0.0, draw=0.0).fail("b", now=4.0, draw=0.0)
    assert blacklist.next_expiry() == 10
    assert blacklist.expire(10.0).next_expiry() == 14
    assert [entry.hostname for entry in blacklist.entries] == ["a", "b"]


def test_a_host_that_left_the_list_is_forgiven_but_its_failures_stay_counted() -> None:
    blacklist = Blacklist((10.0, 100.0)).fail("a", now=0.0, draw=0.0).fail("b", now=0.0, draw=0.0)
    forgiven = blacklist.forgive_absent(["b"])
    assert not forgiven.is_blacklisted("a")
    assert forgiven.is_blacklisted("b")
    assert forgiven.fail("a", now=50.0, draw=0.0).expire(69.0).is_blacklisted("a"), "the second time is longer"


def test_it_is_a_value() -> None:
    blacklist = Blacklist((10.0, 100.0))
    blacklist.fail("a", now=0.0, draw=0.0)
    assert blacklist == Blacklist((10.0, 100.0))


def test_failures_of_hosts_that_are_gone_are_kept_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blacklist_module, "MOST_REMEMBERED", 3)
    blacklist = Blacklist((10.0, 1000.0)).fail("stays", now=0.0, draw=0.0)
    for number in range(10):
        blacklist = blacklist.fail(f"pod-{number}", now=0.0, draw=0.0).forgive_absent(["stays"])
    assert [entry.hostname for entry in blacklist.entries] == ["stays", "pod-7", "pod-8", "pod-9"]
    again = blacklist.fail("pod-9", now=0.0, draw=0.0)
    assert again.next_expiry() == 10.0, "of the host that stays; the pod's second is longer"
    assert {entry.hostname: entry.failures for entry in again.entries}["pod-9"] == 2


def test_without_a_range_nothing_is_kept_of_hosts_that_are_gone() -> None:
    blacklist = Blacklist().fail("a", now=0.0, draw=0.0).fail("b", now=0.0, draw=0.0)
    assert [entry.hostname for entry in blacklist.forgive_absent(["b"]).entries] == ["b"]
    assert blacklist.forgive_absent(["b"]).is_out_for_good("b")
