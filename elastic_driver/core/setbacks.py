"""The no-progress rule: which rounds were setbacks, how long to pause after them, and when the job is given up.

A setback is a round that a worker's own failure ended (an exception, an exit code, a signal of its own making, a hang)
without progress beyond that of every earlier round. Failures from outside are not setbacks: lost, drained or removed
hosts, and deaths by others' signals. Progress means further than ever, not further than the last time: a script that
always fails at the same step finishes the same steps before it each time.

Pure values; :mod:`elastic_driver.core.intake` records what happens, :mod:`elastic_driver.core.membership` has it judged
when the round is over. decisions/0018 gives the reasons for the rule.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, replace

from elastic_driver.core.events import Fault
from elastic_driver.core.moments import Moment
from elastic_driver.hosts import WorkerId
from elastic_driver.words import LONG_ROUND_S, counted, pause_s

# Signals that the system sends a process for its own faults. All others come from elsewhere: the machine's shutdown,
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
# A shell, and many signal handlers, exit with 128 plus the signal's number instead.
_OUTSIDE_CODES = frozenset(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
)
# How long a round of restarted workers has to run to count as training: a script that fails earlier may never train.
START_S = 60.0
# The end of a Python process that raised an exception.
_BY_ITS_ERROR = "exited with code 1"
# Errors that a retry does not fix.
_LASTING = frozenset(("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError"))
# The longest error in a sentence, characters.
_LONGEST_ERROR = 300
# Addresses, process ids, steps and times differ between instances of the same error.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def fault_of(returncode: int | None, *, out_of_memory: bool = False) -> Fault:
    """Return who caused such an end of a process.

    Args:
        returncode: its exit code, or minus the number of the signal; None while it dumps its core, which implies a
            signal of its own making.
        out_of_memory: whether the OOM killer killed it. It would kill the successor as well, if that does the same.
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
        worker: the worker.
        rank: its rank in the round; None before its first.
        how: what happened to it, in words: "exited with code 1".
        error: its error message, one line; "" for none.
        where: the line of the user's code; "" if unknown.
        role: what it is, in words, if it is not a worker; otherwise "".
        at: when its code raised the error, or when the failure was recorded; None until it is recorded.
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
        """Create a failure with the worker's message, as one line of a bounded length."""
        return cls(worker, rank, how, " ".join(error.split())[:_LONGEST_ERROR], where[:_LONGEST_ERROR], role)

    def is_before(self, other: Failure) -> bool:
        """Return whether it was earlier. A worker that raises an error may end after those that it affects.

        Two that are closer together than the delays of their agents' messages may be in the wrong order.
        """
        return self.at is not None and other.at is not None and self.at < other.at

    @property
    def who(self) -> str:
        """Whose failure it is, in words."""
        return self.role or f"worker {self.worker}"

    @property
    def told(self) -> str:
        """The failure as the cause of a new round."""
        return f"{self.who} {self.how}{self.error and f' ({self.error})'}"

    @property
    def full(self) -> str:
        """The failure with its error, which comes first if it has a line of code; then whose it was."""
        if not self.error or not self.where:
            return f"{self}{self.error and f': {self.error}'}{self.where and f' (at {self.where})'}"
        rank = f"rank {self.rank} on {self.worker.hostname}"
        who = self.role or (f"worker {self.worker}" if self.rank is None else rank)
        how = "" if self.how == _BY_ITS_ERROR else f", {self.how}"
        return f"{self.error} ({self.where}), {who}{how}"

    @property
    def is_lasting(self) -> bool:
        """Whether the same code on the same machine would surely fail the same way again."""
        return self.error.partition(":")[0] in _LASTING

    def is_like(self, other: Failure) -> bool:
        """Return whether it is the same error at the same place, on any worker."""
        mine, its = (_VARYING.sub("#", f"{one.how}\n{one.error}") for one in (self, other))
        return mine == its and self.where == other.where


@dataclass(frozen=True, slots=True)
class RoundSoFar:
    """The outcome of the current round so far, for the judgment at its end. The next round keeps nothing of it.

    Attributes:
        moved: whether it has progressed further than ever.
        excused: whether anything from outside contributed to its end.
        failure: the earliest failure of its members through their own fault.
        complaint: the failure of the first member that lost the round and continues. Just a consequence if a member
            failed or something came from outside.
        raised: whether that member's own code raised the error, and not its collective.
        until: when the pause after it ends; None until its end was judged.
        began: when all of its restarted workers ran; None until then, and for other workers.
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
    """How far the training has come, and how many consecutive rounds made no progress.

    Attributes:
        commits, steps: the furthest progress ever: the most commits, and the most operations finished beyond them; of
            the current training, if a script has several.
        count: consecutive setbacks.
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
        """Record a member's progress in the current round: its commits, and the operations finished since."""
        if (commits, steps) <= (self.commits, self.steps):
            return self
        return replace(self, commits=commits, steps=steps, present=replace(self.present, moved=True))

    def begin(self, now: float) -> Setbacks:
        """Begin the current round, of restarted workers."""
        return replace(self, present=replace(self.present, began=now))

    def over(self, now: float) -> Setbacks:
        """End the current round at ``now``. A long round of restarted workers counts as progress.

        They may report no progress, or count it from 0 each time.
        """
        began = self.present.began
        after = self if self.is_start(now) else replace(self, trained=True)
        if began is None or now - began < LONG_ROUND_S:
            return after
        return replace(after, present=replace(self.present, moved=True))

    def is_start(self, now: float) -> bool:
        """Return whether no round of restarted workers, including the current one, has run for a while yet."""
        began = self.present.began
        return not self.trained and (began is None or now - began < START_S)

    def ran_long(self) -> Setbacks:
        """Count a long run before a failure as progress, if no progress is reported."""
        return replace(self, present=replace(self.present, moved=True))

    def another_training(self, commits: int) -> Setbacks:
        """Record that a member has ended a training and begins another, whose commits are counted anew."""
        return replace(self, commits=commits, steps=0, present=replace(self.present, moved=True))

    def failed(self, failure: Failure, fault: Fault) -> Setbacks:
        """Record a failure of a member of the current round."""
        if fault is Fault.OUTSIDE:
            return self.excuse()
        first = self.present.failure
        if first is not None and not failure.is_before(first):
            return self
        return replace(self, present=replace(self.present, failure=failure))

    def complained(self, failure: Failure, *, raised: bool) -> Setbacks:
        """Record a living member's loss of the round. One that raised the error itself takes precedence."""
        if self.present.complaint is not None and (self.present.raised or not raised):
            return self
        return replace(self, present=replace(self.present, complaint=failure, raised=raised))

    def excuse(self) -> Setbacks:
        """Record that something from outside contributed to the end of the current round."""
        return self if self.present.excused else replace(self, present=replace(self.present, excused=True))

    def judged(self, now: float, pause_range_s: tuple[float, float]) -> Setbacks:
        """Judge the current round, which is over, after the reports of all of its members."""
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
        """Begin a round."""
        return replace(self, present=RoundSoFar())

    def told(self, *, has_commits: bool) -> str:
        """Describe the setbacks: how many, how far, who, how, and whether it was the same each time.

        Args:
            has_commits: whether the workers report commits; otherwise they may report steps.
        """
        if self.one_error:
            alike = "the same error each time" + ("" if self.one_rank else ", but not on the same rank")
        else:
            is_one = self.one_rank and self.last is not None and self.last.rank is not None
            alike = "with different errors, this one last" + (", all on the same rank" if is_one else "")
        beyond = f" and {counted(self.steps, 'operation')}" if self.steps else ""
        cause = self.last.full if self.last is not None else "no failure was recorded"
        far = f" without getting past {'commit' if has_commits else 'step'} {self.commits}{beyond}"
        if not has_commits and not self.commits:
            far = ""
        return f"{cause}; the training failed {self.count} times in a row{far}, {alike}"


# The prefix of the line on stderr in which a program of this package says why it ends.
_OURS = "elastic_driver: "


def described(failure: Failure | None) -> str:
    """Describe a failure as the reason for the end of a job."""
    if failure is None:
        return "no failure was recorded"
    # Without a line of code, its last output may have nothing to do with its end, except for a program of ours.
    return failure.full if failure.where or failure.error.startswith(_OURS) else str(failure)
