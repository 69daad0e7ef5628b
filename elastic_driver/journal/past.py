"""What a journal tells of its job: the state that its entries come to.

Owns the way from a file's records to a job's state. Reads only; takes no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.codec import CodecError
from elastic_driver.core.events import Event
from elastic_driver.core.membership import check_invariants, step
from elastic_driver.core.state import State
from elastic_driver.errors import in_words
from elastic_driver.journal.entries import Closed, Entry, JobFacts, Snapshot, Stepped, Took, decode, told
from elastic_driver.journal.file import read
from elastic_driver.journal.folder import JOURNAL, JournalError


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job that has not ended, as far as its journal tells.

    Attributes:
        took: its driver.
        job: what does not change.
        state: as of the last step.
        clock: the job's time then.
        events: the steps since the last snapshot, with their times.
    """

    took: Took
    job: JobFacts
    state: State
    clock: float
    events: tuple[tuple[float, Event], ...] = ()


def read_job(folder: Path) -> Recorded | Closed | None:
    """What there is in a folder; None for nothing.

    Raises:
        JournalError: it cannot be read, is damaged, or another version has written it, or would decide otherwise.
    """
    path = folder / JOURNAL
    try:
        records = read(path)
        if records is None:
            return None
        entries = [entry for record in records for entry in decode(record.body)]
    except OSError as error:
        raise JournalError(f"cannot read {path}: {in_words(error)}") from error
    except CodecError as error:
        raise JournalError(f"cannot read {path}: {error}") from None
    return _replay(entries, path)


def _replay(entries: Sequence[Entry], path: Path) -> Recorded | Closed:
    match entries:
        case [Closed() as closed]:
            return closed
        case [Took() as took, Snapshot() as snapshot, *rest]:
            pass
        case _:
            raise JournalError(f"cannot read {path}: it does not begin as a journal does")
    state, clock, events = snapshot.state, snapshot.clock, list[tuple[float, Event]]()
    try:
        check_invariants(state)
    except AssertionError as error:
        raise JournalError(f"cannot read {path}: {error}") from error
    for entry in rest:
        if not isinstance(entry, Stepped):
            raise JournalError(f"cannot read {path}: {type(entry).__name__} is no entry behind the first record")
        state, commands = step(state, entry.event, entry.clock)
        if told(commands) != entry.told:
            raise JournalError(
                f"cannot read {path}: at its event {len(events) + 1} this elastic_driver decides otherwise than "
                f"elastic_driver {took.version} with Python {took.python} did, which has written it"
            )
        clock = entry.clock
        events.append((clock, entry.event))
    return Recorded(took, snapshot.job, state, clock, tuple(events))
