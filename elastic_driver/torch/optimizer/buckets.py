"""The gradients of some parameters in one bucket: the flat buffer in which they are reduced, and the results.

A bucket's buffer is memory that peers can access, or device memory if operations run on the device (torch/device). If
possible the gradients live in it, as views: then a gradient is copied once, when autograd has made it, and its result
is already in place. That is impossible with another dtype on the wire, on another device, and for a caller that keeps
gradients beyond a step, whose memory the next one would overwrite (``_is_kept``).

Sparse gradients stay sparse: their indices and values are allgathered.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from elastic_driver.torch.device.lane import torch_lane
from elastic_driver.torch.optimizer.compression import Compressor, wire_dtype
from elastic_driver.torch_private.tensors import (
    ATTACHED_REFERENCES,
    GRADIENTS_IN_PLACE,
    copy_each,
    references,
    storage_references,
    version_of,
    zero_each,
)
from elastic_driver.worker.engine.collectives import DTYPES, Average, ReduceOp, Sum
from elastic_driver.worker.engine.protocol import Engine, Handle, Kind, Operation, Result, TensorSpec
from elastic_driver.worker.rounds.process_sets import Members

Parameter: TypeAlias = torch.nn.Parameter
Started: TypeAlias = tuple[Operation, Callable[[Result], None]]
"""An operation, and the function that handles its result."""

CHANGED = (
    "Gradients were changed after loss.backward() and before optimizer.step() or optimizer.synchronize(), while "
    "they were being reduced: ranks may continue with different gradients. To clip or unscale gradients, call "
    "optimizer.synchronize() first and optimizer.step() within optimizer.skip_synchronize()."
)

# Alignment of gradients in the buffer, in bytes: a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are reduced.

    Attributes:
        compression: how they are sent.
        op: Average, Sum, Min, Max or Product.
        predivide: with Average: divides before the sum, multiplies after it.
        sparse_as_dense: whether sparse gradients are made dense.
        process_set: number of the process set.
        size: number of its ranks.
    """

    compression: Compressor | type[Compressor]
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: int
    size: int

    def operation(self, name: str, tensors: tuple[TensorSpec, ...], *, keep: object, device: int = 0) -> Operation:
        """Make the operation on these tensors; ``keep`` and ``device`` are as in Operation."""
        return Operation(
            Kind.ALLREDUCE,
            tensors,
            name,
            self.op,
            prescale=1.0 / self.predivide,
            postscale=self.predivide,
            process_set=self.process_set,
            device=device,
            keep=keep,
            own=True,
        )


@dataclass(slots=True)
class Learned:
    """Facts about the gradients learned so far; they outlive the buckets.

    Attributes:
        sparse_dims: parameters with sparse gradients, and the gradients' sparse dimensions.
        kept: whether the caller has kept gradients.
    """

    sparse_dims: dict[Parameter, int] = field(default_factory=dict)
    kept: bool = False


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Describe a contiguous tensor, for an operation in place.

    Raises:
        TypeError: values of this dtype cannot be reduced.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    address = tensor.data_ptr()
    return TensorSpec(address, tensor.numel() * tensor.element_size(), name, tuple(tensor.shape), address)


class Bucket:
    """Some parameters whose gradients are reduced together.

    Args:
        name: of its operations; the same on all ranks.
        params: at least one; all of one dtype and on one device.
        names: of the parameters.
        reduction: how they are reduced.
        learned: what is known about their gradients.
        members: the participants.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter],
        names: dict[Parameter, str],
        reduction: Reduction,
        learned: Learned,
        members: Members,
    ) -> None:
        self.name = name
        self.params = list(params)
        self.kinds = [(param.dtype, param.device, param.shape) for param in params]
        self._names = names
        self._reduction = reduction
        self._learned = learned
        self._members = members
        self._engine: Engine = members.context.engine
        self._on_device = torch_lane.takes(members, self.params)
        self._wire = wire_dtype(reduction.compression, params[0].dtype)
        # As long as this holds, gradients live in the buffer.
        self._in_place = (
            self._wire is params[0].dtype
            and (params[0].device.type == "cpu" or self._on_device)
            and not learned.kept
            and GRADIENTS_IN_PLACE.has_parts()
        )
        self._flat: torch.Tensor | None = None
        self._views: dict[Parameter, torch.Tensor] = {}
        self._offsets: dict[Parameter, int] = {}  # of the views in the buffer, in bytes
        self._strides: dict[Parameter, tuple[int, ...]] = {}  # of the views, even if the parameters' strides change
        self._own_references: list[int] = []
        self._own_storage_references = 0
        self._version = 0  # of the buffer's contents when they were submitted
        self._complete: int | None = None  # likewise, when they were complete, if that was earlier
        self._changed = False  # whether they changed between the two
        self._looked = False  # whether this pass's first write has checked for kept gradients

    @torch.no_grad()
    def take(self, param: Parameter) -> None:
        """Move a gradient that autograd has just made into the buffer, while it is in the cache."""
        grad = param.grad
        if not self._in_place or grad is None or grad.is_sparse or param in self._learned.sparse_dims:
            return
        # No view in a local variable: references are counted below.
        if not self._is_placed(param, self._views_of()[param]):
            self._place(param)
        if self._views[param] is grad:
            return
        if not self._looked:
            self._looked = True
            if self._is_kept():
                # A caller that keeps gradients gets the memory, and this bucket a new one; from now on gradients are
                # copied out.
                self._learned.kept = True
                self._in_place = False
                self._flat = None
                return
        view = self._views[param]
        view.copy_(grad)
        param.grad = view

    def hold(self) -> None:
        """Note that the gradients are complete, but are submitted later."""
        self._complete = version_of(self._flat) if self._in_place and self._flat is not None else None

    def set_sparse(self, param: Parameter, dim: int) -> None:
        """Treat this parameter's gradient as sparse from now on, with so many sparse dimensions."""
        if param not in self._learned.sparse_dims:
            self._learned.sparse_dims[param] = dim
            self._flat = None  # laid out again, without it

    def submit(self, operation: Operation) -> Handle:
        """Submit one of ``operations()``. Raises HorovodInternalError, DuplicateNameError."""
        if operation.device:
            assert self._flat is not None
            return torch_lane.submit(self._members, operation, [self._flat])
        return self._engine.submit(operation)

    @torch.no_grad()
    def operations(self) -> list[Started]:
        """Return the operations to submit, once the gradients are complete; missing ones are zeros."""
        self._looked = False
        self._changed = (
            self._complete is not None and self._flat is not None and version_of(self._flat) != self._complete
        )
        self._complete = None
        started: list[Started] = []
        dims = self._learned.sparse_dims
        if not self._reduction.sparse_as_dense:
            for param in self.params:
                if param.grad is not None and param.grad.is_sparse:
                    self.set_sparse(param, param.grad.sparse_dim())
        if any(param not in dims for param in self.params):
            started += self._dense_operations()
        return started + [self._sparse_operation(param, dims[param]) for param in self.params if param in dims]

    def _dense_operations(self) -> list[Started]:
        if self._wire is None:
            return [
                self._compressed_operation(param)
                for param in self.params
                if param not in self._learned.sparse_dims and param.numel() > 0
            ]
        targets, sources, missing = [], [], []
        sparse: dict[Parameter, int] = {}
        self._views_of()
        self._place_all()
        for param, view in self._views.items():
            grad = param.grad
            if grad is None:
                missing.append(view)
            elif grad is not view:
                if grad.is_sparse:
                    sparse[param] = grad.sparse_dim()
                    grad = grad.to_dense()
                targets.append(view)
                sources.append(grad)
        if missing:
            zero_each(missing)
        if targets:
            copy_each(targets, sources)
        assert self._flat is not None
        if self._flat.numel() == 0:
            return []
        self._version = version_of(self._flat)
        specs = (spec_of(self._flat),)
        operation = self._reduction.operation(self.name, specs, keep=self._flat, device=int(self._on_device))
        return [(operation, lambda _: self._give_back(sparse))]

    @torch.no_grad()
    def _give_back(self, sparse: dict[Parameter, int]) -> None:
        # On a device the operation itself counts as a change.
        on_their_way = not self._on_device and self._flat is not None and version_of(self._flat) != self._version
        if self._changed or on_their_way:
            warnings.warn(CHANGED, stacklevel=2)
        self._place_all()
        targets, sources = [], []
        for param, view in self._views.items():
            if param in sparse:  # as the optimizer expects it: SparseAdam accepts nothing else
                param.grad = view.to(param.dtype).to_sparse(sparse[param])
            elif self._in_place:
                if param.grad is not view:
                    param.grad = view
            else:
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                targets.append(param.grad)
                sources.append(view)
        if targets:
            copy_each(targets, sources)

    def _compressed_operation(self, param: Parameter) -> Started:
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dense = grad.to_dense() if grad.is_sparse else grad
        compressed, context = self._reduction.compression.compress(dense)
        work = compressed.detach().to("cpu").contiguous()
        spec = spec_of(work)
        if spec.dtype not in DTYPES:
            raise TypeError(
                f"cannot reduce a gradient compressed by {self._reduction.compression!r}: its dtype is {spec.dtype}"
            )

        def take(_: Result) -> None:
            result = self._reduction.compression.decompress(work.to(compressed.device), context)
            if result.shape != param.shape:
                raise ValueError(
                    f"cannot use a gradient decompressed by {self._reduction.compression!r}: its shape is "
                    f"{tuple(result.shape)}, but the parameter's is {tuple(param.shape)}"
                )
            result = result.detach().to(device=param.device, dtype=param.dtype)
            if grad.is_sparse:
                param.grad = result.to_sparse(grad.sparse_dim())
            else:
                # The strides that autograd expects of a gradient.
                obeys = result.stride() == dense_strides(param)
                param.grad = result if obeys else torch.empty_like(param).copy_(result)

        return self._reduction.operation(f"{self.name}.{self._names[param]}", (spec,), keep=work), take

    def _sparse_operation(self, param: Parameter, sparse_dim: int) -> Started:
        if self._reduction.op not in (Average, Sum):
            raise NotImplementedError(
                f"cannot reduce the sparse gradient of {self._names[param]} with {self._reduction.op.name}: use "
                "Average or Sum, or sparse_as_dense=True"
            )
        grad = param.grad
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty((sparse_dim, 0), dtype=torch.int64, device="cpu"),
                torch.empty((0, *param.shape[sparse_dim:]), dtype=param.dtype, device="cpu"),
                param.shape,
                device="cpu",
                check_invariants=False,
            )
        elif not grad.is_sparse:  # of a layer that is used in both ways
            grad = grad.to_sparse(sparse_dim)
        grad = grad.coalesce()
        rows = grad.indices().t().to("cpu").contiguous()
        values = grad.values().detach().to("cpu").contiguous()
        operation = Operation(
            Kind.ALLGATHER,
            (spec_of(rows), spec_of(values)),
            f"{self.name}.{self._names[param]}.sparse",
            process_set=self._reduction.process_set,
            keep=(rows, values),
            own=True,
        )

        def take(result: Result) -> None:
            total = result.rows[0]
            all_rows = _from_bytes(result.arrays[0], torch.int64, (total, sparse_dim))
            all_values = _from_bytes(result.arrays[1], values.dtype, (total, *values.shape[1:]))
            if self._reduction.op is Average:
                all_values = all_values / self._reduction.size
            param.grad = torch.sparse_coo_tensor(
                all_rows.t(), all_values, param.shape, device=param.device, check_invariants=False
            )

        return operation, take

    def _views_of(self) -> dict[Parameter, torch.Tensor]:
        """Return the places in the buffer, which is allocated on first use."""
        if self._flat is not None:
            return self._views
        assert self._wire is not None
        params = [param for param in self.params if param not in self._learned.sparse_dims]
        width, starts, total = self._wire.itemsize, [], 0
        for param in params:
            starts.append(total)
            total += -(-param.numel() * width // _ALIGNMENT) * _ALIGNMENT // width
        if self._on_device:
            self._flat = torch.zeros(total, dtype=self._wire, device=self.params[0].device)
        else:
            self._flat = torch.from_numpy(self._engine.allocate(total * width)).view(self._wire)
        self._views = {}
        self._offsets = {param: start * width for param, start in zip(params, starts, strict=True)}
        self._strides = {param: dense_strides(param) for param in params}
        for param in params:
            self._place(param)
        # Only needed if gradients may live in it.
        self._own_references = [references(view) for view in self._views.values()]
        self._own_storage_references = storage_references(self._flat) if self._in_place else 0
        return self._views

    def _place(self, param: Parameter) -> None:
        """Make the view of a parameter's place in the buffer."""
        assert self._flat is not None
        start = self._offsets[param] // self._flat.element_size()
        part = self._flat[start : start + param.numel()]
        self._views[param] = part.as_strided(param.shape, self._strides[param])

    def _is_placed(self, param: Parameter, view: torch.Tensor) -> bool:
        """Return whether the view is still in its place: assigning other ``data`` to a gradient, as module.to() does,
        moves it.
        """
        assert self._flat is not None
        return view.numel() == 0 or view.data_ptr() - self._flat.data_ptr() == self._offsets[param]

    def _place_all(self) -> None:
        for param, view in list(self._views.items()):
            if not self._is_placed(param, view):
                self._place(param)

    def _is_kept(self) -> bool:
        """Return whether anything but the parameters still holds gradients of an earlier pass, or views of them."""
        assert self._flat is not None
        if storage_references(self._flat) > self._own_storage_references:
            return True
        counts = [references(view) for view in self._views.values()]
        for own, count, (param, view) in zip(self._own_references, counts, self._views.items(), strict=True):
            if count > own + (ATTACHED_REFERENCES if param.grad is view else 0):
                return True
        return False


def sparse_dim_of(param: Parameter) -> int:
    """Return the sparse dimensions of its gradient; 0 if it has none, or a dense one."""
    return param.grad.sparse_dim() if param.grad is not None and param.grad.is_sparse else 0


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return strides for a gradient in a buffer.

    These are the parameter's own if they have no holes, which autograd and optimizers prefer.
    """
    return torch.empty_like(param, device="meta").stride()


def _from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def lay_out(
    params: Sequence[Parameter],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    compression: Compressor | type[Compressor],
    *,
    first_bytes: int,
    bucket_bytes: int,
) -> list[list[Parameter]]:
    """Assign parameters to buckets, in about the order in which gradients are computed: the reverse of their own.

    Args:
        params: in the optimizer's order.
        groups: the caller's: a number of groups of neighbors, or some groups of parameters; None for none.
        compression: determines a gradient's bytes on the wire.
        first_bytes: limit of the first bucket, in bytes.
        bucket_bytes: limit of the others. A group has no limit.
    """
    order = {param: index for index, param in enumerate(params)}
    if isinstance(groups, int):
        share, more = divmod(len(params), groups)
        ends = [index * share + min(index, more) for index in range(groups + 1)]
        together = [list(params[start:end]) for start, end in itertools.pairwise(ends)]
    else:
        together = [[p for p in group if p in order] for group in groups or ()]  # type: ignore[misc]
    laid: list[list[Parameter]] = []
    for group in together:
        split: dict[Any, list[Parameter]] = {}
        for param in group:
            split.setdefault((param.dtype, param.device), []).append(param)
        laid += split.values()
    grouped = {param for group in together for param in group}
    room: dict[Any, int] = {}
    open_of: dict[Any, list[Parameter]] = {}
    limit = first_bytes
    for param in reversed([param for param in params if param not in grouped]):
        kind = (param.dtype, param.device)
        nbytes = param.numel() * (wire_dtype(compression, param.dtype) or param.dtype).itemsize
        if kind not in open_of or nbytes > room[kind]:
            open_of[kind] = []
            laid.append(open_of[kind])
            room[kind], limit = limit, bucket_bytes
        open_of[kind].append(param)
        room[kind] -= nbytes
    # A bucket is complete with the last of its gradients, that of its first parameter.
    return sorted(laid, key=lambda bucket: -min(order[param] for param in bucket))
