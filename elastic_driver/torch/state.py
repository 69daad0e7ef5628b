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
    """How one kind of value is read and written."""

    def tree(self) -> Any:
        """What there is to keep; tensors in it are the live ones."""

    def set(self, tree: Any) -> None:
        """Makes the value that of a tree, whose tensors stay the caller's."""

    def restored(self) -> None:
        """After a failed step."""

    def reset(self) -> None:
        """In a new round."""


class _Handler:
    def __init__(self, value: Any) -> None:
        self.value = value

    def tree(self) -> Any:
        return self.value.state_dict()

    def set(self, tree: Any) -> None:
        self.value.load_state_dict(copy.deepcopy(tree))

    def restored(self) -> None:
        """Nothing to do."""

    def reset(self) -> None:
        """Nothing to do."""


class ModelHandler(_Handler):
    """Of a module."""

    @torch.no_grad()
    def set(self, tree: Any) -> None:
        live = self.value.state_dict(keep_vars=True)
        if _convert(self.value, live, tree):
            live = self.value.state_dict(keep_vars=True)
        held = _held(self.value)
        is_plain = not _has_hooks(self.value)
        # Only into what the module holds itself: a state_dict may be of its own making.
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
            # Not by way of the detached ones, which do not pass on that a sparse tensor has other indices.
            copy_all([live[name] for name in tree], list(tree.values()))
            return
        # The module's own way, for extra state, hooks, other shapes. It copies into parameters and buffers, and may
        # keep whatever else it is given.
        kept = {name: value if is_plain and name in held else copy.deepcopy(value) for name, value in tree.items()}
        self.value.load_state_dict(with_metadata(kept, copy.deepcopy(metadata_of(tree))))


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether it, or a module in it, has hooks for loading, or loads in a way of its own."""
    return any(
        has_load_hooks(part) or type(part).load_state_dict is not torch.nn.Module.load_state_dict
        for part in module.modules()
    )


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers themselves."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _convert(module: torch.nn.Module, live: Any, tree: Any) -> bool:
    """Gives tensors of a module back the dtypes that they have in a tree; returns whether any had another.

    As ``module.double()`` does it. ``load_state_dict`` would cast the values to the dtypes that the module has now.
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
        if name not in held:  # of a state_dict of the module's own making
            raise ValueError(
                f"cannot make {name} what it was: it has dtype {live[name].dtype} now, and {tree[name].dtype} in the "
                "saved state"
            )
    for name in others:
        if held[name].dtype != tree[name].dtype:  # else the same tensor under another name was done
            held[name].grad = None  # of another dtype, and of a step that is undone
            held[name].data = held[name].data.to(tree[name].dtype)
    return True


class _OptimizerHandler(_Handler):
    def tree(self) -> Any:
        return optimizer_tree(self.value)

    def set(self, tree: Any) -> None:
        set_optimizer(self.value, tree)

    def restored(self) -> None:
        # A failed step leaves gradients behind, in part reduced. They are of no commit.
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
                f"cannot keep a {type(value).__name__}: no rank has all of its state; hvd.elastic.ZeroState keeps it"
            )
        return _OptimizerHandler(value)
    if isinstance(value, ElasticSampler):
        return _SamplerHandler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _Handler(value)
    return None


class TorchState(ObjectState):
    """State of a training: ``TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)``.

    Values that are modules, optimizers, samplers, or have ``state_dict`` and ``load_state_dict`` (LR schedulers,
    gradient scalers) are kept by their state; all others as plain attributes. ``save`` copies into host buffers, two
    sets in turn, so that one that fails half way leaves the restore point as it was. ``restore`` and ``sync`` are
    bitwise, tensors on other devices go through the CPU.

    Args:
        model: a module, if any.
        optimizer: an optimizer, if any.
        **kwargs: further values, by the names they have on the state.
    """

    model: Any = None  # for who asks a state that was given none
    optimizer: Any = None

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, Handler] = {}
        self._copies = HostCopies()
        self._copy = HostCopy({}, [])  # the restore point of what has a handler
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
                raise TypeError(f"cannot replace state.{name} by a {type(value).__name__}: it has no state of its kind")
            handlers[name] = handler
        super().__setattr__(name, value)

    def _trees(self) -> dict[str, Any]:
        return {name: handler.tree() for name, handler in self._handlers.items()}

    def save(self) -> None:
        """See State."""
        former = self._copy
        super().save()
        self._copies.let_go(former)

    def _copied(self) -> dict[str, Any]:
        return {**super()._copied(), "_copy": self._copies.take(self._trees())}

    def restore(self) -> None:
        """See State."""
        saved = self._copy.tree()
        for name, handler in self._handlers.items():
            handler.set(saved[name])
            handler.restored()
        super().restore()

    def sync(self) -> None:
        """See State. One object, then the tensors of all values in few messages."""
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
        self.reset()  # a sampler made before init() knows its rank only now
        self._save_as(commits)

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """See State."""
        if lend:
            self._copies.lend(self._copy)
        return {**self._copy.tree(), **super()._durable_values()}

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """See State."""
        check_names(values, [*self._handlers, *self._names])
        for name, handler in self._handlers.items():
            handler.set(values[name])
        self._take({name: values[name] for name in self._names})
        self._save_as(commits)

    def reset(self) -> None:
        """See State."""
        for handler in self._handlers.values():
            handler.reset()


class _Opaque:
    """Plain attributes on their way: their tensors are pickled with them, and they are not copied again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Opaque:
        return self
