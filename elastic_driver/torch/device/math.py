"""One rank's part of each operation on a device, built from a process group's four collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic_driver.torch.device.groups import Peers
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind

_HALVES = (torch.float16, torch.bfloat16)
_SMALL = (torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class Instruction:
    """Parameters of an operation.

    Attributes:
        kind: the kind of operation.
        op: of a reduction.
        root: a global rank, of a broadcast.
        factors: applied before and after a reduction.
        may_overwrite: whether the source may be overwritten.
    """

    kind: Kind
    op: ReduceOp
    root: int
    factors: tuple[float, float]
    may_overwrite: bool


def absent(dtype: str, shape: tuple[int, ...], device: torch.device, op: ReduceOp) -> torch.Tensor:
    """Return this process's contribution to others' allreduces after it has joined (other kinds are then refused).

    It changes no result, and must not be scaled.
    """
    kind: torch.dtype = getattr(torch, dtype)
    limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    value: float = 0
    if op is ReduceOp.PRODUCT:
        value = 1
    elif op is ReduceOp.MIN:
        value = float("inf") if kind.is_floating_point else limits.max
    elif op is ReduceOp.MAX:
        value = float("-inf") if kind.is_floating_point else limits.min
    return torch.full(shape, value, dtype=kind, device=device)


def carry_out(
    peers: Peers, instruction: Instruction, source: torch.Tensor, place: int, count: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Run one tensor's part of an operation; return the result, on the same device.

    Args:
        peers: the group.
        instruction: the operation's parameters.
        source: contiguous.
        place: index of the tensor in its operation.
        count: tensors of the operation.
        sizes: of all members and tensors, for kinds whose sizes may differ: rows, or splits.
    """
    kind, row = instruction.kind, _row_bytes(source)
    if kind is Kind.ALLREDUCE:
        return _reduced(peers, instruction, source)
    if kind is Kind.REDUCESCATTER:
        whole = _reduced(peers, instruction, source)
        share, more = divmod(source.shape[0], peers.size)
        start = peers.index * share + min(peers.index, more)
        return whole[start : start + share + (peers.index < more)].clone()
    if kind is Kind.BROADCAST:
        data = flat_bytes(source) if instruction.may_overwrite else flat_bytes(source).clone()
        if data.numel():
            peers.broadcast(data, instruction.root)
        return data.view(source.dtype).reshape(source.shape)
    if kind is Kind.ALLGATHER:
        rows = [sizes[member * count + place] for member in range(peers.size)]
        joined = torch.cat(peers.allgather(flat_bytes(source), [extent * row for extent in rows]))
        return joined.view(source.dtype).reshape(sum(rows), *source.shape[1:])
    table = [
        [sizes[(member * count + place) * peers.size + to] for to in range(peers.size)] for member in range(peers.size)
    ]
    received = [table[member][peers.index] for member in range(peers.size)]
    if not any(map(any, table)) or row == 0:
        return source.new_empty((sum(received), *source.shape[1:]))
    sent = [extent * row for extent in table[peers.index]]
    output = peers.alltoall(flat_bytes(source), sent, [extent * row for extent in received])
    return output.view(source.dtype).reshape(sum(received), *source.shape[1:])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, (nbytes,) uint8, without a copy."""
    # Even one element may have a stride, which its view as bytes must not have.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    elements = 1
    for extent in tensor.shape[1:]:
        elements *= extent
    return elements * tensor.element_size()


def _scale(flat: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return flat
    if flat.dtype.is_floating_point:
        return flat.mul_(factor)
    # Clamp to the range, NaN to 0, as everywhere; a plain cast leaves these undefined.
    limits, scaled = torch.iinfo(flat.dtype), flat.double().mul_(factor)
    above, below = scaled >= float(limits.max), scaled <= float(limits.min)
    scaled.masked_fill_(above | below | scaled.isnan(), 0.0)
    return scaled.to(flat.dtype).masked_fill_(above, limits.max).masked_fill_(below, limits.min)


def _reduced(peers: Peers, instruction: Instruction, source: torch.Tensor) -> torch.Tensor:
    op, factors = instruction.op, instruction.factors
    # 16-bit floats are widened: factors and sums of many ranks lose less, and not every Gloo reduces them.
    work = source.float() if source.dtype in _HALVES else source if instruction.may_overwrite else source.clone()
    # A flat tensor is passed as it is. Another view of its memory would look like a caller that keeps gradients
    # (torch/optimizer), and a thread of the group or the lane may hold it for a moment longer than the operation lasts.
    work = _scale(work if work.dim() == 1 else work.reshape(-1), factors[0])
    small = work.dtype if op is ReduceOp.AVERAGE and work.dtype in _SMALL else None
    if small is not None:  # sums may overflow them
        work = work.int()
    if work.numel():
        if op is ReduceOp.ADASUM:
            parts = peers.allgather(flat_bytes(work), [work.numel() * work.element_size()] * peers.size)
            work = _adasum([part.view(work.dtype) for part in parts])
        elif op in (ReduceOp.MIN, ReduceOp.MAX) and work.dtype.is_floating_point:
            keys = _ordered(work, op)
            peers.allreduce(keys, op)
            work = _from_ordered(keys)
        else:
            peers.allreduce(work, op)
    if op is ReduceOp.AVERAGE and peers.size > 1:
        work.div_(peers.size, rounding_mode=None if work.dtype.is_floating_point else "trunc")
    if small is not None:
        work = work.to(small)
    work = _scale(work, factors[1]).to(source.dtype)
    return work if source.dim() == 1 else work.reshape(source.shape)


def _ordered(values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return integers in the order of the floats, with NaN as the last for MAX and as the first for MIN.

    With floats NCCL (fminf, fmaxf) prefers the value that is not NaN, and Gloo, which compares with <, may return
    either.
    """
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int64)
    limits = torch.iinfo(bits.dtype)
    # Floats are a sign and a magnitude: the greater a negative one's magnitude, the less it is.
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill_(values.isnan(), limits.min if op is ReduceOp.MIN else limits.max)


def _from_ordered(keys: torch.Tensor) -> torch.Tensor:
    values = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    floats = values.view(torch.float32 if keys.dtype == torch.int32 else torch.float64)
    return floats.masked_fill_(floats.isnan(), float("nan"))


def _adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    step = 1
    while step < len(vectors):
        for i in range(0, len(vectors) - step, 2 * step):
            a, b = vectors[i], vectors[i + step]
            dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
            unit = torch.ones_like(dot)
            of_a = torch.where(aa > 0, 1 - dot / (2 * torch.where(aa > 0, aa, unit)), unit)
            of_b = torch.where(bb > 0, 1 - dot / (2 * torch.where(bb > 0, bb, unit)), unit)
            vectors[i] = a * of_a + b * of_b
        step *= 2
    return vectors[0]
