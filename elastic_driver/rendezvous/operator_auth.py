"""For programs that speak to a driver with ``requests``: the proofs of an operator, as an ``AuthBase``.

Owns how the two requests of a proof (:mod:`~elastic_driver.rendezvous.proof`) become one of ``requests``. The driver's
own commands do not use it: :mod:`~elastic_driver.rendezvous.client` is one client for all that workers and operators
say.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.credentials import KEY_BYTES, Identity, Role
from elastic_driver.rendezvous.messages import API
from elastic_driver.rendezvous.proof import HELLO, NONCE_BYTES, PROOF, REPLY_HEADER, Session, digest_of, is_same
from elastic_driver.system.safe_files import read_named

_MOST_BYTES = 4096
# Refusals that come before the driver knows who asks.
_WITHOUT_PROOF = (400, 401, 408, 431, 503)
# They describe the body, which the first of the two requests has not.
_OF_THE_BODY = ("Content-Length", "Content-Type", "Transfer-Encoding")


class UnprovenError(requests.RequestException):
    """What has answered did not prove to be the driver that this key is for."""


class OperatorAuth(AuthBase):
    """Signs each request with the operator's key, and checks that each answer is the driver's.

        auth = OperatorAuth.from_file("token")
        answer = requests.post(f"{url}/v1/drain", json={"hostname": "node1", "undo": False}, auth=auth, timeout=10)

    A signed request takes a connection of its own, on which a hello goes before it; ``requests`` shows that one in the
    answer's ``history``. Sessions may be shared by threads as far as ``requests`` itself allows: where another thread
    takes the connection between the two, the answer is 401, and nothing has been done.

    Args:
        key: the operator's, of one job.

    Raises:
        SettingsError: that is no key.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise SettingsError(f"cannot use this as an operator's key: it has {len(key)} bytes, not {KEY_BYTES}")
        self._key = key
        self._name = str(Identity(Role.OPERATOR))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """With the key in a file that ``elasticrun jobs --write-token FILE`` has written.

        Raises:
            SettingsError: it cannot be read, or holds none.
        """
        try:
            text = read_named(Path(path), _MOST_BYTES).decode("ascii", "replace")
        except OSError as error:
            raise SettingsError(f"cannot read the token's file {path}: {error.strerror}") from error
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:  # SettingsError is one
            raise SettingsError(
                f"cannot use the file {path} as a token: it does not hold a key of {2 * KEY_BYTES} hexadecimal digits"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorAuth) and is_same(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._name)

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Puts a hello in the request's place; the request itself follows on the same connection."""
        body = request.body or b""
        if not isinstance(body, str | bytes):
            raise UnprovenError("cannot sign a body that is not there yet: give bytes, text or json")
        signed = request.copy()
        parts = urlsplit(request.url or "")
        nonce = os.urandom(NONCE_BYTES).hex()
        request.method, request.body = "GET", None
        request.url = parts._replace(path=f"{API}/hello", query="", fragment="").geturl()
        for name in _OF_THE_BODY:
            request.headers.pop(name, None)
        request.headers["Authorization"] = f"{HELLO} {self._name} {nonce}"

        def go_on(hello: requests.Response, **options: Any) -> requests.Response:
            hooks.remove(go_on)
            return self._go_on(hello, nonce, signed, body.encode() if isinstance(body, str) else body, options)

        hooks: list[Any] = request.hooks["response"]
        hooks.append(go_on)
        return request

    def _go_on(
        self, hello: requests.Response, nonce: str, signed: requests.PreparedRequest, body: bytes, options: Any
    ) -> requests.Response:
        session = self._meet(hello, nonce)
        digest = digest_of(body)
        method, target = str(signed.method).encode(), signed.path_url.encode()
        proof = session.of_request(1, method, target, digest).decode()
        signed.headers["Authorization"] = " ".join(filter(None, (PROOF, proof, digest.decode())))
        # The proof is the first of its connection, and so the next has to have another.
        signed.headers["Connection"] = "close"
        answer: requests.Response = hello.connection.send(signed, **{**options, "stream": False})
        answer.history.append(hello)
        answer.request = signed
        expected = session.of_reply(1, answer.status_code, answer.content)
        if answer.status_code in _WITHOUT_PROOF or is_same(answer.headers.get(REPLY_HEADER, "").encode(), expected):
            return answer
        answer.close()
        raise UnprovenError(f"the answer to {signed.method} {signed.path_url} is not the driver's", response=answer)

    def _meet(self, hello: requests.Response, nonce: str) -> Session:
        session = Session.met(self._key, self._name, nonce, hello.content) if hello.status_code == 200 else None
        if session is not None:
            return session
        raise UnprovenError(
            f"what answers at {urlsplit(hello.url).netloc} does not prove to be the driver of the job that this "
            f"operator's key is for (status {hello.status_code})",
            response=hello,
        )
