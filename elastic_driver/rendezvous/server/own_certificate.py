"""The certificate of a server: made when it is needed first, which in most jobs of one machine is never.

Owns when that is. What a certificate is, is :mod:`~elastic_driver.rendezvous.certificate`'s business.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.certificate import Certificate, server_context


class OwnCertificate:
    """Used on one event loop.

    Args:
        certificate: one that there is already; None to make one when it is needed.

    Attributes:
        fingerprint: see Certificate; "" until it is made.
        context: for connections of the server; None until then.
    """

    def __init__(self, certificate: Certificate | None = None) -> None:
        self._certificate = certificate
        self._making: asyncio.Future[SSLContext] | None = None
        self.fingerprint = ""
        self.context: SSLContext | None = None

    @property
    def made(self) -> Certificate | None:
        """As it is; None until it is made."""
        return self._certificate

    async def make(self) -> str:
        """Makes it, if there is none yet. Blocks until it is there.

        Returns:
            Its fingerprint.

        Raises:
            SettingsError: this machine lacks what that takes: a package, a descriptor, TLS 1.3.
        """
        if self.context is None:
            await asyncio.shield(self.begin())
        return self.fingerprint

    def begin(self) -> asyncio.Future[SSLContext]:
        """Has it made, if that is not done yet. Both attributes are set before others are told that it is done.

        Where it could not be made (no memory, no thread, no descriptor) the next call tries again.
        """
        if self._making is None:
            # In a thread: importing what makes it takes some 50 ms, and others wait for the loop.
            self._making = asyncio.get_running_loop().run_in_executor(None, self._make)
            self._making.add_done_callback(self._made)
        return self._making

    def _make(self) -> SSLContext:
        try:
            self._certificate = self._certificate or Certificate.new()
            return server_context(self._certificate)
        except (OSError, ValueError, ImportError, MemoryError) as error:
            raise SettingsError(f"cannot make the certificate for other machines: {in_words(error)}") from error

    def _made(self, making: asyncio.Future[SSLContext]) -> None:
        if not making.cancelled() and making.exception() is None:
            assert self._certificate is not None
            self.fingerprint, self.context = self._certificate.fingerprint, making.result()
        else:
            self._making = None
