"""Private parts of torch's tensors, optimizers and modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import batchnorm

from elastic_driver.torch_private.features import Feature, has, mentions

if TYPE_CHECKING:
    BatchNorm = batchnorm._BatchNorm
else:
    BatchNorm = getattr(batchnorm, "_BatchNorm", torch.nn.BatchNorm1d)

# --- gradients and commits ---


def _fast_copies_changes() -> Iterator[str]:
    yield from has(torch, "_foreach_copy_", "_foreach_zero_")


def _gradients_in_place_changes() -> Iterator[str]:
    yield from has(torch._C, "_storage_Use_Count")
    yield from has(torch.UntypedStorage, "_cdata")
    yield from has(torch.Tensor, "_version")


FAST_COPIES = Feature("commits and gradients", _fast_copies_changes, "tensors are copied one by one, which is slower")
GRADIENTS_IN_PLACE = Feature(
    "DistributedOptimizer",
    _gradients_in_place_changes,
    (
        "gradients are copied out of their communication buffers, which is slower; changes during the reduction are "
        "not detected"
    ),
)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, wait: bool = True) -> None:
    """Copy tensors into tensors. Without ``wait``, copies between a device and the host may still be in flight."""
    if FAST_COPIES.has_parts():
        torch._foreach_copy_(list(targets), list(sources), non_blocking=not wait)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=not wait)


def zero_each(tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors with zeros."""
    if FAST_COPIES.has_parts():
        torch._foreach_zero_(list(tensors))
    else:
        for tensor in tensors:
            tensor.zero_()


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change of the tensor's values; always 0 if torch has none."""
    return tensor._version if GRADIENTS_IN_PLACE.is_there else 0


def storage_references(tensor: torch.Tensor) -> int:
    """Return how many tensors share its memory. Needs GRADIENTS_IN_PLACE."""
    count: Callable[[int], int] = torch._C._storage_Use_Count
    return count(tensor.untyped_storage()._cdata)


def references(tensor: torch.Tensor) -> int:
    """Return the number of Python references to it, plus some that are the same in each call."""
    return sys.getrefcount(tensor)


def _attached_references() -> int:
    parameter, view = torch.nn.Parameter(torch.zeros(1, device="cpu")), torch.zeros(1, device="cpu")
    before = references(view)
    parameter.grad = view
    return references(view) - before


ATTACHED_REFERENCES = _attached_references()
"""How many references being a gradient adds to a tensor, which differs between versions of torch."""


# --- states ---

_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


def _states_changes() -> Iterator[str]:
    yield from mentions(torch.optim.Optimizer.__init__, *_OPTIMIZER_HOOKS)
    yield from mentions(torch.nn.Module.__init__, "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    yield from mentions(torch.nn.Module.state_dict, "_metadata")


def _schedulers_changes() -> Iterator[str]:
    yield from mentions(torch.optim.lr_scheduler.LRScheduler.step, "_opt_called")


STATES = Feature("TorchState", _states_changes, "states are restored by load_state_dict(), not bit for bit")
SCHEDULERS = Feature(
    "DistributedOptimizer", _schedulers_changes, "schedulers made before it may warn that the optimizer has not stepped"
)


def has_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's ``state_dict`` may differ from its state.

    Hooks after loading do not show that: DistributedOptimizer has one.
    """
    return not STATES.has_parts() or any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)


def has_load_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module, not counting submodules, may have hooks for loading."""
    return not STATES.has_parts() or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


def metadata_of(values: Mapping[Any, Any]) -> Any:
    """Return the attribute that ``state_dict`` sets on its result, the versions of the modules; None without."""
    return getattr(values, "_metadata", None)


def set_metadata(values: Any, metadata: Any) -> None:
    """Set that attribute on a dict, from which ``load_state_dict`` reads it."""
    values._metadata = metadata


def note_step(optimizer: Any) -> None:
    """Notify schedulers of an optimizer that it has stepped."""
    if SCHEDULERS.has_parts():
        optimizer._opt_called = True


# --- single tensors and modules ---


def _sparse_changes() -> Iterator[str]:
    yield from has(torch.Tensor, "_indices", "_values")


def _batch_norm_changes() -> Iterator[str]:
    yield from has(batchnorm, "_BatchNorm")
    yield from mentions(torch.nn.BatchNorm1d.forward, "_check_input_dim")


SPARSE = Feature("sparse tensors", _sparse_changes)
BATCH_NORM = Feature("SyncBatchNorm", _batch_norm_changes)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a sparse tensor, coalesced or not.

    Raises:
        UnsupportedTorchError: torch no longer gives access to them.
    """
    SPARSE.check()
    return tensor._indices(), tensor._values()
