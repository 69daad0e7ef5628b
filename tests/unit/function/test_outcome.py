"""What elastic_driver.run makes of the outcomes that its workers have left."""

from __future__ import annotations

import pickle
from itertools import count
from pathlib import Path

import cloudpickle
import pytest

from elastic_driver.errors import JobFailedError
from elastic_driver.function import launch
from elastic_driver.function.driver import EXIT_CODE
from elastic_driver.function.outcome import Raised, Returned, outcome_path, read_all
from elastic_driver.hosts import WorkerId

pytestmark = pytest.mark.unit


_number = count()


def leave(folder: Path, outcome: Raised | Returned) -> None:
    number = next(_number)
    outcome_path(folder, number, WorkerId("a/host", number, 0)).write_bytes(pickle.dumps(outcome))


def results(folder: Path, code: int, *outcomes: Raised | Returned) -> list[object]:
    (folder / EXIT_CODE).write_text(str(code))
    for outcome in outcomes:
        leave(folder, outcome)
    return launch._results(folder, folder / "events")


def returned(rank: int, value: object, round_id: int = 1, size: int = 2) -> Returned:
    return Returned(round_id, rank, size, cloudpickle.dumps(value))


def raised(error: Exception) -> Raised:
    return Raised(cloudpickle.dumps(error), type(error).__name__, f"traceback of {error}")


def test_what_is_left_is_read_back_and_nothing_half_written(tmp_path: Path) -> None:
    outcomes = [returned(0, "a"), raised(ValueError("b"))]
    for outcome in outcomes:
        leave(tmp_path, outcome)
    (tmp_path / ".outcome-2").write_bytes(b"half")
    assert read_all(tmp_path) == outcomes


def test_results_are_the_last_rounds_by_rank(tmp_path: Path) -> None:
    old, first, second = returned(0, "old"), returned(0, "a", round_id=3), returned(1, "b", round_id=3)
    assert results(tmp_path, 0, second, old, first) == ["a", "b"]


def test_a_rank_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="rank 1 ended without a result"):
        results(tmp_path, 0, returned(0, "a"))


def test_the_first_error_counts_that_is_no_consequence_of_another(tmp_path: Path) -> None:
    consequence = Raised(None, "HorovodInternalError", "a peer is gone")
    with pytest.raises(ValueError, match="first") as caught:
        results(tmp_path, 1, consequence, raised(ValueError("first")), raised(ValueError("second")))
    assert str(caught.value.__cause__) == "\ntraceback of first"


def test_an_error_that_cannot_be_pickled_is_told_by_its_class_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="the function raised OddError") as caught:
        results(tmp_path, 1, Raised(None, "OddError", "where it was"))
    assert caught.value.exit_code == 1
    assert "where it was" in str(caught.value.__cause__)
