"""Enums, constants and small formatters that the core, the wire and the workers share. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Literal

ETCD = "etcd://"
"""The prefix of a journal's name that is in etcd instead of a folder."""


class ReadyCause(StrEnum):
    """Why a worker asks for the next round."""

    START = "start"  # first init() of this process
    HOSTS_UPDATED = "hosts_updated"  # interrupted at a commit, by the driver's notification
    INTERNAL_ERROR = "internal_error"  # a collective failed
    REINIT = "reinit"  # the user's code called shutdown() and init() again


class OnChange(StrEnum):
    """The kind of workers: what a change of the membership means for those that stay.

    The decisions for each kind are in a module of its own (:mod:`elastic_driver.core.kinds`).
    """

    IN_PLACE = "in-place"  # they ask for the next round, and reset inside their running processes
    RESTART = "restart"  # all are stopped, and started again for the next round with their ranks there
    NO_ROUNDS = "no-rounds"  # nothing: each runs independently, without ranks

    @property
    def asks_for_rounds(self) -> bool:
        """Whether each worker asks for its next round, and watches for notifications during its current one."""
        return self is OnChange.IN_PLACE

    @property
    def has_commits(self) -> bool:
        """Whether workers keep the training's state in memory and report commits, at which they may leave."""
        return self is OnChange.IN_PLACE

    @property
    def restarts(self) -> bool:
        """Whether all workers are started together for each round, with their ranks there."""
        return self is OnChange.RESTART

    @property
    def has_rounds(self) -> bool:
        """Whether workers have ranks at all."""
        return self is not OnChange.NO_ROUNDS


class Sizing(StrEnum):
    """The flags that gave the number of workers. Messages name them."""

    NP = "np"
    NPROC = "nproc-per-node"
    NNODES = "nnodes"


class Ending(StrEnum):
    """How to stop a worker that is no longer needed."""

    USUAL = "usual"  # SIGTERM (at the job's end: the signal of Workers.end_by), after --grace-time SIGKILL
    PLANNED = "planned"  # the same, after --drain-timeout: it may checkpoint
    BROKEN = (
        "broken"  # its peers are lost: its connections are shut down, too, so that none blocks it; then SIGKILL at once
    )


class Backend(StrEnum):
    """The library that carries the collectives of a round, the same for all its members."""

    NATIVE = "native"  # elastic_driver._native
    TORCH = "torch"  # torch.distributed's own Gloo over our key-value store
    HOROVOD = "horovod"  # Horovod's own library, which speaks its older protocol


class NoticeKind(StrEnum):
    """Notifications from the driver to the members of a round, in answer to their watch requests."""

    NONE = "none"
    HOSTS_UPDATED = "hosts_updated"  # leave the round at the next commit, together
    ABORT = "abort"  # the round is broken: end blocked collectives now
    JOB_OVER = "job_over"  # the job ends; the process is about to be stopped

    @property
    def told(self) -> str:
        """The notification in words, to follow "round 2"."""
        return _NOTICES[self]


_NOTICES = {
    NoticeKind.NONE: "continues",
    NoticeKind.HOSTS_UPDATED: "ends at its next commit",
    NoticeKind.ABORT: "is over",
    NoticeKind.JOB_OVER: "is over, and the job with it",
}


class Cloud(StrEnum):
    """The cloud whose metadata endpoint announces the reclaiming of a machine (--spot-notices)."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


class ExitCode(IntEnum):
    """Exit codes of a job's ``elasticrun``. After an interruption it is 128 + the signal's number instead."""

    SUCCESS = 0
    USER_CODE_FAILED = 1
    BAD_USAGE = 2  # as argparse's; also hosts, a command or a chief that cannot be used
    TOO_FEW_SLOTS = 3
    RESET_LIMIT = 4
    INTERNAL_ERROR = 70  # sysexits.h EX_SOFTWARE; also a journal that cannot be written
    OTHER_DRIVER = 75  # sysexits.h EX_TEMPFAIL: another driver has the job, or is to take it over


# The no-progress rule (decisions/0018), of workers (core/setbacks.py) and of drivers (system/parent.py): how many
# setbacks in a row end the job, and the shortest and longest pause between two of them. With the pauses, ten take at
# least four minutes (2 + 4 + 8 + 16 + 32 + 60 + 60 + 60 s): a fault outside the script, such as a rebooting switch, is
# over by then, and a script that fails at the same step each time has wasted little.
SETBACKS_LIMIT = 10
PAUSE_RANGE_S = (2.0, 60.0)
# A round or run that reports no progress, but lasted this long, counts as having made some. A script that fails ten
# times in a row within less is broken.
LONG_ROUND_S = 600.0


def pause_s(count: int, range_s: tuple[float, float]) -> float:
    """Return how long to wait after this many setbacks in a row, seconds.

    Zero after the first: most failures do not recur, and the other workers wait to continue training.
    """
    low, high = range_s
    return 0.0 if count < 2 else min(low * 2.0 ** min(count - 2, 60), high)


class HangAction(StrEnum):
    """What to do about a worker that is proven to hang."""

    END = "end"
    WARN = "warn"


class StragglerAction(StrEnum):
    """What to do about a worker that is slower than the others."""

    WARN = "warn"
    DRAIN = "drain"


def in_seconds(value: float, digits: int = 3) -> str:
    """Format a duration with this many significant digits, never as 1e+03: "0.0123 s", "1.5 s", "400 s", "3600 s"."""
    return f"{float(f'{value:.{digits}g}'):g} s"


def counted(number: int, noun: str) -> str:
    """Format a number of things: "0 workers", "1 worker", "4,096 workers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


MOST_BARS = 8
"""The limit of progress bars shown at a time: those of the lowest ranks."""

ALL_BARS, NO_BARS = "all", "none"
"""The ranks whose bars are shown; any other value is one rank."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The newest state of a progress bar: a line that a worker redraws.

    Attributes:
        stream: of the worker.
        label: in the prefix of its output: its rank.
        data: as a line, with prefix and newline; b"" if the bar is gone.
        is_line: whether to keep it as a line of the output, as happens now and then.
    """

    stream: Literal["stdout", "stderr"]
    label: str
    data: bytes
    is_line: bool = False


def is_chosen(label: str, whose: str) -> bool:
    """Whether a worker is among the chosen ones: "all", "none" or one rank."""
    return whose == ALL_BARS or (whose != NO_BARS and label == whose)


def may_be_shown(label: str, whose: str) -> bool:
    """Whether to show a worker's progress on a terminal, which has no room for all."""
    return is_chosen(label, whose) and (whose != ALL_BARS or not label.isdecimal() or int(label[:9]) < MOST_BARS)
