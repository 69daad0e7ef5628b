"""Host memory for copies of a state: page-locked for GPU tensors, which are then copied at bus speed.

Owns how much is page-locked: nothing else can use that memory, and the kernel kills processes when too little is left.

torch's allocator of page-locked memory rounds up to a power of two and never returns it. So tensors share slabs whose
sizes are powers of two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elastic_driver.system.cgroups import memory_limit
from elastic_driver.torch.device.groups import say_once
from elastic_driver.torch_private.tensors import copy_each
from elastic_driver.worker.rounds.current import is_initialized, local_size
from elastic_driver.worker.settings import ENV_PAGE_LOCKED, worker_settings

SLAB_BYTES = 64 << 20
_ALIGNED_BYTES = 64

# All workers of a machine or container together page-lock at most this fraction of its memory.
_SHARE = 2

_has_refused = threading.Event()  # page-locked memory was not available, once


class _Locked:
    """The page-locked memory in use, and what torch has kept of former use: pieces of a size are reused for pieces of
    that size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the other attributes
        self._used: dict[int, list[StorageWeakRef]] = {}  # by size
        self._most: dict[int, int] = {}  # by size, the most that were ever in use at once

    def take(self, count: int) -> torch.Tensor:
        """Allocate (count,) uint8. Raises RuntimeError if no memory is available, or no more is allowed."""
        size = _power_of_two(count)
        with self._lock:
            used = [one for one in self._used.get(size, ()) if not one.expired()]  # type: ignore[no-untyped-call]
            most = max(len(used) + 1, self._most.get(size, 0))
            others = sum(number * each for each, number in self._most.items() if each != size)
            limit = _limit()
            if limit is not None and others + most * size > limit and most > self._most.get(size, 0):
                raise RuntimeError(f"this process may page-lock {limit >> 20} MiB, see {ENV_PAGE_LOCKED}")
            made = torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
            used.append(StorageWeakRef(made.untyped_storage()))  # type: ignore[no-untyped-call]
            self._used[size], self._most[size] = used, most
            return made


_locked = _Locked()


def _limit() -> int | None:
    """Return the most bytes that this process may page-lock; None for no limit."""
    if (given := worker_settings().page_locked_bytes) is not None:
        return given
    all_there_is = memory_limit()
    return None if all_there_is is None else all_there_is // _SHARE // (local_size() if is_initialized() else 1)


def empty_bytes(count: int, *, pinned: bool) -> torch.Tensor:
    """Allocate (count,) uint8; page-locked if requested and available, else ordinary memory."""
    if pinned and worker_settings().page_locked_bytes == 0:
        _has_refused.set()
    elif pinned:
        try:
            return _locked.take(count)
        except RuntimeError as error:
            _has_refused.set()
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            say_once(f"cannot page-lock host memory ({reason}): copies of GPU tensors are slower")
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def fits(former: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether memory of an earlier copy is as good for one of this tensor as new memory."""
    is_alike = former.shape == tensor.shape and former.dtype == tensor.dtype
    return is_alike and (not tensor.is_cuda or former.is_pinned() or _has_refused.is_set())


def empty_like_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate host memory for a copy of each of these tensors; page-locked for those on a GPU."""
    made = [torch.empty(() if tensor.is_cuda else tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    on_gpu = [index for index, tensor in enumerate(tensors) if tensor.is_cuda]
    slabs, places = layout([tensors[index].numel() * tensors[index].element_size() for index in on_gpu])
    memory = [empty_bytes(size, pinned=True) for size in slabs]
    for index, (slab, start) in zip(on_gpu, places, strict=True):
        tensor = tensors[index]
        nbytes = tensor.numel() * tensor.element_size()
        made[index] = memory[slab][start : start + nbytes].view(tensor.dtype).view(tensor.shape)
    return made


def copy_to_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors of any devices to host memory, after the current streams of their devices."""
    if not targets:
        return
    devices = {source.device for source in sources if source.device.type != "cpu"}
    only_cuda = all(device.type == "cuda" for device in devices)
    copy_each(targets, sources, wait=not only_cuda)
    for device in devices if only_cuda else ():
        torch.cuda.current_stream(device).synchronize()


def layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack pieces of these sizes, in bytes, into slabs: return the slabs' sizes, and each piece's slab and offset."""
    left = sum(map(_aligned, sizes))
    slabs: list[int] = []
    ends: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        need = _aligned(sizes[index])
        slab = next((slab for slab, end in enumerate(ends) if end + need <= slabs[slab]), len(slabs))
        if slab == len(slabs):
            slabs.append(_power_of_two(max(need, min(left, SLAB_BYTES))))
            ends.append(0)
        places[index] = slab, ends[slab]
        ends[slab] += need
        left -= need
    return slabs, places


def _aligned(size: int) -> int:
    return max(1, -(-size // _ALIGNED_BYTES)) * _ALIGNED_BYTES


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
