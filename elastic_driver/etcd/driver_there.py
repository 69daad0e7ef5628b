"""Who drives a job, as the key ``driver`` says it: the lock that drivers have of a journal in etcd.

Owns the form of that value. Agents read it to find the next driver; who may write it, and for how long it is there, is
:mod:`elastic_driver.journal.etcd_lock`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_driver.codec import CodecError, decode, encode

if TYPE_CHECKING:
    from elastic_driver.etcd.client import EtcdClient

KEY = "driver"


@dataclass(frozen=True, slots=True)
class DriverThere:
    """A driver that has the lock.

    Attributes:
        machine: its machine's name, for messages.
        process: which process it is (:mod:`elastic_driver.system.process_name`).
        job: which it drives; "" while that is not known.
        epoch: see Welcome; 0 while that is not known.
        name: of the driver, see Welcome.
        urls: where agents find it, to be tried in order; none while it does not listen.
        fingerprint: of its certificate.
    """

    machine: str
    process: str
    job: str = ""
    epoch: int = 0
    name: str = ""
    urls: tuple[str, ...] = ()
    fingerprint: str = ""

    @classmethod
    def read(cls, client: EtcdClient, prefix: str) -> DriverThere | None:
        """What is there; None for nothing. Blocks.

        Raises:
            OSError: etcd does not answer, or not with that.
        """
        there = client.get(f"{prefix}/{KEY}")
        return None if there is None else cls.of(there.value)

    @classmethod
    def of(cls, value: bytes) -> DriverThere:
        """Raises OSError for anything else."""
        try:
            return decode(cls, value)
        except CodecError as error:
            raise OSError(f"etcd has no driver's word there: {error}") from None

    def written(self) -> bytes:
        """The value that says so."""
        return encode(DriverThere, self)
