"""The outcome of a worker of ``elastic_driver.run``: the result of its call, or the exception that it raised.

Owns the two shapes, and their files in the caller's folder. Does not know how workers are run. Objects from users' code
are pickled separately, so that an outcome can be read even where they cannot be unpickled.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from elastic_driver.hosts import WorkerId

RESTARTED = "restarted"
"""The command-line argument of a worker that has its rank from its start."""
ENV_OUTCOMES = "ELASTIC_DRIVER_OUTCOMES"
"""The folder for the outcomes of a node's workers, set if their caller is on that node."""
_PREFIX = "outcome-"


@dataclass(frozen=True, slots=True)
class Returned:
    """The call returned.

    Attributes:
        round_id: the last round in which the worker took part.
        rank: its rank in that round.
        size: the number of workers in that round.
        value: the result of the call, pickled by cloudpickle.
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
        round_id: the round for which it was started.
        rank: its rank in that round.
        local_rank: its slot's index on its host.
        pid: of its process.
        time: when it raised, unix seconds.
    """

    worker: str
    round_id: int
    rank: int
    local_rank: int
    pid: int
    time: float


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised an exception, or its result cannot be pickled.

    Attributes:
        error: the exception, pickled by cloudpickle; None if it cannot be pickled.
        kind: the name of its class.
        traceback: its text, for users.
        place: the worker that raised it; None if unknown.
    """

    error: bytes | None
    kind: str
    traceback: str
    place: Place | None = None


Outcome = Returned | Raised


def outcome_path(folder: Path, number: int, worker: WorkerId) -> Path:
    """Return the path for a worker's outcome, given its number in order of arrival."""
    return folder / f"{_PREFIX}{number:08d}-{quote(worker.key, safe='')}"


def keep(folder: Path, worker: WorkerId, outcome: Outcome) -> None:
    """Write the outcome of a worker to the folder. Outcomes are read in the order in which they were written."""
    path = outcome_path(folder, time.time_ns(), worker)
    written = path.with_name(f".{path.name}")
    written.write_bytes(pickle.dumps(outcome))
    written.replace(path)


def read_all(folder: Path) -> list[Outcome]:
    """Read all outcomes in the folder, in the order in which they arrived."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{_PREFIX}*"))]
