"""What a backend offers: three collectives on flat buffers of one group, and their end by force.

Owns the words (operations, dtypes, groups), the protocol that backends fulfil, and the backend of a job of one
process. Knows nothing of rounds, threads or the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

CONTEXT_SCOPE = "contexts"  # where members exchange their addresses

# Element types that every backend carries. Others are converted, or refused, by the layer above.
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
        name: of its keys, where its members meet; the same on all of them.
        members: global ranks.
        index: this process's place among them.
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
        """Gives one member's value to all others; None for those who wait for it."""


class Collectives(Protocol):
    """One group's collectives of one process.

    One thread calls the collectives, one at a time, in the same order on all members. ``abort`` may come from any
    other thread at any time and ends the call that blocks. Every failure is a ``HorovodInternalError``.
    Reductions are SUM, MIN, MAX or PRODUCT: averaging is the caller's.
    """

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Connects to the peers. Blocks until all are there or the time is up."""

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """Combines ``data``, in place, over the group; elements are of the named dtype."""

    def broadcast(self, data: Bytes, root: int, *, timeout_s: float) -> None:
        """Overwrites ``data`` with that of the member with this index in the group."""

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """Fills ``output`` with the members' data, end to end; counts are their bytes."""

    def abort(self, reason: str) -> None:
        """Makes this and every later call fail. Never blocks long."""

    def close(self) -> None:
        """Frees sockets and threads. Called once, by the thread that calls the collectives."""

    def abandon(self) -> None:
        """In a forked child: sees to it that nothing of the parent's is touched when this object goes."""


class SoloCollectives:
    """The collectives of a job of one process: the answer is the question."""

    def connect(self, exchange: Exchange, *, timeout_s: float) -> None:
        """Nobody to connect to."""

    def allreduce(self, data: Bytes, dtype: str, op: ReduceOp, *, timeout_s: float) -> None:
        """Leaves data as it is."""

    def broadcast(self, data: Bytes, root: int, *, timeout_s: float) -> None:
        """Leaves data as it is."""

    def allgather(self, data: Bytes, output: Bytes, counts: Sequence[int], *, timeout_s: float) -> None:
        """Copies data."""
        output[:] = data

    def abort(self, reason: str) -> None:
        """Nothing blocks."""

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """Nothing is held."""


def resolve_op(*, average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that a caller of Horovod's API asked for; the default is Average.

    Raises:
        ValueError: both ways of saying it were used.
        TypeError: op is not one of this module's.
    """
    if average is not None:
        if op is not None:
            raise ValueError("cannot take both average and op: average is the older spelling of op=Average or op=Sum")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"cannot reduce with {op!r}: op is one of Average, Sum, Adasum, Min, Max, Product")
    return op


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The memory of a C-contiguous array, as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def divide_inplace(array: npt.NDArray[Any], divisor: int) -> None:
    """Divides by a number of ranks. Integers are divided exactly (int64 beyond 2**53 too) and rounded toward zero."""
    if divisor == 1:
        return
    if array.dtype.kind == "f":
        array /= array.dtype.type(divisor)
        return
    quotient = array // divisor
    quotient += (array < 0) & (quotient * divisor != array)
    array[...] = quotient
