"""The HTTP of a port, to whoever connects: good requests, rubbish, slow and huge ones, and those of another user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from elastic_driver.launch.agent.horovod import http as http_module
from elastic_driver.launch.agent.horovod import owner as owner_module
from elastic_driver.launch.agent.horovod.http import MOST_BYTES, Answer, OneRequest, Request
from elastic_driver.launch.agent.horovod.owner import owner_of
from elastic_driver.system.tasks import Tasks

pytestmark = pytest.mark.integration
LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


class Server:
    """Answers each request with its body; keeps what was asked. A path of /held is not answered."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.connections: set[OneRequest] = set()
        self.held = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.port = 0

    async def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        match request.url:
            case b"/held":
                self.held.set()
                try:
                    await asyncio.Future()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case b"/cut":
                return Answer(0)
        return Answer(200, request.body, {"X-More": "yes"})

    async def send(self, *parts: bytes) -> bytes:
        """All that is answered until the connection's end; b"" if it is cut off."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(150):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def server(uid: int) -> AsyncIterator[Server]:
    one, tasks, loop = Server(), Tasks(), asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: OneRequest(one.answer, uid, tasks, one.connections), "127.0.0.1", 0, backlog=128
    )
    async with listening:
        one.port = listening.sockets[0].getsockname()[1]
        try:
            yield one
        finally:
            for connection in tuple(one.connections):
                connection.abort()
            await tasks.end()
    while one.connections:
        await asyncio.sleep(0)


def run(main: Callable[[Server], Coroutine[Any, Any, None]], loop: Any = asyncio.new_event_loop, uid: int = -1) -> None:
    async def whole() -> None:
        async with server(os.getuid() if uid < 0 else uid) as one:
            await main(one)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_in_pieces(loop: Any) -> None:
    async def main(one: Server) -> None:
        said = await one.send(b"PUT /a/b HT", b"TP/1.1\r\nHost: x\r\nContent-Le", b"ngth: 4\r\n\r\nab", b"cd")
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.splitlines()[0] == b"HTTP/1.0 200 OK"
        assert b"Content-Length: 4" in head.splitlines()  # this spelling only is understood
        assert b"X-More: yes" in head.splitlines()
        assert body == b"abcd"
        (request,) = one.asked
        assert (request.method, request.url, request.headers[b"host"]) == (b"PUT", b"/a/b", b"x")

    run(main, loop)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x00\xff\x13rubbish\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /a/b HTTP/1.1\r\nContent-Length: no\r\n\r\n",
        b"GET /a/b HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /a/b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /a/b HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_rubbish_is_refused_and_the_next_is_served(rubbish: bytes) -> None:
    async def main(one: Server) -> None:
        assert (await one.send(rubbish)).startswith(b"HTTP/1.0 400 ")
        assert (await one.send(b"GET /a/b HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.0 200 ")

    run(main)


@pytest.mark.parametrize("head", [b"", b"PUT /a/b HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"GET /"])
def test_what_is_huge_is_not_kept(head: bytes) -> None:
    async def main(one: Server) -> None:
        said = await one.send(head, *[b"x" * 65536] * (MOST_BYTES // 65536 + 3))
        assert said[:12] in (b"", b"HTTP/1.0 413", b"HTTP/1.0 400")
        assert one.asked == []

    run(main)


@pytest.mark.parametrize("part", [b"", b"GET /a", b"PUT /a/b HTTP/1.1\r\nContent-Length: 4\r\n\r\nab"])
def test_who_is_slow_is_cut_off(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "REQUEST_S", 0.05)

    async def main(one: Server) -> None:
        assert await one.send(part) == b""
        assert one.asked == []

    run(main)


def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "REQUEST_S", 0.05)

    async def main(one: Server) -> None:
        held: asyncio.Task[bytes] | None = None
        while held is None or held.done():  # on a busy machine a request may take longer than that, too
            held = asyncio.create_task(one.send(b"GET /held HTTP/1.1\r\n\r\n"))
            has_come = asyncio.create_task(one.held.wait())
            await asyncio.wait((held, has_come), return_when=asyncio.FIRST_COMPLETED)
            has_come.cancel()
        assert await one.send(b"GET /slow") == b""  # the time is over
        assert not held.done()
        assert len(one.connections) == 1
        for connection in tuple(one.connections):
            connection.abort()
        assert await held == b""
        await one.cancelled.wait()

    run(main)


def test_one_request_a_connection() -> None:
    async def main(one: Server) -> None:
        said = await one.send(b"GET /a/b HTTP/1.1\r\n\r\nGET /c/d HTTP/1.1\r\n\r\n", b"GET /e/f HTTP/1.1\r\n\r\n")
        assert said.count(b"HTTP/1.0") <= 1
        assert [request.url for request in one.asked] == [b"/a/b"]

    run(main)


def test_who_leaves_is_not_answered() -> None:
    async def main(one: Server) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(b"GET /held HTTP/1.1\r\n\r\n")
        await one.held.wait()
        writer.close()
        async with asyncio.timeout(150):
            await one.cancelled.wait()

    run(main)


def test_an_answer_may_be_none() -> None:
    async def main(one: Server) -> None:
        assert await one.send(b"GET /cut HTTP/1.1\r\n\r\n") == b""

    run(main)


# --- of whom a connection is ---------------------------------------------------------------------------------------

NOBODY = 65534
_ASK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket() as end:
    try:
        end.connect(("127.0.0.1", int(sys.argv[1])))
        end.sendall(b"GET /a/b HTTP/1.1\\r\\n\\r\\n")
        print(len(end.recv(100)), flush=True)
    except ConnectionError:
        print(0, flush=True)
    sys.stdin.read()
"""


def asker(port: int, uid: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _ASK, str(port), str(uid)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_is_cut_off_without_a_word() -> None:
    async def main(one: Server) -> None:
        for uid, is_served in ((NOBODY, False), (os.getuid(), True)):
            with asker(one.port, uid) as process:
                said, _ = await asyncio.to_thread(process.communicate)
            assert (int(said) > 0) is is_served
        assert len(one.asked) == 1

    run(main)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("way", [owner_module.owner_of, owner_module._by_diag, owner_module._by_table])
def test_the_kernel_knows_the_owner(way: Callable[[tuple[str, int], tuple[str, int]], int | None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with asker(listener.getsockname()[1], NOBODY) as process:
            end, far = listener.accept()
            with end:
                assert end.recv(100)
                assert way(end.getsockname(), far) == NOBODY
            process.communicate()
        with socket.create_connection(listener.getsockname()) as mine, listener.accept()[0] as end:
            assert way(end.getsockname(), mine.getsockname()) == os.getuid()


def test_of_a_connection_that_is_not_there_it_knows_none() -> None:
    assert owner_of(("127.0.0.1", 9), ("127.0.0.1", 10)) is None
