"""An optimizer whose gradients are averaged over the ranks, in buckets, while the backward pass still runs.

Parameters are laid out in buckets in the reverse of their order, which is about the order in which their gradients
come. A hook on each parameter counts; when all of a bucket are there they are copied into its flat buffer, and the
buffer is handed to the communication thread. Buckets are handed over in one fixed order, on all ranks, whatever the
order of the gradients. Behind the gradients each buffer has one flag for each parameter: whether this rank had a
gradient for it. Where no rank had one, the gradient stays None.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from elastic_driver.torch.compression import Compression, Compressor
from elastic_driver.torch.ops import divide, dtype_name, tensor_bytes
from elastic_driver.worker.collectives import GLOBAL, Average, Collectives, ReduceOp
from elastic_driver.worker.context import Context, Work
from elastic_driver.worker.runtime import runtime

# The first bucket starts the overlap early; nothing overlaps the last one. Two ranks on 2 cores, 32 MB of gradients:
# 60-115 ms a step with 8 MB buckets, 119-147 with 25 MB (DistributedDataParallel's), 98-168 with 1 or 2 MB.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20


class _Bucket:
    """Some parameters and the flat buffer that their gradients travel in."""

    def __init__(self, params: list[torch.nn.Parameter], wire_dtype: torch.dtype) -> None:
        self.params = params
        sizes = [param.numel() for param in params]
        self.buffer = torch.zeros(sum(sizes) + len(params), dtype=wire_dtype)
        *parts, self.flags = self.buffer.split([*sizes, len(params)])  # type: ignore[no-untyped-call]
        self.views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        self.data = tensor_bytes(self.buffer)
        self.waiting = set(params)
        self.work: Work | None = None

    def fill(self, *, sparse_as_dense: bool, prescale: float, always_present: bool) -> None:
        """Copies the gradients in; zeros where there are none."""
        present, grads = [], []
        flags = [1.0 if always_present or param.grad is not None else 0.0 for param in self.params]
        self.flags.copy_(torch.tensor(flags))
        for param, view in zip(self.params, self.views, strict=True):
            grad = param.grad
            if grad is None:
                view.zero_()
                continue
            if grad.is_sparse:
                if not sparse_as_dense:
                    raise ValueError(
                        "cannot average a sparse gradient: give sparse_as_dense=True to DistributedOptimizer, or "
                        "sparse=False to the embedding"
                    )
                grad = grad.to_dense()
            present.append(view)
            grads.append(grad)
        if present:
            torch._foreach_copy_(present, grads)
        if prescale != 1.0:
            self.buffer[: -len(self.params)].mul_(prescale)

    def give_back(self, *, divisor: int, factor: float) -> None:
        """Copies the results into the gradients, divided and multiplied."""
        values = self.buffer[: -len(self.params)]
        divide(values, divisor)
        if factor != 1.0:
            values.mul_(factor)
        had = self.flags.tolist()
        targets, sources = [], []
        for param, view, flag in zip(self.params, self.views, had, strict=True):
            if flag == 0.0:
                continue  # no rank had one
            if param.grad is None or param.grad.is_sparse:
                param.grad = torch.empty_like(param)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


class _Reducer:
    """The buckets of one optimizer and what is under way."""

    def __init__(
        self,
        groups: Callable[[], list[dict[str, Any]]],
        *,
        compression: Compressor,
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self._groups = groups
        self._compression = compression
        self._passes = passes
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._hooks: list[Any] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._delay: dict[torch.nn.Parameter, int] = {}
        self._next = 0  # bucket to hand over next
        self.rebuild()
        runtime().listen(self)

    def rebuild(self) -> None:
        """Lays the parameters out anew."""
        for hook in self._hooks:
            hook.remove()
        params = [p for group in self._groups() for p in group["params"] if p.requires_grad]
        self._buckets = []
        room: dict[torch.dtype, int] = {}
        open_of: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        laid: list[tuple[torch.dtype, list[torch.nn.Parameter]]] = []
        first = True
        for param in reversed(params):
            if not param.dtype.is_floating_point:
                raise TypeError(f"cannot average gradients of dtype {param.dtype}")
            wire = self._compression.dtype_for(param.dtype)
            size = param.numel() * wire.itemsize
            if wire not in open_of or size > room[wire]:
                open_of[wire] = []
                laid.append((wire, open_of[wire]))
                room[wire] = FIRST_BUCKET_BYTES if first else BUCKET_BYTES
                first = False
            open_of[wire].append(param)
            room[wire] -= size
        self._buckets = [_Bucket(members, wire) for wire, members in laid]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_grad) for param in params]
        self.drop()

    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way."""
        return self._next > 0

    def on_round_changed(self) -> None:
        """Forgets what was under way in the old round: it has failed there."""
        self.drop()

    def drop(self) -> None:
        """Back to the state before a backward pass."""
        for bucket in self._buckets:
            bucket.work = None
            bucket.waiting = set(bucket.params)
        self._delay = dict.fromkeys(self._bucket_of, self._passes)
        self._next = 0

    def _on_grad(self, param: torch.Tensor) -> None:
        process = runtime()
        if not process.initialized or process.context.slot.size == 1:
            return
        param = cast(torch.nn.Parameter, param)
        bucket = self._bucket_of[param]
        if self._delay[param] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._delay[param] -= 1
        if self._delay[param] > 0:
            return
        bucket.waiting.discard(param)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._hand_over(process.context)

    def _hand_over(self, context: Context) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        average = self._op is Average
        op = ReduceOp.SUM if average else self._op
        with torch.no_grad():
            bucket.fill(
                sparse_as_dense=self._sparse_as_dense,
                prescale=1.0 / self._predivide if average else 1.0,
                # Under these a missing gradient cannot be told from the result; it counts as zeros.
                always_present=self._op in (ReduceOp.MIN, ReduceOp.PRODUCT),
            )
        dtype, limit_s = dtype_name(bucket.buffer.dtype), context.limits.collective_s

        def reduce(collectives: Collectives) -> None:
            collectives.allreduce(GLOBAL, bucket.data, dtype, op, timeout_s=limit_s)

        bucket.work = context.submit(reduce)

    def finish(self) -> None:
        """Hands over what has not been, and waits for all. Raises HorovodInternalError."""
        process = runtime()
        if not process.initialized or process.context.slot.size == 1:
            self.drop()
            return
        divisor = process.context.slot.size if self._op is Average else 1
        try:
            while self._next < len(self._buckets):
                self._hand_over(process.context)
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.result()
                with torch.no_grad():
                    bucket.give_back(divisor=divisor, factor=self._predivide)
        finally:
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.exception()  # after a failure: until the communication thread lets go of the buffers
            self.drop()


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods that a distributed optimizer has beyond those of its class."""

    _wrapped_class: Any
    _reducer: _Reducer
    _should_synchronize: bool
    _synchronized: bool

    def synchronize(self) -> None:
        """Waits for the gradients of all parameters; then they are the averages over the ranks.

        Raises:
            HorovodInternalError: a peer is gone.
        """
        self._reducer.finish()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` does not synchronize: for callers who did (to clip gradients, for instance)."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes, then steps. Raises HorovodInternalError when a peer is gone."""
        base_step = functools.partial(self._wrapped_class.step, self)
        if not self._should_synchronize:
            self._synchronized = False
            return base_step() if closure is None else base_step(closure)
        if closure is not None:

            def synchronized() -> Any:
                loss = closure()
                self.synchronize()
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

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clears gradients; an error while they are on their way."""
        if self._reducer.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._wrapped_class.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; on all ranks alike, and not between backward and step."""
        self._wrapped_class.add_param_group(self, param_group)
        if "_reducer" in self.__dict__:
            self._reducer.rebuild()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's signature
) -> Any:
    """An optimizer of the same class, over the same parameters and state, that averages gradients over the ranks.

    With one rank it is the optimizer it was made from. Gradients of several backward passes are summed, not
    averaged, before they travel. It outlives resets: what was under way is dropped, and the size may be another.

    Args:
        optimizer: not to be used itself any more.
        named_parameters: ``model.named_parameters()``; only checked.
        compression: ``Compression.none`` or ``Compression.fp16``.
        backward_passes_per_step: backward passes before each step.
        op: Average (the default), Sum, Min, Max or Product.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it.
        num_groups: for Horovod's signature: buckets are formed by size.
        groups: likewise.
        sparse_as_dense: whether sparse gradients are made dense.

    Raises:
        ValueError: names given twice or for other parameters; passes below 1; predivide with another op.
    """
    if backward_passes_per_step < 1:
        raise ValueError(f"cannot step after {backward_passes_per_step} backward passes: at least 1 is needed")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    _check_names(optimizer, named_parameters)
    methods = {name: value for name, value in vars(_DistributedOptimizer).items() if not name.startswith("__")}
    base = type(optimizer)
    cls: Any = type(base.__name__, (base,), methods | {"__doc__": base.__doc__, "_wrapped_class": base})
    distributed = cls.__new__(cls)
    # One set of groups and state with the optimizer it is made from, so that schedulers made before go on working.
    # A scheduler's wrapper of step, kept in the instance, would call the step of the other one.
    distributed.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    distributed._should_synchronize = True
    distributed._synchronized = False
    distributed._reducer = _Reducer(
        lambda: optimizer.param_groups,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )
    return distributed


def _check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> None:
    if named_parameters is None:
        return
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {id(param) for _, param in pairs}
    unnamed = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {unnamed} of the optimizer's parameters were not named. Python "
            "object ids: use model.named_parameters() of the model whose parameters the optimizer has."
        )
