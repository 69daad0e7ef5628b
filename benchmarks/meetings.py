"""How the ranks of a benchmark find each other without a driver: through pipes to the process that started them."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection


class PipeMeeting:
    """A rank's end. See :class:`elastic_driver.worker.engine.collectives.Meeting`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        raise AssertionError("the native engine needs no exchange of all ranks")

    def share(self, scope: str, value: bytes | None) -> bytes:
        self._pipe.send(value)
        return bytes(self._pipe.recv())


def meet(pipes: Sequence[Connection]) -> None:
    """The other end: hands what one rank shares to all of them."""
    values = [pipe.recv() for pipe in pipes]
    shared = next(value for value in values if value is not None)
    for pipe in pipes:
        pipe.send(shared)
