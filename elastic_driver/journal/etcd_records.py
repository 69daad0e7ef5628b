"""The records of a journal in etcd: their keys, their pieces, and which of them are valid.

    PREFIX/driver                           the job's driver: the lock
    PREFIX/head                             the valid generation
    PREFIX/records/GENERATION/NUMBER        pieces of records, sealed; both numbers have twenty digits
    PREFIX/ended                            the end of the job, for drivers that stand by

Owns their format, and reads them. A piece is a byte that says whether it is the last one of its record, and a part of
the record. The pieces of a generation are numbered from 1, without a gap. A record without a last piece was being
written, and is not valid; but the first one of a generation is complete before the generation becomes valid.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import NamedTuple

from elastic_driver import codec
from elastic_driver.codec import Count
from elastic_driver.etcd.client import EtcdClient, EtcdError, EtcdRefusedError
from elastic_driver.etcd.driver_record import driver_key
from elastic_driver.etcd.messages import Get, KeyValue, end_of
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.sealed import OVERHEAD, Secret, UnsealError
from elastic_driver.journal.file import MOST_BODY
from elastic_driver.journal.folder import JournalError

# etcd accepts 1.5 MiB in one request (--max-request-bytes), including the keys and its own overhead.
PIECE_BYTES = 512 << 10
AT_ONCE = 2
"""The most pieces in one transaction."""
_LAST, _GOES_ON = b"\0", b"\1"
# An answer with 64 pieces of the largest size has 43 MiB in JSON.
_PAGE = 64
# google/rpc/code.proto: resource exhausted, if an answer is too large for the gateway; out of range, if the revision to
# read was compacted away meanwhile.
_TOO_LARGE, _COMPACTED = 8, 11
_TRIES = 5
# The format of our numbers. A number larger than any possible one is not ours.
_NUMBER = re.compile(r"0{5}[0-9]{15}")


@dataclass(frozen=True, slots=True)
class Head:
    """The valid generation.

    Attributes:
        generation: its number.
        job: the job of these records.
        key: the name of the secret with which it is sealed.
        driver: the id of the driver that wrote it, as in its lock.
    """

    generation: Count
    job: str
    key: str
    driver: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job."""

    job: str
    exit_code: int


class Found(NamedTuple):
    """The head, and its mod_revision; None and 0 if there is none."""

    head: Head | None = None
    revision: int = 0


def head_key(place: EtcdPlace) -> str:
    """Return the key of the head."""
    return f"{place.prefix}/head"


def ended_key(place: EtcdPlace) -> str:
    """Return the key of the job's end."""
    return f"{place.prefix}/ended"


def records_key(place: EtcdPlace) -> str:
    """Return the prefix of the keys of all records."""
    return f"{place.prefix}/records/"


def generation_key(place: EtcdPlace, generation: int) -> str:
    """Return the prefix of the keys of a generation."""
    return f"{records_key(place)}{generation:020}/"


def generation_in(key: str, place: EtcdPlace) -> int:
    """Return the generation of a piece; 0 if the key is not ours."""
    number = key.removeprefix(records_key(place)).partition("/")[0]
    return int(number) if _NUMBER.fullmatch(number) else 0


def piece_key(place: EtcdPlace, generation: int, number: int) -> str:
    """Return the key of a piece."""
    return f"{generation_key(place, generation)}{number:020}"


def pieces_of(body: bytes) -> list[bytes]:
    """Split a record into pieces."""
    parts = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    return [_GOES_ON + part for part in parts[:-1]] + [_LAST + parts[-1]]


def parse_head(found: tuple[KeyValue, ...], place: EtcdPlace) -> Found:
    """Parse the value of the head's key.

    Raises:
        JournalError: it was not written by this package.
    """
    if not found:
        return Found()
    try:
        return Found(codec.decode(Head, found[0].value), found[0].mod_revision)
    except codec.CodecError as error:
        raise JournalError(f"cannot read {place}: its head is not a journal's ({error})") from None


def parse_ended(found: tuple[KeyValue, ...]) -> Ended | None:
    """Parse the value of the end's key. A value that was not written by this package is ignored."""
    with contextlib.suppress(codec.CodecError):
        for each in found:
            return codec.decode(Ended, each.value)
    return None


def check_key(head: Head, place: EtcdPlace, key_name: str, *, is_driven: bool, ended: Ended | None = None) -> None:
    """Check that a secret can unseal the records.

    Args:
        head: the head of the records.
        place: the place in etcd.
        key_name: the name of the secret.
        is_driven: whether a driver has the job.
        ended: the last recorded end.

    Raises:
        JournalError: they are sealed with another secret.
    """
    if head.key == key_name:
        return
    what, remove = "", f"etcdctl del --prefix {place.prefix}/"
    if not is_driven and ended is not None and ended.job == head.job:
        what = f" Job {head.job} has ended with exit code {ended.exit_code}. To start another job there: {remove}"
    elif not is_driven:
        what = (
            f" It cannot be read without that key. To abandon job {head.job}, whose workers may still be running: "
            f"{remove}"
        )
    raise JournalError(
        f"cannot read {place}: it is sealed with another key: is --journal-key the key of this job?{what}"
    )


class Read(NamedTuple):
    """The valid records.

    Attributes:
        bodies: the bodies of all of them.
        is_driven: whether a driver had the job then.
    """

    bodies: list[bytes]
    is_driven: bool


def read_records(client: EtcdClient, place: EtcdPlace, secret: Secret, *, is_locked: bool = False) -> Read | None:
    """Read the valid records; None for nothing.

    Blocks for as long as etcd needs for each page of them.

    Args:
        client: the client for the requests.
        place: the place in etcd.
        secret: the secret with which they are sealed.
        is_locked: whether this process has their lock: then no other driver has the job.

    Raises:
        OSError: etcd does not respond, or rejects the request.
        JournalError: they are damaged, or cannot be unsealed.
    """
    error: EtcdError | None = None
    for _ in range(_TRIES):
        read = client.txn([], [Get(head_key(place)), Get(driver_key(place)), Get(ended_key(place))])
        head = parse_head(read.found[0], place).head
        if head is None:
            return None
        is_driven = bool(read.found[1]) and not is_locked
        check_key(head, place, secret.name, is_driven=is_driven, ended=parse_ended(read.found[2]))
        try:
            pieces = _pieces(client, place, head.generation, read.revision)
            return Read(_bodies(pieces, place, secret, head.generation), is_driven)
        except EtcdRefusedError as refused:
            if refused.code != _COMPACTED:
                raise
            error = refused
    assert error is not None
    raise error


def _pieces(client: EtcdClient, place: EtcdPlace, generation: int, revision: int) -> list[KeyValue]:
    """Read all pieces of a generation as of a revision, whatever its driver does meanwhile."""
    start = generation_key(place, generation)
    end, limit = end_of(start), _PAGE
    pieces: list[KeyValue] = []
    while True:
        try:
            page = client.range(start, end, limit=limit, revision=revision)
        except EtcdRefusedError as error:
            if error.code != _TOO_LARGE or limit == 1:
                raise
            limit //= 2
            continue
        pieces += page.found
        if not page.more:
            return pieces
        start = f"{pieces[-1].key}\0"


def _bodies(pieces: list[KeyValue], place: EtcdPlace, secret: Secret, generation: int) -> list[bytes]:
    seal = secret.seal(str(generation))
    bodies: list[bytes] = []
    body = bytearray()
    for number, piece in enumerate(pieces, 1):
        if piece.key != piece_key(place, generation, number):
            raise JournalError(f"cannot read {place}: it is damaged: piece {number} of its records is missing")
        try:
            data = seal.unseal(piece.value, piece.key)
        except UnsealError as error:
            raise JournalError(f"cannot read {place}: it is damaged at {piece.key}: {error}") from None
        body += data[1:]
        if len(body) > MOST_BODY:
            raise JournalError(f"cannot read {place}: it is damaged: a record has more than {MOST_BODY} bytes")
        if data[:1] == _LAST:
            bodies.append(bytes(body))
            body.clear()
    if not bodies:
        raise JournalError(f"cannot read {place}: it is damaged: its first record is missing")
    return bodies


def weight(pieces: list[bytes]) -> int:
    """Return the approximate number of bytes that these take in etcd."""
    return sum(len(piece) + OVERHEAD for piece in pieces)
