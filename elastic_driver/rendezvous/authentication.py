"""How two ends of a connection prove to each other that they hold the same key: one exchange of three messages.

Owns their bytes, and what is authenticated. Pure: knows no socket, clock or random source; who listens and who dials
bring the bytes here and carry what they get.

    client                                                      driver
    magic, name, CLIENT_NONCE                ──────────►
                                             ◄──────────        DRIVER_NONCE, MAC of the driver
    MAC of the client                        ──────────►

Over TCP this goes inside TLS. Both MACs cover the certificate: the driver takes its own, the client the one that it was
shown. So whoever stands between them with a TLS of his own on each side can pass these messages on and gains nothing:
the driver's MAC is over a certificate that the client has not seen. They cover both nonces and the name, too, and each
end has a label of its own, so that nothing said once, or to somebody else, or by the other end, is of any use again.

On a unix socket the kernel has named both ends' user already: the client sends magic and name, and goes on at once.

A name is printable ASCII: ``str()`` of an :class:`~elastic_driver.rendezvous.credentials.Identity`, or what a probe
looks for.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from elastic_driver.errors import RendezvousProtocolError

# Neither HTTP nor TLS nor STUN begins so, and no browser can be made to send it. The last byte is the version.
MAGIC = b"\x00ED\x01"
NONCE_BYTES = 32
NO_CERTIFICATE = bytes(32)  # in the place of a certificate's SHA-256 where there is no TLS

MAC_BYTES = 32
_MOST_NAME_BYTES = 512
_MOST_TEXT_BYTES = 300
_CHALLENGE, _REFUSAL = 0, 1
_CHALLENGE_BYTES = 1 + NONCE_BYTES + MAC_BYTES
_REFUSAL_BYTES = 3  # without its text
MOST_REFUSAL_BYTES = _REFUSAL_BYTES + _MOST_TEXT_BYTES
_DRIVER, _CLIENT = b"elastic_driver 1 driver", b"elastic_driver 1 client"
_NO_PROOF = "what answers there does not prove to be this job's driver"


def opening(name: str) -> bytes:
    """What a client sends first; on a unix socket all that it sends.

    Args:
        name: who it is: printable ASCII, 1 to 512 characters.

    Raises:
        ValueError: this is no name.
    """
    if not 1 <= len(name) <= _MOST_NAME_BYTES:
        raise ValueError(f"a name has 1 to {_MOST_NAME_BYTES} characters, this one {len(name)}")
    if not _is_printable_ascii(name):
        raise ValueError(f"a name is printable ASCII, unlike {name!r}")
    return MAGIC + len(name).to_bytes(2, "big") + name.encode()


@dataclass(frozen=True, slots=True)
class Request:
    """What a client has said first.

    Attributes:
        name: who it says it is.
        nonce: its; empty on a unix socket.
        size: how many bytes that took.
    """

    name: str
    nonce: bytes
    size: int


def read_request(received: bytes | bytearray, *, has_nonce: bool = True) -> Request | None:
    """The request with which what was received begins; None while some of it is missing.

    Args:
        received: from the connection's first byte on; what follows the request is not looked at.
        has_nonce: False on a unix socket.

    Raises:
        RendezvousProtocolError: it is none, which shows as early as possible.
    """
    if not MAGIC.startswith(received[: len(MAGIC)]):
        other = " of another version" if received[: len(MAGIC) - 1] == MAGIC[:-1] else ""
        raise RendezvousProtocolError(f"cannot read request: it does not begin like one{other}")
    start = len(MAGIC) + 2
    if len(received) < start:
        return None
    length = int.from_bytes(received[len(MAGIC) : start], "big")
    if not 1 <= length <= _MOST_NAME_BYTES:
        raise RendezvousProtocolError(f"cannot read request: a name has 1 to {_MOST_NAME_BYTES} bytes, not {length}")
    size = start + length + NONCE_BYTES * has_nonce
    if len(received) < size:
        return None
    name = received[start : start + length].decode("latin-1")
    if not _is_printable_ascii(name):  # else it would move the cursor of whoever reads a log
        raise RendezvousProtocolError("cannot read request: the name is not printable ASCII")
    return Request(name, bytes(received[start + length : size]), size)


class Challenge:
    """The driver's part, once it has a request of somebody whose key it knows.

    Args:
        request: the client's.
        key: which both hold, 32 bytes.
        certificate: SHA-256 of the driver's own certificate in DER; NO_CERTIFICATE without TLS.
        nonce: NONCE_BYTES that were never used before.

    Raises:
        ValueError: one of them has another length, the request no nonce.

    Attributes:
        message: for the client.
    """

    __slots__ = ("_expected", "message")

    def __init__(self, request: Request, key: bytes, certificate: bytes, nonce: bytes) -> None:
        covered = request.name, certificate, request.nonce, nonce
        self.message = bytes([_CHALLENGE]) + nonce + _mac(key, _DRIVER, *covered)
        self._expected = _mac(key, _CLIENT, *covered)

    def accepts(self, response: bytes) -> bool:
        """Whether the client has proven that it holds the key; how long that takes does not tell what is wrong.

        Args:
            response: MAC_BYTES.
        """
        return hmac.compare_digest(response, self._expected)


def refusal(text: str) -> bytes:
    """What a client is answered instead of a challenge. It may not believe it, for anybody can say so.

    Args:
        text: why; cut at 300 bytes.
    """
    encoded = text.encode(errors="replace")[:_MOST_TEXT_BYTES].decode(errors="ignore").encode()
    return bytes([_REFUSAL]) + len(encoded).to_bytes(2, "big") + encoded


def is_refusal(answer: bytes | bytearray) -> bool:
    """Whether what was received so far begins a :func:`refusal`."""
    return answer[:1] == bytes([_REFUSAL])


def read_refusal(answer: bytes | bytearray) -> str:
    """The text of a :func:`refusal`, with ``?`` for what cannot be printed; "" where it is none. It may be cut off."""
    if not is_refusal(answer):
        return ""
    text = bytes(answer[_REFUSAL_BYTES : _REFUSAL_BYTES + _MOST_TEXT_BYTES]).decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in text)


class RefusedAuthenticationError(RendezvousProtocolError):
    """Whoever answers has refused, in these words; it may be anybody."""


class OtherKeyError(RendezvousProtocolError):
    """Whoever answers has another key than this process, or shows another's certificate."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The client's part.

    Attributes:
        name: who it is.
        key: which both hold, 32 bytes.
        certificate: SHA-256 of the certificate in DER that it was shown; NO_CERTIFICATE without TLS.
        nonce: NONCE_BYTES that were never used before.
    """

    name: str
    key: bytes = field(repr=False)
    certificate: bytes
    nonce: bytes

    @property
    def request(self) -> bytes:
        """What it sends first."""
        return opening(self.name) + self.nonce

    def missing(self, answer: bytes | bytearray) -> int:
        """How many bytes of the driver's answer have to be read still; 0 when it is whole.

        Args:
            answer: what was received so far; at most as much as was said to be missing.

        Raises:
            RendezvousProtocolError: it is none.
        """
        if len(answer) < _REFUSAL_BYTES:  # of which no answer has less
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
        """What proves the client to the driver, once the driver has proven itself.

        Args:
            answer: the driver's, whole.

        Raises:
            RefusedAuthenticationError: it is a refusal.
            OtherKeyError: whoever answers does not hold the key, or another certificate was shown than its.
            RendezvousProtocolError: it is no answer.
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
    # Nothing stands between the parts: only the last has no fixed length. And to HMAC a short key is one with zeros
    # behind it, none at all that of a service without a token.
    if any(len(each) != MAC_BYTES for each in (key, certificate, *nonces)):
        raise ValueError(f"a key, the SHA-256 of a certificate and a nonce have {MAC_BYTES} bytes")
    return hmac.digest(key, label + b"\0" + certificate + b"".join(nonces) + name.encode(), "sha256")
