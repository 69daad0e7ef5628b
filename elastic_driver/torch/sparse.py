"""Allreduce of sparse tensors, by gathering their indices and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_driver.torch.collectives import allgather_async
from elastic_driver.torch_private.tensors import coo_parts
from elastic_driver.worker.api.handles import synchronize
from elastic_driver.worker.engine.collectives import Average, ReduceOp, Sum
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start a sum or an average of sparse tensors, by gathering their indices and values.

    Returns:
        A function that blocks until done and returns the sparse tensor, in which an index may occur several times
        (``coalesce()`` adds them up).

    Raises:
        TypeError: the tensor is not sparse, or op is neither Average nor Sum.
    """
    if not tensor.is_sparse:
        raise TypeError("cannot reduce a dense tensor as a sparse one: use allreduce_async")
    if op not in (Average, Sum):
        raise TypeError(f"cannot reduce sparse tensors with {op!r}: op must be Average or Sum")
    members = members_of(process_set)
    indices, values = coo_parts(tensor)
    names = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    handles = (
        allgather_async(indices.transpose(0, 1).contiguous(), names[0], process_set),
        allgather_async(values, names[1], process_set),
    )

    def finish() -> torch.Tensor:
        all_indices, all_values = (synchronize(handle) for handle in handles)
        if op is Average:
            all_values = all_values / members.size
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), all_values, tensor.shape, device=all_values.device, check_invariants=False
        )

    return finish
