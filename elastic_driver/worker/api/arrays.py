"""Arrays as operations: what is sent of them, and what is made of the results. Behind numpy_api.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.worker.api.handles import begin
from elastic_driver.worker.api.objects import check_root
from elastic_driver.worker.engine.byte_messages import array_spec
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, Kind, Operation, Result
from elastic_driver.worker.engine.reductions import carried_dtype, check_scattered, engine_op
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, members_of

Array: TypeAlias = npt.NDArray[Any]


def even_splits(rows: int, members: int) -> tuple[int, ...]:
    """As many rows to each member. Raises ValueError when they cannot be divided so."""
    if rows % members:
        raise ValueError(
            f"cannot alltoall {rows} rows without splits: they cannot be divided among {members} ranks evenly"
        )
    return (rows // members,) * members


def sendable(tensor: npt.ArrayLike, what: str, *, split: bool) -> tuple[Array, Array]:
    """The array, and the same memory (or a copy) as an engine takes it: contiguous, of a wire dtype."""
    source = np.asarray(tensor)
    if source.dtype.hasobject:
        raise TypeError(f"cannot {what} an array of objects: use broadcast_object or allgather_object")
    if split and source.ndim == 0:
        raise UnsupportedOperationError(f"cannot {what} a scalar: it has no first dimension; reshape it to (1,)")
    source = np.asarray(source, dtype=source.dtype.newbyteorder("="), order="C")
    if source.dtype.name in WIRE_DTYPES:
        return source, source
    return source, source.reshape(-1).view(np.uint8).reshape(*source.shape, source.itemsize)


def check_writable(tensor: Array, what: str) -> None:
    """Raises TypeError for what cannot be written into."""
    given: Any = tensor  # anything may come
    if not isinstance(given, np.ndarray) or not given.flags.writeable:
        raise TypeError(f"cannot {what} in place: it takes a writable numpy array")


def begin_allreduce(
    tensors: Sequence[npt.ArrayLike],
    outputs: Sequence[Array] | None,
    op: ReduceOp,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Begins an allreduce; its result is a list when grouped. ``outputs`` are arrays to write into."""
    members = members_of(process_set)
    sources = [np.asarray(tensor) for tensor in tensors]
    names = [source.dtype.name for source in sources]
    works = [np.asarray(source, carried_dtype(source.dtype.name, op), order="C") for source in sources]
    if outputs is None:
        results = [np.empty(work.shape, work.dtype) for work in works]
    else:
        fits = [work.dtype == out.dtype and out.flags.c_contiguous for work, out in zip(works, outputs, strict=True)]
        results = [
            out if fit else np.empty(work.shape, work.dtype)
            for work, out, fit in zip(works, outputs, fits, strict=True)
        ]
    specs = tuple(array_spec(work, result) for work, result in zip(works, results, strict=True))
    operation = Operation(
        Kind.ALLREDUCE,
        specs,
        name or "",
        engine_op(names, op),
        prescale=factors[0],
        postscale=factors[1],
        process_set=members.number,
    )

    def finish(_: Result) -> Any:
        if outputs is None:
            done = [result.astype(source.dtype, copy=False) for result, source in zip(results, sources, strict=True)]
        else:
            for result, out in zip(results, outputs, strict=True):
                if result is not out:
                    out[...] = result.astype(out.dtype)
            done = list(outputs)
        return done if grouped else done[0]

    return begin(members, operation, keep=(works, results, tensors), finish=finish)


def rebuild(data: npt.NDArray[np.uint8], rows: int, source: Array) -> Array:
    """A result's memory as an array like the source, but for its first dimension."""
    return data.view(source.dtype).reshape(rows, *source.shape[1:])


def begin_allgather(
    tensors: Sequence[npt.ArrayLike],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Begins an allgather; its result is a list when grouped."""
    members = members_of(process_set)
    pairs = [sendable(tensor, "allgather", split=True) for tensor in tensors]
    specs = tuple(array_spec(wire) for _, wire in pairs)
    operation = Operation(Kind.ALLGATHER, specs, name or "", process_set=members.number)

    def finish(result: Result) -> Any:
        done = [
            rebuild(data, rows, source)
            for data, rows, (source, _) in zip(result.arrays, result.rows, pairs, strict=True)
        ]
        return done if grouped else done[0]

    return begin(members, operation, keep=pairs, finish=finish)


def begin_broadcast(
    tensor: npt.ArrayLike, output: Array | None, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    """Begins a broadcast, into ``output`` where one is given."""
    members = members_of(process_set)
    check_root(members, root_rank)
    source, wire = sendable(tensor, "broadcast", split=False)
    direct = output is not None and source is output
    result = wire if direct else np.empty_like(wire)
    operation = Operation(
        Kind.BROADCAST, (array_spec(wire, result),), name or "", root=root_rank, process_set=members.number
    )

    def finish(_: Result) -> Any:
        if direct:
            return output
        received = result if result.dtype == source.dtype else result.reshape(-1).view(source.dtype)
        received = received.reshape(source.shape)
        if output is None:
            return received
        output[...] = received
        return output

    return begin(members, operation, keep=(wire, result), finish=finish)


def checked_splits(members: Members, splits: npt.ArrayLike | None, rows: int) -> tuple[int, ...]:
    """Rows to each member. Raises ValueError when they do not add up to the rows there are."""
    if splits is None:
        return even_splits(rows, members.size)
    counts = np.asarray(splits)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"cannot alltoall with splits {splits!r}: they must be a list of integers")
    if not counts.size:
        return even_splits(rows, members.size)
    chosen = tuple(counts.tolist())
    if len(chosen) != members.size or min(chosen) < 0 or sum(chosen) != rows:
        raise ValueError(
            f"cannot alltoall {rows} rows with splits {list(chosen)}: they must be {members.size} counts of rows that "
            "add up to all"
        )
    return chosen


def begin_reducescatter(
    tensors: Sequence[npt.ArrayLike],
    op: ReduceOp,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Begins a reducescatter; its result is a list when grouped."""
    check_scattered(op)
    members = members_of(process_set)
    sources = [np.asarray(tensor) for tensor in tensors]
    if any(source.ndim == 0 for source in sources):
        raise UnsupportedOperationError("cannot reducescatter a scalar: it has no first dimension; reshape it to (1,)")
    works = [np.asarray(source, carried_dtype(source.dtype.name, op), order="C") for source in sources]
    operation = Operation(
        Kind.REDUCESCATTER,
        tuple(array_spec(work) for work in works),
        name or "",
        engine_op([source.dtype.name for source in sources], op),
        prescale=factors[0],
        postscale=factors[1],
        process_set=members.number,
    )

    def finish(result: Result) -> Any:
        done = [
            rebuild(data, rows, work).astype(source.dtype, copy=False)
            for data, rows, work, source in zip(result.arrays, result.rows, works, sources, strict=True)
        ]
        return done if grouped else done[0]

    return begin(members, operation, keep=works, finish=finish)
