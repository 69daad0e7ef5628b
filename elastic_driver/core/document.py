"""What the core decides by, written down: a State, an event, a command as JSON, and back.

Owns which of them there are and their version; :mod:`elastic_driver.codec` owns the form, which follows from the types
of the fields. For a driver that dies and comes back: its state as of some moment, the events since, and the commands
that were to follow. And for a report that can be replayed. Pure: it is given the time and does no I/O; who keeps what
is written, and where, is not known here.

A state is written whole, the policy too: deadlines were set by it, a round's size lies within it. A driver that comes
back with other settings sees the difference and decides what to do about it. Not in it is what only the driver knows
(processes, open requests, secrets): the state names its workers, and whoever reads it has to find out which of them
still live and to feed the end of the others as events.

Times. A clock of one process means nothing to another, so a Moment is written relative to the moment of writing, and
read relative to that of reading: deadlines run on as if no time had passed. A reader that knows how long it was away,
and wants that to count, reads at a time so much earlier.

Reading is strict: what is of another version, or not of the form, or a state that must not be, is refused as a whole,
and the message says where. Whoever changes a field of a class in them changes the form: a test keeps the
form of each version, and VERSION grows with it.
"""

from __future__ import annotations

from typing import Any

from elastic_driver import codec
from elastic_driver.core.events import Command, Event
from elastic_driver.core.invariants import check_invariants
from elastic_driver.core.state import State
from elastic_driver.errors import ElasticError

VERSION = 17


class DocumentError(ElasticError, ValueError):
    """A document is not one that this version writes, or its state is one that must not be."""


def write(state: State, now: float) -> dict[str, object]:
    """The state as a document: dicts with text keys, lists, text, finite numbers, booleans and None.

    Args:
        state: the job.
        now: the present, seconds of the clock that the state's times are of.
    """
    return {"version": VERSION, "state": codec.to_data(State, state, now)}


def read(document: object, now: float) -> State:
    """The state that a document tells of, with its times on the reader's clock.

    Args:
        document: as :func:`write` gave it, before or after a way through JSON.
        now: the present, seconds of the reader's clock.

    Raises:
        DocumentError: see there.
    """
    state: State = _read(State, "state", document, now)
    try:
        check_invariants(state)
    except AssertionError as error:
        raise DocumentError(f"cannot read the state of a job: {error}") from error
    return state


def write_event(event: Event, now: float) -> dict[str, object]:
    """An event as a document; see :func:`write`."""
    return {"version": VERSION, "event": codec.to_data(Event, event, now)}


def read_event(document: object, now: float) -> Event:
    """The inverse of :func:`write_event`. Raises DocumentError."""
    event: Event = _read(Event, "event", document, now)
    return event


def write_command(command: Command, now: float) -> dict[str, object]:
    """A command as a document; see :func:`write`."""
    return {"version": VERSION, "command": codec.to_data(Command, command, now)}


def read_command(document: object, now: float) -> Command:
    """The inverse of :func:`write_command`. Raises DocumentError."""
    command: Command = _read(Command, "command", document, now)
    return command


def describe() -> str:
    """The form of all documents: each class in them with its fields and their types, for the test that keeps it."""
    return codec.describe(State, Event, Command)


def _read(kind: Any, name: str, document: object, now: float) -> Any:
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(version) is not int or version < 1:
        raise DocumentError(f"cannot read the {name} of a job: this is no document with a version")
    if version != VERSION:
        newer = ", from a newer elastic_driver" if version > VERSION else ""
        raise DocumentError(
            f"cannot read the {name} of a job: the document is of version {version}{newer}; this elastic_driver reads "
            f"version {VERSION}"
        )
    if document.keys() != {"version", name}:
        raise DocumentError(f"cannot read the {name} of a job: the document has not just a version and that")
    try:
        return codec.from_data(kind, document[name], now, name=name)
    except codec.CodecError as error:
        raise DocumentError(f"cannot read the {name} of a job: {error}") from None
