"""The lock of a journal in etcd: a key under a lease, which this process keeps alive.

Owns the key, the lease, the threads that keep it alive and report doubts, and how long this process can be sure of it.
Each write under the lock compares the key's create_revision: so a process that has lost it writes nothing, however
late.

A lock is valid for the lease's time from the last request to keep it alive, by CLOCK_BOOTTIME, which also counts while
a machine is suspended. From a second before that on it is in doubt. The doubt may end: the lease was kept alive after
all, or it is gone, no other process has had the key, and it is taken again.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from elastic_driver import codec
from elastic_driver.errors import in_words
from elastic_driver.etcd.client import NOT_FOUND, EtcdClient, EtcdError, EtcdRefusedError, EtcdUnreachableError
from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, encode
from elastic_driver.etcd.messages import Compare, Created, Delete, Get, KeyValue, Modified, Put
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal.etcd_records import Ended, Found, ended_key, head_key, parse_ended, parse_head
from elastic_driver.journal.etcd_waiting import LEASE_S, Waiting, held, there_in
from elastic_driver.journal.folder import JournalHeldError, Signature
from elastic_driver.system.parent import Interruption
from elastic_driver.system.process_name import name_of_this_process

_DOUBT_S = 1.0
_NAME_BYTES = 8
# How many times per lease the thread renews it, and how soon it retries without an answer.
_ASKS = 3
_AGAIN_S = 0.2
# The time limit of a request of the thread: two of them fit in a lease before it is in doubt.
_ANSWER_S = 1.5
# The longest interval between checks whether the lock is in doubt by now: a timed wait does not count the time in which
# the machine sleeps.
_WATCH_S = 0.5
# How long to wait for a thread that may be resolving a name.
_JOIN_S = 1.0


class LockLostError(OSError):
    """The key is gone, or another's: the write under it has failed."""


class LockInDoubtError(OSError):
    """It is uncertain whether this process has the lock."""


def now_s() -> float:
    """Return the time of the lock's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdLock:
    """A lock that this process has taken. May be used by several threads.

    Attributes:
        place: its place in etcd.
        on_doubt: called when a doubt begins, and when it ends, by a thread for this purpose. The doubt may have changed
            by then: :attr:`is_in_doubt` is current.
        on_lost: called by that thread when it is certain that this process does not have it; it may take it again.
        head: the valid generation when it was taken.
        last: the record of the job's end at that time.
        was_standby: whether it has waited for the end of a living driver.
        waited_for: the job of that driver; "" if there was none, or it did not say which.
        driver: the unique id of this driver.
        cluster_id: the id of its etcd cluster.
    """

    def __init__(self, place: EtcdPlace, there: RegisteredDriver) -> None:
        self.place = place
        self.on_doubt: Callable[[], object] = lambda: None
        self.on_lost: Callable[[], object] = lambda: None
        self.head = Found()
        self.last = Signature()
        self.was_standby = False
        self.waited_for = ""
        self.driver = secrets.token_hex(_NAME_BYTES)
        self.cluster_id = ""
        self._mutex = threading.Lock()  # guards the attributes below
        self._there = there
        self._is_published = True
        self._lease = self._created = 0
        self._lease_s = float(LEASE_S)
        self._good_until = 0.0
        self._is_lost = True
        self._is_seen = False  # that it was in doubt, by a caller that must be notified of the end of the doubt
        self._why = ""
        self._is_released = False
        # Set if there is something to publish, or the thread ends. Each thread that keeps a lease alive has its own.
        self._news = threading.Event()
        # Set if the doubt or the loss of the lock may have changed, or the thread that reports it ends.
        self._changed = threading.Event()
        self._threads: list[threading.Thread] = []  # not guarded: used only by the caller of take or release

    @classmethod
    def take(
        cls,
        place: EtcdPlace,
        job_id: str,
        *,
        key_name: str = "",
        stands_by: bool = False,
        patience_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        look: Interruption = lambda *, drives: None,
    ) -> Self:
        """Take the lock.

        Blocks for as long as a lease if a process has it that may be dead. A process of this machine is looked up.


        Args:
            place: the place in etcd.
            job_id: the job of this process's driver, as far as known: for messages.
            key_name: the name of this driver's secret, if it stands by; "" if it is not to be checked.
            stands_by: whether to wait for the end of a living driver too.
            patience_s: how long to wait for an etcd that does not respond. A driver that stands by waits forever, even
                for one that rejects requests.
            on_wait: called once, with a description, when it has to wait.
            look: called repeatedly while it waits; an error that it raises ends the wait.

        Raises:
            JournalHeldError: a living process has it.
            JournalError: the content is not a journal's, or is sealed with another key.
            OSError: etcd does not respond, or rejects the request.
            SettingsError: as EtcdClient raises it.
        """
        lock = cls(place, RegisteredDriver(job_id, platform.node(), name_of_this_process()))
        client = EtcdClient(place)
        try:
            waiting = Waiting(place, key_name, on_wait, look, stands_by=stands_by)
            until = time.monotonic() + patience_s
            while True:
                try:
                    holder = client.get(driver_key(place))
                    if holder is None or lock._has_left(client, holder):
                        if waiting.is_over(client) and lock._take(client, awaited=waiting.stood_by_for):
                            break
                    else:
                        waiting.wait(client, holder)
                except EtcdError as error:
                    is_away = isinstance(error, EtcdUnreachableError) and time.monotonic() < until
                    if not is_away and not waiting.was_standby:
                        raise
                    waiting.wait_for_etcd(error)
            lock.was_standby, lock.waited_for = waiting.was_standby, waiting.stood_by_for
            lock._begin(client)
        except BaseException:
            client.close()
            raise
        lock._watch_over()
        return lock

    @property
    def created(self) -> int:
        """The key's create_revision, for comparison in writes."""
        with self._mutex:
            return self._created

    @property
    def lease_s(self) -> float:
        """How long its lease is valid, as etcd has granted it; at least LEASE_S."""
        with self._mutex:
            return self._lease_s

    @property
    def there(self) -> RegisteredDriver:
        """The published entry of this driver."""
        with self._mutex:
            return self._there

    @property
    def good_until(self) -> float:
        """Until when no other process has it, by :func:`now_s`; 0 if it is lost."""
        with self._mutex:
            return self._good_until

    @property
    def doubt_at(self) -> float:
        """From when on it is in doubt, by :func:`now_s`, unless its lease is kept alive before."""
        return self.good_until - _DOUBT_S

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is not certain that this process has it, for at least a second more."""
        with self._mutex:
            in_doubt = self._in_doubt()
            self._is_seen = self._is_seen or in_doubt
            return in_doubt

    @property
    def is_lost(self) -> bool:
        """Whether it is certain that this process does not have it."""
        with self._mutex:
            return self._is_lost

    def check(self) -> None:
        """Check that this process has it.

        Raises:
            LockInDoubtError: that is uncertain.
        """
        with self._mutex:
            if not self._in_doubt():
                return
            why = f": {self._why}" if self._why else ""
        raise LockInDoubtError(f"another driver may have taken over the job by now{why}")

    def is_of(self, job_id: str) -> None:
        """Record which job is in the journal, for messages. Never blocks."""
        with self._mutex:
            self._say(replace(self._there, job=job_id))

    def announce(self, *, epoch: int, name: str, urls: tuple[str, ...], fingerprint: str) -> None:
        """Publish to agents where this driver is. Never blocks: a thread does it, as soon as it can."""
        with self._mutex:
            self._say(replace(self._there, epoch=epoch, name=name, urls=urls, fingerprint=fingerprint))

    def has_ended(self, exit_code: int) -> None:
        """Record the job's exit code, for drivers that stand by. Never raises."""
        value = codec.encode(Ended, Ended(self.there.job, exit_code))
        with contextlib.suppress(EtcdError), EtcdClient(self.place) as client:
            client.txn([self.compare()], [Put(ended_key(self.place), value)])

    def compare(self) -> Created:
        """Return the comparison for transactions that write under this lock."""
        # No existing key has this number.
        return Created(driver_key(self.place), self.created or -1)

    def lost(self, why: str) -> LockLostError:
        """Record that a transaction has found the key gone: nothing is written before :meth:`take_again`."""
        with self._mutex:
            self._lose(why)
        return LockLostError(f"the driver lock of the job is lost: {why}")

    def take_again(self, is_ours: Callable[[Found], bool]) -> None:
        """Take the lock again, if it is lost and no other process has had it.

        Args:
            is_ours: whether a head is as this driver has left it.

        Raises:
            JournalHeldError: another process has it, or has had it.
            OSError: etcd does not respond, or rejects the request; or it is released.
        """
        with self._mutex:
            self._news.set()  # ends the thread that had kept the lease alive, if it has not ended; nothing waits for it
        client = EtcdClient(self.place)
        try:
            holder = client.get(driver_key(self.place))
            if holder is not None and not self._has_left(client, holder):
                raise held(self.place, there_in(holder))
            head = parse_head(client.range(head_key(self.place)).found, self.place)
            if not is_ours(head):
                raise JournalHeldError(
                    f"cannot use {self.place} (--journal): another driver has taken over the job in the meantime"
                )
            if not self._take(client, head):
                raise LockLostError("another driver is acquiring the driver lock of the job")
            self._begin(client)
        except BaseException:
            client.close()
            raise

    def release(self) -> None:
        """Release the lock for others. Blocks for some seconds at most."""
        with self._mutex:
            self._is_released = True
            self._news.set()
        self._changed.set()
        for thread in self._threads:
            # It may be resolving a name, without a time limit; its later actions have no effect.
            thread.join(_JOIN_S)
        with contextlib.suppress(EtcdError), EtcdClient(self.place) as client:
            with self._mutex:
                lease = self._lease
            client.txn([self.compare()], [Delete(driver_key(self.place))])
            client.revoke(lease)

    # --- taking -----------------------------------------------------------------------------------------------------

    def _take(self, client: EtcdClient, head: Found | None = None, *, awaited: str = "") -> bool:
        """Take the lock, if no process has it, and the head is this one. No thread keeps it alive yet.

        Args:
            client: the client for the requests.
            head: None for any.
            awaited: the job that was waited for: it is the one to resume, or none.
        """
        key = driver_key(self.place)
        if head is None:
            # The job, as far as known before it is read: others may wait for this driver, too.
            found = parse_head(client.range(head_key(self.place)).found, self.place).head
            with self._mutex:
                job = awaited or (self._there.job if found is None else found.job)
                self._there = replace(self._there, job=job)
        asked_s = now_s()
        lease, ttl_s = client.grant(LEASE_S)
        compares: list[Compare] = [Created(key, 0)]
        if head is not None:
            compares.append(Modified(head_key(self.place), head.revision))
        reads = [Get(key), Get(head_key(self.place)), Get(ended_key(self.place))]
        with self._mutex:
            self._lease = lease
            self._there = there = replace(self._there, lease_s=ttl_s)
        outcome = client.txn(compares, [Put(key, encode(there), lease), *reads], reads)
        mine, head_found, ended = outcome.found[-3:]
        # A failed transaction may have succeeded at its first attempt, which got no answer.
        if not mine or mine[0].lease != lease:
            client.revoke(lease)
            return False
        self.head = parse_head(head_found, self.place)
        self.last = _signature(ended)
        self.cluster_id = client.cluster_id
        with self._mutex:
            is_released = self._is_released
            self._created = mine[0].create_revision
            self._lease_s, self._good_until = float(ttl_s), asked_s + ttl_s
            self._is_lost, self._why = is_released, ""
            self._is_published = self._there == there
        if is_released:
            client.revoke(lease)
            raise LockLostError("the driver lock of the job has been released")
        return True

    def _has_left(self, client: EtcdClient, holder: KeyValue) -> bool:
        """Return whether an attempt of this process without an answer has taken the key; release it then."""
        if holder.lease == 0 or holder.lease != self._lease:
            return False
        client.revoke(self._lease)
        return True

    # --- the thread that keeps the lease alive ----------------------------------------------------------------------

    def _begin(self, client: EtcdClient) -> None:
        """Keep the lease alive that was taken.

        Args:
            client: a client for the thread alone from now on.
        """
        client.timeout_s = _ANSWER_S
        with self._mutex:
            self._news = news = threading.Event()
            if not self._is_published:
                news.set()
            args = (client, self._lease, Created(driver_key(self.place), self._created), news)
        # Woken by news, and whenever it has to renew the lease; ends when the lock is lost, taken again or released,
        # but not before its request is answered. So it is a daemon, with a client of its own.
        self._start(threading.Thread(target=self._keep_alive, args=args, name="elasticrun-lease", daemon=True))
        self._changed.set()

    def _start(self, thread: threading.Thread) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _keep_alive(self, client: EtcdClient, lease: int, key: Created, news: threading.Event) -> None:
        with client:
            ask_at_s = now_s() + self.lease_s / _ASKS
            while True:
                news.wait(max(0.0, ask_at_s - now_s()))
                news.clear()
                with self._mutex:
                    if not self._is_kept(lease):
                        break
                    has_news = not self._is_published
                is_due = now_s() >= ask_at_s
                try:
                    if (is_due or has_news) and not self._publish(client, lease, key):
                        self._lose_lease(lease, "its key was removed")
                        break
                    if not is_due:
                        continue
                    asked_s = now_s()
                    ttl_s = client.keep_alive(lease)
                except EtcdError as error:
                    ask_at_s = now_s() + _AGAIN_S
                    with self._mutex:
                        if self._is_kept(lease):
                            self._why = in_words(error)
                else:
                    if not ttl_s:
                        self._lose_lease(lease, "its lease has expired")
                        break
                    ask_at_s = asked_s + ttl_s / _ASKS
                    with self._mutex:
                        if self._is_kept(lease):
                            self._good_until, self._why = asked_s + ttl_s, ""
                    self._changed.set()

    def _is_kept(self, lease: int) -> bool:
        return not (self._is_released or self._is_lost) and self._lease == lease

    def _publish(self, client: EtcdClient, lease: int, key: Created) -> bool:
        """Publish news of this driver. Return whether the key still exists; its lease does not tell."""
        with self._mutex:
            there, is_new = self._there, not self._is_published
        puts = [Put(key.key, encode(there), lease)] if is_new else []
        try:
            is_there = client.txn([key], puts).succeeded
        except EtcdRefusedError as error:
            if error.code != NOT_FOUND:
                raise
            return False  # the lease is gone, and the key with it
        with self._mutex:
            if self._is_kept(lease):
                self._is_published = is_there and self._there == there
        return is_there

    def _say(self, there: RegisteredDriver) -> None:
        if self._there != there:
            self._there, self._is_published = there, False
            self._news.set()

    def _lose_lease(self, lease: int, why: str) -> None:
        with self._mutex:
            if self._is_kept(lease):
                self._lose(why)

    def _lose(self, why: str) -> None:
        self._is_lost, self._good_until, self._why = True, 0.0, why
        self._news.set()
        self._changed.set()

    # --- the thread that reports doubts -----------------------------------------------------------------------------

    def _watch_over(self) -> None:
        # Woken by changes, and periodically, since the clock continues while a machine sleeps; ends when the lock is
        # released. Separate from the other thread, which may be waiting for an answer when there is something to
        # report. A daemon: a process that does not release the lock can end all the same.
        self._changed.set()
        self._start(threading.Thread(target=self._watch, name="elasticrun-doubt", daemon=True))

    def _watch(self) -> None:
        was_in_doubt = was_lost = False
        left_s = 0.0
        while True:
            self._changed.wait(max(0.0, min(left_s, _WATCH_S)))
            self._changed.clear()
            with self._mutex:
                if self._is_released:
                    break
                in_doubt, is_lost = self._in_doubt(), self._is_lost
                is_news = in_doubt != was_in_doubt or (self._is_seen and not in_doubt)
                self._is_seen = self._is_seen and in_doubt
                left_s = _WATCH_S if in_doubt else self._good_until - _DOUBT_S - now_s()
            # Their errors are not handled here: their loop may be closed, for example, since the job has ended.
            if is_news:
                was_in_doubt = in_doubt
                with contextlib.suppress(Exception):
                    self.on_doubt()
            if is_lost and not was_lost:
                with contextlib.suppress(Exception):
                    self.on_lost()
            was_lost = is_lost

    def _in_doubt(self) -> bool:
        return self._is_lost or now_s() >= self._good_until - _DOUBT_S


def _signature(found: tuple[KeyValue, ...]) -> Signature:
    """Return the recorded end of the job."""
    ended = parse_ended(found)
    return Signature() if ended is None else Signature(job=ended.job, exit_code=ended.exit_code)
