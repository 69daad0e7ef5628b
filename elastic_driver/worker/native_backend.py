"""The native module's contexts behind the Collectives protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elastic_driver import native_loader
from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.collectives import CONTEXT_SCOPE, GLOBAL, Bytes, Exchange, Group, ReduceOp

_OP_NAMES = {ReduceOp.SUM: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max", ReduceOp.PRODUCT: "product"}


class NativeCollectives:
    """Collectives over ``elastic_driver._native``.

    Raises:
        ImportError: the module cannot be loaded.
    """

    def __init__(self, groups: Sequence[Group], address: str) -> None:
        self._native: Any = native_loader.load()
        everyone = next(group for group in groups if group.name == GLOBAL)
        self._rank, self._size = everyone.index, len(everyone.members)
        with self._failures("prepare its contexts"):
            self._contexts: Any = self._native.ContextGroup(
                [(group.name, list(group.members), group.index) for group in groups], host=address
            )

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._native.CollectiveError as error:
            raise HorovodInternalError(f"rank {self._rank} cannot {what}: {error}") from error

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """See Collectives."""
        with self._failures("connect to its peers"):
            blob = self._contexts.prepare()
            blobs = exchange(CONTEXT_SCOPE, key=self._rank, count=self._size, value=blob)
            self._contexts.connect(blobs, timeout_s)

    def allreduce(self, group: str, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """See Collectives."""
        with self._failures("finish an allreduce"):
            self._contexts.allreduce(group, data, dtype, _OP_NAMES[op], timeout_s)

    def broadcast(self, group: str, data: Bytes, root: int, *, timeout_s: float) -> None:
        """See Collectives."""
        with self._failures("finish a broadcast"):
            self._contexts.broadcast(group, data, root, timeout_s)

    def allgather(self, group: str, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """See Collectives."""
        with self._failures("finish an allgather"):
            self._contexts.allgather(group, data, output, list(counts), timeout_s)

    def barrier(self, group: str, *, timeout_s: float) -> None:
        """See Collectives."""
        with self._failures("finish a barrier"):
            self._contexts.barrier(group, timeout_s)

    def abort(self, reason: str) -> None:
        """See Collectives."""
        self._contexts.abort(reason)

    def close(self) -> None:
        """See Collectives."""
        self._contexts.close()

    def abandon(self) -> None:
        """See Collectives. The native module knows its process."""
