"""Waiting for the lock of a journal in etcd that another process has: which processes are dead, and how long to wait.

Owns the checks in the meantime, and the messages to the user. :mod:`elastic_driver.journal.etcd_lock` takes the lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from elastic_driver.codec import CodecError
from elastic_driver.errors import in_words
from elastic_driver.etcd.client import EtcdClient, EtcdError
from elastic_driver.etcd.driver_record import RegisteredDriver, decode
from elastic_driver.etcd.messages import Created, Delete, KeyValue
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal.etcd_records import check_key, head_key, parse_head
from elastic_driver.journal.folder import JournalHeldError
from elastic_driver.system.parent import Interruption
from elastic_driver.system.process_name import ProcessName, pid_in
from elastic_driver.words import in_seconds

LEASE_S = 5
"""The requested lease; etcd grants a longer one if its elections take longer."""
# How often to check whether the key is gone.
_LOOK_S = 0.5
# A driver that has died on another machine has the key for the rest of its lease; a living one has it longer.
_LATER_S = 1.0


class Waiting:
    """The wait for a lock that another process has, for :meth:`EtcdLock.take`.

    Args:
        place, key_name, on_wait, look, stands_by: as there.

    Attributes:
        was_standby: whether it has waited for the end of a living driver.
        stood_by_for: the job of that driver; "" if unknown.
    """

    def __init__(
        self,
        place: EtcdPlace,
        key_name: str,
        on_wait: Callable[[str], None],
        look: Interruption,
        *,
        stands_by: bool,
    ) -> None:
        self._place, self._on_wait, self._look, self._stands_by = place, on_wait, look, stands_by
        self._key_name = key_name  # "" once it was found to be the job's
        self._told = ""
        self._is_silent = False  # etcd does not respond, and that was reported
        self._seen = 0
        self._until = 0.0
        self._dying_s = LEASE_S + _LATER_S
        self._back_until: float | None = None
        self.stood_by_for = ""
        self.was_standby = False

    def wait(self, client: EtcdClient, holder: KeyValue) -> None:
        """Wait a while.

        Raises:
            JournalHeldError: there is nothing to wait for.
            JournalError: this driver, which stands by, does not have the job's key.
            EtcdError: etcd does not respond, or rejects the request.
        """
        if self._is_silent:
            self._is_silent, self._told = False, ""  # the driver is reported again
        there = there_in(holder)
        process = None if there is None else ProcessName.parse(there.process)
        is_known = process is not None and process.is_of_this_place
        if is_known and process is not None and _is_dead(process):
            # Its lease continues.
            client.txn([Created(holder.key, holder.create_revision)], [Delete(holder.key)])
            return
        lease_s = there.lease_s if there is not None and there.lease_s else LEASE_S
        self._dying_s = lease_s + _LATER_S
        if holder.create_revision != self._seen:
            self._seen, self._until = holder.create_revision, time.monotonic() + self._dying_s
            self._back_until = None
        whom = f"job {there.job}" if there is not None and there.job else "another job"
        if self._stands_by:
            self.was_standby = True
            self.stood_by_for = "" if there is None else there.job
            self._check_key(client)
            self._tell(f"standing by: {whom} is driven by {_who(there)}")
        elif is_known or time.monotonic() > self._until:
            raise held(self._place, there)
        else:
            wait = in_seconds(self._dying_s)
            self._tell(f"{whom} is driven by {_who(there)}: waiting {wait} to see whether that driver is dead")
        self._look(drives=True)
        time.sleep(_LOOK_S)

    def is_over(self, client: EtcdClient) -> bool:
        """Return whether the free lock may be taken; otherwise wait a while.

        A driver that has stood by has nothing to take over if the job's records are gone, too: somebody has removed all
        keys, and their driver may be about to write them again. It must not find another one there.
        """
        if not self.stood_by_for:
            return True
        head = parse_head(client.range(head_key(self._place)).found, self._place).head
        if head is not None and head.job == self.stood_by_for:
            return True
        if self._back_until is None:
            self._back_until = time.monotonic() + self._dying_s
        if time.monotonic() >= self._back_until:
            return True
        self._look(drives=True)
        time.sleep(_LOOK_S)
        return False

    def wait_for_etcd(self, error: EtcdError) -> None:
        """Wait a while, for an etcd that does not respond, or that rejects requests that it has accepted before."""
        if not self._is_silent:
            self._is_silent = True
            what = "still standing by, waiting for etcd" if self.was_standby else "waiting for etcd"
            self._on_wait(f"{what}: {in_words(error)}")
        self._look(drives=self.was_standby)
        time.sleep(_LOOK_S)

    def _check_key(self, client: EtcdClient) -> None:
        """Check the key now, and not only when it is needed: there is no head before the job has begun."""
        if not self._key_name:
            return
        head = parse_head(client.range(head_key(self._place)).found, self._place).head
        if head is not None:
            check_key(head, self._place, self._key_name, is_driven=True)
            self._key_name = ""

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._on_wait(text)


def there_in(holder: KeyValue) -> RegisteredDriver | None:
    """Return the holder of the key; None if another version, or another program, has written it."""
    try:
        return decode(holder.value)
    except CodecError:
        return None


def _is_dead(process: ProcessName) -> bool:
    """Return whether a process of this place has ended. One of another user may be hidden (proc(5), hidepid)."""
    if process.state() is not None:
        return False
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def _who(there: RegisteredDriver | None) -> str:
    if there is None:
        return "another process"
    pid = pid_in(there.process)
    return f"{f'process {pid}' if pid else 'a process'} on {there.machine}"


def held(place: EtcdPlace, there: RegisteredDriver | None) -> JournalHeldError:
    """Create the error that another driver has the lock."""
    whom = f"job {there.job}" if there is not None and there.job else "another job"
    return JournalHeldError(f"cannot use {place} (--journal): {whom} is driven by {_who(there)}")
