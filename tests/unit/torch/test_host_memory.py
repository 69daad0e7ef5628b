"""Host memory for copies: how tensors share slabs, and what happens where none can be page-locked."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.torch import host_memory
from elastic_driver.torch.device import groups

pytestmark = pytest.mark.unit


@given(st.lists(st.integers(min_value=0, max_value=1 << 28), max_size=60))
def test_pieces_share_slabs(sizes: list[int]) -> None:
    slabs, places = host_memory.layout(sizes)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (slab, start) in zip(sizes, places, strict=True):
        assert start % 64 == 0
        assert start + size <= slabs[slab]
        taken.setdefault(slab, []).append((start, start + size))
    for spans in taken.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(size & (size - 1) == 0 for size in slabs), "a power of two each"
    assert len(taken) == len(slabs), "none for nothing"


def test_many_tensors_take_little_more_than_their_size() -> None:
    sizes = [4 << 20] * 100 + [4096] * 100
    slabs, _ = host_memory.layout(sizes)
    assert sum(slabs) <= 1.3 * sum(sizes)


def test_ordinary_memory_where_none_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "_warnings", set())
    make = torch.empty

    def refuses(*arguments: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return make(*arguments, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuses)
    for _ in range(2):
        assert host_memory.empty_bytes(3_000_000, pinned=True).shape == (3_000_000,)
    assert [record.getMessage() for record in caplog.records] == [
        "elastic_driver: cannot lock 3 MB of host memory (CUDA error: out of memory); copies of GPU tensors take longer"
    ]
