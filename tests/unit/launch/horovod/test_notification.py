"""What a worker says of its notification service is read without knowing a class; what it is told, it can read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import os
import pickle
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousError, RendezvousProtocolError
from elastic_driver.launch.agent.horovod.notification import Registration, notify, parse_registration

pytestmark = pytest.mark.unit

KEY = bytes(range(32))


def said(value: Any, protocol: int = 5) -> bytes:
    return base64.b64encode(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", range(6))
def test_it_is_read_whatever_the_protocol(protocol: int) -> None:
    if protocol < 3:
        return  # bytes are a call of a function there
    body = said(({"lo": [("127.0.0.1", 5000)], "eth0": [("10.0.0.2", 5000)]}, KEY), protocol)
    assert parse_registration(body) == Registration((("127.0.0.1", 5000), ("10.0.0.2", 5000)), KEY)


def test_its_key_is_not_shown() -> None:
    assert "key" not in repr(Registration((("127.0.0.1", 1),), KEY))


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"!",
        b"x" * 100_000,
        base64.b64encode(b"\x80\x05."),
        base64.b64encode(b"cos\nsystem\n(S'true'\ntR."),
        said(Runs()),
        said(({"lo": [("127.0.0.1", 5000)]}, Runs())),
        said(({"lo": [("127.0.0.1", 5000)]}, "text")),
        said(({"lo": [("127.0.0.1", 5000)]}, b"short")),
        said(({"lo": [("127.0.0.1", 0)]}, KEY)),
        said(({"lo": [("127.0.0.1", 1 << 16)]}, KEY)),
        said(({"lo": [("127.0.0.1", True)]}, KEY)),
        said(({"lo": [("::1", 5000)]}, KEY)),
        said(({"lo": [("example.org", 5000)]}, KEY)),
        said(({"lo": [(b"127.0.0.1", 5000)]}, KEY)),
        said(({"lo": []}, KEY)),
        said(({"lo": [("127.0.0.1", 1 + port) for port in range(65)]}, KEY)),
        said(([], KEY)),
        said({1, 2}),
        said(range(10)),
        said(complex(1, 2)),
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(RendezvousProtocolError, match="where the worker takes notices"):
        parse_registration(body)


@given(st.binary(max_size=200))
def test_rubbish_is_refused(data: bytes) -> None:
    for body in (data, base64.b64encode(data), base64.b64encode(b"\x80\x05" + data)):
        with contextlib.suppress(RendezvousProtocolError):
            parse_registration(body)


# --- notices ---------------------------------------------------------------------------------------------------------


class Seen(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(f"{module}.{name}", (), {})


@contextlib.asynccontextmanager
async def service(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[tuple[int, list[bytes]]]:
    got: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readexactly(36)
        body = await reader.readexactly(struct.unpack("i", head[32:])[0])
        assert hmac.compare_digest(hmac.digest(KEY, body, hashlib.sha256), head[:32])
        got.append(body)
        reply = answer(body)
        if reply is not None:
            writer.write(reply)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], got
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def sealed(body: bytes, key: bytes = KEY) -> bytes:
    return hmac.digest(key, body, hashlib.sha256) + struct.pack("i", len(body)) + body


def tell(answer: Callable[[bytes], bytes | None], *, own: tuple[str, ...] = ("127.0.0.1",)) -> list[bytes]:
    async def body() -> list[bytes]:
        async with service(answer) as (port, got):
            registration = Registration((("127.0.0.1", port),), KEY)
            await notify(registration, timestamp=12.5, res=3, own=own, limit_s=0.5)
        return got

    return asyncio.run(body())


def test_a_notice_is_what_horovod_reads() -> None:
    import io

    (body,) = tell(lambda _: sealed(b"anything"))
    request = Seen(io.BytesIO(body)).load()
    assert type(request).__name__ == "horovod.runner.elastic.worker.HostsUpdatedRequest"
    assert vars(request) == {"timestamp": 12.5, "res": 3}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        sealed(b"x", b"k" * 32),
        sealed(b"x")[:-1],
        KEY + struct.pack("i", -1),
        KEY + struct.pack("i", 1 << 30) + b"x",
    ],
)
def test_what_is_no_acknowledgement_is_none(answer: bytes) -> None:
    with pytest.raises(RendezvousError, match="takes no notices"):
        tell(lambda _: answer)


def test_one_that_does_not_answer_in_time() -> None:
    with pytest.raises(TimeoutError):
        tell(lambda _: None)


def test_a_worker_cannot_have_its_agent_connect_elsewhere() -> None:
    with pytest.raises(RendezvousError, match="none of its addresses is here"):
        tell(lambda _: sealed(b""), own=("10.9.8.7",))
