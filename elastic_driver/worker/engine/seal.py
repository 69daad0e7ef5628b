"""How the ranks of a job authenticate to each other in one round.

Owns the use of their shared key in Python: the purposes of connections (the native module authenticates them), and the
seals on pickles. docs/decisions/0016 explains it.
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
        key: shared by the ranks of the job; empty if no driver has started this process.
        round_id: seals of another round are not accepted in this one.
    """

    key: bytes = field(repr=False)
    round_id: int

    def purpose(self, connection: str) -> str:
        """Return the purpose of a connection, as text to authenticate."""
        return f"round {self.round_id}: {connection}"

    def mark(self, payload: Payload, label: str, place: Place) -> bytes:
        """Compute SEAL_BYTES that require the key, and are valid for exactly this payload, label and place."""
        name = label.encode()
        mac = hmac.new(self.key, b"elastic_driver object\n", hashlib.sha256)
        mac.update(_HEAD.pack(self.round_id, place.process_set, place.rank, place.number, len(name)))
        mac.update(name)
        mac.update(payload)
        return mac.digest()

    def check(self, mark: Payload, computed: bytes, label: str, place: Place) -> None:
        """Compare the received seal with the one that this process has computed for the payload.

        Raises:
            HorovodInternalError: they differ: the payload must not be used at all.
        """
        if not hmac.compare_digest(mark, computed):
            raise HorovodInternalError(
                f"cannot use the object received as {label} from rank {place.rank} in round {self.round_id}: it "
                "is not sealed with this job's key, or belongs to another call"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Identifies a message of a round.

    Attributes:
        process_set: the process set it is for.
        rank: its sender.
        number: how many of this label preceded it.
    """

    process_set: int
    rank: int
    number: int


NO_SEAL = Seal(b"", 0)
"""For a process alone, and for tests: it authenticates nothing."""
