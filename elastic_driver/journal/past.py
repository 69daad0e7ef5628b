"""The state of a job, from the entries of its journal.

Owns the replay of a journal's records. Reads only; takes no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_driver.codec import CodecError
from elastic_driver.core.events import Event
from elastic_driver.core.membership import check_invariants, step
from elastic_driver.core.standing import standing_of
from elastic_driver.core.state import State
from elastic_driver.errors import in_words
from elastic_driver.journal.entries import (
    Closed,
    Dropped,
    Entry,
    Facts,
    FactTable,
    JobFacts,
    Kept,
    Snapshot,
    Stepped,
    Took,
    decode,
    told,
)
from elastic_driver.journal.file import read
from elastic_driver.journal.folder import JOURNAL, JournalError
from elastic_driver.reporting.goodput import Turned
from elastic_driver.system.process_name import is_of_this_boot

_now = time.monotonic


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job that has not ended, as far as its journal shows.

    Attributes:
        took: its driver.
        job: the constant facts.
        state: the state after the last step.
        clock: the job's time then, or when something was stored after it.
        events: the steps since the last snapshot, with their times.
        facts: the facts beside the state.
        away_s: how long the job had had no driver at the time of reading, as far as known.
        is_driven: whether a driver had its lock then; None if only its process could tell.
        turns: the steps that changed the job's standing, or its round, and that the books do not include.
        read_at: the time of reading, by the monotonic clock.
    """

    took: Took
    job: JobFacts
    state: State
    clock: float
    events: tuple[tuple[float, Event], ...] = ()
    facts: Facts = field(default_factory=Facts)
    away_s: float = 0.0
    is_driven: bool | None = None
    turns: tuple[Turned, ...] = ()
    read_at: float = field(default_factory=lambda: _now(), compare=False)

    @property
    def epoch(self) -> int:
        """The epoch of its driver."""
        return self.took.epoch

    @property
    def at_s(self) -> float:
        """The age of the job by now, as in its event log, seconds."""
        return self.took.at_s + (self.clock - self.took.clock) + self.ago_s

    @property
    def ago_s(self) -> float:
        """How long ago its last step was, seconds."""
        return self.away_s + _now() - self.read_at


def read_job(folder: Path) -> Recorded | Closed | None:
    """Read the job in a folder; None for nothing.

    Raises:
        JournalError: it cannot be read, is damaged, or another version has written it, or would decide differently.
    """
    path = folder / JOURNAL
    try:
        records = read(path)
    except OSError as error:
        raise JournalError(f"cannot read {path}: {in_words(error)}") from error
    return None if records is None else read_bodies([record.body for record in records], str(path))


def read_bodies(bodies: Iterable[bytes], name: str) -> Recorded | Closed:
    """Decode and replay records.

    Args:
        bodies: the bodies of all of them.
        name: the name of their place, for messages.

    Raises:
        JournalError: as :func:`read_job` raises it.
    """
    try:
        entries = [entry for body in bodies for entry in decode(body)]
    except CodecError as error:
        raise JournalError(f"cannot read {name}: {error}") from None
    return _replay(entries, name)


def _replay(entries: Sequence[Entry], name: str) -> Recorded | Closed:
    match entries:
        case [Closed() as closed]:
            return closed
        case [Took() as took, Snapshot() as snapshot, *rest]:
            pass
        case _:
            raise JournalError(f"cannot read {name}: it does not begin with the records of a journal")
    state, clock, events = snapshot.state, snapshot.clock, list[tuple[float, Event]]()
    turns = [*snapshot.turns] or [Turned(clock, standing_of(state))]
    facts = FactTable(snapshot.facts)
    try:
        check_invariants(state)
    except AssertionError as error:
        raise JournalError(f"cannot read {name}: {error}") from error
    for entry in rest:
        match entry:
            case Kept() | Dropped():
                facts.note(entry)
            case Stepped():
                state, commands = step(state, entry.event, entry.clock)
                if told(commands) != entry.told:
                    raise JournalError(
                        f"cannot read {name}: at event {len(events) + 1}, this elastic_driver decides differently "
                        f"than elastic_driver {took.version} with Python {took.python}, which wrote it"
                    )
                clock = entry.clock
                events.append((entry.clock, entry.event))
                turned = Turned.by(clock, state, commands)
                if turned.follows(turns[-1]):
                    turns.append(turned)
            case _:
                raise JournalError(f"cannot read {name}: {type(entry).__name__} is not allowed after the first record")
    kept = facts.facts()
    since = tuple(turned for turned in turns if kept.books is None or not kept.books.has(turned.at))
    if kept.books is not None:
        clock = max(clock, kept.books.clock)
    return Recorded(took, snapshot.job, state, clock, tuple(events), kept, away_s(took, clock), turns=since)


def away_s(took: Took, clock: float) -> float:
    """Return how long a job with this last time has had no driver; never less than 0."""
    is_same = is_of_this_boot(took.process)
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - took.boot_s if is_same else time.time() - took.unix_s
    return max(0.0, since - (clock - took.clock))
