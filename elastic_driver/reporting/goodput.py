"""Goodput: accounts for the seconds of a job, and of each of its workers, by category.

Owns the books, and the state from which they are kept. Each stretch of time has a beginning and an end, both reported
by the chronicle, and one category; none is computed as the remainder of others. A stretch with no known cause is
``unexplained``, and is measured as such. Does no I/O and words nothing but its one-line summary; the time since the
last commit, when a round breaks, comes from its workers.

``scripts/goodput`` computes the same book from the event log, and shares no code with this module, so that each can
be checked against the other. docs/reference/goodput.md explains the categories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from elastic_driver.core.events import Command, PublishRound
from elastic_driver.core.standing import JobActivity, Standing, standing_of
from elastic_driver.core.state import State
from elastic_driver.health.findings import Stalled, StallEnded
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.happenings import (
    Happening,
    JobStarted,
    PhaseChanged,
    ProcessDying,
    ProcessEnded,
    ProcessStarted,
    RoundFormed,
    StoodStill,
    WorkerDismissed,
    WorkersDrained,
    WorkersReady,
    WorkersStopped,
)
from elastic_driver.words import OnChange

# Stretches of a book whose category can still change: the loss of training is known when the next round is formed, and
# a standstill of the driver when it ends.
_RECENT = 32


class Category(StrEnum):
    """The categories of time. The words are used in the event log and in ``elasticrun status --json``."""

    START = "start"
    TRAINING = "training"
    WAITING_FOR_SLOTS = "waiting_for_slots"
    RESET = "reset"
    STALLED = "stalled"
    RECOMPUTED = "recomputed"
    JOINER_BOOT = "joiner_boot"
    DRAINED = "drained"
    IDLE = "idle"
    UNEXPLAINED = "unexplained"


_ZEROS: Mapping[str, float] = {category.value: 0.0 for category in Category}
_ZEROS_OF_JOB: Mapping[str, float] = {
    category.value: 0.0 for category in Category if category not in (Category.JOINER_BOOT, Category.DRAINED)
}
_RECOMPUTED = Category.RECOMPUTED.value


@dataclass(frozen=True, slots=True)
class BookKept:
    """A book in the form kept in the journal. Times are seconds since the job began.

    category: the present category.
    since: the time since which it has been the present one.
    sums: final amounts, seconds by category.
    recent: stretches whose category may still change: category, beginning, end.
    """

    category: Category
    since: float
    sums: dict[str, float]
    recent: tuple[tuple[Category, float, float], ...]


class Book:
    """Accounts for the time of one job or worker, by category. Times are seconds of one clock, and never decrease.

    Args:
        category: the first category.
        began: when the account begins.
    """

    __slots__ = ("_recent", "_sums", "category", "since")

    def __init__(self, category: Category, began: float) -> None:
        self.category = category
        self.since = began
        self._sums: dict[str, float] = {}
        self._recent: deque[tuple[Category, float, float]] = deque()

    def kept(self, began: float) -> BookKept:
        """Return the book for the journal of a job that began at this time."""
        recent = tuple((each, since - began, until - began) for each, since, until in self._recent)
        return BookKept(self.category, self.since - began, dict(self._sums), recent)

    @classmethod
    def of(cls, kept: BookKept, began: float) -> Book:
        """Restore a book from :meth:`kept`, on a clock on which the job began at this time."""
        book = cls(kept.category, kept.since + began)
        book._sums = dict(kept.sums)
        book._recent = deque((each, since + began, until + began) for each, since, until in kept.recent)
        return book

    def turn(self, category: Category, now: float) -> None:
        """Book time under this category from now on."""
        if category is not self.category:
            self._close(now)
            self.category = category

    def _close(self, now: float) -> None:
        if now > self.since:
            self._recent.append((self.category, self.since, now))
            while len(self._recent) > _RECENT:
                self._fold()
        self.since = now

    def _fold(self) -> None:
        """Fold the oldest stretch into the sums. The last training stays: its loss may become known much later."""
        index = 0
        if self._recent[0][0] is Category.TRAINING:
            index = 1 if sum(stretch[0] is Category.TRAINING for stretch in self._recent) == 1 else 0
        old, began, ended = self._recent[index]
        del self._recent[index]
        self._sums[old] = self._sums.get(old, 0.0) + ended - began

    def rewrite(self, began: float, ended: float, into: Category, *, only: Category | None = None) -> None:
        """Rebook the time between these points under another category; with ``only``, just time of that one."""
        self._close(ended if ended > self.since else self.since)
        was, self._recent = self._recent, deque()
        for old, since, until in was:
            first, last = max(since, began), min(until, ended)
            if first >= last or (only is not None and old is not only):
                self._recent.append((old, since, until))
                continue
            for each, start, stop in ((old, since, first), (into, first, last), (old, last, until)):
                if start < stop:
                    self._recent.append((each, start, stop))

    def rewrite_all(self, old: Category, into: Category, now: float) -> None:
        """Rebook all time of one category under another."""
        self._close(now)
        self._recent = deque((into if each is old else each, began, ended) for each, began, ended in self._recent)
        if old in self._sums:
            self._sums[into] = self._sums.get(into, 0.0) + self._sums.pop(old)

    def within(self, category: Category, began: float, ended: float) -> float:
        """Return how much of the time between these points was booked under a category, as far as not folded yet."""
        stretches = [*self._recent, (self.category, self.since, max(ended, self.since))]
        return sum(
            max(0.0, min(until, ended) - max(since, began)) for kind, since, until in stretches if kind is category
        )

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds of each category until now; categories without any are omitted."""
        sums = dict(self._sums)
        for category, began, ended in self._recent:
            sums[category] = sums.get(category, 0.0) + ended - began
        if now > self.since:
            sums[self.category] = sums.get(self.category, 0.0) + now - self.since
        return sums


@dataclass(frozen=True, slots=True)
class Booked:
    """An amount of time by category.

    Attributes:
        seconds: by category, all that apply; a category whose amount cannot be known is omitted.
        wall_s: the total, seconds.
        resets: how often training was interrupted for another round.
    """

    seconds: Mapping[str, float]
    wall_s: float
    resets: int = 0

    @property
    def share(self) -> float:
        """The share of training in the total; 0 before there is any time."""
        return self.seconds[Category.TRAINING] / self.wall_s if self.wall_s > 0 else 0.0

    def told(self) -> str:
        """Word it: "goodput 97.3 %: training 1,234 s, reset 12.1 s (3), start 14.0 s, unexplained 0.2 s"."""
        first = (Category.TRAINING, Category.RESET, Category.STALLED, Category.RECOMPUTED)
        order = [*first, *(category for category in Category if category not in first)]
        parts = []
        for category in order:
            spent_s = self.seconds.get(category, 0.0)
            if category not in (Category.TRAINING, Category.UNEXPLAINED) and spent_s < 0.05:
                continue
            count = f" ({self.resets})" if category is Category.RESET else ""
            number = f"{spent_s:,.0f}" if spent_s >= 100 else f"{spent_s:.1f}"
            parts.append(f"{category.replace('_', ' ')} {number} s{count}")
        return f"goodput {100 * self.share:.1f} %: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class GoodputKept:
    """The job's book in the form kept in the journal, for a driver that takes the job over. Times as in BookKept.

    The workers' books are not kept: there are as many as workers.

    Attributes:
        age_s: the job's age when this was written, seconds.
        job: its book.
        has_trained: whether it had trained by then.
        trained_until: when the last training ended; None before there was any.
        lost_unknown: whether it may have lost an unknown amount of training.
        resets: see Booked.
        doing, on_change: parts of its standing then, as far as reported.
    """

    age_s: float
    job: BookKept
    has_trained: bool
    trained_until: float | None
    lost_unknown: bool
    resets: int
    doing: JobActivity | None = None
    on_change: OnChange | None = None

    @classmethod
    def of_new(cls) -> Self:
        """Return the book of a job at its beginning."""
        return cls(0.0, Book(Category.START, 0.0).kept(0.0), False, None, False, 0)


@dataclass(frozen=True, slots=True)
class Turned:
    """A step of a driver that has died, possibly not yet in its book.

    Attributes:
        at: when the step was made, in the job's time.
        standing: the job's standing after it.
        rounds: the rounds that it has formed, each as its ``since_commit_s`` (RoundFormed).
    """

    at: float
    standing: Standing
    rounds: tuple[float | None, ...] = ()

    @classmethod
    def by(cls, at: float, state: State, commands: Iterable[Command]) -> Self:
        """Make one from a step's new state and its commands."""
        rounds = tuple(command.lost_s for command in commands if isinstance(command, PublishRound))
        return cls(at, standing_of(state), rounds)

    def follows(self, before: Turned | None) -> bool:
        """Return whether this step, after the given one, changed the job's standing or formed a round."""
        return before is None or bool(self.rounds) or self.standing != before.standing


class _Place(StrEnum):
    """A worker's situation, for its own book."""

    BOOTING = "booting"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"


@dataclass(slots=True)
class _Worker:
    book: Book
    began: float
    place: _Place = _Place.BOOTING
    drained: bool = False


class Goodput:
    """Keeps the books of a job and of its living workers. A Listener.

    Args:
        clock: returns the time of the present happening, or the present time between two of them.

    Attributes:
        turns: how often the job's standing has changed, or a round was formed.
    """

    live = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._job: Book | None = None
        self._workers: dict[WorkerId, _Worker] = {}
        self._doing: JobActivity | None = None
        self._on_change: OnChange | None = None
        self._has_trained = False
        self._trained_until: float | None = None
        self._changed_at = 0.0  # when its standing last changed, or a round was formed
        self._is_stalled = False
        self._lost_unknown = False
        self._resets = 0
        self.turns = 0

    # --- queries ---------------------------------------------------------------------------------------------------

    def job(self) -> Booked | None:
        """Return the job's time so far; None before it has begun."""
        if self._job is None or self._began is None:
            return None
        now = self._clock()
        return Booked(self._filled(self._job.seconds(now), _ZEROS_OF_JOB), now - self._began, self._resets)

    def kept(self) -> GoodputKept | None:
        """Return the state to keep in the journal; None before the job has begun."""
        if self._job is None or self._began is None:
            return None
        began = self._began
        until = None if self._trained_until is None else self._trained_until - began
        age_s = self._clock() - began
        return GoodputKept(
            age_s,
            self._job.kept(began),
            self._has_trained,
            until,
            self._lost_unknown,
            self._resets,
            self._doing,
            self._on_change,
        )

    def go_on(self, kept: GoodputKept, ago_s: float, since: Sequence[tuple[float, Turned]] = ()) -> None:
        """Continue the book of a driver that has died. Must be called before all other methods.

        Until the next happening the job is assumed to do what it did at its last step: its workers need no driver to
        train.

        Args:
            kept: the book.
            ago_s: how long ago the book was kept, seconds.
            since: the driver's steps that are not in the book, each with its time, seconds after the book was kept.
        """
        began = self._clock() - ago_s - kept.age_s
        self._began, self._job = began, Book.of(kept.job, began)
        self._has_trained, self._lost_unknown, self._resets = kept.has_trained, kept.lost_unknown, kept.resets
        self._trained_until = None if kept.trained_until is None else kept.trained_until + began
        self._doing, self._on_change = kept.doing, kept.on_change
        for later_s, turned in since:
            at, doing, on_change = began + kept.age_s + later_s, turned.standing.doing, turned.standing.on_change
            for since_commit_s in turned.rounds:
                self._take_round((), since_commit_s, at)
            if (doing, on_change) != (self._doing, self._on_change):
                self._take_standing(doing, on_change, at)

    def worker(self, worker: WorkerId) -> Booked | None:
        """Return a living worker's time so far; None if the worker is unknown."""
        one = self._workers.get(worker)
        if one is None:
            return None
        now = self._clock()
        return Booked(self._filled(one.book.seconds(now), _ZEROS), now - one.began)

    def take_out(self, worker: WorkerId) -> Booked | None:
        """Return the final time of a worker that has ended, and forget it; None if the worker is unknown."""
        booked = self.worker(worker)
        self._workers.pop(worker, None)
        return booked

    def trained_s(self, within_s: float) -> float:
        """Return how much of the last seconds of the round that has ended was training."""
        until = self._over_at(self._clock())
        return (
            0.0 if self._job is None or until is None else self._job.within(Category.TRAINING, until - within_s, until)
        )

    def _over_at(self, now: float) -> float | None:
        """Return when the last training ended; None before there was any."""
        # A loss and the round after it come from one step: the round is reported first.
        return now if self._doing is JobActivity.TRAINING else self._trained_until

    def _filled(self, sums: Mapping[str, float], zeros: Mapping[str, float]) -> dict[str, float]:
        filled = dict(zeros)
        filled.update(sums)
        # A worker that reports no commits loses an unknown part of its training at a failure.
        unknown = self._lost_unknown or (self._on_change is not None and not self._on_change.has_commits)
        if unknown and filled[_RECOMPUTED] < 1e-6:
            del filled[_RECOMPUTED]
        return filled

    # --- happenings ------------------------------------------------------------------------------------------------

    def hear(self, happening: Happening) -> None:
        """Book the time of a happening (Listener)."""
        match happening:
            case JobStarted():
                if self._job is None:
                    self._began = self._clock()
                    self._job = Book(Category.START, self._began)
            case PhaseChanged(_, doing, on_change):
                self._take_standing(doing, on_change, self._clock())
            case ProcessStarted(worker):
                now = self._clock()
                self._workers[worker] = _Worker(Book(Category.UNEXPLAINED, now), now)
                self._turn_worker(worker)
            case WorkersReady(workers):
                for worker in workers:
                    self._place(worker, _Place.READY, of=(_Place.BOOTING,))
            case RoundFormed():
                workers = [member.worker for member in happening.members]
                self._take_round(workers, happening.since_commit_s, self._clock())
            case WorkersDrained(workers, undone):
                for worker in workers:
                    if worker in self._workers:
                        self._workers[worker].drained = not undone
                        self._turn_worker(worker)
            case WorkerDismissed(worker) | ProcessDying(worker):
                self._place(worker, _Place.LEAVING)
            case WorkersStopped(stops):
                for worker, _ in stops:
                    self._place(worker, _Place.LEAVING)
            case ProcessEnded(worker):
                self._turn_worker(worker)
            case StoodStill(stood_s, ended_s, trained):
                until = self._clock() - ended_s
                for book in [] if trained else self._books():
                    book.rewrite(until - stood_s, until, Category.UNEXPLAINED)
            case Stalled(stood_s):
                self._take_stall(stood_s)
            case StallEnded():
                self._is_stalled = False
                self._turn_all(self._clock())
            case _:
                pass

    def _books(self) -> list[Book]:
        return [*filter(None, (self._job,)), *(worker.book for worker in self._workers.values())]

    def _take_stall(self, stood_s: float) -> None:
        """Book a stall: no worker has made progress for this long, nor will until the next happening."""
        if self._doing is not JobActivity.TRAINING:
            return
        now, self._is_stalled = self._clock(), True
        since = max(now - stood_s, self._changed_at)
        if since < now:
            for book in self._books():
                book.rewrite(since, now, Category.STALLED, only=Category.TRAINING)
        self._turn_all(now)

    def _take_standing(self, doing: JobActivity, on_change: OnChange, now: float) -> None:
        before = self._doing
        self.turns += 1
        self._changed_at, self._is_stalled = now, False
        if self._on_change is not None and self._on_change.restarts and on_change.asks_for_rounds:
            # Its workers have called init(): everything until then was start.
            self._has_trained = False
            for book in self._books():
                for category in (Category.TRAINING, Category.RECOMPUTED, Category.RESET, Category.STALLED):
                    book.rewrite_all(category, Category.START, now)
            self._resets, self._lost_unknown, self._trained_until = 0, False, None
        self._on_change, self._doing = on_change, doing
        self._has_trained = self._has_trained or doing is JobActivity.TRAINING
        if before is JobActivity.TRAINING and doing is not JobActivity.TRAINING:
            self._trained_until = now
            self._resets += doing in (JobActivity.FORMING, JobActivity.WAITING_FOR_SLOTS)
        self._turn_all(now)

    def _take_round(self, workers: Sequence[WorkerId], since_commit_s: float | None, now: float) -> None:
        members = set(workers)
        self.turns += 1
        self._lost_unknown = self._lost_unknown or since_commit_s is None
        self._trained_until = self._over_at(now)
        self._changed_at, self._is_stalled = now, False
        for worker, one in self._workers.items():
            if one.place is _Place.MEMBER:
                self._take_back(one.book, since_commit_s or 0.0)
            if worker in members:
                one.place = _Place.MEMBER
            elif one.place is _Place.MEMBER:
                one.place = _Place.READY  # it waits, in case a member is lost
        if self._job is not None:
            self._take_back(self._job, since_commit_s or 0.0)
        self._turn_all(now)

    def _take_back(self, book: Book, within_s: float) -> None:
        """Rebook the training in the last seconds of the round as recomputed."""
        until = self._trained_until
        if until is not None and within_s > 0:
            book.rewrite(until - within_s, until, Category.RECOMPUTED, only=Category.TRAINING)

    # --- the choice of a category ----------------------------------------------------------------------------------

    def _of_job(self) -> Category:
        match self._doing:
            case JobActivity.TRAINING:
                return Category.STALLED if self._is_stalled else Category.TRAINING
            case JobActivity.WAITING_FOR_SLOTS:
                return Category.WAITING_FOR_SLOTS
            case JobActivity.FINISHING | JobActivity.ENDED:
                return Category.IDLE
            case JobActivity.FORMING | None:
                return Category.RESET if self._has_trained else Category.START

    def _of_worker(self, one: _Worker) -> Category:
        if one.drained:
            return Category.DRAINED
        if one.place is _Place.LEAVING or self._doing is JobActivity.ENDED:
            return Category.IDLE
        runs = self._doing in (JobActivity.TRAINING, JobActivity.FINISHING)
        has_rounds = self._on_change is None or self._on_change.has_rounds
        if runs and one.place is _Place.BOOTING:
            return Category.JOINER_BOOT
        if runs and one.place is _Place.READY and has_rounds:
            return Category.IDLE
        # A worker that is still running after another has finished is training.
        return Category.TRAINING if self._doing is JobActivity.FINISHING else self._of_job()

    def _turn_all(self, now: float) -> None:
        if self._job is not None:
            self._job.turn(self._of_job(), now)
        for worker in self._workers.values():
            worker.book.turn(self._of_worker(worker), now)

    def _turn_worker(self, worker: WorkerId) -> None:
        one = self._workers.get(worker)
        if one is not None:
            one.book.turn(self._of_worker(one), self._clock())

    def _place(self, worker: WorkerId, place: _Place, *, of: tuple[_Place, ...] = tuple(_Place)) -> None:
        one = self._workers.get(worker)
        if one is not None and one.place in of:
            one.place = place
            self._turn_worker(worker)
