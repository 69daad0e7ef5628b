"""The collectives of any framework's tensors as operations of an engine, written once over an Adapter.

Owns the checks, how averages and narrow dtypes are reduced, and the conversion of results. collectives.py owns
signatures and defaults, handles.py the handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.worker.api.adapter import Adapter
from elastic_driver.worker.api.handles import begin
from elastic_driver.worker.api.objects import check_root
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind, Operation, Result
from elastic_driver.worker.engine.reductions import carried_dtype, check_scattered, engine_op
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, members_of

T = TypeVar("T")
Factors = tuple[float, float]
"""Factors of a reduction, applied before and after."""


def check_rows(adapter: Adapter[T], tensors: Sequence[T], verb: str) -> None:
    """Raise UnsupportedOperationError for scalars: they have no rows to gather or to divide."""
    for tensor in tensors:
        if adapter.rows(tensor) < 0:
            raise UnsupportedOperationError(f"cannot {verb} a scalar: it has no first dimension; reshape it to (1,)")


def begin_allreduce(
    adapter: Adapter[T],
    given: Sequence[Any],
    outputs: Sequence[T] | None,
    op: ReduceOp,
    name: str | None,
    factors: Factors,
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Start an allreduce. ``outputs`` are tensors to write into."""
    tensors = adapter.tensors(given, "allreduce")
    members = members_of(process_set)
    deliver = _deliverer(adapter, tensors, outputs, grouped=grouped)
    lane = adapter.lane
    if lane is not None and lane.takes(members, tensors):
        return lane.begin(members, Kind.ALLREDUCE, tensors, name, deliver, op=op, factors=factors)
    hosts, reduction = _reducible(adapter, tensors, op)
    targets = [None] * len(hosts) if outputs is None else outputs
    results = [adapter.result_for(host, output) for host, output in zip(hosts, targets, strict=True)]
    operation = Operation(
        Kind.ALLREDUCE,
        tuple([adapter.spec(host, result) for host, result in zip(hosts, results, strict=True)]),
        name or "",
        reduction,
        prescale=float(factors[0]),
        postscale=float(factors[1]),
        process_set=members.number,
        keep=(hosts, results, given),
    )
    return begin(members, operation, finish=lambda _: deliver(results, []))


def begin_allgather(
    adapter: Adapter[T], given: Sequence[Any], name: str | None, process_set: ProcessSet, *, grouped: bool
) -> int:
    """Start an allgather."""
    tensors = adapter.tensors(given, "allgather")
    members = members_of(process_set)
    check_rows(adapter, tensors, "allgather")
    deliver = _deliverer(adapter, tensors, None, grouped=grouped)
    lane = adapter.lane
    if lane is not None and lane.takes(members, tensors):
        return lane.begin(members, Kind.ALLGATHER, tensors, name, deliver)
    hosts = [adapter.sent(tensor, "allgather") for tensor in tensors]
    specs = tuple([adapter.spec(host) for host in hosts])
    operation = Operation(Kind.ALLGATHER, specs, name or "", process_set=members.number, keep=hosts)
    return begin(members, operation, finish=lambda result: deliver(_rebuilt(adapter, result, hosts), []))


def begin_broadcast(
    adapter: Adapter[T], given: Any, output: T | None, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    """Start a broadcast, into ``output`` if given."""
    tensors = adapter.tensors([given], "broadcast")
    members = members_of(process_set)
    check_root(members, root_rank)
    deliver = _deliverer(adapter, tensors, None if output is None else [output], grouped=False)
    lane = adapter.lane
    if lane is not None and lane.takes(members, tensors):
        return lane.begin(members, Kind.BROADCAST, tensors, name, deliver, root=root_rank)
    host = adapter.sent(tensors[0], "broadcast")
    result = adapter.result_for(host, output)
    operation = Operation(
        Kind.BROADCAST,
        (adapter.spec(host, result),),
        name or "",
        root=root_rank,
        process_set=members.number,
        keep=(host, result, given),
    )
    return begin(members, operation, finish=lambda _: deliver([result], []))


def begin_alltoall(adapter: Adapter[T], given: Any, splits: Any, name: str | None, process_set: ProcessSet) -> int:
    """Start an alltoall, whose result is the tensor received and the rows from each member."""
    tensors = adapter.tensors([given], "alltoall")
    members = members_of(process_set)
    check_rows(adapter, tensors, "alltoall")

    def deliver(results: list[Any], received: Sequence[int]) -> tuple[T, T]:
        return adapter.delivered(results, tensors, None)[0], adapter.row_counts(received, splits)

    lane = adapter.lane
    if lane is not None and lane.takes(members, tensors):
        counts = _checked_splits(members, adapter.split_counts(splits), adapter.rows(tensors[0]))
        return lane.begin(members, Kind.ALLTOALL, tensors, name, deliver, splits=(counts,))
    host = adapter.sent(tensors[0], "alltoall")
    operation = Operation(
        Kind.ALLTOALL,
        (adapter.spec(host),),
        name or "",
        splits=(_checked_splits(members, adapter.split_counts(splits), adapter.rows(tensors[0])),),
        process_set=members.number,
        keep=host,
    )

    def finish(result: Result) -> tuple[T, T]:
        return deliver(_rebuilt(adapter, result, [host]), result.received[0])

    return begin(members, operation, finish=finish)


def begin_reducescatter(
    adapter: Adapter[T],
    given: Sequence[Any],
    op: ReduceOp,
    name: str | None,
    factors: Factors,
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Start a reducescatter."""
    tensors = adapter.tensors(given, "reducescatter")
    check_scattered(op)
    members = members_of(process_set)
    check_rows(adapter, tensors, "reducescatter")
    deliver = _deliverer(adapter, tensors, None, grouped=grouped)
    lane = adapter.lane
    if lane is not None and lane.takes(members, tensors):
        return lane.begin(members, Kind.REDUCESCATTER, tensors, name, deliver, op=op, factors=factors)
    hosts, reduction = _reducible(adapter, tensors, op)
    operation = Operation(
        Kind.REDUCESCATTER,
        tuple([adapter.spec(host) for host in hosts]),
        name or "",
        reduction,
        prescale=float(factors[0]),
        postscale=float(factors[1]),
        process_set=members.number,
        keep=hosts,
    )
    return begin(members, operation, finish=lambda result: deliver(_rebuilt(adapter, result, hosts), []))


def _deliverer(
    adapter: Adapter[T], tensors: Sequence[T], outputs: Sequence[T] | None, *, grouped: bool
) -> Callable[[list[Any], list[int]], Any]:
    """Return the function that converts results, and the rows from each member, to what synchronize returns."""

    def deliver(results: list[Any], _: list[int]) -> Any:
        delivered = adapter.delivered(results, tensors, outputs)
        return adapter.group(delivered) if grouped else delivered[0]

    return deliver


def _reducible(adapter: Adapter[T], tensors: Sequence[T], op: ReduceOp) -> tuple[list[Any], ReduceOp]:
    """Return the tensors on the host, in the dtypes that are reduced, and the engine's reduction."""
    dtypes = [adapter.dtype(tensor) for tensor in tensors]
    hosts = [adapter.reduced(tensor, carried_dtype(dtype, op)) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    return hosts, engine_op(dtypes, op)


def _rebuilt(adapter: Adapter[T], result: Result, hosts: Sequence[Any]) -> list[Any]:
    return [
        adapter.rebuilt(data, rows, host) for data, rows, host in zip(result.arrays, result.rows, hosts, strict=True)
    ]


def _even_splits(rows: int, members: int) -> tuple[int, ...]:
    if rows % members:
        raise ValueError(
            f"cannot alltoall {rows} rows without splits: they cannot be divided among {members} ranks evenly"
        )
    return (rows // members,) * members


def _checked_splits(members: Members, splits: Any, rows: int) -> tuple[int, ...]:
    """Return the rows to each member. Raises ValueError if they do not add up to the number of rows."""
    if splits is None:
        return _even_splits(rows, members.size)
    counts = np.asarray(splits)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"cannot alltoall with splits {splits!r}: they must be a list of integers")
    if not counts.size:
        return _even_splits(rows, members.size)
    chosen = tuple(counts.tolist())
    if len(chosen) != members.size or min(chosen) < 0 or sum(chosen) != rows:
        raise ValueError(
            f"cannot alltoall {rows} rows with splits {list(chosen)}: they must be {members.size} counts of rows that "
            "add up to all"
        )
    return chosen
