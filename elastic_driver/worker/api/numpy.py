"""Collectives on numpy arrays: ``import elastic_driver as hvd``.

Names, arguments and meanings are those of ``horovod.torch``, with arrays in the place of tensors. Functions that end in
``_async`` return a handle for ``poll`` and ``synchronize``; until then the array must not be changed. Those that end in
``_`` write into the array they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.api.arrays import (
    Array,
    begin_allgather,
    begin_allreduce,
    begin_broadcast,
    begin_reducescatter,
    check_writable,
    checked_splits,
    rebuild,
    sendable,
)
from elastic_driver.worker.api.handles import begin, poll, synchronize
from elastic_driver.worker.engine.byte_messages import array_spec
from elastic_driver.worker.engine.collectives import Average, ReduceOp, resolve_op
from elastic_driver.worker.engine.protocol import Kind, Operation, Result
from elastic_driver.worker.rounds import devices
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def allreduce_async(
    tensor: npt.ArrayLike,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an :func:`allreduce`; a handle for ``poll`` and ``synchronize``."""
    resolved = resolve_op(average=average, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], None, resolved, name, factors, process_set, grouped=False)


def allreduce(
    tensor: npt.ArrayLike,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combines the ranks' arrays, which have one shape and dtype. Blocks until done.

    Args:
        tensor: any shape; left as it is.
        average: older spelling of ``op``: True is Average, False is Sum.
        name: pairs the calls of the ranks; calls without one are paired by their order.
        op: Average (the default), Sum, Adasum, Min, Max or Product. Averages of integers are rounded toward zero.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: whose members take part.

    Returns:
        A new array, bitwise the same on all ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same; on all of them.
        DuplicateNameError: an operation of this name is under way.
        TypeError: values of this dtype cannot be reduced.
        ValueError: both average and op were given, or this process is not in the process set.
    """
    handle = allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Array = synchronize(handle)
    return result


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an :func:`allreduce_`; a handle for ``poll`` and ``synchronize``."""
    check_writable(tensor, "allreduce")
    resolved = resolve_op(average=average, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_allreduce([tensor], [tensor], resolved, name, factors, process_set, grouped=False)


def allreduce_(
    tensor: Array,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Like :func:`allreduce`, in place: returns the array given, overwritten."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Array = synchronize(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[npt.ArrayLike],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a :func:`grouped_allreduce`; a handle for ``poll`` and ``synchronize``."""
    resolved = resolve_op(average=average, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_allreduce(tensors, None, resolved, name, factors, process_set, grouped=True)


def grouped_allreduce(
    tensors: Sequence[npt.ArrayLike],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """:func:`allreduce` of several arrays in one operation."""
    handle = grouped_allreduce_async(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Array] = synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a :func:`grouped_allreduce_`; a handle for ``poll`` and ``synchronize``."""
    for tensor in tensors:
        check_writable(tensor, "allreduce")
    resolved = resolve_op(average=average, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_allreduce(tensors, tensors, resolved, name, factors, process_set, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """:func:`allreduce_` of several arrays in one operation."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Array] = synchronize(handle)
    return result


def allgather_async(
    tensor: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins an :func:`allgather`; a handle for ``poll`` and ``synchronize``."""
    return begin_allgather([tensor], name, process_set, grouped=False)


def allgather(tensor: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """The ranks' arrays joined along their first dimension, in which alone they may differ. Blocks until done.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
        UnsupportedOperationError: a scalar.
    """
    result: Array = synchronize(allgather_async(tensor, name, process_set))
    return result


def grouped_allgather_async(
    tensors: Sequence[npt.ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a :func:`grouped_allgather`; a handle for ``poll`` and ``synchronize``."""
    return begin_allgather(tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Sequence[npt.ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """:func:`allgather` of several arrays in one operation."""
    result: list[Array] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return result


def broadcast_async(
    tensor: npt.ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a :func:`broadcast`; a handle for ``poll`` and ``synchronize``."""
    return begin_broadcast(tensor, None, root_rank, name, process_set)


def broadcast(
    tensor: npt.ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The root's array (``root_rank`` is a global rank), on every rank, as a new array. Blocks until done.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' roots, shapes or dtypes differ; on all of them.
        ValueError: there is no such rank.
    """
    result: Array = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins a :func:`broadcast_`; a handle for ``poll`` and ``synchronize``."""
    check_writable(tensor, "broadcast")
    return begin_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Overwrites the array with the root's, and returns it. Blocks until done."""
    result: Array = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def alltoall_async(
    tensor: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins an :func:`alltoall`; ``synchronize`` returns the array and the rows received from each rank."""
    members = members_of(process_set)
    source, wire = sendable(tensor, "alltoall", split=True)
    operation = Operation(
        Kind.ALLTOALL,
        (array_spec(wire),),
        name or "",
        splits=(checked_splits(members, splits, source.shape[0]),),
        process_set=members.number,
    )

    def finish(result: Result) -> Any:
        received = np.array(result.received[0], np.int32)
        return rebuild(result.arrays[0], result.rows[0], source), received

    return begin(members, operation, keep=wire, finish=finish)


def alltoall(
    tensor: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to each rank and receives rows from each. Blocks until done.

    Args:
        tensor: its first rows go to the first member, and so on.
        splits: rows to each member; the same number of rows to each by default.
        name: pairs the calls of the ranks; calls without one are paired by their order.
        process_set: whose members take part.

    Returns:
        The rows received, joined in the order of the members; with splits also the rows from each, (size,) int32.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
        UnsupportedOperationError: a scalar.
        ValueError: splits that do not add up to the rows there are.
    """
    received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return received[0] if splits is None else received


def reducescatter_async(
    tensor: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a :func:`reducescatter`; a handle for ``poll`` and ``synchronize``."""
    resolved = resolve_op(average=None, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_reducescatter([tensor], resolved, name, factors, process_set, grouped=False)


def reducescatter(
    tensor: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combines the ranks' arrays and gives each rank some rows of the result. Blocks until done.

    Rows are dealt in the order of the members, evenly; where they cannot be, the first members get one more.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same; on all of them.
        TypeError: values of this dtype cannot be reduced.
        UnsupportedOperationError: a scalar, or Adasum.
    """
    handle = reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)
    result: Array = synchronize(handle)
    return result


def grouped_reducescatter_async(
    tensors: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a :func:`grouped_reducescatter`; a handle for ``poll`` and ``synchronize``."""
    resolved = resolve_op(average=None, op=op)
    factors = (prescale_factor, postscale_factor)
    return begin_reducescatter(tensors, resolved, name, factors, process_set, grouped=True)


def grouped_reducescatter(
    tensors: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """:func:`reducescatter` of several arrays in one operation."""
    handle = grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
    result: list[Array] = synchronize(handle)
    return result


def join(device: int = -1) -> int:
    """Says that this rank has no more to submit, and takes part in the others' allreduces with zeros until all join.

    Averages still divide by all ranks. Blocks until all ranks have joined.

    Args:
        device: for Horovod's signature.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    members = members_of(global_process_set)
    devices.prepare_join(members.context)
    last: int = synchronize(begin(members, Operation(Kind.JOIN), keep=None, finish=lambda result: result.last_joined))
    members.context.note_join()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every member is here. Raises HorovodInternalError when one is gone."""
    members = members_of(process_set)
    operation = Operation(Kind.BARRIER, process_set=members.number)
    synchronize(begin(members, operation, keep=None, finish=lambda result: None))
