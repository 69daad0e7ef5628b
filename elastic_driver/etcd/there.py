"""What a job's driver says of itself in etcd: who it is, and where it listens. Its agents look there.

Owns the key and its form. The key goes with a lease, so it is there as long as its driver says so. Whoever may read it
may know all that it says; nothing in it is secret.
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
class DriverThere:
    """A driver, as far as it has said so yet.

    Attributes:
        job: whose driver it is, or begins to be.
        machine: its name, for messages.
        process: which, on that machine (:mod:`elastic_driver.system.process_name`); "" where the system does not say.
        epoch: of the driver; 0 before it has the job.
        name: tells it from all other drivers; "" likewise.
        urls: where it listens, ``https://HOST:PORT``; none before it does.
        fingerprint: of its certificate, SHA-256 in hexadecimal digits; "" likewise.
        lease_s: for how long the key is there after its driver has died; 0 where that is not known.
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
    """Where it is. Whoever has this key, and as long as it has, drives the job."""
    return f"{place.prefix}/driver"


def encode(there: DriverThere) -> bytes:
    """What the key holds."""
    return codec.encode(DriverThere, there)


def decode(value: bytes) -> DriverThere:
    """The inverse of :func:`encode`.

    Raises:
        CodecError: nobody of ours has written it, or another version has.
    """
    return codec.decode(DriverThere, value)


def driver_there(client: EtcdClient, place: EtcdPlace) -> DriverThere | None:
    """The driver that has the job now; None where nobody has it.

    Raises:
        EtcdError: etcd does not answer, refuses, or somebody else has written there.
    """
    return parse_driver(client.range(driver_key(place)).found)


def parse_driver(found: Sequence[KeyValue]) -> DriverThere | None:
    """What etcd has at that key; None for nothing.

    Raises:
        EtcdError: somebody else has written there.
    """
    if not found:
        return None
    try:
        return decode(found[0].value)
    except codec.CodecError as error:
        raise EtcdError(f"what is at {found[0].key} is not of a driver of this version: {error}") from error
