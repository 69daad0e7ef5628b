"""The page's feed: sends the job's state and story to each browser, first completely, then only the changes.

Owns the frames sent, their recipients and their rate. A frame is encoded once for all browsers. Nothing is computed
while no browser is connected, and expensive frames are sent less often: together they take at most a fortieth of a
processor.

A frame is an object: "job" (changed fields of the job), "hosts" and "workers" (changed fields of rows, by name), "gone"
(names of removed rows), "ended_workers" (rows of the last workers that have ended; all of them if there is a new one),
"story" (new or changed entries, by "n") and "story_from" (the oldest entry kept), "curves" (all points) or "curves_new"
(points to append), as defined in :mod:`elastic_driver.reporting.page.curves`. A frame with "whole" replaces everything.
A job that has ended keeps its last figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_driver.health.sampler import Sampled
from elastic_driver.rendezvous.server.web import WebStream
from elastic_driver.reporting.happenings import (
    Happening,
    JobEnded,
    MomentPassed,
    ProcessEnded,
    RoundFormed,
    Status,
)
from elastic_driver.reporting.page.curves import Curves
from elastic_driver.reporting.page.story import Story

FRAME_S = 0.5
"""The shortest interval between frames."""
_LONGEST_FRAME_S = 5.0
_SHARE = 1 / 40
# A browser that receives nothing for some seconds reports that.
_BEAT_S = 2.0
# Ages become points in time, which do not change; differences from clock steps and rounding are no changes.
_SAME_S = 0.3
_AGES = {"since_s": "since", "committed_s": "committed", "waits_s": "waits", "ready_in_s": "ready_at"}
_ROUNDED = {"cpu": 2, "steps_per_s": 3, "waited_s": 0}
_MB = 1 << 20
_MOST_ENDED = 64
"""The most ended workers that are shown. Failed ones are kept longest: the first ones, and the last ones."""
# Figures that a job loses when its workers have ended, and that are still shown.
_LAST_FIGURES = ("steps_per_s", "goodput")
# The fields of a worker's last row that are still shown.
_LAST_OF_WORKERS = ("round_id", "steps", "commits", "rss_mb")

Row = dict[str, Any]


class Timer(Protocol):
    """The handle that call_later returns."""

    def cancel(self) -> None:
        """Cancel the call."""


class Feed:
    """Sends frames to browsers; a Listener of the chronicle. Used on the event loop only.

    Args:
        status: returns the job's present state as in ``GET /v1/status``, and what else is shown of it.
        curves: the job's curves so far.
        call_later: of the event loop.
        clock: returns seconds since the epoch.
        work_clock: returns the processor time of this thread, seconds.
        failed: called with an error that prevents a frame; browsers are informed, too.
    """

    live = False

    def __init__(
        self,
        status: Callable[[], Mapping[str, object]],
        *,
        curves: Curves | None = None,
        call_later: Callable[[float, Callable[[], None]], Timer],
        clock: Callable[[], float] = time.time,
        work_clock: Callable[[], float] = time.thread_time,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._status = status
        self._curves = Curves() if curves is None else curves
        self._failed = failed
        self._call_later = call_later
        self._clock = clock
        self._work_clock = work_clock
        self.story = Story(clock)
        self._streams: dict[WebStream, None] = {}
        self._job: Row = {}
        self._rows: dict[str, dict[str, Row]] = {"hosts": {}, "workers": {}}
        self._ranks: dict[str, int] = {}  # the last ranks of living workers
        self._lasts: dict[str, Row] = {}  # of workers whose end is about to be reported
        self._ended: dict[str, Row] = {}  # the oldest first
        self._has_ended_anew = False
        self._number = 0
        self._whole = b""  # of the present number; empty until needed
        self._looked_at = self._sent_at = self._due = 0.0
        self._timer: Timer | None = None
        self._is_closed = False

    # --- Listener --------------------------------------------------------------------------------------------------

    def hear(self, happening: Happening) -> None:
        """Update the story for a happening (Listener)."""
        if isinstance(happening, Status | MomentPassed | Sampled):
            return
        try:
            self.story.hear(happening)
            self._follow(happening)
        except Exception as error:
            self._failed(error)
        if isinstance(happening, JobEnded) and self._streams:
            self._send_frame()

    def seen_last(self, key: str, vitals: Mapping[str, object]) -> None:
        """Note a worker's last row, before it disappears from the status and its end is reported.

        Args:
            key: the worker's key.
            vitals: its vitals, as in the status.
        """
        self._lasts[key] = _row({"vitals": vitals}, self._clock())

    def _follow(self, happening: Happening) -> None:
        """Keep the last rows of workers that have ended."""
        match happening:
            case RoundFormed(members=members):
                for member in members:
                    ended = self._ended.get(member.worker.key)
                    if ended is None:
                        self._ranks[member.worker.key] = member.rank
                    else:  # its process ended at once
                        ended["rank"], self._has_ended_anew = member.rank, True
            case ProcessEnded(worker, how=how, returncode=code, expected=expected):
                key = worker.key
                last = {**self._rows["workers"].get(key, {}), **self._lasts.pop(key, {})}
                self._ended[key] = {
                    **{name: last[name] for name in _LAST_OF_WORKERS if name in last},
                    "worker": key,
                    "host": worker.hostname,
                    "slot": worker.slot,
                    "rank": self._ranks.pop(key, None),
                    "how": how,
                    "t": round(self._clock(), 2),
                    "failed": bool(code and not expected),
                }
                self._has_ended_anew = True
                if len(self._ended) > _MOST_ENDED:
                    fine = (name for name, row in self._ended.items() if not row["failed"])
                    del self._ended[next(fine, list(self._ended)[_MOST_ENDED // 2])]
            case _:
                pass

    @property
    def names(self) -> list[str]:
        """The names of the shown workers as of the last look: ended ones first, the latest before others."""
        last = len(self._rows["workers"])
        ranks = {
            name: last if row.get("rank") is None else row["rank"]
            for name, row in self._rows["workers"].items()
            if name not in self._ended
        }
        return [*reversed(self._ended), *sorted(ranks, key=lambda name: ranks[name])]

    # --- streams ---------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> tuple[WebStream, ...]:
        """The streams to the connected browsers."""
        return tuple(self._streams)

    def add(self, stream: WebStream, you: Mapping[str, object]) -> None:
        """Add the stream of a browser.

        Args:
            stream: to the browser.
            you: content for this browser only.
        """
        trouble = b""
        try:
            if not self._streams:
                self._look()
        except Exception as error:
            # An observer must not end the job; it receives the reason why there is nothing new.
            trouble = self._trouble(error)
        self._streams[stream] = None
        stream.write(_event("you", json.dumps(you)) + self._whole_event() + trouble)
        if self._is_closed:
            stream.write(_event("bye", "{}"))
            stream.close()
        elif self._timer is None:
            self._timer = self._call_later(FRAME_S, self._tick)

    def remove(self, stream: WebStream) -> None:
        """Remove the stream of a browser."""
        self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def state(self) -> bytes:
        """Return the complete state, as JSON."""
        if not self._streams:
            self._look()
        return self._whole_frame()

    def close(self, outputs: Mapping[str, Sequence[str]] | None = None) -> None:
        """Inform all browsers that the driver ends; they keep what they have.

        Args:
            outputs: the last lines of workers by their keys, since they cannot be requested later.
        """
        if self._is_closed:
            return
        self._is_closed = True
        bye = _event("bye", json.dumps({"outputs": outputs} if outputs else {}))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for stream in tuple(self._streams):
            stream.write(bye)
            stream.close()

    # --- frames ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._call_later(FRAME_S, self._tick)
        now = self._clock()
        if now >= self._due or now < self._sent_at:
            self._send_frame()
        elif now - self._sent_at >= _BEAT_S:
            self._send(_event("beat", "{}"))

    def _send_frame(self) -> None:
        began = self._work_clock()
        try:
            change = self._look()
        except Exception as error:
            self._send(self._trouble(error))
            self._due = self._clock() + _LONGEST_FRAME_S
            return
        if change:
            self._send(_event("change", _encode({"id": self._number, "at": round(self._clock(), 2), **change})))
        elif self._clock() - self._sent_at >= _BEAT_S:
            self._send(_event("beat", "{}"))
        cost_s = self._work_clock() - began
        self._due = self._clock() + min(_LONGEST_FRAME_S, max(0.0, cost_s / _SHARE - FRAME_S / 2))

    def _trouble(self, error: Exception) -> bytes:
        self._failed(error)
        return _event("trouble", json.dumps(f"{type(error).__name__}: {error}"))

    def _send(self, data: bytes) -> None:
        self._sent_at = self._clock()
        for stream in tuple(self._streams):
            stream.write(data)

    def _whole_frame(self) -> bytes:
        if not self._whole:
            frame = {
                "whole": True,
                "id": self._number,
                "at": round(self._clock(), 2),
                "job": self._job,
                **self._rows,
                "ended_workers": list(self._ended.values()),
                "story": self.story.all(),
                "curves": self._curves.whole(),
            }
            self._whole = _encode(frame).encode()
        return self._whole

    def _whole_event(self) -> bytes:
        return b"event: whole\nid: %d\ndata: " % self._number + self._whole_frame() + b"\n\n"

    def _look(self) -> Row:
        """Read the present state. Returns the changes since the last time."""
        status, now, change = dict(self._status()), self._clock(), dict[str, Any]()
        hosts = {str(row.get("name")): _row(row, now) for row in _rows_of(status, "hosts")}
        workers = {str(row.get("worker")): _row(row, now) for row in _rows_of(status, "workers")}
        for key in self.story.slow & workers.keys():
            workers[key]["slow"] = True
        for name in ("hosts", "workers"):
            status.pop(name, None)
        began = now - float(str(status.pop("age_s", 0.0)))
        if abs(began - self._job.get("began", 0.0)) < _SAME_S:
            began = self._job["began"]
        job = {**status, "began": round(began, 1), "ended": self.story.ended}
        fails, told = job.get("discovery_fails"), self._job.get("discovery_fails")
        if isinstance(fails, Mapping):
            since = round(now - fails["age_s"], 1)
            if told is not None and abs(told["since"] - since) < _SAME_S:
                since = told["since"]
            job["discovery_fails"] = {"reason": fails["reason"], "since": since}
        stalled, told = job.get("stalled"), self._job.get("stalled")
        if isinstance(stalled, Mapping):
            since = round(now - stalled["since_s"], 1)
            if told is not None and abs(told["since"] - since) < _SAME_S:
                since = told["since"]
            job["stalled"] = {"since": since, "waits_for": stalled["waits_for"]}
        if self.story.ended is not None:
            kept = {name: self._job[name] for name in _LAST_FIGURES if self._job.get(name) is not None}
            job |= {name: value for name, value in kept.items() if job.get(name) is None}
        listed = self.story.hosts
        if listed is not None:
            job["listed"] = {"t": listed[0], "hosts": [[host.name, host.slots] for host in listed[1]]}
        changed = {name: value for name, value in job.items() if name not in self._job or self._job[name] != value}
        changed |= dict.fromkeys(self._job.keys() - job.keys())
        if changed:
            change["job"] = changed
        self._job = job
        for kind, rows in (("hosts", hosts), ("workers", workers)):
            rows_changed, gone = _differences(self._rows[kind], rows)
            self._rows[kind] = rows
            if rows_changed:
                change[kind] = rows_changed
            if gone:
                change.setdefault("gone", {})[kind] = gone
        if self._has_ended_anew:
            change["ended_workers"] = list(self._ended.values())
            self._has_ended_anew = False
        story, story_from = self.story.news()
        if story:
            change |= {"story": story, "story_from": story_from}
        change |= self._curves.news()
        if change:
            self._number += 1
            self._whole = b""
        return change


def _rows_of(status: Mapping[str, object], name: str) -> list[Row]:
    rows = status.get(name)
    return rows if isinstance(rows, list) else []


def _row(row: Mapping[str, Any], now: float) -> Row:
    """Convert a row for sending: flat, ages as points in time, figures no more precise than shown."""
    flat: Row = {name: value for name, value in row.items() if name != "vitals"}
    flat |= row.get("vitals") or {}
    flat.pop("traced", None)
    for age, point in _AGES.items():
        value = flat.pop(age, None)
        if value:
            flat[point] = round(now + value if age == "ready_in_s" else now - value, 1)
    pulse_s = flat.pop("pulse_s", None)
    if pulse_s is not None and pulse_s > 3:
        flat["pulse_s"] = round(pulse_s)
    for name, digits in _ROUNDED.items():
        if flat.get(name) is not None:
            flat[name] = round(flat[name], digits)
    memory = flat.pop("rss_bytes", None)
    if memory:  # a process that has been killed has none
        flat["rss_mb"] = round(memory / _MB)
    return flat


def _differences(before: dict[str, Row], after: dict[str, Row]) -> tuple[dict[str, Row], list[str]]:
    """Return the changed fields, by row, and the removed rows. Points in time that hardly move count as unchanged.

    A field that a row no longer has is None in its change.
    """
    changed: dict[str, Row] = {}
    for name, row in after.items():
        old = before.get(name)
        if old is None:
            changed[name] = row
            continue
        for point in _AGES.values():
            if point in row and point in old and abs(row[point] - old[point]) <= _SAME_S:
                row[point] = old[point]
        if row == old:
            continue
        fields = {field: value for field, value in row.items() if field not in old or old[field] != value}
        fields |= dict.fromkeys(old.keys() - row.keys())
        changed[name] = fields
    return changed, [name for name in before if name not in after]


def _encode(frame: Mapping[str, object]) -> str:
    return json.dumps(frame, separators=(",", ":"), default=str)


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
