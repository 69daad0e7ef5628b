"""Host memory for copies: how tensors share slabs, and what happens where none can be page-locked."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.torch import host_memory
from elastic_driver.torch.device import groups
from elastic_driver.worker.settings import WorkerSettings

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
    monkeypatch.setattr(host_memory, "_has_refused", threading.Event())
    make = torch.empty

    def refuses(*arguments: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return make(*arguments, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuses)
    for _ in range(2):
        assert host_memory.empty_bytes(3_000_000, pinned=True).shape == (3_000_000,)
    assert [record.getMessage() for record in caplog.records] == [
        "elastic_driver: cannot page-lock host memory (CUDA error: out of memory): copies of GPU tensors are slower"
    ]


def test_no_more_is_locked_than_is_allowed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(groups, "_warnings", set())
    monkeypatch.setattr(host_memory, "_has_refused", threading.Event())
    monkeypatch.setattr(host_memory, "_locked", host_memory._Locked())
    monkeypatch.setattr(host_memory, "worker_settings", lambda: WorkerSettings(page_locked_bytes=3 << 20))
    locked: list[int] = []
    make = torch.empty

    def empty(count: int, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            locked.append(count)
        return make(count, **more)

    monkeypatch.setattr(torch, "empty", empty)
    first, second = (host_memory.empty_bytes(1 << 20, pinned=True) for _ in range(2))
    whole = first
    first = first[10:]  # what is left of it keeps it
    del whole
    assert host_memory.empty_bytes(2 << 20, pinned=True).shape == (2 << 20,)
    assert locked == [1 << 20] * 2
    assert host_memory._has_refused.is_set()
    del first, second
    assert host_memory.empty_bytes(2 << 20, pinned=True).shape == (2 << 20,)
    assert locked == [1 << 20] * 2, "torch keeps what it has given"
    first = host_memory.empty_bytes((1 << 20) - 1, pinned=True)
    second = host_memory.empty_bytes(600_000, pinned=True)
    assert locked[2:] == [(1 << 20) - 1, 600_000], "and gives it for what is of about that size"
    third = host_memory.empty_bytes(600_000, pinned=True)
    fourth = host_memory.empty_bytes(600_000, pinned=True)
    assert locked[4:] == [600_000]
    del first, second, third, fourth
    assert [record.getMessage() for record in caplog.records] == [
        "elastic_driver: cannot page-lock host memory (this process may page-lock 3 MiB, see "
        "ELASTIC_DRIVER_PAGE_LOCKED_BYTES): copies of GPU tensors are slower"
    ]


def test_none_is_locked_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_memory, "_has_refused", threading.Event())
    monkeypatch.setattr(host_memory, "worker_settings", lambda: WorkerSettings(page_locked_bytes=0))
    assert not host_memory.empty_bytes(10, pinned=True).is_pinned()
    assert host_memory._has_refused.is_set()
    assert not caplog.records


@pytest.mark.parametrize(("given", "limit"), [(None, 1 << 30), (0, 0), (5, 5)])
def test_workers_of_a_machine_share_half_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, given: int | None, limit: int
) -> None:
    monkeypatch.setattr(host_memory, "worker_settings", lambda: WorkerSettings(page_locked_bytes=given))
    monkeypatch.setattr(host_memory, "memory_limit", lambda: 4 << 30)
    monkeypatch.setattr(host_memory, "is_initialized", lambda: True)
    monkeypatch.setattr(host_memory, "local_size", lambda: 2)
    assert host_memory._limit() == limit


class OnGpu:
    """What is looked at of a tensor on a GPU."""

    is_cuda = True
    shape, dtype = torch.Size((3,)), torch.float32


def test_memory_that_is_not_locked_is_not_used_again_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_has_refused", threading.Event())
    former = torch.empty(3)
    on_gpu: Any = OnGpu()
    assert host_memory.fits(former, torch.ones(3))
    assert not host_memory.fits(former, torch.ones(4))
    assert not host_memory.fits(former, on_gpu)
    host_memory._has_refused.set()  # then there is no better
    assert host_memory.fits(former, on_gpu)


@pytest.mark.parametrize(("kind", "waits"), [("cpu", False), ("xpu", True)])
def test_copies_that_nobody_could_wait_for_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, waits: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(host_memory, "copy_each", lambda targets, sources, *, wait: asked.append(wait))
    source: Any = OnGpu()
    source.device = torch.device(kind)
    host_memory.copy_to_host([torch.empty(3)], [source])
    assert asked == [waits]
