"""How busy GPUs are, asked of a library that is none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_driver.figures import GpuLook
from elastic_driver.launch.agent.gpus import GpuWatch, visible_of

pytestmark = pytest.mark.unit

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,0", [0]),
        ("0,7,1", [0]),
        ("GPU-bb, 0", [2, 0]),
        ("GPU-aa", []),
        ("MIG-x", []),
        ("-1", []),
    ],
)
def test_only_gpus_that_are_visible_are_looked_at(text: str | None, found: list[int]) -> None:
    assert visible_of(text, UUIDS) == found


class NVMLError(Exception):
    """As the library has it."""


class Library:
    """Three GPUs; the last one is divided, and does not tell how busy it is."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> Any:
        return UUIDS[gpu].encode() if gpu else UUIDS[gpu]

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=10 + gpu)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        if gpu == 2:
            raise NVMLError
        return SimpleNamespace(gpu=50 * (gpu + 1))


def test_they_are_looked_at_in_a_thread_until_it_is_closed() -> None:
    async def run() -> None:
        seen: asyncio.Queue[GpuLook] = asyncio.Queue()
        watch = GpuWatch(seen.put_nowait, load=Library, visible=None, look_s=0.01)
        watch.start()
        watch.start()
        assert [await seen.get() for _ in range(2)] == 2 * [GpuLook(3, 0.75, 33)]
        watch.close()
        assert watch._thread is not None
        await asyncio.to_thread(watch._thread.join)

    asyncio.run(run())


class Failing(Library):
    """Fails as the test says.

    Attributes:
        lost: these GPUs tell nothing.
        fault: of all.
    """

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.fault: Exception | None = None
        self.wait: Callable[[], object] = int

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        self.wait()
        if self.fault is not None:
            raise self.fault
        if gpu in self.lost:
            raise NVMLError
        return super().nvmlDeviceGetMemoryInfo(gpu)


async def until(seen: asyncio.Queue[GpuLook], look: GpuLook) -> None:
    while await seen.get() != look:
        pass


ALL, NOTHING = GpuLook(3, 0.75, 33), GpuLook(0, None, 0)


def test_of_a_gpu_that_tells_nothing_the_others_are_known() -> None:
    async def run() -> None:
        library, seen = Failing(), asyncio.Queue[GpuLook]()
        watch = GpuWatch(seen.put_nowait, load=lambda: library, visible=None, look_s=0.01)
        library.lost = {0, 1, 2}  # as those that share the processor's memory
        watch.start()
        await until(seen, GpuLook(3, 0.75, 0))
        library.lost = {2}
        await until(seen, GpuLook(3, 0.75, 21))
        watch.close()

    asyncio.run(run())


def test_what_was_seen_before_all_failed_does_not_stay_and_is_asked_again() -> None:
    async def run() -> None:
        library, seen = Failing(), asyncio.Queue[GpuLook]()
        watch = GpuWatch(seen.put_nowait, load=lambda: library, visible=None, look_s=0.01)
        watch.start()
        await until(seen, ALL)
        library.fault = OSError("the driver is loaded anew")
        await until(seen, NOTHING)
        library.fault = None
        await until(seen, ALL)
        watch.close()

    asyncio.run(run())


def test_what_was_seen_before_the_library_hung_does_not_stay() -> None:
    async def run() -> None:
        library, seen, goes_on = Failing(), asyncio.Queue[GpuLook](), threading.Event()
        watch = GpuWatch(seen.put_nowait, load=lambda: library, visible=None, look_s=0.01)
        watch.start()
        await until(seen, ALL)
        library.wait = goes_on.wait
        await until(seen, NOTHING)
        goes_on.set()
        await until(seen, ALL)
        watch.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", [ImportError("no pynvml"), OSError("no library"), NVMLError()])
def test_where_there_is_no_library_nothing_is_known(fault: Exception) -> None:
    async def run() -> None:
        def load() -> Any:
            raise fault

        seen: list[GpuLook] = []
        watch = GpuWatch(seen.append, load=load)
        watch.start()
        assert watch._thread is not None
        await asyncio.to_thread(watch._thread.join)
        assert seen == []

    asyncio.run(run())
