"""Who is taken for frozen or hung."""

from __future__ import annotations

import pytest

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.heartbeats import Heartbeats
from elastic_driver.hosts import WorkerId
from elastic_driver.system.job_clock import JobClock

A, B, C = WorkerId("a", 0, 0), WorkerId("b", 1, 0), WorkerId("c", 0, 0)

pytestmark = pytest.mark.unit


def names(found: list[WorkerHung]) -> list[WorkerId]:
    return [hung.worker for hung in found]


def watched(timeout_s: float = 8.0, hang_timeout_s: float = 0.0) -> Heartbeats:
    beats = Heartbeats(timeout_s, hang_timeout_s)
    for worker in (A, B):
        beats.heard(worker, 0, waiting=False, now=0.0)
    return beats


def test_a_silent_member_is_found_once() -> None:
    beats = watched()
    assert beats.interval_s == 2.0
    for now in (2.0, 4.0, 6.0):
        beats.heard(B, 0, waiting=False, now=now)
        assert beats.find(now) == []
    assert beats.find(8.0) == [WorkerHung(A, "no heartbeat for 8.0 s", True)]
    assert beats.find(10.0) == []


def test_a_member_that_stands_still_while_others_wait() -> None:
    beats = watched(0.0, 4.0)
    assert beats.interval_s == 1.0
    for now in (1.0, 2.0, 3.0):
        beats.heard(A, 7, waiting=False, now=now)
        beats.heard(B, 7, waiting=True, now=now)
        assert beats.find(now) == []
    # A's progress was at 1.0, when it had done seven operations; B waits, however long.
    for now in (4.0, 5.0, 6.0):
        beats.heard(A, 7, waiting=False, now=now)
        beats.heard(B, 7, waiting=True, now=now)
        found = beats.find(now)
        assert [(hung.worker, hung.silent) for hung in found] == ([(A, False)] if now == 5.0 else [])
        if now == 5.0:
            break


def test_progress_and_waiting_start_the_clock_anew() -> None:
    beats = watched(0.0, 4.0)
    for now in range(1, 40):
        beats.heard(A, now // 3, waiting=False, now=float(now))  # an operation each three seconds
        beats.heard(B, 0, waiting=now % 3 == 0, now=float(now))  # none, but it waits now and then
        assert beats.find(float(now)) == []


def test_who_left_the_round_is_not_watched() -> None:
    beats = watched()
    beats.forget(A)
    assert names(beats.find(2.0) + beats.find(4.0) + beats.find(6.0) + beats.find(8.0)) == [B]
    beats = watched()
    beats.keep([])
    beats.forget(A)
    assert [beats.find(float(now)) for now in (2, 4, 6, 8)] == [[], [], [], []]


def test_who_stands_by_is_watched_when_a_round_is_over() -> None:
    beats = watched()
    beats.keep([B, C])
    for now in (2.0, 4.0, 6.0):
        assert beats.find(now) == []
    assert names(beats.find(8.0)) == [B]


def test_a_driver_that_was_stopped_blames_nobody() -> None:
    real = 70.0  # it was stopped before its first look
    clock = JobClock(lambda: real)
    clock.lost_s = 70.0
    beats = watched()
    real = 140.0  # and once more
    assert beats.find(clock()) == []
    found = []
    while real < 150.0:
        real += 0.5
        beats.heard(B, 0, waiting=False, now=clock())
        found += beats.find(clock())
    assert found == [WorkerHung(A, "no heartbeat for 8.0 s", True)], "it was silent all the time"


def test_never() -> None:
    assert Heartbeats(0.0, 0.0).interval_s == 0.0


def test_the_next_look_is_when_somebody_is_due() -> None:
    beats = watched()
    assert beats.look_in_s(0.0) == 2.0
    beats.heard(B, 0, waiting=False, now=5.0)
    assert beats.look_in_s(5.0) == 2.0
    assert beats.look_in_s(7.5) == 0.5
    assert beats.look_in_s(9.0) == 0.0
    still = watched(0.0, 4.0)
    still.heard(A, 0, waiting=True, now=1.0)
    assert still.look_in_s(3.5) == 0.5


def test_who_could_not_be_heard_has_its_time_anew() -> None:
    beats = Heartbeats(4.0, 10.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    beats.heard(B, 1, waiting=True, now=0.0)
    assert names(beats.find(5.0, audible_s={"a": 0.0})) == [B]
    assert beats.find(8.9) == []
    assert names(beats.find(9.0)) == [A]


def test_who_can_be_heard_again_only_now_has_its_time_from_then_on() -> None:
    """Its host is heard again a moment before what its worker has said comes: no reason to end it."""
    beats = Heartbeats(4.0, 10.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    assert beats.find(4.0, audible_s={"a": 0.5}) == []
    assert beats.look_in_s(4.0) == pytest.approx(1.0)  # an interval; it is due at 7.5
    assert beats.find(7.4, audible_s={"a": 3.9}) == []
    assert names(beats.find(7.5, audible_s={"a": 4.0})) == [A]


def test_who_stands_still_on_a_host_that_was_not_heard_has_its_time_anew() -> None:
    beats = Heartbeats(0.0, 10.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    assert beats.find(11.0, audible_s={"a": 0.0}) == []
    assert beats.find(20.9) == []
    assert beats.find(21.0) == [WorkerHung(A, "no progress for 10.0 s", False)]


def test_whom_a_debugger_has_stopped_may_be_silent_but_not_stand_still_where_that_has_a_limit() -> None:
    beats = Heartbeats(4.0, 0.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    assert beats.find(5.0, excused=lambda worker: True) == []
    assert beats.find(8.9) == []
    assert beats.find(9.0) == [WorkerHung(A, "no heartbeat for 4.0 s", True)], "it was let go, and is silent"
    beats = Heartbeats(4.0, 10.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    assert beats.find(5.0, excused=lambda worker: True) == []
    assert beats.find(10.0, excused=lambda worker: True) == [WorkerHung(A, "no progress for 10.0 s", False)]


def test_who_is_alive_is_not_silent_but_makes_no_progress() -> None:
    beats = Heartbeats(10.0, 20.0)
    beats.alive(A, 0.0)
    beats.heard(A, 1, waiting=False, now=0.0)
    for now in (9.0, 18.0):
        beats.alive(A, now)
        assert beats.find(now) == []
    assert beats.find(20.0) == [WorkerHung(A, "no progress for 20.0 s", False)]
    beats.alive(A, 20.0)
    assert beats.look_in_s(20.0) == beats.interval_s, "nobody is watched over by that alone"


def test_what_a_pulse_counts_says_who_makes_no_progress() -> None:
    beats = Heartbeats(0.0, 20.0)
    beats.heard(A, 1, waiting=True, now=0.0)
    beats.alive(A, 1.0, submitted=8, finished=7)
    beats.alive(A, 30.0, submitted=8, finished=7)
    assert beats.find(49.0) == [], "it waits"
    beats.alive(A, 50.0, submitted=8, finished=8)
    beats.alive(A, 60.0, submitted=9, finished=9)
    beats.alive(A, 79.0, submitted=9, finished=9)
    beats.alive(A, 79.5)  # where nobody counts
    assert beats.find(79.9) == []
    assert beats.find(80.0) == [WorkerHung(A, "no progress for 20.0 s", False)]
