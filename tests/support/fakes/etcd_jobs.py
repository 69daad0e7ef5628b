"""Drivers that have a journal in etcd, made up: for the fake in this process, and for the real one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic_driver.etcd.client import EtcdClient
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.sealed import Secret
from elastic_driver.journal.etcd_lock import EtcdLock
from elastic_driver.journal.etcd_records import read_records
from elastic_driver.journal.etcd_store import EtcdStore

SECRET = "a secret of a job"


@dataclass
class Writer:
    """A driver that has the lock, and writes.

    Attributes:
        lock: its lock.
        store: where it writes.
        doubts: whether the lock was in doubt, each time that it was told to look.
        doubted: set when it is told of a doubt.
        lost: set when it is told that the lock is lost.
    """

    lock: EtcdLock
    store: EtcdStore
    doubts: list[bool] = field(default_factory=list)
    doubted: threading.Event = field(default_factory=threading.Event)
    lost: threading.Event = field(default_factory=threading.Event)

    def begin(self, body: bytes) -> None:
        """As the journal does it."""
        self.store.look()
        self.store.begin(body)

    def append(self, body: bytes) -> None:
        """Likewise."""
        self.store.look()
        self.store.append(body)

    def _told(self) -> None:
        self.doubts.append(self.lock.is_in_doubt)
        self.doubted.set()


@contextlib.contextmanager
def writer(place: EtcdPlace, job_id: str = "0123", *, secret: str = SECRET) -> Iterator[Writer]:
    """A driver that has the job while this lasts."""
    lock = EtcdLock.take(place, job_id)
    with EtcdClient(place) as client:
        made = Writer(lock, EtcdStore(lock, Secret(secret, place.prefix), client))
        lock.on_doubt, lock.on_lost = made._told, made.lost.set
        try:
            yield made
        finally:
            lock.release()


def bodies(place: EtcdPlace, *, secret: str = SECRET) -> list[bytes] | None:
    """What a reader finds."""
    with EtcdClient(place) as client:
        read = read_records(client, place, Secret(secret, place.prefix))
    return None if read is None else read.bodies


def until(holds: Callable[[], object]) -> None:
    """Blocks until something is so that no event tells of."""
    waits = threading.Event()
    while not holds():
        waits.wait(0.01)
