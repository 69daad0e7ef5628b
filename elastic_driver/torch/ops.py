"""Collectives on tensors. Those of autograd are differentiable, as Horovod's are.

CPU tensors are used where they lie; others go through the CPU.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from elastic_driver.torch.compression import Compression, Compressor
from elastic_driver.worker.collectives import GLOBAL, Average, Bytes, ReduceOp, Sum, resolve_op
from elastic_driver.worker.context import Context
from elastic_driver.worker.numpy_api import carried_dtype, gather_first_dims, wire_op
from elastic_driver.worker.objects import allgather_bytes, broadcast_array, check_root
from elastic_driver.worker.runtime import current


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
    if tensor.is_sparse:
        raise TypeError("cannot use a sparse tensor in a collective: call to_dense() first")
    return tensor.detach().to("cpu").contiguous()


def reduce_cpu(context: Context, work: torch.Tensor, op: ReduceOp) -> None:
    """Reduces a contiguous CPU tensor in place, on the communication thread. Blocks until done."""
    if work.numel() == 0 or context.slot.size == 1:
        context.check()
        return
    data, dtype, limit_s = tensor_bytes(work), dtype_name(work.dtype), context.limits.collective_s
    context.run(lambda collectives: collectives.allreduce(GLOBAL, data, dtype, op, timeout_s=limit_s))


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc())


def divide(tensor: torch.Tensor, divisor: int) -> None:
    """Divides in place by a number of ranks; integers exactly, rounded toward zero."""
    if divisor != 1:
        tensor.div_(divisor, rounding_mode=None if tensor.dtype.is_floating_point else "trunc")


def _allreduced(
    tensor: torch.Tensor, op: ReduceOp, compression: Compressor, prescale_factor: float, postscale_factor: float
) -> torch.Tensor:
    context = current()
    name = dtype_name(compression.dtype_for(tensor.dtype))
    work = on_cpu(tensor).to(getattr(torch, carried_dtype(name, op)), copy=True)
    _scale(work, prescale_factor)
    reduce_cpu(context, work, wire_op(name, op))
    if op is Average:
        divide(work, context.slot.size)
    _scale(work, postscale_factor)
    return work.to(device=tensor.device, dtype=tensor.dtype)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, compression: Compressor, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.op, ctx.compression, ctx.prescale, ctx.postscale = op, compression, prescale, postscale
        return _allreduced(tensor, op, compression, prescale, postscale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.op not in (Average, Sum):
            raise RuntimeError(f"cannot differentiate an allreduce with {ctx.op.name}: only Average and Sum can be")
        return _allreduced(grads[0], ctx.op, ctx.compression, ctx.prescale, ctx.postscale), None, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        context = current()
        source = on_cpu(tensor)
        rows = gather_first_dims(context, tuple(source.shape), str(source.dtype))
        ctx.start, ctx.rows = sum(rows[: context.slot.rank]), rows[context.slot.rank]
        row_bytes = source.element_size() * int(np.prod(source.shape[1:], dtype=np.int64))
        gathered = allgather_bytes(context, tensor_bytes(source), [count * row_bytes for count in rows])
        shape = (sum(rows), *source.shape[1:])
        output = torch.empty(shape, dtype=source.dtype) if gathered.nbytes == 0 else torch.from_numpy(gathered)
        return output.view(source.dtype).reshape(shape).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _allreduced(grads[0], Sum, Compression.none, 1.0, 1.0).narrow(0, ctx.start, ctx.rows)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        return broadcast_(tensor.detach().clone(), root_rank)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduced = _allreduced(grads[0], Sum, Compression.none, 1.0, 1.0)
        return reduced if current().slot.rank == ctx.root_rank else torch.zeros_like(reduced), None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines the ranks' tensors, which have one shape and dtype. Blocks until done. Differentiable.

    Args:
        tensor: left as it is.
        average: older spelling of ``op``: True is Average, False is Sum.
        name: for Horovod's signature; calls are matched by their order.
        compression: ``Compression.none`` or ``Compression.fp16``.
        op: Average (the default), Sum, Min, Max or Product. Averages of integers are rounded toward zero.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Returns:
        A new tensor on the same device, bitwise the same on all ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        TypeError: values of this dtype cannot be reduced.
        ValueError: both average and op were given.
    """
    resolved = resolve_op(average=average, op=op)
    apply: Any = _Allreduce.apply
    return cast(torch.Tensor, apply(tensor, resolved, compression, prescale_factor, postscale_factor))


@torch.no_grad()
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Like :func:`allreduce`, in place: returns the tensor given, overwritten."""
    resolved = resolve_op(average=average, op=op)
    context = current()
    in_place = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_sparse
    if in_place and carried_dtype(dtype_name(tensor.dtype), resolved) == dtype_name(tensor.dtype):
        _scale(tensor, prescale_factor)
        reduce_cpu(context, tensor, wire_op(dtype_name(tensor.dtype), resolved))
        if resolved is Average:
            divide(tensor, context.slot.size)
        _scale(tensor, postscale_factor)
        return tensor
    return tensor.copy_(_allreduced(tensor, resolved, Compression.none, prescale_factor, postscale_factor))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The ranks' tensors joined along their first dimension, in which alone they may differ. Differentiable.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: a scalar, or the ranks' dtypes or other dimensions differ (then on all ranks).
    """
    if tensor.dim() == 0:
        raise ValueError("cannot allgather a scalar: it has no first dimension; reshape it to (1,)")
    apply: Any = _Allgather.apply
    return cast(torch.Tensor, apply(tensor))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor, on every rank, as a new tensor. Blocks until done. Differentiable.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    apply: Any = _Broadcast.apply
    return cast(torch.Tensor, apply(tensor, root_rank))


@torch.no_grad()
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrites the tensor with the root's, and returns it. Blocks until done."""
    context = current()
    check_root(context, root_rank)
    context.check()
    work = on_cpu(tensor)
    broadcast_array(context, tensor_bytes(work), root_rank)
    return tensor if work.data_ptr() == tensor.data_ptr() else tensor.copy_(work)
