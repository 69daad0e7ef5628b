"""A job's driver as registered in etcd: its identity, and where it listens. Its agents look there.

Owns the key and its format. The key is attached to a lease, so it exists as long as its driver renews that. Nothing in
it is secret: every process that may read the key may know all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver import codec
from elastic_driver.codec import Count
from elastic_driver.etcd.client import EtcdClient, EtcdError
from elastic_driver.etcd.messages import KeyValue
from elastic_driver.etcd.place import EtcdPlace


@dataclass(frozen=True, slots=True)
class RegisteredDriver:
    """A driver, as far as it has registered itself yet.

    Attributes:
        job: the job that it drives, or is about to.
        machine: its name, for messages.
        process: on that machine (:mod:`elastic_driver.system.process_name`); "" if the system does not say.
        epoch: of the driver; 0 before it has the job.
        name: distinguishes it from all other drivers; "" likewise.
        urls: where it listens, ``https://HOST:PORT``; none before it does.
        fingerprint: of its certificate, SHA-256 in hexadecimal digits; "" likewise.
        lease_s: how long the key stays after its driver has died, seconds; 0 if not known.
    """

    job: str
    machine: str
    process: str
    epoch: Count = 0
    name: str = ""
    urls: tuple[str, ...] = ()
    fingerprint: str = ""
    lease_s: Count = 0


def driver_key(place: EtcdPlace) -> str:
    """Return the key's name. The driver that holds this key has the job, for as long as it holds it."""
    return f"{place.prefix}/driver"


def encode(there: RegisteredDriver) -> bytes:
    """Return the key's value."""
    return codec.encode(RegisteredDriver, there)


def decode(value: bytes) -> RegisteredDriver:
    """Reverse :func:`encode`.

    Raises:
        CodecError: it was written by another program, or by another version.
    """
    return codec.decode(RegisteredDriver, value)


def driver_there(client: EtcdClient, place: EtcdPlace) -> RegisteredDriver | None:
    """Return the driver that has the job now; None if there is none.

    Raises:
        EtcdError: etcd does not answer, rejects the request, or another program has written there.
    """
    return parse_driver(client.range(driver_key(place)).found)


def parse_driver(found: Sequence[KeyValue]) -> RegisteredDriver | None:
    """Parse what etcd has at that key; None for nothing.

    Raises:
        EtcdError: another program has written there.
    """
    if not found:
        return None
    try:
        return decode(found[0].value)
    except codec.CodecError as error:
        raise EtcdError(
            f"the value of key {found[0].key} was not written by a driver of this version: {error}"
        ) from error
