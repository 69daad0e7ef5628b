"""What the ranks of a job prove to each other with, in one round.

Owns how the key that they share is used in Python: what connections are made for (the native module proves that), and
the seals on pickles. See docs/decisions/0016.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic_driver.errors import HorovodInternalError

SEAL_BYTES = hashlib.sha256().digest_size

Payload: TypeAlias = bytes | bytearray | memoryview

_HEAD = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class Seal:
    """The ranks' key in one round.

    Attributes:
        key: shared by the ranks of the job; empty where no driver has started this process.
        round_id: what was said in another round is not believed in this one.
    """

    key: bytes = field(repr=False)
    round_id: int

    def purpose(self, connection: str) -> str:
        """What a connection is made for."""
        return f"round {self.round_id}: {connection}"

    def mark(self, payload: Payload, label: str, place: Place) -> bytes:
        """SEAL_BYTES that nobody without the key can make, and that fit nothing else."""
        name = label.encode()
        mac = hmac.new(self.key, b"elastic_driver object\n", hashlib.sha256)
        mac.update(_HEAD.pack(self.round_id, place.process_set, place.rank, place.number, len(name)))
        mac.update(name)
        mac.update(payload)
        return mac.digest()

    def check(self, mark: Payload, computed: bytes, label: str, place: Place) -> None:
        """Compares what came with what this process has made of the payload.

        Raises:
            HorovodInternalError: they differ: the payload is not to be used at all.
        """
        if not hmac.compare_digest(mark, computed):
            raise HorovodInternalError(
                f"cannot use what came as {label} from rank {place.rank} in round {self.round_id}: it is not sealed "
                "with this job's key, or is of another call"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Which message of a round it is.

    Attributes:
        process_set: whose members it is for.
        rank: who sends it.
        number: how many of this label there were before.
    """

    process_set: int
    rank: int
    number: int


NO_SEAL = Seal(b"", 0)
"""For a process alone, and for tests: it proves nothing."""
