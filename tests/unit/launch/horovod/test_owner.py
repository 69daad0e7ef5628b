"""Whose a connection is that its process has closed already."""

from __future__ import annotations

import socket

import pytest

from elastic_driver.launch.agent.horovod import owner
from elastic_driver.launch.agent.horovod.owner import owner_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("way", [owner_of, owner._by_diag, owner._by_table])
def test_what_its_process_has_closed_is_not_roots(way: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as mine:
            far = mine.getsockname()
            mine.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        # What it has sent is still read; the kernel knows no owner any more, and says 0.
        near, _ = listener.accept()
        with near:
            assert near.recv(1000).startswith(b"PUT")
            assert near.recv(1) == b""
            assert way(near.getsockname(), far) is None  # type: ignore[operator]
