"""The interface between API and engine: named operations, submitted in any order, each with a handle to wait on.

Owns the types shared by the API (worker/api, torch/) and the engines: ``NativeEngine`` (native.py), which negotiates,
so that ranks may submit in any order; and ``PlainEngine`` (plain.py), which runs operations in the order of submission
over a backend's four collectives, where the extension is missing and in a job of one process. Knows nothing of rounds
or the driver.

An operation names memory by address, together with its owner. The engine holds the owner from the submission until the
operation is done, failed or not: even if the caller is interrupted, nothing writes to freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.engine.collectives import DTYPES, ReduceOp

GLOBAL_SET = 0  # the process set of all ranks

# In the order of their numbers on the wire. All operations except reductions carry any of them; the API reduces bool as
# uint8.
WIRE_DTYPES = (*DTYPES, "int16", "uint16", "bool", "complex64", "complex128")


class Kind(IntEnum):
    """The kinds of operation. The numbers are the native engine's."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    LEAVE = 7


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array of an operation: C-contiguous memory of ``nbytes`` bytes.

    Attributes:
        address: address of the input; 0 for an array without bytes.
        nbytes: its size in bytes.
        dtype: its name, of WIRE_DTYPES.
        shape: its shape; any but () has a first dimension, which allgather, alltoall and reducescatter split.
        output: address of the result's memory, for ALLREDUCE and BROADCAST; may be that of the input.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    output: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """A rank's submission. Members of the process set must agree on all but the tensors' memory and first dimensions.

    Attributes:
        kind: the kind of operation.
        tensors: one, or several for a grouped operation, which runs once all members have submitted all of it.
        name: pairs the submissions of the ranks; "" pairs the n-th unnamed one of this kind and set.
        reduce_op: for ALLREDUCE and REDUCESCATTER.
        root: a global rank, for BROADCAST.
        prescale: multiplies the input, for reductions. Integers are rounded toward zero.
        postscale: multiplies the result.
        splits: for ALLTOALL, for each tensor: rows to each member.
        process_set: number of a process set.
        device: not 0 for memory of a device: the engine only agrees on the order, and the submitter runs it in its
            turn.
        keep: owner of the tensors' memory, and for an operation on a device also data for its runner.
        own: whether it is one of the library's own, whose names are never paired with users' names.
    """

    kind: Kind
    tensors: tuple[TensorSpec, ...] = ()
    name: str = ""
    reduce_op: ReduceOp = ReduceOp.SUM
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[tuple[int, ...], ...] = ()
    process_set: int = GLOBAL_SET
    device: int = 0
    keep: Any = field(default=None, compare=False, repr=False)
    own: bool = False


@dataclass(slots=True)
class Result:
    """The result of an operation.

    Attributes:
        arrays: for ALLGATHER, ALLTOALL and REDUCESCATTER, for each tensor: the result's memory, (nbytes,) uint8, owned
            by the receiver. Empty for the others, whose results are at ``output``.
        rows: their first dimensions.
        received: for ALLTOALL, for each tensor: rows from each member.
        last_joined: for JOIN: the rank that joined last.
    """

    arrays: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    received: list[tuple[int, ...]] = field(default_factory=list)
    last_joined: int = -1


class Handle(Protocol):
    """An operation in flight. Its tensors' memory is in use until it is done, even if it fails.

    Handles may be discarded.
    """

    def done(self) -> bool:
        """Return whether result() would return, or raise, at once."""

    def result(self) -> Result:
        """Block until the operation is done; signals are handled meanwhile. May be called again.

        Raises:
            HorovodInternalError: a peer is gone, the round was aborted, or no rank made progress for too long.
            MismatchError: the ranks did not submit the same; raised on all of them.
            MemoryError: this rank lacks memory for it, and leaves the round: the others get HorovodInternalError.
        """


class Engine(Protocol):
    """One process's operations of one round. Thread-safe."""

    def submit(self, operation: Operation) -> Handle:
        """Start an operation. Never blocks long.

        Raises:
            DuplicateNameError: an operation of this name is in flight in the same process set.
            HorovodInternalError: the round is broken or over.
            ValueError: the operation is invalid (no such root, splits that do not add up).
        """

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Give some ranks a number. Call it alike on all ranks, members or not; blocks until all have."""

    def remove_process_set(self, number: int) -> None:
        """Remove a process set. Call it alike on all ranks; blocks until all have.

        Earlier operations that all members have submitted are completed first; those that only some have submitted
        fail.
        """

    def leave(self) -> Handle:
        """Start leaving the round: reject new operations, and complete those in flight. Never blocks.

        Done once all ranks that have not joined are leaving, too, and no operation of this rank is in flight. It fails,
        and the round breaks, if that is impossible: a peer is lost, or has left without submitting an operation that
        others wait for.
        """

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed memory on which operations are fastest, because the peers can access it. Freed with the array.

        A forked child has a copy-on-write copy: pages that it has not written yet may still follow the parent's writes.
        """

    def progress(self) -> tuple[int, bool]:
        """Return how many operations are finished, and whether others are in flight."""

    def carries_out(self) -> bool:
        """Return whether this process is running an operation that all members have submitted.

        One of its own counts until ``own_finished`` has counted it.
        """

    def own_finished(self) -> int:
        """Return how many of this process's own operations are over.

        Operations of others that it runs after it has joined do not count.
        """

    def unreachable(self) -> tuple[int, ...]:
        """Return ranks that could not be reached, or whose machines stopped acknowledging while they were waited for.

        After an operation, or connecting, has failed, all ranks that it failed because of are among them.
        """

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start writing a Chrome trace of this rank's operations; events are in the file within 0.1 s.

        Args:
            path: the file. It is valid JSON at any time.
            mark_cycles: whether it also contains passes of the engine's thread, as instants named CYCLE_START.

        Raises:
            OSError: the file cannot be written.
        """

    def stop_timeline(self) -> None:
        """Complete the trace. It then contains all operations whose handles were done before."""

    def abort(self, reason: str) -> None:
        """Make every operation, in flight or later, fail. Never blocks long."""

    def quiesce(self, limit_s: float) -> bool:
        """After abort(): block until nothing touches operations' memory any more, but for ``limit_s`` at most.

        Returns:
            Whether that is so.
        """

    def close(self) -> None:
        """Free all resources; operations in flight fail. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: leave the parent's resources untouched, even when this object is deleted."""


def region(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory at an address, as an array that does not own it."""
    import ctypes

    if nbytes == 0:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
