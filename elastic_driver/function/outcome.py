"""What comes of a worker of ``elastic_driver.run``: what its call returned, or what it raised.

Owns the two shapes, and their files in the caller's folder. Knows nothing of how workers are run. What users' code made
is pickled by itself, so that an outcome can be read where that cannot.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from elastic_driver.hosts import WorkerId

RESTARTED = "restarted"
"""The word in a worker's command line that says that it has its rank from its start."""
ENV_OUTCOMES = "ELASTIC_DRIVER_OUTCOMES"
"""Names the folder of a node whose workers leave their outcomes there, since their caller is on that node."""
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
class Place:
    """A worker that has raised.

    Attributes:
        worker: its key.
        round_id: the round that it was started for.
        rank: its rank there.
        local_rank: its place on its host.
        pid: of its process.
        time: when, unix seconds.
    """

    worker: str
    round_id: int
    rank: int
    local_rank: int
    pid: int
    time: float


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised, or what it returned cannot be pickled.

    Attributes:
        error: the exception, pickled by cloudpickle; None when it cannot be.
        kind: the name of its class.
        traceback: for people.
        place: who raised it, for those who ask.
    """

    error: bytes | None
    kind: str
    traceback: str
    place: Place | None = None


Outcome = Returned | Raised


def outcome_path(folder: Path, number: int, worker: WorkerId) -> Path:
    """Where the outcome of a worker is, that was the so-and-so-many-th to come."""
    return folder / f"{_PREFIX}{number:08d}-{quote(worker.key, safe='')}"


def keep(folder: Path, worker: WorkerId, outcome: Outcome) -> None:
    """Writes the outcome of a worker there. Later ones are read after it."""
    path = outcome_path(folder, time.time_ns(), worker)
    written = path.with_name(f".{path.name}")
    written.write_bytes(pickle.dumps(outcome))
    written.replace(path)


def read_all(folder: Path) -> list[Outcome]:
    """All outcomes in the folder, in the order in which they came."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{_PREFIX}*"))]
