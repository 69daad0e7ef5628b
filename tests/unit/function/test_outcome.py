"""What elastic_driver.run makes of the outcomes that its workers have left."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import pytest

from elastic_driver.errors import JobFailedError
from elastic_driver.function import launch
from elastic_driver.function.driver import EXIT_CODE
from elastic_driver.function.outcome import Raised, Returned, leave, read_all

pytestmark = pytest.mark.unit


def results(folder: Path, code: int, *outcomes: Raised | Returned) -> list[object]:
    (folder / EXIT_CODE).write_text(str(code))
    for number, outcome in enumerate(outcomes):
        leave(folder, f"host_{number}-{number}", outcome)
    return launch._results(folder, folder / "events")


def returned(rank: int, value: object, round_id: int = 1, size: int = 2) -> Returned:
    return Returned(round_id, rank, size, cloudpickle.dumps(value))


def raised(error: Exception, at: float) -> Raised:
    return Raised(cloudpickle.dumps(error), type(error).__name__, f"traceback of {error}", at)


def test_what_is_left_is_read_back_and_nothing_half_written(tmp_path: Path) -> None:
    outcomes = [returned(0, "a"), raised(ValueError("b"), 2.5)]
    for number, outcome in enumerate(outcomes):
        leave(tmp_path, f"host_0-{number}", outcome)
    (tmp_path / ".host_0-2").write_bytes(b"half")
    assert sorted(read_all(tmp_path), key=str) == sorted(outcomes, key=str)


def test_results_are_the_last_rounds_by_rank(tmp_path: Path) -> None:
    old, first, second = returned(0, "old"), returned(0, "a", round_id=3), returned(1, "b", round_id=3)
    assert results(tmp_path, 0, second, old, first) == ["a", "b"]


def test_a_rank_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="rank 1 ended without a result"):
        results(tmp_path, 0, returned(0, "a"))


def test_the_first_error_counts_that_is_no_consequence_of_another(tmp_path: Path) -> None:
    consequence = Raised(None, "HorovodInternalError", "a peer is gone", 1.0)
    with pytest.raises(ValueError, match="first") as caught:
        results(tmp_path, 1, raised(ValueError("second"), 3.0), consequence, raised(ValueError("first"), 2.0))
    assert str(caught.value.__cause__) == "\ntraceback of first"


def test_an_error_that_cannot_be_pickled_is_told_by_its_class_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="the function raised OddError") as caught:
        results(tmp_path, 1, Raised(None, "OddError", "where it was", 1.0))
    assert caught.value.exit_code == 1
    assert "where it was" in str(caught.value.__cause__)
