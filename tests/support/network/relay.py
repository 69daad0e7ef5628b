"""A relay to a port of this machine whose connections a test can silence and cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PATIENCE_S = 150.0
_CHUNK = 1 << 16


class Relay:
    """See above. Runs in a thread of its own.

    Args:
        port: whither.

    Attributes:
        port: its own.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = self._wait(asyncio.start_server(self._take, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_PATIENCE_S)

    def _call(self, function: Callable[[], object]) -> None:
        async def inside() -> None:
            function()

        self._wait(inside())

    def silence(self) -> None:
        """Nothing comes through, and nobody is told: as where a network is cut."""
        self._call(self._passes.clear)

    def cut(self) -> None:
        """Connections end at once, and new ones are refused: as where a process was killed."""

        def cut() -> None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

        self._call(cut)

    def lead_to(self, port: int) -> None:
        """New connections go there."""
        self._to = port

    def mend(self) -> None:
        """All is well again."""
        self._call(self._passes.set)
        if not self._server.is_serving():
            self._server = self._wait(asyncio.start_server(self._take, "127.0.0.1", self.port))

    def close(self) -> None:
        """Ends it; nothing of it is left."""

        async def end() -> None:
            self._server.close()
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = {writer}
        try:
            with suppress(OSError):
                there, other = await asyncio.open_connection("127.0.0.1", self._to)
                writers.add(other)
                self._writers |= writers
                await asyncio.gather(self._pass(reader, other), self._pass(there, writer))
        finally:
            self._writers -= writers
            self._tasks.discard(task)
            for each in writers:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # the other direction ends, too


@contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """A relay that is closed."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
