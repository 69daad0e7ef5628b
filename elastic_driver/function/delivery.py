"""Transfers the call from the caller of ``elastic_driver.run`` to its workers, and their outcomes back, in the driver.

Owns the two routes ``call`` and ``outcome``, and the splitting into pieces. Unpickles nothing: the caller has pickled
the call and unpickles the outcomes; each outcome comes from a worker over a mutually authenticated connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from elastic_driver.errors import RendezvousProtocolError, with_path
from elastic_driver.function.outcome import outcome_path
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import PIECE_BYTES, CallReply
from elastic_driver.rendezvous.routes import WORKER, Route, RouteRequest, Routes
from elastic_driver.system.file_writer import FileWriter

# How long the end of the job waits until all outcomes are in the caller's folder.
_FLUSH_S = 60.0
# 8 TB: more than any machine's memory. A wrong number must not allocate a list of that many pieces.
_MOST_PIECES = 1 << 20
_log = logging.getLogger("elastic_driver.function")


class Delivery:
    """Serves the workers of one job. Its routes are called on the event loop; files are written in a thread.

    Args:
        call: the pickled call for the workers to make.
        folder: the caller's folder, for the outcomes.
    """

    def __init__(self, call: bytes, folder: Path) -> None:
        self._call = memoryview(call)
        self._folder = folder
        self._arriving: dict[WorkerId, _Outcome] = {}
        self._writer = FileWriter("elastic-driver-outcomes")

    @property
    def routes(self) -> Routes:
        """``GET call`` returns the number of pieces, ``GET call/N`` one; ``POST outcome/N/TOTAL`` accepts one."""
        return (
            Route("GET", "call", WORKER, self._count_call),
            Route("GET", "call/*", WORKER, self._give_call),
            Route("POST", "outcome/*/*", WORKER, self._take_outcome),
        )

    def close(self) -> None:
        """Block until all outcomes received are in the folder, or for a minute."""
        self._writer.close(_FLUSH_S)

    @property
    def _pieces(self) -> int:
        return -(-len(self._call) // PIECE_BYTES)

    def _count_call(self, request: RouteRequest) -> CallReply:
        return CallReply(self._pieces)

    def _give_call(self, request: RouteRequest) -> tuple[int, bytes]:
        (number,) = _numbers(request.path)
        if number >= self._pieces:
            raise RendezvousProtocolError(f"cannot send piece {number} of a call of {self._pieces} pieces")
        return 200, bytes(self._call[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])

    def _take_outcome(self, request: RouteRequest) -> tuple[int, bytes]:
        number, total = _numbers(request.path)
        worker, piece = request.identity.worker, request.body
        is_last = number == total - 1
        if not number < total <= _MOST_PIECES or len(piece) > PIECE_BYTES or (len(piece) < PIECE_BYTES and not is_last):
            raise RendezvousProtocolError(
                f"cannot accept {len(piece)} bytes as piece {number} of {total} of an outcome"
            )
        assert worker is not None  # the route is for workers
        outcome = self._arriving.get(worker)
        if outcome is None:
            path = outcome_path(self._folder, len(self._arriving), worker)
            outcome = self._arriving[worker] = _Outcome(worker, path, total)
        if total != outcome.total:
            raise RendezvousProtocolError(
                f"cannot accept an outcome of {total} pieces: its earlier pieces announced {outcome.total}"
            )
        if number not in outcome.missing:
            return 204, b""  # received before, but its answer was lost
        if not self._writer.put(lambda: outcome.write(number, piece), len(piece)):
            return 429, b""
        outcome.missing.discard(number)
        if not outcome.missing:
            self._writer.put(outcome.finish)
        return 204, b""


class _Outcome:
    """An outcome that is being written to the folder.

    Attributes:
        total: the number of its pieces.
        missing: the pieces not yet received. Used by the event loop; all else by the writing thread.
    """

    def __init__(self, worker: WorkerId, path: Path, total: int) -> None:
        self._worker = worker
        self._path = path
        self._part = path.with_name(f".{path.name}")
        self._is_spoilt = False
        self.total = total
        self.missing = set(range(total))

    def write(self, number: int, piece: bytes) -> None:
        """Write a piece at its offset in a temporary file."""

        def write() -> None:
            descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(number * PIECE_BYTES)
                file.write(piece)

        self._try(write)

    def finish(self) -> None:
        """Rename the temporary file to its final name."""
        self._try(lambda: self._part.replace(self._path))

    def _try(self, work: Callable[[], object]) -> None:
        if self._is_spoilt:
            return
        try:
            work()
        except OSError as error:
            self._is_spoilt = True
            _log.warning("cannot store the result of worker %s: %s", self._worker, with_path(error))


def _numbers(path: tuple[str, ...]) -> tuple[int, ...]:
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in path):
        raise RendezvousProtocolError(f"cannot read {'/'.join(path)!r} as the number of a piece")
    return tuple(map(int, path))
