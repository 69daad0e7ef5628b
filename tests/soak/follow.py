"""Follows running jobs: reads what their drivers and workers write, in its order, into their training's history."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from history import History

from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.folder import CommitId, commit_ids, commit_path
from tests.support.processes.json_lines import JsonLines

# The driver's event log is written by a thread of its own, which a busy machine may keep from it.
_BEHIND_S = 20.0


class Follower:
    """Follows a training, and the jobs that carry it on one after another.

    Args:
        step_log: the lines of the workers of all of them.
        history: of the training.

    Attributes:
        recent: the last steps, without those of members that a round has left behind.
        steps: how many of those there were.
        seen: the present job's events.
    """

    def __init__(self, step_log: Path, history: History) -> None:
        self.history = history
        self.recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=800)
        self.steps = 0
        self.seen: list[dict[str, Any]] = []
        self._lines = JsonLines(step_log)
        self._events: JsonLines | None = None
        self._held: list[dict[str, Any]] = []  # whose event is not there yet
        self._held_since: float | None = None

    def begin(self, event_log: Path) -> None:
        """Another job begins, which writes this event log."""
        self._events = JsonLines(event_log)
        self.seen = []

    def look(self) -> bool:
        """Takes in what was written since the last time. Returns whether the present job has begun.

        Raises:
            AssertionError: a rule of the history is broken, or a driver.
        """
        assert self._events is not None
        # Lines first: what the driver wrote before them is there by then, unless its writer is behind.
        lines, events = [*self._held, *self._lines.new()], self._events.new()
        for event in events:
            if event["event"] == "job_started":
                self.history.begin_job(event["job_id"])
            self.history.event(event)
            assert event["event"] != "internal_error", event
        self.seen += events
        self._held = []
        for index, line in enumerate(lines):
            if self.history.knows(line):
                self._held_since = None
            elif self._held_since is None or time.monotonic() - self._held_since < _BEHIND_S:
                self._held_since = self._held_since or time.monotonic()
                self._held = lines[index:]
                break
            self.history.line(line)
            if "step" not in line:
                continue
            behind = self.recent and self.recent[-1]["job"] == line["job"] and self.recent[-1]["round"] > line["round"]
            if not behind:
                self.recent.append(line)
                self.steps += 1
        self.history.check_epochs()
        return bool(self.seen)


def check_commits(folder: Path, jobs: Sequence[str]) -> int:
    """Checks that one writer after another has written a folder of commits, each going on from those before.

    For states that have a ``trail``, see lineage_program.py. Commits may go meanwhile.

    Args:
        folder: of the commits.
        jobs: the ids of those that have written into it, in their order.

    Returns:
        How many commits were looked at.
    """
    found: list[tuple[int, CommitId, list[list[Any]]]] = []
    for commit in commit_ids(folder):
        path = commit_path(folder, commit)
        with contextlib.suppress(FileNotFoundError):
            # A file gets its name last; the time of that is the time of its last change.
            found.append((path.stat().st_ctime_ns, commit, durable_format.read(path)[1]["trail"]))
    found.sort(key=lambda one: one[0])

    def place(entry: list[Any]) -> tuple[int, int]:
        return jobs.index(entry[0]), entry[1]

    before: list[list[Any]] = []
    for _, commit, trail in found:
        assert trail[-1][1] == commit.round_id, f"{commit} was written by round {trail[-1][1]}"
        if before:
            assert place(trail[-1]) >= place(before[-1]), f"two rounds write: {commit} came after one of {before[-1]}"
            # Both have forgotten their oldest rounds.
            common = [entry for entry in trail if place(before[0]) <= place(entry) <= place(before[-1])]
            known = [entry for entry in before if place(entry) >= place(trail[0])]
            assert common == known[: len(common)], f"{commit} comes from {trail}, the one before from {before}"
        before = trail
    return len(found)
