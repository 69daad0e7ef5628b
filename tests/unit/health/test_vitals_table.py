"""The last look at each worker, and rates of the last seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.health.vitals_table import Rates, VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Traffic, Vitals

pytestmark = pytest.mark.unit

ONE = WorkerId("a", 0, 0)


def test_rates_are_of_the_last_seconds() -> None:
    now = [10.0]
    table = VitalsTable()
    assert (table.of(ONE), table.rates(ONE, now[0])) == (None, Rates())
    for second in range(21):
        now[0] += 1
        steps = 2 * second if second < 10 else 20 + 4 * (second - 10)
        table.take(ONE, Vitals(100.0 + second, pid=7, cpu_s=0.5 * second, steps=steps), now[0])
        if second == 0:
            assert table.rates(ONE, now[0]) == Rates()
        if second == 8:
            assert table.rates(ONE, now[0]).steps_per_s == pytest.approx(2.0)
    assert table.rates(ONE, now[0]) == Rates(pytest.approx(4.0), pytest.approx(0.5))
    now[0] += 3
    assert table.age_s(ONE, now[0]) == pytest.approx(3.0)
    assert [worker for worker, _ in table] == [ONE]
    table.forget(ONE)
    assert table.of(ONE) is None


def test_a_look_that_came_late_and_another_process_make_no_rates() -> None:
    table = VitalsTable()
    first = Vitals(5.0, pid=7, steps=100, cpu_s=3.0)
    table.take(ONE, first, 0.0)
    table.take(ONE, replace(first, at_s=4.0, steps=90), 0.0)
    table.take(ONE, first, 0.0)
    assert table.of(ONE) == first
    assert table.rates(ONE, 0.0) == Rates()
    table.take(ONE, Vitals(6.0, pid=8, steps=1), 0.0)
    assert table.rates(ONE, 0.0) == Rates()
    table.take(ONE, Vitals(7.0, pid=8, steps=3), 0.0)
    assert table.rates(ONE, 0.0) == Rates(pytest.approx(2.0), 0.0)


def test_what_ended_processes_have_carried_stays_in_the_sum() -> None:
    def carried() -> object:
        return table.summary([ONE], 0.0)["collectives"], table.summary([ONE], 0.0)["waited_s"]

    table = VitalsTable()
    first = Vitals(1.0, 7, submitted=9, waited_s=1.0, traffic=(Traffic("join", 1, 0), Traffic("allreduce", 8, 80)))
    table.take(ONE, first, 0.0)
    table.take(ONE, Vitals(2.0, 7, submitted=2, waited_s=0.5, traffic=(Traffic("allreduce", 2, 20),)), 0.0)
    sum_of_both = [
        {"kind": "allreduce", "operations": 10, "payload_bytes": 100},
        {"kind": "join", "operations": 1, "payload_bytes": 0},
    ]
    assert carried() == (sum_of_both, 1.5), "the same process has begun anew, by exec"
    table.take(ONE, Vitals(3.0, 8), 0.0)
    table.forget(ONE)
    table.forget(ONE)
    assert carried() == (sum_of_both, 1.5)


def test_a_script_without_the_library_has_no_steps() -> None:
    table = VitalsTable()
    for at_s in (1.0, 2.0):
        table.take(ONE, Vitals(at_s, 7, cpu_s=at_s), 0.0)
    entry, whole = table.entry(ONE, 0.0), table.summary([ONE], 0.0)
    assert entry is not None
    assert (entry["steps_per_s"], entry["cpu"], entry["pulse_s"]) == (None, 1.0, None)
    assert (whole["steps_per_s"], whole["steps"], whole["waiting"]) == (None, 0, [])


def test_the_jobs_rate_is_the_median_of_those_that_tell_of_steps() -> None:
    table = VitalsTable()
    assert table.steps_per_s(0.0) is None
    for slot, rate in enumerate((0, 1, 4, 9)):
        worker = WorkerId("a", slot, 0)
        table.take(worker, Vitals(1.0, pid=7, steps=rate), 0.0)
        assert table.steps_per_s(0.0) is None or slot > 1
        table.take(worker, Vitals(2.0, pid=7, steps=2 * rate), 0.0)
    assert table.steps_per_s(0.0) == pytest.approx(4.0), "and the one without steps counts for nothing"


def test_the_steps_of_a_job_stay_when_workers_go() -> None:
    """Those that come later count from when they came, and those that are done again once more."""
    table, now = VitalsTable(), [0.0]
    two, three = WorkerId("b", 0, 0), WorkerId("c", 0, 0)

    def look(worker: WorkerId, steps: int, round_id: int = 1) -> int:
        now[0] += 1
        table.take(worker, Vitals(now[0], pid=worker.slot + 7, round_id=round_id, steps=steps), now[0])
        return table.steps

    assert [look(ONE, 0, 0), look(two, 0, 0), look(ONE, 8), look(two, 10), look(ONE, 100)] == [0, 0, 8, 10, 100]
    # A joiner boots, and is a member of the next round.
    assert [look(three, 0, 0), look(ONE, 110, 2), look(three, 5, 2)] == [100, 110, 110]
    table.forget(ONE)
    table.forget(two)
    assert table.steps == table.summary([], now[0])["steps"] == 110
    assert [look(three, 20, 2), look(three, 25, 3), look(WorkerId("d", 0, 0), 3, 4)] == [120, 125, 128]


def test_what_workers_did_while_the_driver_stood_still() -> None:
    now, lost_s = [100.0], [0.0]
    table = VitalsTable()
    two = WorkerId("b", 0, 0)

    def look(at_s: float, steps: int, *, waits_s: float = 0.0, other: int = 0) -> None:
        table.take(ONE, Vitals(at_s, pid=7, round_id=1, steps=steps), now[0], lost_s=lost_s[0])
        table.take(two, Vitals(at_s, pid=8, round_id=1, steps=steps + other, waits_s=waits_s), now[0], lost_s=lost_s[0])

    look(1.0, 10)
    assert table.went_on(1, lost_s=lost_s[0]) is None
    lost_s[0] += 8
    assert table.went_on(1, lost_s=lost_s[0]) is None, "nothing has come since"
    look(2.0, 20)
    assert table.went_on(1, lost_s=lost_s[0]) is True
    assert table.went_on(2, lost_s=lost_s[0]) is False, "another round has begun"
    look(3.0, 30, waits_s=5.0)
    assert table.went_on(1, lost_s=lost_s[0]) is False
    lost_s[0] += 8
    look(4.0, 30)
    assert table.went_on(1, lost_s=lost_s[0]) is False
    table.forget(two)
    table.take(ONE, Vitals(5.0, pid=7, round_id=1, steps=40), now[0], lost_s=lost_s[0])
    assert table.went_on(1, lost_s=lost_s[0]) is False, "one has ended"


def test_a_worker_that_is_not_heard_has_no_rate() -> None:
    now = [0.0]
    table = VitalsTable()
    for second in range(5):
        now[0] = float(second)
        table.take(ONE, Vitals(float(second), pid=7, steps=10 * second), now[0])
    assert table.rates(ONE, now[0]).steps_per_s == 10.0
    now[0] += 6
    assert table.rates(ONE, now[0]) == Rates()


def test_a_later_driver_goes_on_counting() -> None:
    """The first look at a member that went on meanwhile adds nothing; what it does from then on counts."""
    first, later, two = VitalsTable(), VitalsTable(), WorkerId("b", 0, 0)
    traffic = (Traffic("allreduce", 3, 30),)
    first.take(two, Vitals(1.0, pid=9, round_id=1, steps=5, waited_s=2.0, traffic=traffic), 0.0)
    first.forget(two)
    for second, steps in ((1.0, 10), (2.0, 14), (3.0, 20)):
        first.take(ONE, Vitals(second, pid=7, round_id=2 if second > 1 else 1, steps=steps), 0.0)
    later.go_on(kept := first.kept())
    assert (kept.steps, kept.round_steps) == (20, 10)
    assert later.summary([ONE], 0.0)["collectives"] == first.summary([ONE], 0.0)["collectives"]
    assert later.kept() == kept
    counts = []
    for second, steps, round_id in ((4.0, 90, 2), (5.0, 93, 2), (6.0, 95, 3), (7.0, 97, 3)):
        later.take(ONE, Vitals(second, pid=7, round_id=round_id, steps=steps), 0.0)
        counts.append(later.steps)
    assert counts == [20, 23, 25, 27]
    later.take(two, Vitals(8.0, pid=8, round_id=4, steps=4), 0.0)
    assert later.steps == 31, "who is new has begun at nothing"
