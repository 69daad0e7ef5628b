"""Whom a listener admits, asked from outside: it says so before anybody has proven anything."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

from elastic_driver.rendezvous.authentication import NONCE_BYTES, is_refusal, opening, read_refusal
from elastic_driver.rendezvous.certificate import client_context
from elastic_driver.system.local_socket import connect

PATIENCE_S = 150.0
_NOBODY = ("this name cannot authenticate here", "unknown ", "hosts cannot join here")


def admitted_here(path: Path, names: Iterable[str]) -> set[str]:
    """Those of these names that are not refused at a Unix socket. What follows is HTTP, which agents do not speak."""
    return {name for name in names if not _is_refused(_said_here(path, name))}


def admitted_over_tls(port: int, names: Iterable[str]) -> set[str]:
    """Those of these names that are sent a challenge."""
    return {name for name in names if not _is_refused(_said_over_tls(port, name))}


def _is_refused(answer: bytes) -> bool:
    if not is_refusal(answer):
        return False
    assert read_refusal(answer).startswith(_NOBODY)
    return True


def _said_here(path: Path, name: str) -> bytes:
    with connect(path, PATIENCE_S) as connection:
        connection.sendall(opening(name) + b"GET /v1/whatever HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return _all(connection)


def _said_over_tls(port: int, name: str) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        client_context().wrap_socket(plain) as connection,
    ):
        connection.sendall(opening(name) + bytes(NONCE_BYTES) + bytes(32))  # and a proof that is none
        answer = _all(connection)
        assert answer, "neither a challenge nor a refusal"
        return answer


def _all(connection: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            said += piece
    return said
