"""What a worker of ``elastic_driver.run`` leaves in the caller's folder: what its call returned, or what it raised.

Owns the two shapes and their files. Knows nothing of how workers are run. What users' code made is pickled by itself,
so that an outcome can be read where that cannot.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "outcome-"


@dataclass(frozen=True, slots=True)
class Returned:
    """The call returned.

    Attributes:
        round_id: the last round that the worker was in.
        rank: its rank there.
        size: the round's workers.
        value: what the call returned, pickled by cloudpickle.
    """

    round_id: int
    rank: int
    size: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised, or what it returned cannot be pickled.

    Attributes:
        error: the exception, pickled by cloudpickle; None when it cannot be.
        kind: the name of its class.
        traceback: for people.
        at: when, seconds of the machine's monotonic clock.
    """

    error: bytes | None
    kind: str
    traceback: str
    at: float


Outcome = Returned | Raised


def leave(folder: Path, name: str, outcome: Outcome) -> None:
    """Puts an outcome into the folder, whole or not at all.

    Args:
        folder: the caller's.
        name: different for each process.
        outcome: the worker's.
    """
    part = folder / f".{name}"
    part.write_bytes(pickle.dumps(outcome))
    part.replace(folder / f"{_PREFIX}{name}")


def read_all(folder: Path) -> list[Outcome]:
    """All outcomes in the folder, in no order."""
    return [pickle.loads(path.read_bytes()) for path in folder.glob(f"{_PREFIX}*")]
