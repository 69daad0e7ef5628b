"""What an error says to users."""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import socket
import ssl

import pytest

from elastic_driver.errors import in_words, shortage, with_path
from tests.support.sources import nodes

pytestmark = pytest.mark.unit

REFUSED = "nothing listens there (connection refused)"
# Theirs are made here, or handed on to the operating system's caller.
MAKE_THEM = {
    "errors.py",
    "system/kernel.py",
    "system/local_socket.py",
    "system/mechanisms.py",
    "launch/dial/spawned.py",
    "journal/folder.py",
}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/no/such"), "No such file or directory"),
        (ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)), REFUSED),
        # asyncio, which has one address, or several.
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 4455)"), REFUSED),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 4455, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 4455)"
            ),
            REFUSED,
        ),
        (
            OSError(
                "Multiple exceptions: [Errno 101] Connect call failed ('fd00::1', 4455, 0, 0), "
                "[Errno 111] Connect call failed ('10.0.0.1', 4455)"
            ),
            f"this machine has no way to that network (network is unreachable); {REFUSED}",
        ),
        (OSError(errno.ENONET, "Connect call failed ('127.0.0.1', 4455)"), "ENONET"),
        (
            OSError(errno.EACCES, "error while attempting to bind on address ('127.0.0.1', 80): permission denied"),
            "permission denied",
        ),
        (TimeoutError(), "no answer in time"),
        (TimeoutError("timed out"), "no answer in time"),
        (TimeoutError("the TLS handshake took more than 10 s"), "the TLS handshake took more than 10 s"),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), "no answer (connection timed out)"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (PermissionError(errno.EPERM, "/a/folder is open to other users"), "/a/folder is open to other users"),
        (ConnectionResetError("the connection was closed"), "the connection was closed"),
        (OSError(), "OSError"),
        (ValueError("no number"), "no number"),
        (EOFError(), "EOFError"),
        (MemoryError(), "no memory is left"),
        (MemoryError("cannot allocate 8 GiB"), "cannot allocate 8 GiB"),
        (RuntimeError("can't start new thread"), shortage(RuntimeError("can't start new thread"))),
    ],
)
def test_in_words(error: BaseException, words: str) -> None:
    assert in_words(error) == words


def test_with_its_path() -> None:
    assert with_path(FileNotFoundError(errno.ENOENT, "No such file", "/no/such")) == "/no/such: No such file"
    assert with_path(OSError(errno.ENOSPC, "No space")) == "No space"
    assert with_path(ValueError("no number")) == "no number"


def test_openssl_in_words() -> None:
    context = ssl.create_default_context()
    incoming = ssl.MemoryBIO()
    incoming.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError) as caught:
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="a").do_handshake()
    assert in_words(caught.value) in ("wrong version number", "record layer failure")


@pytest.mark.parametrize("several", [False, True])
def test_a_connect_of_asyncio_in_words(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        if several:
            found = await loop.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)

            async def twice(*_: object, **__: object) -> object:
                return [*found, (*found[0][:4], ("127.0.0.2", port))]

            monkeypatch.setattr(loop, "getaddrinfo", twice)
        await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)

    with pytest.raises(OSError) as caught, asyncio.Runner() as runner:  # noqa: PT011 - which one is not the point
        runner.run(connect())
    assert in_words(caught.value) == REFUSED


def test_what_a_machine_lacks_is_told_as_the_system_does() -> None:
    assert shortage(OSError(errno.EMFILE, os.strerror(errno.EMFILE))) == os.strerror(errno.EMFILE)
    assert shortage(OSError(errno.ENOENT, os.strerror(errno.ENOENT))) == ""


def test_nobody_words_errors_of_the_system_by_himself() -> None:
    found = {
        path
        for path, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.Attribute) and node.attr == "strerror"
    }
    assert found <= MAKE_THEM, "in_words() is for that"
