"""What the API asks of an engine: named operations, submitted in any order, each with a handle to wait on.

Owns the words between the API (worker/api, torch/) and the engines that carry operations out: ``NativeEngine``
(native.py), which negotiates, so that ranks may submit in any order; and ``PlainEngine`` (plain.py), which runs
operations in the order of submission over a backend's four collectives, where the extension is missing and in a job of
one process. Knows nothing of rounds or the driver.

An operation names memory by address, and what owns it. The engine holds the owner from the submission until the
operation is done, failed or not: whatever interrupts the caller meanwhile, nobody writes into memory that is free.
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

# By their numbers on the wire. Everything but a reduction takes any of them; bool is reduced as uint8 by the API.
WIRE_DTYPES = (*DTYPES, "int16", "uint16", "bool", "complex64", "complex128")


class Kind(IntEnum):
    """The operations. The numbers are the native engine's."""

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
        address: of the input; 0 for an array without bytes.
        nbytes: its bytes.
        dtype: its name, of WIRE_DTYPES.
        shape: its shape; all that is not () has a first dimension that allgather, alltoall and reducescatter split.
        output: address of the result's memory, for ALLREDUCE and BROADCAST; may be that of the input.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    output: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """What one rank submits. Members of the process set must agree on all but the tensors' memory and first dimensions.

    Attributes:
        kind: what is to be done.
        tensors: one, or several for a grouped operation, which runs when all members have submitted all of it.
        name: pairs the submissions of the ranks; "" pairs the n-th unnamed one of this kind and set.
        reduce_op: for ALLREDUCE and REDUCESCATTER.
        root: a global rank, for BROADCAST.
        prescale: multiplies the input, for reductions. Integers are rounded toward zero.
        postscale: multiplies the result.
        splits: for ALLTOALL, for each tensor: rows to each member.
        process_set: number of a process set.
        device: not 0 for memory of a device: the engine only agrees on its turn, and whoever submitted it runs it then.
        keep: what owns the tensors' memory, and for an operation on a device what its runner has to know.
        own: whether it is one of the library's own, whose names are never paired with those that users write.
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
    """What came of an operation.

    Attributes:
        arrays: for ALLGATHER, ALLTOALL and REDUCESCATTER, for each tensor: the result's memory, (nbytes,) uint8,
            which the receiver owns. Empty for the others, whose results are where ``output`` says.
        rows: their first dimensions.
        received: for ALLTOALL, for each tensor: rows from each member.
        last_joined: for JOIN: the rank that joined last.
    """

    arrays: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    received: list[tuple[int, ...]] = field(default_factory=list)
    last_joined: int = -1


class Handle(Protocol):
    """An operation under way. The memory of its tensors is in use until it is done, failed ones too.

    Nobody has to keep a handle.
    """

    def done(self) -> bool:
        """Whether result() would return, or raise, at once."""

    def result(self) -> Result:
        """Blocks until the operation is done; signals are handled meanwhile. May be called again.

        Raises:
            HorovodInternalError: a peer is gone, or the round was aborted; or no rank went on for too long.
            MismatchError: the ranks did not submit the same; the same on all of them.
            MemoryError: this rank has no memory for it, and leaves the round: the others get HorovodInternalError.
        """


class Engine(Protocol):
    """One round's operations of one process. All methods may be called by any thread."""

    def submit(self, operation: Operation) -> Handle:
        """Begins an operation. Never blocks long.

        Raises:
            DuplicateNameError: an operation of this name is under way in the same process set.
            HorovodInternalError: the round is broken or over.
            ValueError: the operation itself cannot be (no such root, splits that do not add up).
        """

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Makes a number stand for some ranks. On all ranks alike, members or not; blocks until all have done so."""

    def remove_process_set(self, number: int) -> None:
        """Forgets a process set. On all ranks alike; blocks until all have done so.

        What all members have submitted before is completed first; what only some have fails.
        """

    def leave(self) -> Handle:
        """Begins to leave the round: refuses what comes, and completes what is under way. Never blocks.

        Done when all ranks that have not joined are leaving, too, and no operation of this rank is under way any more.
        It fails, and the round breaks, when that cannot be: a peer is lost, or has left without submitting what others
        wait for.
        """

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed memory that operations are quickest on, because the peers can see it. Freed with the array.

        A forked child has a copy of it, made where the child writes: what it has not written yet may still follow what
        the parent writes.
        """

    def progress(self) -> tuple[int, bool]:
        """Operations finished so far, and whether others are under way."""

    def carries_out(self) -> bool:
        """Whether this process is carrying an operation out, which all its members have submitted.

        Of its own, until ``own_finished`` has counted it.
        """

    def own_finished(self) -> int:
        """Of this process's own operations, those that are over.

        Not those of others that it takes part in when it has joined.
        """

    def unreachable(self) -> tuple[int, ...]:
        """Ranks that could not be reached, or of whose machines nothing was heard any more while they were waited for.

        When an operation has failed, or connecting, all that it failed of are among them.
        """

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begins to write a Chrome trace of this rank's operations; what happens is in the file within 0.1 s.

        Args:
            path: the file. It is JSON at any time.
            mark_cycles: whether passes of the engine's thread are in it, too, as instants named CYCLE_START.

        Raises:
            OSError: the file cannot be written.
        """

    def stop_timeline(self) -> None:
        """Ends it. All operations whose handles were done before are in the file then."""

    def abort(self, reason: str) -> None:
        """Makes every operation under way and every later one fail. Never blocks long."""

    def quiesce(self, limit_s: float) -> bool:
        """After abort(): blocks until nothing touches the memory of operations any more, but for ``limit_s`` at most.

        Returns:
            Whether it is so.
        """

    def close(self) -> None:
        """Frees what is held; what is under way fails. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: sees to it that nothing of the parent's is touched when this object goes."""


def region(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory at an address, as an array that does not own it."""
    import ctypes

    if nbytes == 0:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
