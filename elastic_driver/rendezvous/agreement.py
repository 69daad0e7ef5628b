"""How an agent and the driver agree on keys of their own, once both have proven that they know a ticket or a token.

A ticket may stand in a command line, and a token be known to many: who has read one could otherwise make, from what he
hears, the keys of the connection. So both ends add a secret that was agreed on by X25519. Owns the derivations; knows
no connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from elastic_driver.errors import RendezvousProtocolError

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both ends have.

    Attributes:
        secret: for the frames that follow on this connection.
        again: with which the agent proves itself on its next connections.
    """

    secret: bytes = field(repr=False)
    again: bytes = field(repr=False)


class Agreement:
    """One end's part in it. Each is good for one agreement.

    Attributes:
        public: what the other end is told, in hexadecimal digits.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def with_(self, public: str) -> Agreed:
        """What has been agreed on with the end that has said this.

        Raises:
            RendezvousProtocolError: that is no public key.
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        except ValueError as error:
            raise RendezvousProtocolError(f"cannot use a public key: {error}") from None
        return Agreed(
            secret=_derive(shared, b"elastic_driver agent"), again=_derive(shared, b"elastic_driver agent again")
        )


def _derive(shared: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=purpose).derive(shared)
