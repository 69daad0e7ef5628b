"""``HTTPStore``: a ``torch.distributed.Store`` whose keys are in a rendezvous server.

Owns torch's interface of a Store: names, arguments, the classes and texts of errors (those of TCPStore). The requests
are in :mod:`elastic_driver.rendezvous.store_client`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic_driver.errors import RendezvousClosedError, RendezvousError, RendezvousProtocolError, SettingsError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, member
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS, PATIENCE_S
from elastic_driver.rendezvous.store_client import StoreClient
from elastic_driver.rendezvous.store_messages import StoreOp, number_in
from elastic_driver.rendezvous.token_file import ENV_TOKEN_FILE, read_token
from elastic_driver.torch_private.groups import c10d

_TIMEOUT = timedelta(seconds=300)  # torch's own

# A process group, or a PrefixStore, refers only to a Store's C++ part. When the Python part is collected, its methods
# are gone, and the group fails with "Not implemented".
_alive: dict[RendezvousClient, list[HTTPStore]] = {}
_lock = threading.Lock()  # guards _alive


class HTTPStore(c10d.Store):
    """Keys and values that all processes of a job share, for ``init_process_group(store=...)``.

    Without a URL, its server is that of the job that started this process (``elasticrun``); with one, it is
    ``elasticrun rendezvous``. May be used by several threads at once, and by a forked child.

    Args:
        url: of ``elasticrun rendezvous``, as it prints it; ``HOST:PORT`` suffices if its token is known.
        scope: Stores of one scope share their keys, apart from all others. Gloo hangs on keys of an earlier group: give
            each group its own scope.
        timeout: the default limit for ``get``, ``wait``, ``queue_pop`` and ``barrier``.
        token_file: with the service's token; by default the variable ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE.
        patience_s: how long to retry a server that does not answer, seconds.
        client: sends the requests, instead of all that.
        is_kept: whether to keep the Store until it is closed, even without references.

    Raises:
        SettingsError: there is no URL, or no token can be read.
        RendezvousError: the URL is invalid.
    """

    timeout: timedelta  # the base class's, which its stub does not name

    def __init__(
        self,
        url: str | None = None,
        *,
        scope: str = "",
        timeout: timedelta = _TIMEOUT,
        token_file: str | os.PathLike[str] | None = None,
        patience_s: float = PATIENCE_S,
        client: RendezvousClient | None = None,
        is_kept: bool = True,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._owned = client is None
        self._connections = client or _client_for(url, token_file, os.environ, patience_s)
        self._scope = scope
        self._client = StoreClient(self._connections, scope)
        if is_kept:
            with _lock:
                _alive.setdefault(self._connections, []).append(self)

    # --- one key -----------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(StoreOp.SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key. Blocks until the key exists.

        Raises:
            DistStoreError: it does not exist in time.
        """
        return self._wait(StoreOp.GET, [key], None)[0]

    def add(self, key: str, value: int) -> int:
        """Add to a key, with 0 for a missing one. Returns the sum."""
        (total,) = self._ask(StoreOp.ADD, key.encode(), str(int(value)).encode())
        return number_in(total, "the sum")

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or is missing and "" is expected. Returns its value afterwards."""
        return self._ask(StoreOp.COMPARE_SET, key.encode(), _bytes(expected_value), _bytes(desired_value))[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value; a missing key is set."""
        self._ask(StoreOp.APPEND, key.encode(), _bytes(value))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it existed."""
        return self._ask(StoreOp.DELETE, key.encode())[0] == b"1"

    # --- several keys: one request each ------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys. Blocks until all exist.

        Raises:
            DistStoreError: they do not exist in time.
        """
        return list(self._wait(StoreOp.GET, keys, None))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set keys atomically."""
        if len(keys) != len(values):
            raise dist.DistStoreError("multiSet keys and values vectors must be of same size")
        self._ask(
            StoreOp.SET,
            *(part for key, value in zip(keys, values, strict=True) for part in (key.encode(), _bytes(value))),
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: they do not exist in time.
        """
        self._wait(StoreOp.WAIT, keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist now."""
        return self._ask(StoreOp.CHECK, *(key.encode() for key in keys))[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask(StoreOp.COUNT)[0])

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [key.decode(errors="surrogateescape") for key in self._ask(StoreOp.KEYS)]

    # C++ (a PrefixStore around this) looks up the two under these names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # --- queues ------------------------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""
        self._ask(StoreOp.PUSH, key.encode(), _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # noqa: FBT001, FBT002 (torch's signature)
        """Remove and return the first value of a queue. With ``block``, waits until there is one.

        Raises:
            QueueEmptyError: the queue is empty, and ``block`` is false.
            DistStoreError: the queue stays empty until the time limit.
        """
        if block:
            return self._wait(StoreOp.POP, [key], None)[0]
        parts = self._translated(StoreOp.POP, [key.encode()], 0.0)
        if parts is None:
            raise dist.QueueEmptyError("queue is empty")
        return parts[0]

    def queue_len(self, key: str) -> int:
        """Return the length of a queue."""
        return int(self._ask(StoreOp.LENGTH, key.encode())[0])

    # --- all ---------------------------------------------------------------------------------------------------------

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until ``world_size`` callers have called it with this key.

        Raises:
            DistStoreError: they have not done so in time.
        """
        last = f"{key}/last_member"  # as in torch's barrier, which others may use in a PrefixStore
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(last, "1")
        limit = self.timeout if timeout is None else timeout
        if self._translated(StoreOp.WAIT, [last.encode()], limit.total_seconds()) is None:
            raise dist.DistStoreError(f"barrier timeout after {_ms(limit)}ms, key: {key}")

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get, multi_set and queues are supported."""
        return True

    def clone(self) -> HTTPStore:
        """Return another Store of the same keys, with a timeout of its own."""
        other = HTTPStore(scope=self._scope, timeout=self.timeout, client=self._connections)
        return other

    def drop(self) -> None:
        """Delete all keys of this scope from the server."""
        self._ask(StoreOp.DROP)

    def close(self) -> None:
        """Close the connections, also of clones: waiting calls, and later ones, raise DistNetworkError.

        Must not be called while a process group uses the Store; it may be omitted.
        """
        with _lock:
            _alive.pop(self._connections, None)
        if self._owned:
            self._connections.close()

    def _wait(self, op: StoreOp, keys: Sequence[str], timeout: timedelta | None) -> Sequence[bytes]:
        limit = self.timeout if timeout is None else timeout
        parts = self._translated(op, [key.encode() for key in keys], limit.total_seconds())
        if parts is None:
            named = ", ".join(f"/{key}" for key in keys)
            raise dist.DistStoreError(f"wait timeout after {_ms(limit)}ms, keys: {named}")
        return parts

    def _ask(self, op: StoreOp, *parts: bytes) -> Sequence[bytes]:
        answer = self._translated(op, parts, 0.0)
        assert answer is not None  # without a wait there is always an answer
        return answer

    def _translated(self, op: StoreOp, parts: Sequence[bytes], wait_s: float) -> Sequence[bytes] | None:
        with _torch_errors():
            return self._asked(op, parts, max(0.0, wait_s))

    def _asked(self, op: StoreOp, parts: Sequence[bytes], wait_s: float) -> Sequence[bytes] | None:
        return self._client.ask(op, parts, wait_s=wait_s)


def _client_for(
    url: str | None, token_file: str | os.PathLike[str] | None, environ: Mapping[str, str], patience_s: float
) -> RendezvousClient:
    if url is not None:
        return service_client(url, token_file or environ.get(ENV_TOKEN_FILE), patience_s=patience_s)
    url = environ.get(ENV_RENDEZVOUS)
    if url is None:
        raise SettingsError(
            f"cannot find a rendezvous: elasticrun did not start this process ({ENV_RENDEZVOUS} is not set); pass "
            "the address of an elasticrun rendezvous service"
        )
    return RendezvousClient(url, Credential.of_worker(environ), patience_s=patience_s)


def service_client(
    address: str, token_file: str | os.PathLike[str] | None, *, patience_s: float = PATIENCE_S
) -> RendezvousClient:
    """Create a client of ``elasticrun rendezvous``.

    Args:
        address: ``HOST:PORT``, or its URL, which may include its certificate's fingerprint.
        token_file: with its token; None for a service without one.
        patience_s: how long to retry, seconds.

    Raises:
        SettingsError: the token cannot be read.
        RendezvousError: the address is invalid.
    """
    url = address if "://" in address else f"https://{address}"
    token = read_token(Path(token_file)) if token_file else ""
    return RendezvousClient(url, member(token, f"the file {token_file}" if token_file else ""), patience_s=patience_s)


@contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except RendezvousClosedError as error:
        raise dist.DistNetworkError(str(error)) from error
    except RendezvousProtocolError as error:
        raise dist.DistStoreError(str(error)) from error
    except RendezvousError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _ms(limit: timedelta) -> int:
    return int(limit.total_seconds() * 1000)
