"""A job's story, read from its event log, as values for pictures and tables.

Owns the reading of the log: of a running, ended or killed job, of the last job in a file or another one, whatever else
the file contains. Does not open files or write output. Times are seconds since the job's start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_driver.core.standing import JobActivity
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.goodput import Booked, Category
from elastic_driver.words import ExitCode, NoticeKind

# The kinds of a worker's pieces.
BOOTS, WORKS, WAITS, DRAINED, ENDS = "boots", "works", "waits", "drained", "ends"

# Limit of times in a log, including those since 1970: thousands of years. JSON also accepts "NaN" and "1e999".
_MOST_S = 1e11


@dataclass(slots=True)
class Piece:
    """A stretch of time of one kind; ``until`` is None while it lasts."""

    kind: str
    since: float
    until: float | None = None


@dataclass(slots=True)
class Life:
    """A worker's process.

    Attributes:
        worker: its id.
        pieces: its activities.
        ended_at: None while it lives.
        how: its end as text; "" if unremarkable.
        rank: its last one; None for none.
    """

    worker: WorkerId
    pieces: list[Piece]
    ended_at: float | None = None
    how: str = ""
    rank: int | None = None

    def turn(self, kind: str, at: float) -> None:
        """Begin a piece of another kind."""
        if self.pieces[-1].kind != kind:
            self.pieces[-1].until = at
            self.pieces.append(Piece(kind, at))


@dataclass(slots=True)
class Round:
    """A round, and its cost; ``took_s`` and ``lost_s`` are None if unknown."""

    round_id: int
    at: float
    size: int
    old_size: int
    cause: str
    commit: int | None
    took_s: float | None = None
    lost_s: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A single event; ``host`` is "" if it concerns the whole job."""

    at: float
    kind: str
    text: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The job's state at one time, as in :class:`~elastic_driver.health.sampler.Sampled`; None for unknown values."""

    at: float
    steps_per_s: float | None
    waiting: float | None
    cpu: float | None
    memory_bytes: float | None
    gpu: float | None
    gpu_memory_bytes: float | None
    workers: int
    figures: Mapping[str, float | None]


@dataclass(slots=True)
class Story:
    """A job's story.

    Attributes:
        job_id, began: the job, and when it began, unix seconds.
        version: of the driver; "" if the log has none.
        last: the time of the last event.
        pieces: the job's time, by category of its goodput.
        rounds, lives, marks: in the order of their times.
        hosts: names, in the order of their first appearance.
        sizes: the number of members of each round, with its time.
        samples: for curves; empty for an older log.
        resets: how often training was interrupted for another round.
        tells_commits: whether its workers report commits.
        cut_at: from when on only goodput and the end are known, since the log had grown too large; None if it is
            complete.
        told: its goodput, as last reported by its driver.
        exit_code, message: how it ended; None while it runs, or if it was killed.
        skipped: the number of lines that do not belong to an event log.
    """

    job_id: str
    began: float
    last: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    hosts: dict[str, None] = field(default_factory=dict)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    resets: int = 0
    tells_commits: bool = True
    cut_at: float | None = None
    told: Booked | None = None
    exit_code: int | None = None
    message: str = ""
    skipped: int = 0
    version: str = ""

    @property
    def booked(self) -> Booked:
        """The job's time by category; for a log that was cut, as reported by its driver."""
        if self.cut_at is not None and self.told is not None:
            return replace(self.told, resets=self.resets)
        of_workers = (Category.JOINER_BOOT, Category.DRAINED)
        sums: dict[str, float] = {category.value: 0.0 for category in Category if category not in of_workers}
        for piece in self.pieces:
            sums[piece.kind] += (self.last if piece.until is None else piece.until) - piece.since
        if not self.tells_commits and not sums[Category.RECOMPUTED]:
            del sums[Category.RECOMPUTED]
        return Booked(sums, self.last if self.cut_at is None else self.cut_at, self.resets)

    @property
    def cut(self) -> str:
        """A sentence saying that its log was cut; "" if it was not."""
        if self.cut_at is None:
            return ""
        return "the log reached its size limit: later events are missing, except for goodput and the end"


class Reader:
    """Reads an event log line by line. Keeps the story of the last job, or of the requested one.

    Args:
        job: the beginning of a job's id; "" for the last job.
    """

    def __init__(self, job: str = "") -> None:
        self._wanted = job
        self.story: Story | None = None
        self._open = False  # whether the next events belong to that story
        self._skipped = 0
        self._zero = 0.0
        self._living: dict[str, Life] = {}
        self._members: frozenset[str] = frozenset()
        self._doing: JobActivity | None = None
        self._on_change: str | None = None
        self._trained_until: float | None = None
        self._has_trained = False
        self._changed_at = 0.0  # when the job's standing last changed, or a round was formed

    def read(self, lines: Iterable[bytes]) -> Story | None:
        """Read all lines. Returns the story; None if there is no such job."""
        for line in lines:
            self.take(line)
        if self.story is not None:
            self.story.skipped = self._skipped
        return self.story

    def take(self, line: bytes) -> None:
        """Read one line. An unreadable line is counted."""
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "job_started":
                self._begin(event)
            elif self._open and self.story is not None:
                at = max(_seconds(event["at_s"]) - self._zero, self.story.last)
                self._take(self.story, kind, event, at)
                self.story.last = at
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            self._skipped += 1

    def _begin(self, event: Mapping[str, Any]) -> None:
        job_id, began, zero = str(event["job_id"]), _seconds(event["time"]), _seconds(event["at_s"])
        self._open = job_id.startswith(self._wanted)
        if not self._open:
            return
        self._zero, self._living, self._members = zero, {}, frozenset()
        self._doing, self._on_change, self._trained_until, self._has_trained = None, None, None, False
        self._changed_at = 0.0
        version = str(event.get("version", ""))
        self.story = Story(job_id, began, version=version, pieces=[Piece(Category.START, 0.0)])

    def _take(self, story: Story, kind: str, event: Mapping[str, Any], at: float) -> None:
        match kind:
            case "phase":
                self._phase(story, event, at)
            case "stood_still":
                stood_s, ended = _seconds(event["stood_s"]), at - _seconds(event.get("ended_s", 0.0))
                if not event.get("trained"):
                    _rewrite(story.pieces, ended - stood_s, ended, Category.UNEXPLAINED)
                story.marks.append(Mark(ended, kind, f"the driver stood still for {stood_s:.0f} s"))
            case "took_over":
                text = f"another driver took over, after {_seconds(event['away_s']):.1f} s without a driver"
                story.marks.append(Mark(at, kind, text))
                for key in event["pids"]:  # the driver that died may not have reported one of them
                    self._worker(story, "worker_started", {"worker": key}, at)
            case "stalled" if self._doing is JobActivity.TRAINING:
                since = max(at - _seconds(event["stood_s"]), self._changed_at)
                _rewrite(story.pieces, since, at, Category.STALLED, only=Category.TRAINING)
                self._turn(story, Category.STALLED, at)
            case "stall_ended":
                if self._doing is JobActivity.TRAINING:
                    self._turn(story, Category.TRAINING, at)
                names = ", ".join(str(WorkerId.parse(str(key))) for key in event["waits_for"])
                for_whom = f", waiting for {names}" if names else ""
                text = f"stalled for {_seconds(event['stood_s']):.1f} s{for_whom}"
                story.marks.append(Mark(at, "notice", text))
            case "hosts_discovered":
                story.hosts.update(dict.fromkeys(map(str, event["hosts"])))
            case "host_ready":
                story.marks.append(Mark(at, kind, f"host {event['host']} is ready", str(event["host"])))
            case "host_lost":
                text = f"host {event['host']} is lost: {event['reason']}"
                story.marks.append(Mark(at, kind, text, str(event["host"])))
                for life in self._living.values():
                    if life.worker.hostname == event["host"]:
                        life.how = life.how or "lost with its host"
            case "notice":
                told = NoticeKind(event["kind"]).told
                story.marks.append(Mark(at, kind, f"round {event['round_id']} {told}: {event['reason']}"))
            case "round_formed":
                self._round(story, event, at)
            case "round_resumed":
                if story.rounds and story.rounds[-1].round_id == event["round_id"]:
                    commits = event["commits"]
                    story.rounds[-1].took_s = _seconds(event["took_s"])
                    story.rounds[-1].commit = None if commits is None else int(commits)
            case "sampled":
                story.samples.append(_sample(event, at))
            case "goodput":
                seconds = {str(name): _seconds(spent_s) for name, spent_s in event["seconds"].items()}
                story.told = Booked({Category.TRAINING.value: 0.0, **seconds}, _seconds(event["wall_s"]))
            case "log_cut" if story.cut_at is None:
                story.cut_at = story.pieces[-1].until = at
                story.marks.append(Mark(at, "notice", story.cut))
            case "job_ended" if event["exit_code"] == ExitCode.OTHER_DRIVER:
                story.marks.append(Mark(at, "notice", str(event["message"])))
            case "job_ended":
                story.exit_code, story.message = int(event["exit_code"]), str(event["message"])
                self._open = False
                for life in self._living.values():
                    life.ended_at = at
            case _ if "worker" in event:
                self._worker(story, kind, event, at)
            case _:
                pass

    def _phase(self, story: Story, event: Mapping[str, Any], at: float) -> None:
        doing, before = JobActivity(event["doing"]), self._doing
        if self._on_change == "restart" and event["on_change"] == "in-place":
            for piece in story.pieces:  # its workers have called init() only now
                if piece.kind in (Category.TRAINING, Category.RESET, Category.RECOMPUTED, Category.STALLED):
                    piece.kind = Category.START
            self._has_trained, self._trained_until, before, story.resets = False, None, None, 0
        self._doing, self._on_change = doing, event["on_change"]
        story.tells_commits = self._on_change == "in-place"
        if before is JobActivity.TRAINING and doing is not JobActivity.TRAINING:
            self._trained_until = at
            story.resets += doing in (JobActivity.FORMING, JobActivity.WAITING_FOR_SLOTS)
        self._has_trained = self._has_trained or doing is JobActivity.TRAINING
        category = Category.RESET if self._has_trained else Category.START
        if doing is JobActivity.TRAINING:
            category = Category.TRAINING
        elif doing is JobActivity.WAITING_FOR_SLOTS:
            category = Category.WAITING_FOR_SLOTS
        elif doing in (JobActivity.FINISHING, JobActivity.ENDED):
            category = Category.IDLE
        self._changed_at = at
        self._turn(story, category, at)

    @staticmethod
    def _turn(story: Story, category: Category, at: float) -> None:
        """Begin a piece of another category, unless the log was cut before."""
        if story.cut_at is None and story.pieces[-1].kind != category:
            story.pieces[-1].until = at
            story.pieces.append(Piece(category, at))

    def _round(self, story: Story, event: Mapping[str, Any], at: float) -> None:
        ranks = {str(member["worker"]): int(member["rank"]) for member in event["members"]}
        lost_s = event["lost_s"]
        since_commit_s = event.get("since_commit_s", lost_s)
        commit = int(event["commits"]) if event["old_size"] and event["backend"] not in (None, "horovod") else None
        cause, old = str(event["cause"]), int(event["old_size"])
        formed = Round(int(event["round_id"]), at, len(ranks), old, cause, commit)
        if event["backend"] is None:
            formed.took_s = _seconds(event["formed_in_s"])
        if lost_s is not None:
            formed.lost_s = _seconds(lost_s)
            if self._doing is JobActivity.TRAINING:
                self._trained_until = at  # a loss and the round after it are one step: this event comes first
            if since_commit_s and self._trained_until is not None:
                until, within_s = self._trained_until, _seconds(since_commit_s)
                _rewrite(story.pieces, until - within_s, until, Category.RECOMPUTED, only=Category.TRAINING)
        self._changed_at = at
        if self._doing is JobActivity.TRAINING:
            self._turn(story, Category.TRAINING, at)
        story.rounds.append(formed)
        story.sizes.append((at, len(ranks)))
        for key in sorted(self._members - ranks.keys()):
            if key in self._living and self._living[key].pieces[-1].kind == WORKS:
                self._living[key].turn(WAITS, at)
        for key, rank in ranks.items():
            life = self._living.get(key)
            if life is not None:
                life.rank = rank
                if life.pieces[-1].kind != DRAINED:
                    life.turn(WORKS, at)
        self._members = frozenset(ranks)

    def _worker(self, story: Story, kind: str, event: Mapping[str, Any], at: float) -> None:
        key = str(event["worker"])
        worker = WorkerId.parse(key)
        if kind == "worker_started":
            if key in self._living and self._living[key].ended_at is None:
                return  # also reported at a takeover
            story.hosts.setdefault(worker.hostname)
            life = self._living[key] = Life(worker, [Piece(BOOTS, at)])
            story.lives.append(life)
            return
        known = self._living.get(key)
        if known is None:
            return
        match kind:
            case "worker_ready" if self._on_change == "no-rounds":
                known.turn(WORKS, at)
            case "worker_ready" if self._doing is JobActivity.TRAINING:
                known.turn(WAITS, at)
            case "worker_drained":
                known.turn(WORKS if event["undone"] else DRAINED, at)
            case "worker_dismissed" | "worker_stopped":
                known.turn(ENDS, at)
                known.how = known.how or f"asked to end: {event['reason']}"
            case "worker_dying":
                known.how = str(event["how"])
                known.turn(ENDS, at)
                story.marks.append(Mark(at, kind, f"worker {worker} {event['how']}", worker.hostname))
            case "worker_hung":
                story.marks.append(Mark(at, kind, f"worker {worker} hangs: {event['reason']}", worker.hostname))
                known.how = f"hung: {event['reason']}"
            # Reports, by a driver that monitors steps, of workers that delay the others.
            case "worker_suspected":
                story.marks.append(Mark(at, "stall", f"worker {worker}: {event['why']}", worker.hostname))
            case "straggler":
                slower = _seconds(event["own_s"]) / max(_seconds(event["median_s"]), 1e-9)
                text = f"worker {worker} takes {slower:.2f} times as long for a step as the others"
                story.marks.append(Mark(at, "stall", text, worker.hostname))
            case "worker_exited":
                known.ended_at = known.pieces[-1].until = at
                code = int(event["returncode"])
                if code and not known.how and not event.get("expected"):
                    known.how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
                    story.marks.append(Mark(at, "worker_dying", f"worker {worker}: {known.how}", worker.hostname))
                del self._living[key]
            case _:
                pass


def _sample(event: Mapping[str, Any], at: float) -> Sample:
    """Parse a sample. Raises ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    figures = {str(name): _number(value) for name, value in event["figures"].items()}
    return Sample(
        at,
        steps_per_s=_number(event["steps_per_s"]),
        waiting=_number(event["waiting"]),
        cpu=_number(event["cpu"]),
        memory_bytes=_number(event["memory_bytes"]),
        gpu=_number(event["gpu"]),
        gpu_memory_bytes=_number(event["gpu_memory_bytes"]),
        workers=int(event["workers"]),
        figures=figures,
    )


def _number(value: Any) -> float | None:
    """Return a finite number; None for others. Raises TypeError or ValueError if it is not a number."""
    number = None if value is None else float(value)
    return None if number is None or not math.isfinite(number) else number


def _seconds(value: Any) -> float:
    """Return a time within the limit. Raises ValueError or TypeError for any other value."""
    seconds = float(value)
    if not abs(seconds) <= _MOST_S:  # also for nan
        raise ValueError(f"{seconds} s")
    return seconds


def _rewrite(pieces: list[Piece], since: float, until: float, kind: str, *, only: str | None = None) -> None:
    """Change the kind of all pieces between these times; with ``only``, just of that kind."""
    start = len(pieces)
    while start > 0 and (pieces[start - 1].until is None or (pieces[start - 1].until or 0.0) > since):
        start -= 1
    fresh: list[Piece] = []
    for piece in pieces[start:]:
        end = piece.until
        first, last = max(piece.since, since), until if end is None else min(end, until)
        if first >= last or (only is not None and piece.kind != only):
            fresh.append(piece)
            continue
        fresh += [Piece(piece.kind, piece.since, first)] if piece.since < first else []
        fresh.append(Piece(kind, first, last))
        if end is None or last < end:
            fresh.append(Piece(piece.kind, last, end))
    pieces[start:] = fresh
