"""The lock of a journal in etcd: a key under a lease, which this process keeps alive.

Owns the key, the lease, the thread that keeps it alive, and how long this process can be sure of it. What is written
under the lock compares the key's create_revision: so whoever has lost it writes nothing, however late.

A lock is good for the lease's time from when the last keep-alive was asked for, by CLOCK_BOOTTIME, which goes on while
a machine is suspended. From a second before that on it is in doubt. It may come out of that: the lease was kept alive
after all, or it is gone, nobody else has had the key, and it is taken again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from elastic_driver import codec
from elastic_driver.codec import CodecError
from elastic_driver.errors import in_words
from elastic_driver.etcd.client import (
    NOT_FOUND,
    TIMEOUT_S,
    EtcdClient,
    EtcdError,
    EtcdRefusedError,
    EtcdUnreachableError,
)
from elastic_driver.etcd.messages import Compare, Created, Delete, Get, KeyValue, Modified, Put
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.there import DriverThere, decode, driver_key, encode
from elastic_driver.journal.etcd_records import Ended, Found, ended_key, head_key, parse_head
from elastic_driver.journal.folder import JournalHeldError, Signature
from elastic_driver.system.parent import Interruption
from elastic_driver.system.process_name import ProcessName, name_of_this_process, pid_in
from elastic_driver.words import in_seconds

LEASE_S = 5
"""What is asked for; etcd gives more where its elections take longer."""
_DOUBT_S = 1.0
_NAME_BYTES = 8
# The thread asks so often in a lease, and so soon again where it got no answer.
_ASKS = 3
_AGAIN_S = 0.2
# What a request of the thread may take: two of them fit in a lease before it is in doubt.
_ANSWER_S = 1.5
# One that waits looks so often whether the key is gone.
_LOOK_S = 0.5
# A driver that has died on another machine has the key for the rest of its lease. One that lives has it for longer.
_DYING_S = LEASE_S + 1.0


class LockLostError(OSError):
    """The key is gone, or another's: what was to be written under it was not."""


class LockInDoubtError(OSError):
    """It is not sure whether this process has the lock."""


def now_s() -> float:
    """What the lock goes by."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdLock:
    """A lock that this process has taken. May be used by several threads.

    Attributes:
        place: where.
        on_doubt: called, by a thread of the lock's own, when it comes to be in doubt (True), and when it is sure again.
        head: which generation counted when it was taken.
        last: what was said of the job's end then.
        has_stood_by: whether the end of a driver that lives was waited for.
        waited_for: its job; "" where nobody had it, or did not say which.
        driver: tells this driver from all others.
    """

    def __init__(self, place: EtcdPlace, client: EtcdClient, there: DriverThere) -> None:
        self.place = place
        self.on_doubt: Callable[[bool], object] = lambda in_doubt: None
        self.head = Found()
        self.last = Signature()
        self.has_stood_by = False
        self.waited_for = ""
        self.driver = secrets.token_hex(_NAME_BYTES)
        self._client = client  # the thread's, while there is one
        self._mutex = threading.Lock()  # guards what follows
        self._there = there
        self._is_published = True
        self._lease = self._created = 0
        self._good_until = 0.0
        self._is_lost = True
        self._was_in_doubt = False
        self._why = ""
        # Set: there is something to publish, or the thread ends.
        self._news = threading.Event()
        self._is_released = False
        self._thread: threading.Thread | None = None

    @classmethod
    def take(
        cls,
        place: EtcdPlace,
        job_id: str,
        *,
        stands_by: bool = False,
        patience_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        look: Interruption = lambda *, drives: None,
    ) -> Self:
        """Takes it.

        Blocks for as long as a lease where a process has it that may be dead. One of this machine is looked up.

        Args:
            place: where.
            job_id: whose driver this process is, as far as it knows: for messages.
            stands_by: whether the end of one that lives is waited for, too.
            patience_s: for how long it is waited for an etcd that does not answer. Who stands by waits for ever.
            on_wait: told once, in words, when it has to wait.
            look: called again and again while it waits; what it raises ends that.

        Raises:
            JournalHeldError: a living process has it.
            JournalError: what is there is none of a journal.
            OSError: etcd does not answer, or refuses.
            SettingsError: see EtcdClient.
        """
        there = DriverThere(job_id, platform.node(), name_of_this_process())
        client = EtcdClient(place)
        try:
            waiting, until = _Waiting(place, on_wait, look, stands_by=stands_by), time.monotonic() + patience_s
            lock = cls(place, client, there)
            while True:
                try:
                    holder = client.get(driver_key(place))
                    if holder is None or lock._has_left(holder):
                        if lock._take(awaited=waiting.stood_by_for):
                            break
                    else:
                        waiting.wait(client, holder)
                except EtcdUnreachableError as error:
                    if not waiting.has_stood_by and time.monotonic() >= until:
                        raise
                    waiting.wait_for_etcd(error)
        except BaseException:
            client.close()
            raise
        lock.has_stood_by, lock.waited_for = waiting.has_stood_by, waiting.stood_by_for
        lock._begin()
        return lock

    @property
    def created(self) -> int:
        """The key's create_revision; what a write has to compare."""
        with self._mutex:
            return self._created

    @property
    def there(self) -> DriverThere:
        """What is said of this driver."""
        with self._mutex:
            return self._there

    @property
    def good_until(self) -> float:
        """Until when nobody else has it, by :func:`now_s`; 0 for one that is lost."""
        with self._mutex:
            return self._good_until

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is not sure that this process has it, and for a second more."""
        with self._mutex:
            return self._in_doubt()

    @property
    def is_lost(self) -> bool:
        """Whether it is sure that this process does not have it."""
        with self._mutex:
            return self._is_lost

    def check(self) -> None:
        """Makes sure that this process has it.

        Raises:
            LockInDoubtError: that is not sure.
        """
        with self._mutex:
            if not self._in_doubt():
                return
            why = f": {self._why}" if self._why else ""
        raise LockInDoubtError(f"it is not sure that no other driver has the job by now{why}")

    def is_of(self, job_id: str) -> None:
        """The job in the journal is this one, as it turns out: for messages. Never blocks."""
        self._say(replace(self.there, job=job_id))

    def announce(self, *, epoch: int, name: str, urls: tuple[str, ...], fingerprint: str) -> None:
        """Says to agents where this driver is. Never blocks: a thread does it, as soon as it can."""
        there = self.there
        self._say(replace(there, epoch=epoch, name=name, urls=urls, fingerprint=fingerprint))

    def has_ended(self, exit_code: int) -> None:
        """Notes the job's exit code, for drivers that stand by. Never raises."""
        value = codec.encode(Ended, Ended(self.there.job, exit_code))
        with contextlib.suppress(EtcdError), EtcdClient(self.place) as client:
            client.txn([self.compare()], [Put(ended_key(self.place), value)])

    def compare(self) -> Created:
        """What a transaction has to compare that writes under this lock."""
        # No key has this number that is not there any more.
        return Created(driver_key(self.place), self.created or -1)

    def lost(self, why: str) -> LockLostError:
        """A transaction has found that the key is gone: nothing is written before :meth:`take_again`."""
        with self._mutex:
            self._is_lost, self._good_until, self._why = True, 0.0, why
        self._tell()
        return LockLostError(f"the lock of the job's driver is gone: {why}")

    def take_again(self, is_ours: Callable[[Found], bool]) -> None:
        """Takes it once more, where it is lost and nobody else has had it.

        Args:
            is_ours: whether a head is as this driver has left it.

        Raises:
            JournalHeldError: somebody else has it, or has had it.
            OSError: etcd does not answer, or refuses.
        """
        self._join()
        self._client.timeout_s = TIMEOUT_S
        holder = self._client.get(driver_key(self.place))
        if holder is not None and not self._has_left(holder):
            raise _held(self.place, _there_in(holder))
        head = parse_head(self._client.range(head_key(self.place)).found, self.place)
        if not is_ours(head):
            raise JournalHeldError(f"cannot use {self.place} (--journal): another driver has had the job meanwhile")
        if not self._take(head):
            raise LockLostError("the lock of the job's driver is being taken by another")
        self._begin()
        self._tell()

    def release(self) -> None:
        """Lets others have it. Blocks for some seconds at most."""
        with self._mutex:
            self._is_released = True
        self._join()
        self._client.timeout_s = TIMEOUT_S
        with contextlib.suppress(EtcdError):
            self._client.txn([self.compare()], [Delete(driver_key(self.place))])
            self._client.revoke(self._lease)
        self._client.close()

    # --- taking -----------------------------------------------------------------------------------------------------

    def _take(self, head: Found | None = None, *, awaited: str = "") -> bool:
        """Takes it, if nobody has it, and the head is this one. No thread is there yet.

        Args:
            head: None for any.
            awaited: the job that was waited for: it is that which goes on, or none.
        """
        key = driver_key(self.place)
        if head is None:
            # Whose job it is, as far as one can see before it is read: others may wait for this driver, too.
            found = parse_head(self._client.range(head_key(self.place)).found, self.place).head
            with self._mutex:
                job = awaited or (self._there.job if found is None else found.job)
                self._there = replace(self._there, job=job)
        asked_s = now_s()
        lease, ttl_s = self._client.grant(LEASE_S)
        compares: list[Compare] = [Created(key, 0)]
        if head is not None:
            compares.append(Modified(head_key(self.place), head.revision))
        reads = [Get(key), Get(head_key(self.place)), Get(ended_key(self.place))]
        with self._mutex:
            self._lease, there = lease, self._there
        outcome = self._client.txn(compares, [Put(key, encode(there), lease), *reads], reads)
        mine, head_found, ended = outcome.found[-3:]
        # Where it did not succeed, it may have done so when it was asked for first, without an answer.
        if not mine or mine[0].lease != lease:
            self._client.revoke(lease)
            return False
        self.head = parse_head(head_found, self.place)
        self.last = _signature(ended)
        with self._mutex:
            self._created = mine[0].create_revision
            self._good_until, self._is_lost, self._why = asked_s + ttl_s, False, ""
            self._is_published = True
        return True

    def _has_left(self, holder: KeyValue) -> bool:
        """Whether this process has the key by a try of which it had no answer; then it has not any more."""
        if holder.lease == 0 or holder.lease != self._lease:
            return False
        self._client.revoke(self._lease)
        return True

    # --- the thread -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        # Woken by news, and each time that it has to ask; ended when the lock is lost or released. A daemon: a process
        # that does not come to release it ends all the same.
        self._thread = threading.Thread(target=self._keep_alive, name="elasticrun-lease", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self._news.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _keep_alive(self) -> None:
        ttl_s = float(LEASE_S)
        ask_at_s = now_s() + ttl_s / _ASKS
        while True:
            self._news.wait(max(0.0, min(ask_at_s, self._doubt_at_s()) - now_s()))
            self._news.clear()
            with self._mutex:
                if self._is_released or self._is_lost:
                    break
                # So that it is told in time that it is in doubt.
                left_s = self._good_until - _DOUBT_S - now_s()
            self._client.timeout_s = left_s if 0 < left_s < _ANSWER_S else _ANSWER_S
            self._tell()
            asked_s = now_s()
            is_due = asked_s >= ask_at_s
            try:
                if (is_due or self._has_news) and not self._publish():
                    self.lost("its key was removed")
                    break
                if not is_due:
                    continue
                asked_s = now_s()
                ttl_s = float(self._client.keep_alive(self._lease))
            except EtcdError as error:
                with self._mutex:
                    self._why = in_words(error)
                ask_at_s = now_s() + _AGAIN_S
            else:
                if not ttl_s:
                    self.lost("its lease has run out")
                    break
                with self._mutex:
                    self._good_until, self._why = asked_s + ttl_s, ""
                ask_at_s = asked_s + ttl_s / _ASKS
            self._tell()

    @property
    def _has_news(self) -> bool:
        with self._mutex:
            return not self._is_published

    def _publish(self) -> bool:
        """Says what is new of this driver. Returns whether the key is still there; its lease says nothing of it."""
        with self._mutex:
            there, lease, is_new = self._there, self._lease, not self._is_published
        puts = [Put(driver_key(self.place), encode(there), lease)] if is_new else []
        try:
            is_there = self._client.txn([self.compare()], puts).succeeded
        except EtcdRefusedError as error:
            if error.code != NOT_FOUND:
                raise
            return False  # the lease is gone, and the key with it
        with self._mutex:
            self._is_published = is_there and self._there == there
        return is_there

    def _say(self, there: DriverThere) -> None:
        with self._mutex:
            if self._there == there:
                return
            self._there, self._is_published = there, False
        self._news.set()

    def _tell(self) -> None:
        """Tells of a doubt that has come or gone."""
        with self._mutex:
            in_doubt = self._in_doubt()
            if in_doubt == self._was_in_doubt:
                return
            self._was_in_doubt = in_doubt
        with contextlib.suppress(RuntimeError):  # its loop is closed: the job has ended
            self.on_doubt(in_doubt)

    def _in_doubt(self) -> bool:
        return self._is_lost or now_s() >= self._good_until - _DOUBT_S

    def _doubt_at_s(self) -> float:
        with self._mutex:
            return float("inf") if self._was_in_doubt else self._good_until - _DOUBT_S


class _Waiting:
    """For a lock that another process has. See :meth:`EtcdLock.take`.

    Attributes:
        has_stood_by: whether the end of one that lives was waited for.
        stood_by_for: and of which job; "" where that is not known.
    """

    def __init__(
        self, place: EtcdPlace, on_wait: Callable[[str], None], look: Interruption, *, stands_by: bool
    ) -> None:
        self._place, self._on_wait, self._look, self._stands_by = place, on_wait, look, stands_by
        self._told = ""
        self._seen = 0
        self._until = 0.0
        self.stood_by_for = ""
        self.has_stood_by = False

    def wait(self, client: EtcdClient, holder: KeyValue) -> None:
        """A while. Raises JournalHeldError where there is nothing to wait for."""
        there = _there_in(holder)
        process = None if there is None else ProcessName.parse(there.process)
        is_known = process is not None and process.is_of_this_place
        if is_known and process is not None and _is_dead(process):
            # Its lease runs on.
            client.txn([Created(holder.key, holder.create_revision)], [Delete(holder.key)])
            return
        if holder.create_revision != self._seen:
            self._seen, self._until = holder.create_revision, time.monotonic() + _DYING_S
        whom = f"job {there.job}" if there is not None and there.job else "another job"
        if self._stands_by:
            self.has_stood_by = True
            self.stood_by_for = "" if there is None else there.job
            self._tell(f"standing by: {whom} is driven by {_who(there)}")
        elif is_known or time.monotonic() > self._until:
            raise _held(self._place, there)
        else:
            self._tell(f"{whom} is driven by {_who(there)}: waiting {in_seconds(_DYING_S)} to see whether that is dead")
        self._look(drives=True)
        time.sleep(_LOOK_S)

    def wait_for_etcd(self, error: EtcdUnreachableError) -> None:
        """A while, for one that does not answer."""
        if not self.has_stood_by:  # else it is all the same to it
            self._tell(f"waiting for etcd: {in_words(error)}")
        self._look(drives=self.has_stood_by)
        time.sleep(_LOOK_S)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._on_wait(text)


def _there_in(holder: KeyValue) -> DriverThere | None:
    """Who has the key; None where another version has written it, or nobody of ours."""
    try:
        return decode(holder.value)
    except CodecError:
        return None


def _is_dead(process: ProcessName) -> bool:
    """Whether a process of this place has ended. One of another user may be hidden (proc(5), hidepid)."""
    if process.state() is not None:
        return False
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def _who(there: DriverThere | None) -> str:
    if there is None:
        return "another process"
    pid = pid_in(there.process)
    return f"{f'process {pid}' if pid else 'a process'} on {there.machine}"


def _held(place: EtcdPlace, there: DriverThere | None) -> JournalHeldError:
    whom = f"job {there.job}" if there is not None and there.job else "another job"
    return JournalHeldError(f"cannot use {place} (--journal): {whom} is driven by {_who(there)}")


def _signature(found: tuple[KeyValue, ...]) -> Signature:
    """What was said of the job's end. What is none was not said."""
    with contextlib.suppress(CodecError):
        for each in found:
            ended = codec.decode(Ended, each.value)
            return Signature(job=ended.job, exit_code=ended.exit_code)
    return Signature()
