"""The journal of a running job: steps are on disk before they are visible.

Owns the thread that writes, the schedule of compaction, and the handling of a disk that is full or fails. A Store
decides where the records are. :mod:`elastic_driver.driver.stepper` makes the steps and waits for them. Facts are
written with the next steps, before them, or at once if no write is in progress: so a step that follows from a fact is
never on disk without it.

A driver begins with a new file that contains everything, and never appends to another driver's. It does the same after
an error, since a later fsync may report lost pages as written.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_driver.core import document
from elastic_driver.core.events import Command, Event, ReportResumed
from elastic_driver.core.state import State
from elastic_driver.errors import in_words
from elastic_driver.journal.entries import (
    BooksKept,
    Closed,
    Dropped,
    Fact,
    FactTable,
    JobFacts,
    Kept,
    Snapshot,
    Stepped,
    Took,
    encode,
    encode_first,
    told,
)
from elastic_driver.journal.folder import JournalError, JournalHeldError
from elastic_driver.journal.store import Store
from elastic_driver.rendezvous.agent_messages import PROTOCOL
from elastic_driver.reporting.goodput import Turned
from elastic_driver.system.file_writer import FLUSH_S, FileWriter
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.version import __version__

# Seconds from an error to the next try.
_AGAIN_S = 1.0
# A file is compacted when its steps would take this long to replay, or when it is this large, and this many times as
# large as after compaction; but only at twice these limits unless the job has just resumed.
_REPLAY_S = 0.25
_LARGE_BYTES, _LARGE_SHARE = 1 << 20, 4
_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the core that is made, and not visible yet.

    Attributes:
        clock: the job's time.
        event: what happened.
        state: the state after the step.
        commands: its commands.
        took_s: how long it took to make.
    """

    clock: float
    event: Event
    state: State
    commands: Sequence[Command]
    took_s: float


Done = Callable[[Exception | None], object]
"""Called on the loop when the data is on disk, or can never be, since another process has the journal."""


class Journal:
    """Writes the journal of one job. A Keeper of facts. Used on the event loop, except close() and look_soon().

    Args:
        store: where it is written.
        job: the constant facts.
        epoch: that of this driver.
        facts: the facts from the previous driver.

    Attributes:
        job: as given.
        epoch: as given.
        driver: the unique id of this driver.
        trouble: why the last write failed, in words; "" if it did not.
        on_error: called if facts can never be on disk; for steps the callback of the write is called instead.
        beside: returns a fact to add to the current write; None for none.
        at_s: returns the age of the job, from any thread; to be set before anything is written.
    """

    def __init__(self, store: Store, job: JobFacts, *, epoch: int, facts: Iterable[Fact] = ()) -> None:
        self._store = store
        self.job = job
        self.epoch = epoch
        self.driver = secrets.token_hex(_NAME_BYTES)
        self._took: Took | None = None
        self._replay_s = 0.0
        self._snapshot_bytes = 0
        self._table = FactTable(facts)
        self._last: tuple[float, State] | None = None  # the content of a snapshot
        self._turned: Turned | None = None
        self._turns: list[Turned] = []  # those that the books do not include
        self._given_up = threading.Event()
        self.at_s: Callable[[], float] = lambda: 0.0
        self.trouble = ""
        # The attributes above belong to the thread, except _took, which is set before it begins, and the last three;
        # those below belong to the loop.
        self._writer = FileWriter("elasticrun-journal")
        self.on_error: Callable[[Exception], object] = lambda error: None
        self.beside: Callable[[], Fact | None] = lambda: None
        self._news: list[Kept | Dropped] = []
        self._number = self._on_disk = 0  # of the last news that came, and that is on disk
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()  # until that number is on disk
        self._loop: asyncio.AbstractEventLoop | None = None  # from the first write on
        self._writes = 0  # under way

    @property
    def is_on_disk(self) -> bool:
        """Whether something of this driver's is on disk."""
        return self._snapshot_bytes > 0

    @property
    def name(self) -> str:
        """The name of its place, for messages and commands."""
        return self._store.name

    @property
    def silence(self) -> str:
        """The description of a place that does not respond, for unknown reasons."""
        return self._store.silence

    def write(self, clock: float, state: State, steps: Sequence[Step], done: Done) -> None:
        """Write steps to disk, all of them at once. Never blocks. One call at a time.

        Args:
            clock: the job's time.
            state: the state after the last of these steps.
            steps: the steps, in order.
            done: as Done.
        """
        self._loop = asyncio.get_running_loop()
        self._took = self._took or self._take(clock)  # here, at this time
        self._have_written((clock, state), steps, done)

    def look(self, looked: Callable[[], object]) -> None:
        """Call ``looked`` when it is certain that no other driver has had the journal until now.

        If one has, ``on_error`` is called first, and not only at the next write. Never blocks: the check comes after
        the current write.
        """

        def done(error: Exception | None) -> None:
            if error is not None:
                self.on_error(error)
            looked()

        self._have_written(None, (), done)

    def look_soon(self) -> None:
        """Check for another driver, from any thread; the first write checks in any case."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the job has ended
                loop.call_soon_threadsafe(self.look, lambda: None)

    def keep(self, fact: Fact) -> None:
        """Store a fact. See Keeper."""
        self._note(Kept(fact))

    def drop(self, kind: type[Fact], name: str) -> None:
        """Remove a fact. See Keeper."""
        self._note(Dropped(kind.__name__, name))

    def when_kept(self, callback: Callable[[], object]) -> None:
        """Call back when all facts so far are on disk. Those before the first write go with it. See Keeper."""
        if self._on_disk == self._number or self._given_up.is_set():
            callback()
        else:
            self._waiting.append((self._number, callback))

    def _note(self, news: Kept | Dropped) -> None:
        if self._given_up.is_set():
            return
        self._number += 1
        self._news.append(news)
        if self._loop is not None and not self._writes and len(self._news) == 1:
            asyncio.get_running_loop().call_soon(self._write_news)

    def _write_news(self) -> None:
        if self._news and not self._writes:
            self._have_written(None, (), lambda error: None if error is None else self.on_error(error))

    def _have_written(self, last: tuple[float, State] | None, steps: Sequence[Step], done: Done) -> None:
        loop = asyncio.get_running_loop()
        news, self._news = self._news, []
        number = self._number
        if (fact := self.beside()) is not None:
            news.append(Kept(fact))
        self._writes += 1

        def written(outcome: Exception | None) -> None:
            self._writes -= 1
            if outcome is None:
                self._on_disk = number
                while self._waiting and self._waiting[0][0] <= number:
                    loop.call_soon(self._waiting.popleft()[1])  # their errors are not the journal's
            done(outcome)
            self._write_news()

        self._writer.put(
            partial(self._write, last, news, steps, lambda outcome: loop.call_soon_threadsafe(written, outcome))
        )

    def give_up(self) -> None:
        """End writing for the job; nothing waits for the pending writes any more."""
        self._given_up.set()

    def close(self, exit_code: int, *, keeps: bool = False) -> str:
        """Record that nothing of the job is left, in a file without anything else. Blocks for some seconds at most.

        Args:
            exit_code: the exit code of the job.
            keeps: whether the records are kept: then the end is recorded only outside them.

        Returns:
            Why it cannot be recorded; "" when it is on disk.
        """
        self.give_up()
        outcome = [self.silence]
        body = None if keeps else encode([Closed(self.epoch, self.job.job_id, exit_code)])
        self._writer.put(partial(self._close, exit_code, body, outcome))
        self._writer.close(FLUSH_S)
        return outcome[0]

    # --- the thread ------------------------------------------------------------------------------------------------

    def _write(
        self, last: tuple[float, State] | None, news: Sequence[Kept | Dropped], steps: Sequence[Step], done: Done
    ) -> None:
        outcome: Exception | None = None
        for each in news:
            self._table.note(each)
            if isinstance(each, Kept) and isinstance(each.fact, BooksKept):
                books = each.fact
                self._turns = [turned for turned in self._turns if not books.has(turned.at)]
        for step in steps:
            turned = Turned.by(step.clock, step.state, step.commands)
            if turned.follows(self._turned):
                self._turned = turned
                self._turns.append(turned)
        self._last = last or self._last
        while not self._given_up.is_set():
            try:
                self._put(news, steps)
                self.trouble = ""
                break
            except JournalHeldError as error:
                outcome = error
                break
            except (OSError, JournalError) as error:
                self._store.close()
                self.trouble = in_words(error)
                self._given_up.wait(_AGAIN_S)
            except Exception as error:  # a bug, and the end of the job
                outcome = error
                break
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended without it
            done(outcome)

    def _put(self, news: Sequence[Kept | Dropped], steps: Sequence[Step]) -> None:
        self._store.look()
        if self._store.size and not news and not steps:
            return
        assert self._took is not None, "facts are not written before the first steps"
        assert self._last is not None
        clock, state = self._last
        self._replay_s += sum(step.took_s for step in steps)
        if not self._store.size or self._is_due(steps):
            self._store.begin(
                encode_first(self._took, Snapshot(clock, self.job, state, tuple(self._turns)), self._table)
            )
            self._snapshot_bytes = self._store.size
            self._replay_s = 0.0
        else:
            made = [Stepped(step.clock, step.event, told(step.commands)) for step in steps]
            self._store.append(encode([*news, *made]))

    def _is_due(self, steps: Sequence[Step]) -> bool:
        size = self._store.size
        weight = max(
            self._replay_s / _REPLAY_S,
            min(size / _LARGE_BYTES, size / (_LARGE_SHARE * self._snapshot_bytes)),
        )
        resumed = any(isinstance(command, ReportResumed) for step in steps for command in step.commands)
        return weight >= (1.0 if resumed else 2.0)

    def _take(self, clock: float) -> Took:
        return Took(
            self.epoch,
            __version__,
            platform.python_version(),
            document.VERSION,
            PROTOCOL,
            self.driver,
            platform.node(),
            name_of_this_process(),
            clock,
            time.clock_gettime(time.CLOCK_BOOTTIME),
            time.time(),
            self.at_s(),
        )

    def _close(self, exit_code: int, body: bytes | None, outcome: list[str]) -> None:
        try:
            self._store.look()
            if body is not None:
                self._store.begin(body)
            outcome[0] = ""
        except (OSError, JournalError) as error:
            outcome[0] = in_words(error)
        self._store.close()
        self._store.has_ended(exit_code)
