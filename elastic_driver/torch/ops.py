"""Collectives of tensors that block until done and are differentiable, on top of those of collectives.py.

Gradients follow Horovod: that of an allreduce is an allreduce with the same operation and factors; those of allgather
and broadcast are averaged over the ranks, like the losses of data-parallel training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from elastic_driver.torch import collectives
from elastic_driver.torch.optimizer.compression import Compression
from elastic_driver.torch.tensors import TorchAdapter
from elastic_driver.worker.api.handles import synchronize
from elastic_driver.worker.api.operations import check_rows
from elastic_driver.worker.engine.collectives import Adasum, Average, ReduceOp, Sum, resolve_op
from elastic_driver.worker.rounds.current import current
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of

_adapter = TorchAdapter()


def _check_differentiable(op: ReduceOp, operation: str, *, also: tuple[ReduceOp, ...] = ()) -> None:
    if op not in (Average, Sum, *also):
        raise RuntimeError(f"cannot differentiate {operation} with {op.name}: only Average and Sum are differentiable")


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.op, ctx.factors, ctx.process_set = op, factors, process_set
        handle = collectives.grouped_allreduce_async(tensors, None, name, op, factors[0], factors[1], process_set)
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _check_differentiable(ctx.op, "an allreduce", also=(Adasum,))
        before, after = ctx.factors
        handle = collectives.grouped_allreduce_async(grads, None, None, ctx.op, before, after, ctx.process_set)
        return None, None, None, None, *synchronize(handle)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set, ctx.rows = process_set, [tensor.shape[0] for tensor in tensors]
        return synchronize(collectives.grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        averaging = collectives.grouped_allreduce_async(grads, op=Average, process_set=ctx.process_set)
        rows = torch.tensor([ctx.rows], device="cpu")
        table = synchronize(collectives.allgather_async(rows, process_set=ctx.process_set))
        starts = table[: members_of(ctx.process_set).index].sum(dim=0).tolist()
        reduced = synchronize(averaging)
        return (
            None,
            None,
            *(grad.narrow(0, start, count) for grad, start, count in zip(reduced, starts, ctx.rows, strict=True)),
        )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(collectives.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        reduced = synchronize(collectives.allreduce_async(grads[0], op=Average, process_set=ctx.process_set))
        mine = reduced if current().slot.rank == ctx.root_rank else torch.zeros_like(reduced)
        return mine, None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(collectives.alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = synchronize(collectives.alltoall_async(grads[0], ctx.received, None, ctx.process_set))
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.op, ctx.factors, ctx.process_set = op, factors, process_set
        return synchronize(collectives.grouped_reducescatter_async(tensors, name, op, process_set, *factors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _check_differentiable(ctx.op, "a reducescatter")
        # Horovod's factor: with it the gradients of Sum and Average have the same ratio as those of allreduce.
        factor = ctx.factors[0] * ctx.factors[1]
        if ctx.op is Sum:
            factor *= members_of(ctx.process_set).size
        scaled = [grad * factor if factor != 1.0 else grad for grad in grads]
        gathered = synchronize(collectives.grouped_allgather_async(scaled, None, ctx.process_set))
        return None, None, None, None, *gathered


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the ranks' tensors, which have the same shape and dtype. Blocks until done. Differentiable.

    Args:
        tensor: not modified.
        average: older spelling of ``op``: True is Average, False is Sum.
        name: pairs the calls of the ranks; unnamed calls are paired by their order.
        compression: how the values are sent: ``Compression.none``, ``fp16``, ``bf16``, or a class of the same kind.
        op: Average (the default), Sum, Adasum, Min, Max or Product. Averages of integers are rounded toward zero.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the participants.

    Returns:
        A new tensor on the same device, bitwise the same on all ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same; on all of them.
        DuplicateNameError: an operation of this name is in flight.
        TypeError: values of this dtype cannot be reduced.
        ValueError: both average and op were given, or this process is not in the process set.
    """
    resolved = resolve_op(average=average, op=op)
    compressed, context = compression.compress(tensor)
    apply: Any = _Allreduce.apply
    (reduced,) = apply(name, resolved, (prescale_factor, postscale_factor), process_set, compressed)
    return cast(torch.Tensor, compression.decompress(reduced, context))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run :func:`allreduce` on several tensors in one operation."""
    resolved = resolve_op(average=average, op=op)
    pairs = [compression.compress(tensor) for tensor in tensors]
    apply: Any = _Allreduce.apply
    factors = (prescale_factor, postscale_factor)
    reduced = apply(name, resolved, factors, process_set, *(compressed for compressed, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Join the ranks' tensors along their first dimension, the only one that may differ. Differentiable.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
        UnsupportedOperationError: a scalar.
    """
    check_rows(_adapter, [tensor], "allgather")
    apply: Any = _Allgather.apply
    return cast(torch.Tensor, apply(name, process_set, tensor)[0])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Run :func:`allgather` on several tensors in one operation."""
    check_rows(_adapter, tensors, "allgather")
    apply: Any = _Allgather.apply
    return cast(tuple[torch.Tensor, ...], apply(name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of a global rank, on every rank, as a new tensor. Blocks until done. Differentiable.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' roots, shapes or dtypes differ; on all of them.
        ValueError: there is no such rank.
    """
    apply: Any = _Broadcast.apply
    return cast(torch.Tensor, apply(tensor, root_rank, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank and receive rows from each. Blocks until done. Differentiable.

    Args:
        tensor: the first rows go to the first member, and so on.
        splits: rows to each member, a list or a tensor; the same number of rows to each by default.
        name: pairs the calls of the ranks; unnamed calls are paired by their order.
        process_set: the participants.

    Returns:
        The rows received, joined in the order of the members; with splits also the rows from each.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' dtypes or other dimensions differ; on all of them.
        UnsupportedOperationError: a scalar.
        ValueError: the splits do not add up to the number of rows.
    """
    apply: Any = _Alltoall.apply
    output, received = apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce the ranks' tensors and give each rank some rows of the result. Differentiable.

    Rows are divided in the order of the members, evenly; if that is impossible, the first members get one more.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks did not submit the same; on all of them.
        TypeError: values of this dtype cannot be reduced.
        UnsupportedOperationError: a scalar, or Adasum.
    """
    (result,) = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return result


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run :func:`reducescatter` on several tensors in one operation."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    apply: Any = _Reducescatter.apply
    factors = (prescale_factor, postscale_factor)
    scattered = apply(name, op, factors, process_set, *(compressed for compressed, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(scattered, pairs, strict=True)]
