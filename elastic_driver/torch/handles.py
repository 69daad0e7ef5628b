"""Collectives that are begun now and waited for later: a handle for ``poll`` and ``synchronize``.

Until then the tensors must not be changed. Functions that end in ``_`` write into the tensors they are given.
None of them is differentiable; those of ops.py are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_driver.torch.tensors import (
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
)
from elastic_driver.worker.api.handles import poll, synchronize
from elastic_driver.worker.engine.collectives import Average, ReduceOp, Sum, resolve_op
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what :func:`allreduce` does."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=average, op=op)
    return begin_allreduce([tensor], None, resolved, name, factors, process_set, grouped=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what :func:`allreduce_` does."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=average, op=op)
    return begin_allreduce([tensor], [tensor], resolved, name, factors, process_set, grouped=False)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what :func:`grouped_allreduce` does; ``synchronize`` returns a tuple."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=average, op=op)
    return begin_allreduce(list(tensors), None, resolved, name, factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's signature
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what :func:`grouped_allreduce_` does; ``synchronize`` returns a tuple."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=average, op=op)
    return begin_allreduce(list(tensors), list(tensors), resolved, name, factors, process_set, grouped=True)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begins a sum or an average of sparse tensors, by gathering their indices and values.

    Returns:
        A function that blocks until it is done and returns the sparse tensor, in which an index may be there several
        times (``coalesce()`` adds them up).

    Raises:
        TypeError: the tensor is not sparse, or op is neither Average nor Sum.
    """
    if not tensor.is_sparse:
        raise TypeError("cannot reduce a dense tensor as a sparse one: use allreduce_async")
    if op not in (Average, Sum):
        raise TypeError(f"cannot reduce sparse tensors with {op!r}: op is Average or Sum")
    members = members_of(process_set)
    indices = tensor._indices().transpose(0, 1).contiguous()
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    handles = (
        allgather_async(indices, names[0], process_set),
        allgather_async(tensor._values(), names[1], process_set),
    )

    def finish() -> torch.Tensor:
        all_indices, values = (synchronize(handle) for handle in handles)
        if op is Average:
            values = values / members.size
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), values, tensor.shape, check_invariants=False)

    return finish


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins what :func:`allgather` does."""
    return begin_allgather([tensor], name, process_set, grouped=False)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what :func:`grouped_allgather` does."""
    return begin_allgather(list(tensors), name, process_set, grouped=True)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what :func:`broadcast` does."""
    return begin_broadcast(tensor, None, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what :func:`broadcast_` does."""
    return begin_broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what :func:`alltoall` does; ``synchronize`` returns the tensor and the rows from each member."""
    return begin_alltoall(tensor, splits, name, process_set)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins what :func:`reducescatter` does."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=None, op=op)
    return begin_reducescatter([tensor], resolved, name, factors, process_set, grouped=False)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins what :func:`grouped_reducescatter` does; ``synchronize`` returns a tuple."""
    factors = (prescale_factor, postscale_factor)
    resolved = resolve_op(average=None, op=op)
    return begin_reducescatter(list(tensors), resolved, name, factors, process_set, grouped=True)
