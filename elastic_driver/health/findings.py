"""What is found of the workers: who may hang, who does, who is slow, whether the round goes on at all.

Owns these words. Most are told to the user as they are; the head of the folder says what becomes of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from elastic_driver.hosts import WorkerId


class Kind(StrEnum):
    """Why somebody is suspected."""

    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # a debugger has stopped it, or holds it while others wait
    LACKS = "awaited"  # others wait for it in a collective
    DEADLOCK = "deadlock"  # others wait for it, and it waits itself
    IDLE = "idle"  # nobody waits, and it does nothing
    UNHEARD = "unheard"  # its agent says nothing, though their machine answers


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """A worker is suspected to hang.

    Attributes:
        worker, rank: which; no rank for one that is in no round.
        kind: why, in a word.
        why: in words.
        collective: that others wait in; "" where that is not known.
        stack: its Python stacks; "" where they cannot be had.
        frames: the innermost ones of its main thread, "train.py:12 in step".
        still_s: for how long it has not gone on.
        limit_s, limit: which limit that exceeds, and how that is derived.
        ends_s: it is ended when the proof is complete, at the earliest after so long; None where it is only named.
        more: how many other workers are in the same case.
        spared: why it is not ended, where that is not --hang-action's doing nor the kind's, in words; else "".
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
    """A worker that was suspected does not hang: why, and for how long it has stood still."""

    worker: WorkerId
    rank: int | None
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Spared:
    """It is proven to hang, and is not ended nevertheless: why the one, and why the other, in words."""

    worker: WorkerId
    why: str
    reason: str


@dataclass(frozen=True, slots=True)
class StackWanted:
    """The worker's stack is to be taken, and to be given back with this number."""

    worker: WorkerId
    number: int


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """A worker is slower than the others.

    Attributes:
        worker, rank: which.
        own_s, median_s: a step's time without waiting, seconds: its own, and the median of all.
        against_others: the median as a share of its own; 1.0 is as fast as the others, less is slower.
        against_past: likewise its own best so far.
        steps: over how many steps.
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
    """A worker that was slower than the others is so no more: why, and how long it was."""

    worker: WorkerId
    rank: int
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """No member of the round goes on.

    Attributes:
        stood_s: for so long already.
        waits_for: the members that the others wait for; empty where all wait for each other, or nobody waits.
    """

    stood_s: float
    waits_for: Sequence[WorkerId]


@dataclass(frozen=True, slots=True)
class StallEnded:
    """A stall is over.

    Attributes:
        stood_s: how long it was.
        waits_for: as before.
        resumed: whether the members went on; else the round has ended.
    """

    stood_s: float
    waits_for: Sequence[WorkerId]
    resumed: bool


@dataclass(frozen=True, slots=True)
class NotDrained:
    """A slow worker is to be drained, and is not yet: why, in words."""

    worker: WorkerId
    why: str


Told: TypeAlias = WorkerSuspected | WorkerCleared | StragglerFound | StragglerGone | Stalled | StallEnded
"""What is told to the user as it is."""
