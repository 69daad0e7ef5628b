"""Parameters and optimizer states from one rank to all, in few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_driver.torch.snapshot import broadcast_tensors, broadcast_tree, flatten, optimizer_tree, set_optimizer
from elastic_driver.worker.objects import check_root
from elastic_driver.worker.runtime import current


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int) -> None:
    """Overwrites parameters with the root's, in place. Blocks until done.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``; the same names on all ranks. Values that are
            no tensors are passed over.
        root_rank: whose parameters all get.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    context = current()
    check_root(context, root_rank)
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [value.detach() for _, value in pairs if isinstance(value, torch.Tensor)]
    broadcast_tensors(context, tensors, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes an optimizer's state and options those of the root's, bitwise. Blocks until done.

    The structure travels too: an optimizer that has made no step yet gets all of the root's state.

    Args:
        optimizer: over the same parameters, in the same groups, on all ranks.
        root_rank: whose state all get.
        model: for Horovod's signature.

    Raises:
        HorovodInternalError: a peer is gone.
        ValueError: there is no such rank.
    """
    context = current()
    check_root(context, root_rank)
    if context.slot.size == 1:
        return
    skeleton, tensors = flatten(optimizer_tree(optimizer))
    received = broadcast_tree(context, skeleton, tensors, root_rank)
    if context.slot.rank != root_rank:
        set_optimizer(optimizer, received)
