"""Serialization of what the core decides by: a State, an event, a command as JSON, and back.

Owns the set of documents and their version; :mod:`elastic_driver.codec` owns the format, which follows from the types
of the fields. It serves a driver that dies and is restarted, which needs the state as of some moment, the events since,
and the pending commands; and a report that can be replayed. Pure: it is given the time and does no I/O, and does not
know where its output is stored.

A state is written whole, including the policy: it determined the deadlines and the sizes of rounds. A restarted driver
with other settings sees the difference and decides how to handle it. Knowledge of the driver alone (processes, open
requests, secrets) is not included: the state names its workers, and its reader has to find out which of them still live
and to feed the ends of the others as events.

Times: the clock of one process means nothing to another, so a Moment is written relative to the time of writing, and
read relative to the time of reading: deadlines continue as if no time had passed. A reader that knows how long it was
away, and wants that to count, passes a time that is earlier by as much.

Reading is strict: a document of another version or format, or an invalid state, is rejected as a whole, with a message
that says where. A change to a field of a class in these documents changes the format: a test keeps the format of each
version, and VERSION is incremented with it.
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
    """A document is not one that this version writes, or its state is invalid."""


def write(state: State, now: float) -> dict[str, object]:
    """Serialize the state: dicts with text keys, lists, text, finite numbers, booleans and None.

    Args:
        state: the job.
        now: the present, seconds of the clock of the state's times.
    """
    return {"version": VERSION, "state": codec.to_data(State, state, now)}


def read(document: object, now: float) -> State:
    """Deserialize a state, with its times on the reader's clock.

    Args:
        document: the result of :func:`write`, before or after a round trip through JSON.
        now: the present, seconds of the reader's clock.

    Raises:
        DocumentError: the document is not of this version or format, or its state is invalid.
    """
    state: State = _read(State, "state", document, now)
    try:
        check_invariants(state)
    except AssertionError as error:
        raise DocumentError(f"cannot read the state of a job: {error}") from error
    return state


def write_event(event: Event, now: float) -> dict[str, object]:
    """Serialize an event, as :func:`write` does a state."""
    return {"version": VERSION, "event": codec.to_data(Event, event, now)}


def read_event(document: object, now: float) -> Event:
    """Deserialize the result of :func:`write_event`. Raises DocumentError."""
    event: Event = _read(Event, "event", document, now)
    return event


def write_command(command: Command, now: float) -> dict[str, object]:
    """Serialize a command, as :func:`write` does a state."""
    return {"version": VERSION, "command": codec.to_data(Command, command, now)}


def read_command(document: object, now: float) -> Command:
    """Deserialize the result of :func:`write_command`. Raises DocumentError."""
    command: Command = _read(Command, "command", document, now)
    return command


def describe() -> str:
    """Describe the format of all documents: each class in them with its fields and their types, for the test."""
    return codec.describe(State, Event, Command)


def _read(kind: Any, name: str, document: object, now: float) -> Any:
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(version) is not int or version < 1:
        raise DocumentError(f"cannot read the {name} of a job: it is not a versioned document")
    if version != VERSION:
        newer = ", from a newer elastic_driver" if version > VERSION else ""
        raise DocumentError(
            f"cannot read the {name} of a job: the document has version {version}{newer}; this elastic_driver reads "
            f"version {VERSION}"
        )
    if document.keys() != {"version", name}:
        raise DocumentError(f"cannot read the {name} of a job: the document has other fields than version and that")
    try:
        return codec.from_data(kind, document[name], now, name=name)
    except codec.CodecError as error:
        raise DocumentError(f"cannot read the {name} of a job: {error}") from None
