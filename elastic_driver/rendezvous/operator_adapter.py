"""An adapter for ``requests`` whose connections authenticate to a driver as the operator.

Owns how ``requests`` gets connections from :mod:`~elastic_driver.rendezvous.connecting`. The driver's own commands do
not use it: :mod:`~elastic_driver.rendezvous.client` serves workers and operators alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from elastic_driver.errors import RendezvousError, SettingsError
from elastic_driver.rendezvous.connecting import connect
from elastic_driver.rendezvous.credentials import KEY_BYTES, Credential, Identity, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.operator_token import read_operator_key

_CONNECT_S = 10.0


class UnprovenError(requests.RequestException):
    """The server that answered did not prove to be the driver that this key is for."""


class OperatorAdapter(HTTPAdapter):
    """Sends requests to one driver, over connections on which both ends have proven that they hold the operator's key.

        adapter = OperatorAdapter.from_file("https://10.0.0.1:35211#sha256:...", "token")
        with requests.Session() as session:
            session.mount(adapter.url, adapter)
            session.post(f"{adapter.url}/v1/drain", json={"hostname": "node1", "undo": False}, timeout=10)

    Connections are reused; several threads may share the adapter. Proxies are ignored, and so are ``verify`` and
    ``cert`` of requests: the driver is identified by its certificate's fingerprint, and by the key.

    Args:
        url: the driver's URL, as the driver prints it; without a fingerprint the key alone identifies the driver.
        key: the operator's key of one job.
        source: the key's source, for messages ("the file token").

    Attributes:
        url: the URL without the fingerprint, for ``Session.mount`` and before each path.

    Raises:
        SettingsError: the key is malformed.
        RendezvousProtocolError: the URL is malformed.
    """

    def __init__(self, url: str, key: bytes, *, source: str = "") -> None:
        if len(key) != KEY_BYTES:
            raise SettingsError(f"cannot use this as an operator's key: it has {len(key)} bytes, not {KEY_BYTES}")
        super().__init__()
        driver = DriverUrl.parse(url)
        self.url = driver.url
        self._pool = _Pool(driver, Credential(Identity(Role.OPERATOR), key, source))

    @classmethod
    def from_file(cls, url: str, path: str | os.PathLike[str]) -> Self:
        """Make an adapter with the key in a file written by ``elasticrun jobs --write-token FILE``.

        Raises:
            SettingsError: the file cannot be read, or does not hold a key.
            RendezvousProtocolError: the URL is malformed.
        """
        return cls(url, read_operator_key(Path(path)), source=f"the file {path}")

    def send(self, *args: Any, **options: Any) -> requests.Response:
        """Send a request.

        Raises:
            UnprovenError: the server there is not the driver, or does not know this key; nothing was sent.
        """
        try:
            return super().send(*args, **options)
        except RendezvousError as error:
            raise UnprovenError(f"cannot contact the driver at {self.url}: {error}") from error

    def get_connection(self, url: str | bytes, proxies: Mapping[str, str] | None = None) -> HTTPConnectionPool:
        """Return the driver's connection pool; called by requests before 2.32."""
        return self._pool

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> HTTPConnectionPool:
        """Return the driver's connection pool."""
        return self._pool

    def cert_verify(self, *args: Any, **options: Any) -> None:
        """Do nothing: no authority vouches for a driver's certificate."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self._pool.close()


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, driver: DriverUrl, credential: Credential, **options: Any) -> None:
        super().__init__(*args, **options)
        self._driver, self._credential = driver, credential

    def connect(self) -> None:
        limit = self.timeout if isinstance(self.timeout, int | float) else _CONNECT_S
        self.sock = connect(self._driver, self._credential, timeout_s=limit)


class _Pool(HTTPConnectionPool):
    # urllib3 handles neither TLS nor certificates here.
    ConnectionCls = _Connection

    def __init__(self, driver: DriverUrl, credential: Credential) -> None:
        super().__init__(*driver.address, driver=driver, credential=credential)
