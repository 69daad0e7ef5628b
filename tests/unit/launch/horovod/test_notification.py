"""Where a worker takes notices, as it says itself; and notices to services that answer well, wrongly, and never."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from horovod_wire import NotificationService
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousError, RendezvousProtocolError
from elastic_driver.launch.agent.horovod.notification import Registration, notify, parse_registration

KEY = bytes(range(32))
ADDRESSES = {"lo": [("127.0.0.1", 1234)], "eth0": [("10.0.0.2", 1234), ("127.0.0.1", 1234)]}


@pytest.fixture(autouse=True)
def _names_of_horovods() -> Iterator[None]:
    """The service makes modules of these names, which tests of our own stand-in are not to meet."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "horovod":
            del sys.modules[name]


def said(what: Any, protocol: int = 5) -> bytes:
    return base64.b64encode(pickle.dumps(what, protocol))


# --- what it says --------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("protocol", range(6))
def test_what_a_worker_says_is_read(protocol: int) -> None:
    if protocol < 3:  # bytes are made by a class there
        with pytest.raises(RendezvousProtocolError):
            parse_registration(said((ADDRESSES, KEY), protocol))
        return
    read = parse_registration(said((ADDRESSES, KEY), protocol))
    assert read == Registration((("127.0.0.1", 1234), ("10.0.0.2", 1234)), KEY)
    assert KEY.hex() not in repr(read)
    assert repr(KEY) not in repr(read)


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.unit
@pytest.mark.parametrize("protocol", range(6))
def test_no_class_is_made_and_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "made"
    for what in (
        Touches(path),
        (ADDRESSES, Touches(path)),
        ({Touches(path): []}, KEY),
        (OrderedDict(ADDRESSES), KEY),
        ({"lo": {("127.0.0.1", 1234)}}, KEY),
        ({"lo": [("127.0.0.1", 12j)]}, KEY),
        (ADDRESSES, KEY, len),
    ):
        with pytest.raises(RendezvousProtocolError, match="cannot read the worker's notification address"):
            parse_registration(said(what, protocol))
    assert not path.exists()


@pytest.mark.unit
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"rubbish",
        b"\xff\xfe",
        base64.b64encode(b"rubbish"),
        said((ADDRESSES, KEY))[:-8],
        b"x" * 70000,
        said((ADDRESSES, b"short")),
        said((ADDRESSES, KEY.decode())),
        said(({}, KEY)),
        said((None, KEY)),
        said((ADDRESSES,)),
        said(7),
        said(({"lo": [("localhost", 1234)]}, KEY)),
        said(({"lo": [("::1", 1234)]}, KEY)),
        said(({"lo": [("127.0.0.1", True)]}, KEY)),
        said(({"lo": [("127.0.0.1", 0)]}, KEY)),
        said(({"lo": [("127.0.0.1", 1 << 16)]}, KEY)),
        said(({"lo": [("127.0.0.1", "1234")]}, KEY)),
        said(({"lo": [("127.0.0.1", port) for port in range(1, 100)]}, KEY)),
        said(([("127.0.0.1", 1234)], KEY)),
        base64.b64encode(b"\x80\x05" + b"]" * 30000 + b"a" * 29999 + b"."),
        base64.b64encode(b"\x80\x05h\xff."),
        base64.b64encode(b"\x80\x05\x8a\xff" + b"9" * 255 + b"."),
        base64.b64encode(b"\x80\x05]\x94" + b"h\x00a" * 100 + b"."),
    ],
)
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(RendezvousProtocolError, match="cannot read the worker's notification address"):
        parse_registration(body)


@pytest.mark.unit
def test_a_small_pickle_takes_no_large_memory() -> None:
    for data in (
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x05\x8e" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x05r\xff\xff\xff\x7f.",
        b"\x80\x05N" + b"r\xff\xff\xff\x0f" + b".",
        b"\x80\x05Np99999999\n.",
        b"\x80\x05\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
        b"\x80\x05]" + b"2" * 100 + b"e" * 10 + b".",
    ):
        tracemalloc.start()
        with pytest.raises(RendezvousProtocolError):
            parse_registration(base64.b64encode(data))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20, data


@pytest.mark.property
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, whole: bool) -> None:
    body = base64.b64encode(b"\x80\x05" + data + b"." if whole else data)
    with contextlib.suppress(RendezvousProtocolError):
        parse_registration(body)


@pytest.mark.property
@given(st.integers(0, len(said((ADDRESSES, KEY))) - 1), st.integers(0, 255))
def test_a_byte_that_is_another_is_read_or_refused(at: int, byte: int) -> None:
    body = bytearray(said((ADDRESSES, KEY)))
    body[at] = byte
    with contextlib.suppress(RendezvousProtocolError):
        parse_registration(bytes(body))


# --- what it is told -----------------------------------------------------------------------------------------------


async def tell(registration: Registration, limit_s: float = 20.0, own: tuple[str, ...] = ("127.0.0.1",)) -> None:
    await notify(registration, timestamp=12.5, res=3, own=own, limit_s=limit_s)


@pytest.mark.integration
def test_a_service_as_horovods_is_takes_a_notice() -> None:
    with contextlib.closing(NotificationService("lo")) as service:
        asyncio.run(tell(parse_registration(service.registration())))
    assert service.notices == [(12.5, 3)]


@pytest.mark.integration
def test_nobody_elsewhere_is_connected_to() -> None:
    with (
        contextlib.closing(NotificationService("lo")) as service,
        pytest.raises(RendezvousError, match="none of its addresses is on this machine"),
    ):
        asyncio.run(tell(parse_registration(service.registration()), own=("10.0.0.1",)))
    assert service.notices == []


@contextlib.asynccontextmanager
async def service(answer: bytes | None) -> AsyncIterator[Registration]:
    """One that answers so, whatever comes; None: never. It may not be left waiting."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(36)
            if answer is None:
                while await reader.read(1 << 16):  # until the other end is closed
                    pass
            else:
                writer.write(answer)
        writer.close()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Registration((("127.0.0.1", server.sockets[0].getsockname()[1]),), KEY)
        async with asyncio.timeout(150):
            await over.wait()


@pytest.mark.integration
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"x" * 35,
        b"x" * 32 + b"\x04\x00\x00\x00" + b"half",
        b"x" * 32 + b"\x04\x00\x00\x00",
        b"x" * 32 + b"\xff\xff\xff\xff",
        b"x" * 32 + b"\xff\xff\xff\x7f",
    ],
)
def test_an_answer_without_the_seal_is_none(answer: bytes) -> None:
    async def main() -> None:
        async with service(answer) as registration:
            with pytest.raises(RendezvousError, match="cannot notify the worker"):
                await tell(registration)

    asyncio.run(main())


@pytest.mark.integration
def test_a_service_that_never_answers_is_not_waited_for() -> None:
    async def main() -> None:
        async with service(None) as registration:
            with pytest.raises(TimeoutError):
                await tell(registration, limit_s=0.1)

    asyncio.run(main())


@pytest.mark.integration
def test_one_of_its_addresses_suffices() -> None:
    async def main() -> None:
        async with service(b"") as bad:
            known = parse_registration(good.registration())
            await tell(Registration((*bad.addresses, *known.addresses), known.key))

    with contextlib.closing(NotificationService("lo")) as good:
        asyncio.run(main())
    assert good.notices == [(12.5, 3)]
