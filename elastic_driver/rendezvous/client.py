"""A synchronous HTTP client for workers, agents and tools, for the paths of docs/design.md, "Wire".

Owns the connections (one for each call in flight), retries over broken ones (every request of the protocol may be
repeated), and the translation of answers into values and errors. A peer that cannot prove to be the driver when a
connection is made (:mod:`~elastic_driver.rendezvous.connecting`) is sent no request; the client retries. Imports
nothing heavy.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from elastic_driver.errors import (
    OtherCertificateError,
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
    StaleRoundError,
    UnverifiedDriverError,
    WrongTokenError,
    in_words,
)
from elastic_driver.rendezvous.authentication import MOST_REFUSAL_BYTES, is_refusal, read_refusal
from elastic_driver.rendezvous.connecting import connect, shut_down
from elastic_driver.rendezvous.credentials import Credential, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.environment import PATIENCE_S
from elastic_driver.rendezvous.messages import (
    API,
    PIECE_BYTES,
    CallReply,
    CheckupReply,
    DrainHostRequest,
    DrainReply,
    EndReply,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    PageReply,
    PageRequest,
    PublishReply,
    PublishRequest,
    RunningReport,
    Servers,
    ServersRequest,
    ServingReport,
    TokenReply,
    WatchRequest,
    parse_json,
    parse_next_round_reply,
)

# The server answers parked rounds and watches after 30 s at the latest (its ServerLimits.poll_s) ...
_POLL_S = 30.0
# ... and everything else within its wait. A connection that stays silent for this much longer is dead, or the driver is
# frozen. The limit then grows with each retry: otherwise the retries of one night would fill the driver's backlog.
_SLACK_S = 15.0
_MOST_SLACK_S = 300.0
# A goodbye is a courtesy: a frozen driver must not delay a process that is exiting.
_GOODBYE_S = 1.0
# A piece of a few MB may have to cross a slow network.
_PIECE_S = 120.0
# The driver asks all agents for the stacks of their workers, and some may not answer.
_STACKS_S = 30.0
# Pause before a piece is sent again that the driver had no room for.
_FULL_PAUSE_S = 0.2
# This process was frozen while sending, or the driver has no room for it. Both are transient.
_TRY_AGAIN = (408, 503)
# Pause between two tries: the first, and the longest.
_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 1.0


class _Connection(http.client.HTTPConnection):
    """An HTTP connection to the driver.

    :meth:`RendezvousClient.close` can shut its socket down even while it is still connecting.

    Args:
        url: the driver's address.
        credential: this end's identity and key.
        closed: set when the client is closed.
    """

    auto_open = 0  # reach() alone connects
    sock: socket.socket | None

    def __init__(self, url: DriverUrl, credential: Credential, closed: threading.Event) -> None:
        super().__init__(*(("localhost", 80) if url.socket else url.address))
        self._url = url
        self._credential = credential
        self._closed = closed

    def reach(self, timeout_s: float) -> None:
        """Connect and authenticate (:func:`~elastic_driver.rendezvous.connecting.connect`)."""

        def hold(connection: socket.socket) -> None:
            self.sock = connection
            # From here on close() finds the socket; if close() was called before, this check sees it.
            if self._closed.is_set():
                raise http.client.NotConnected

        self.sock = connect(self._url, self._credential, timeout_s=timeout_s, on_socket=hold)

    def ask(
        self, method: str, target: str, body: bytes | None, silence_s: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send one request and return its response.

        Args:
            method: the HTTP method.
            target: path and query.
            body: the request's body.
            silence_s: how long the connection may stay silent.

        Raises:
            OSError: the connection broke or timed out.
            http.client.HTTPException: likewise.
            RendezvousProtocolError: the server rejects this identity.
        """
        assert self.sock is not None
        self.sock.settimeout(silence_s)
        # On a Unix socket a refusal may arrive before or while the request is sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.request(method, target, body=body)
        if self._url.socket is not None and (refusal := _read_refusal(self.sock)):
            raise RendezvousProtocolError(f"the driver rejected {self._credential.identity}: {refusal}")
        response = self.getresponse()
        if response.length is None:  # our server always sends a length; http.client accepts truncated headers
            raise http.client.HTTPException("the answer was cut off")
        return response, response.read()


class Owner(Protocol):
    """The server's process, whose state the client can query even while the server does not answer."""

    def is_waited_for(self, since: float) -> bool:
        """Return whether to keep retrying, with no time limit. Called after a failed try, once the patience is used up.

        Args:
            since: when the request was first made, ``time.monotonic()``.
        """

    def has_answered(self) -> None:
        """Note that the process answers again. Called only after :meth:`is_waited_for` returned True."""


class RendezvousClient:
    """A client of the driver. Thread-safe, and usable in the child after a fork.

    Each call uses an idle connection, or opens one. Proxies are ignored.

    Args:
        url: address of the driver (:class:`~elastic_driver.rendezvous.driver_url.DriverUrl`), or of this machine's
            agent.
        credential: the caller's identity and the key that proves it; a Unix socket needs no key.
        patience_s: how long to retry a driver that does not answer (refused, reset, silent).
        stranger_s: how long to retry while another server answers in the driver's place and the driver has never
            answered; None for ``patience_s``.
        owner: decides whether to keep retrying beyond that.

    Raises:
        RendezvousProtocolError: the URL is malformed, or needs a key.
    """

    def __init__(
        self,
        url: str,
        credential: Credential,
        *,
        patience_s: float = PATIENCE_S,
        stranger_s: float | None = None,
        owner: Owner | None = None,
    ) -> None:
        self._url = DriverUrl.parse(url)
        if self._url.socket is None and not credential.key:
            raise RendezvousProtocolError(
                f"cannot contact the driver at {url} as {credential.identity}: no key was given"
            )
        self._credential = credential
        self._patience_s = patience_s
        self._stranger_s = patience_s if stranger_s is None else stranger_s
        self._was_answered = False
        self._owner = owner
        self._is_closed = False
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._begin_process()

    def _begin_process(self) -> None:
        """Reset connections and locks, also in a forked child, where closing them leaves the parent's open."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _idle and _busy
        self._idle = []
        self._busy = set()
        self._closed = threading.Event()
        if self._is_closed:
            self._closed.set()

    # --- requests of the job's life ----------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest, *, poll_s: float = _POLL_S) -> NextRoundReply:
        """Report READY and block until the driver has decided; the driver's own deadlines bound the wait.

        Args:
            request: the report.
            poll_s: longest time between two reports: the driver counts each one as a heartbeat.

        Raises:
            RendezvousClosedError: the driver has ended, or :meth:`close` was called.
            RendezvousError: the driver cannot be reached.
        """
        body, wait_s = request.to_json(), min(poll_s, _POLL_S)
        while True:
            status, answer = self._request("POST", "next-round", body, wait_s=wait_s, expected=(200, 204))
            if status == 200:
                return parse_next_round_reply(answer)

    def watch(self, request: WatchRequest, *, wait_s: float = _POLL_S) -> Notice | None:
        """Long-poll once for a notice newer than the request's; return None if there was none in that time.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: the driver has ended or no longer knows this worker, or :meth:`close` was called.
            RendezvousError: the driver cannot be reached.
        """
        status, body = self._request(
            "POST", "watch", request.to_json(), wait_s=min(wait_s, _POLL_S), expected=(200, 204)
        )
        return None if status == 204 else Notice.from_json(body)

    def say_goodbye(self, request: WatchRequest) -> None:
        """Send a last request, with a single try of at most one second.

        Raises:
            RendezvousError: the driver may or may not have received it.
        """
        self._request("POST", "watch", request.to_json(), wait_s=0.0, expected=(200, 204), hurry=True)

    def running(self, report: RunningReport) -> None:
        """Report that this worker trains in the round."""
        self._request("POST", "running", report.to_json(), expected=(204,))

    def serving(self, report: ServingReport) -> None:
        """Report that this worker's server accepts requests.

        Raises:
            RendezvousClosedError: the worker has to end.
            RendezvousError: the driver cannot be reached.
        """
        self._request("POST", "serving", report.to_json(), expected=(204,))

    def servers(self, request: ServersRequest, *, wait_s: float = _POLL_S) -> Servers | None:
        """Long-poll once, as the chief, for servers newer than the request's version; return None if there were none.

        Raises:
            RendezvousClosedError: the driver has ended, another chief was started, or :meth:`close` was called.
            RendezvousError: the driver cannot be reached.
        """
        status, body = self._request(
            "POST", "servers", request.to_json(), wait_s=min(wait_s, _POLL_S), expected=(200, 204)
        )
        return None if status == 204 else Servers.from_json(body)

    def leave(self, request: LeaveRequest) -> None:
        """Report that this worker was asked to leave; the notice to leave arrives as for any planned change.

        Raises:
            RendezvousClosedError: the worker has to end at once.
            RendezvousError: the driver cannot be reached.
        """
        self._request("POST", "leave", request.to_json(), expected=(204,))

    def publish(self, request: PublishRequest) -> PublishReply:
        """Ask whether a commit may be written to disk.

        Raises:
            RendezvousClosedError: the driver has ended.
            RendezvousError: the driver cannot be reached.
        """
        _, body = self._request("POST", "publish", request.to_json(), expected=(200,))
        return PublishReply.from_json(body)

    def drain(self, request: DrainHostRequest) -> DrainReply:
        """Drain a host: its workers leave at their next commit."""
        _, body = self._request("POST", "drain", request.to_json(), expected=(200,))
        return DrainReply.from_json(body)

    def end(self) -> EndReply:
        """End the job, as SIGTERM to its driver does."""
        _, body = self._request("POST", "end", b"", expected=(200,))
        return EndReply.from_json(body)

    def page(self, request: PageRequest) -> PageReply:
        """Return a link to the job's page."""
        _, body = self._request("POST", "page", request.to_json(), expected=(200,))
        return PageReply.from_json(body)

    def token(self, role: Role) -> TokenReply:
        """Return the token and URL to reach the job from elsewhere, as operator, reader or joiner."""
        _, body = self._request("POST", f"token/{role}", b"", expected=(200,))
        return TokenReply.from_json(body)

    def status(self) -> dict[str, Any]:
        """Return the job's state as the driver sees it."""
        _, body = self._request("GET", "status", expected=(200,))
        return parse_json(body)

    def stacks(self) -> dict[str, Any]:
        """Return the stacks of the job's workers, and which ranks each collective waits for. Blocks until the driver
        has collected them.
        """
        _, body = self._request("GET", "stacks", wait_s=_STACKS_S, expected=(200,))
        return parse_json(body)

    # --- the call of a function's job --------------------------------------------------------------------------------

    def call(self) -> bytes:
        """Return the call that this worker has to run, as pickled by the caller. Blocks until all of it has arrived.

        Raises:
            RendezvousError: the driver cannot be reached, or has no call.
        """
        _, body = self._request("GET", "call", wait_s=_PIECE_S, expected=(200,))
        total = CallReply.from_json(body).pieces
        return b"".join(
            self._request("GET", f"call/{number}", wait_s=_PIECE_S, expected=(200,))[1] for number in range(total)
        )

    def ask_checkup(self) -> CheckupReply:
        """Return what a worker of ``elasticrun doctor`` needs to know.

        Raises:
            RendezvousError: the driver cannot be reached, or runs another job.
        """
        _, body = self._request("GET", "checkup", wait_s=_PIECE_S, expected=(200,))
        return CheckupReply.from_json(body)

    def post_facts(self, facts: bytes) -> None:
        """Report the facts about this worker's machine, replacing earlier ones. Raises RendezvousError."""
        self._request("POST", "facts", facts, wait_s=_PIECE_S, expected=(204,))

    def post_outcome(self, outcome: bytes) -> None:
        """Send the outcome of the call. Blocks until the driver has received all of it.

        Raises:
            RendezvousError: the driver cannot be reached.
        """
        total = max(1, -(-len(outcome) // PIECE_BYTES))
        view = memoryview(outcome)
        for number in range(total):
            piece = bytes(view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
            while True:
                status, _ = self._request(
                    "POST", f"outcome/{number}/{total}", piece, wait_s=_PIECE_S, expected=(204, 429)
                )
                if status == 204:
                    break
                self._closed.wait(_FULL_PAUSE_S)  # the driver's disk does not keep up

    # --- key-value ---------------------------------------------------------------------------------------------------

    def exchange(
        self, round_id: int, scope: str, key: int, count: int, value: bytes, *, timeout_s: float
    ) -> list[bytes]:
        """Put this worker's value and block until the scope has ``count``, in one request.

        Returns:
            The values of keys 0 to count - 1, in order.

        Raises:
            RendezvousTimeoutError: some are still missing after ``timeout_s``; the message says how many.
            StaleRoundError: the round has passed.
        """
        path = f"rounds/{round_id}/exchange/{quote(scope, safe='')}"
        query = {"key": str(key), "count": str(count)}
        status, body = self._request("POST", path, value, query=query, wait_s=timeout_s, expected=(200, 408))
        if status == 408:
            raise RendezvousTimeoutError(
                f"not all workers of round {round_id} arrived within {timeout_s:g} s: {_text(body)}"
            )
        entries = unpack_entries(body)
        if [name for name, _ in entries] != [str(rank) for rank in range(count)]:
            raise RendezvousProtocolError(f"scope {scope!r} of round {round_id} has keys other than 0 to {count - 1}")
        return [value for _, value in entries]

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Set a key. Raises StaleRoundError when the round has passed."""
        self._request("PUT", _key_path(round_id, scope, key), value, expected=(204,))

    def get(self, round_id: int, scope: str, key: str, *, wait_s: float = 0.0) -> bytes | None:
        """Return the value of a key, or None if it was not set within ``wait_s``. Raises StaleRoundError."""
        status, body = self._request("GET", _key_path(round_id, scope, key), wait_s=wait_s, expected=(200, 404))
        return None if status == 404 else body

    # --- torch Stores ------------------------------------------------------------------------------------------------

    def ask_store(self, request: bytes, *, wait_s: float = 0.0) -> bytes | None:
        """Send one request of a torch Store (:mod:`~elastic_driver.rendezvous.store_messages`).

        Args:
            request: the encoded request. It may arrive more than once.
            wait_s: how long the server may block it.

        Returns:
            The encoded answer; None if the wait timed out.

        Raises:
            RendezvousClosedError: the store's contents are gone, or :meth:`close` was called.
            RendezvousProtocolError: the request cannot be served.
            RendezvousError: the server cannot be reached.
        """
        status, body = self._request("POST", "store", request, wait_s=wait_s, expected=(200, 204))
        return None if status == 204 else body

    # --- torchrun's agents -------------------------------------------------------------------------------------------

    def say_node(self, request: bytes, *, wait_s: float = 0.0) -> bytes | None:
        """Send a request of torchrun's agent (:mod:`~elastic_driver.rendezvous.node_messages`); None if nothing is new.

        Raises:
            RendezvousError: the service cannot be reached, or rejects the request.
        """
        status, body = self._request("POST", "nodes", request, wait_s=wait_s, expected=(200, 204))
        return None if status == 204 else body

    def jobs(self) -> dict[str, Any]:
        """Return the jobs of ``elasticrun rendezvous``, as the service sees them."""
        _, body = self._request("GET", "jobs", expected=(200,))
        return parse_json(body)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End every call with RendezvousClosedError, including calls blocked in other threads. Idempotent."""
        if os.getpid() != self._pid:
            self._begin_process()
        self._is_closed = True
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            busy = tuple(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            _shut_down(connection)  # its thread closes it

    # --- one request -------------------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: dict[str, str] | None = None,
        wait_s: float | None = None,
        expected: tuple[int, ...],
        hurry: bool = False,
    ) -> tuple[int, bytes]:
        """Send a request, and retry until there is an answer.

        Args:
            method: the HTTP method.
            path: the path after the API version.
            body: the request's body.
            query: the request's parameters; ``wait_s`` is added.
            wait_s: how long the server may block the request; a retry has the rest of that time. None: it does not
                block.
            expected: the statuses that the caller handles.
            hurry: whether to try only once, and briefly.

        Raises:
            RendezvousError: of the class that the answer stands for; or there was no answer for ``patience_s``, and the
                owner does not ask to keep retrying.
        """
        if os.getpid() != self._pid:
            self._begin_process()
        deadline = time.monotonic() + (wait_s or 0.0)
        began = time.monotonic()
        failing_since: float | None = None
        strange_since: float | None = None
        owner = None if hurry else self._owner
        patience_s, slack_s = (0.0, _GOODBYE_S) if hurry else (self._patience_s, min(_SLACK_S, self._patience_s))
        pause_s = _FIRST_PAUSE_S
        has_waited = False
        while not self._closed.is_set():
            left_s = max(0.0, deadline - time.monotonic())
            parameters = (query or {}) | ({} if wait_s is None else {"wait_s": f"{left_s:.3f}"})
            target = f"{API}/{path}?{urlencode(parameters)}" if parameters else f"{API}/{path}"
            try:
                status, answer = self._once(method, target, body, left_s + slack_s)
            except WrongTokenError as error:
                raise WrongTokenError(f"cannot contact the driver at {self._shown}: {error}") from error
            except (OSError, http.client.HTTPException, UnverifiedDriverError, RendezvousProtocolError) as error:
                now = time.monotonic()
                failing_since = failing_since or now
                if isinstance(error, TimeoutError):
                    # The server was frozen and so has not waited: the full remaining wait applies again.
                    deadline = now + pause_s + left_s
                strange_since = (strange_since or now) if isinstance(error, UnverifiedDriverError) else None
                is_strange = strange_since is not None and now + pause_s > strange_since + self._stranger_s
                is_shut_out = self._is_shut_out(error)
                if (is_shut_out or is_strange) and not self._was_answered:
                    raise self._unreachable(error) from error
                if now + pause_s > failing_since + patience_s and not self._closed.is_set():
                    if owner is None or is_shut_out or not owner.is_waited_for(began):
                        raise self._unreachable(error, f" for {patience_s:g} s") from error
                    has_waited = True
                    slack_s = min(2 * slack_s, _MOST_SLACK_S)
            else:
                if has_waited and owner is not None:
                    owner.has_answered()
                if status in expected:
                    return status, answer
                raise _error(status, answer)
            self._closed.wait(pause_s)
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)
        raise RendezvousClosedError("cannot contact the driver: this client is closed")

    def _is_shut_out(self, error: Exception) -> bool:
        """Return whether retrying is useless although the owner is alive: its socket belongs to another user or is not
        visible here, or its address has always answered with another certificate.
        """
        if self._url.socket is None:
            return isinstance(error, OtherCertificateError)
        return isinstance(error, PermissionError | FileNotFoundError)

    def _unreachable(self, error: Exception, for_how_long: str = "") -> RendezvousError:
        if isinstance(error, UnverifiedDriverError):
            return type(error)(f"cannot contact the driver at {self._shown}: {error}")
        return RendezvousError(f"cannot reach the driver at {self._shown}{for_how_long}: {in_words(error)}")

    @property
    def _shown(self) -> str:
        if self._url.socket is not None:
            return f"its local socket {self._url.socket}"
        host, port = self._url.address
        return f"{host} port {port}"

    def _once(self, method: str, target: str, body: bytes | None, silence_s: float) -> tuple[int, bytes]:
        """Try a request once.

        Raises:
            OSError: the connection broke, or could not be made.
            http.client.HTTPException: likewise; or the server has no room or no time.
            UnverifiedDriverError: the server at this address is not the driver.
            WrongTokenError: it is the driver, but has another key.
            RendezvousProtocolError: the server rejects this identity.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else _Connection(self._url, self._credential, self._closed)
            self._busy.add(connection)
        keep = False
        try:
            if connection.sock is None:
                connection.reach(min(silence_s, _SLACK_S))
            response, answer = connection.ask(method, target, body, silence_s)
            keep = not response.will_close
            if response.will_close and response.status in _TRY_AGAIN:
                raise http.client.HTTPException(_text(answer))
            self._was_answered = True
            return response.status, answer
        finally:
            with self._lock:
                self._busy.discard(connection)
                keep = keep and not self._closed.is_set()
                if keep:
                    self._idle.append(connection)
            if not keep:
                # close() alone is not enough: a forked child may hold the socket open.
                _shut_down(connection)
                connection.close()


def _shut_down(connection: _Connection) -> None:
    if connection.sock is not None:
        shut_down(connection.sock)


def _read_refusal(sock: socket.socket) -> str:
    """Return the text of a refusal if one arrives; else "", with nothing read. Blocks until something arrives.

    http.client would read to the end of a line and lose what it has read if a reset follows: the kernel sends one when
    a server closes a connection before it has read the request.
    """
    if not is_refusal(sock.recv(1, socket.MSG_PEEK)):
        return ""
    answer = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while (missing := MOST_REFUSAL_BYTES - len(answer)) and (piece := sock.recv(missing)):
            answer += piece
    return read_refusal(answer)


def _key_path(round_id: int, scope: str, key: str) -> str:
    return f"rounds/{round_id}/kv/{quote(scope, safe='')}/{quote(key, safe='')}"


def _text(body: bytes) -> str:
    try:
        return str(parse_json(body)["error"])
    except (RendezvousProtocolError, KeyError):
        return body[:200].decode(errors="replace")


def _error(status: int, body: bytes) -> RendezvousError:
    """Return the exception that an answer stands for."""
    if status == 409:
        try:
            data = parse_json(body)
            return StaleRoundError(int(data["round_id"]), int(data["current_round_id"]))
        except (RendezvousProtocolError, ValueError, KeyError, TypeError):
            return RendezvousProtocolError(f"cannot read the driver's answer 409: {_text(body)}")
    if status == 410:
        return RendezvousClosedError(_text(body))
    return RendezvousProtocolError(f"the driver rejected the request ({status}): {_text(body)}")
