"""Broadcast of parameters and optimizer states, in few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.snapshot import (
    broadcast_tensors,
    broadcast_tree,
    check_can_be_kept,
    flatten,
    optimizer_tree,
    set_optimizer,
)
from elastic_driver.worker.api.objects import check_root
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set, members_of


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with the root's, in place. Blocks until done.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``; the same on all ranks.
            Values that are not tensors are skipped.
        root_rank: the root (a global rank).
        process_set: the participants.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the ranks' parameters have different sizes.
        UnsupportedOperationError: a tensor has no values yet, or cannot be sent bit for bit.
        ValueError: there is no such rank, or params is something else.
    """
    members = members_of(process_set)
    check_root(members, root_rank)
    members.context.check()
    given: Any = params  # callers may pass anything
    if isinstance(given, Mapping):
        named = sorted(given.items())
    elif isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor)):
        named = [item if isinstance(item, tuple) else (f"number {n}", item) for n, item in enumerate(given)]
    else:
        raise ValueError(f"cannot broadcast the parameters of a {type(params).__name__}: give model.state_dict()")
    tensors: list[torch.Tensor] = []
    for name, value, *_ in named:
        if not isinstance(value, torch.Tensor):
            continue
        check_can_be_kept(value, str(name))
        if value.layout is not torch.strided:
            raise UnsupportedOperationError(
                f"cannot broadcast {name}: it is a sparse tensor; make it dense, or sync a TorchState"
            )
        tensors.append(value.detach())
    broadcast_tensors(members, tensors, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Set an optimizer's state and options to the root's, bitwise. Blocks until done.

    The structure is sent too: an optimizer that has not stepped yet gets all of the root's state. As in Horovod its
    parameters have gradients of zeros afterwards.

    Args:
        optimizer: over the same parameters, in the same groups, on all ranks.
        root_rank: the root (a global rank).
        model: shows which parameters of an SGD have sparse gradients: those of its sparse embeddings.
        process_set: the participants.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    members = members_of(process_set)
    check_root(members, root_rank)
    members.context.check()
    if not optimizer.state:
        _zero_gradients(optimizer, model)
    if members.size == 1:
        return

    def broadcast() -> None:
        skeleton, tensors = flatten(optimizer_tree(optimizer))
        received = broadcast_tree(skeleton, tensors, root_rank, process_set)
        if members.context.slot.rank != root_rank:
            members.context.writing.write(lambda: set_optimizer(optimizer, received))

    members.context.wholes.write(broadcast)


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Give all trained parameters a gradient of zeros, with the layout of their next gradient.

    Horovod initializes a new optimizer's state by a step with such gradients, and leaves them in place: scripts read
    them.
    """
    embeddings = (
        [] if model is None else [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    )
    sparse = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad:
                continue
            if isinstance(optimizer, torch.optim.SparseAdam) or (
                isinstance(optimizer, torch.optim.SGD) and id(param) in sparse
            ):
                rows = param.detach()[:0]
                none = torch.empty((1, 0), dtype=torch.int64, device=param.device)
                param.grad = torch.sparse_coo_tensor(
                    none, rows, param.shape, device=param.device, check_invariants=False
                )
            else:
                param.grad = torch.zeros_like(param)
