"""``HTTPStore``: a ``torch.distributed.Store`` whose keys are in a rendezvous server.

Owns what torch expects of a Store: names, arguments, the classes and texts of errors (those of TCPStore). What is asked
is said by :mod:`elastic_driver.rendezvous.store_client`.
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

# A process group, or a PrefixStore, refers to a Store's half in C++ only. When the half in Python is collected, what it
# defines is gone, and the group fails with "Not implemented".
_alive: dict[RendezvousClient, list[HTTPStore]] = {}
_lock = threading.Lock()  # guards _alive


class HTTPStore(c10d.Store):
    """Keys and values that all processes of a job share, for ``init_process_group(store=...)``.

    Without an URL it is that of the job which has started this process (``elasticrun``); else that of
    ``elasticrun rendezvous``. May be used by several threads at once, and after a fork in the child too.

    Args:
        url: of ``elasticrun rendezvous``, as it prints it; ``HOST:PORT`` will do where its token is known.
        scope: Stores of one scope share their keys; others know nothing of them. Gloo hangs over the keys of an earlier
            group: give each its own.
        timeout: how long ``get``, ``wait``, ``queue_pop`` and ``barrier`` wait, unless they are told.
        token_file: with the service's token; the variable ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE where it is not given.
        patience_s: how long a server that does not answer is tried again, seconds.
        client: asks, in place of all that.
        is_kept: whether it lives until it is closed, though nobody here refers to it any more.

    Raises:
        SettingsError: there is no URL, or no token can be read.
        RendezvousError: it is none.
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
        """Sets a key."""
        self._ask(StoreOp.SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key. Blocks until it is there.

        Raises:
            DistStoreError: it is not there in time.
        """
        return self._wait(StoreOp.GET, [key], None)[0]

    def add(self, key: str, value: int) -> int:
        """Adds to a key, which counts as 0 where it is not there. Returns the sum."""
        (total,) = self._ask(StoreOp.ADD, key.encode(), str(int(value)).encode())
        return number_in(total, "the sum")

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Sets a key if it has the expected value, or is not there and "" is expected. Returns its value then."""
        return self._ask(StoreOp.COMPARE_SET, key.encode(), _bytes(expected_value), _bytes(desired_value))[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Adds to the end of a value; a key that is not there is set."""
        self._ask(StoreOp.APPEND, key.encode(), _bytes(value))

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns whether it was there."""
        return self._ask(StoreOp.DELETE, key.encode())[0] == b"1"

    # --- several keys: one request each ------------------------------------------------------------------------------

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys. Blocks until all are there.

        Raises:
            DistStoreError: they are not there in time.
        """
        return list(self._wait(StoreOp.GET, keys, None))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets keys, all at once."""
        if len(keys) != len(values):
            raise dist.DistStoreError("multiSet keys and values vectors must be of same size")
        self._ask(
            StoreOp.SET,
            *(part for key, value in zip(keys, values, strict=True) for part in (key.encode(), _bytes(value))),
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Blocks until all keys are there.

        Raises:
            DistStoreError: they are not there in time.
        """
        self._wait(StoreOp.WAIT, keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        return self._ask(StoreOp.CHECK, *(key.encode() for key in keys))[0] == b"1"

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask(StoreOp.COUNT)[0])

    def list_keys(self) -> list[str]:
        """All keys."""
        return [key.decode(errors="surrogateescape") for key in self._ask(StoreOp.KEYS)]

    # Under these names C++ (a PrefixStore around this) looks for the two.
    deleteKey = delete_key
    getNumKeys = num_keys

    # --- queues ------------------------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Puts a value at the end of a queue."""
        self._ask(StoreOp.PUSH, key.encode(), _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # noqa: FBT001, FBT002 (torch's signature)
        """Takes the first value of a queue. Blocks until there is one, unless told otherwise.

        Raises:
            QueueEmptyError: there is none, and it may not block.
            DistStoreError: there is none in time.
        """
        if block:
            return self._wait(StoreOp.POP, [key], None)[0]
        parts = self._translated(StoreOp.POP, [key.encode()], 0.0)
        if parts is None:
            raise dist.QueueEmptyError("queue is empty")
        return parts[0]

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return int(self._ask(StoreOp.LENGTH, key.encode())[0])

    # --- all ---------------------------------------------------------------------------------------------------------

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Blocks until so many have called it with this key.

        Raises:
            DistStoreError: they have not in time.
        """
        last = f"{key}/last_member"  # the names that torch's own barrier has: a PrefixStore may stand around one of us
        if self.add(f"{key}/num_members", 1) == world_size:
            self.set(last, "1")
        limit = self.timeout if timeout is None else timeout
        if self._translated(StoreOp.WAIT, [last.encode()], limit.total_seconds()) is None:
            raise dist.DistStoreError(f"barrier timeout after {_ms(limit)}ms, key: {key}")

    def has_extended_api(self) -> bool:
        """Whether append, multi_get, multi_set and queues can be used: always."""
        return True

    def clone(self) -> HTTPStore:
        """Another Store of the same keys, with a timeout of its own."""
        other = HTTPStore(scope=self._scope, timeout=self.timeout, client=self._connections)
        return other

    def drop(self) -> None:
        """Has the server forget all keys of this scope."""
        self._ask(StoreOp.DROP)

    def close(self) -> None:
        """Closes the connections, also of clones: calls that wait, and later ones, raise DistNetworkError.

        To be called when no process group uses it any more; or never.
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
        assert answer is not None  # nothing is waited for
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
            f"cannot find a rendezvous: elasticrun has not started this process ({ENV_RENDEZVOUS} is not set); give "
            "the address of one that elasticrun rendezvous serves"
        )
    return RendezvousClient(url, Credential.of_worker(environ), patience_s=patience_s)


def service_client(
    address: str, token_file: str | os.PathLike[str] | None, *, patience_s: float = PATIENCE_S
) -> RendezvousClient:
    """Asks ``elasticrun rendezvous``.

    Args:
        address: ``HOST:PORT``, or its URL, which may have its certificate's fingerprint.
        token_file: with its token; None for a service without one.
        patience_s: how long it is tried again.

    Raises:
        SettingsError: the token cannot be read.
        RendezvousError: that is no address.
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
