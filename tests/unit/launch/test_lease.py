"""For how long an agent keeps its workers, on clocks that the test moves."""

from __future__ import annotations

import pytest

from elastic_driver.launch.agent.lease import Lease

pytestmark = pytest.mark.unit


class Clocks:
    """Two clocks, of which one stands while the machine is suspended."""

    def __init__(self) -> None:
        self.monotonic, self.boot = 100.0, 7000.0

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.boot += seconds

    def suspend(self, seconds: float) -> None:
        self.boot += seconds


def lease(driver_timeout_s: float = 0.0) -> tuple[Lease, Clocks]:
    clocks = Clocks()
    made = Lease(10.0, clock=lambda: clocks.monotonic, boot_clock=lambda: clocks.boot)
    made.begin(15.0, driver_timeout_s)
    return made, clocks


def test_it_lasts_from_when_the_driver_was_heard() -> None:
    one, clocks = lease()
    assert one.left_s == 15.0
    clocks.pass_(10.0)
    one.heard(4.0)
    assert one.left_s == 11.0
    one.heard(9.0)
    assert one.left_s == 11.0, "what was heard before is known"
    clocks.pass_(12.0)
    assert one.left_s == -1.0
    assert not one.is_waited_out


def test_no_refusal_renews_it_where_no_other_driver_is_to_come() -> None:
    one, clocks = lease()
    clocks.pass_(14.0)
    one.refused(one.now())
    assert one.left_s == 1.0
    assert not one.waits


def test_each_refusal_renews_it_from_when_it_was_asked() -> None:
    one, clocks = lease(600.0)
    assert one.waits
    clocks.pass_(14.0)
    asked_at = one.now()
    clocks.pass_(0.5)
    one.refused(asked_at)
    assert one.left_s == 14.5
    clocks.pass_(14.0)
    one.refused(asked_at)
    assert one.left_s == 0.5


def test_it_is_renewed_for_as_long_as_another_driver_is_waited_for() -> None:
    one, clocks = lease(60.0)
    for _ in range(55):
        clocks.pass_(1.0)
        one.refused(one.now())
    assert one.left_s == 5.0
    clocks.pass_(5.0)
    one.refused(one.now())
    assert one.left_s == 0.0
    assert one.is_waited_out
    one.heard(0.0)
    assert one.left_s == 15.0


def test_a_limit_below_the_lease_does_not_shorten_it() -> None:
    one, clocks = lease(1.0)
    clocks.pass_(14.0)
    assert one.left_s == 1.0
    assert not one.is_waited_out


def test_a_suspended_machine_loses_it() -> None:
    """A driver that lives goes on without it."""
    one, clocks = lease(600.0)
    one.heard(0.0)
    clocks.suspend(60.0)
    clocks.pass_(0.2)
    one.heard(0.3)  # before it was suspended, for all that is known
    assert one.left_s == pytest.approx(-45.2, abs=0.2)
    clocks.pass_(0.5)
    one.heard(0.1)
    assert one.left_s == pytest.approx(14.9)


def test_without_another_driver_to_come_that_does_not_matter() -> None:
    one, clocks = lease()
    clocks.suspend(60.0)
    clocks.pass_(1.0)
    assert one.left_s == 14.0


def test_another_driver_begins_it_anew() -> None:
    one, clocks = lease(60.0)
    clocks.pass_(14.0)
    one.refused(one.now())
    one.begin(20.0, 600.0)
    assert one.left_s == 20.0
    clocks.pass_(19.0)
    assert one.left_s == 1.0, "a refusal of the one before says nothing of this one"


def test_a_driver_in_doubt_is_heard_for_as_long_as_another_one_is_waited_for() -> None:
    one, clocks = lease(40.0)
    one.doubts(0.0, says_so=True)
    clocks.pass_(30.0)
    one.heard(0.0)
    one.doubts(0.0, says_so=True)
    assert one.left_s == 10.0, "it is in doubt since the first word of it"
    clocks.pass_(9.0)
    one.heard(0.0)
    assert not one.is_waited_out
    clocks.pass_(1.0)
    assert one.left_s == 0.0
    assert one.is_waited_out
    one.sure()
    one.heard(0.0)
    assert one.left_s == 15.0


def test_nothing_but_acknowledgements_is_a_doubt() -> None:
    one, clocks = lease(40.0)
    for passed in range(20):
        one.heard(0.0)
        one.doubts(float(passed), says_so=False)
        clocks.pass_(1.0)
    assert one.left_s == 14.0, "heard a second ago"
    clocks.pass_(6.0)
    one.heard(0.0)
    one.doubts(26.0, says_so=False)
    assert one.left_s == 14.0, "silent since it began"


def test_a_driver_that_goes_on_after_a_stop_is_in_doubt_since_it_was_stopped() -> None:
    """Its first words come before it has seen that."""
    one, clocks = lease(600.0)
    clocks.pass_(100.0)
    one.heard(0.0)
    one.doubts(100.0, says_so=False)
    clocks.pass_(0.1)
    one.doubts(0.0, says_so=False)
    one.doubts(0.0, says_so=True)
    clocks.pass_(489.9)
    one.heard(0.0)
    one.doubts(0.0, says_so=True)
    assert one.left_s == pytest.approx(10.0)


def test_one_that_does_not_say_so_is_not() -> None:
    one, clocks = lease(40.0)
    clocks.pass_(30.0)
    one.heard(0.0)
    one.doubts(30.0, says_so=False)
    for _ in range(7):
        clocks.pass_(1.0)
        one.heard(0.0)
        one.doubts(0.0, says_so=False)
    assert one.left_s == 15.0


def test_another_driver_is_in_no_doubt() -> None:
    one, clocks = lease(20.0)
    one.doubts(0.0, says_so=True)
    clocks.pass_(19.0)
    one.begin(15.0, 20.0)
    assert one.left_s == 15.0
