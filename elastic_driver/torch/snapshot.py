"""Nested states as a skeleton and its tensors: copied to the host without new memory, sent in few large messages.

A tree is any nest of dicts, lists and tuples. Its skeleton is the same nest with a Placeholder for each tensor, and a
StateDict for each OrderedDict.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.device.math import flat_bytes
from elastic_driver.torch.host_memory import copy_to_host, empty_like_each, fits
from elastic_driver.torch.tensors import tensor_bytes
from elastic_driver.torch_private.tensors import coo_parts, copy_each, has_state_hooks, metadata_of, set_metadata
from elastic_driver.worker.api.objects import broadcast_object
from elastic_driver.worker.engine.byte_collectives import broadcast
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, global_process_set, members_of

# Size of the messages into which tensors are packed, in bytes: large enough to make latency negligible, small enough
# that a large model does not need its size again as a buffer.
CHUNK_BYTES = 32 << 20
# Types of nearly all tensors; they need no further checks of their type.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Represents a tensor in a skeleton."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self  # immutable, and a state has many


@dataclass(frozen=True, slots=True)
class StateDict:
    """Represents an OrderedDict with the attribute set by ``state_dict``: the versions of the modules.

    Attributes:
        values: its items.
        metadata: its ``_metadata``, which is never changed; None without.
    """

    values: dict[Any, Any]
    metadata: Any

    def __deepcopy__(self, memo: Any) -> StateDict:
        return StateDict(copy.deepcopy(self.values, memo), self.metadata)


def with_metadata(values: Mapping[Any, Any], metadata: Any) -> OrderedDict[Any, Any]:
    """Make an OrderedDict like that of ``state_dict``, from which ``load_state_dict`` reads the versions of the
    modules.
    """
    made = OrderedDict(values)
    if metadata is not None:
        set_metadata(made, metadata)
    return made


@dataclass(frozen=True, slots=True)
class Sparse:
    """Represents a sparse tensor in a skeleton.

    Attributes:
        layout: its layout.
        shape: the whole tensor's shape.
        parts: placeholders of its indices, one tensor or two, and its values.
        coalesced: whether it is coalesced (torch).
    """

    layout: torch.layout
    shape: tuple[int, ...]
    parts: tuple[Any, ...]
    coalesced: bool

    def __deepcopy__(self, memo: Any) -> Sparse:
        return self

    def tensor(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the tensor from these parts, on their device."""
        *indices, values = parts
        if self.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                indices[0],
                values,
                self.shape,
                device=values.device,
                is_coalesced=self.coalesced,
                check_invariants=False,
            )
        return torch.sparse_compressed_tensor(
            indices[0],
            indices[1],
            values,
            self.shape,
            layout=self.layout,
            device=values.device,
            check_invariants=False,
        )


_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_COMPRESSED_ROWS, torch.sparse_csc, torch.sparse_bsc)


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return coo_parts(tensor)
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def check_can_be_kept(tensor: torch.Tensor, name: str) -> None:
    """Raise UnsupportedOperationError, naming the tensor, unless it can be copied bit for bit."""
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise UnsupportedOperationError(
            f"cannot keep {name}: it has no values yet, because its module is lazy; run the model on a batch first"
        )
    if tensor.is_meta:
        raise UnsupportedOperationError(
            f"cannot keep {name}: it is on the meta device and has no values; move the model with to_empty() first"
        )
    kind = ""
    if tensor.is_nested:
        kind = "nested"
    elif tensor.is_quantized:
        kind = "quantized"
    elif hasattr(tensor, "__tensor_flatten__"):  # it consists of other tensors
        kind = type(tensor).__name__
    elif tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        kind = str(tensor.layout).removeprefix("torch.").removeprefix("_")
    if kind:
        raise UnsupportedOperationError(
            f"cannot keep {name}: a {kind} tensor cannot be copied bit for bit; keep dense or sparse tensors, and "
            "build the others from them (FSDPState keeps sharded models)"
        )


def flatten(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the skeleton (other values are the tree's own, not copies) and the tensors (the tree's own, detached).

    Raises:
        UnsupportedOperationError: a tensor cannot be copied bit for bit; names it.
    """
    tensors: list[torch.Tensor] = []
    path: list[Any] = []

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            plain = type(node) in _PLAIN and node.layout is torch.strided
            if not plain or node.is_meta or node.is_quantized or node.is_nested:
                check_can_be_kept(node, ".".join(map(str, path)))
                if node.layout is not torch.strided:
                    parts = tuple(walk(part) for part in _parts_of(node.detach()))
                    coalesced = node.layout is torch.sparse_coo and node.is_coalesced()
                    return Sparse(node.layout, tuple(node.shape), parts, coalesced)
            tensors.append(node.detach())
            return Placeholder(len(tensors) - 1, tuple(node.shape), node.dtype, str(node.device))
        if type(node) in (list, tuple):
            return type(node)(inside(index, value) for index, value in enumerate(node))
        if isinstance(node, dict):
            before = len(tensors)
            walked = {key: inside(key, value) for key, value in node.items()}
            if type(node) is dict:
                return walked
            if type(node) is OrderedDict:
                return StateDict(walked, metadata_of(node))
            return walked if len(tensors) > before else node  # load_state_dict accepts it as a dict, but not a Counter
        return node

    def inside(key: Any, value: Any) -> Any:
        path.append(key)
        walked = walk(value)
        path.pop()
        return walked

    return walk(tree), tensors


def unflatten(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree; values that are not tensors are copies."""
    if isinstance(skeleton, Placeholder):
        return tensors[skeleton.index]
    if isinstance(skeleton, Sparse):
        return skeleton.tensor([tensors[part.index] for part in skeleton.parts])
    if isinstance(skeleton, StateDict):
        values = {key: unflatten(value, tensors) for key, value in skeleton.values.items()}
        return with_metadata(values, copy.deepcopy(skeleton.metadata))
    if type(skeleton) is dict:
        return {key: unflatten(value, tensors) for key, value in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(unflatten(value, tensors) for value in skeleton)
    return copy.deepcopy(skeleton)


class HostCopy:
    """A tree's copy in host memory. It does not change while it is a state's restore point.

    Args:
        skeleton: the tree's skeleton, with its own values.
        tensors: the copies.
    """

    def __init__(self, skeleton: Any, tensors: list[torch.Tensor]) -> None:
        self._skeleton = skeleton
        self.tensors = tensors

    def tree(self) -> Any:
        """Return the tree. Its tensors are this object's own: copy from them, but do not keep them."""
        return unflatten(self._skeleton, self.tensors)


class HostCopies:
    """Copies a state to host memory, reusing the memory of obsolete copies.

    A copy never overwrites the previous one: if it fails or is interrupted, that must remain the restore point. So two
    sets of buffers are used in turn, and a third one while a reader uses one.
    """

    def __init__(self) -> None:
        self._free: list[list[torch.Tensor]] = []
        self._lent: HostCopy | None = None

    @torch.no_grad()
    def take(self, tree: Any) -> HostCopy:
        """Copy the tree."""
        skeleton, tensors = flatten(tree)
        skeleton = copy.deepcopy(skeleton)  # may fail: before anything is copied
        former = self._free.pop() if self._free else []
        again = [fits(old, new) for old, new in zip(former, tensors, strict=False)]
        again += [False] * (len(tensors) - len(again))
        made = iter(empty_like_each([tensor for tensor, fit in zip(tensors, again, strict=True) if not fit]))
        kept = [former[index] if fit else next(made) for index, fit in enumerate(again)]
        copy_to_host(kept, [tensor.resolve_conj().resolve_neg() for tensor in tensors])
        return HostCopy(skeleton, kept)

    def let_go(self, former: HostCopy) -> None:
        """Mark a copy as obsolete: its memory may be reused, unless it is lent."""
        if former is not self._lent:
            self._free = [former.tensors]

    def lend(self, present: HostCopy) -> None:
        """Lend the restore point to a reader, until the next is lent: by then this one has been read."""
        lent, self._lent = self._lent, present
        if lent is not None and lent is not present:
            self._free = [lent.tensors]


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into tensors of the same shapes and layouts."""
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if _is_simple(target) and _is_simple(source):
            plain.append((target, source))
        else:
            copy_into(target, source)
    if plain:
        into, of = zip(*plain, strict=True)
        copy_each(into, of)


def _is_simple(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride())


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of any supported kind into one of the same shape and layout."""
    if target.layout in _COMPRESSED and target.values().shape != source.values().shape:
        target.resize_as_sparse_(source)
    elif target.layout is torch.strided:
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:  # expanded: all elements share one
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    chunks: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            continue
        if not chunks or size > room:
            chunks.append([])
            room = CHUNK_BYTES
        chunks[-1].append(tensor)
        room -= size
    return chunks


@torch.no_grad()
def broadcast_tensors(members: Members, tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """Overwrite tensors with the root's, packed into few messages. Shapes and dtypes agree on all ranks.

    At a planned change all messages arrive, or none. After the round's end nothing is written any more.
    """
    if members.size > 1:
        members.context.wholes.write(lambda: _broadcast_tensors(members, tensors, root_rank))


def _broadcast_tensors(members: Members, tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    is_root = members.context.slot.rank == root_rank
    for number, chunk in enumerate(_chunks(tensors)):
        sizes = [tensor.numel() * tensor.element_size() for tensor in chunk]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = list(buffer.split(sizes))  # type: ignore[no-untyped-call]
        if is_root:
            for part, tensor in zip(parts, chunk, strict=True):
                host = tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
                part.copy_(flat_bytes(host))
        name = f"broadcast_tensors.{number}"
        broadcast(members.context.engine, tensor_bytes(buffer), root_rank, name, members.number)
        if not is_root:
            members.context.writing.write(functools.partial(_unpack, parts, chunk))


def _unpack(parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(parts, tensors, strict=True):
        # Through a copy of its own: a part may not be aligned for the dtype.
        copy_into(tensor, part.clone().view(tensor.dtype).reshape(tensor.shape))


def broadcast_tree(
    skeleton: Any,
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tree, on every rank; except on the root its tensors are new ones, on the CPU."""
    members = members_of(process_set)
    skeleton = broadcast_object(skeleton, root_rank, process_set=process_set)
    if members.context.slot.rank != root_rank:
        placeholders: list[Placeholder] = []

        def collect(node: Any) -> None:
            if isinstance(node, Placeholder):
                placeholders.append(node)
            elif isinstance(node, StateDict):
                collect(node.values)
            elif isinstance(node, Sparse):
                placeholders.extend(node.parts)
            elif isinstance(node, dict):
                for value in node.values():
                    collect(value)
            elif type(node) in (list, tuple):
                for value in node:
                    collect(value)

        collect(skeleton)
        placeholders.sort(key=lambda placeholder: placeholder.index)
        tensors = [
            torch.empty(placeholder.shape, dtype=placeholder.dtype, device="cpu") for placeholder in placeholders
        ]
    broadcast_tensors(members, tensors, root_rank)
    return unflatten(skeleton, tensors)


def optimizer_tree(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's state and options, with numbered parameters. The tensors are the live ones, not copies."""
    return optimizer.state_dict()


@torch.no_grad()
def set_optimizer(optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Set an optimizer's state and options from a tree, bitwise.

    Does not use ``load_state_dict``, which keeps the given tensors (so that the next step would change the saved copy)
    and casts them to the dtype of their parameter (so that bits would change). An optimizer with hooks that transform
    its state, or whose class has its own ``load_state_dict``, is set by that, with copies.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or has_state_hooks(optimizer):
        optimizer.load_state_dict(copy.deepcopy(tree))
        return
    groups, saved_groups = optimizer.param_groups, tree["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved_groups]:
        raise ValueError("cannot set the optimizer's state: its parameter groups differ from those of the saved state")
    params = {
        number: param
        for group, saved in zip(groups, saved_groups, strict=True)
        for number, param in zip(saved["params"], group["params"], strict=True)
    }
    for group, saved in zip(groups, saved_groups, strict=True):
        for name, value in saved.items():
            if name != "params":
                group[name] = _placed(value, group.get(name), device="cpu")
        for name in [name for name in group if name not in saved]:
            del group[name]
    stateless = [param for number, param in params.items() if number not in tree["state"] and param in optimizer.state]
    for param in stateless:
        del optimizer.state[param]
    for number, saved_state in tree["state"].items():
        if number not in params:  # the optimizer's own entry, under its own key
            optimizer.state[number] = copy.deepcopy(saved_state)
            continue
        param = params[number]
        live = optimizer.state[param]
        if not isinstance(saved_state, dict):
            optimizer.state[param] = copy.deepcopy(saved_state)
            continue
        for name in [name for name in live if name not in saved_state]:
            del live[name]
        for name, value in saved_state.items():
            # Adam's step is on the CPU whatever the parameter's device (unless it is capturable).
            device = "cpu" if name == "step" and not _capturable(groups) else str(param.device)
            live[name] = _placed(value, live.get(name), device=device)


def _capturable(groups: Sequence[dict[str, Any]]) -> bool:
    return any(group.get("capturable") or group.get("fused") for group in groups)


def _placed(value: Any, live: Any, *, device: str) -> Any:
    """Return the value for an attribute: copied into its live tensor if that fits, else a new copy."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if (
        isinstance(live, torch.Tensor)
        and live.shape == value.shape
        and live.dtype == value.dtype
        and live.layout is value.layout is torch.strided
    ):
        return live.copy_(value)
    return value.detach().clone().to(device)
