"""The endpoint of the nodes: how it is written, whose it is, and who has its port."""

from __future__ import annotations

import os
import socket

import pytest

from elastic_driver.driver import endpoint
from elastic_driver.driver.endpoint import DEFAULT_PORT, Endpoint
from elastic_driver.errors import SettingsError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0:29500", "node0", 29500),
        (" node0 ", "node0", DEFAULT_PORT),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[fd00::1]:65535", "fd00::1", 65535),
        ("[fd00::1]", "fd00::1", DEFAULT_PORT),
        ("fd00::1", "fd00::1", DEFAULT_PORT),
        ("job-0.job.default.svc:29400", "job-0.job.default.svc", 29400),
    ],
)
def test_an_endpoint_is_read(text: str, host: str, port: int) -> None:
    place = Endpoint.parse(text)
    assert (place.host, place.port) == (host, port)
    assert Endpoint.parse(str(place)) == place
    assert place.url == f"https://{place}"


@pytest.mark.parametrize(
    "text",
    ["", ":29400", "node0:", "node0:0", "node0:65536", "node0:x", "node0:²", "a b:1", "http://a:1", "[a:1", "[a]1"],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_here_only(host: str) -> None:
    place = Endpoint(host, 1)
    assert place.only_here
    assert place.is_ours()


@pytest.mark.parametrize(
    ("host", "addresses", "ours"),
    [
        ("node0.cluster", ["127.0.1.1"], True),  # as Debian writes a machine's own name
        ("other.cluster", ["192.0.2.1"], False),
        ("service", ["127.0.0.1", "192.0.2.1"], False),  # of several machines
        ("other.cluster", [], None),
        ("node0.service", [], True),  # a pod's own name, before the pod is ready
        ("192.0.2.1", [], False),
    ],
)
def test_whose_an_address_is(
    monkeypatch: pytest.MonkeyPatch, host: str, addresses: list[str], ours: bool | None
) -> None:
    from elastic_driver.launch.local import locality

    monkeypatch.setattr(locality, "_known_local", {"localhost"})
    monkeypatch.setattr(locality, "addresses_of", lambda name: addresses)
    monkeypatch.setattr(endpoint, "addresses_of", lambda name: addresses)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    place = Endpoint(host, 1)
    assert not place.only_here
    assert place.is_ours() is ours


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nobody else has ports: on 127.0.0.1 any program may get the same one meanwhile."""
    address = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    monkeypatch.setattr(endpoint, "LOOPBACK", address)
    return address


def test_a_port_is_had_by_one(loopback: str) -> None:
    with socket.create_server((loopback, 0)) as server:
        place = Endpoint(loopback, server.getsockname()[1])
        assert place.claim() is None
        # One that has just ended leaves connections in TIME_WAIT.
        with socket.create_connection(server.getsockname()[:2]) as sock:
            server.accept()[0].close()
            assert sock.recv(1) == b""
    first = place.claim()
    assert first is not None
    with first:
        assert first.getsockname() == (loopback, place.port)
        assert place.claim() is None


@pytest.mark.usefixtures("loopback")
def test_another_program_on_the_endpoints_own_address_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(endpoint, "addresses_of", lambda name: ["127.0.0.2"])
        with pytest.raises(
            SettingsError, match=rf"cannot be the driver: port {port} of 127\.0\.0\.2 is in use by another program"
        ):
            Endpoint("node0", port).claim()
