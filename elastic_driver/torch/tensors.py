"""Tensors as operations: what is sent of them, and what is made of the results.

CPU tensors are used where they lie, contiguous ones without a copy. Tensors on other devices go through the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.device import lane as device
from elastic_driver.worker.api.arrays import checked_splits
from elastic_driver.worker.api.handles import begin
from elastic_driver.worker.api.objects import check_root
from elastic_driver.worker.engine.collectives import Bytes, ReduceOp
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, Kind, Operation, Result, TensorSpec
from elastic_driver.worker.engine.reductions import carried_dtype, check_scattered, engine_op
from elastic_driver.worker.rounds.process_sets import ProcessSet, members_of


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, as bytes, without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    return cast(Bytes, flat.view(torch.uint8).numpy())


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory can be used in place, else a contiguous copy on the CPU."""
    given: Any = tensor  # anything may come
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"cannot use a {type(given).__name__} in a collective of tensors")
    if tensor.is_sparse:
        raise TypeError("cannot use a sparse tensor in a collective: call to_dense() first, or sparse_allreduce_async")
    # A conjugate or a negative may be a flag on memory that says otherwise.
    return tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a result can be written into its memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_tensors(tensors: Sequence[Any], what: str) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"cannot {what} a {type(tensor).__name__}: it takes tensors")


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """Divides in place by a number of ranks; integers exactly, rounded toward zero."""
    if divisor != 1:
        tensor.div_(divisor, rounding_mode=None if tensor.dtype.is_floating_point else "trunc")


def tensor_spec(tensor: torch.Tensor, output: torch.Tensor | None = None) -> TensorSpec:
    """A contiguous CPU tensor as an operation names it."""
    nbytes = tensor.numel() * tensor.element_size()
    return TensorSpec(
        tensor.data_ptr() if nbytes else 0,
        nbytes,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        output.data_ptr() if output is not None and nbytes else 0,
    )


def _sendable(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """As ``on_cpu``, of a wire dtype: others as bytes, in one more dimension."""
    source = on_cpu(tensor)
    if tensor.dim() == 0:
        raise UnsupportedOperationError(f"cannot {what} a scalar: it has no first dimension; reshape it to (1,)")
    if dtype_name(source.dtype) in WIRE_DTYPES:
        return source
    return source.unsqueeze(-1).view(torch.uint8)


def _rebuild(data: npt.NDArray[np.uint8], rows: int, like: torch.Tensor) -> torch.Tensor:
    """A result's memory as a tensor like this one, but for its first dimension."""
    shape = (rows, *like.shape[1:])
    if data.nbytes == 0:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(data).view(like.dtype).reshape(shape).to(like.device)


def _delivered(results: list[torch.Tensor], outputs: Sequence[torch.Tensor] | None, *, grouped: bool) -> Any:
    done = tuple(results if outputs is None else (out.copy_(r) for out, r in zip(outputs, results, strict=True)))
    return done if grouped else done[0]


def begin_allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    op: ReduceOp,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Begins an allreduce; its result is a tuple when grouped. ``outputs`` are tensors to write into."""
    _check_tensors(tensors, "allreduce")
    members = members_of(process_set)
    if device.takes(members, tensors):
        return device.begin_on_device(
            members,
            Kind.ALLREDUCE,
            tensors,
            name,
            lambda results, _: _delivered(results, outputs, grouped=grouped),
            op=op,
            factors=factors,
        )
    names = [dtype_name(tensor.dtype) for tensor in tensors]
    works = [
        on_cpu(tensor).to(getattr(torch, carried_dtype(own, op))) for tensor, own in zip(tensors, names, strict=True)
    ]
    targets: list[torch.Tensor | None] = [None] * len(tensors) if outputs is None else list(outputs)
    results = [
        out.detach() if out is not None and out.dtype == work.dtype and _is_plain(out) else torch.empty_like(work)
        for work, out in zip(works, targets, strict=True)
    ]
    operation = Operation(
        Kind.ALLREDUCE,
        tuple(tensor_spec(work, result) for work, result in zip(works, results, strict=True)),
        name or "",
        engine_op(names, op),
        prescale=float(factors[0]),
        postscale=float(factors[1]),
        process_set=members.number,
    )

    @torch.no_grad()
    def finish(_: Result) -> Any:
        done = []
        for tensor, result, out in zip(tensors, results, targets, strict=True):
            if out is None:
                done.append(result.to(device=tensor.device, dtype=tensor.dtype))
                continue
            if out.data_ptr() != result.data_ptr() or out.device != result.device:
                out.copy_(result)
            done.append(out)
        return tuple(done) if grouped else done[0]

    return begin(members, operation, keep=(works, results, tensors, outputs), finish=finish)


def begin_allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool
) -> int:
    """Begins an allgather; its result is a tuple when grouped."""
    _check_tensors(tensors, "allgather")
    members = members_of(process_set)
    if all(tensor.dim() > 0 for tensor in tensors) and device.takes(members, tensors):
        return device.begin_on_device(
            members, Kind.ALLGATHER, tensors, name, lambda results, _: _delivered(results, None, grouped=grouped)
        )
    sources = [_sendable(tensor, "allgather") for tensor in tensors]
    specs = tuple(tensor_spec(source) for source in sources)
    operation = Operation(Kind.ALLGATHER, specs, name or "", process_set=members.number)

    def finish(result: Result) -> Any:
        done = tuple(
            _rebuild(data, rows, tensor) for data, rows, tensor in zip(result.arrays, result.rows, tensors, strict=True)
        )
        return done if grouped else done[0]

    return begin(members, operation, keep=sources, finish=finish)


def begin_broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    """Begins a broadcast, into ``output`` where one is given."""
    _check_tensors([tensor], "broadcast")
    members = members_of(process_set)
    check_root(members, root_rank)
    if device.takes(members, [tensor]):
        outputs = None if output is None else [output]
        return device.begin_on_device(
            members,
            Kind.BROADCAST,
            [tensor],
            name,
            lambda results, _: _delivered(results, outputs, grouped=False),
            root=root_rank,
        )
    source = on_cpu(tensor)
    if dtype_name(source.dtype) not in WIRE_DTYPES:
        source = source.unsqueeze(-1).view(torch.uint8)
    in_place = output is not None and _is_plain(output)
    result = source if in_place else torch.empty_like(source)
    operation = Operation(
        Kind.BROADCAST, (tensor_spec(source, result),), name or "", root=root_rank, process_set=members.number
    )

    @torch.no_grad()
    def finish(_: Result) -> torch.Tensor:
        received = result if result.dtype == tensor.dtype else result.view(tensor.dtype).squeeze(-1)
        if output is None:
            return received.to(tensor.device)
        return output if in_place else output.copy_(received)

    return begin(members, operation, keep=(source, result, output), finish=finish)


def begin_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> int:
    """Begins an alltoall; its result is the tensor received and the rows from each member."""
    _check_tensors([tensor], "alltoall")
    members = members_of(process_set)
    counts = splits
    if isinstance(splits, torch.Tensor):
        counts = splits.detach().cpu().numpy()
    if tensor.dim() > 0 and device.takes(members, [tensor]):

        def make(results: list[torch.Tensor], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
            return results[0], torch.tensor(rows, dtype=like.dtype, device=like.device)

        checked = checked_splits(members, counts, tensor.shape[0])
        return device.begin_on_device(members, Kind.ALLTOALL, [tensor], name, make, splits=(checked,))
    source = _sendable(tensor, "alltoall")
    operation = Operation(
        Kind.ALLTOALL,
        (tensor_spec(source),),
        name or "",
        splits=(checked_splits(members, counts, source.shape[0]),),
        process_set=members.number,
    )

    def finish(result: Result) -> tuple[torch.Tensor, torch.Tensor]:
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        received = torch.tensor(result.received[0], dtype=like.dtype, device=like.device)
        return _rebuild(result.arrays[0], result.rows[0], tensor), received

    return begin(members, operation, keep=source, finish=finish)


def begin_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> int:
    """Begins a reducescatter; its result is a tuple when grouped."""
    _check_tensors(tensors, "reducescatter")
    check_scattered(op)
    members = members_of(process_set)
    names = [dtype_name(tensor.dtype) for tensor in tensors]
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UnsupportedOperationError("cannot reducescatter a scalar: it has no first dimension; reshape it to (1,)")
    if device.takes(members, tensors):
        return device.begin_on_device(
            members,
            Kind.REDUCESCATTER,
            tensors,
            name,
            lambda results, _: _delivered(results, None, grouped=grouped),
            op=op,
            factors=factors,
        )
    works = [
        on_cpu(tensor).to(getattr(torch, carried_dtype(own, op))) for tensor, own in zip(tensors, names, strict=True)
    ]
    operation = Operation(
        Kind.REDUCESCATTER,
        tuple(tensor_spec(work) for work in works),
        name or "",
        engine_op(names, op),
        prescale=float(factors[0]),
        postscale=float(factors[1]),
        process_set=members.number,
    )

    def finish(result: Result) -> Any:
        done = tuple(
            _rebuild(data, rows, work).to(device=tensor.device, dtype=tensor.dtype)
            for data, rows, work, tensor in zip(result.arrays, result.rows, works, tensors, strict=True)
        )
        return done if grouped else done[0]

    return begin(members, operation, keep=works, finish=finish)
