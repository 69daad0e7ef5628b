"""The board of vitals: the last look, and rates of the last seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.driver.board import Board, Rates
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
