"""DistributedDataParallel over the round's process group: wrapped again in each round, the old wrapper taken apart."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_driver.torch.distributed.group import process_group
from elastic_driver.torch.state import TorchState
from elastic_driver.torch_private.groups import COMPILE_AHEAD, as_in_forward, free_wrapper

# By module: its last wrapper. Weak both ways, as a wrapper holds its module.
_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)


def distributed_data_parallel(module: torch.nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """Return ``DistributedDataParallel(module, process_group=hvd.process_group(), **kwargs)``, made once per round.

    Call it in the training function, which ``elastic.run`` calls in each round: all members do, and it blocks until
    they have. The module's wrapper of the round before is taken apart first: its hooks are removed from the parameters,
    and its buckets are freed. Further calls in the same round return the same wrapper.

    Args:
        module: the module to train; the state keeps this one, not the wrapper.
        **kwargs: DistributedDataParallel's, except ``process_group``.

    Raises:
        HorovodInternalError: a peer is gone, or the round is broken.
    """
    group = process_group()
    former = wrapper_of(module)
    if former is not None:
        if former.process_group is group:
            return former
        take_apart(former)
    wrapper = DistributedDataParallel(module, process_group=group, **kwargs)
    _wrappers[module] = weakref.ref(wrapper)
    return wrapper


def wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the module's last wrapper, if it still exists."""
    reference = _wrappers.get(module)
    return reference() if reference is not None else None


def take_apart(wrapper: DistributedDataParallel) -> None:
    """Free a wrapper's hooks on the parameters, buckets, and reference to the process group."""
    _wrappers.pop(wrapper.module, None)
    free_wrapper(wrapper)


def compile_ahead(
    module: torch.nn.Module, step: Callable[[torch.nn.Module], Any], *, bucket_cap_mb: float = 25.0
) -> None:
    """Compile a model in this process alone, before it joins the others, which keep training meanwhile.

    Call it before the function under ``elastic.run``, where the others begin to wait for a new worker:
    ``hvd.compile_ahead(model, lambda model: loss_of(model(batch)).backward())``. It compiles what
    DistributedDataParallel would have torch compile: graphs divided where its buckets end, so that gradients are
    reduced during the backward pass. The model's buffers and gradients and torch's random numbers on the CPU are
    unchanged afterwards.

    Args:
        module: the module to wrap later: compiled by ``module.compile()``, or by torch.compile within the step.
        step: a forward and a backward pass of this module, on a batch like later ones. It must not change parameters,
            nor call collectives.
        bucket_cap_mb: as passed to DistributedDataParallel.

    Raises:
        UnsupportedTorchError: this version of torch cannot do that.
    """
    COMPILE_AHEAD.check()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(param, param.grad) for param in module.parameters()]
    for param, _ in gradients:
        param.grad = None
    # The only attribute of the active wrapper that torch's compiler reads.
    wrapper: Any = types.SimpleNamespace(bucket_bytes_cap=int(bucket_cap_mb * (1 << 20)))
    try:
        with torch.random.fork_rng(devices=[]), as_in_forward(wrapper):
            step(module)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for param, gradient in gradients:
            param.grad = gradient


class DDPState(TorchState):
    """A TorchState whose model is trained by DistributedDataParallel: ``DDPState(model=model, optimizer=…, epoch=0)``.

    ``state.ddp`` is the model's wrapper in the current round; ``state.model`` stays the module itself. At each reset
    the old wrapper is taken apart.

    Args:
        model: a module, or a DistributedDataParallel, whose module is used.
        optimizer: an optimizer of the module's parameters, if any.
        ddp: arguments for DistributedDataParallel, except ``process_group``.
        **kwargs: as in TorchState.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ddp: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
            take_apart(wrapper)
        # The state is already equal on all ranks.
        object.__setattr__(self, "_ddp_options", {"init_sync": False, **(ddp or {})})
        object.__setattr__(self, "_ddp", None)
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    @property
    def ddp(self) -> DistributedDataParallel:
        """The model, wrapped for the current round. All members make the first call in a round, which blocks."""
        wrapper = distributed_data_parallel(self.model, **self._ddp_options)
        object.__setattr__(self, "_ddp", wrapper)
        return wrapper

    def reset(self) -> None:
        """Take the old round's wrapper apart, and reset the other values."""
        wrapper = self._ddp
        if wrapper is not None:
            object.__setattr__(self, "_ddp", None)
            take_apart(wrapper)
        super().reset()
