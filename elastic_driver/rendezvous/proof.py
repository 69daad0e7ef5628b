"""How the two ends of a connection prove to each other that they hold the same key, and what each of them says.

Owns the bytes that are authenticated; where they stand in HTTP is the business of client and connection. Pure: knows no
socket, clock or random source.

    client                                                         driver
    Authorization: Elastic-Hello NAME CLIENT_NONCE   ──────────►
                                                     ◄──────────   nonce, and a proof over both that it has NAME's key
    Authorization: Elastic-Proof MAC [DIGEST]        ──────────►   of the connection's 1st request, of its 2nd, ...
                                                     ◄──────────   Authentication-Info: MAC

Both derive the key of the connection from the credential's key and both nonces, so that nothing that was said on one
connection means anything on another, or to another driver. A request's number is covered, and its answer has the same:
nothing can be sent twice, left out, or answered with the answer to something else. A request's body is covered through
its digest, which stands in the head, so that a head can be believed, or not, before a byte of the body is read.

Nothing is hidden: who listens on the way reads everything but keys. Frames of agents are encrypted, with a key that is
made of the connection's (:mod:`~elastic_driver.rendezvous.frames`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Self

from elastic_driver.codec import CodecError, decode, encode

HELLO = "Elastic-Hello"
PROOF = "Elastic-Proof"
UPGRADE = "elastic-agent/1"  # what a connection becomes that carries frames
REPLY_HEADER = "Authentication-Info"  # of RFC 7615, where the server of HTTP's digest authentication proves itself
NONCE_BYTES = 16

# Keyed BLAKE2b (RFC 7693) is made for this, and takes a fourth of HMAC-SHA256's time: 0.4 us, where a request takes the
# driver 10 us.
_KEY_BYTES = 32
_DIGEST_BYTES = 32  # nobody may find two bodies of one digest
_MAC_BYTES = 16  # nobody without the key can do better than to guess it


# Whether a proof is the one expected; how long that takes does not tell how much of it is right.
is_same = compare_digest


def digest_of(body: bytes) -> bytes:
    """What stands for a body in a request's head, in hexadecimal digits; nothing for an empty one."""
    return blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode() if body else b""


@dataclass(frozen=True, slots=True)
class _HelloReply:
    """What the driver answers to a hello: its nonce, and :attr:`Session.greeting`."""

    nonce: str
    proof: str


class Session:
    """The key of one connection. Both ends make the same one.

    Args:
        key: of the credential.
        name: of the credential, as the client has said it.
        client_nonce: that it has said with it.
        server_nonce: that the driver has answered.

    Attributes:
        greeting: proves to the client that the driver has the key, before anything else is said.
    """

    __slots__ = ("_keyed", "_server_nonce", "greeting")

    def __init__(self, key: bytes, name: str, client_nonce: str, server_nonce: str) -> None:
        names = f"elastic_driver connection\n{name}\n{client_nonce}\n{server_nonce}".encode()
        of_connection = blake2b(names, key=key, digest_size=_KEY_BYTES).digest()
        self._keyed = blake2b(key=of_connection, digest_size=_MAC_BYTES)
        self._server_nonce = server_nonce
        self.greeting = self._mac(b"greeting")

    @classmethod
    def met(cls, key: bytes, name: str, client_nonce: str, body: bytes) -> Self | None:
        """The client's, made of the answer to its hello; None where whoever answers does not have the key."""
        try:
            reply = decode(_HelloReply, body)
        except CodecError:
            return None
        session = cls(key, name, client_nonce, reply.nonce)
        return session if is_same(reply.proof.encode(), session.greeting) else None

    def hello_reply(self) -> bytes:
        """The body of the driver's answer to the hello, for :meth:`met`."""
        return encode(_HelloReply, _HelloReply(self._server_nonce, self.greeting.decode()))

    def of_request(self, number: int, method: bytes, target: bytes, digest: bytes) -> bytes:
        """The proof of a request.

        Args:
            number: of the request on its connection, from 1.
            method: of HTTP.
            target: path and query, as sent.
            digest: of the body.
        """
        return self._mac(b"request\n%d\n%b %b\n%b" % (number, method, target, digest))

    def of_reply(self, number: int, status: int, body: bytes) -> bytes:
        """The proof of the answer to the request of this number."""
        return self._mac(b"reply\n%d\n%d\n%b" % (number, status, body))

    def frames(self, *, up: bool, secret: bytes = b"") -> bytes:
        """The key of one direction of a connection that has become one of frames.

        Args:
            up: towards the driver.
            secret: that both ends have agreed on meanwhile, beside the session's key; at most 64 bytes.
        """
        keyed = self._keyed.copy()
        keyed.update(b"frames up\n" if up else b"frames down\n")
        return blake2b(keyed.digest() + secret, key=secret, digest_size=_KEY_BYTES).digest()

    def _mac(self, message: bytes) -> bytes:
        """In hexadecimal digits."""
        keyed = self._keyed.copy()
        keyed.update(message)
        return keyed.hexdigest().encode()
