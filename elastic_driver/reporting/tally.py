"""Counts what has happened to a job: the part of its metrics that its present state does not show.

Owns the counts and the few labels that distinguish them: text from a user's script, a host or a program never becomes
a label, so that their number is bounded. Does not know the format of scrapers
(:mod:`elastic_driver.reporting.metrics`). Durations are seconds.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.codec import Count, Seconds
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.happenings import (
    DiscoveryRan,
    DiskReported,
    Happening,
    HostLost,
    HostUnready,
    JobStarted,
    NoticeGiven,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    TookOver,
    WorkerHung,
)

RESET_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
DISCOVERY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROUND_CAUSES = (
    "start",
    "worker_hung",
    "host_lost",
    "worker_failed",
    "host_left_out",
    "drained",
    "hosts_removed",
    "slots_removed",
    "hosts_added",
    "slots_added",
    "reinit",
    "unchanged",
    "other",
)
FAILURE_CAUSES = ("exit_code", "signal", "hung", "host_lost")
# Folders that are tracked, as in the chronicle: new hosts may add new folders without end.
_MOST_FOLDERS = 64

# The first match is the label of a round with several causes: failures are listed before planned changes.
_IN_WORDS = (
    ("start", re.compile(r"start(;|$)")),
    ("worker_hung", re.compile(r".*\bworker \S+ hung\b", re.DOTALL)),
    ("host_lost", re.compile(r".*\blost with its host\b", re.DOTALL)),
    (
        "worker_failed",
        re.compile(
            r".*\b(host \S+ lost|worker \S+ (raised|lost its round|exited|killed|could not|did not|had not)|"
            r"parameter server \d+ .*(exited|killed|could not|did not)|more failures?\b)",
            re.DOTALL,
        ),
    ),
    ("host_left_out", re.compile(r".*\bleft out\b")),
    ("drained", re.compile(r".*\bdrained\b")),
    ("hosts_removed", re.compile(r".*\bhost \S+ (removed|left over)\b")),
    ("hosts_added", re.compile(r".*\bhost \S+ added\b")),
    ("reinit", re.compile(r".*\bcalled shutdown\(\) and init\(\) again\b")),
    ("unchanged", re.compile(r"hosts changed and changed back$")),
)
_SLOTS = re.compile(r"host \S+: (\d+) -> (\d+) slots?\b")


def cause_label(cause: str) -> str:
    """Return the one of :data:`ROUND_CAUSES` that fits a round's cause, a text, best."""
    found = next((label for label, pattern in _IN_WORDS if pattern.match(cause)), "")
    changes = [(int(old), int(new)) for old, new in _SLOTS.findall(cause)]
    if changes and found in ("", "hosts_added", "unchanged"):
        if any(new < old for old, new in changes):
            return "slots_removed"
        return found or "slots_added"
    return found or "other"


@dataclass(frozen=True, slots=True)
class DurationsKept:
    """A histogram in the form kept in the journal: the number in each bucket, and the sum, seconds."""

    counts: tuple[Count, ...]
    sum_s: Seconds


@dataclass(frozen=True, slots=True)
class TallyKept:
    """The counts in the form kept in the journal, for a driver that takes the job over. See Tally."""

    rounds: dict[str, Count]
    stalls: DurationsKept
    lost_s: float | None
    starts: Count
    restarts: Count
    failures: dict[str, Count]
    hosts_lost: Count
    hosts_unready: Count
    notices: dict[str, Count]
    warnings: Count
    takeovers: Count
    driverless_s: Seconds
    discovery: DurationsKept
    discovery_failures: Count


class Histogram:
    """Counts durations by length.

    Args:
        bounds: upper bound of each bucket, ascending; longer durations are counted, too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self._counts)

    def kept(self) -> DurationsKept:
        """Return the state to keep in the journal."""
        return DurationsKept(tuple(self._counts), self.sum_s)

    def go_on(self, kept: DurationsKept) -> None:
        """Continue counting from there. A state of a version with other buckets is ignored."""
        if len(kept.counts) == len(self._counts):
            self._counts, self.sum_s = list(kept.counts), kept.sum_s

    def cumulative(self) -> list[tuple[float, int]]:
        """Return for each bound, and for infinity, how many durations were at most that long."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class Tally:
    """Counts what happens. A Listener.

    Attributes:
        job_id: the job; "" before it has begun.
        rounds: formed so far, by cause.
        stalls: completed changes, from the change until all members trained again.
        stall_s: the total of these, seconds.
        lost_s: training lost by failures, as far as reported; None until it is reported.
        starts: processes of workers started.
        restarts: those of them in a slot that another process had before.
        failures: of workers, by cause.
        hosts_lost: hosts lost with all their workers.
        hosts_unready: times that a host could not be used.
        notices: to the members of a round, by kind.
        warnings: to the user.
        takeovers: drivers that have taken the job over from one that died.
        driverless_s: total time without a driver.
        discovery: runs of discovery, successful or not.
        discovery_failures: the failed ones of these.
        durable: by folder, the newest commit on disk, and the newest of the state.
        troubled: folders that the newest commits do not reach.
    """

    live = False

    def __init__(self) -> None:
        self.job_id = ""
        self.rounds: Counter[str] = Counter()
        self.stalls = Histogram(RESET_BUCKETS_S)
        self.lost_s: float | None = None
        self.starts = self.restarts = 0
        self.failures: Counter[str] = Counter()
        self.hosts_lost = self.hosts_unready = 0
        self.notices: Counter[str] = Counter()
        self.warnings = 0
        self.takeovers = 0
        self.driverless_s = 0.0
        self.discovery = Histogram(DISCOVERY_BUCKETS_S)
        self.discovery_failures = 0
        self.durable: dict[str, tuple[int, int]] = {}
        self.troubled: set[str] = set()
        self._hung: set[WorkerId] = set()
        self._present: tuple[int, bool] = (0, False)  # the round, and whether it followed another

    @property
    def stall_s(self) -> float:
        """The total of ``stalls``, seconds."""
        return self.stalls.sum_s

    def hear(self, happening: Happening) -> None:
        """Count a happening (Listener)."""
        match happening:
            case JobStarted(_, job_id):
                self.job_id = job_id
            case RoundFormed():
                self._count_round(happening)
            case RoundResumed(round_id, _, took_s):
                if self._present == (round_id, True):
                    self.stalls.add(took_s)
                    self._present = round_id, False
            case ProcessStarted(worker, again=False):
                self.starts += 1
                self.restarts += worker.attempt > 0
            case WorkerHung(worker):
                self._hung.add(worker)
            case ProcessEnded():
                self._count_end(happening)
            case HostLost():
                self.hosts_lost += 1
            case HostUnready():
                self.hosts_unready += 1
            case NoticeGiven(_, kind):
                self.notices[kind.value] += 1
            case TookOver(_, away_s):
                self.takeovers += 1
                self.driverless_s += away_s
            case Remark(_, True):
                self.warnings += 1
            case DiscoveryRan(took_s, failed):
                self.discovery.add(took_s)
                self.discovery_failures += failed
            case DiskReported():
                self._note_disk(happening)
            case _:
                pass

    def kept(self) -> TallyKept:
        """Return the state to keep in the journal."""
        return TallyKept(
            dict(self.rounds),
            self.stalls.kept(),
            self.lost_s,
            self.starts,
            self.restarts,
            dict(self.failures),
            self.hosts_lost,
            self.hosts_unready,
            dict(self.notices),
            self.warnings,
            self.takeovers,
            self.driverless_s,
            self.discovery.kept(),
            self.discovery_failures,
        )

    def go_on(self, kept: TallyKept) -> None:
        """Continue counting from the counts of a driver that has died. Must be called before all other methods."""
        for name in (
            *("lost_s", "starts", "restarts", "hosts_lost", "hosts_unready", "warnings"),
            *("takeovers", "driverless_s", "discovery_failures"),
        ):
            setattr(self, name, getattr(kept, name))
        self.rounds, self.failures, self.notices = Counter(kept.rounds), Counter(kept.failures), Counter(kept.notices)
        self.stalls.go_on(kept.stalls)
        self.discovery.go_on(kept.discovery)

    def _count_round(self, formed: RoundFormed) -> None:
        self.rounds[cause_label(formed.cause)] += 1
        follows = formed.old_size > 0
        self._present = formed.round_id, follows
        if formed.backend is None and follows:  # its members will not report that they train
            self.stalls.add(formed.formed_in_s)
            self._present = formed.round_id, False
        lost_s = getattr(formed, "lost_s", None)
        if lost_s is not None:
            self.lost_s = (self.lost_s or 0.0) + lost_s

    def _count_end(self, ended: ProcessEnded) -> None:
        hung = ended.worker in self._hung
        self._hung.discard(ended.worker)
        if hung:
            self.failures["hung"] += 1
        elif ended.expected or not ended.returncode:
            pass
        elif ended.how.startswith("lost with"):
            self.failures["host_lost"] += 1
        else:
            self.failures["signal" if ended.returncode < 0 else "exit_code"] += 1

    def _note_disk(self, said: DiskReported) -> None:
        folder, written, commits = said.folder, said.written, said.commits
        known = self.durable.pop(folder, (-1, 0))
        self.durable[folder] = max(known[0], written), commits
        (self.troubled.add if said.trouble else self.troubled.discard)(folder)
        if len(self.durable) > _MOST_FOLDERS:
            oldest = next(iter(self.durable))
            del self.durable[oldest]
            self.troubled.discard(oldest)
