"""What a journal says: its entries, and their form in a record.

Owns the entries, and how a record's body holds them. Times are of the job's clock as it is. What becomes of a job by
its entries is :mod:`elastic_driver.journal.past`'s.

A body is a byte that says whether the rest is compressed, and a JSON array of entries. Whoever changes a field here, or
of the core's state and events, changes the form: the number in the file's first line stands for that of the entries,
and ``Took.core`` for that of the core. A test keeps both forms.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver import codec
from elastic_driver.codec import Count, OsText
from elastic_driver.core import document
from elastic_driver.core.events import (
    Command,
    DismissWorker,
    EndJob,
    Event,
    GiveUpHost,
    KillWorker,
    PublishRound,
    Report,
    ReportDying,
    ReportExit,
    ReportResumed,
    SetNotice,
    StartChief,
    StartWorker,
    StopChief,
    StopWorker,
)
from elastic_driver.core.state import State

# 1,024 workers' reports are 210 KB, and 4 KB when they are compressed, in 0.3 ms.
_COMPRESSED_FROM = 4 << 10
_LEVEL = 1
_PLAIN, _ZLIB = b"\x00", b"\x01"
# What a body may come to: many times the state of the largest job.
_MOST_BYTES = 1 << 30


class EntriesError(codec.CodecError):
    """A record is none that this version writes."""


@dataclass(frozen=True, slots=True)
class Took:
    """A driver has the job from here on. The first entry of a file.

    Attributes:
        epoch: above that of all drivers before.
        version, python: of elastic_driver, and of the interpreter.
        core: the version of the core's state and events.
        machine: its name.
        process: the driver's, on that machine (:mod:`elastic_driver.system.process_name`).
        clock: the job's time then.
        boot_s: what CLOCK_BOOTTIME said then, seconds.
        unix_s: what the system's clock said then, seconds.
    """

    epoch: Count
    version: str
    python: str
    core: Count
    machine: str
    process: str
    clock: float
    boot_s: float
    unix_s: float


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What does not change while the job lasts.

    Attributes:
        job_id: of the job.
        command: as the user gave it.
        directory: where the driver was started.
    """

    job_id: str
    command: tuple[OsText, ...]
    directory: OsText


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that there is of the job. The second entry of a file."""

    clock: float
    job: JobFacts
    state: State


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of the core.

    Attributes:
        clock: the job's time.
        event: what happened.
        told: see :func:`told`.
    """

    clock: float
    event: Event
    told: Count


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing of the job is left. The only entry of its file."""

    epoch: Count
    job_id: str
    exit_code: int


Entry = Took | Snapshot | Stepped | Closed


def encode(entries: Sequence[Entry]) -> bytes:
    """A record's body."""
    text = codec.encode(tuple[Entry, ...], tuple(entries))
    return _ZLIB + zlib.compress(text, _LEVEL) if len(text) >= _COMPRESSED_FROM else _PLAIN + text


def decode(body: bytes) -> tuple[Entry, ...]:
    """The inverse of :func:`encode`.

    Raises:
        EntriesError: it is none, or of another version of elastic_driver.
    """
    data = codec.from_text(_text(body))
    if not isinstance(data, list):
        raise EntriesError("it is no list of entries")
    for entry in data:
        # Whose form may be another, so this comes before the rest is read.
        if isinstance(entry, dict) and entry.get("is") == Took.__name__ and entry.get("core") != document.VERSION:
            raise EntriesError(
                f"elastic_driver {entry.get('version')} has written it, whose jobs have the form {entry.get('core')}; "
                f"this one reads form {document.VERSION}"
            )
    entries: tuple[Entry, ...] = codec.from_data(tuple[Entry, ...], data, name="record")
    return entries


def told(commands: Sequence[Command]) -> int:
    """A CRC-32 of who is told what. Two versions of the core for which it is the same decide the same.

    Its form is its own: a field that a later version adds to a command must not change it. What is only told to the
    user is left out.
    """
    lines = [line for command in commands if (line := _line(command))]
    return zlib.crc32("\n".join(lines).encode("utf-8", "surrogatepass"))


def describe() -> str:
    """The form of the entries, without the core's."""
    return codec.describe(Took, JobFacts, Closed) + "".join(
        f"{kind.__name__}: {', '.join(kind.__dataclass_fields__)}\n" for kind in (Snapshot, Stepped)
    )


def _line(command: Command) -> str:
    name = type(command).__name__
    match command:
        case PublishRound():
            places = " ".join(f"{one.worker.key}={one.slot.rank}" for one in command.placed)
            return f"{name} {command.round_id} {places}"
        case StartWorker() | StopWorker() | KillWorker() | DismissWorker() | ReportDying() | ReportExit():
            return f"{name} {command.worker.key}"
        case GiveUpHost():
            return f"{name} {command.hostname}"
        case SetNotice() | ReportResumed():
            return f"{name} {command.round_id}"
        case StartChief() | StopChief():
            return f"{name} {command.number}"
        case EndJob():
            return f"{name} {command.exit_code}"
        case Report():
            return ""


def _text(body: bytes) -> bytes:
    kind, rest = body[:1], body[1:]
    if kind == _PLAIN:
        return rest
    if kind != _ZLIB:
        raise EntriesError(f"its first byte is {kind.hex()}")
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(rest, _MOST_BYTES)
    except zlib.error as error:
        raise EntriesError(f"it cannot be decompressed: {error}") from None
    if not reader.eof or reader.unused_data:
        raise EntriesError("it cannot be decompressed: it has another length")
    return text
