"""The barrier kept as data."""

from __future__ import annotations

import pytest

from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from tests.support.fakes.membership_job import worker_id

pytestmark = pytest.mark.unit

A, B, C = (worker_id(f"{name}[0]") for name in "abc")
READY, SUCCESS, FAILURE = WorkerState.READY, WorkerState.SUCCESS, WorkerState.FAILURE


def registry() -> WorkerStateRegistry:
    return WorkerStateRegistry((A, B, C))


def test_it_is_complete_when_all_have_reported_whatever_they_said() -> None:
    now = registry()
    assert (now.complete, now.missing) == (False, (A, B, C))
    now = now.record(C, READY).record(A, FAILURE)
    assert (now.complete, now.missing) == (False, (B,))
    now = now.record(B, SUCCESS)
    assert (now.complete, now.missing) == (True, ())
    assert (now.workers_in(READY), now.workers_in(SUCCESS), now.workers_in(FAILURE)) == ((C,), (B,), (A,))


def test_nobody_expected_is_complete() -> None:
    assert WorkerStateRegistry(()).complete


def test_the_same_report_twice_changes_nothing() -> None:
    once = registry().record(A, READY)
    assert once.record(A, READY) == once


@pytest.mark.parametrize("end", [SUCCESS, FAILURE])
def test_the_end_of_a_process_replaces_its_ready(end: WorkerState) -> None:
    now = registry().record(A, READY).record(B, READY).record(A, end)
    assert now.state_of(A) is end
    assert now.workers_in(READY) == (B,)
    assert now.missing == (C,), "nobody who has reported is waited for again"


@pytest.mark.parametrize("end", [SUCCESS, FAILURE])
@pytest.mark.parametrize("late", list(WorkerState))
def test_after_the_end_of_a_process_nothing_counts(end: WorkerState, late: WorkerState) -> None:
    ended = registry().record(A, end)
    assert ended.record(A, late) == ended


def test_who_is_not_expected_is_not_recorded() -> None:
    stranger = worker_id("a[0]#1")
    assert registry().record(stranger, READY) == registry()
    assert registry().without(stranger) == registry()


def test_one_who_is_expected_no_more() -> None:
    now = registry().record(A, READY).without(A).without(B)
    assert (now.expected, now.missing, tuple(now.records)) == ((C,), (C,), ())
    assert now.record(A, READY) == now


def test_reports_are_in_order_of_arrival_and_the_missing_in_order_of_rank() -> None:
    now = WorkerStateRegistry((C, B, A)).record(A, READY).record(C, READY)
    assert now.workers_in(READY) == (A, C)
    assert registry().missing == (A, B, C)
