"""Follows running jobs: reads what their drivers and workers write, in its order, into their training's history."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from history import History

from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.folder import commit_ids, commit_path


class Tail:
    """Reads whole JSON lines that have come since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


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
        self._lines = Tail(step_log)
        self._events: Tail | None = None

    def begin(self, event_log: Path) -> None:
        """Another job begins, which writes this event log."""
        self._events = Tail(event_log)
        self.seen = []

    def look(self) -> bool:
        """Takes in what was written since the last time. Returns whether the present job has begun.

        Raises:
            AssertionError: a rule of the history is broken, or a driver.
        """
        assert self._events is not None
        # Lines first: what the driver wrote before them is there by then.
        lines, events = self._lines.read(), self._events.read()
        for event in events:
            if event["event"] == "job_started":
                self.history.begin_job(event["job_id"])
            self.history.event(event)
            assert event["event"] != "internal_error", event
        self.seen += events
        for line in lines:
            self.history.line(line)
            if "step" not in line:
                continue
            behind = self.recent and self.recent[-1]["job"] == line["job"] and self.recent[-1]["round"] > line["round"]
            if not behind:
                self.recent.append(line)
                self.steps += 1
        self.history.check_epochs()
        return bool(self.seen)


def check_commits(folder: Path) -> int:
    """Checks that one writer after another has written a folder of commits, each going on from those before.

    For states that have a ``trail``, see lineage_program.py, and folders that keep all commits. Returns how many there
    are.
    """
    # In the order in which they got their names, which is the last that is done to a file.
    ids = sorted(commit_ids(folder), key=lambda commit: commit_path(folder, commit).stat().st_ctime_ns)
    before: list[list[int]] = []
    for commit in ids:
        _, values = durable_format.read(commit_path(folder, commit))
        trail = values["trail"]
        assert trail[-1][0] == commit.round_id, f"{commit} was written by round {trail[-1][0]}"
        newest = before[-1][0] if before else 0
        assert commit.round_id >= newest, f"{commit} was written after one of round {newest}: two rounds write"
        common = [entry for entry in trail if entry[0] <= newest]
        assert common == before[: len(common)], f"{commit} comes from {trail}, the one before from {before}"
        before = trail
    return len(ids)
