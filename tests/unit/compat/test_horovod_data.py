"""``horovod.data``: batches are read ahead by a thread that ends with its iteration."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastic_driver.compat.data_loader import AsyncDataLoaderMixin, BaseDataLoader

pytestmark = pytest.mark.unit
PATIENCE_S = 150.0


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fails_after: bool = False) -> None:
        self.count, self.fails_after = count, fails_after
        self.read = threading.Semaphore(0)
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            self.readers.add(threading.current_thread().name)
            self.read.release()
            yield number
        if self.fails_after:
            raise OSError("the disk")

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def readers_left() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "elastic-driver-loader"]


def test_batches_come_in_order_and_are_read_ahead() -> None:
    loader = AsyncNumbers(2, False, 5)
    iteration = iter(loader)
    assert next(iteration) == 0
    for _ in range(4):  # one is taken, two are held, one waits for a place
        assert loader.read.acquire(timeout=PATIENCE_S)
    assert list(iteration) == [10, 20, 30, 40]
    assert list(loader) == [0, 10, 20, 30, 40]
    assert loader.readers == {"elastic-driver-loader"}
    assert len(loader) == 5


def test_a_queue_of_none_reads_in_the_consumers_thread() -> None:
    loader = AsyncNumbers(0, False, 3)
    assert list(loader) == list(Numbers(3)) == [0, 10, 20]
    assert loader.readers == {threading.current_thread().name}
    loader.close_async_loader()


def test_an_iteration_that_is_left_leaves_nothing_to_the_next() -> None:
    loader = AsyncNumbers(1, False, 100)
    for batch in loader:
        assert batch == 0
        break
    for thread in readers_left():
        thread.join(PATIENCE_S)
    assert readers_left() == []
    assert list(loader)[:2] == [0, 10]


def test_an_error_is_the_consumers_after_the_batches_before_it() -> None:
    got = []
    with pytest.raises(OSError, match="the disk"):
        got.extend(AsyncNumbers(8, False, 2, True))
    assert got == [0, 10]


def test_closing_ends_all_iterations() -> None:
    loader = AsyncNumbers(1, False, 1000)
    iterations = [iter(loader), iter(loader)]
    assert [next(iteration) for iteration in iterations] == [0, 0]
    loader.close_async_loader()
    assert readers_left() == []
    assert [list(iteration) for iteration in iterations] == [[], []]
