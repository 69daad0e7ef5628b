"""A driver's address as text: ``https://HOST:PORT#sha256:FINGERPRINT``, or ``unix:/PATH`` on its own machine.

Owns the text form. The part behind the ``#`` is never sent: it names the certificate that the client must expect.
Without it, the shared key alone identifies the driver.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.system.local_socket import path_of

_FINGERPRINT = re.compile(r"sha256:([0-9A-Fa-f]{64})")
_log = logging.getLogger("elastic_driver")


@dataclass(frozen=True, slots=True)
class DriverUrl:
    """The address of the driver or an agent, and its certificate.

    Attributes:
        url: ``https://HOST:PORT`` or ``unix:/PATH``.
        fingerprint: SHA-256 of its certificate, in hexadecimal digits; "" if unknown, and for ``unix``.
    """

    url: str
    fingerprint: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address. ``http`` is read as ``https``, with one warning: links and notes of older versions contain
        it.

        Raises:
            RendezvousProtocolError: the address or its fingerprint is malformed.
        """
        url, has_fragment, fragment = text.strip().partition("#")
        if path_of(url) is not None and not has_fragment:
            return cls(url)
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname and parts.port) and parts.scheme in ("http", "https")
            is_address = is_address and parts.username is None and not parts.path.strip("/") and not parts.query
        except ValueError:
            is_address = False
        if not is_address:
            raise RendezvousProtocolError(
                f"cannot read {text[:200]!r} as the driver's address: expected https://HOST:PORT or "
                "https://HOST:PORT#sha256:FINGERPRINT"
            )
        match = _FINGERPRINT.fullmatch(fragment)
        if has_fragment and match is None:
            raise RendezvousProtocolError(
                f"cannot use {text[:200]!r}: the part after # must be sha256: and the 64 digits of the "
                "certificate's fingerprint, as the driver prints it"
            )
        if parts.scheme == "http":
            _warn_of_http()
        return cls(f"https://{parts.netloc}", match[1].lower() if match else "")

    @property
    def socket(self) -> Path | None:
        """The path of the Unix socket; None for a TCP address."""
        return path_of(self.url)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, if it is a TCP address."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def __str__(self) -> str:
        return f"{self.url}#sha256:{self.fingerprint}" if self.fingerprint else self.url


@functools.cache
def _warn_of_http() -> None:
    _log.warning("http:// in the driver's URL is read as https://, because drivers only speak TLS: write https://")
