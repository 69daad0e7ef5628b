"""A rendezvous server in a thread of its own, answers that tests steer, and a peer that speaks raw bytes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvloop

from elastic_driver.errors import RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof
from elastic_driver.rendezvous.certificate import Certificate, client_context
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    DrainReply,
    EndReply,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    TokenReply,
    WatchRequest,
)
from elastic_driver.rendezvous.routes import ALL, Route, Routes, read, read_own, routes_of_rounds
from elastic_driver.rendezvous.routes import OPERATOR as OPERATORS
from elastic_driver.rendezvous.routes import WORKER as WORKERS
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.rendezvous.server.peer_connection import PeerConnection
from elastic_driver.rendezvous.server.server import RendezvousServer, ServerLimits
from elastic_driver.rendezvous.server.web import Web
from elastic_driver.system.job_clock import CallLater
from elastic_driver.system.local_socket import SocketFolder
from elastic_driver.words import Backend, ReadyCause

KEY = JobKey(b"the job's key of thirty-two byte")
WORKER = WorkerId("a", 0, 0)
IDENTITY = Identity(Role.WORKER, WORKER)
OPERATOR = Identity(Role.OPERATOR)
READER = f"Bearer {KEY.of(Identity(Role.READER)).hex()}"
CERTIFICATE = Certificate.new()
NONCE = "0123456789abcdef" * 2
READY = NextRoundRequest(WORKER, 0, 0, ReadyCause.START, "", (Backend.TORCH,), 1)
ASSIGNMENT = RoundAssignment(1, SlotInfo(0, 1, 0, 1, 0, 1), sync=True, commits=0, backend=Backend.TORCH)
PATIENCE_S = 150.0


class Handler:
    """Parks every next-round and watch request until the test answers it; runs in the server's loop."""

    def __init__(self) -> None:
        self.next_rounds: list[asyncio.Future[NextRoundReply]] = []
        self.watches: list[asyncio.Future[Notice]] = []
        self.reports: list[RunningReport] = []
        self.drained: list[DrainHostRequest] = []
        self.left: list[LeaveRequest] = []
        self.ends = 0
        self.url = ""  # where other machines reach it
        self.join_token = ""
        self.current_round = 1
        self.error: Exception | None = None

    @property
    def routes(self) -> Routes:
        """All that a driver, or an agent, has."""
        return (
            *routes_of_rounds(self),
            Route("POST", "leave", WORKERS, read_own(LeaveRequest.from_json, self.leave)),
            Route("POST", "drain", OPERATORS, read(DrainHostRequest.from_json, self.drain)),
            Route("POST", "end", OPERATORS, lambda _: self.end()),
            Route("POST", "token/*", OPERATORS, lambda request: self.token(request.path[0])),
            Route("GET", "status", ALL, lambda _: self.status()),
        )

    def next_round(self, request: NextRoundRequest) -> asyncio.Future[NextRoundReply]:
        future: asyncio.Future[NextRoundReply] = asyncio.get_running_loop().create_future()
        self.next_rounds.append(future)
        return future

    async def _notice(self, future: asyncio.Future[Notice]) -> Notice:
        return await future

    def watch(self, request: WatchRequest) -> Any:
        if request.round_id < self.current_round:
            raise StaleRoundError(request.round_id, self.current_round)
        future: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()
        self.watches.append(future)
        return self._notice(future)  # a coroutine, where next_round gives a future: both are awaitable

    def running(self, report: RunningReport) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append(report)

    def leave(self, request: LeaveRequest) -> None:
        self.left.append(request)

    def drain(self, request: DrainHostRequest) -> DrainReply:
        self.drained.append(request)
        return DrainReply(done=True, text=f"host {request.hostname} is drained")

    def end(self) -> EndReply:
        self.ends += 1
        return EndReply("it ends")

    def token(self, role: str) -> TokenReply:
        tokens = {each: KEY.of(Identity(each)).hex() for each in (Role.OPERATOR, Role.READER)}
        tokens[Role.JOINER] = self.join_token
        if role not in tokens:
            raise RendezvousProtocolError("there is no such token")
        return TokenReply(tokens[Role(role)], self.url, only_here=False)

    def status(self) -> dict[str, object]:
        return {"explain": "waiting", "round_id": self.current_round}


class Hangup(asyncio.Protocol):
    """Takes the place of what agents would speak to, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class BaseService:
    """A running server. Everything of it is touched in its loop only, through :meth:`call`."""

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        *,
        limits: ServerLimits | None = None,
        call_later: CallLater | None = None,
        routes: Routes = (),
        web: Web | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self.certificate = certificate
        self.web = web
        self.handler = Handler()
        self.errors: list[BaseException] = []
        self.full: list[str] = []
        self.gone: list[WorkerId] = []
        self.noise: list[dict[str, Any]] = []
        self.limits = limits
        self.keys = KeyRoutes(call_later=call_later)
        self.routes = (*self.handler.routes, *self.keys.routes, *routes)
        self._begin()
        self.server: RendezvousServer = self.call(self._make)
        self._listen()
        self.call(lambda: self.keys.begin_round(1))

    def _begin(self) -> None:
        """Makes the loop."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Has the server take connections."""
        raise NotImplementedError

    def _end(self) -> None:
        """Closes the loop."""
        raise NotImplementedError

    def wait(self, coroutine: Any) -> Any:
        """Runs a coroutine in the server's loop."""
        raise NotImplementedError

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Blocks until the condition holds in the server's loop."""
        raise NotImplementedError

    def _make(self) -> RendezvousServer:
        return RendezvousServer(
            self.routes,
            key_of=KEY.of,
            admits=lambda identity: True,
            agents=lambda identity: Hangup(),
            certificate=OwnCertificate(self.certificate or CERTIFICATE),
            limits=self.limits,
            on_error=self.errors.append,
            on_full=self.full.append,
            on_worker_gone=self.gone.append,
            web=self.web,
            reader=READER.encode(),
        )

    @property
    def connections(self) -> set[PeerConnection]:
        """Who is connected."""
        return self.server.connections._all

    @property
    def parked(self) -> int:
        """How many requests are."""
        return len(self.keys.waiting) + len(self.server._pending)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the server's loop."""

        async def inside() -> Any:
            return function()

        return self.wait(inside())

    def until_parked(self, number: int) -> None:
        self.until(lambda: self.parked == number, f"{number} parked requests")

    def stop(self) -> None:
        """Closes the server and its loop; nothing of either may be left."""
        self.wait(self.server.close())
        assert self.call(lambda: (self.parked, len(self.connections))) == (0, 0)
        left = self.call(lambda: [t for t in asyncio.all_tasks() if t is not asyncio.current_task()])
        assert left == []
        self._end()
        assert self.noise == []


class Service(BaseService):
    """A server that listens, in a thread of its own."""

    def __init__(self, *, port: int = 0, loop: str = "uvloop", **options: Any) -> None:
        self.port = port
        self._kind = loop
        self._folder: SocketFolder | None = None
        super().__init__(**options)

    def _begin(self) -> None:
        self.loop = uvloop.new_event_loop() if self._kind == "uvloop" else asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.noise.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="rendezvous")
        self._thread.start()

    def _listen(self) -> None:
        self.port = self.wait(self.server.start("127.0.0.1", self.port))

    @property
    def url(self) -> str:
        """As people hand it on."""
        return f"https://127.0.0.1:{self.port}#sha256:{(self.certificate or CERTIFICATE).fingerprint}"

    @property
    def plain_url(self) -> str:
        """For browsers, readers and probes of this machine."""
        return f"http://127.0.0.1:{self.port}"

    def socket(self) -> Path:
        """Has it listen at a socket of this machine, too."""
        self._folder = SocketFolder.new()
        self.wait(self.server.start_local(self._folder.listen("driver.sock")))
        return self._folder.path / "driver.sock"

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.call(condition):
            assert time.monotonic() < deadline, f"not in time: {what}"
            time.sleep(0.002)

    def client(
        self, identity: Identity = IDENTITY, *, key: JobKey = KEY, patience_s: float = PATIENCE_S
    ) -> RendezvousClient:
        return RendezvousClient(self.url, credential(identity, key), patience_s=patience_s)

    def die(self) -> None:
        """Ends as a process does that is killed: no goodbye to anybody."""

        def cut() -> None:
            self.server.listeners.close()
            for connection in tuple(self.connections):
                connection.abort()

        self.call(cut)
        self.stop()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()
        if self._folder is not None:
            self._folder.close()


@contextmanager
def serving(**options: Any) -> Iterator[Service]:
    """A service that is stopped, and leaves no descriptor behind."""
    service = Service(**options)
    try:
        yield service
    finally:
        service.stop()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class BasePeer:
    """A raw connection to the server: a stranger's until it makes its first request."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.has_met = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def _line(self) -> bytes:
        """The next line of what the server sends; b"" at its end."""
        raise NotImplementedError

    def _bytes(self, count: int) -> bytes:
        """As many bytes; fewer at its end."""
        raise NotImplementedError

    def prove(self, *, key: bytes | None = None, nonce: bytes | None = None) -> Proof:
        """Its part of the exchange, with what it says first if that is not to be right."""
        return Proof(
            str(self._identity), key or KEY.of(self._identity), self._certificate(), nonce or os.urandom(NONCE_BYTES)
        )

    def _certificate(self) -> bytes:
        """SHA-256 of that of the server."""
        return bytes.fromhex(CERTIFICATE.fingerprint)

    def begin(self, proof: Proof) -> bytes:
        """Says who it is. Returns the server's answer, whole; what there is of it where the server has closed."""
        self.send(proof.request)
        answer = b""
        while missing := proof.missing(answer):
            piece = self._bytes(missing)
            answer += piece
            if len(piece) < missing:
                break
        return answer

    def meet(self) -> None:
        """Authenticates."""
        proof = self.prove()
        self.send(proof.response(self.begin(proof)))
        self.has_met = True

    def request(self, method: str, path: str, body: bytes = b"", **options: Any) -> bytes:
        """A request of whom the server knows, as bytes."""
        if not self.has_met:
            self.meet()
        return request(method, path, body, **options)

    def ask(self, method: str, path: str, body: bytes = b"", **options: Any) -> Answer:
        """One request, and its answer."""
        self.send(self.request(method, path, body, **options))
        return self.read()

    def read(self, *, head_only: bool = False) -> Answer:
        """The next answer. Raises EOFError when the server has closed instead."""
        first = self._line()
        if not first:
            raise EOFError
        headers: dict[str, str] = {}
        while (line := self._line()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name] = value.strip()
        status = int(first.split()[1])
        length = 0 if head_only or status in (100, 101) else int(headers["Content-Length"])
        return Answer(status, headers, self._bytes(length))

    def is_closed(self) -> bool:
        """Blocks until the server has closed; False if it sends something instead."""
        try:
            return self._bytes(1) == b""
        except ConnectionResetError:
            return True


class Peer(BasePeer):
    """One over a socket. What is sent before it authenticates is sent in plain text; then it goes over to TLS."""

    def __init__(
        self,
        service: Service,
        identity: Identity = IDENTITY,
        *,
        address: tuple[str, int] | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(identity)
        self.socket = socket.create_connection(address or ("127.0.0.1", service.port), timeout_s)
        self._file = self.socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def encrypt(self) -> None:
        """Shakes hands."""
        self._file.close()
        self.socket = client_context().wrap_socket(self.socket)
        self._file = self.socket.makefile("rb")

    def meet(self) -> None:
        if not isinstance(self.socket, ssl.SSLSocket):
            self.encrypt()
        super().meet()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _line(self) -> bytes:
        return self._file.readline()

    def _bytes(self, count: int) -> bytes:
        return self._file.read(count)


def credential(identity: Identity = IDENTITY, key: JobKey = KEY) -> Credential:
    return Credential(identity, key.of(identity))


def request(
    method: str,
    path: str,
    body: bytes = b"",
    authorization: str | None = None,
    *,
    headers: tuple[str, ...] = (),
    v: str = "1.1",
) -> bytes:
    """A whole request as bytes."""
    lines = [f"{method} {path} HTTP/{v}", "Host: x", *headers]
    if authorization is not None:
        lines.insert(2, f"Authorization: {authorization}".rstrip())
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Calls:
    """Blocking calls in threads, and how they ended."""

    def __init__(self) -> None:
        self._threads: deque[threading.Thread] = deque()
        self.results: list[Any] = []

    def start(self, function: Callable[[], Any]) -> None:
        place = len(self.results)
        self.results.append(None)

        def run() -> None:
            try:
                self.results[place] = function()
            except Exception as error:
                self.results[place] = error

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def join(self) -> list[Any]:
        while self._threads:
            thread = self._threads.popleft()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a call is still blocked"
        return self.results
