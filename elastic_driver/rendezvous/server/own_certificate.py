"""The server's certificate: made when it is first needed, which in most single-machine jobs is never.

Owns when it is made. :mod:`~elastic_driver.rendezvous.certificate` owns how.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.certificate import Certificate, server_context


class OwnCertificate:
    """A certificate made on demand. Used on one event loop.

    Args:
        certificate: an existing certificate; None to make one when it is needed.

    Attributes:
        fingerprint: SHA-256 of the certificate in DER, in hexadecimal digits; "" until it is made.
        context: TLS context for the server's connections; None until then.
    """

    def __init__(self, certificate: Certificate | None = None) -> None:
        self._certificate = certificate
        self._making: asyncio.Future[SSLContext] | None = None
        self.fingerprint = ""
        self.context: SSLContext | None = None

    @property
    def made(self) -> Certificate | None:
        """The certificate; None until it is made."""
        return self._certificate

    async def make(self) -> str:
        """Make the certificate if there is none yet. Blocks until it is made.

        Returns:
            Its fingerprint.

        Raises:
            SettingsError: this machine lacks a package, a descriptor or TLS 1.3.
        """
        if self.context is None:
            await asyncio.shield(self.begin())
        return self.fingerprint

    def begin(self) -> asyncio.Future[SSLContext]:
        """Start making the certificate, unless that has begun. Both attributes are set before other callbacks run.

        If it fails (no memory, no thread, no descriptor), the next call tries again.
        """
        if self._making is None:
            # In a thread: importing the package takes about 50 ms, in which the loop must serve others.
            self._making = asyncio.get_running_loop().run_in_executor(None, self._make)
            self._making.add_done_callback(self._made)
        return self._making

    def _make(self) -> SSLContext:
        try:
            self._certificate = self._certificate or Certificate.new()
            return server_context(self._certificate)
        except (OSError, ValueError, ImportError, MemoryError) as error:
            raise SettingsError(f"cannot create the certificate for other machines: {in_words(error)}") from error

    def _made(self, making: asyncio.Future[SSLContext]) -> None:
        if not making.cancelled() and making.exception() is None:
            assert self._certificate is not None
            self.fingerprint, self.context = self._certificate.fingerprint, making.result()
        else:
            self._making = None
