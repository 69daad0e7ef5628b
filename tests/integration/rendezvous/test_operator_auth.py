"""Programs that speak to the driver with requests: what they sign, and what they believe."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.messages import DrainHostRequest
from elastic_driver.rendezvous.operator_auth import OperatorAuth, UnprovenError
from tests.support.fakes.rendezvous_service import KEY, OPERATOR, PATIENCE_S, WORKER, Service, serving

pytestmark = pytest.mark.integration

AUTH = OperatorAuth(KEY.of(OPERATOR))
BODY = {"hostname": "node1", "undo": False, "within_s": 25.0}


def drain(url: str, auth: OperatorAuth = AUTH, body: object = None) -> requests.Response:
    return requests.post(f"{url}/v1/drain", json=BODY if body is None else body, auth=auth, timeout=PATIENCE_S)


def test_a_drain_and_what_else_an_operator_may() -> None:
    with serving() as service:
        answer = drain(service.url)
        assert (answer.status_code, answer.json()) == (200, {"done": True, "text": "host node1 is drained"})
        assert service.handler.drained == [DrainHostRequest("node1", undo=False, within_s=25.0)]
        assert [each.status_code for each in answer.history] == [200]
        status = requests.get(f"{service.url}/v1/status", auth=AUTH, timeout=PATIENCE_S)
        assert status.json()["round_id"] == 1
        assert requests.post(f"{service.url}/v1/end", auth=AUTH, timeout=PATIENCE_S).status_code == 200
        assert service.handler.ends == 1


def test_a_session_asks_again_and_again() -> None:
    with serving() as service, requests.Session() as session:
        session.auth = AUTH
        for number in range(5):
            answer = session.post(
                f"{service.url}/v1/drain", json={**BODY, "hostname": f"n{number}"}, timeout=PATIENCE_S
            )
            assert answer.status_code == 200
        assert [each.hostname for each in service.handler.drained] == ["n0", "n1", "n2", "n3", "n4"]


def test_the_drivers_refusals_come_through() -> None:
    with serving() as service:
        assert drain(service.url, body={"hostname": 5}).status_code == 400
        assert requests.get(f"{service.url}/v1/nothing", auth=AUTH, timeout=PATIENCE_S).status_code == 404
        assert requests.post(f"{service.url}/v1/watch", json={}, auth=AUTH, timeout=PATIENCE_S).status_code == 403
        assert service.handler.drained == []


def test_a_wrong_key_does_nothing() -> None:
    with serving() as service:
        for key in (b"x" * 32, KEY.of_worker(WORKER)):
            with pytest.raises(UnprovenError, match="does not prove to be the driver of the job that this operator's"):
                drain(service.url, OperatorAuth(key))
        assert requests.post(f"{service.url}/v1/drain", json=BODY, timeout=PATIENCE_S).status_code == 401
        assert service.handler.drained == []
    for key in (b"", b"x" * 31):
        with pytest.raises(SettingsError):
            OperatorAuth(key)


def test_a_key_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{KEY.of(OPERATOR).hex()}\n")
    assert OperatorAuth.from_file(path) == AUTH
    for text in ("", "no key", "ab" * 31, "\xff\xff"):
        path.write_text(text)
        with pytest.raises(SettingsError, match="does not hold a key of 64 hexadecimal digits"):
            OperatorAuth.from_file(str(path))
    with pytest.raises(SettingsError, match="cannot read"):
        OperatorAuth.from_file(tmp_path / "none")


@contextmanager
def between(service: Service, change: str) -> Iterator[str]:
    """Somebody who passes requests on to the driver, over one connection each way, and changes something."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        upstream: requests.Session | None = None

        def _pass_on(self) -> None:
            self.upstream = self.upstream or requests.Session()
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if change == "request":
                body = body.replace(b"node1", b"node2")
            headers = {"Authorization": self.headers["Authorization"]}
            answer = self.upstream.request(self.command, service.url + self.path, data=body, headers=headers)
            content = answer.content
            if change == "answer":
                content = content.replace(b"drained", b"burning")
            status = 200 if change == "status" and answer.status_code == 403 else answer.status_code
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(content)))
            if "Authentication-Info" in answer.headers and change != "proof":
                self.send_header("Authentication-Info", answer.headers["Authentication-Info"])
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_answers_are_checked() -> None:
    with serving() as service:
        with between(service, "nothing") as url:
            assert drain(url).status_code == 200
        for change in ("answer", "proof"):
            with between(service, change) as url, pytest.raises(UnprovenError, match="/v1/drain is not the driver's"):
                drain(url)
        with between(service, "status") as url, pytest.raises(UnprovenError):
            requests.post(f"{url}/v1/watch", json={}, auth=AUTH, timeout=PATIENCE_S)


def test_a_changed_request_does_nothing() -> None:
    with serving() as service, between(service, "request") as url:
        assert drain(url).status_code == 401
        assert service.handler.drained == []


def test_who_is_no_driver_is_not_believed() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(302)
            self.send_header("Location", "/v1/hello")
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        with pytest.raises(UnprovenError, match="status 302"):
            drain(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_body_that_is_not_there_yet_is_not_signed() -> None:
    with pytest.raises(UnprovenError, match="cannot sign a body"):
        requests.post("http://127.0.0.1:1/v1/drain", data=iter([b"x"]), auth=AUTH, timeout=PATIENCE_S)
