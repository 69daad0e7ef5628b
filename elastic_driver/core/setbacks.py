"""The no-progress rule: which rounds were setbacks, how long to pause after them, and when the job is given up.

A setback is a round that a worker's own failure ended (an exception, an exit code, a signal of its own making, a hang)
and that came no further than one before it. What happens to a job from outside is none: hosts that are lost, drained or
removed, and deaths by others' signals. Further means further than ever, and not than the last time: a script that
fails at the same step for ever finishes the same steps before it each time.

Pure values; :mod:`elastic_driver.core.intake` notes what happens, :mod:`elastic_driver.core.membership` has it judged
when the round is over. decisions/0018 says why the rule is as it is.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, replace

from elastic_driver.core.events import Fault
from elastic_driver.core.moments import Moment
from elastic_driver.hosts import WorkerId
from elastic_driver.words import LONG_ROUND_S, counted, pause_s

# What the system sends a process for what it did itself. All other signals are somebody else's: the machine's shutdown,
# the scheduler, a person.
_OWN_SIGNALS = frozenset(
    (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)
# A shell, and many handlers of signals, end with 128 and the signal's number instead.
_OUTSIDE_CODES = frozenset(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
)
# How long a round of restarted workers has to run until it is one that trained: what fails before may never do.
START_S = 60.0
# How a process of Python ends that an exception ends.
_BY_ITS_ERROR = "exited with code 1"
# What trying again does not mend.
_LASTING = frozenset(("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError"))
# Of an error in a sentence, characters.
_LONGEST_ERROR = 300
# Addresses, process ids, steps and times differ in errors that are the same.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def fault_of(returncode: int | None, *, out_of_memory: bool = False) -> Fault:
    """Whose doing it is that a process ends so.

    Args:
        returncode: its exit code, or minus the number of the signal; None when it dumps its core, which says as much.
        out_of_memory: whether the OOM killer took it. It would take its successor as well, where that does the same.
    """
    if returncode is None or out_of_memory:
        return Fault.OWN
    if returncode < 0:
        return Fault.OWN if -returncode in _OWN_SIGNALS else Fault.OUTSIDE
    return Fault.OUTSIDE if returncode in _OUTSIDE_CODES else Fault.OWN


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's failure, for messages.

    Attributes:
        worker: whose.
        rank: its rank in the round; None before its first.
        how: what happened to it, in words: "exited with code 1".
        error: what it said of it, one line; "" for nothing.
        where: the line of the user's code; "" when that is not known.
        role: what it is, in words, where that is no worker; else "".
        at: when it was: when its code raised the error, where that is known; None until it is noted.
    """

    worker: WorkerId
    rank: int | None
    how: str
    error: str = ""
    where: str = ""
    role: str = ""
    at: Moment | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.who}{rank} {self.how}"

    @classmethod
    def said(cls, worker: WorkerId, rank: int | None, how: str, error: str, where: str, role: str = "") -> Failure:
        """With what a worker said, as one line of a bounded length."""
        return cls(worker, rank, how, " ".join(error.split())[:_LONGEST_ERROR], where[:_LONGEST_ERROR], role)

    def is_before(self, other: Failure) -> bool:
        """Whether it was earlier. Who raises an error may take longer to end than those whom it reaches.

        Two that lie closer together than the times that their agents' messages took may be the other way round.
        """
        return self.at is not None and other.at is not None and self.at < other.at

    @property
    def who(self) -> str:
        """Whose it is, in words."""
        return self.role or f"worker {self.worker}"

    @property
    def told(self) -> str:
        """As the cause of a new round."""
        return f"{self.who} {self.how}{self.error and f' ({self.error})'}"

    @property
    def full(self) -> str:
        """With the error, which comes first where it is one of a line of code; then whose it was."""
        if not self.error or not self.where:
            return f"{self}{self.error and f': {self.error}'}{self.where and f' (at {self.where})'}"
        rank = f"rank {self.rank} on {self.worker.hostname}"
        who = self.role or (f"worker {self.worker}" if self.rank is None else rank)
        how = "" if self.how == _BY_ITS_ERROR else f", {self.how}"
        return f"{self.error} ({self.where}), {who}{how}"

    @property
    def is_lasting(self) -> bool:
        """Whether the same code on the same machine would surely fail so again."""
        return self.error.partition(":")[0] in _LASTING

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same error at the same place, on whatever worker."""
        mine, its = (_VARYING.sub("#", f"{one.how}\n{one.error}") for one in (self, other))
        return mine == its and self.where == other.where


@dataclass(frozen=True, slots=True)
class RoundSoFar:
    """What the present round has shown, for the judgement at its end. Nothing of it lives on in the next.

    Attributes:
        moved: whether it has come further than ever.
        excused: whether anything from outside had part in its end.
        failure: the first failure of their own making among its members, by when it was.
        complaint: the first of its members that lost the round and goes on. Nothing but a consequence when a member
            failed or something came from outside.
        raised: whether that member's own code raised the error, and not its collective.
        until: when the pause after it ends; None until its end was judged.
        began: when all of its restarted workers ran; None until then, and for others.
    """

    moved: bool = False
    excused: bool = False
    failure: Failure | None = None
    complaint: Failure | None = None
    raised: bool = False
    until: Moment | None = None
    began: Moment | None = None


@dataclass(frozen=True, slots=True)
class Setbacks:
    """How far the training has come, and how often in a row it has come no further.

    Attributes:
        commits, steps: the furthest it has ever been: the most commits, and the most operations finished beyond them;
            of the present training, where a script has several.
        count: setbacks in a row.
        last: the failure that ended the last of them.
        one_error, one_rank: whether that was the same error each time, and the same rank.
        trained: whether a round of restarted workers has ever run for a while.
        present: the round that is not over, or not judged.
    """

    commits: int = 0
    steps: int = 0
    count: int = 0
    last: Failure | None = None
    one_error: bool = True
    one_rank: bool = True
    trained: bool = False
    present: RoundSoFar = field(default_factory=RoundSoFar)

    def came_to(self, commits: int, steps: int) -> Setbacks:
        """A member of the present round has so many commits, and has finished so many operations since."""
        if (commits, steps) <= (self.commits, self.steps):
            return self
        return replace(self, commits=commits, steps=steps, present=replace(self.present, moved=True))

    def begin(self, now: float) -> Setbacks:
        """The present round, of restarted workers, has begun."""
        return replace(self, present=replace(self.present, began=now))

    def over(self, now: float) -> Setbacks:
        """The present round was over then. One of restarted workers that ran for long has come further.

        They may tell of nothing, and count anew each time what they tell of.
        """
        began = self.present.began
        after = self if self.is_start(now) else replace(self, trained=True)
        if began is None or now - began < LONG_ROUND_S:
            return after
        return replace(after, present=replace(self.present, moved=True))

    def is_start(self, now: float) -> bool:
        """Whether no round of restarted workers has run for a while yet, nor does the present one."""
        began = self.present.began
        return not self.trained and (began is None or now - began < START_S)

    def ran_long(self) -> Setbacks:
        """Whoever has failed, where nobody tells of progress, had run for long before."""
        return replace(self, present=replace(self.present, moved=True))

    def another_training(self, commits: int) -> Setbacks:
        """A member of the present round has ended a training and begins another, whose commits are counted anew."""
        return replace(self, commits=commits, steps=0, present=replace(self.present, moved=True))

    def failed(self, failure: Failure, fault: Fault) -> Setbacks:
        """A member of the present round has failed."""
        if fault is Fault.OUTSIDE:
            return self.excuse()
        first = self.present.failure
        if first is not None and not failure.is_before(first):
            return self
        return replace(self, present=replace(self.present, failure=failure))

    def complained(self, failure: Failure, *, raised: bool) -> Setbacks:
        """A member has lost the round, and lives. Who raised the error knew of it before those whom it reached."""
        if self.present.complaint is not None and (self.present.raised or not raised):
            return self
        return replace(self, present=replace(self.present, complaint=failure, raised=raised))

    def excuse(self) -> Setbacks:
        """Something from outside had part in the end of the present round."""
        return self if self.present.excused else replace(self, present=replace(self.present, excused=True))

    def judged(self, now: float, pause_range_s: tuple[float, float]) -> Setbacks:
        """The present round is over, and all of its members have been heard."""
        present = self.present
        cause = None if present.excused else present.failure or present.complaint
        if present.moved:
            return Setbacks(self.commits, self.steps, trained=self.trained, present=replace(present, until=now))
        if cause is None:
            return replace(self, present=replace(present, until=now))
        before = self.last
        return replace(
            self,
            count=self.count + 1,
            last=cause,
            one_error=self.one_error and (before is None or cause.is_like(before)),
            one_rank=self.one_rank and (before is None or cause.rank == before.rank),
            present=replace(present, until=now + pause_s(self.count + 1, pause_range_s)),
        )

    def next_round(self) -> Setbacks:
        """A round begins."""
        return replace(self, present=RoundSoFar())

    def told(self, *, has_commits: bool) -> str:
        """All of them in words: how often, how far, who, how, and whether it was the same each time.

        Args:
            has_commits: whether the workers tell of commits; else they may tell of steps.
        """
        if self.one_error:
            alike = "the same error each time" + ("" if self.one_rank else ", but not on the same rank")
        else:
            is_one = self.one_rank and self.last is not None and self.last.rank is not None
            alike = "with different errors, of which this is the last" + (", all on the same rank" if is_one else "")
        beyond = f" and {counted(self.steps, 'operation')}" if self.steps else ""
        cause = self.last.full if self.last is not None else "no failure was recorded"
        far = f" and came no further than {'commit' if has_commits else 'step'} {self.commits}{beyond}"
        if not has_commits and not self.commits:
            far = ""
        return f"{cause}; the training failed {self.count} times in a row{far}, {alike}"


# What the programs of this package begin a line on stderr with that says why they end.
_OURS = "elastic_driver: "


def described(failure: Failure | None) -> str:
    """A failure as the reason for the end of a job."""
    if failure is None:
        return "no failure was recorded"
    # Without a line of code, its last words may have nothing to do with its end, but for those of a program of ours.
    return failure.full if failure.where or failure.error.startswith(_OURS) else str(failure)
