"""Sharded state as pieces of whole tensors: how a rank keeps its own, and how others are assembled from them.

A box is a place in a whole tensor. A payload is a rank's whole part of the state, in one tensor of bytes with a head
that describes it, so that it can be sent unchanged and read by any rank. Nothing here communicates.

torch.distributed.tensor is imported late: that takes long, and most programs have no sharded tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.host_memory import empty_bytes
from elastic_driver.torch.snapshot import with_metadata
from elastic_driver.torch_private.groups import STRIDED, is_strided
from elastic_driver.torch_private.tensors import metadata_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ROW_BYTES = 1024
"""Payloads are whole rows, so that a count of rows fits where a count of bytes would not."""
_ALIGNED_BYTES = 16
_HEAD = struct.Struct("<Q")


class Box(NamedTuple):
    """The place of a piece: its first index in each dimension, and its size there."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(e - o for e, o in zip(end, offset, strict=True))
        return Box(offset, size) if all(n > 0 for n in size) else None

    def within(self, piece: torch.Tensor, part: Box) -> torch.Tensor:
        """Return the part's elements of the piece that fills this box."""
        for dim, (start, own, size) in enumerate(zip(part.offset, self.offset, part.size, strict=True)):
            piece = piece.narrow(dim, start - own, size)
        return piece


@dataclass(frozen=True, slots=True)
class Leaf:
    """A sharded tensor, and a rank's piece of it."""

    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.box.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Sharded:
    """Represents a sharded tensor in a tree.

    Attributes:
        index: its number in the tree.
        shape: the whole tensor's shape.
        dtype: torch's name for it.
        placements: those of a DTensor; or one OwnedBy.
        mesh_dims: the dimension names of the DTensor's mesh, to which its placements refer.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[Any, ...]
    mesh_dims: tuple[str, ...] | None = None

    def __deepcopy__(self, memo: Any) -> Sharded:
        return self


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """Instead of placements: the rank whose optimizer owns this parameter has the whole tensor, all others nothing.

    Attributes:
        parameter: its number.
        shape: of the tensor; one without dimensions is kept with one.
        on_host: whether it is on the CPU wherever the parameter is.
    """

    parameter: int
    shape: tuple[int, ...]
    on_host: bool


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor of an optimizer each of whose ranks has the state of some parameters.

    Attributes:
        owner: its owner.
        dtype: its dtype.
        tensor: the tensor, if this rank owns it.
    """

    owner: OwnedBy
    dtype: torch.dtype
    tensor: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it is kept."""
        return self.owner.shape or (1,)

    @property
    def placements(self) -> tuple[OwnedBy]:
        """Its placements, as in Sharded."""
        return (self.owner,)

    def to_local(self) -> torch.Tensor:
        """Return this rank's piece of it."""
        if self.tensor is None:
            return torch.empty([0] * len(self.shape), dtype=self.dtype, device="cpu")
        return self.tensor.reshape(self.shape)


def owned_box(shape: Sequence[int], *, is_owner: bool) -> Box:
    """Return a rank's place in a tensor that one rank owns."""
    return Box((0,) * len(shape), tuple(shape) if is_owner else (0,) * len(shape))


def leaf_of(tensor: DTensor | Owned) -> Leaf:
    """Describe a tensor and this rank's piece of it."""
    if isinstance(tensor, Owned):
        box = owned_box(tensor.shape, is_owner=tensor.tensor is not None)
    else:
        box = box_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return Leaf(tuple(tensor.shape), _name_of(tensor.dtype), box)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def box_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Box:
    """Return this rank's place in a tensor of this shape.

    Raises:
        UnsupportedOperationError: its elements are not in one such place.
    """
    from torch.distributed.tensor import Replicate, Shard

    offset, size, coordinate = [0] * len(shape), list(shape), mesh.get_coordinate()
    by_dim: dict[int, list[int]] = {}  # the mesh's dimensions over which one of the tensor's is divided
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Shard or is_strided(placement):
            by_dim.setdefault(placement.dim, []).append(mesh_dim)
        elif type(placement) is not Replicate:
            STRIDED.check()
            raise UnsupportedOperationError(
                f"cannot keep a tensor placed as {placement}: only shards and replicas are supported"
            )
    for dim, mesh_dims in by_dim.items():
        first, *later = mesh_dims
        strided = [mesh_dim for mesh_dim in mesh_dims if is_strided(placements[mesh_dim])]
        if strided:
            # As FSDP2 divides a tensor already divided by tensor parallelism: then a rank's piece is contiguous.
            factor = math.prod(mesh.size(mesh_dim) for mesh_dim in later)
            if strided != [first] or placements[first].split_factor != factor:
                raise UnsupportedOperationError(
                    f"cannot keep a tensor placed as {tuple(placements)}: a rank's piece is not contiguous"
                )
            mesh_dims = [*later, first]
        for mesh_dim in mesh_dims:
            chunk = -(-size[dim] // mesh.size(mesh_dim))
            start = min(chunk * coordinate[mesh_dim], size[dim])
            offset[dim] += start
            size[dim] = min(chunk, size[dim] - start)
    return Box(tuple(offset), tuple(size))


def taken_out(tree: Any) -> tuple[Any, list[DTensor | Owned]]:
    """Return the tree with a Sharded in place of each sharded tensor, and these tensors."""
    from torch.distributed.tensor import DTensor

    found: list[DTensor | Owned] = []

    def walk(node: Any) -> Any:
        if isinstance(node, (DTensor, Owned)):
            found.append(node)
            dims = node.device_mesh.mesh_dim_names if isinstance(node, DTensor) else None
            return Sharded(len(found) - 1, tuple(node.shape), _name_of(node.dtype), tuple(node.placements), dims)
        if isinstance(node, Mapping):
            walked = {key: walk(value) for key, value in node.items()}
            return with_metadata(walked, metadata_of(node)) if isinstance(node, OrderedDict) else walked
        if type(node) in (list, tuple):
            return type(node)(walk(value) for value in node)
        return node

    return walk(tree), found


def put_back(tree: Any, make: Any) -> Any:
    """Return the tree with ``make(sharded)`` in place of each Sharded."""
    if isinstance(tree, Sharded):
        return make(tree)
    if isinstance(tree, Mapping):
        values = {key: put_back(value, make) for key, value in tree.items()}
        return with_metadata(values, metadata_of(tree)) if isinstance(tree, OrderedDict) else values
    if type(tree) in (list, tuple):
        return type(tree)(put_back(value, make) for value in tree)
    return tree


def sharded_in(tree: Any) -> list[Sharded]:
    """Return all Sharded of a tree, by their numbers."""
    found: list[Sharded] = []
    put_back(tree, found.append)
    return sorted(found, key=lambda one: one.index)


class Payload:
    """A rank's pieces in one tensor of bytes.

    Attributes:
        leaves: descriptions of the pieces.
        data: (bytes,) uint8, whole rows.
    """

    def __init__(self, leaves: Sequence[Leaf], data: torch.Tensor, starts: Sequence[int]) -> None:
        self.leaves, self.data, self._starts = tuple(leaves), data, tuple(starts)

    @classmethod
    def of(cls, leaves: Sequence[Leaf], spare: torch.Tensor | None = None, *, pinned: bool = False) -> Payload:
        """Make an empty one; in the memory of the spare one, if that fits."""
        head = json.dumps([[leaf.shape, leaf.dtype, leaf.box.offset, leaf.box.size] for leaf in leaves]).encode()
        starts, total = _starts(leaves, _HEAD.size + len(head))
        if spare is None or spare.numel() != total:
            spare = empty_bytes(total, pinned=pinned)
        packed = bytearray(_HEAD.pack(len(head)) + head)
        spare[: len(packed)].copy_(torch.frombuffer(packed, dtype=torch.uint8))
        return cls(leaves, spare, starts)

    @classmethod
    def read(cls, data: torch.Tensor) -> Payload:
        """Decode one received from another rank."""
        (length,) = _HEAD.unpack(data[: _HEAD.size].numpy().tobytes())
        head = json.loads(data[_HEAD.size : _HEAD.size + length].numpy().tobytes())
        leaves = [Leaf(tuple(shape), dtype, Box(tuple(offset), tuple(size))) for shape, dtype, offset, size in head]
        return cls(leaves, data, _starts(leaves, _HEAD.size + length)[0])

    def piece(self, index: int) -> torch.Tensor:
        """Return the memory of one piece, with its shape."""
        leaf, start = self.leaves[index], self._starts[index]
        return self.data[start : start + leaf.nbytes].view(leaf.torch_dtype).view(leaf.box.size)


def _starts(leaves: Sequence[Leaf], head: int) -> tuple[list[int], int]:
    """Return where each piece begins, and the total length."""
    starts, at = [], head
    for leaf in leaves:
        at = -(-at // _ALIGNED_BYTES) * _ALIGNED_BYTES
        starts.append(at)
        at += leaf.nbytes
    return starts, -(-at // ROW_BYTES) * ROW_BYTES


class Key(NamedTuple):
    """Identifies a version of the state: the most advanced is the greatest.

    Attributes:
        commits: of the state.
        round_id: the round in which it was kept, which determines the number of ranks.
        number: in this round.
    """

    commits: int
    round_id: int
    number: int


@dataclass(frozen=True, slots=True)
class Source:
    """The holder of the pieces of one former rank.

    Attributes:
        holder: the rank, of the current round, that has them.
        leaves: their descriptions.
    """

    holder: int
    leaves: tuple[Leaf, ...]


Inventory = Mapping[Key, Mapping[int, tuple[Leaf, ...]]]
"""The pieces that a rank holds: by version and former rank, its own and copies of others'."""


def choose(inventories: Sequence[Inventory], own: Sequence[Iterable[Key]]) -> tuple[Key, dict[int, Source]] | None:
    """Return the most advanced complete version, and its sources; the same on all ranks for the same arguments.

    Args:
        inventories: of each rank.
        own: for each rank, the versions of which it has the whole tree and not only copies of others' pieces.
    """
    keys = sorted({key for kept in own for key in kept}, reverse=True)
    for key in keys:
        sources: dict[int, Source] = {}
        for rank, inventory in enumerate(inventories):
            for former, leaves in inventory.get(key, {}).items():
                sources.setdefault(former, Source(rank, tuple(leaves)))
        if not _missing(sources.values()):
            return key, sources
    return None


def _missing(sources: Iterable[Source]) -> bool:
    leaves = [source.leaves for source in sources]
    if not leaves:
        return True
    for same in zip(*leaves, strict=True):
        boxes = {leaf.box for leaf in same if leaf.box.numel}
        if sum(box.numel for box in boxes) != math.prod(same[0].shape):
            return True
    return False


def parts(
    sources: Mapping[int, Source], targets: Sequence[Leaf], indices: Iterable[int]
) -> Iterator[tuple[int, int, Box]]:
    """Yield what a rank needs for these pieces: (former rank, number of the tensor, box), in a fixed order."""
    for index in indices:
        seen: set[Box] = set()
        for former in sorted(sources):
            box = sources[former].leaves[index].box
            if box in seen or not box.numel:
                continue  # a copy of another's
            seen.add(box)
            part = box.overlap(targets[index].box) if targets[index].box.numel else None
            if part is not None:
                yield former, index, part


def in_chunks(leaves: Sequence[Leaf], limit: int) -> list[list[int]]:
    """Return the tensors' numbers, in groups whose whole tensors have about so many bytes."""
    chunks: list[list[int]] = []
    room = 0
    for index, leaf in enumerate(leaves):
        size = math.prod(leaf.shape) * leaf.torch_dtype.itemsize
        if not chunks or size > room:
            chunks.append([])
            room = limit
        chunks[-1].append(index)
        room -= size
    return chunks


def next_hosts(hosts: Sequence[str]) -> list[int]:
    """Return, for each rank, the one that keeps a copy of its pieces: on the next host; on one host the next rank.

    Args:
        hosts: the host of each rank.
    """
    names = list(dict.fromkeys(hosts))
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    if len(names) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    found = []
    for rank, host in enumerate(hosts):
        others = ranks[names[(names.index(host) + 1) % len(names)]]
        found.append(others[ranks[host].index(rank) % len(others)])
    return found
