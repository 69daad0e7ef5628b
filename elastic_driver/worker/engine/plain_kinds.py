"""How each kind of operation is built from a backend's four collectives, for ``PlainEngine``.

Owns no thread and no state: everything runs in the engine's calling thread, and blocks until done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_driver.worker.engine.collectives import Bytes, Collectives, ReduceOp, as_bytes, divide_inplace
from elastic_driver.worker.engine.gate import WriteGate
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, Kind, Operation, Result, TensorSpec, region

_SMALL = ("int8", "uint8")


@dataclass(frozen=True, slots=True)
class Link:
    """A process set as one of its members sees it.

    Attributes:
        collectives: over the set's members.
        members: their global ranks.
        index: this process's index among them.
        limit_s: time limit of each collective.
        gate: the gate for writing results to the submitters' memory. Backends work on this module's own memory: an
            aborted collective may end much later, or never.
    """

    collectives: Collectives
    members: tuple[int, ...]
    index: int
    limit_s: float
    gate: WriteGate = field(default_factory=WriteGate)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def gather(self, data: Bytes, counts: Sequence[int]) -> Bytes:
        """Return the members' bytes, end to end."""
        if sum(counts) > sys.maxsize:
            raise MemoryError(f"cannot gather {sum(counts)} bytes: they exceed the address space")
        output = np.empty(sum(counts), np.uint8)
        if output.nbytes:
            self.collectives.allgather(data, output, counts, timeout_s=self.limit_s)
        return output

    def gather_rows(self, row: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return (size, len(row)) int64: a row of numbers from each member."""
        numbers = np.asarray(row, np.int64)
        return self.gather(as_bytes(numbers), [numbers.nbytes] * self.size).view(np.int64).reshape(self.size, len(row))

    def gather_texts(self, text: str) -> list[str]:
        """Return a text from each member."""
        data = np.frombuffer(text.encode(), np.uint8).copy()
        counts = self.gather_rows([data.nbytes])[:, 0].tolist()
        joined = self.gather(data, counts)
        ends = np.cumsum(counts).tolist()
        return [bytes(joined[end - count : end]).decode() for end, count in zip(ends, counts, strict=True)]


def run(link: Link, operation: Operation) -> Result:
    """Run an operation that the members have agreed on."""
    match operation.kind:
        case Kind.ALLREDUCE:
            return _allreduce(link, operation)
        case Kind.ALLGATHER:
            return _allgather(link, operation)
        case Kind.BROADCAST:
            return _broadcast(link, operation)
        case Kind.ALLTOALL:
            return _alltoall(link, operation)
        case Kind.REDUCESCATTER:
            return _reducescatter(link, operation)
        case Kind.BARRIER | Kind.LEAVE:
            return Result()  # the agreement was the barrier
        case Kind.JOIN:
            return Result(last_joined=link.members[link.index])


def serve(link: Link, plan: dict[str, Any]) -> None:
    """Take part in the others' allreduce, for a rank that has joined, with values that change no result."""
    specs, memory = [], []
    op = ReduceOp(plan["op"])
    for dtype, extents in plan["tensors"]:
        shape = tuple(extents)
        array = np.zeros(prod(shape) * itemsize(dtype), np.uint8)
        fill_neutral(array, dtype, op)
        memory.append(array)
        address = array.ctypes.data if array.nbytes else 0
        specs.append(TensorSpec(address, array.nbytes, dtype, shape, address))
    run(
        link,
        Operation(
            Kind.ALLREDUCE,
            tuple(specs),
            plan["name"],
            op,
            postscale=plan["postscale_factor"],
        ),
    )


def itemsize(dtype: str) -> int:
    """Return the bytes of an element. Raises ValueError for a dtype that cannot be sent."""
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"cannot send values of dtype {dtype}: the dtypes are {', '.join(WIRE_DTYPES)}")
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _write(link: Link, specs: Sequence[TensorSpec], packed: Bytes) -> None:
    """Copy results, end to end in ``packed``, to their callers' memory."""

    def copy() -> None:
        offset = 0
        for spec in specs:
            region(spec.output, spec.nbytes)[:] = packed[offset : offset + spec.nbytes]
            offset += spec.nbytes

    link.gate.write(copy)


def _packed(specs: Sequence[TensorSpec]) -> Bytes:
    return np.concatenate([region(spec.address, spec.nbytes) for spec in specs])


def _allreduce(link: Link, operation: Operation) -> Result:
    together: dict[object, list[TensorSpec]] = {}
    for number, spec in enumerate(operation.tensors):
        # Adasum weighs each tensor separately.
        together.setdefault(number if operation.reduce_op is ReduceOp.ADASUM else spec.dtype, []).append(spec)
    for specs in together.values():
        packed = _packed(specs)
        _reduce(link, packed, specs[0].dtype, operation)
        _write(link, specs, packed)
    return Result()


def _reduce(link: Link, data: Bytes, dtype: str, operation: Operation) -> None:
    """Reduce in place, including the factors."""
    if data.nbytes == 0:
        return
    scale(data, dtype, operation.prescale)
    op = operation.reduce_op
    if op is ReduceOp.ADASUM:
        gathered = link.gather(data, [data.nbytes] * link.size).reshape(link.size, -1)
        adasum(list(gathered), dtype)
        data[:] = gathered[0]
    elif op in (ReduceOp.MIN, ReduceOp.MAX) and _is_float(dtype):
        keys = _ordered(_load(data, dtype), op)
        link.collectives.allreduce(as_bytes(keys), keys.dtype.name, op, timeout_s=link.limit_s)
        _store(data, dtype, _from_ordered(keys))
    else:
        wire = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        if op is ReduceOp.AVERAGE and dtype in _SMALL:  # sums may overflow them
            values = data.view(dtype).astype(np.int32)
            link.collectives.allreduce(as_bytes(values), "int32", wire, timeout_s=link.limit_s)
            divide_inplace(values, link.size)
            data.view(dtype)[:] = values
        else:
            link.collectives.allreduce(data, dtype, wire, timeout_s=link.limit_s)
            if op is ReduceOp.AVERAGE:
                divide(data, dtype, link.size)
    scale(data, dtype, operation.postscale)


def _row_bytes(spec: TensorSpec) -> int:
    return itemsize(spec.dtype) * prod(spec.shape[1:])


def _allgather(link: Link, operation: Operation) -> Result:
    table = link.gather_rows([spec.shape[0] for spec in operation.tensors])
    result = Result()
    for spec, rows in zip(operation.tensors, table.T.tolist(), strict=True):
        counts = [count * _row_bytes(spec) for count in rows]
        result.arrays.append(link.gather(region(spec.address, spec.nbytes), counts))
        result.rows.append(sum(rows))
    return result


def _broadcast(link: Link, operation: Operation) -> Result:
    root = link.members.index(operation.root)
    specs = [spec for spec in operation.tensors if spec.nbytes]
    if not specs:
        return Result()
    packed = _packed(specs) if link.index == root else np.empty(sum(spec.nbytes for spec in specs), np.uint8)
    link.collectives.broadcast(packed, root, timeout_s=link.limit_s)
    if link.index != root or any(spec.output != spec.address for spec in specs):
        _write(link, specs, packed)
    return Result()


def _alltoall(link: Link, operation: Operation) -> Result:
    """Every member gets everything and keeps its own part: the backends offer nothing better."""
    table = link.gather_rows([rows for splits in operation.splits for rows in splits])
    result = Result()
    for number, spec in enumerate(operation.tensors):
        splits = table[:, number * link.size : (number + 1) * link.size]  # (from, to)
        row_bytes = _row_bytes(spec)
        totals = splits.sum(axis=1)
        gathered = link.gather(region(spec.address, spec.nbytes), (totals * row_bytes).tolist())
        starts = np.cumsum(totals) - totals + splits[:, : link.index].sum(axis=1)
        received = splits[:, link.index]
        parts = [
            gathered[start * row_bytes : (start + rows) * row_bytes]
            for start, rows in zip(starts.tolist(), received.tolist(), strict=True)
        ]
        result.arrays.append(np.concatenate(parts))
        result.rows.append(int(received.sum()))
        result.received.append(tuple(received.tolist()))
    return result


def _reducescatter(link: Link, operation: Operation) -> Result:
    result = Result()
    for spec in operation.tensors:
        work = region(spec.address, spec.nbytes).copy()
        _reduce(link, work, spec.dtype, operation)
        share, more = divmod(spec.shape[0], link.size)
        start = link.index * share + min(link.index, more)
        rows = share + (link.index < more)
        row_bytes = _row_bytes(spec)
        result.arrays.append(work[start * row_bytes : (start + rows) * row_bytes].copy())
        result.rows.append(rows)
    return result


def _load(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return values to compute with: float32 for the 16-bit floats, else a view."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    values = data.view(np.dtype(dtype))
    return values.astype(np.float32) if dtype == "float16" else values


def _store(data: Bytes, dtype: str, values: npt.NDArray[Any]) -> None:
    """Store values, rounded to nearest even."""
    if dtype != "bfloat16":
        data.view(np.dtype(dtype))[:] = values
        return
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    data.view(np.uint16)[:] = np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded)


def _ordered(values: npt.NDArray[Any], op: ReduceOp) -> npt.NDArray[Any]:
    """Return integers in the order of the floats, with NaN as the last for MAX and as the first for MIN.

    Backends compare floats with <, which is false for every NaN: the result would depend on the order of ranks.
    """
    bits = values.view(f"i{values.itemsize}")
    limits = np.iinfo(bits.dtype)
    # Floats are a sign and a magnitude: the greater a negative one's magnitude, the less it is.
    keys: npt.NDArray[Any] = np.where(bits < 0, bits ^ limits.max, bits)
    keys[np.isnan(values)] = limits.min if op is ReduceOp.MIN else limits.max
    return keys


def _from_ordered(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.where(keys < 0, keys ^ np.iinfo(keys.dtype).max, keys).view(f"f{keys.itemsize}")
    values[np.isnan(values)] = np.nan
    return values


def _limit(dtype: str, sign: int) -> Any:
    if _is_float(dtype):
        return sign * np.inf
    limits = np.iinfo(dtype)
    return limits.max if sign > 0 else limits.min


def fill_neutral(data: Bytes, dtype: str, op: ReduceOp) -> None:
    """Fill zeroed memory with the reduction's neutral element."""
    match op:
        case ReduceOp.MIN:
            value = _limit(dtype, 1)
        case ReduceOp.MAX:
            value = _limit(dtype, -1)
        case ReduceOp.PRODUCT:
            value = 1
        case _:
            return
    values = _load(data, dtype)
    values[...] = value
    _store(data, dtype, values)


def _saturated(values: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Convert to integers, rounded toward zero and clamped to their range; NaN becomes 0."""
    limits = np.iinfo(dtype)
    above, below = values >= float(limits.max), values <= float(limits.min)
    integers = np.where(above | below | np.isnan(values), 0.0, values).astype(dtype)
    integers[above], integers[below] = limits.max, limits.min
    return integers


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def scale(data: Bytes, dtype: str, factor: float) -> None:
    """Multiply by a factor.

    Integers are multiplied in float64, rounded toward zero and clamped to their range; NaN becomes 0.
    """
    if factor == 1.0 or data.nbytes == 0:
        return
    values = _load(data, dtype)
    with np.errstate(all="ignore"):
        if _is_float(dtype):
            _store(data, dtype, values * values.dtype.type(factor))
        else:
            _store(data, dtype, _saturated(values.astype(np.float64) * factor, values.dtype))


def divide(data: Bytes, dtype: str, divisor: int) -> None:
    """Divide by a number of members. Integers exactly, rounded toward zero."""
    if divisor == 1 or data.nbytes == 0:
        return
    with np.errstate(all="ignore"):
        values = _load(data, dtype)
        divide_inplace(values, divisor)
        _store(data, dtype, values)


def adasum(arrays: list[Bytes], dtype: str) -> None:
    """Combine the members' values pairwise, in a tree, into the first: what two have in common counts once.

    The rule is that of the Adasum paper (Maleki et al., 2020). Dot products use float64.
    """
    distance = 1
    while distance < len(arrays):
        for first in range(0, len(arrays) - distance, 2 * distance):
            a, b = (_load(arrays[index], dtype).astype(np.float64) for index in (first, first + distance))
            with np.errstate(all="ignore"):
                common, square_a, square_b = float(a @ b), float(a @ a), float(b @ b)
                # A zero gradient has nothing in common with the other, which counts in full.
                keep_a = 1.0 if square_a == 0 else 1.0 - common / (2 * square_a)
                keep_b = 1.0 if square_b == 0 else 1.0 - common / (2 * square_b)
                _store(arrays[first], dtype, a * keep_a + b * keep_b)
        distance *= 2


def control_text(title: str, **details: object) -> str:
    """Return the plan of a control action: a process set that is added or removed."""
    return json.dumps({"operation": title, "name": "", **details})
