"""The state of a PyTorch training: models, optimizers, schedulers, samplers, plain attributes."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.sampler import ElasticSampler
from elastic_driver.torch.snapshot import (
    HostCopies,
    HostCopy,
    broadcast_tree,
    copy_all,
    flatten,
    optimizer_tree,
    set_optimizer,
    with_metadata,
)
from elastic_driver.torch_private.tensors import has_load_hooks, metadata_of
from elastic_driver.worker.rounds.current import current
from elastic_driver.worker.state import ObjectState, check_attributes, check_names


class Handler(Protocol):
    """Reads and writes the state of one kind of value."""

    def tree(self) -> Any:
        """Return the state to keep; tensors in it are the live ones."""

    def set(self, tree: Any) -> None:
        """Set the value's state to a tree, whose tensors stay the caller's."""

    def restored(self) -> None:
        """Clean up after a restore."""

    def reset(self) -> None:
        """Adapt to a new round."""


class _Handler:
    def __init__(self, value: Any) -> None:
        self.value = value

    def tree(self) -> Any:
        return self.value.state_dict()

    def set(self, tree: Any) -> None:
        self.value.load_state_dict(copy.deepcopy(tree))

    def restored(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class ModelHandler(_Handler):
    """The state of a module."""

    @torch.no_grad()
    def set(self, tree: Any) -> None:
        live = self.value.state_dict(keep_vars=True)
        if _convert(self.value, live, tree):
            live = self.value.state_dict(keep_vars=True)
        held = _held(self.value)
        is_plain = not _has_hooks(self.value)
        # Only into tensors that the module itself holds: a state_dict may be custom.
        fits = (
            is_plain
            and live.keys() == tree.keys()
            and all(
                live[name] is held.get(name)
                and isinstance(saved, torch.Tensor)
                and live[name].shape == saved.shape
                and live[name].dtype == saved.dtype
                and live[name].layout == saved.layout
                for name, saved in tree.items()
            )
        )
        if fits:
            # Not into detached tensors, which do not propagate a sparse tensor's new indices.
            copy_all([live[name] for name in tree], list(tree.values()))
            return
        # By the module's own method, for extra state, hooks, or other shapes. It copies into parameters and buffers,
        # but may keep any other value it is given.
        kept = {name: value if is_plain and name in held else copy.deepcopy(value) for name, value in tree.items()}
        self.value.load_state_dict(with_metadata(kept, copy.deepcopy(metadata_of(tree))))


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether the module, or one in it, has hooks for loading, or its own way to load."""
    return any(
        has_load_hooks(part) or type(part).load_state_dict is not torch.nn.Module.load_state_dict
        for part in module.modules()
    )


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own parameters and buffers."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _convert(module: torch.nn.Module, live: Any, tree: Any) -> bool:
    """Convert a module's tensors to their dtypes in a tree; return whether any had another.

    Converts as ``module.double()`` does. ``load_state_dict`` would cast the values to the module's current dtypes.
    """
    others = [
        name
        for name, saved in tree.items()
        if isinstance(saved, torch.Tensor)
        and isinstance(live.get(name), torch.Tensor)
        and live[name].dtype != saved.dtype
        and live[name].shape == saved.shape
    ]
    if not others:
        return False
    held = _held(module)
    for name in others:
        if name not in held:  # from a custom state_dict
            raise ValueError(
                f"cannot restore {name}: it now has dtype {live[name].dtype}, but {tree[name].dtype} in the saved state"
            )
    for name in others:
        if held[name].dtype != tree[name].dtype:  # else the same tensor was converted under another name
            held[name].grad = None  # it has another dtype, and belongs to an undone step
            held[name].data = held[name].data.to(tree[name].dtype)
    return True


class _OptimizerHandler(_Handler):
    def tree(self) -> Any:
        return optimizer_tree(self.value)

    def set(self, tree: Any) -> None:
        set_optimizer(self.value, tree)

    def restored(self) -> None:
        # A failed step leaves gradients behind, partly reduced. They belong to no commit.
        forget = getattr(self.value, "forget_gradients", None)
        if forget is not None:
            forget()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None


class _SamplerHandler(_Handler):
    def reset(self) -> None:
        self.value.reset()


def _handler_of(value: Any) -> Handler | None:
    if isinstance(value, torch.nn.Module):
        return ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        if hasattr(value, "consolidate_state_dict"):
            raise UnsupportedOperationError(
                f"cannot keep a {type(value).__name__}: no rank has all of its state; use hvd.elastic.ZeroState"
            )
        return _OptimizerHandler(value)
    if isinstance(value, ElasticSampler):
        return _SamplerHandler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _Handler(value)
    return None


class TorchState(ObjectState):
    """State of a training: ``TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)``.

    For values that are modules, optimizers, samplers, or have ``state_dict`` and ``load_state_dict`` (LR schedulers,
    gradient scalers), their state is kept; all others are plain attributes. ``save`` copies into host buffers, two sets
    in turn, so that an incomplete copy leaves the restore point intact. ``restore`` and ``sync`` are bitwise; tensors
    on other devices go through the CPU.

    Args:
        model: a module, if any.
        optimizer: an optimizer, if any.
        **kwargs: further values, by the names of their attributes.
    """

    model: Any = None  # for readers of a state without one
    optimizer: Any = None

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, Handler] = {}
        self._copies = HostCopies()
        self._copy = HostCopy({}, [])  # the restore point of values with a handler
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        plain: dict[str, Any] = {}
        for name, value in (given | kwargs).items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
        check_attributes(self._handlers)
        super().__init__(None, None, **plain)
        for name in self._handlers:
            object.__setattr__(self, name, (given | kwargs)[name])
        self._copy = self._copies.take(self._trees())

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handler = _handler_of(value)
            if handler is None:
                raise TypeError(
                    f"cannot replace state.{name} with a {type(value).__name__}: it has no state_dict and "
                    "load_state_dict"
                )
            handlers[name] = handler
        super().__setattr__(name, value)

    def _trees(self) -> dict[str, Any]:
        return {name: handler.tree() for name, handler in self._handlers.items()}

    def save(self) -> None:
        """Copy all values as the new restore point."""
        former = self._copy
        super().save()
        self._copies.let_go(former)

    def _copied(self) -> dict[str, Any]:
        return {**super()._copied(), "_copy": self._copies.take(self._trees())}

    def restore(self) -> None:
        """Restore all values from the restore point."""
        saved = self._copy.tree()
        for name, handler in self._handlers.items():
            handler.set(saved[name])
            handler.restored()
        super().restore()

    def sync(self) -> None:
        """Send rank 0's values to all ranks: one object, then all tensors in few messages."""
        context = current()
        if context.slot.size > 1:
            skeleton, tensors = flatten(self._trees())
            commits, values, trees = broadcast_tree((self._commits, _Opaque(self._values()), skeleton), tensors, 0)
            if context.slot.rank != 0:
                for name, handler in self._handlers.items():
                    handler.set(trees[name])
                self._take(values.value)
        else:
            commits = self._commits
        self.reset()  # a sampler made before init() learns its rank only now
        self._save_as(commits)

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """Return the restore point, by attribute."""
        if lend:
            self._copies.lend(self._copy)
        return {**self._copy.tree(), **super()._durable_values()}

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Set the values and the restore point from a commit on disk."""
        check_names(values, [*self._handlers, *self._names])
        for name, handler in self._handlers.items():
            handler.set(values[name])
        self._take({name: values[name] for name in self._names})
        self._save_as(commits)

    def reset(self) -> None:
        """Adapt all values to a new round."""
        for handler in self._handlers.values():
            handler.reset()


class _Opaque:
    """Wraps plain attributes while they are sent: their tensors are pickled with them, without a further copy."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Opaque:
        return self
