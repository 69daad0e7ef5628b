"""Reduces an optimizer's gradients while the backward pass is still computing others.

A hook on each parameter counts passes. When all gradients of a bucket are complete, its operations are submitted to the
engine. Buckets are submitted in one fixed order on all ranks, whatever the order of the gradients, so that engines that
pair operations by order perform as well as those that pair them by name.

The layout of the buckets depends on the parameters, which of them require gradients, and the caller's groups, all read
when a pass begins, and never on history: a process that joins late arrives at the same layout.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from elastic_driver.errors import MismatchError
from elastic_driver.torch.optimizer.buckets import Bucket, Learned, Parameter, Reduction, lay_out, sparse_dim_of
from elastic_driver.torch.optimizer.compression import Compressor
from elastic_driver.worker.engine.collectives import Average, ReduceOp
from elastic_driver.worker.engine.protocol import Handle, Kind, Operation, Result, TensorSpec
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.current import current_round
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, global_process_set, members_of
from elastic_driver.worker.settings import worker_settings

# The first bucket starts the overlap early; nothing overlaps the last one. On one machine the size hardly matters:
# benchmarks/buckets.py, 2 ranks on 2 busy cores, 32 MB of gradients: medians of 26, 26, 24 and 23 ms a step with
# buckets of 1, 4, 8 and 25 MB (DistributedDataParallel's), with overlapping quartiles. 8 MB is a compromise.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 8 << 20

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)

# Optimizers over parameters of the same names, in each round: distinguished by the order of their first use there. The
# order of creation would not work: a process that joins late has created fewer. Recounted after a join: ranks
# without inputs have not used the same ones as the others.
_used: weakref.WeakKeyDictionary[Context, tuple[int, dict[str, int]]] = weakref.WeakKeyDictionary()


def _bucket_limits() -> tuple[int, int]:
    """Return the limits of the first and the other buckets, in bytes. Horovod's fusion threshold, if set, bounds
    both.
    """
    threshold = worker_settings().fusion_bytes
    return min(FIRST_BUCKET_BYTES, threshold), min(BUCKET_BYTES, threshold)


def _layout_of(param: Parameter) -> tuple[Any, ...]:
    """Return the properties of a parameter that determine its gradient's place in a bucket. Converting its module
    changes them.
    """
    return param.dtype, param.device, param.shape, param.stride()


def _remove(hooks: dict[Parameter, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def _described(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


class Reducer:
    """The gradients of one optimizer.

    Args:
        optimizer: the owner of the parameter groups; not kept alive.
        names: of its parameters.
        groups: parameters whose gradients are reduced together (lay_out).
        compression: how gradients are sent.
        passes: backward passes before they are reduced.
        op: how they are reduced. With Adasum they stay local: steps are combined instead (adasum.py).
        predivide: as in Reduction.
        sparse_as_dense: as in Reduction.
        process_set: the participants.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Parameter, str],
        *,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        compression: Compressor | type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._groups = groups
        self._compression = compression
        self.passes = passes
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._learned = Learned()
        self._hooks: dict[Parameter, Any] = {}
        self._prefix = ""
        self._laid_in: weakref.ref[Context] | None = None
        self._laid_for: tuple[Any, ...] = ()
        self._joins = 0
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Parameter, int] = {}
        # The current pass, if any.
        self._begun = False
        self._unsure = False  # whether the ranks have yet to agree on which gradients are sparse
        self._left: dict[Parameter, int] = {}
        self._waiting: list[int] = []
        self._next = 0
        self._under_way: list[tuple[Handle, Callable[[Result], None]]] = []
        self.hook()
        weakref.finalize(self, _remove, self._hooks).atexit = False
        current_round().listen(self)

    @property
    def params(self) -> list[Parameter]:
        """All parameters of the optimizer, in its order."""
        optimizer = self._optimizer()
        return [param for group in optimizer.param_groups for param in group["params"]] if optimizer is not None else []

    @property
    def in_flight(self) -> bool:
        """Whether there are gradients of an unfinished pass."""
        return self._begun

    def members(self) -> Members | None:
        """Return the participating ranks, or future ones; None if gradients are not reduced.

        Raises:
            ValueError: the round does not have the process set.
        """
        current = current_round()
        if not current.initialized:
            return None
        rank = current.context.slot.rank
        if self._process_set is not global_process_set and rank not in self._process_set.ranks:
            return None
        members = members_of(self._process_set)
        return members if members.size > 1 or worker_settings().elastic else None

    def hook(self) -> None:
        """Install hooks on parameters without one: new ones, and those that now require gradients."""
        # Hooks must not keep the reducer alive, or a discarded optimizer would continue to reduce.
        reducer = weakref.ref(self)

        def on_grad(param: Any) -> None:
            alive = reducer()
            if alive is not None:
                alive._on_grad(param)

        for param in self.params:
            if param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(on_grad)  # type: ignore[no-untyped-call]

    def on_round_changed(self) -> None:
        """Forget the old round's operations in flight: they have failed there."""
        self.drop()

    def drop(self) -> None:
        """Return to the state before a backward pass. The engine keeps the buffers of unfinished operations."""
        self._under_way = []
        self._begun = False

    def forget(self) -> None:
        """Like ``drop``, in a continuing round; on all ranks alike, which may be at different points of the pass."""
        if self._begun:
            # Operations in flight must not be mistaken for the next pass's, so that one uses new names.
            self._laid_in = None
        self.drop()

    def _begin(self, members: Members) -> None:
        params, context = self.params, members.context
        laid_for = (context.joins, *((id(param), param.requires_grad, *_layout_of(param)) for param in params))
        if laid_for != self._laid_for or self._laid_in is None or self._laid_in() is not context:
            self.hook()
            self._prefix = self._prefix_in(context, params)
            self._laid_for, self._laid_in = laid_for, weakref.ref(context)
            self._buckets, self._bucket_of = [], {}
            if self._reduces(members):
                self._add_buckets(members, [param for param in params if param.requires_grad])
                self._under_way.append(self._compare_layouts(members))
                self._unsure = not self._sparse_as_dense
        self._left = {param: self.passes for param in params if param.requires_grad}
        self._waiting = [len(bucket.params) for bucket in self._buckets]
        self._next = 0
        self._begun = True

    def _reduces(self, members: Members) -> bool:
        return self._op is not ReduceOp.ADASUM and members.size > 1

    def _prefix_in(self, context: Context, params: Iterable[Parameter]) -> str:
        digest = f"{zlib.crc32(repr([self._name_of(param) for param in params]).encode()):08x}"
        placed = self._laid_in is not None and self._laid_in() is context and self._joins == context.joins
        if placed and self._prefix.startswith(digest):
            return self._prefix
        self._joins = context.joins
        joins, counts = _used.get(context, (context.joins, {}))
        if joins != context.joins:
            counts = {}
        _used[context] = context.joins, counts
        counts[digest] = counts.get(digest, 0) + 1
        return f"{digest}.{counts[digest]}"

    def _name_of(self, param: Parameter) -> str:
        return self._names.setdefault(param, f"allreduce.noname.{len(self._names)}")

    def _add_buckets(self, members: Members, params: Sequence[Parameter]) -> None:
        for param in params:
            self._name_of(param)
            if not param.dtype.is_floating_point:
                raise TypeError(f"cannot average gradients of dtype {param.dtype}")
        reduction = Reduction(
            self._compression,
            self._op,
            self._predivide,
            self._sparse_as_dense,
            members.number,
            members.size,
        )
        first, others = _bucket_limits()
        for bucket in lay_out(params, self._groups, self._compression, first_bytes=first, bucket_bytes=others):
            name = f"DistributedOptimizer.{self._prefix}.{len(self._buckets)}.{self._names[bucket[-1]]}"
            self._buckets.append(Bucket(name, bucket, self._names, reduction, self._learned, members))
            self._bucket_of |= dict.fromkeys(bucket, len(self._buckets) - 1)

    def _compare_layouts(self, members: Members) -> tuple[Handle, Callable[[Result], None]]:
        """Check that all ranks have the same bucket layout, or unrelated gradients would be added up."""
        layout = [
            (self._names[param], tuple(param.shape), param.stride(), param.dtype)
            for bucket in self._buckets
            for param in bucket.params
        ]
        digest = zlib.crc32(repr((layout, self._op, self._predivide)).encode())
        # The largest digest, and by its complement the smallest. Zeros, of ranks that have joined, affect neither.
        digests = np.array([digest + 1, (1 << 32) - digest], np.int64)
        address = digests.ctypes.data
        spec = TensorSpec(address, digests.nbytes, "int64", (2,), address)
        operation = Operation(
            Kind.ALLREDUCE,
            (spec,),
            self.name_of("layout"),
            ReduceOp.MAX,
            process_set=members.number,
            keep=digests,
            own=True,
        )

        def take(_: Result) -> None:
            if digests[0] - 1 != (1 << 32) - digests[1]:
                raise MismatchError(
                    "cannot reduce gradients: the ranks' parameters differ in shape, dtype, strides or requires_grad, "
                    f"or the ranks' optimizers in op; this rank's begin with {layout[:3]}"
                )

        return members.context.engine.submit(operation), take

    def _on_grad(self, param: Parameter) -> None:
        members = self.members()
        if members is None:
            return
        if param.grad is not None and param.grad.requires_grad:
            raise AssertionError(
                "cannot reduce gradients that are to be differentiated (backward with create_graph=True)"
            )
        if not self._begun:
            self._begin(members)
        left = self._left.get(param)
        if left is None:
            return  # requires gradients only since the pass began: reduced with the rest, in finish()
        if left <= 0:
            raise AssertionError(TOO_MANY_PASSES)
        self._left[param] = left - 1
        index = self._bucket_of.get(param)
        if index is None:
            return
        self._buckets[index].take(param)
        if left > 1:
            return
        self._waiting[index] -= 1
        if self._unsure and self._waiting[index] == 0:
            self._buckets[index].hold()
        # The first pass of a layout is not submitted before it is complete (_agree_on_sparse).
        while not self._unsure and self._next < len(self._buckets) and self._waiting[self._next] == 0:
            self._hand_over()

    def _hand_over(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        for operation, take in bucket.operations():
            self._under_way.append((bucket.submit(operation), take))

    def finish(self) -> None:
        """Submit all remaining buckets, and wait for all: then all gradients exist and are reduced.

        Raises:
            HorovodInternalError: a peer is gone.
            MismatchError: the ranks have different parameters, or sparse gradients for different ones.
        """
        current_round().refuse_if_forked()  # a step with this process's gradients alone would be wrong
        members = self.members()
        if members is None:
            self.drop()
            return
        if not self._begun:
            self._begin(members)
        if not self._reduces(members):
            for param in self._left:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            self.drop()
            return
        try:
            self._check_unconverted()
            late = [param for param in self.params if param.requires_grad and param not in self._left]
            if late:
                self._add_buckets(members, late)
                self._laid_for = ()
            if self._unsure:
                self._agree_on_sparse(members)
            while self._next < len(self._buckets):
                self._hand_over()
            for handle, take in self._under_way:
                members.context.writing.write(functools.partial(take, handle.result()))
        except BaseException:
            self.forget()
            raise
        self.drop()

    def _check_unconverted(self) -> None:
        """Raise TypeError if parameters were converted after gradients were computed, or sent, for them."""
        for bucket in self._buckets:
            for param, kind in zip(bucket.params, bucket.kinds, strict=True):
                if kind != (param.dtype, param.device, param.shape):
                    raise TypeError(
                        f"cannot reduce the gradient of {self._names[param]}: the parameter was converted between "
                        f"backward() and step(), from {_described(*kind)} to "
                        f"{_described(param.dtype, param.device, param.shape)}; convert the model before backward()"
                    )

    def _agree_on_sparse(self, members: Members) -> None:
        """Agree that a gradient that is sparse on some ranks, and missing or dense on others, is sparse on all.

        Once per layout, after its first pass. A gradient that becomes sparse later must do so on all ranks.
        """
        while self._under_way:  # first compare the layouts
            handle, take = self._under_way.pop()
            take(handle.result())
        params = [param for bucket in self._buckets for param in bucket.params]
        dims = np.array([self._learned.sparse_dims.get(param) or sparse_dim_of(param) for param in params], np.int64)
        if params:
            address = dims.ctypes.data
            spec = TensorSpec(address, dims.nbytes, "int64", dims.shape, address)
            name = self.name_of("sparse")
            operation = Operation(
                Kind.ALLREDUCE, (spec,), name, ReduceOp.MAX, process_set=members.number, keep=dims, own=True
            )
            members.context.engine.submit(operation).result()
        for param, dim in zip(params, dims.tolist(), strict=True):
            if dim:
                self._buckets[self._bucket_of[param]].set_sparse(param, dim)
        self._unsure = False

    def mean(self, value: float) -> float:
        """Return the mean of the ranks' values; once a pass has begun in this round."""
        members = self.members()
        if members is None or members.size == 1:
            return value
        data = np.array([value], np.float64)
        address = data.ctypes.data
        spec = TensorSpec(address, data.nbytes, "float64", (1,), address)
        operation = Operation(
            Kind.ALLREDUCE, (spec,), self.name_of("loss"), Average, process_set=members.number, keep=data, own=True
        )
        members.context.engine.submit(operation).result()
        return float(data[0])

    def name_of(self, operation: str) -> str:
        """Name an operation of this optimizer, other than a bucket's; once a pass has begun in this round."""
        return f"DistributedOptimizer.{self._prefix}.{operation}"
