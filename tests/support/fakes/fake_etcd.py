"""An etcd in this process: keys, leases and users behind a JSON gateway, which also does what no etcd should.

What it answers to requests that are carried out is what the real one answers (version 3.4); tests/etcd runs the same
cases against that. Its leases end when a test says so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, encode
from elastic_driver.etcd.place import EtcdPlace

Body = dict[str, Any]


@dataclass
class _Key:
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True)
class Instead:
    """What a request gets in the place of its answer.

    Attributes:
        raw: the bytes; none: the connection is closed.
        carried_out: whether it is carried out all the same.
        until: how long it gets nothing.
    """

    raw: bytes = b""
    carried_out: bool = False
    until: threading.Event | None = None


class Refusal(Exception):
    """The answer of a request that is refused."""

    def __init__(self, status: int, code: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = {"error": text, "message": text, "code": code}


class FakeEtcd:
    """See above.

    Attributes:
        instead: what the next requests get; None for their answer.
        users: with their passwords; nobody is asked who he is where there are none.
        asked: the paths of all requests, in their order.
        answered: the paths of those that are over.
        refusal: of each request that would write; None for none.
        is_away: whether no request gets an answer.
        before_next_page: called once, when a range as of some revision is asked for that is not its first page.
        compacts: whether nothing is known then but what there is.
        least_lease_s: no lease is shorter.
        cluster: which it is.
    """

    def __init__(self) -> None:
        self.instead: deque[Instead | None] = deque()
        self.users: dict[str, str] = {}
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.refusal: Refusal | None = None
        self.is_away = False
        self.before_next_page: Callable[[], object] | None = None
        self.compacts = False
        self.least_lease_s = 0
        self.cluster = "14841639068965178418"
        self._past: dict[int, dict[str, _Key]] = {}
        self._keys: dict[str, _Key] = {}
        self._leases: dict[int, int] = {}
        self._tokens: set[str] = set()
        self._revision = 1
        self._next_lease = 7587
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are written apart

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake._answer(self, json.loads(body))

            def log_message(self, *unused: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="etcd")
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Listens no more."""
        self.is_away = True  # who is connected already
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def place(self, prefix: str = "/jobs/a", **who: str) -> EtcdPlace:
        """Where a job may be."""
        return EtcdPlace((self.endpoint,), prefix, **who)

    def held(self) -> dict[str, bytes]:
        """All there is."""
        with self._lock:
            return {name: key.value for name, key in sorted(self._keys.items())}

    def put(self, name: str, value: bytes) -> None:
        """Somebody else writes."""
        with self._lock:
            self._revision += 1
            self._put(name, value, 0)

    def says(self, driver: RegisteredDriver | None) -> None:
        """Who drives the job, from now on: the driver says so itself; None for nobody."""
        key = driver_key(self.place())
        if driver is None:
            self.remove(key)
        else:
            self.put(key, encode(driver))

    def remove(self, name: str) -> None:
        """Somebody else deletes it."""
        with self._lock:
            self._revision += 1
            self._keys.pop(name, None)

    def expire(self) -> None:
        """The time of all leases is over."""
        with self._lock:
            self._revision += 1
            for lease in list(self._leases):
                self._end(lease)

    def forget_tokens(self) -> None:
        """The time of all tokens is over."""
        self._tokens.clear()

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, handler: BaseHTTPRequestHandler, body: Body) -> None:
        self.asked.append(handler.path)
        instead = self.instead.popleft() if self.instead else None
        if instead is not None and instead.until is not None:
            instead.until.wait()
        if self.is_away and instead is None:
            instead = Instead()
        if self.before_next_page is not None and body.get("revision") and base64.b64decode(body["key"])[-1:] == b"\0":
            page, self.before_next_page = self.before_next_page, None
            page()
        status, answer = 200, Body()
        if instead is None or instead.carried_out:
            try:
                with self._lock:
                    answer = self._carry_out(handler.path, body, handler.headers.get("Authorization", ""))
            except Refusal as refusal:
                status, answer = refusal.status, refusal.body
        self.answered.append(handler.path)
        if instead is not None:
            handler.close_connection = True
            with contextlib.suppress(OSError):
                handler.wfile.write(instead.raw)
            return
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _carry_out(self, path: str, body: Body, token: str) -> Body:
        if path == "/v3/auth/authenticate":
            return self._authenticate(body)
        if self.users and path != "/v3/lease/keepalive":
            if not token:
                raise Refusal(400, 3, "etcdserver: user name is empty")
            if token not in self._tokens:
                raise Refusal(401, 16, "etcdserver: invalid auth token")
        match path:
            case "/v3/kv/range" if "revision" in body:
                return self._range_then(body)
            case "/v3/kv/range":
                return {**self._header(), **self._range(body)}
            case "/v3/kv/txn":
                return self._txn(body)
            case "/v3/lease/grant":
                lease, self._next_lease = self._next_lease, self._next_lease + 1
                self._leases[lease] = max(int(body["TTL"]), self.least_lease_s)
                return {**self._header(), "ID": str(lease), "TTL": str(self._leases[lease])}
            case "/v3/lease/keepalive":
                ttl = self._leases.get(int(body["ID"]))
                return {"result": {**self._header(), "ID": body["ID"], **({"TTL": str(ttl)} if ttl else {})}}
            case "/v3/lease/revoke":
                if int(body["ID"]) not in self._leases:
                    raise Refusal(404, 5, "etcdserver: requested lease not found")
                self._revision += 1
                self._end(int(body["ID"]))
                return self._header()
            case _:
                raise Refusal(404, 5, "Not Found")

    def _authenticate(self, body: Body) -> Body:
        if not self.users:
            raise Refusal(412, 9, "etcdserver: authentication is not enabled")
        if self.users.get(body["name"]) != body["password"]:
            raise Refusal(400, 3, "etcdserver: authentication failed, invalid user ID or password")
        token = f"token{len(self.asked)}"
        self._tokens.add(token)
        return {**self._header(), "token": token}

    def _header(self) -> Body:
        of = {"cluster_id": self.cluster, "member_id": "2", "raft_term": "2"}
        return {"header": {**of, "revision": str(self._revision)}}

    def _txn(self, body: Body) -> Body:
        holds = all(self._holds(compare) for compare in body.get("compare", []))
        operations = body.get("success" if holds else "failure", [])
        writes = [each for each in operations if "request_range" not in each]
        if writes and self.refusal is not None:
            raise self.refusal
        for each in writes:
            lease = int(each.get("request_put", {}).get("lease", "0"))
            if lease and lease not in self._leases:
                raise Refusal(404, 5, "etcdserver: requested lease not found")
        if writes:
            self._past[self._revision] = {name: replace(key) for name, key in self._keys.items()}
            self._revision += 1
        responses = [self._operate(each) for each in operations]
        answer = {**self._header(), **({"succeeded": True} if holds else {})}
        return {**answer, "responses": responses} if responses else answer

    def _holds(self, compare: Body) -> bool:
        key = self._keys.get(_text(compare["key"]))
        assert compare["result"] == "EQUAL"
        if compare["target"] == "CREATE":
            return int(compare["create_revision"]) == (key.create_revision if key else 0)
        assert compare["target"] == "MOD"
        return int(compare["mod_revision"]) == (key.mod_revision if key else 0)

    def _operate(self, operation: Body) -> Body:
        [(kind, body)] = operation.items()
        if kind == "request_put":
            self._put(_text(body["key"]), base64.b64decode(body["value"]), int(body.get("lease", "0")))
            return {"response_put": self._header()}
        if kind == "request_delete_range":
            names = self._within(body)
            for name in names:
                del self._keys[name]
            return {"response_delete_range": {**self._header(), "deleted": str(len(names))}}
        assert kind == "request_range"
        return {"response_range": {**self._header(), **self._range(body)}}

    def _range_then(self, body: Body) -> Body:
        revision = int(body["revision"])
        if self.compacts and revision != self._revision:
            raise Refusal(400, 11, "etcdserver: mvcc: required revision has been compacted")
        now, self._keys = self._keys, self._past.get(revision, self._keys)
        try:
            return {**self._header(), **self._range(body)}
        finally:
            self._keys = now

    def _range(self, body: Body) -> Body:
        names = self._within(body)
        limit = int(body.get("limit", "0")) or len(names)
        kvs = [self._shown(name, keys_only=body.get("keys_only", False)) for name in names[:limit]]
        answer: Body = {"kvs": kvs, "count": str(len(names))} if kvs else {}
        return {**answer, "more": True} if len(names) > limit else answer

    def _within(self, body: Body) -> list[str]:
        start, end = _text(body["key"]), _text(body.get("range_end", ""))
        return [name for name in sorted(self._keys) if (start <= name < end if end else name == start)]

    def _shown(self, name: str, *, keys_only: bool) -> Body:
        key = self._keys[name]
        shown: Body = {"key": base64.b64encode(name.encode()).decode()}
        shown |= {"create_revision": str(key.create_revision), "mod_revision": str(key.mod_revision), "version": "1"}
        if key.value and not keys_only:
            shown["value"] = base64.b64encode(key.value).decode()
        return {**shown, "lease": str(key.lease)} if key.lease else shown

    def _put(self, name: str, value: bytes, lease: int) -> None:
        before = self._keys.get(name)
        self._keys[name] = _Key(value, before.create_revision if before else self._revision, self._revision, lease)

    def _end(self, lease: int) -> None:
        del self._leases[lease]
        for name in [name for name, key in self._keys.items() if key.lease == lease]:
            del self._keys[name]


@contextlib.contextmanager
def fake_etcd() -> Iterator[FakeEtcd]:
    """One that listens while this lasts."""
    fake = FakeEtcd()
    try:
        yield fake
    finally:
        fake.close()


def nobody() -> str:
    """An endpoint where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def _text(data: str) -> str:
    return base64.b64decode(data).decode()
