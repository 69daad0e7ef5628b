"""``DistributedOptimizer``: an optimizer of the same class that steps with gradients reduced over all ranks.

Owns the optimizer's side: arguments, their checks, and when to synchronize. reducer.py and buckets.py own the reduction
of gradients.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from elastic_driver.torch.optimizer.adasum import adasum_step
from elastic_driver.torch.optimizer.buckets import Parameter
from elastic_driver.torch.optimizer.compression import Compression, Compressor
from elastic_driver.torch.optimizer.reducer import Reducer
from elastic_driver.torch_private.tensors import note_step
from elastic_driver.worker.engine.collectives import Average, ReduceOp
from elastic_driver.worker.rounds import vitals
from elastic_driver.worker.rounds.advice import advice
from elastic_driver.worker.rounds.current import current_round
from elastic_driver.worker.rounds.process_sets import ProcessSet, global_process_set


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods of a distributed optimizer beyond those of its class."""

    _wrapped_class: Any
    _wrapped: torch.optim.Optimizer
    _parameter_names: dict[Parameter, str]
    _reducer: Reducer
    _compression: Compressor | type[Compressor]
    _should_synchronize: bool
    _synchronized: bool
    op: ReduceOp
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step; not between a backward pass and its step."""
        self._reducer.passes = _checked_passes(passes)
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Wait until all parameters' gradients are reduced. Does nothing with Adasum.

        Parameters without a gradient count as having one of zeros, and have one afterwards.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks' parameters differ.
        """
        if not self._adasum():
            self._reducer.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` not synchronize, for callers who already did (to clip gradients, for instance)."""
        if self._adasum():
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step.

        A closure's gradients are synchronized each time the optimizer calls it. LBFGS, whose decisions depend on the
        loss, gets the mean of the ranks' losses, so that all ranks decide alike.

        Raises:
            ForkedProcessError: this process was forked from the worker.
            HorovodInternalError: a peer is gone.
        """
        current_round().refuse_if_forked()  # before a step of the worker is counted
        vitals.note_step()
        advice().note_step()
        note_step(self._wrapped)  # for schedulers made before this optimizer, which watch whether the other one steps
        base_step = functools.partial(self._wrapped_class.step, self)
        if not self._should_synchronize:
            self._synchronized = False
            return base_step() if closure is None else base_step(closure)
        if self._adasum():
            return self._step_adasum(base_step, closure)
        if closure is not None:

            def synchronized() -> Any:
                loss = closure()
                self.synchronize()
                if isinstance(self, torch.optim.LBFGS):
                    value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, device="cpu")
                    return torch.full_like(value, self._reducer.mean(float(value)))
                return loss

            result = base_step(synchronized)
            self._synchronized = False
            return result
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() "
                "context if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        self.synchronize()
        self._synchronized = False
        return base_step()

    def _adasum(self) -> bool:
        """Return whether steps are combined instead of gradients."""
        if self.op is not ReduceOp.ADASUM:
            return False
        members = self._reducer.members()
        return members is not None and members.size > 1

    def _step_adasum(self, base_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        members = self._reducer.members()
        assert members is not None
        self._synchronized = False
        loss = None
        if closure is not None and not isinstance(self, torch.optim.LBFGS):
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._reducer.finish()
        params = [param for param in self._reducer.params if param.requires_grad]
        step = base_step if closure is None else functools.partial(base_step, closure)
        result = adasum_step(members.context, params, step, self._compression, self._reducer.name_of("steps"))
        self._reducer.drop()  # discards operations started by a closure's passes
        return result if loss is None else loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients; raises an error while they are in flight."""
        if self._reducer.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._wrapped_class.zero_grad(self, *args, **kwargs)

    def forget_gradients(self) -> None:
        """End a pass without its step, as ``load_state_dict`` does; on all ranks alike. Gradients are undefined
        afterwards.
        """
        self._reducer.forget()
        self._synchronized, self._should_synchronize = False, True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; on all ranks alike, and not between backward and step."""
        self._wrapped_class.add_param_group(self, param_group)
        if "_reducer" in self.__dict__:
            self._reducer.hook()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor | type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's signature
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer of the same class, parameters and state that reduces gradients over the ranks.

    With one rank it behaves like the original optimizer. Gradients of several backward passes are summed, not averaged,
    before they are reduced. It survives resets: operations in flight are dropped, and the size may change.

    Gradients live in this library's memory between one step and the next. Code that keeps a gradient longer is
    detected, keeps its memory, and costs a copy from then on.

    Args:
        optimizer: no longer to be used itself, except by its LR schedulers.
        named_parameters: ``model.named_parameters()``; names pair the ranks' parameters, and appear in messages.
        compression: ``Compression.none``, ``fp16``, ``bf16``, or a class with ``compress`` and ``decompress``.
        backward_passes_per_step: backward passes before each step.
        op: Average (the default), Sum, Min, Max or Product; or Adasum, which combines steps instead of gradients.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        num_groups: older spelling of a number for ``groups``.
        groups: into how many groups to divide the gradients, each reduced together; or such groups as lists of
            parameters, and all others are grouped by size.
        sparse_as_dense: whether to reduce sparse gradients as dense ones.
        process_set: the participants; on other ranks it behaves like the original optimizer.

    Raises:
        ValueError: names given twice or not for all parameters; passes below 1; predivide with another op; invalid
            groups.
        NotImplementedError: Adasum with a process set.
    """
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not isinstance(op, ReduceOp):
        raise ValueError(
            f"cannot reduce gradients with {op!r}: op must be one of Average, Sum, Adasum, Min, Max, Product"
        )
    if op is ReduceOp.ADASUM and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    methods = {name: value for name, value in vars(_DistributedOptimizer).items() if not name.startswith("__")}
    base = type(optimizer)
    cls: Any = type(base.__name__, (base,), methods | {"__doc__": base.__doc__, "_wrapped_class": base})
    distributed = cls.__new__(cls)
    # It shares groups and state with the original optimizer, so that schedulers made before keep working. A scheduler's
    # wrapper of step, stored in the instance, would call the original's step.
    distributed.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._wrapped = optimizer
    distributed._compression = compression
    distributed._should_synchronize = True
    distributed._synchronized = False
    distributed.op = op
    distributed.backward_passes_per_step = _checked_passes(backward_passes_per_step)
    distributed.gradient_predivide_factor = gradient_predivide_factor
    distributed.sparse_as_dense = sparse_as_dense
    distributed.process_set = process_set
    distributed._parameter_names = names  # Horovod's attribute, read by code around its optimizers
    distributed._reducer = Reducer(
        distributed,
        names,
        groups=groups,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    _follow_loads(distributed, optimizer)
    return distributed


def _follow_loads(distributed: Any, wrapped: torch.optim.Optimizer) -> None:
    """After load_state_dict, end the current pass, and give the wrapped optimizer the new groups and state."""
    mine = weakref.ref(distributed)

    def loaded(optimizer: Any) -> None:
        alive = mine()
        if optimizer is alive:
            alive.forget_gradients()
            wrapped.param_groups, wrapped.state = alive.param_groups, alive.state

    distributed.register_load_state_dict_post_hook(loaded)


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"cannot step after {passes} backward passes: at least 1 is needed")
    return passes


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"cannot divide gradients into {groups} groups: at least 1 is needed")
        return
    if not isinstance(groups, list) or any(not isinstance(group, Sequence) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[int] = set()
    for param in (param for group in groups for param in group):
        if not isinstance(param, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(param) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(param))


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[Parameter, str]:
    """Return the parameters' names; generated if none are given."""
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return {param: f"allreduce.noname.{i}.{j}" for i, group in enumerate(groups) for j, param in enumerate(group)}
    params = [param for group in groups for param in group]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in names or names.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {param: name for name, param in pairs}
    unnamed = [param for param in params if param not in named]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(str(id(param)) for param in unnamed)}"
        )
    return {param: named[param] for param in params}
