"""Pieces of a sharded state: kept, found again, and put together for another number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.distributed import sharded_state
from elastic_driver.torch.distributed.fsdp_state import FSDPState
from elastic_driver.torch.distributed.shards import (
    ROW_BYTES,
    Box,
    Key,
    Leaf,
    Payload,
    Sharded,
    Source,
    box_of,
    choose,
    in_chunks,
    next_hosts,
    parts,
    put_back,
    sharded_in,
    taken_out,
)

pytestmark = pytest.mark.unit

DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")


def leaf(shape: tuple[int, ...], dtype: str, rank: int, size: int, dim: int = 0) -> Leaf:
    """As ``Shard(dim)`` places it: in chunks of the same size, of which the last ones may be smaller or empty."""
    chunk = -(-shape[dim] // size)
    start = min(rank * chunk, shape[dim])
    length = min(chunk, shape[dim] - start)
    offset = tuple(start if at == dim else 0 for at in range(len(shape)))
    return Leaf(shape, dtype, Box(offset, tuple(length if at == dim else n for at, n in enumerate(shape))))


def whole(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(getattr(torch, dtype))


def kept_by(rank: int, size: int, tensors: list[torch.Tensor], dim: int = 0) -> Payload:
    leaves = [leaf(tuple(t.shape), str(t.dtype).removeprefix("torch."), rank, size, dim) for t in tensors]
    payload = Payload.of(leaves)
    for index, tensor in enumerate(tensors):
        full = Box((0,) * tensor.dim(), tuple(tensor.shape))
        payload.piece(index).copy_(full.within(tensor, leaves[index].box))
    return payload


def put_together(held: dict[int, Payload], sources: dict[int, Source], leaves: list[Leaf]) -> Payload:
    target = Payload.of(leaves)
    for former, index, part in parts(sources, leaves, range(len(leaves))):
        piece = held[former].leaves[index].box.within(held[former].piece(index), part)
        leaves[index].box.within(target.piece(index), part).copy_(piece)
    return target


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(
    shapes=SHAPES,
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    dim=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_what_some_ranks_kept_is_what_others_get(
    shapes: list[tuple[int, ...]], before: int, after: int, dim: int, dtype: str
) -> None:
    tensors = [whole(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    held = {rank: kept_by(rank, before, tensors, 0) for rank in range(before)}
    sent = {rank: Payload.read(payload.data.clone()) for rank, payload in held.items()}
    key = Key(7, 1, 1)
    chosen = choose([{key: {rank: payload.leaves}} for rank, payload in sent.items()], [[key]] * before)
    assert chosen is not None
    for rank in range(after):
        leaves = [leaf(s, dtype, rank, after, min(dim, len(s) - 1)) for s in shapes]
        target = put_together(sent, chosen[1], leaves)
        for index, tensor in enumerate(tensors):
            full = Box((0,) * tensor.dim(), tuple(tensor.shape))
            assert torch.equal(target.piece(index), full.within(tensor, leaves[index].box))


def test_a_payload_is_whole_rows_and_its_memory_is_used_again() -> None:
    tensors = [whole((5, 3), "float32", 0), whole((7,), "bfloat16", 1)]
    first = kept_by(0, 2, tensors)
    assert first.data.numel() % ROW_BYTES == 0
    again = Payload.of(first.leaves, first.data)
    assert again.data.data_ptr() == first.data.data_ptr()
    other = Payload.of(first.leaves, torch.empty(3, dtype=torch.uint8))
    assert other.data.numel() == first.data.numel()


def holdings(size: int, key: Key, copies: dict[int, list[int]]) -> list[dict[Key, dict[int, tuple[Leaf, ...]]]]:
    """Of each rank that lives: its own pieces, and those of others."""
    of = {rank: (leaf((9, 2), "float32", rank, size),) for rank in range(size)}
    return [{key: {rank: of[rank], **{other: of[other] for other in others}}} for rank, others in copies.items()]


def test_a_copy_stands_for_a_lost_rank() -> None:
    key = Key(3, 1, 4)
    chosen = choose(holdings(3, key, {0: [2], 1: []}), [[key], [key]])
    assert chosen is not None
    assert {former: source.holder for former, source in chosen[1].items()} == {0: 0, 1: 1, 2: 0}


def test_without_a_copy_the_version_before_is_taken() -> None:
    old, new = Key(2, 1, 3), Key(3, 1, 4)
    before, after = holdings(3, old, {0: [2], 1: []}), holdings(3, new, {0: [], 1: []})
    both = [{**a, **b} for a, b in zip(before, after, strict=True)]
    chosen = choose(both, [[old, new]] * 2)
    assert chosen is not None
    assert chosen[0] == old


def test_nothing_is_chosen_when_pieces_are_missing_everywhere() -> None:
    key = Key(2, 1, 3)
    assert choose(holdings(3, key, {0: [], 1: []}), [[key], [key]]) is None
    assert choose([{}, {}], [[], []]) is None


def test_copies_of_one_piece_are_taken_once() -> None:
    """As with HSDP, where groups of ranks have the same pieces."""
    key = Key(1, 1, 1)
    pieces = [(leaf((8,), "float32", rank % 2, 2),) for rank in range(4)]
    chosen = choose([{key: {rank: pieces[rank]}} for rank in range(4)], [[key]] * 4)
    assert chosen is not None
    wanted = [leaf((8,), "float32", 0, 1)]
    assert [(former, part.numel) for former, _, part in parts(chosen[1], wanted, [0])] == [(0, 4), (1, 4)]


def test_chunks_have_all_tensors_once() -> None:
    leaves = [leaf((100, 10), "float32", 0, 2) for _ in range(10)]
    chunks = in_chunks(leaves, 3 * 4000)
    assert [index for chunk in chunks for index in chunk] == list(range(10))
    assert max(sum(math.prod(leaves[index].shape) * 4 for index in chunk) for chunk in chunks) <= 3 * 4000


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", [2, 3, 0, 1]), ("aaab", [3, 3, 3, 0]), ("abc", [1, 2, 0]), ("aaa", [1, 2, 0]), ("abab", [1, 0, 3, 2])],
)
def test_copies_go_to_the_next_host(hosts: str, expected: list[int]) -> None:
    assert next_hosts(hosts) == expected


def test_a_tree_without_sharded_tensors_is_itself() -> None:
    tree = {"a": [1, (torch.ones(2), "x")], "b": {}}
    skeleton, found = taken_out(tree)
    assert not found
    assert not sharded_in(skeleton)
    assert put_back(skeleton, None)["a"][1][1] == "x"


@dataclass(frozen=True)
class Mesh:
    """What box_of asks a DeviceMesh for."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


@pytest.fixture(scope="module")
def placed() -> Any:
    """torch's words for how tensors are placed: an import of seconds, for the process alone that runs these tests."""
    from torch.distributed.tensor import placement_types

    return placement_types


@given(length=st.integers(1, 40), data=st.integers(1, 4), tensor=st.integers(1, 3))
def test_what_tensor_parallelism_divides_first_is_in_one_place(
    placed: Any, length: int, data: int, tensor: int
) -> None:
    """FSDP2 divides what a rank has of it then, and torch calls that a strided shard."""
    whole_tensor = torch.arange(2 * length).view(length, 2)
    boxes = []
    for row, column in itertools.product(range(data), range(tensor)):
        divided = whole_tensor.chunk(tensor)[column] if column < len(whole_tensor.chunk(tensor)) else whole_tensor[:0]
        pieces = divided.chunk(data)
        expected = pieces[row] if row < len(pieces) else divided[:0]
        mesh = Mesh((data, tensor), (row, column))
        box = box_of((length, 2), mesh, (placed._StridedShard(0, split_factor=tensor), placed.Shard(0)))
        boxes.append(box)
        full = Box((0, 0), (length, 2))
        assert torch.equal(full.within(whole_tensor, box), expected)
    assert sum(box.numel for box in boxes) == 2 * length


@pytest.mark.parametrize(
    "placements",
    [
        lambda placed: (placed.Partial(), placed.Shard(0)),
        lambda placed: (placed.Shard(0), placed._StridedShard(0, split_factor=2)),
        lambda placed: (placed._StridedShard(0, split_factor=3), placed.Shard(0)),
    ],
)
def test_what_is_not_in_one_place_is_refused(placed: Any, placements: Callable[[Any], tuple[Any, ...]]) -> None:
    with pytest.raises(UnsupportedOperationError, match="cannot keep a tensor placed as"):
        box_of((8, 2), Mesh((2, 2), (0, 0)), placements(placed))


def test_the_drivers_words_for_who_leaves() -> None:
    """They are those of the membership core, as a planned shrinking without copies proves in a real job."""
    text = "host b drained, host c left over (--max-np), host 10.0.0.2 removed or reduced, host e ready"
    assert sharded_state._LEAVING.findall(text) == ["b", "c", "10.0.0.2"]


def test_a_model_that_is_divided_otherwise_than_before_is_an_error(placed: Any) -> None:
    state = FSDPState(lambda mesh: torch.nn.Linear(2, 2), rehearse=False)
    state.model = torch.nn.Linear(2, 2)  # make() has divided nothing in this round
    divided = Sharded(0, (4, 4), "float32", (placed.Shard(0), placed.Shard(1)))
    with pytest.raises(UnsupportedOperationError, match=r"2 mesh dimensions: .* shard the model the same way"):
        state._set({"model": {"weight": divided}, "others": {}}, lambda sharded: torch.zeros(2, 2))
