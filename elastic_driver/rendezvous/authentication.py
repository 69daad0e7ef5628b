"""How both ends of a connection prove to each other that they hold the same key: an exchange of three messages.

Owns their bytes, and what they authenticate. Pure: knows no socket, clock or random source; both ends pass the bytes in
and send what they get.

    client                                                      driver
    magic, name, CLIENT_NONCE                ──────────►
                                             ◄──────────        DRIVER_NONCE, MAC of the driver
    MAC of the client                        ──────────►

Over TCP this runs inside TLS. Both MACs cover the certificate: the driver uses its own, the client the one it was
shown. A man in the middle with his own TLS on each side can forward these messages but gains nothing: the driver's MAC
covers a certificate that the client has not seen. The MACs also cover both nonces and the name, and each end has its
own label, so that no message can be replayed, redirected or reflected.

On a Unix socket the kernel has already named both ends' users: the client sends magic and name, and continues at once.

A name is printable ASCII: ``str()`` of an :class:`~elastic_driver.rendezvous.credentials.Identity`, or the target of a
probe.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from elastic_driver.errors import RendezvousProtocolError

# Neither HTTP nor TLS nor STUN begins like this, and no browser can be made to send it. The last byte is the version.
MAGIC = b"\x00ED\x01"
NONCE_BYTES = 32
NO_CERTIFICATE = bytes(32)  # stands in for a certificate's SHA-256 where there is no TLS

MAC_BYTES = 32
_MOST_NAME_BYTES = 512
_MOST_TEXT_BYTES = 300
_CHALLENGE, _REFUSAL = 0, 1
_CHALLENGE_BYTES = 1 + NONCE_BYTES + MAC_BYTES
_REFUSAL_BYTES = 3  # without its text
MOST_REFUSAL_BYTES = _REFUSAL_BYTES + _MOST_TEXT_BYTES
_DRIVER, _CLIENT = b"elastic_driver 1 driver", b"elastic_driver 1 client"
_NO_PROOF = "the server there did not prove to be this job's driver"


def opening(name: str) -> bytes:
    """Return a client's first message; on a Unix socket its only one.

    Args:
        name: the client's name: printable ASCII, 1 to 512 characters.

    Raises:
        ValueError: the name is malformed.
    """
    if not 1 <= len(name) <= _MOST_NAME_BYTES:
        raise ValueError(f"a name must have 1 to {_MOST_NAME_BYTES} characters, not {len(name)}")
    if not _is_printable_ascii(name):
        raise ValueError(f"a name must be printable ASCII, not {name!r}")
    return MAGIC + len(name).to_bytes(2, "big") + name.encode()


@dataclass(frozen=True, slots=True)
class Request:
    """A client's first message.

    Attributes:
        name: the name that the client claims.
        nonce: the client's nonce; empty on a Unix socket.
        size: length of the message in bytes.
    """

    name: str
    nonce: bytes
    size: int


def read_request(received: bytes | bytearray, *, has_nonce: bool = True) -> Request | None:
    """Decode the request at the start of the received bytes; return None while it is incomplete.

    Args:
        received: all bytes from the connection's first on; those after the request are ignored.
        has_nonce: False on a Unix socket.

    Raises:
        RendezvousProtocolError: it is not a request; raised as early as possible.
    """
    if not MAGIC.startswith(received[: len(MAGIC)]):
        is_other_version = received[: len(MAGIC) - 1] == MAGIC[:-1]
        why = "it is of another version" if is_other_version else "it does not start like one"
        raise RendezvousProtocolError(f"cannot read request: {why}")
    start = len(MAGIC) + 2
    if len(received) < start:
        return None
    length = int.from_bytes(received[len(MAGIC) : start], "big")
    if not 1 <= length <= _MOST_NAME_BYTES:
        raise RendezvousProtocolError(
            f"cannot read request: a name must have 1 to {_MOST_NAME_BYTES} bytes, not {length}"
        )
    size = start + length + NONCE_BYTES * has_nonce
    if len(received) < size:
        return None
    name = received[start : start + length].decode("latin-1")
    if not _is_printable_ascii(name):  # control characters could move the cursor of a log's reader
        raise RendezvousProtocolError("cannot read request: the name is not printable ASCII")
    return Request(name, bytes(received[start + length : size]), size)


class Challenge:
    """The driver's part, once it has a request from an identity whose key it knows.

    Args:
        request: the client's request.
        key: the shared key, 32 bytes.
        certificate: SHA-256 of the driver's own certificate in DER; NO_CERTIFICATE without TLS.
        nonce: NONCE_BYTES that were never used before.

    Raises:
        ValueError: one of them has a wrong length, or the request has no nonce.

    Attributes:
        message: the challenge to send to the client.
    """

    __slots__ = ("_expected", "message")

    def __init__(self, request: Request, key: bytes, certificate: bytes, nonce: bytes) -> None:
        covered = request.name, certificate, request.nonce, nonce
        self.message = bytes([_CHALLENGE]) + nonce + _mac(key, _DRIVER, *covered)
        self._expected = _mac(key, _CLIENT, *covered)

    def accepts(self, response: bytes) -> bool:
        """Return whether the client has proven that it holds the key, in constant time.

        Args:
            response: MAC_BYTES.
        """
        return hmac.compare_digest(response, self._expected)


def refusal(text: str) -> bytes:
    """Encode a refusal, sent instead of a challenge. Clients must not trust it: anybody can send it.

    Args:
        text: the reason; cut at 300 bytes.
    """
    encoded = text.encode(errors="replace")[:_MOST_TEXT_BYTES].decode(errors="ignore").encode()
    return bytes([_REFUSAL]) + len(encoded).to_bytes(2, "big") + encoded


def is_refusal(answer: bytes | bytearray) -> bool:
    """Return whether the bytes received so far begin a :func:`refusal`."""
    return answer[:1] == bytes([_REFUSAL])


def read_refusal(answer: bytes | bytearray) -> str:
    """Return the text of a :func:`refusal`, with ``?`` for unprintable characters; "" if it is not one. It may be
    truncated.
    """
    if not is_refusal(answer):
        return ""
    text = bytes(answer[_REFUSAL_BYTES : _REFUSAL_BYTES + _MOST_TEXT_BYTES]).decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in text)


class RefusedAuthenticationError(RendezvousProtocolError):
    """The server has refused, with this text; it may be anybody."""


class OtherKeyError(RendezvousProtocolError):
    """The server has another key than this process, or shows another's certificate."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The client's part.

    Attributes:
        name: the client's name.
        key: the shared key, 32 bytes.
        certificate: SHA-256 in DER of the certificate it was shown; NO_CERTIFICATE without TLS.
        nonce: NONCE_BYTES that were never used before.
    """

    name: str
    key: bytes = field(repr=False)
    certificate: bytes
    nonce: bytes

    @property
    def request(self) -> bytes:
        """The client's first message."""
        return opening(self.name) + self.nonce

    def missing(self, answer: bytes | bytearray) -> int:
        """Return how many bytes of the driver's answer are still missing; 0 if it is complete.

        Args:
            answer: the bytes received so far; never more than were missing.

        Raises:
            RendezvousProtocolError: it is not an answer.
        """
        if len(answer) < _REFUSAL_BYTES:  # no answer is shorter
            return _REFUSAL_BYTES - len(answer)
        length = int.from_bytes(answer[1:_REFUSAL_BYTES], "big")
        if answer[0] == _CHALLENGE:
            size = _CHALLENGE_BYTES
        elif answer[0] == _REFUSAL and length <= _MOST_TEXT_BYTES:
            size = _REFUSAL_BYTES + length
        else:
            raise RendezvousProtocolError(_NO_PROOF)
        if len(answer) > size:
            raise RendezvousProtocolError(_NO_PROOF)
        return size - len(answer)

    def response(self, answer: bytes | bytearray) -> bytes:
        """Verify the driver's proof and return the client's.

        Args:
            answer: the driver's complete answer.

        Raises:
            RefusedAuthenticationError: it is a refusal.
            OtherKeyError: the server does not hold the key, or the client was shown another certificate than the
                server's.
            RendezvousProtocolError: it is not an answer.
        """
        if self.missing(answer):
            raise RendezvousProtocolError(_NO_PROOF)
        if answer[0] == _REFUSAL:
            raise RefusedAuthenticationError(read_refusal(answer))
        nonce, mac = bytes(answer[1 : 1 + NONCE_BYTES]), bytes(answer[1 + NONCE_BYTES :])
        covered = self.name, self.certificate, self.nonce, nonce
        if not hmac.compare_digest(mac, _mac(self.key, _DRIVER, *covered)):
            raise OtherKeyError(_NO_PROOF)
        return _mac(self.key, _CLIENT, *covered)


def _is_printable_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _mac(key: bytes, label: bytes, name: str, certificate: bytes, *nonces: bytes) -> bytes:
    # The parts need no separators: only the last has no fixed length. Lengths are checked because HMAC pads a short key
    # with zeros: an empty one would equal that of a service without a token.
    if any(len(part) != MAC_BYTES for part in (key, certificate, *nonces)):
        raise ValueError(f"a key, a certificate's SHA-256 and a nonce must each have {MAC_BYTES} bytes")
    return hmac.digest(key, label + b"\0" + certificate + b"".join(nonces) + name.encode(), "sha256")
