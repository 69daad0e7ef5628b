"""A blocking client of etcd: the JSON gateway of versions 3.4 and later, over ``http.client``.

Owns the connections, the choice of the server, and the meaning of its errors. The formats of requests are in
:mod:`elastic_driver.etcd.messages`; the meaning of keys is up to the callers. No answer is trusted until its format has
been checked.

The servers are asked one after the other until one answers, so **a request may be carried out twice**, and also after
its answer was given up. A transaction has to compare what makes that harmless.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from elastic_driver.codec import to_text
from elastic_driver.errors import ElasticError, in_words
from elastic_driver.etcd import messages
from elastic_driver.etcd.messages import Body, Compare, KeyValue, Operation, Outcome, Page
from elastic_driver.etcd.place import EtcdPlace

T = TypeVar("T")

TIMEOUT_S = 3.0
NOT_FOUND = 5
"""The error code for: there is no such lease."""

# Codes of gRPC (google/rpc/code.proto). These are no answer to the request: another server may have it, and whether
# anything was written is not known. Canceled, unknown, deadline exceeded, aborted, internal, unavailable.
_NO_ANSWERS = (1, 2, 4, 10, 13, 14)
_BUSY = "too many requests"
_FULL = "database space exceeded"
_DENIED, _NOT_NOW, _UNAUTHENTICATED = 7, 9, 16
# A token is missing or too old; the codes of these two errors have many other meanings.
_WITHOUT_TOKEN = ("user name is empty", "auth store is old")
# With such a certificate etcd rejects everything that comes over its gateway.
_NAMED = "CommonName of client"
# No request asks for more at once.
_MOST_ANSWER = 64 << 20
_SHOWN = 200


class EtcdError(ElasticError, OSError):
    """etcd has not carried out a request."""


class EtcdUnreachableError(EtcdError):
    """No server of the cluster answers. Whether anything was written is not known."""


class EtcdRefusedError(EtcdError):
    """etcd has rejected the request, and written nothing.

    Attributes:
        code: of gRPC.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _NoAnswerError(Exception):
    """This server has no answer; another one may."""


class _BrokenError(_NoAnswerError):
    """The server has closed the connection."""


class _Connection(http.client.HTTPConnection):
    """A connection to a server.

    Attributes:
        endpoint: of the server.
    """

    auto_open = 0  # only reach() connects
    sock: socket.socket | None

    def __init__(self, endpoint: str, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(endpoint)
        super().__init__(parts.hostname or "", parts.port)
        self.endpoint = endpoint
        self._context = context if parts.scheme == "https" else None

    def reach(self, until: float) -> None:
        """Connect. Raises OSError, or UnicodeError for an impossible name."""
        self.sock = socket.create_connection((self.host, self.port), _left(until))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            self.sock.settimeout(_left(until))
            self.sock = self._context.wrap_socket(self.sock, server_hostname=self.host)

    def exchange(self, path: str, body: bytes, headers: dict[str, str], until: float) -> tuple[int, bytes]:
        """Send one request, and return the status and the body of its answer.

        Raises:
            OSError: the connection broke, or it took too long.
            http.client.HTTPException: likewise, or the peer does not speak HTTP.
        """
        assert self.sock is not None
        self.sock.settimeout(_left(until))
        # http.client has one limit for each piece that arrives; this is one for all of them.
        self.response_class = partial(_Answer, until)  # type: ignore[assignment]
        self.request("POST", path, body=body, headers=headers)
        answer = self.getresponse()
        data = answer.read(_MOST_ANSWER + 1)
        if len(data) > _MOST_ANSWER:
            raise http.client.HTTPException(f"the answer has more than {_MOST_ANSWER} bytes")
        if answer.length:
            raise http.client.HTTPException("the answer was cut off")
        if not answer.isclosed():
            answer.read()
        return answer.status, data


class _Answer(http.client.HTTPResponse):
    """An answer that has to be complete at a given time."""

    def __init__(self, until: float, sock: socket.socket, method: str | None = None) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self.fp = io.BufferedReader(_Pieces(sock, until))


class _Pieces(io.RawIOBase):
    """The bytes that arrive on a socket until a given time; then TimeoutError."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _left(until: float) -> float:
    """Return how long a socket may wait, seconds. Not 0.0, which would mean not to wait at all."""
    return max(until - time.monotonic(), 0.001)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return in_words(error)
    return f"what answers does not speak HTTP ({_shown(str(error) or type(error).__name__)})"


def _shown(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


class EtcdClient:
    """A client of one cluster, for one thread at a time. Methods block for at most ``timeout_s``, plus name lookups.

    All of them raise EtcdUnreachableError and EtcdRefusedError.

    Args:
        place: the servers, and the credentials. Its files are read again for each new connection.
        needs: what the user's role may have to allow, for messages; "" for everything that a driver does there.
        timeout_s: for the answer of any server, seconds; each of the remaining ones has an equal part of the rest.

    Attributes:
        timeout_s: as given; may be changed.
        cluster_id: identifies the cluster that has answered last; "" before one has.

    Raises:
        SettingsError: see :meth:`EtcdPlace.tls`.
    """

    def __init__(self, place: EtcdPlace, *, timeout_s: float = TIMEOUT_S, needs: str = "") -> None:
        self._place = place
        self._needs = needs or f"read and write all keys under {place.prefix}/"
        self.timeout_s = timeout_s
        self.cluster_id = ""
        self._context = place.tls()
        # The one that has answered last is first.
        self._endpoints = list(place.endpoints)
        self._connection: _Connection | None = None
        self._token: str | None = None  # None: to be requested

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The client may be used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, key: str) -> KeyValue | None:
        """Return a key with its value; None if it does not exist."""
        found = self.range(key).found
        return found[0] if found else None

    def range(self, start: str, end: str = "", *, limit: int = 0, keys_only: bool = False, revision: int = 0) -> Page:
        """Return a range of keys.

        Args:
            start: the first one.
            end: the first one after them; "" for ``start`` alone.
            limit: how many at most; 0 for all.
            keys_only: whether to omit their values.
            revision: of which to read the state; 0 for now.
        """
        body = messages.range_request(start, end, limit=limit, keys_only=keys_only, revision=revision)
        return self._ask("/v3/kv/range", body, messages.page)

    def txn(
        self, compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out ``success`` if all comparisons hold, else ``failure``: either completely, or not at all."""
        return self._ask("/v3/kv/txn", messages.txn_request(compares, success, failure), messages.outcome)

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """Create a lease.

        Returns:
            Its number, and how long it is valid, seconds: etcd may grant more than requested.
        """
        return self._ask("/v3/lease/grant", {"TTL": str(ttl_s)}, messages.granted)

    def keep_alive(self, lease: int) -> int:
        """Renew a lease for its whole time.

        Returns:
            How long that is, seconds; 0 if it is gone.
        """
        return self._ask("/v3/lease/keepalive", {"ID": str(lease)}, messages.kept_alive)

    def revoke(self, lease: int) -> None:
        """End a lease, and delete the keys attached to it. Harmless if it is gone."""
        try:
            self._ask("/v3/lease/revoke", {"ID": str(lease)}, messages.revision_of)
        except EtcdRefusedError as error:
            if error.code != NOT_FOUND:
                raise

    def _ask(self, path: str, body: Body, read: Callable[[Body], T]) -> T:
        """Return the answer of the first server that has one."""
        until = time.monotonic() + self.timeout_s
        why: dict[str, str] = {}
        for index, endpoint in enumerate(tuple(self._endpoints)):
            left = until - time.monotonic()
            try:
                answer = self._ask_one(endpoint, path, body, read, left / (len(self._endpoints) - index))
            except _NoAnswerError as error:
                self.close()
                why[endpoint] = str(error)
                self._endpoints.append(self._endpoints.pop(0))
            except BaseException:
                # Unless it was read to its end, the next request would read the rest of this answer.
                self.close()
                raise
            else:
                return answer
        reasons = "; ".join(f"{endpoint}: {text}" for endpoint, text in why.items())
        raise EtcdUnreachableError(f"cannot reach etcd: {reasons}")

    def _ask_one(self, endpoint: str, path: str, body: Body, read: Callable[[Body], T], limit_s: float) -> T:
        until = time.monotonic() + limit_s
        is_last = False
        while True:
            if self._token is None:
                self._token = self._authenticate(endpoint, until)
                is_last = True
            try:
                answer = self._exchange(endpoint, path, body, until)
            except _BrokenError:
                # Some versions do this instead of rejecting a token (etcd's issues 15256 and 20332).
                if is_last or not self._token:
                    raise
                self._token = None
                continue
            try:
                refusal = messages.refusal_in(answer)
                if refusal is None:
                    result = read(answer)
                    self.cluster_id = messages.cluster_of(answer) or self.cluster_id
                    return result
            except (ValueError, KeyError) as error:
                raise _NoAnswerError(f"the server is not etcd 3.4 or later ({error})") from error
            text, code = refusal
            lacks_token = code == _UNAUTHENTICATED or any(words in text for words in _WITHOUT_TOKEN)
            if is_last or not lacks_token or not self._place.user:
                self._refuse(text, code)
            self._token = None

    def _authenticate(self, endpoint: str, until: float) -> str:
        """Return a token; "" if none is needed."""
        if not self._place.user:
            return ""
        body: Body = {"name": self._place.user, "password": self._place.password}
        answer = self._exchange(endpoint, "/v3/auth/authenticate", body, until)
        try:
            refusal = messages.refusal_in(answer)
            if refusal is None:
                return messages.token(answer)
        except ValueError as error:
            raise _NoAnswerError(f"the server is not etcd 3.4 or later ({error})") from error
        if refusal[1] == _NOT_NOW:  # etcd has no users yet, and permits everything
            return ""
        self._refuse(*refusal)

    def _refuse(self, text: str, code: int) -> NoReturn:
        if code in _NO_ANSWERS or _BUSY in text:
            raise _NoAnswerError(_shown(text))
        user = self._place.user
        what = ""
        if code == _DENIED:
            who = f"user {user}" if user else "the client"
            what = f": {who} needs a role with permission to {self._needs}"
        elif not user and any(words in text for words in _WITHOUT_TOKEN):
            what = (
                ": set an etcd user in ETCDCTL_USER; a client certificate alone is not sufficient for etcd's JSON "
                "gateway"
            )
        elif "authentication failed" in text:
            what = f": the user {user} (ETCDCTL_USER) is unknown to etcd, or the password is wrong"
        elif _FULL in text:
            what = (
                ": free space (etcdctl compact, etcdctl defrag, etcdctl alarm disarm), or raise --quota-backend-bytes"
            )
        raise EtcdRefusedError(f"etcd rejected the request: {_shown(text)}{what}", code)

    def _exchange(self, endpoint: str, path: str, body: Body, until: float) -> Body:
        """Exchange one request and its answer, on a new connection if the present one has been closed meanwhile."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        while True:
            connection, is_new = self._connected(endpoint, until)
            try:
                status, answer = connection.exchange(path, to_text(body).encode(), headers, until)
            except TimeoutError:
                raise _NoAnswerError("timed out") from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if is_new:
                    text = _in_words(error)
                    if endpoint.startswith("https:") and not self._place.certificate and isinstance(error, OSError):
                        text += "; it may require a client certificate (ETCDCTL_CERT and ETCDCTL_KEY)"
                    raise _BrokenError(text) from error
            else:
                break
        try:
            return messages.parse(answer)
        except ValueError as error:
            if status != http.HTTPStatus.OK and answer:
                text = f"HTTP {status}: {_shown(answer[:_SHOWN].decode(errors='replace').strip())}"
                if _NAMED in text:
                    text += ": use a client certificate without a CommonName, and set the user in ETCDCTL_USER"
                raise _NoAnswerError(text) from error
            raise _NoAnswerError("the server is not etcd 3.4 or later: it is not JSON") from error

    def _connected(self, endpoint: str, until: float) -> tuple[_Connection, bool]:
        """Return a connection to a server, and whether it is a new one."""
        connection = self._connection
        if connection is not None and connection.endpoint == endpoint and connection.sock is not None:
            return connection, False
        self.close()
        if (place := self._place.read_again()) != self._place:
            self._place, self._context = place, place.tls()
        self._connection = connection = _Connection(endpoint, self._context)
        try:
            connection.reach(until)
        except UnicodeError as error:  # an impossible name, or one in the resolver's search list
            raise _NoAnswerError(f"{connection.host} is not a valid host name") from error
        except OSError as error:
            raise _NoAnswerError(in_words(error)) from error
        return connection, True
