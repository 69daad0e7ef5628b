"""Programs that speak to the driver with requests: whom they believe, and what comes back."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.messages import DrainHostRequest
from elastic_driver.rendezvous.operator_adapter import OperatorAdapter, UnprovenError
from tests.support.fakes.rendezvous_service import IDENTITY, KEY, OPERATOR, PATIENCE_S, Service, serving
from tests.support.fakes.scripted_driver import authenticate, listening, over_tls

pytestmark = pytest.mark.integration

BODY = {"hostname": "node1", "undo": False, "within_s": 25.0}
TOKEN = KEY.of(OPERATOR)


@contextmanager
def session_for(url: str, key: bytes = TOKEN) -> Iterator[tuple[requests.Session, str]]:
    """A session of requests, and what paths are added to."""
    adapter = OperatorAdapter(url, key, source="the file t")
    with requests.Session() as session:
        session.mount(adapter.url, adapter)
        yield session, adapter.url


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


def test_a_drain_and_what_else_an_operator_may(service: Service) -> None:
    with session_for(service.url) as (session, url):
        answer = session.post(f"{url}/v1/drain", json=BODY, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()) == (200, {"done": True, "text": "host node1 is drained"})
        assert service.handler.drained == [DrainHostRequest("node1", undo=False, within_s=25.0)]
        assert session.get(f"{url}/v1/status", timeout=PATIENCE_S).json()["round_id"] == 1
        assert session.post(f"{url}/v1/end", timeout=PATIENCE_S).status_code == 200
        assert service.handler.ends == 1


def test_connections_are_kept(service: Service) -> None:
    with session_for(service.url) as (session, url):
        for _ in range(5):
            assert session.get(f"{url}/v1/status", timeout=PATIENCE_S).status_code == 200
            assert service.call(lambda: len(service.connections)) == 1


def test_the_drivers_refusals_come_through(service: Service) -> None:
    with session_for(service.url) as (session, url):
        assert session.post(f"{url}/v1/drain", json={"hostname": 5}, timeout=PATIENCE_S).status_code == 400
        assert session.get(f"{url}/v1/nothing", timeout=PATIENCE_S).status_code == 404
        assert session.post(f"{url}/v1/watch", json={}, timeout=PATIENCE_S).status_code == 403
        assert service.handler.drained == []


def test_a_wrong_key_does_nothing(service: Service) -> None:
    for key in (b"x" * 32, KEY.of(IDENTITY)):
        with (
            session_for(service.url, key) as (session, url),
            pytest.raises(
                UnprovenError,
                match=r"^cannot contact the driver at \S+: this job's operator's key is not the one from the file t$",
            ),
        ):
            session.post(f"{url}/v1/drain", json=BODY, timeout=PATIENCE_S)
    with pytest.raises(requests.ConnectionError):
        requests.post(f"{service.url.partition('#')[0]}/v1/drain", json=BODY, timeout=PATIENCE_S)
    assert service.handler.drained == []


def test_another_certificate_is_told_nothing(service: Service) -> None:
    other = f"{service.url.partition('#')[0]}#sha256:{'ab' * 32}"
    with (
        session_for(other) as (session, url),
        pytest.raises(UnprovenError, match="the certificate there does not match"),
    ):
        session.post(f"{url}/v1/drain", json=BODY, timeout=PATIENCE_S)
    assert service.handler.drained == []


def test_who_does_not_answer_is_an_error_of_requests() -> None:
    with session_for("https://127.0.0.1:1") as (session, url), pytest.raises(requests.ConnectionError):
        session.get(f"{url}/v1/status", timeout=PATIENCE_S)


def test_only_this_driver_gets_what_is_sent() -> None:
    """Also where it sends whoever asks to somebody else: the adapter knows no other way."""

    def redirect(encrypted: ssl.SSLSocket) -> None:
        authenticate(encrypted, key=TOKEN)
        encrypted.recv(65536)
        encrypted.sendall(b"HTTP/1.1 302 X\r\nLocation: https://127.0.0.1:1/v1/status\r\nContent-Length: 0\r\n\r\n")

    with (
        listening(over_tls(redirect)) as driver,
        session_for(str(driver)) as (session, url),
        pytest.raises(requests.ConnectionError),
    ):
        session.get(f"{url}/v1/status", timeout=PATIENCE_S)


def test_a_key_and_an_address_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN.hex()}\n")
    adapter = OperatorAdapter.from_file("https://a:1", path)
    assert adapter._pool.conn_kw["credential"] == Credential(OPERATOR, TOKEN, f"the file {path}")
    for text in ("", "no key", "ab" * 31, "\xff\xff"):
        path.write_text(text)
        with pytest.raises(SettingsError, match="does not hold a key of 64 hexadecimal digits"):
            OperatorAdapter.from_file("https://a:1", str(path))
    with pytest.raises(SettingsError, match="cannot read"):
        OperatorAdapter.from_file("https://a:1", tmp_path / "none")
    for key in (b"", b"x" * 31):
        with pytest.raises(SettingsError):
            OperatorAdapter("https://a:1", key)
    with pytest.raises(RendezvousProtocolError, match="expected https://HOST:PORT"):
        OperatorAdapter("a:1", TOKEN)
