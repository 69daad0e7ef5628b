"""The interface of a backend: three collectives on flat buffers of one group, and their abort.

Owns the types (operations, dtypes, groups), the protocol of backends, and the backend of a job of one process. Knows
nothing of rounds, threads or the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

CONTEXT_SCOPE = "contexts"  # where members exchange their addresses

# Element types that every backend carries. The layer above converts or rejects others.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""(nbytes,) uint8, C-contiguous: the memory of an array or tensor, whatever its dtype."""


class ReduceOp(IntEnum):
    """How a reduction combines the ranks' values. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True, slots=True)
class Group:
    """Some members of the round, in an order that all of them agree on.

    Attributes:
        name: of the keys by which its members meet; the same on all of them.
        members: global ranks.
        index: this process's index among them.
    """

    name: str
    members: tuple[int, ...]
    index: int


class Exchange(Protocol):
    """Puts this member's value into a scope and returns the values of all, in order of their keys. Blocks."""

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]: ...


class Meeting(Exchange, Protocol):
    """How members find each other before they are connected. Both calls block."""

    def share(self, scope: str, value: bytes | None) -> bytes:
        """Give one member's value to all others; a member that waits for it passes None."""


class Collectives(Protocol):
    """One process's collectives of one group.

    One thread calls the collectives, one at a time, in the same order on all members. ``abort`` may be called from any
    other thread at any time and ends the blocked call. Every failure is a ``HorovodInternalError``. Reductions are SUM,
    MIN, MAX or PRODUCT: the caller divides for averages.
    """

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Connect to the peers. Blocks until all are connected or the time limit has passed."""

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """Reduce ``data`` in place, over the group; its elements have the named dtype."""

    def broadcast(self, data: Bytes, root: int, *, timeout_s: float) -> None:
        """Overwrite ``data`` with that of the member with this index in the group."""

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """Fill ``output`` with the members' data, end to end; counts are their sizes in bytes."""

    def abort(self, reason: str) -> None:
        """Make this and every later call fail. Never blocks long."""

    def close(self) -> None:
        """Free sockets and threads. Called once, by the thread that calls the collectives."""

    def abandon(self) -> None:
        """In a forked child: leave the parent's resources untouched, even when this object is deleted."""


class SoloCollectives:
    """The collectives of a job of one process: the result is the input."""

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Do nothing: there are no peers."""

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """Leave the data unchanged."""

    def broadcast(self, data: Bytes, root: int, *, timeout_s: float) -> None:
        """Leave the data unchanged."""

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """Copy the data."""
        output[:] = data

    def abort(self, reason: str) -> None:
        """Do nothing: nothing blocks."""

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def abandon(self) -> None:
        """Do nothing: no resources are held."""


def resolve_op(*, average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the reduction that a caller of Horovod's API selected; the default is Average.

    Raises:
        ValueError: both average and op were given.
        TypeError: op is not a ReduceOp.
    """
    if average is not None:
        if op is not None:
            raise ValueError("cannot use both average and op: average is the older spelling of op=Average or op=Sum")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"cannot reduce with {op!r}: op must be one of Average, Sum, Adasum, Min, Max, Product")
    return op


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Return the memory of a C-contiguous array, as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def divide_inplace(array: npt.NDArray[Any], divisor: int) -> None:
    """Divide by a number of ranks. Integers are divided exactly (int64 beyond 2**53 too) and rounded toward zero."""
    if divisor == 1:
        return
    if array.dtype.kind == "f":
        array /= array.dtype.type(divisor)
        return
    quotient = array // divisor
    quotient += (array < 0) & (quotient * divisor != array)
    array[...] = quotient
