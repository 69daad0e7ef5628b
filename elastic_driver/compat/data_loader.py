"""``horovod.data``: loaders that prefetch batches in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """A loader. Derive from it, and define ``__len__`` and ``_iterate``."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Transform a batch in the consumer's thread, before it is yielded."""
        return batch


class AsyncDataLoaderMixin:
    """Prefetches batches: ``class Loader(AsyncDataLoaderMixin, MyLoader)``.

    Each iteration has a thread of its own that calls ``_iterate`` and ends with it, so an abandoned iteration leaves no
    batches for the next one, unlike in Horovod. An exception in ``_iterate`` is raised in the consumer, after the
    batches before it.

    Args:
        async_loader_queue_size: the limit of batches to hold; 0 reads in the consumer's thread.
        debug_data_loader: for Horovod's signature; without effect.
        *args, **kwargs: for the loader that this is mixed into.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,  # noqa: FBT001, FBT002 - Horovod's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: list[_Reader] = []
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End all iterations. Blocks until their threads have read their current batches."""
        for reader in list(self._readers):
            reader.close()
            reader.join()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        reader = _Reader(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._readers.append(reader)
        try:
            for batch in reader:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            reader.close()
            self._readers.remove(reader)


class _Reader:
    """One iteration's thread and the batches that it has read.

    Args:
        iterate: returns the batches.
        limit: of batches to hold.
    """

    def __init__(self, iterate: Callable[[], Iterable[Any]], limit: int) -> None:
        self._iterate, self._limit = iterate, limit
        self._changed = threading.Condition()  # guards the fields below
        self._batches: deque[Any] = deque()
        self._error: BaseException | None = None
        self._has_ended = self._is_closed = False
        # A daemon: a batch that never arrives must not keep the program from ending. The thread ends after the last
        # batch, or at the first batch after close().
        self._thread = threading.Thread(target=self._read, name="elastic-driver-loader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._iterate():
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or len(self._batches) < self._limit)
                    if self._is_closed:
                        return
                    self._batches.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # raised in the consumer
            self._error = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._has_ended or self._is_closed)
                if self._is_closed:
                    return
                if not self._batches:
                    break
                batch = self._batches.popleft()
                self._changed.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the iteration, also for a consumer that waits for a batch. Does not wait for the thread."""
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()
