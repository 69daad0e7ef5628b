"""Collectives on numpy arrays: ``import elastic_driver as hvd``."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.collectives import (
    DTYPES,
    GLOBAL,
    ReduceOp,
    as_bytes,
    divide_inplace,
    resolve_op,
    scale_inplace,
)
from elastic_driver.worker.context import Context
from elastic_driver.worker.objects import allgather_bytes, allgather_counts, broadcast_array, check_root
from elastic_driver.worker.runtime import current

# Reduced in a wider type that backends carry: sums that fit the narrow type come out the same.
_WIDENED = {"int16": "int32", "uint16": "int32"}
# A sum of booleans is "any", a product is "all".
_BOOLEAN_OPS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def carried_dtype(name: str, op: ReduceOp) -> str:
    """The dtype in which values of the named dtype are reduced.

    Raises:
        TypeError: they cannot be.
    """
    if name == "bool" and op is not ReduceOp.AVERAGE:
        return "uint8"
    carried = _WIDENED.get(name, name)
    if carried not in DTYPES:
        known = ", ".join((*DTYPES, *_WIDENED, "bool (not averaged)"))
        raise TypeError(f"cannot reduce values of dtype {name}: the dtypes are {known}")
    return carried


def wire_op(dtype: str, op: ReduceOp) -> ReduceOp:
    """What the backend computes for this operation on values of the named dtype."""
    if op is ReduceOp.AVERAGE:
        return ReduceOp.SUM
    return _BOOLEAN_OPS.get(op, op) if dtype == "bool" else op


def allreduce(
    tensor: npt.ArrayLike,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> npt.NDArray[Any]:
    """Combines the ranks' arrays, which have one shape and dtype. Blocks until done.

    Args:
        tensor: any shape; left as it is.
        average: older spelling of ``op``: True is Average, False is Sum.
        name: for Horovod's signature; calls are matched by their order.
        op: Average (the default), Sum, Min, Max or Product. Averages of integers are rounded toward zero.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Returns:
        A new array, bitwise the same on all ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        TypeError: values of this dtype cannot be reduced.
        ValueError: both average and op were given.
    """
    resolved = resolve_op(average=average, op=op)
    context = current()
    source = np.asarray(tensor)
    carried = carried_dtype(source.dtype.name, resolved)
    work = np.array(source, dtype=carried, order="C")
    scale_inplace(work, prescale_factor)
    _reduce(context, work, wire_op(source.dtype.name, resolved))
    if resolved is ReduceOp.AVERAGE:
        divide_inplace(work, context.slot.size)
    scale_inplace(work, postscale_factor)
    return work.astype(source.dtype, copy=False)


def _reduce(context: Context, work: npt.NDArray[Any], op: ReduceOp) -> None:
    if work.nbytes == 0 or context.slot.size == 1:
        context.check()
        return
    data, dtype, limit_s = as_bytes(work), work.dtype.name, context.limits.collective_s
    context.run(lambda collectives: collectives.allreduce(GLOBAL, data, dtype, op, timeout_s=limit_s))


def allgather(tensor: npt.ArrayLike, name: str | None = None) -> npt.NDArray[Any]:
    """The ranks' arrays joined along their first dimension, in which alone they may differ. Blocks until done.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: a scalar, or the ranks' dtypes or other dimensions differ (then on all ranks).
    """
    context = current()
    source = np.ascontiguousarray(tensor)
    if np.ndim(tensor) == 0:
        raise ValueError("cannot allgather a scalar: it has no first dimension; reshape it to (1,)")
    first_dims = gather_first_dims(context, source.shape, source.dtype.str)
    row_bytes = source.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
    gathered = allgather_bytes(context, as_bytes(source), [rows * row_bytes for rows in first_dims])
    return gathered.view(source.dtype).reshape(sum(first_dims), *source.shape[1:])


def gather_first_dims(context: Context, shape: tuple[int, ...], dtype: str) -> list[int]:
    """The ranks' first dimensions; checks that nothing else differs. Blocks until done. Raises ValueError."""
    layout = zlib.crc32(repr((shape[1:], dtype)).encode())
    table = allgather_counts(context, (shape[0], layout))
    odd = [rank for rank, (_, other) in enumerate(table) if other != table[0][1]]
    if odd:
        raise ValueError(
            f"cannot allgather: ranks {odd} have another dtype, or another shape behind the first dimension, than "
            f"rank 0 (this is rank {context.slot.rank}: {dtype}, {shape})"
        )
    return [rows for rows, _ in table]


def broadcast(tensor: npt.ArrayLike, root_rank: int, name: str | None = None) -> npt.NDArray[Any]:
    """The root's array, on every rank, as a new array. Blocks until done.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    context = current()
    check_root(context, root_rank)
    work = np.array(tensor, order="C")
    if work.dtype.hasobject:
        raise TypeError("cannot broadcast an array of objects: use broadcast_object")
    context.check()
    broadcast_array(context, as_bytes(work), root_rank)
    return work


def barrier() -> None:
    """Blocks until every rank is here. Raises HorovodInternalError when one is gone."""
    context = current()
    limit_s = context.limits.collective_s
    context.run(lambda collectives: collectives.barrier(GLOBAL, timeout_s=limit_s))
