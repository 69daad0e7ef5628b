"""Findings on the workers: suspected hangs, proven ones, stragglers, stalls of the round.

Owns these classes. Most are reported to the user unchanged; the head of the package lists the effects of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from elastic_driver.hosts import WorkerId


class Kind(StrEnum):
    """The reason for a suspicion."""

    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # a debugger has stopped it, or holds it while others wait
    LACKS = "awaited"  # others wait for it in a collective
    DEADLOCK = "deadlock"  # others wait for it, and it waits itself
    IDLE = "idle"  # no worker waits, and it does nothing
    UNHEARD = "unheard"  # its agent is silent, though their machine responds


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """A worker is suspected to hang.

    Attributes:
        worker, rank: the worker; no rank if it is in no round.
        kind: the reason, in one word.
        why: the reason, in words.
        collective: the one that others wait in; "" if unknown.
        stack: its Python stacks; "" if they cannot be taken.
        frames: the innermost ones of its main thread, "train.py:12 in step".
        still_s: how long it has made no progress.
        limit_s, limit: the limit that this exceeds, and how it is derived.
        ends_s: it is killed when the proof is complete, at the earliest after this time; None if it is only named.
        more: how many other workers are in the same case.
        spared: why it is not killed, if neither --hang-action nor the kind is the reason, in words; otherwise "".
    """

    worker: WorkerId
    rank: int | None
    kind: Kind
    why: str
    collective: str
    stack: str
    frames: Sequence[str]
    still_s: float
    limit_s: float
    limit: str
    ends_s: float | None
    more: int
    spared: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCleared:
    """A suspected worker does not hang: why, and how long its standstill lasted."""

    worker: WorkerId
    rank: int | None
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Spared:
    """A worker is proven to hang, but is not killed: ``why`` it hangs, and the ``reason`` to spare it, in words."""

    worker: WorkerId
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class StackWanted:
    """A request for the worker's stack, to be returned with this number."""

    worker: WorkerId
    number: int


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """A worker is slower than the others.

    Attributes:
        worker, rank: the worker.
        own_s, median_s: a step's time without waiting, seconds: its own, and the median of all.
        against_others: the median as a share of its own; 1.0 is as fast as the others, less is slower.
        against_past: the same with its own best so far.
        steps: the number of steps measured.
    """

    worker: WorkerId
    rank: int
    own_s: float
    median_s: float
    against_others: float
    against_past: float
    steps: int


@dataclass(frozen=True, slots=True)
class StragglerGone:
    """A straggler is no longer slower than the others: why, and for how long it was."""

    worker: WorkerId
    rank: int
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """No member of the round makes progress.

    Attributes:
        stood_s: for how long already.
        waits_for: the members that the others wait for; empty if all wait for each other, or none waits.
    """

    stood_s: float
    waits_for: Sequence[WorkerId]


@dataclass(frozen=True, slots=True)
class StallEnded:
    """A stall is over.

    Attributes:
        stood_s: how long it lasted.
        waits_for: as in Stalled.
        resumed: whether the members made progress again; otherwise the round has ended.
    """

    stood_s: float
    waits_for: Sequence[WorkerId]
    resumed: bool


@dataclass(frozen=True, slots=True)
class NotDrained:
    """A slow worker should be drained, but is not yet: why, in words."""

    worker: WorkerId
    why: str


ReportedFinding: TypeAlias = WorkerSuspected | WorkerCleared | StragglerFound | StragglerGone | Stalled | StallEnded
"""The findings that are reported to the user unchanged."""
