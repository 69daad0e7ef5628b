"""The store of a journal in etcd, for the driver that writes it. See Store.

Owns the numbers of generations and pieces, and the comparisons of each transaction: the lock, without which nothing is
written; and the head, so that records that somebody removes or replaces are written again from scratch, complete.

A generation's number is used only once by all drivers together: it is above all existing ones when a driver takes the
lock, and a driver never reuses one, whatever happened to it. For a request without an answer may be carried out late.
Its piece is then in a generation that is not valid, and is deleted with the next head. Nothing else is ever deleted,
and that compares the head first: so a late deletion never affects valid records.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from elastic_driver import codec
from elastic_driver.etcd.client import EtcdClient
from elastic_driver.etcd.driver_record import driver_key
from elastic_driver.etcd.messages import Compare, Delete, Get, Modified, Operation, Put, end_of
from elastic_driver.etcd.sealed import Seal, Secret
from elastic_driver.journal.etcd_lock import EtcdLock, LockLostError
from elastic_driver.journal.etcd_records import (
    AT_ONCE,
    Found,
    Head,
    generation_in,
    generation_key,
    head_key,
    parse_head,
    piece_key,
    pieces_of,
    records_key,
    weight,
)
from elastic_driver.journal.file import MOST_BODY
from elastic_driver.system.parent import has_begun


class EtcdStore:
    """A store under a lock that this process has. See Store.

    Args:
        lock: the lock.
        secret: the secret with which records are sealed.
        client: the client for the requests; used by nothing else from now on.
    """

    silence = "etcd does not answer"

    def __init__(self, lock: EtcdLock, secret: Secret, client: EtcdClient) -> None:
        self.name = str(lock.place)
        self._lock = lock
        self._place = lock.place
        self._secret = secret
        self._client = client
        self._head = lock.head
        self._generation = 0  # the last one that was begun, whatever happened to it
        self._created = 0  # of the lock, when it was
        self._seal: Seal | None = None
        self._number = 0  # of the last piece
        self._size = 0

    @property
    def size(self) -> int:
        """The number of bytes of the valid records, about."""
        return self._size

    def look(self) -> None:
        """Check the lock. A lost one is taken again, if no other process has had it. See Store."""
        if self._lock.is_lost:
            self.close()
            self._lock.take_again(self._is_ours)
        self._lock.check()

    def begin(self, body: bytes) -> None:
        """Replace all records by a first one. See Store."""
        _check(body)
        self.close()
        # It is unknown whether a transaction without an answer was carried out.
        self._refresh_head()
        created = self._lock.created
        if created != self._created:
            self._generation = max(self._generation, self._last_leftover())
            self._created = created
        self._generation = generation = self._next_generation()
        seal = self._secret.seal(str(generation))
        pieces = pieces_of(body)
        for number, piece in enumerate(pieces, 1):
            key = piece_key(self._place, generation, number)
            self._txn([], [Put(key, seal.seal(piece, key))])
        self._move_head(generation)
        self._seal, self._number, self._size = seal, len(pieces), weight(pieces)

    def append(self, body: bytes) -> None:
        """Append a record. See Store."""
        _check(body)
        assert self._seal is not None
        pieces = pieces_of(body)
        puts = []
        for number, piece in enumerate(pieces, self._number + 1):
            key = piece_key(self._place, self._generation, number)
            puts.append(Put(key, self._seal.seal(piece, key)))
        # A large record needs several transactions: without its last piece it is not valid.
        for at in range(0, len(puts), AT_ONCE):
            if not self._txn([self._is_headed()], puts[at : at + AT_ONCE]):
                raise LockLostError("the journal's records were removed or replaced")
        self._number += len(pieces)
        self._size += weight(pieces)

    def close(self) -> None:
        """End appending to these records. See Store."""
        self._seal, self._size = None, 0

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code. See Store."""
        self._lock.has_ended(exit_code)

    def _next_generation(self) -> int:
        counts = 0 if self._head.head is None else self._head.head.generation
        return max(counts, self._generation) + 1

    def _last_leftover(self) -> int:
        """Return the last generation that a previous driver began without moving the head to it; 0 for none."""
        start = records_key(self._place)
        if self._head.head is not None:
            start = end_of(generation_key(self._place, self._head.head.generation))
        found = self._client.range(start, end_of(records_key(self._place)), keys_only=True).found
        return max((generation_in(each.key, self._place) for each in found), default=0)

    def _move_head(self, generation: int) -> None:
        """Make this generation the valid one, and delete all before it."""
        head = Head(generation, self._lock.there.job, self._secret.name, self._lock.driver)
        key, records = head_key(self._place), records_key(self._place)
        put = Put(key, codec.encode(Head, head))
        self._txn([self._is_headed()], [put, Delete(records, generation_key(self._place, generation))])
        self._refresh_head()
        if self._head.head != head:  # otherwise it succeeded, perhaps twice
            raise LockLostError("the journal's head was replaced")
        has_begun()

    def _refresh_head(self) -> None:
        """Read the head again.

        Raises:
            JournalError: it is not a head.
            OSError: etcd does not respond, or rejects the request.
        """
        self._head = parse_head(self._client.range(head_key(self._place)).found, self._place)

    def _is_ours(self, found: Found) -> bool:
        """Return whether a head is as this driver has left it, or found it; or is removed, which no driver does."""
        return found.head is None or found.head.driver == self._lock.driver or found.revision == self._head.revision

    def _is_headed(self) -> Compare:
        return Modified(head_key(self._place), self._head.revision)

    def _txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Write, if this process has the lock. Return whether the additional comparisons hold.

        Raises:
            LockLostError: it does not have the lock.
            LockInDoubtError, EtcdError: it is unknown whether it has.
        """
        self._lock.check()
        lock = self._lock.compare()
        outcome = self._client.txn([lock, *compares], operations, [Get(driver_key(self._place))])
        if not outcome.succeeded:
            there = outcome.found[0]
            if not there:
                raise self._lock.lost("its lease has expired, or its key was removed")
            if there[0].create_revision != lock.revision:
                raise self._lock.lost("another driver holds it")
        return outcome.succeeded


def _check(body: bytes) -> None:
    if len(body) > MOST_BODY:
        raise OSError(errno.EFBIG, f"a record has {len(body)} bytes; the maximum is {MOST_BODY}")
