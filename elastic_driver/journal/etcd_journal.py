"""A journal in etcd that this process has locked: a HeldJournal.

Owns its lock and its secret together. Imported only if needed: the code that unseals its records takes a tenth of a
second to import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from elastic_driver.errors import in_words
from elastic_driver.etcd.client import EtcdClient, EtcdError
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.sealed import Secret
from elastic_driver.journal.entries import Closed
from elastic_driver.journal.etcd_lock import EtcdLock
from elastic_driver.journal.etcd_records import read_records
from elastic_driver.journal.etcd_store import EtcdStore
from elastic_driver.journal.folder import JournalError, Signature
from elastic_driver.journal.past import Recorded, read_bodies
from elastic_driver.journal.store import Store
from elastic_driver.rendezvous.token_file import JOURNAL_KEY, read_token
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.settings import Settings
from elastic_driver.system.parent import Interruption, had_stood_by, was_begun


class EtcdJournal:
    """The held journal of a place in etcd.

    Attributes:
        lock: the lock of this process; its driver publishes its address there, and is notified there of doubts.
    """

    def __init__(self, lock: EtcdLock, secret: Secret) -> None:
        self.lock = lock
        self._secret = secret
        self._is_handed_on = False
        self._client = EtcdClient(lock.place)  # for the store
        self.last = lock.last
        self.waited_for = lock.waited_for

    @classmethod
    def take(
        cls,
        place: EtcdPlace,
        secret: Secret,
        job_id: str,
        *,
        stands_by: bool = False,
        patience_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        look: Interruption = lambda *, drives: None,
    ) -> Self:
        """Take its lock, as :meth:`EtcdLock.take` does.

        Args:
            place: the place in etcd.
            secret: the secret with which its records are sealed.
            job_id, stands_by, patience_s, on_wait, look: as there.

        Raises:
            JournalHeldError: a living process has it.
            JournalError: etcd does not respond, or rejects the request, or the content is not a journal's, or, detected
                while standing by, is sealed with another key.
            SettingsError: as EtcdClient raises it.
        """
        try:
            lock = EtcdLock.take(
                place,
                job_id,
                key_name=secret.name,
                stands_by=stands_by,
                patience_s=patience_s,
                on_wait=on_wait,
                look=look,
            )
        except EtcdError as error:
            raise JournalError(f"cannot use {place} (--journal): {in_words(error)}") from error
        return cls(lock, secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def name(self) -> str:
        """The place in etcd, for messages and commands."""
        return str(self.lock.place)

    @property
    def only_goes_on(self) -> bool:
        """Whether this driver may only resume a job, as it has stood by for one."""
        return self.lock.was_standby or had_stood_by()

    @property
    def is_of_this_command(self) -> bool:
        """Whether the content was written by a driver that the parent of this one had started before it."""
        return was_begun(None)

    def release(self) -> None:
        """Release the lock. Nothing more is written: a pending write gets no answer."""
        self._client.close()
        if not self._is_handed_on:
            self._is_handed_on = True
            self.lock.release()

    def handed_on(self) -> Self:
        """Return the journal, still locked, for another driver of this process: this one never releases it."""
        self._is_handed_on = True
        other = type(self)(self.lock, self._secret)
        other.last, other.waited_for = Signature(), ""
        return other

    def is_of(self, job_id: str) -> None:
        """Record which job is in it, for messages."""
        self.lock.is_of(job_id)

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code, for drivers that stand by."""
        self.lock.has_ended(exit_code)

    def settings(self, settings: Settings) -> Settings:
        """Return the settings unchanged: others read the credentials in the place by themselves."""
        return settings

    def read(self) -> Recorded | Closed | None:
        """Return its content; None for none."""
        return read_etcd(self.lock.place, self._secret, is_locked=True)

    def check(self, found: Recorded) -> None:
        """Do nothing: the process with the lease drives, and agents find it by that."""

    def store(self) -> Store:
        """Return the store of its records."""
        return EtcdStore(self.lock, self._secret, self._client)


def in_etcd(place: JournalPlace) -> tuple[EtcdPlace, Secret]:
    """Return where such a journal is, and its secret. Blocks while a pipe with the key is written.

    Raises:
        SettingsError: the URL, a variable of etcd's client, or a file that one of them or the user names is invalid.
    """
    assert place.key is not None, "it goes with the URL"
    there = EtcdPlace.parse(place.url, os.environ)
    return there, Secret(read_token(place.key, JOURNAL_KEY), there.prefix)


def read_etcd(place: EtcdPlace, secret: Secret, *, is_locked: bool = False) -> Recorded | Closed | None:
    """Read a job; None for nothing. Needs no lock.

    Args:
        place, secret, is_locked: as for :func:`~elastic_driver.journal.etcd_records.read_records`.

    Raises:
        JournalError: etcd does not respond, or rejects the request; or as
            :func:`~elastic_driver.journal.past.read_job`.
    """
    try:
        with EtcdClient(place) as client:
            read = read_records(client, place, secret, is_locked=is_locked)
    except EtcdError as error:
        raise JournalError(f"cannot read {place}: {in_words(error)}") from error
    if read is None:
        return None
    found = read_bodies(read.bodies, str(place))
    return replace(found, is_driven=read.is_driven) if isinstance(found, Recorded) else found
