"""The entries of a journal, and their format in a record.

Owns the entries, and the format of a record's body. Times are of the job's clock, unchanged.
:mod:`elastic_driver.journal.past` derives the job from its entries. Keys are in hexadecimal digits, and in no ``repr``.

A body is a byte that says whether the rest is compressed, and a JSON array of entries. A change to a field here, of
the settings, or of the core's state and events, changes the format: the number in the file's first line is the version
of the entries, the facts and the settings, ``Took.core`` that of the core, and ``Took.protocol`` that of the agents'
messages. A test keeps all of these formats.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from elastic_driver.health.drains import DrainsKept
from elastic_driver.health.vitals_table import VitalsKept
from elastic_driver.launch.fleet.kept import (
    AdmittedKept,
    AgentKept,
    FleetFact,
    LeaverKept,
    MachineKept,
    RevokedKept,
    TicketKept,
)
from elastic_driver.rendezvous.agent_messages import PROTOCOL, Hello
from elastic_driver.rendezvous.certificate import Certificate
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.reporting.chronicle import ChronicleKept
from elastic_driver.reporting.goodput import GoodputKept, Turned
from elastic_driver.reporting.tally import TallyKept
from elastic_driver.settings.settings import Settings

# 1,024 workers' reports are 210 KB, and 4 KB if compressed, which takes 0.3 ms.
_COMPRESSED_FROM = 4 << 10
_LEVEL = 1
_PLAIN, _ZLIB = b"\x00", b"\x01"
# The end of a first record: the snapshot's facts are its last field.
_FACTS = b'"facts":[%b]}]'
_NO_FACTS = _FACTS % b""
# The most bytes of a decompressed body: many times the state of the largest job.
_MOST_BYTES = 1 << 30


class EntriesError(codec.CodecError):
    """A record is not one that this version writes."""


@dataclass(frozen=True, slots=True)
class Took:
    """A driver has the job from here on. The first entry of a file.

    Attributes:
        epoch: above that of all previous drivers.
        version, python: of elastic_driver, and of the interpreter.
        core: the version of the core's state and events.
        protocol: the version of the agents' messages.
        driver: the unique id of this driver; random hexadecimal digits.
        machine: its name.
        process: the driver's, on that machine (:mod:`elastic_driver.system.process_name`).
        clock: the job's time then.
        boot_s: CLOCK_BOOTTIME then, seconds.
        unix_s: the system's clock then, seconds.
        at_s: the age of the job, as in its event log.
    """

    epoch: Count
    version: str
    python: str
    core: Count
    protocol: Count
    driver: str
    machine: str
    process: str
    clock: float
    boot_s: float
    unix_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The constant facts of a job.

    Attributes:
        job_id: the id of the job.
        key, operator_key: as in JobKey.
        join_token: the secret with which hosts join; "" if none may.
        settings: the user's settings.
        environment: the driver's, without the variables of an outer job: workers get it.
        directory: the working directory of the driver at its start, and of its workers.
        umask: the umask of both.
    """

    job_id: str
    key: str = field(repr=False)
    operator_key: str = field(repr=False)
    join_token: str = field(repr=False)
    settings: Settings = field(repr=False)
    environment: dict[OsText, OsText] = field(repr=False)
    directory: OsText
    umask: Count

    @property
    def command(self) -> tuple[str, ...]:
        """The command as the user gave it."""
        return self.settings.command

    @property
    def job_key(self) -> JobKey:
        """The job's key."""
        return JobKey(bytes.fromhex(self.key), bytes.fromhex(self.operator_key))


@dataclass(frozen=True, slots=True)
class WaysKept:
    """The addresses of the driver.

    Attributes:
        socket: its path; "" before it has one.
        loopback_port: the port on loopback; 0 if it does not listen there.
        ports: the ports for other machines, by address.
        fingerprint, pem: those of its certificate; "" before one was needed.
    """

    socket: OsText = ""
    loopback_port: Count = 0
    ports: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    pem: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The name of the only fact of this kind."""
        return ""

    @property
    def certificate(self) -> Certificate | None:
        """The stored certificate; None if none was made."""
        return Certificate(self.fingerprint, self.pem.encode()) if self.pem else None


@dataclass(frozen=True, slots=True)
class BooksKept:
    """The counters and sums.

    Attributes:
        clock: the job's time then.
        tally, goodput, chronicle, vitals: the values of each; no goodput before the job has begun.
        drains: the pauses between drains of slow workers; None if none is drained for being slow.
        heard: the time of the last step that they include; None before the first. In the journal there may be later
            ones before them: these were not visible yet.
    """

    clock: float
    tally: TallyKept
    goodput: GoodputKept | None
    chronicle: ChronicleKept
    vitals: VitalsKept
    drains: DrainsKept | None
    heard: float | None = None

    def has(self, at: float) -> bool:
        """Return whether the job's book includes the step at that time."""
        return self.goodput is not None and self.heard is not None and at <= self.heard

    @property
    def name(self) -> str:
        """The name of the only fact of this kind."""
        return ""


Fact = FleetFact | WaysKept | BooksKept


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts stored beside the state, by name. A fact of a kind with only one is None if there is none."""

    agents: dict[str, AgentKept] = field(default_factory=dict)
    tickets: dict[str, TicketKept] = field(default_factory=dict)
    revoked: dict[str, RevokedKept] = field(default_factory=dict)
    leavers: dict[str, LeaverKept] = field(default_factory=dict)
    admitted: dict[str, AdmittedKept] = field(default_factory=dict)
    machines: dict[str, MachineKept] = field(default_factory=dict)
    ways: WaysKept = field(default_factory=WaysKept)
    books: BooksKept | None = None

    def all(self) -> Iterator[Fact]:
        """Yield all facts."""
        for of_a_kind in (self.agents, self.tickets, self.revoked, self.leavers, self.admitted, self.machines):
            yield from of_a_kind.values()
        yield self.ways
        if self.books is not None:
            yield self.books


class FactTable:
    """The valid facts, in the order of their creation."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._facts: dict[tuple[str, str], Fact] = {}
        self._texts: dict[tuple[str, str], str] = {}
        for fact in facts:
            self.note(Kept(fact))

    def note(self, news: Kept | Dropped) -> None:
        """Apply a change. Idempotent."""
        fact = None if isinstance(news, Dropped) else news.fact
        key = (news.kind, news.name) if isinstance(news, Dropped) else (type(news.fact).__name__, news.fact.name)
        self._texts.pop(key, None)
        if fact is None:
            self._facts.pop(key, None)
        else:
            self._facts[key] = fact

    def texts(self) -> list[str]:
        """Return all valid facts, as in a record.

        Each is serialized again only after a change: for thousands of hosts that would take a third of a second.
        """
        for key, fact in self._facts.items():
            if key not in self._texts:
                self._texts[key] = codec.to_text(codec.to_data(Fact, fact))
        return [self._texts[key] for key in self._facts]

    def facts(self) -> Facts:
        """Return the valid facts by kind."""
        found = Facts()
        for fact in self._facts.values():
            match fact:
                case AgentKept():
                    found.agents[fact.name] = fact
                case TicketKept():
                    found.tickets[fact.name] = fact
                case RevokedKept():
                    found.revoked[fact.name] = fact
                case LeaverKept():
                    found.leavers[fact.name] = fact
                case AdmittedKept():
                    found.admitted[fact.name] = fact
                case MachineKept():
                    found.machines[fact.name] = fact
                case WaysKept():
                    found = replace(found, ways=fact)
                case BooksKept():
                    found = replace(found, books=fact)
        return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything about the job. The second entry of a file.

    Attributes:
        clock: the job's time.
        job: the constant facts.
        state: the state after the last step.
        turns: the steps that changed the job's standing, or its round, and that the books do not include.
        facts: the facts beside the state.
    """

    clock: float
    job: JobFacts
    state: State
    turns: tuple[Turned, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A fact was created, or has changed."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Dropped:
    """A fact was removed. ``kind`` is the name of its class."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of the core.

    Attributes:
        clock: the job's time.
        event: what happened.
        told: as :func:`told` returns it.
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


Entry = Took | Snapshot | Stepped | Kept | Dropped | Closed


def encode(entries: Sequence[Entry]) -> bytes:
    """Encode a record's body."""
    return _body(codec.encode(tuple[Entry, ...], tuple(entries)))


def encode_first(took: Took, snapshot: Snapshot, facts: FactTable) -> bytes:
    """Encode the body of a file's first record.

    Args:
        took, snapshot: its entries; the latter without facts.
        facts: the facts of the snapshot.
    """
    text = codec.encode(tuple[Entry, ...], (took, snapshot))
    assert text.endswith(_NO_FACTS)
    return _body(text.removesuffix(_NO_FACTS) + _FACTS % ",".join(facts.texts()).encode())


def _body(text: bytes) -> bytes:
    return _ZLIB + zlib.compress(text, _LEVEL) if len(text) >= _COMPRESSED_FROM else _PLAIN + text


def decode(body: bytes) -> tuple[Entry, ...]:
    """Decode the result of :func:`encode`.

    Raises:
        EntriesError: it is not a body, or of another version of elastic_driver.
    """
    data = codec.from_text(_text(body))
    if not isinstance(data, list):
        raise EntriesError("it is not a list of entries")
    begun_by = ""
    for entry in data:
        # Its format may differ, so this comes before the rest is read.
        if not isinstance(entry, dict) or entry.get("is") != Took.__name__:
            continue
        begun_by = f"elastic_driver {entry.get('version')}"
        other = f"{begun_by} wrote it, whose"
        if entry.get("core") != document.VERSION:
            raise EntriesError(
                f"{other} jobs have format {entry.get('core')}; this version reads format {document.VERSION}"
            )
        if entry.get("protocol") != PROTOCOL:
            raise EntriesError(f"{other} agents speak protocol {entry.get('protocol')}; this version speaks {PROTOCOL}")
    try:
        entries: tuple[Entry, ...] = codec.from_data(tuple[Entry, ...], data, name="record")
    except codec.CodecError as error:
        if not begun_by:
            raise
        raise EntriesError(
            f"{begun_by} wrote it in a format that this version cannot read: {error}; use the version "
            "that started the job"
        ) from error
    return entries


def told(commands: Sequence[Command]) -> int:
    """Compute a CRC-32 of the receivers of the commands. Two versions of the core with the same value decide the same.

    It has its own format: a field that a later version adds to a command must not change it. Commands that only inform
    the user are left out.
    """
    lines = [line for command in commands if (line := _line(command))]
    return zlib.crc32("\n".join(lines).encode("utf-8", "surrogatepass"))


def describe() -> str:
    """Describe the format of the entries, the facts and the settings, without that of the core and the agents."""
    text = codec.describe(Took, JobFacts, Kept, Dropped, Closed)
    classes = [each for each in re.split(r"(?m)^(?=\S)", text) if not each.startswith(f"{Hello.__name__}:")]
    return "".join(classes) + "".join(
        f"{kind.__name__}: {', '.join(kind.__dataclass_fields__)}\n" for kind in (Snapshot, Stepped)
    )


def _line(command: Command) -> str:
    name = type(command).__name__
    match command:
        case PublishRound():
            places = " ".join(f"{member.worker.key}={member.slot.rank}" for member in command.placed)
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
        raise EntriesError("it cannot be decompressed: its length is wrong")
    return text
