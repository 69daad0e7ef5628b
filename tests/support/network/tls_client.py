"""A TLS 1.3 client without a socket, which can say what Python's own cannot: KeyUpdates, and messages in pieces."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from elastic_driver.rendezvous.certificate import client_context

# RFC 8446, 4.6.3: the message KeyUpdate, which asks the other end for one of its own.
KEY_UPDATE = bytes([24, 0, 0, 1, 1])
_HANDSHAKE, _DATA = 22, 23


class TlsClient:
    """What a server sends goes into :meth:`take`; what goes to it comes out of there, and of the other methods.

    Args:
        key_log: a file that is not there yet, where OpenSSL writes the secrets; None for who forges nothing.
    """

    def __init__(self, key_log: Path | None = None) -> None:
        context = client_context()
        if key_log is not None:
            context.keylog_filename = str(key_log)
        self._key_log = key_log
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self._incoming, self._outgoing)
        self.is_shaken = False
        self.got = bytearray()
        self.ended = False
        self._forged: _Forged | None = None

    def take(self, data: bytes = b"") -> bytes:
        """Takes what the server has sent, and gives what is to be sent."""
        self._incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self.is_shaken:
                self.object.do_handshake()
                self.is_shaken = True
            while not self.ended:
                try:
                    piece = self.object.read(1 << 18)
                except ssl.SSLZeroReturnError:
                    piece = b""
                self.got += piece
                self.ended = not piece
        return self._outgoing.read()

    def say(self, data: bytes) -> bytes:
        """The records for it."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.object.write(rest) :]  # type: ignore[arg-type]
        return self._outgoing.read()

    def end(self) -> bytes:
        """Its close_notify."""
        with contextlib.suppress(ssl.SSLError):
            self.object.unwrap()
        return self._outgoing.read()

    def key_updates(self, number: int) -> bytes:
        """So many of them. From then on only :meth:`key_updates`, :meth:`forged` and :meth:`pieces` may speak."""
        return b"".join(self._forge().key_update() for _ in range(number))

    def forged(self, data: bytes) -> bytes:
        """What :meth:`say` would give, if it still could."""
        return self._forge().record(data, _DATA)

    def pieces(self) -> tuple[bytes, bytes]:
        """A KeyUpdate in two records: its head, at which OpenSSL begins to wait for the rest, and that."""
        forged = self._forge()
        first, second = forged.record(KEY_UPDATE[:4], _HANDSHAKE), forged.record(KEY_UPDATE[4:], _HANDSHAKE)
        forged.renew()
        return first, second

    def _forge(self) -> _Forged:
        if self._forged is None:
            assert self._key_log is not None
            assert self.is_shaken
            lines = [line.split() for line in self._key_log.read_text().splitlines()]
            secret = next(words[2] for words in lines if words[0] == "CLIENT_TRAFFIC_SECRET_0")
            self._forged = _Forged(bytes.fromhex(secret))
        return self._forged


class _Forged:
    """Records of TLS_AES_256_GCM_SHA384, from the first on (RFC 8446, 5.2, 7.1 to 7.3)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._begin()

    def _begin(self) -> None:
        self._cipher = AESGCM(self._derived("key", 32))
        self._iv = int.from_bytes(self._derived("iv", 12), "big")
        self._number = 0

    def _derived(self, label: str, size: int) -> bytes:
        name = f"tls13 {label}".encode()
        info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return HKDFExpand(SHA384(), size, info).derive(self._secret)

    def record(self, content: bytes, kind: int) -> bytes:
        head = bytes([_DATA, 3, 3]) + (len(content) + 17).to_bytes(2, "big")
        nonce = (self._iv ^ self._number).to_bytes(12, "big")
        self._number += 1
        return head + self._cipher.encrypt(nonce, content + bytes([kind]), head)

    def renew(self) -> None:
        self._secret = self._derived("traffic upd", 48)
        self._begin()

    def key_update(self) -> bytes:
        record = self.record(KEY_UPDATE, _HANDSHAKE)
        self.renew()
        return record
