"""Who has written a folder of commits: one round after another passes, two side by side are seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from follow import check_commits

from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.folder import CommitId, write_file

JOBS = ("a", "b")
Trail = list[tuple[str, int, int]]


def write(folder: Path, commits: int, trail: Trail) -> None:
    """A commit as the last round of the trail has made it."""
    encoded = durable_format.encode({"trail": [list(entry) for entry in trail]}, commits=commits)
    write_file(folder, CommitId(commits, trail[-1][1]), encoded)


def test_one_round_after_another(tmp_path: Path) -> None:
    write(tmp_path, 1, [("a", 1, 1)])
    write(tmp_path, 2, [("a", 1, 1), ("a", 2, 3)])
    # A round that none of the living has a commit of.
    write(tmp_path, 3, [("a", 1, 1), ("a", 2, 3), ("a", 4, 5)])
    # Another job goes on from the disk, and counts its rounds anew.
    write(tmp_path, 4, [("a", 1, 1), ("a", 2, 3), ("a", 4, 5), ("b", 1, 7)])
    # The oldest rounds are forgotten.
    write(tmp_path, 5, [("a", 4, 5), ("b", 1, 7), ("b", 2, 9)])
    write(tmp_path, 6, [("b", 1, 7), ("b", 2, 9), ("b", 3, 11)])
    assert check_commits(tmp_path, JOBS) == 6


def test_a_round_that_was_left_behind_writes(tmp_path: Path) -> None:
    write(tmp_path, 1, [("a", 1, 1)])
    write(tmp_path, 2, [("a", 1, 1), ("a", 2, 3)])
    write(tmp_path, 3, [("a", 1, 1)])
    with pytest.raises(AssertionError, match="two rounds write"):
        check_commits(tmp_path, JOBS)


def test_a_job_of_the_past_writes(tmp_path: Path) -> None:
    write(tmp_path, 1, [("b", 1, 1)])
    write(tmp_path, 2, [("a", 5, 1)])
    with pytest.raises(AssertionError, match="two rounds write"):
        check_commits(tmp_path, JOBS)


def test_a_commit_that_comes_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, 1, [("a", 1, 1), ("a", 2, 3)])
    write(tmp_path, 2, [("a", 1, 1), ("a", 2, 4), ("a", 3, 5)])
    with pytest.raises(AssertionError, match="the one before from"):
        check_commits(tmp_path, JOBS)
