"""Words that the core, the wire and the workers share. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Literal

ETCD = "etcd://"
"""What the name of a journal begins with that is in etcd, and in no folder."""


class ReadyCause(StrEnum):
    """Why a worker asks for the next round."""

    START = "start"  # first init() of this process
    HOSTS_UPDATED = "hosts_updated"  # interrupted at a commit, by the driver's notice
    INTERNAL_ERROR = "internal_error"  # a collective failed
    REINIT = "reinit"  # the user's code called shutdown() and init() again


class OnChange(StrEnum):
    """What a change of the membership means for the workers that stay: their kind. All that others ask of it is here.

    What is decided for each kind is in a module of its own (:mod:`elastic_driver.core.kinds`).
    """

    IN_PLACE = "in-place"  # they ask for the next round, and reset inside their running processes
    RESTART = "restart"  # all are ended, and started again for the next round with the ranks that they have there
    NO_ROUNDS = "no-rounds"  # nothing: each runs for itself, and no ranks are agreed

    @property
    def asks_for_rounds(self) -> bool:
        """Whether each worker asks for its next round, and watches for notices in the one that it has."""
        return self is OnChange.IN_PLACE

    @property
    def has_commits(self) -> bool:
        """Whether workers keep the training's state in memory and tell of commits, at which they may leave."""
        return self is OnChange.IN_PLACE

    @property
    def restarts(self) -> bool:
        """Whether all workers are started together for each round, with the ranks that they have there."""
        return self is OnChange.RESTART

    @property
    def has_rounds(self) -> bool:
        """Whether ranks are agreed at all."""
        return self is not OnChange.NO_ROUNDS


class Sizing(StrEnum):
    """By which flags the number of workers was given. Messages name these."""

    NP = "np"
    NPROC = "nproc-per-node"
    NNODES = "nnodes"


class Ending(StrEnum):
    """How a worker that is no longer wanted is ended."""

    USUAL = "usual"  # SIGTERM (at the job's end: what Workers.end_by says), after --grace-time SIGKILL
    PLANNED = "planned"  # the same, after --drain-timeout: it may checkpoint
    BROKEN = (
        "broken"  # its peers are lost: its connections are shut too, so that it hangs in none; SIGKILL at once after
    )


class Backend(StrEnum):
    """What carries the collectives of a round. All members of a round use one."""

    NATIVE = "native"  # elastic_driver._native
    TORCH = "torch"  # torch.distributed's own Gloo over our key-value store
    HOROVOD = "horovod"  # Horovod's own library, which speaks its older protocol


class NoticeKind(StrEnum):
    """What the driver tells the members of a round through their watch request."""

    NONE = "none"
    HOSTS_UPDATED = "hosts_updated"  # leave the round at the next commit, together
    ABORT = "abort"  # the round is broken: end blocked collectives now
    JOB_OVER = "job_over"  # the job ends; the process is about to be stopped

    @property
    def told(self) -> str:
        """In words, of a round: "round 2 ..."."""
        return _NOTICES[self]


_NOTICES = {
    NoticeKind.NONE: "goes on",
    NoticeKind.HOSTS_UPDATED: "ends at its next commit",
    NoticeKind.ABORT: "is over",
    NoticeKind.JOB_OVER: "is over, and the job with it",
}


class Cloud(StrEnum):
    """Whose metadata endpoint says that a machine goes away (--spot-notices)."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


class ExitCode(IntEnum):
    """What ``elasticrun`` exits with. Interruptions add 128 + signal number to these."""

    SUCCESS = 0
    USER_CODE_FAILED = 1
    BAD_USAGE = 2  # argparse's, too
    TOO_FEW_SLOTS = 3
    RESET_LIMIT = 4
    INTERNAL_ERROR = 70  # sysexits.h EX_SOFTWARE
    OTHER_DRIVER = 75  # sysexits.h EX_TEMPFAIL: another driver has the job


# The no-progress rule (decisions/0018), of workers (core/setbacks.py) and of drivers (system/parent.py): how many
# setbacks in a row end the job, and the shortest and longest pause between two of them. With the pauses the ten take at
# least four minutes (2 + 4 + 8 + 16 + 32 + 60 + 60 + 60 s): a fault that is not the script's, such as a switch that
# boots, is over by then, and a script that fails at the same step each time has wasted little.
SETBACKS_LIMIT = 10
PAUSE_RANGE_S = (2.0, 60.0)
# What tells of no progress, and ran for so long, is taken to have made some. What fails ten times in a row within less
# is broken, whatever it does.
LONG_ROUND_S = 600.0


def pause_s(count: int, range_s: tuple[float, float]) -> float:
    """How long to wait after so many setbacks in a row.

    None after the first: what fails once mostly does not fail twice, and others wait to train on.
    """
    low, high = range_s
    return 0.0 if count < 2 else min(low * 2.0 ** min(count - 2, 60), high)


class HangAction(StrEnum):
    """What comes of a worker that is proven to hang."""

    END = "end"
    WARN = "warn"


class StragglerAction(StrEnum):
    """What comes of a worker that is slower than the others."""

    WARN = "warn"
    DRAIN = "drain"


def in_seconds(value: float, digits: int = 3) -> str:
    """With so many significant digits, and never as 1e+03: "0.0123 s", "1.5 s", "400 s", "3600 s"."""
    return f"{float(f'{value:.{digits}g}'):g} s"


def counted(number: int, noun: str) -> str:
    """How many of something: "0 workers", "1 worker", "4,096 workers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


MOST_BARS = 8
"""Progress bars that are shown at a time: those of the lowest ranks."""

ALL_BARS, NO_BARS = "all", "none"
"""Whose are shown; else that of one rank."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The newest state of a line that a worker redraws.

    Attributes:
        stream: of the worker.
        label: what stands in the prefix of its output: its rank.
        data: as a line, with prefix and newline; b"" where there is no such line any more.
        is_line: whether it is one more of the lines that keep it, one now and then.
    """

    stream: Literal["stdout", "stderr"]
    label: str
    data: bytes
    is_line: bool = False


def is_chosen(label: str, whose: str) -> bool:
    """Whether a worker is one of those whose progress is asked for: "all", "none" or one rank's."""
    return whose == ALL_BARS or (whose != NO_BARS and label == whose)


def may_be_shown(label: str, whose: str) -> bool:
    """Whether a worker's progress may stand on a terminal, where not all find room."""
    return is_chosen(label, whose) and (whose != ALL_BARS or not label.isdecimal() or int(label[:9]) < MOST_BARS)
