"""The messages between an agent and the driver, as values.

Owns shapes and validation, both directions; :mod:`~elastic_driver.rendezvous.channel` carries them, and
:mod:`~elastic_driver.rendezvous.frames` encodes them. A worker is named by its key (:attr:`WorkerId.key`). Workers'
reports of their rounds, and the answers, are embedded as values of :mod:`~elastic_driver.rendezvous.messages`. The
agent does not read blobs: output, keys, and the bodies of requests that it forwards (Ask, Answer), whose form the route
defines.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from enum import StrEnum
from signal import SIGTERM
from typing import Annotated, Any, ClassVar, Self

from elastic_driver.codec import ROW, CodecError, OsText, Seconds, Within, from_data, to_data
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.figures import MOST_NAMES, GpuLook
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.frames import Message
from elastic_driver.rendezvous.messages import (
    Body,
    DiskReport,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
)
from elastic_driver.vitals import Vitals
from elastic_driver.words import NO_BARS

PROTOCOL = 17
"""Version of the messages and of the frames. Both ends must have the same: no message is read across versions, and a
change of any message changes this number. Only the first two messages are stable: a Hello has its protocol and version,
by which it is refused, and a Refused says why.
"""

NOTHING_GIVEN = 66
"""Exit code of an agent that got nothing on its standard input: EX_NOINPUT of sysexits.h."""

NOTHING_GIVEN_WHY = "received nothing on standard input"
"""The message that goes with this exit code."""


@dataclass(frozen=True, slots=True)
class Bootstrap(Body):
    """The parameters of a new agent, from the process that starts it: on standard input, or in one word of its command.

    Attributes:
        urls: the driver's URLs, tried in order; ``unix:/PATH`` of its socket on its own machine.
        identity: the identity for its first authentication: "ticket ID" or "joiner".
        key: the key for it, in hexadecimal digits; empty for a joiner, which derives it from its token.
        host: its host's name in the job; "" to derive it from the machine's name.
        slots: of a host that joins by itself; 0 for one named by discovery.
        labels: of a host that joins by itself.
        agent_timeout_s: how long the agent may go unacknowledged before it ends its workers, seconds.
        fingerprint: SHA-256 of the driver's certificate, in hexadecimal digits; "" if unknown.
        owner: the driver's process (:mod:`elastic_driver.system.process_name`), for an agent on the driver's own
            machine; "" for others.
        job: distinguishes this job from others on the host, for the agent that ends what an earlier driver has left.
        first_s: how long the driver may take to appear, seconds; 0 for the agent's usual patience.
        address: its host's address for the other hosts; "" to find it.
        node_rank: its host's place among the nodes of a job of nodes; -1 to find it.
        alike: the options that all nodes of such a job must share, by how each is given; empty if not a node.
        spot_notices: the cloud whose notices it watches, overriding the job's; "" for the job's setting.
        grace_s: seconds from a SIGTERM until the host is gone; 0 if unknown.
        leave_code: exit code of an agent whose host has left a job that continues.
        stdin: the descriptor of the driver's standard input, for an agent on the driver's own machine; -1 for none.
        outlives: whether an agent on the driver's own machine survives the driver's death, as one elsewhere does: until
            its lease ends, or another driver of the job appears.
        source: source of the token from which the key was derived, as in Credential; it is never sent.
    """

    _what: ClassVar[str] = "this agent's parameters"

    urls: tuple[str, ...]
    identity: str
    key: str = field(repr=False)
    host: str
    slots: int = 0
    labels: tuple[str, ...] = ()
    agent_timeout_s: float = 15.0
    fingerprint: str = ""
    owner: str = ""
    job: str = ""
    first_s: float = 0.0
    address: str = ""
    node_rank: int = -1
    alike: dict[str, str] = field(default_factory=dict)
    spot_notices: str = ""
    grace_s: float = 0.0
    leave_code: int = 0
    stdin: int = -1
    outlives: bool = False
    source: str = field(default="", compare=False)

    def to_word(self) -> str:
        """Encode as one word that needs no quoting in a shell."""
        return base64.urlsafe_b64encode(self.to_json()).decode().rstrip("=")

    @classmethod
    def from_word(cls, word: str) -> Self:
        """Decode a :meth:`to_word`. Raises RendezvousProtocolError for anything else."""
        try:
            line = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        except ValueError:
            raise RendezvousProtocolError("cannot read this agent's parameters: not base64") from None
        return cls.from_json(line)


_REGISTER: dict[str, type[AgentMessage]] = {}


class AgentMessage:
    """A message as a value. Subclasses are frozen dataclasses; a field ``blob`` is sent as bytes, beside the JSON.

    Attributes:
        name: name of the message.
        lasts: whether an unkept message is sent again to a later driver. Others describe current state, which is then
            sent anew, or are no longer of interest.
    """

    name: ClassVar[str]
    lasts: ClassVar[bool]

    def __init_subclass__(cls, *, name: str = "", lasts: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name:
            cls.name, cls.lasts = name, lasts
            _REGISTER[name] = cls

    def message(self) -> Message:
        """Encode for the channel."""
        values = to_data(type(self), self)
        return Message(self.name, values, values.pop("blob", b""))


def decoded(message: Message) -> AgentMessage:
    """Decode a message.

    Raises:
        RendezvousProtocolError: the name is unknown, or the fields do not match.
    """
    kind = _REGISTER.get(message.name)
    if kind is None:
        raise RendezvousProtocolError(f"cannot read message: there is no message called {message.name[:40]!r}")
    has_blob = message.blob or "blob" in kind.__annotations__
    try:
        value: AgentMessage = from_data(kind, {**message.fields, "blob": message.blob} if has_blob else message.fields)
    except CodecError as error:
        raise RendezvousProtocolError(f"cannot read message {message.name}: {error}") from None
    return value


def worker_named(key: str) -> WorkerId:
    """Parse the worker's key in a message.

    Raises:
        RendezvousProtocolError: the key is malformed.
    """
    try:
        return WorkerId.parse(key)
    except ValueError as error:  # SettingsError is one
        raise RendezvousProtocolError(f"cannot read message: {error}") from None


def version_of(message: Message) -> str:
    """Return the version in a hello of another protocol, for people; "" for any other message."""
    protocol, version = message.fields.get("protocol"), message.fields.get("version")
    if message.name != Hello.name or type(protocol) is not int or protocol == PROTOCOL:
        return ""
    return f"elastic_driver {version if isinstance(version, str) else '?':.40} (protocol {protocol})"


# --- before the channel: on each new connection, without numbers ----------------------------------------------------


@dataclass(frozen=True)
class Hello(AgentMessage, name="hello"):
    """Agent to driver, first on each connection.

    Attributes:
        agent: distinguishes this process from all other agents; random hexadecimal digits.
        protocol, version: of the protocol, and of this package.
        resumes: whether it has had a connection to this driver before; ``seen`` counts its messages.
        seen: number of the last message received.
        key: the key it will reconnect with: 32 random bytes, in hexadecimal digits; "" when it resumes.
        host: its host's name in the job; "" for the driver to choose.
        slots: of a host that joins by itself; 0 for one that the driver started.
        machine: name of the machine.
        boot_id: boot id of the machine.
        cores: processors that workers there may use together.
        python: version and path, for messages.
        pid: the agent's process id.
        owner: the agent's process (:mod:`elastic_driver.system.process_name`).
        address: address of the agent's end of the connection.
        addresses: all non-loopback addresses of the machine, each "INTERFACE ADDRESS/PREFIX".
        labels: of a host that joins by itself, as in :class:`~elastic_driver.hosts.Host`, separated by spaces.
        node_rank, alike: as in Bootstrap.
        epoch: the highest epoch of a driver that has welcomed this agent; 0 for none, and for drivers that have none.
        driver: that driver's name, as in Welcome; "" before the first welcome.
    """

    agent: str
    protocol: int
    version: str
    resumes: bool
    seen: int
    key: str = field(repr=False)
    host: str
    slots: int
    machine: str
    boot_id: str
    cores: int
    python: str
    pid: int
    owner: str
    address: str
    addresses: list[str]
    labels: str = ""
    node_rank: int = -1
    alike: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    driver: str = ""


@dataclass(frozen=True)
class Welcome(AgentMessage, name="welcome"):
    """Driver to agent, the answer to a hello.

    If the hello names another driver, the channel starts over at both ends: both number their messages from 1 again,
    and both ``seen`` are meaningless. The agent's first message on it is Levels, if it has had a channel before.

    Attributes:
        seen: number of the last message received.
        host: its host's name in the job.
        job_id: marks the job's processes.
        poll_s: longest time between two heartbeats of a worker; 0 for its long polls only.
        cwd: working directory of the workers.
        umask: of the workers; -1 for the agent's own.
        warm, preload: as in Settings (warm_starts, preload); null to choose by the script.
        warm_first: whether the first workers are forked, too.
        prefix_timestamp: whether forwarded lines begin with the time.
        bars: whose progress bars the driver shows now, "all", "none" or a rank: it is sent each state of these.
        agent_timeout_s: replaces Bootstrap's from now on: both ends must use the same.
        spot_notices: the cloud whose notices are watched; "" for none.
        epoch: of this driver: higher than that of any before it; 0 for one without a journal.
        driver: distinguishes this driver's process from all others; random hexadecimal digits.
        driver_timeout_s: how long the agent keeps its workers without a driver, seconds; 0 for a driver without a
            journal, which has no successor.
        kept: number of the last message that need not be sent again, even if this driver dies.
        place: the machine whose loopback addresses the driver's are (system/process_name.py); "" if irrelevant.
        etcd: where the driver of the job is recorded; None if the driver's own machine has to report that it is gone.
        etcd_cluster: number of that cluster, which distinguishes it from others at the same addresses; "" for none.
    """

    seen: int
    host: str
    job_id: str
    poll_s: float
    cwd: OsText
    umask: int
    warm: bool
    preload: list[OsText] | None
    prefix_timestamp: bool
    agent_timeout_s: float
    warm_first: bool = False
    spot_notices: str = ""
    epoch: int = 0
    driver: str = ""
    driver_timeout_s: float = 0.0
    kept: int = 0
    place: str = ""
    etcd: EtcdPlace | None = None
    etcd_cluster: str = ""
    bars: str = NO_BARS


@dataclass(frozen=True)
class InDoubt(AgentMessage, name="in_doubt"):
    """Whether another driver may have taken over the job, since this one cannot reach etcd. A level; initially
    false.
    """

    is_so: bool


@dataclass(frozen=True)
class Refused(AgentMessage, name="refused"):
    """Driver to agent, the other answer to a hello: the agent ends its workers, if any, and itself.

    Attributes:
        why: the reason, in words.
        is_over: whether the reason is that the job is over.
        epoch: of the driver, as in Welcome. An agent welcomed by a driver with a higher one does not obey.
    """

    why: str
    is_over: bool = False
    epoch: int = 0


# --- driver to agent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start(AgentMessage, name="start"):
    """Start a worker. Answered by Started or NotStarted. The agent adds its own variables to the environment.

    Attributes:
        worker: the worker.
        command, env: the command to run, and its environment.
        label: label in the prefix of its output.
        rank: the rank it is started for.
        stdin: its standard input: "" for none; "inherit" for the driver's own, which an agent on the driver's machine
            shares; "pipe" or "terminal" for the data of Input. A terminal is its standard output, too.
        stderr_too: whether a terminal is also its standard error.
        rows, columns: size of the terminal.
    """

    worker: str
    command: list[OsText]
    env: dict[OsText, OsText] = field(repr=False)
    label: str
    rank: int
    stdin: str = ""
    stderr_too: bool = False
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Input(AgentMessage, name="input"):
    """Data for the standard input of a worker. Answered by InputTaken.

    Attributes:
        worker: the worker.
        end: whether nothing follows.
    """

    worker: str
    end: bool
    blob: bytes


@dataclass(frozen=True)
class Resize(AgentMessage, name="resize"):
    """The terminal of a worker has a new size."""

    worker: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Stop(AgentMessage, name="stop"):
    """Send a signal to the worker's process tree, and SIGKILL after the grace period.

    Attributes:
        worker: the worker.
        grace_s: the grace period, seconds.
        sever: whether its connections are shut down at once.
        signal: number of the signal.
    """

    worker: str
    grace_s: float
    sever: bool = False
    signal: int = int(SIGTERM)


@dataclass(frozen=True)
class Kill(AgentMessage, name="kill"):
    """Send SIGKILL to the worker's process tree.

    Attributes:
        worker: the worker.
        stacks_s: if above 0, it first prints the stacks of its threads, for at most so many seconds.
        exits: whether it is spared if its script has ended: then Spared is the answer.
    """

    worker: str
    stacks_s: float
    exits: bool


@dataclass(frozen=True)
class PassOn(AgentMessage, name="pass_on"):
    """Send a signal to each running worker here, as it was sent to the driver.

    Attributes:
        signal: number of the signal.
    """

    signal: int


@dataclass(frozen=True)
class KillAll(AgentMessage, name="kill_all"):
    """Send SIGKILL now to all remaining processes of all workers."""


@dataclass(frozen=True)
class Labels(AgentMessage, name="labels"):
    """Set the labels in the prefix of the workers' output."""

    labels: dict[str, str]


@dataclass(frozen=True)
class WarmUp(AgentMessage, name="warm_up"):
    """Allow later workers to be forked from a warmed process."""


@dataclass(frozen=True)
class Prepare(AgentMessage, name="prepare"):
    """Prepare for workers like this, which may be started here soon: import what they import. Answered by Prepared.

    Attributes:
        command, env: as in Start; the variables of a worker's place are ignored.
    """

    command: list[OsText]
    env: dict[OsText, OsText] = field(repr=False)


@dataclass(frozen=True)
class Round(AgentMessage, name="round"):
    """A round has begun: drop the keys of the one before. Sent to all agents, with members on their host or not."""

    round_id: int


@dataclass(frozen=True)
class Reply(AgentMessage, name="reply"):
    """The answer to the request in a Ready."""

    worker: str
    reply: NextRoundReply


@dataclass(frozen=True)
class RoundRefused(AgentMessage, name="round_refused"):
    """The other answer: the request in a Ready is rejected."""

    worker: str
    why: str


@dataclass(frozen=True)
class NoticeSet(AgentMessage, name="notice"):
    """The current notice, a level. Also sent after a welcome."""

    notice: Notice


@dataclass(frozen=True)
class Answer(AgentMessage, name="answer"):
    """The answer to an Ask: status and body."""

    number: int
    status: int
    blob: bytes


@dataclass(frozen=True)
class Value(AgentMessage, name="value"):
    """A wanted key of the current round."""

    round_id: int
    scope: str
    key: str
    blob: bytes


@dataclass(frozen=True)
class Values(AgentMessage, name="values"):
    """All keys of a scope, packed (:mod:`~elastic_driver.rendezvous.entries`): at least as many as were wanted."""

    round_id: int
    scope: str
    blob: bytes


@dataclass(frozen=True)
class Listen(AgentMessage, name="listen"):
    """For a network check: listen where workers would. Answered by Listening. Replaces an earlier one.

    Attributes:
        check: number of the check.
        host: its host's name in the job, which it proves to each peer.
        secret: of the check, in hexadecimal digits; a peer without it is a stranger.
        address: the address to listen on.
        ports: first and last port allowed; empty for any.
        limit_s: time limit, seconds.
    """

    check: int
    host: str
    secret: str = field(repr=False)
    address: str
    ports: list[int]
    limit_s: float


@dataclass(frozen=True)
class Probe(AgentMessage, name="probe"):
    """Measure whether agents that listen for a check can be reached, and how fast. Answered by one Probed for all.

    Attributes:
        check: number of the check.
        number: number of this probe, repeated in the Probed.
        addresses: the agents' addresses, by host.
        ports: their ports, by host.
        burst_bytes: most bytes sent each way to measure the bandwidth; 0 for none.
        burst_s: longest time of that each way, seconds.
        limit_s: time limit for one host, seconds.
    """

    check: int
    number: int
    addresses: dict[str, str]
    ports: dict[str, int]
    burst_bytes: int
    burst_s: float
    limit_s: float


@dataclass(frozen=True)
class Unlisten(AgentMessage, name="unlisten"):
    """Stop listening: the check is over."""

    check: int


@dataclass(frozen=True)
class HoldPort(AgentMessage, name="hold_port"):
    """Reserve a port for rank 0 of a generation of workers. Answered by PortHeld.

    Attributes:
        generation: number of the generation.
        ports: first and last port allowed; empty for any.
        round_id: its round, from which a later driver knows whose port it is.
    """

    generation: int
    ports: list[int]
    round_id: int


@dataclass(frozen=True)
class LetGo(AgentMessage, name="let_go"):
    """Release the port of that generation."""

    generation: int


@dataclass(frozen=True)
class TakeStacks(AgentMessage, name="stacks"):
    """Take the stacks of these workers, or of all that run. Answered by Stacked for each, then StacksTold.

    Attributes:
        number: number of the request, repeated in the answers.
        workers: the workers; empty for all.
    """

    number: int
    workers: list[str]


@dataclass(frozen=True)
class Close(AgentMessage, name="close"):
    """Kill what still runs, forward its output, send Bye, and end.

    Attributes:
        exit_code: of the job, which is over; -1 if it continues without this host.
        why: why the job is over, in words.
        preempted: whether the driver was sent SIGTERM, and may be restarted elsewhere.
    """

    exit_code: int = -1
    why: str = ""
    preempted: bool = False


# --- agent to driver ------------------------------------------------------------------------------------------------


class WorkerPhase(StrEnum):
    """The state of a worker, as its agent knows it."""

    ORDERED = "ordered"  # its Start was received; no process of it runs yet
    RUNS = "runs"
    ENDED = "ended"  # dead, or never started; another message says how, or was kept before


@dataclass(frozen=True)
class WorkerLevel:
    """A worker of which the agent still knows something, even one that has ended.

    Attributes:
        worker: the worker.
        phase: its state.
        pid: its process id; 0 for none.
        label: label in the prefix of its output.
        rank: the rank it was started for; -1 if only its end is known.
        leaving: whether it has reported that it will send nothing more.
        exiting: whether it runs its exit handlers.
    """

    worker: str
    phase: WorkerPhase
    pid: int
    label: str
    rank: int
    leaving: bool
    exiting: bool


@dataclass(frozen=True)
class PortLevel:
    """A port that an agent has reserved (HoldPort).

    Attributes:
        generation, round_id: the generation it is for.
        port: the port.
    """

    generation: Annotated[int, Within(1, 1 << 53)]
    round_id: int
    port: Annotated[int, Within(1, 65535)]


@dataclass(frozen=True)
class Levels(AgentMessage, name="levels"):
    """The agent's full state: its workers' processes, and its orders. Its first message to a driver that has replaced
    another.

    These ordinary messages follow, in this order: the last Running of each worker in the current round; each open
    Ready; OnDisk; Warmed, Prepared; Leaves; Put of all keys of the current round set by workers here; open Wants and
    Asks, under their numbers; and then earlier messages that no driver has kept.

    Attributes:
        workers: all workers.
        round_id: the last round it was notified of; 0 for none.
        notice_version: version of the last notice it received; 0 for none. The job's end does not count: a driver may
            die while it ends the job, without a record in its journal.
        alone_s: how long it had no contact with a driver, seconds.
        held: the ports that it has reserved for workers.
    """

    workers: list[WorkerLevel]
    round_id: int
    notice_version: int
    alone_s: Seconds = 0.0
    held: list[PortLevel] = field(default_factory=list)


@dataclass(frozen=True)
class Started(AgentMessage, name="started"):
    """A worker's process runs.

    Attributes:
        worker: the worker.
        pid: its process id.
        script: path of the file that its command runs, if it names one; else "".
        digest: SHA-256 of that file, in hexadecimal digits; "" if it cannot be read.
    """

    worker: str
    pid: int
    script: OsText = ""
    digest: str = ""


@dataclass(frozen=True)
class InputTaken(AgentMessage, name="input_taken"):
    """This many bytes of its Input are in the worker's terminal or pipe, or nobody reads them any more."""

    worker: str
    size: int


@dataclass(frozen=True)
class Shown(AgentMessage, name="shown"):
    """Raw output of a worker to its terminal. Output carries the same in lines."""

    worker: str
    blob: bytes


@dataclass(frozen=True)
class Interrupted(AgentMessage, name="interrupted", lasts=True):
    """Ctrl-C was pressed on a worker's terminal while no program there was reading keys itself."""

    worker: str


@dataclass(frozen=True)
class NotStarted(AgentMessage, name="not_started", lasts=True):
    """The worker could not be started. ``bad_command``: it could not be started anywhere."""

    worker: str
    error: str
    bad_command: bool


@dataclass(frozen=True)
class Dying(AgentMessage, name="dying", lasts=True):
    """A worker is about to fail. ``returncode`` is null if not known yet; ``how`` describes the end in words.

    ``error_file``: content of its error file; "" for none. ``error_age_s``: how long ago it was written; null for none.
    ``note``: further facts about its end. ``error_at``: when it was written, by the machine's CLOCK_BOOTTIME, so that
    it stays valid when the message is sent again.
    """

    worker: str
    returncode: int | None
    how: str
    last_lines: list[str]
    error_file: str = ""
    error_age_s: float | None = None
    note: str = ""
    error_at: float | None = None


@dataclass(frozen=True)
class Exited(AgentMessage, name="exited", lasts=True):
    """A worker's process is dead. Its output until then has been sent, unless the driver does not accept it.

    ``error_file``, ``error_age_s``, ``note``, ``error_at``: as in Dying.
    """

    worker: str
    returncode: int
    last_lines: list[str]
    error_file: str = ""
    error_age_s: float | None = None
    note: str = ""
    error_at: float | None = None


@dataclass(frozen=True)
class Finished(AgentMessage, name="finished", lasts=True):
    """All descendants of a dead worker are gone, and its output is read to the end. This is its last message."""

    worker: str


@dataclass(frozen=True)
class Spared(AgentMessage, name="spared", lasts=True):
    """A worker was not killed, because its script has ended (Kill.exits)."""

    worker: str


@dataclass(frozen=True)
class Output(AgentMessage, name="output", lasts=True):
    """Whole lines written by a worker, with prefix and newline. ``stream``: "stdout" or "stderr"."""

    worker: str
    stream: str
    blob: bytes


@dataclass(frozen=True)
class Redrawn(AgentMessage, name="redrawn"):
    """The current state of a line that a worker redraws (a progress bar). Output carries its last state.

    Attributes:
        worker: the worker.
        stream: "stdout" or "stderr".
        label: label in the prefix.
        is_line: whether files and pipes get it as a line.
        blob: the line, with prefix and newline; empty if it is gone.
    """

    worker: str
    stream: str
    label: str
    is_line: bool
    blob: bytes


@dataclass(frozen=True)
class Ready(AgentMessage, name="ready"):
    """A worker asks for its round. Sent again only if the request changes."""

    request: NextRoundRequest


@dataclass(frozen=True)
class Running(AgentMessage, name="running"):
    """Report that a member trains."""

    report: RunningReport


@dataclass(frozen=True)
class Heard(AgentMessage, name="heard"):
    """The workers that sent a heartbeat since the last message of this kind.

    Attributes:
        workers: for each worker: its progress, and whether it waits for others.
        leaving: of these, the workers that will send nothing more.
        exiting: of these, the workers that run their exit handlers.
    """

    workers: dict[str, tuple[int, bool]]
    leaving: list[str]
    exiting: list[str]


@dataclass(frozen=True)
class VitalsSeen(AgentMessage, name="vitals"):
    """The vitals of workers. Encoded as rows: a driver of thousands receives each once a second."""

    workers: dict[str, Annotated[Vitals, ROW]]


@dataclass(frozen=True)
class FiguresSeen(AgentMessage, name="figures"):
    """New figures that trainings have reported, by worker and name. null: NaN or infinite."""

    workers: dict[str, Annotated[dict[str, float | None], Within(0, MOST_NAMES)]]


@dataclass(frozen=True)
class NoFigures(AgentMessage, name="no_figures", lasts=True):
    """A worker has reported something that is not a figure; sent for one worker of a host."""

    worker: str
    why: str


@dataclass(frozen=True)
class GpusSeen(AgentMessage, name="gpus"):
    """A reading of the host's GPUs."""

    look: GpuLook


@dataclass(frozen=True)
class OnDisk(AgentMessage, name="on_disk"):
    """A worker's report on its commits on disk."""

    worker: str
    disk: DiskReport


@dataclass(frozen=True)
class Ask(AgentMessage, name="ask"):
    """A worker's request that the driver itself answers: leave, status, publish, outcome, call, store.

    Attributes:
        number: number of the request, repeated in the Answer.
        worker: the worker, which the agent has authenticated.
        what: name of the route.
        path: parts of the path after that name.
        blob: the request's body.
    """

    number: int
    worker: str
    what: str
    path: list[str]
    blob: bytes


@dataclass(frozen=True)
class Put(AgentMessage, name="put"):
    """A worker sets a key of the current round."""

    round_id: int
    scope: str
    key: str
    blob: bytes


@dataclass(frozen=True)
class Want(AgentMessage, name="want"):
    """Workers wait for a key (then ``count`` is 0), or for that many keys of the scope. Answered by Value or Values, if
    ever; sent once for all workers of the host.
    """

    round_id: int
    scope: str
    key: str
    count: int


@dataclass(frozen=True)
class Prepared(AgentMessage, name="prepared"):
    """The agent knows whether workers can be forked here (then Warmed came before) or have to start afresh."""


@dataclass(frozen=True)
class Warmed(AgentMessage, name="warmed"):
    """Workers can be forked from now on: the warmed process's id, and the seconds that warming took."""

    pid: int
    took_s: float


@dataclass(frozen=True)
class Warning(AgentMessage, name="warning", lasts=True):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class Listening(AgentMessage, name="listening"):
    """The answer to a Listen: the port, or 0 and why there is none."""

    check: int
    port: int
    error: str


@dataclass(frozen=True)
class Probed(AgentMessage, name="probed"):
    """The answer to a Probe. Each host is in ``rtt_s`` or in ``failures``.

    Attributes:
        number: number of the probe.
        rtt_s: by host: the shortest round trip, seconds.
        speeds: by host: bytes a second to it, and from it; only if both were measured.
        failures: by host: why it cannot be reached, in words.
    """

    number: int
    rtt_s: dict[str, float]
    speeds: dict[str, list[float]]
    failures: dict[str, str]


@dataclass(frozen=True)
class Stacked(AgentMessage, name="stacked"):
    """The stacks of a worker.

    Attributes:
        number: number of the TakeStacks.
        worker: the worker.
        pid: its process id.
        state: the kernel's letter for its state; "" if it is gone.
        reason: why there are no stacks; "" if ``blob`` is their text.
        syscall, wchan: of its main thread: the number of the system call, and where it sleeps in the kernel; "" if
            unknown.
    """

    number: int
    worker: str
    pid: int
    state: str
    reason: str
    syscall: str
    wchan: str
    blob: bytes


@dataclass(frozen=True)
class StacksTold(AgentMessage, name="stacks_told"):
    """All answers to that TakeStacks were sent."""

    number: int


@dataclass(frozen=True)
class PortHeld(AgentMessage, name="port_held"):
    """The answer to a HoldPort: the port, or 0 and why there is none."""

    generation: int
    port: int
    error: str


@dataclass(frozen=True)
class Leaves(AgentMessage, name="leaves"):
    """The host has to leave the job as if drained. Close follows when its last worker has ended.

    Attributes:
        why: the reason, in words.
        within_s: seconds until its machine is gone; None if unknown. Sent again if less time is left than was reported.
    """

    why: str
    within_s: float | None = None


@dataclass(frozen=True)
class Bye(AgentMessage, name="bye"):
    """The agent ends; nothing of the job is left on its host."""
