"""The board of vitals: the last look, and rates of the last seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.health.board import Board, Rates
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Traffic, Vitals

pytestmark = pytest.mark.unit

ONE = WorkerId("a", 0, 0)


def test_rates_are_of_the_last_seconds() -> None:
    told: list[tuple[WorkerId, float]] = []
    now = [10.0]
    board = Board(lambda: now[0], lambda worker, vitals, at: told.append((worker, at)))
    assert (board.of(ONE), board.rates(ONE)) == (None, Rates())
    for second in range(21):
        now[0] += 1
        steps = 2 * second if second < 10 else 20 + 4 * (second - 10)
        board.take(ONE, Vitals(100.0 + second, pid=7, cpu_s=0.5 * second, steps=steps))
        if second == 0:
            assert board.rates(ONE) == Rates()
        if second == 8:
            assert board.rates(ONE).steps_per_s == pytest.approx(2.0)
    assert board.rates(ONE) == Rates(pytest.approx(4.0), pytest.approx(0.5))
    now[0] += 3
    assert board.age_s(ONE) == pytest.approx(3.0)
    assert len(told) == 21
    assert told[0] == (ONE, 11.0)
    assert [worker for worker, _ in board] == [ONE]
    board.forget(ONE)
    assert board.of(ONE) is None


def test_a_look_that_came_late_and_another_process_make_no_rates() -> None:
    board = Board(lambda: 0.0)
    first = Vitals(5.0, pid=7, steps=100, cpu_s=3.0)
    board.take(ONE, first)
    board.take(ONE, replace(first, at_s=4.0, steps=90))
    board.take(ONE, first)
    assert board.of(ONE) == first
    assert board.rates(ONE) == Rates()
    board.take(ONE, Vitals(6.0, pid=8, steps=1))
    assert board.rates(ONE) == Rates()
    board.take(ONE, Vitals(7.0, pid=8, steps=3))
    assert board.rates(ONE) == Rates(pytest.approx(2.0), 0.0)


def test_what_ended_processes_have_carried_stays_in_the_sum() -> None:
    def carried() -> object:
        return board.summary([ONE])["collectives"], board.summary([ONE])["waited_s"]

    board = Board(lambda: 0.0)
    first = Vitals(1.0, 7, submitted=9, waited_s=1.0, traffic=(Traffic("join", 1, 0), Traffic("allreduce", 8, 80)))
    board.take(ONE, first)
    board.take(ONE, Vitals(2.0, 7, submitted=2, waited_s=0.5, traffic=(Traffic("allreduce", 2, 20),)))
    sum_of_both = [
        {"kind": "allreduce", "operations": 10, "payload_bytes": 100},
        {"kind": "join", "operations": 1, "payload_bytes": 0},
    ]
    assert carried() == (sum_of_both, 1.5), "the same process has begun anew, by exec"
    board.take(ONE, Vitals(3.0, 8))
    board.forget(ONE)
    board.forget(ONE)
    assert carried() == (sum_of_both, 1.5)


def test_a_script_without_the_library_has_no_steps() -> None:
    board = Board(lambda: 0.0)
    for at_s in (1.0, 2.0):
        board.take(ONE, Vitals(at_s, 7, cpu_s=at_s))
    entry, whole = board.entry(ONE), board.summary([ONE])
    assert entry is not None
    assert (entry["steps_per_s"], entry["cpu"], entry["pulse_s"]) == (None, 1.0, None)
    assert (whole["steps_per_s"], whole["steps"], whole["waiting"]) == (None, 0, [])


def test_the_jobs_rate_is_the_median_of_those_that_tell_of_steps() -> None:
    board = Board(lambda: 0.0)
    assert board.steps_per_s() is None
    for slot, rate in enumerate((0, 1, 4, 9)):
        worker = WorkerId("a", slot, 0)
        board.take(worker, Vitals(1.0, pid=7, steps=rate))
        assert board.steps_per_s() is None or slot > 1
        board.take(worker, Vitals(2.0, pid=7, steps=2 * rate))
    assert board.steps_per_s() == pytest.approx(4.0), "and the one without steps counts for nothing"


def test_the_steps_of_a_job_stay_when_workers_go() -> None:
    """Those that come later count from when they came, and those that are done again once more."""
    board, now = Board(lambda: now[0]), [0.0]
    two, three = WorkerId("b", 0, 0), WorkerId("c", 0, 0)

    def look(worker: WorkerId, steps: int, round_id: int = 1) -> int:
        now[0] += 1
        board.take(worker, Vitals(now[0], pid=worker.slot + 7, round_id=round_id, steps=steps))
        return board.steps

    assert [look(ONE, 0, 0), look(two, 0, 0), look(ONE, 8), look(two, 10), look(ONE, 100)] == [0, 0, 8, 10, 100]
    # A joiner boots, and is a member of the next round.
    assert [look(three, 0, 0), look(ONE, 110, 2), look(three, 5, 2)] == [100, 110, 110]
    board.forget(ONE)
    board.forget(two)
    assert board.steps == board.summary([])["steps"] == 110
    assert [look(three, 20, 2), look(three, 25, 3), look(WorkerId("d", 0, 0), 3, 4)] == [120, 125, 128]


def test_what_workers_did_while_the_driver_stood_still() -> None:
    now, lost_s = [100.0], [0.0]
    board = Board(lambda: now[0], lost_s=lambda: lost_s[0])
    two = WorkerId("b", 0, 0)

    def look(at_s: float, steps: int, *, waits_s: float = 0.0, other: int = 0) -> None:
        board.take(ONE, Vitals(at_s, pid=7, round_id=1, steps=steps))
        board.take(two, Vitals(at_s, pid=8, round_id=1, steps=steps + other, waits_s=waits_s))

    look(1.0, 10)
    assert board.went_on(1) is None
    lost_s[0] += 8
    assert board.went_on(1) is None, "nothing has come since"
    look(2.0, 20)
    assert board.went_on(1) is True
    assert board.went_on(2) is False, "another round has begun"
    look(3.0, 30, waits_s=5.0)
    assert board.went_on(1) is False
    lost_s[0] += 8
    look(4.0, 30)
    assert board.went_on(1) is False
    board.forget(two)
    board.take(ONE, Vitals(5.0, pid=7, round_id=1, steps=40))
    assert board.went_on(1) is False, "one has ended"


def test_a_worker_that_is_not_heard_has_no_rate() -> None:
    now = [0.0]
    board = Board(lambda: now[0])
    for second in range(5):
        now[0] = float(second)
        board.take(ONE, Vitals(float(second), pid=7, steps=10 * second))
    assert board.rates(ONE).steps_per_s == 10.0
    now[0] += 6
    assert board.rates(ONE) == Rates()
