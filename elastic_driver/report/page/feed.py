"""The page's feed: the job's state and story, sent to each browser whole at first, then only what has changed.

Owns what was sent, to whom, and how often. A frame is encoded once for all browsers. Nothing is computed while nobody
looks, and where a frame costs much there are fewer: together they take no more than a fortieth of a processor.

A frame is an object: "job" (fields of the job, those that have changed), "hosts" and "workers" (rows by name, the
fields that have changed), "gone" (names of rows that are no more), "ended_workers" (rows of the last workers that have
ended, all of them where one has come), "story" (entries that are new or have changed, by "n") and "story_from" (the
oldest entry there is), "curves" (all of them) or "curves_new" (points behind those that there are), as
:mod:`elastic_driver.report.page.curves` has them. With "whole" it begins anew. A job that has ended keeps the last of
its figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_driver.health.sampler import Sampled
from elastic_driver.rendezvous.server.web import WebStream
from elastic_driver.report.happenings import (
    Happening,
    JobEnded,
    MomentPassed,
    ProcessEnded,
    RoundFormed,
    Status,
)
from elastic_driver.report.page.curves import Curves
from elastic_driver.report.page.story import Story

FRAME_S = 0.5
"""From one frame to the next, at least."""
_LONGEST_FRAME_S = 5.0
_SHARE = 1 / 40
# A browser that hears nothing for some seconds says so.
_BEAT_S = 2.0
# Ages become points in time, which stay as they are; what the clocks' steps and rounding do to them is no change.
_SAME_S = 0.3
_AGES = {"since_s": "since", "committed_s": "committed", "waits_s": "waits", "ready_in_s": "ready_at"}
_ROUNDED = {"cpu": 2, "steps_per_s": 3, "waited_s": 0}
_MB = 1 << 20
_MOST_ENDED = 64
"""Workers that have ended and are still shown. Those that failed stay longest: the first ones, and the last ones."""
# What a job has no more when its workers have ended, and what of it is shown all the same.
_LAST_FIGURES = ("steps_per_s", "goodput")
# Of a worker's last row, what it is still shown with.
_LAST_OF_WORKERS = ("round_id", "steps", "commits", "rss_mb")

Row = dict[str, Any]


class Timer(Protocol):
    """What call_later gives."""

    def cancel(self) -> None:
        """It does not fire."""


class Feed:
    """See above; a Listener of the chronicle. Used on the event loop only.

    Args:
        status: the job now, as ``GET /v1/status`` has it, and what else is shown of it.
        curves: how it did so far.
        call_later: of the event loop.
        clock: seconds since the epoch.
        work_clock: the processor time of this thread, seconds.
        failed: is told of an error by which nothing can be shown; browsers are told of it, too.
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
        self._ranks: dict[str, int] = {}  # the last ones of workers that live
        self._lasts: dict[str, Row] = {}  # of workers whose end is about to be told
        self._ended: dict[str, Row] = {}  # the oldest first
        self._has_ended_anew = False
        self._number = 0
        self._whole = b""  # of the present number; empty until somebody needs it
        self._looked_at = self._sent_at = self._due = 0.0
        self._timer: Timer | None = None
        self._is_closed = False

    # --- Listener --------------------------------------------------------------------------------------------------

    def hear(self, happening: Happening) -> None:
        """See Listener."""
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
        """A worker has ended, of which the status knows no more from now on; its end is told after this.

        Args:
            key: which.
            vitals: its own, as the status had them.
        """
        self._lasts[key] = _row({"vitals": vitals}, self._clock())

    def _follow(self, happening: Happening) -> None:
        """Keeps what is shown of workers when they have ended."""
        match happening:
            case RoundFormed(members=members):
                for member in members:
                    ended = self._ended.get(member.worker.key)
                    if ended is None:
                        self._ranks[member.worker.key] = member.rank
                    else:  # its process was there for a moment only
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
        """Of the workers that are shown, as of the last look: those that have ended first, the latest before others."""
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
        """To browsers that read now."""
        return tuple(self._streams)

    def add(self, stream: WebStream, you: Mapping[str, object]) -> None:
        """A browser reads from now on.

        Args:
            stream: to it.
            you: what is for this one only.
        """
        trouble = b""
        try:
            if not self._streams:
                self._look()
        except Exception as error:
            # Who only looks on ends no job, and is told why it sees nothing new.
            trouble = self._trouble(error)
        self._streams[stream] = None
        stream.write(_event("you", json.dumps(you)) + self._whole_event() + trouble)
        if self._is_closed:
            stream.write(_event("bye", "{}"))
            stream.close()
        elif self._timer is None:
            self._timer = self._call_later(FRAME_S, self._tick)

    def remove(self, stream: WebStream) -> None:
        """It reads no more."""
        self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def state(self) -> bytes:
        """All there is to know, as JSON."""
        if not self._streams:
            self._look()
        return self._whole_frame()

    def close(self, outputs: Mapping[str, Sequence[str]] | None = None) -> None:
        """The driver ends: browsers are told so, and keep what they have.

        Args:
            outputs: the last lines of workers by their keys, which nobody can be asked for any more.
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
        """Takes the present. Returns what has changed since the last look."""
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
    """A row as it is sent: flat, ages as points in time, figures no finer than they are shown."""
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
    if memory is not None:
        flat["rss_mb"] = round(memory / _MB)
    return flat


def _differences(before: dict[str, Row], after: dict[str, Row]) -> tuple[dict[str, Row], list[str]]:
    """The fields that have changed, by row, and the rows that are no more. Points in time stay where they hardly move.

    A field that a row has no more is None in its change.
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
