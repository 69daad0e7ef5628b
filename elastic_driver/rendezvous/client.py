"""What a worker says to the driver: a synchronous HTTP client for the paths of docs/design.md, "Wire".

Owns one connection for each thread that uses it, retries over broken ones (every request of the protocol may be
repeated), and the translation of answers into values and errors. Imports nothing heavy.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from elastic_driver.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
    StaleRoundError,
)
from elastic_driver.rendezvous.messages import (
    API,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
    WatchRequest,
    parse_next_round_reply,
    unpack_entries,
)

# A driver that is stopped or swapped out for less than this costs its workers nothing.
PATIENCE_S = 60.0
# Parked requests are answered after 30 s at the latest; a connection that is silent for longer is dead.
_POLL_S = 30.0
_SILENCE_S = 45.0


class _Channel(threading.local):
    """A thread's own connection. The pid tells a forked child that it is not the child's."""

    connection: http.client.HTTPConnection | None = None
    pid = 0


class RendezvousClient:
    """Talks to the driver. May be used from several threads; each has a connection of its own.

    Args:
        url: ``http://host:port`` of the driver.
        token: the job's token.
        patience_s: how long a driver that does not answer (refused, reset, silent) is tried again.
    """

    def __init__(self, url: str, token: str, *, patience_s: float = PATIENCE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise RendezvousProtocolError(f"cannot read {url!r} as the driver's address: expected http://host:port")
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._patience_s = patience_s
        self._channel = _Channel()
        self._lock = threading.Lock()  # guards _open and _closed
        self._open: list[http.client.HTTPConnection] = []
        self._closed = threading.Event()

    # --- requests of the job's life --------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest, *, timeout_s: float | None = None) -> NextRoundReply:
        """Says READY and blocks until the driver has decided.

        Raises:
            RendezvousTimeoutError: not within ``timeout_s`` (None: the driver's own deadlines bound the wait).
            RendezvousError: the driver cannot be reached.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise RendezvousTimeoutError(f"no round was formed for worker {request.worker} within {timeout_s:g} s")
            query = {"wait_s": f"{min(left, _POLL_S):.3f}"}
            status, body = self._request("POST", f"{API}/next-round", request.to_json(), query=query)
            if status != 204:
                return parse_next_round_reply(body)

    def watch(self, request: WatchRequest) -> Notice | None:
        """One long poll for a notice newer than the request's; None when there was none in the poll time.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: the driver knows this worker no more, or :meth:`close` was called.
        """
        status, body = self._request("POST", f"{API}/watch", request.to_json())
        return None if status == 204 else Notice.from_json(body)

    def running(self, report: RunningReport) -> None:
        """Tells the driver that this worker trains in the round."""
        self._request("POST", f"{API}/running", report.to_json())

    def status(self) -> dict[str, Any]:
        """The job, as the driver sees it."""
        _, body = self._request("GET", f"{API}/status")
        data: dict[str, Any] = json.loads(body)
        return data

    # --- key-value -------------------------------------------------------------------------------------------------

    def exchange(
        self, round_id: int, scope: str, key: int, count: int, value: bytes, *, timeout_s: float
    ) -> list[bytes]:
        """Puts this worker's value and blocks until the scope has ``count``; one request.

        Returns:
            The values of keys 0 to count - 1, in order.

        Raises:
            RendezvousTimeoutError: some are still missing after ``timeout_s``.
            StaleRoundError: the round has passed.
        """
        path = f"{API}/rounds/{round_id}/exchange/{quote(scope, safe='')}"
        query = {"key": str(key), "count": str(count), "wait_s": f"{timeout_s:.3f}"}
        status, body = self._request("POST", path, value, query=query, silence_s=timeout_s + 15)
        if status == 408:
            raise RendezvousTimeoutError(
                f"not all workers of round {round_id} came within {timeout_s:g} s: {_text(body)}"
            )
        entries = unpack_entries(body)
        if [name for name, _ in entries] != [str(rank) for rank in range(count)]:
            raise RendezvousProtocolError(f"scope {scope!r} of round {round_id} has other keys than 0 to {count - 1}")
        return [value for _, value in entries]

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Sets a key. Raises StaleRoundError when the round has passed."""
        self._request("PUT", _key_path(round_id, scope, key), value)

    def get(self, round_id: int, scope: str, key: str, *, wait_s: float = 0.0) -> bytes | None:
        """The value of a key; None when it is not there within ``wait_s``. Raises StaleRoundError."""
        status, body = self._request(
            "GET", _key_path(round_id, scope, key), query={"wait_s": f"{wait_s:.3f}"}, silence_s=wait_s + 15
        )
        return None if status == 404 else body

    def entries(self, round_id: int, scope: str, *, count: int, wait_s: float = 0.0) -> list[tuple[str, bytes]] | None:
        """All entries of a scope when it has at least ``count``; None when it has not within ``wait_s``."""
        path = f"{API}/rounds/{round_id}/kv/{quote(scope, safe='')}"
        query = {"count": str(count), "wait_s": f"{wait_s:.3f}"}
        status, body = self._request("GET", path, query=query, silence_s=wait_s + 15)
        return None if status == 404 else unpack_entries(body)

    def delete(self, round_id: int, scope: str, key: str) -> None:
        """Removes a key; one that is not there changes nothing."""
        self._request("DELETE", _key_path(round_id, scope, key))

    def close(self) -> None:
        """Ends every call, also those blocked in other threads, with RendezvousClosedError. Idempotent."""
        self._closed.set()
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the peer was quicker

    # --- one request -----------------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: dict[str, str] | None = None,
        silence_s: float = _SILENCE_S,
    ) -> tuple[int, bytes]:
        target = f"{path}?{urlencode(query)}" if query else path
        give_up = time.monotonic() + self._patience_s
        pause_s = 0.02
        while True:
            if self._closed.is_set():
                raise RendezvousClosedError("this client is closed")
            try:
                return self._once(method, target, body, silence_s)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if self._closed.is_set():
                    raise RendezvousClosedError("this client is closed") from None
                if time.monotonic() + pause_s > give_up:
                    raise RendezvousError(
                        f"cannot reach the driver at {self._host} port {self._port} for {self._patience_s:g} s: {error}"
                    ) from error
            self._closed.wait(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    def _once(self, method: str, target: str, body: bytes | None, silence_s: float) -> tuple[int, bytes]:
        connection = self._connection()
        if connection.sock is None:
            connection.timeout = 10.0  # to connect
            connection.connect()
        sock: socket.socket | None = connection.sock
        if sock is None:
            raise http.client.NotConnected
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(silence_s)
        connection.request(method, target, body=body, headers=self._headers)
        response = connection.getresponse()
        data = response.read()
        if response.will_close:
            self._drop()
        return _checked(response.status, data)

    def _connection(self) -> http.client.HTTPConnection:
        channel = self._channel
        if channel.connection is None or channel.pid != os.getpid():
            # A forked child leaves the parent's socket alone: it neither writes to it nor shuts it down.
            channel.connection = http.client.HTTPConnection(self._host, self._port)
            channel.pid = os.getpid()
            with self._lock:
                self._open.append(channel.connection)
        return channel.connection

    def _drop(self) -> None:
        connection, self._channel.connection = self._channel.connection, None
        if connection is not None:
            with self._lock:
                if connection in self._open:
                    self._open.remove(connection)
            connection.close()


def _key_path(round_id: int, scope: str, key: str) -> str:
    return f"{API}/rounds/{round_id}/kv/{quote(scope, safe='')}/{quote(key, safe='')}"


def _text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _checked(status: int, body: bytes) -> tuple[int, bytes]:
    """The answer, if it is one that its caller reads; else the error it stands for."""
    if status in (200, 204, 404, 408):
        return status, body
    if status == 409:
        data = json.loads(body)
        raise StaleRoundError(int(data["round_id"]), int(data["current_round_id"]))
    if status == 410:
        raise RendezvousClosedError(_text(body))
    raise RendezvousProtocolError(f"the driver refused the request ({status}): {_text(body)}")
