"""The driver's address as people hand it on: ``http://HOST:PORT``, or ``https://HOST:PORT#sha256:FINGERPRINT``.

Owns the text form. What stands behind the ``#`` is never sent: it tells who connects which certificate to expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from elastic_driver.errors import RendezvousProtocolError

_FINGERPRINT = re.compile(r"sha256:([0-9A-Fa-f]{64})")


@dataclass(frozen=True, slots=True)
class DriverUrl:
    """Where the driver is, and how to know it.

    Attributes:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        fingerprint: of its certificate, in hexadecimal digits; "" for ``http``.
    """

    url: str
    fingerprint: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one.

        Raises:
            RendezvousProtocolError: it is none, or its fingerprint is missing or stands where there is no use for it.
        """
        url, has_fragment, fragment = text.strip().partition("#")
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname and parts.port) and parts.scheme in ("http", "https")
            is_address = is_address and parts.username is None and not parts.path.strip("/") and not parts.query
        except ValueError:
            is_address = False
        if not is_address:
            raise RendezvousProtocolError(
                f"cannot read {text[:200]!r} as the driver's address: expected http://HOST:PORT or "
                "https://HOST:PORT#sha256:FINGERPRINT"
            )
        url = url.rstrip("/")
        if parts.scheme == "http":
            if has_fragment:
                raise RendezvousProtocolError(f"cannot use {text[:200]!r}: a fingerprint goes with https only")
            return cls(url)
        match = _FINGERPRINT.fullmatch(fragment)
        if match is None:
            raise RendezvousProtocolError(
                f"cannot use {text[:200]!r}: behind it has to stand #sha256: and the 64 digits of the certificate's "
                "fingerprint, as the driver prints them"
            )
        return cls(url, match[1].lower())

    def __str__(self) -> str:
        return f"{self.url}#sha256:{self.fingerprint}" if self.fingerprint else self.url
