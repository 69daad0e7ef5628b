"""What a journal says: its entries, and their form in a record.

Owns the entries, and how a record's body holds them. Times are of the job's clock as it is. What becomes of a job by
its entries is :mod:`elastic_driver.journal.past`'s. Keys are in hexadecimal digits, and in no ``repr``.

A body is a byte that says whether the rest is compressed, and a JSON array of entries. Whoever changes a field here, of
the settings, or of the core's state and events, changes the form: the number in the file's first line stands for that
of the entries, the facts and the settings, ``Took.core`` for that of the core, and ``Took.protocol`` for that of what
agents say. A test keeps all of these forms.
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
from elastic_driver.report.chronicle import ChronicleKept
from elastic_driver.report.goodput import GoodputKept, Turned
from elastic_driver.report.tally import TallyKept
from elastic_driver.settings.settings import Settings

# 1,024 workers' reports are 210 KB, and 4 KB when they are compressed, in 0.3 ms.
_COMPRESSED_FROM = 4 << 10
_LEVEL = 1
_PLAIN, _ZLIB = b"\x00", b"\x01"
# How a first record ends: the snapshot's facts are its last field.
_FACTS = b'"facts":[%b]}]'
_NO_FACTS = _FACTS % b""
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
        protocol: the version of what agents say.
        driver: tells this driver from all others; random hexadecimal digits.
        machine: its name.
        process: the driver's, on that machine (:mod:`elastic_driver.system.process_name`).
        clock: the job's time then.
        boot_s: what CLOCK_BOOTTIME said then, seconds.
        unix_s: what the system's clock said then, seconds.
        at_s: for how long the job had been there, as its event log has it.
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
    """What does not change while the job lasts.

    Attributes:
        job_id: of the job.
        key, operator_key: see JobKey.
        join_token: what hosts join with; "" when none may.
        settings: what the user asked for.
        environment: of the driver, without what an outer job has said of itself: workers have it.
        directory: where the driver was started, and its workers are.
        umask: of both.
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
        """As the user gave it."""
        return self.settings.command

    @property
    def job_key(self) -> JobKey:
        """The job's key."""
        return JobKey(bytes.fromhex(self.key), bytes.fromhex(self.operator_key))


@dataclass(frozen=True, slots=True)
class WaysKept:
    """Where the driver is reached.

    Attributes:
        socket: its path; "" before it has one.
        loopback_port: on loopback; 0 where it does not listen there.
        ports: by address, for other machines.
        fingerprint, pem: of its certificate; "" before one was needed.
    """

    socket: OsText = ""
    loopback_port: Count = 0
    ports: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    pem: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """There is only one."""
        return ""

    @property
    def certificate(self) -> Certificate | None:
        """As it was; None where none was made."""
        return Certificate(self.fingerprint, self.pem.encode()) if self.pem else None


@dataclass(frozen=True, slots=True)
class BooksKept:
    """What is counted and summed up.

    Attributes:
        clock: the job's time then.
        tally, goodput, chronicle, vitals: what each of them has; no goodput before the job has begun.
        drains: the pauses between drains of slow workers; None where none is drained for that.
        heard: the time of the last step that they have; None before the first. In the journal there may be later ones
            before them: these were not visible yet.
    """

    clock: float
    tally: TallyKept
    goodput: GoodputKept | None
    chronicle: ChronicleKept
    vitals: VitalsKept
    drains: DrainsKept | None
    heard: float | None = None

    def has(self, at: float) -> bool:
        """Whether the step at that time is in the job's book."""
        return self.goodput is not None and self.heard is not None and at <= self.heard

    @property
    def name(self) -> str:
        """There is only one."""
        return ""


Fact = FleetFact | WaysKept | BooksKept


@dataclass(frozen=True, slots=True)
class Facts:
    """What is kept beside the state, by name. Facts of which there can be one only are None where there is none."""

    agents: dict[str, AgentKept] = field(default_factory=dict)
    tickets: dict[str, TicketKept] = field(default_factory=dict)
    revoked: dict[str, RevokedKept] = field(default_factory=dict)
    leavers: dict[str, LeaverKept] = field(default_factory=dict)
    admitted: dict[str, AdmittedKept] = field(default_factory=dict)
    machines: dict[str, MachineKept] = field(default_factory=dict)
    ways: WaysKept = field(default_factory=WaysKept)
    books: BooksKept | None = None

    def all(self) -> Iterator[Fact]:
        """All of them."""
        for of_a_kind in (self.agents, self.tickets, self.revoked, self.leavers, self.admitted, self.machines):
            yield from of_a_kind.values()
        yield self.ways
        if self.books is not None:
            yield self.books


class FactTable:
    """The facts that hold, in the order in which they came to be."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._facts: dict[tuple[str, str], Fact] = {}
        self._texts: dict[tuple[str, str], str] = {}
        for fact in facts:
            self.note(Kept(fact))

    def note(self, news: Kept | Dropped) -> None:
        """Something has changed. Noting it twice is harmless."""
        fact = None if isinstance(news, Dropped) else news.fact
        key = (news.kind, news.name) if isinstance(news, Dropped) else (type(news.fact).__name__, news.fact.name)
        self._texts.pop(key, None)
        if fact is None:
            self._facts.pop(key, None)
        else:
            self._facts[key] = fact

    def texts(self) -> list[str]:
        """All that hold, as they stand in a record. Each is written anew only when it has changed: of thousands of
        hosts that would take a third of a second.
        """
        for key, fact in self._facts.items():
            if key not in self._texts:
                self._texts[key] = codec.to_text(codec.to_data(Fact, fact))
        return [self._texts[key] for key in self._facts]

    def facts(self) -> Facts:
        """The same, sorted by kind."""
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
    """All that there is of the job. The second entry of a file.

    Attributes:
        clock: the job's time.
        job: what does not change.
        state: as of the last step.
        turns: the steps by which the job came to stand there, or to another round, and that the books do not have.
        facts: what is known beside the state.
    """

    clock: float
    job: JobFacts
    state: State
    turns: tuple[Turned, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A fact has come to be, or changed."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Dropped:
    """A fact is no more. ``kind`` is the name of its class."""

    kind: str
    name: str


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


Entry = Took | Snapshot | Stepped | Kept | Dropped | Closed


def encode(entries: Sequence[Entry]) -> bytes:
    """A record's body."""
    return _body(codec.encode(tuple[Entry, ...], tuple(entries)))


def encode_first(took: Took, snapshot: Snapshot, facts: FactTable) -> bytes:
    """The body of a file's first record.

    Args:
        took, snapshot: its entries; the latter without facts.
        facts: those that it is to have.
    """
    text = codec.encode(tuple[Entry, ...], (took, snapshot))
    assert text.endswith(_NO_FACTS)
    return _body(text.removesuffix(_NO_FACTS) + _FACTS % ",".join(facts.texts()).encode())


def _body(text: bytes) -> bytes:
    return _ZLIB + zlib.compress(text, _LEVEL) if len(text) >= _COMPRESSED_FROM else _PLAIN + text


def decode(body: bytes) -> tuple[Entry, ...]:
    """The inverse of :func:`encode`.

    Raises:
        EntriesError: it is none, or of another version of elastic_driver.
    """
    data = codec.from_text(_text(body))
    if not isinstance(data, list):
        raise EntriesError("it is no list of entries")
    begun_by = ""
    for entry in data:
        # Whose form may be another, so this comes before the rest is read.
        if not isinstance(entry, dict) or entry.get("is") != Took.__name__:
            continue
        begun_by = f"elastic_driver {entry.get('version')}"
        other = f"{begun_by} has written it, whose"
        if entry.get("core") != document.VERSION:
            raise EntriesError(
                f"{other} jobs have the form {entry.get('core')}; this one reads form {document.VERSION}"
            )
        if entry.get("protocol") != PROTOCOL:
            raise EntriesError(f"{other} agents speak protocol {entry.get('protocol')}; this one speaks {PROTOCOL}")
    try:
        entries: tuple[Entry, ...] = codec.from_data(tuple[Entry, ...], data, name="record")
    except codec.CodecError as error:
        if not begun_by:
            raise
        raise EntriesError(
            f"{begun_by} has written it in another form than this one reads: {error}; only the elastic_driver that has "
            "begun this job can go on with it"
        ) from error
    return entries


def told(commands: Sequence[Command]) -> int:
    """A CRC-32 of who is told what. Two versions of the core for which it is the same decide the same.

    Its form is its own: a field that a later version adds to a command must not change it. What is only told to the
    user is left out.
    """
    lines = [line for command in commands if (line := _line(command))]
    return zlib.crc32("\n".join(lines).encode("utf-8", "surrogatepass"))


def describe() -> str:
    """The form of the entries, the facts and the settings, without the core's and that of what agents say."""
    text = codec.describe(Took, JobFacts, Kept, Dropped, Closed)
    classes = [each for each in re.split(r"(?m)^(?=\S)", text) if not each.startswith(f"{Hello.__name__}:")]
    return "".join(classes) + "".join(
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
