"""What an agent and the driver say to each other, as values.

Owns shapes and validation, both directions; :mod:`~elastic_driver.rendezvous.channel` carries them, and
:mod:`~elastic_driver.rendezvous.frames` knows their bytes. A worker is named by its key (:attr:`WorkerId.key`). What
workers report of their rounds, and are answered, stands in them as values of
:mod:`~elastic_driver.rendezvous.messages`. A blob is what the agent does not read: output, keys, and the bodies of
requests that it passes on (Ask, Answer), which are whatever the route takes and answers.
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
    DiscReport,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
)
from elastic_driver.vitals import Vitals
from elastic_driver.words import NO_BARS

PROTOCOL = 16
"""Version of the messages and of the frames. Both ends must have the same: no message is read across versions, and a
change of any message is a change of this number. Only the first two words outlast it: a Hello has its protocol and
version, by which it is refused, and a Refused says why."""

NOTHING_GIVEN = 66
"""Exit code of an agent that was given nothing on its standard input: EX_NOINPUT of sysexits.h."""

NOTHING_GIVEN_WHY = "nothing has arrived on its standard input"
"""What it says then."""


@dataclass(frozen=True, slots=True)
class Bootstrap(Body):
    """What a new agent is given, by whoever starts it: on its standard input, or in one word of its command line.

    Attributes:
        urls: of the driver, to be tried in order; ``unix:/PATH`` of its socket on its own machine.
        identity: as whom it proves itself at first: "ticket ID" or "joiner".
        key: with what, in hexadecimal digits; empty for a joiner, which makes it from its token.
        host: its host's name in the job; "" to have it made of the machine's name.
        slots: of a host that joins by itself; 0 for one that discovery names.
        labels: of a host that joins by itself.
        agent_timeout_s: how long it may go unacknowledged until it ends its workers, seconds.
        fingerprint: SHA-256 of the driver's certificate, in hexadecimal digits; "" where that is not known.
        owner: the driver's process, as :mod:`elastic_driver.system.process_name` names it, for an agent on the driver's
            own machine; "" for others.
        job: what tells this job from others on the host, for the agent that ends what an earlier driver has left.
        first_s: how long the driver may take to come, seconds; 0 for as long as an agent waits anyhow.
        address: of its host's own, under which the others reach it; "" to find it.
        node_rank: its host's place among the nodes of a job of nodes; -1 where that is found by itself.
        alike: what all nodes of such a job have to be started with alike, by how it is given; empty for no node.
        spot_notices: the cloud whose notices are watched for, whatever the job's; "" to do what the job does.
        grace_s: how long after a SIGTERM the host is gone, seconds; 0 when nobody has said.
        leave_code: exit code of an agent whose host has left a job that goes on.
        stdin: the descriptor that an agent on the driver's own machine has of the driver's standard input; -1 for none.
        outlives: whether an agent on the driver's own machine goes on when the driver's process dies, as one elsewhere
            does: until its lease is over, or another driver of the job has come.
        source: of the token from which the key was made, see Credential; it does not travel.
    """

    _what: ClassVar[str] = "what this agent was given"

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
        """One word that no shell reads in its own way."""
        return base64.urlsafe_b64encode(self.to_json()).decode().rstrip("=")

    @classmethod
    def from_word(cls, word: str) -> Self:
        """The inverse of :meth:`to_word`. Raises RendezvousProtocolError for anything else."""
        try:
            line = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        except ValueError:
            raise RendezvousProtocolError("cannot read what this agent was given: not base64") from None
        return cls.from_json(line)


_REGISTER: dict[str, type[Said]] = {}


class Said:
    """A message as a value. Subclasses are frozen dataclasses; a field ``blob`` travels as bytes, beside the JSON.

    Attributes:
        name: of the message.
        lasts: whether it is said again to a later driver, if none has kept it. The others say what still holds then,
            which is said anew, or are of no interest any more.
    """

    name: ClassVar[str]
    lasts: ClassVar[bool]

    def __init_subclass__(cls, *, name: str = "", lasts: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name:
            cls.name, cls.lasts = name, lasts
            _REGISTER[name] = cls

    def message(self) -> Message:
        """As it travels."""
        values = to_data(type(self), self)
        return Message(self.name, values, values.pop("blob", b""))


def said(message: Message) -> Said:
    """The value of a message.

    Raises:
        RendezvousProtocolError: there is no such message, or it has other fields.
    """
    kind = _REGISTER.get(message.name)
    if kind is None:
        raise RendezvousProtocolError(f"cannot read message: there is none called {message.name[:40]!r}")
    has_blob = message.blob or "blob" in kind.__annotations__
    try:
        value: Said = from_data(kind, {**message.fields, "blob": message.blob} if has_blob else message.fields)
    except CodecError as error:
        raise RendezvousProtocolError(f"cannot read message {message.name}: {error}") from None
    return value


def worker_named(key: str) -> WorkerId:
    """The worker that a message names.

    Raises:
        RendezvousProtocolError: it names none.
    """
    try:
        return WorkerId.parse(key)
    except ValueError as error:  # SettingsError is one
        raise RendezvousProtocolError(f"cannot read message: {error}") from None


def version_of(message: Message) -> str:
    """The version that a hello of another protocol names, for people; "" for any other message."""
    protocol, version = message.fields.get("protocol"), message.fields.get("version")
    if message.name != Hello.name or type(protocol) is not int or protocol == PROTOCOL:
        return ""
    return f"elastic_driver {version if isinstance(version, str) else '?':.40} (protocol {protocol})"


# --- before the channel: on each new connection, without numbers ----------------------------------------------------


@dataclass(frozen=True)
class Hello(Said, name="hello"):
    """Agent to driver, first on each connection.

    Attributes:
        agent: tells this process from all other agents; random hexadecimal digits.
        protocol, version: of the protocol, and of this package.
        resumes: whether it has had a connection to this driver before; ``seen`` is what it has seen then.
        seen: number of the last message taken.
        key: of 32 bytes that it has drawn, in hexadecimal digits, with which it comes back; "" when it resumes.
        host: its host's name in the job; "" for the driver to choose.
        slots: of a host that joins by itself; 0 for one that was dialled.
        machine: name of the machine.
        boot_id: of the machine.
        cores: processors that workers there may use together.
        python: version and path, for messages.
        pid: of the agent.
        owner: the agent's process, as :mod:`elastic_driver.system.process_name` names it.
        address: of the agent's end of the connection.
        addresses: all of the machine's that are not loopback, "INTERFACE ADDRESS/PREFIX" each.
        labels: of a host that joins by itself, as :class:`~elastic_driver.hosts.Host` has them, with spaces between
            them.
        node_rank, alike: see Bootstrap.
        epoch: the highest of a driver that has welcomed this agent; 0 for none, and for drivers that have none.
        driver: that driver's name, see Welcome; "" before the first welcome.
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
class Welcome(Said, name="welcome"):
    """Driver to agent, the answer to a hello.

    Of another driver than the one that the hello names, the channel begins anew at both ends: both count their messages
    from 1 again, and neither number of a message seen says anything. The agent's first message on it is Levels, if it
    has had a channel before.

    Attributes:
        seen: number of the last message taken.
        host: its host's name in the job.
        job_id: marks the job's processes.
        poll_s: at least as often workers are to be heard; 0 for their long polls only.
        cwd: working directory of the workers.
        umask: of the workers; -1 for the agent's own.
        warm, preload: see Settings.warm_starts and preload; null to choose by the script.
        warm_first: whether the first workers are forked, too.
        prefix_timestamp: whether forwarded lines begin with the time.
        bars: whose progress bars the driver shows now, "all", "none" or a rank: of these it is told each state.
        agent_timeout_s: from now on, whatever Bootstrap said: both ends have to go by one.
        spot_notices: the cloud whose notices are watched for; "" for none.
        epoch: of this driver: higher than that of any before it; 0 for one without a journal.
        driver: tells this driver's process from all others; random hexadecimal digits.
        driver_timeout_s: for how long the agent keeps its workers while there is no driver, seconds; 0 for one without
            a journal: then nobody comes in its place.
        kept: number of the last message that need not be said again, whatever becomes of this driver.
        place: whose loopback addresses the driver's are, see system/process_name.py; "" where nobody needs to know.
        etcd: where it is said who drives the job; None where the driver's own machine has to tell that it is gone.
        etcd_cluster: the number of that cluster, which tells it from others at the same addresses; "" for none.
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
class InDoubt(Said, name="in_doubt"):
    """Whether another driver may have the job, since this one cannot reach etcd. A level: not so at first."""

    is_so: bool


@dataclass(frozen=True)
class Refused(Said, name="refused"):
    """Driver to agent, the other answer: it ends its workers, if it has any, and itself.

    Attributes:
        why: in words.
        is_over: whether that is because the job is over.
        epoch: of the driver, see Welcome. An agent that has been welcomed by a higher one does not obey.
    """

    why: str
    is_over: bool = False
    epoch: int = 0


# --- driver to agent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start(Said, name="start"):
    """Start a worker. Answered by Started or NotStarted. The agent adds what is its own to the environment.

    Attributes:
        worker: which.
        command, env: what to run, and the variables.
        label: what stands in the prefix of its output.
        rank: for which it is started.
        stdin: its standard input: "" for none; "inherit" for the one of the driver's own process, which an agent on its
            machine has as well; "pipe" or "terminal" for what comes by Input. A terminal is its standard output, too.
        stderr_too: whether a terminal is its standard error as well.
        rows, columns: of the terminal.
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
class Input(Said, name="input"):
    """For the standard input of a worker. Answered by InputTaken.

    Attributes:
        worker: whose.
        end: whether nothing follows.
    """

    worker: str
    end: bool
    blob: bytes


@dataclass(frozen=True)
class Resize(Said, name="resize"):
    """The terminal of a worker has another size now."""

    worker: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Stop(Said, name="stop"):
    """A signal to the worker's tree, SIGKILL after the grace, seconds.

    Attributes:
        worker: which.
        grace_s: how long.
        sever: whether its connections are shut at once.
        signal: its number.
    """

    worker: str
    grace_s: float
    sever: bool = False
    signal: int = int(SIGTERM)


@dataclass(frozen=True)
class Kill(Said, name="kill"):
    """SIGKILL to the worker's tree.

    Attributes:
        worker: which.
        stacks_s: when above 0 it prints first where its threads are, for so long at most, seconds.
        exits: whether it is let be when its script has ended: then Spared comes instead.
    """

    worker: str
    stacks_s: float
    exits: bool


@dataclass(frozen=True)
class PassOn(Said, name="pass_on"):
    """A signal for the process of each worker that runs here, as somebody has sent it to the driver.

    Attributes:
        signal: its number.
    """

    signal: int


@dataclass(frozen=True)
class KillAll(Said, name="kill_all"):
    """SIGKILL now to all that is left of all workers."""


@dataclass(frozen=True)
class Labels(Said, name="labels"):
    """From now on this stands in the prefix of the workers' output."""

    labels: dict[str, str]


@dataclass(frozen=True)
class WarmUp(Said, name="warm_up"):
    """Later workers may be forked from a warmed process."""


@dataclass(frozen=True)
class Prepare(Said, name="prepare"):
    """Workers like this may be started here soon: import what they import. Answered by Prepared.

    Attributes:
        command, env: see Start; the variables of a worker's place are not looked at.
    """

    command: list[OsText]
    env: dict[OsText, OsText] = field(repr=False)


@dataclass(frozen=True)
class Round(Said, name="round"):
    """A round has begun: keys of the one before are gone. Comes to all agents, members on their host or not."""

    round_id: int


@dataclass(frozen=True)
class Reply(Said, name="reply"):
    """The answer to the request of a Ready."""

    worker: str
    reply: NextRoundReply


@dataclass(frozen=True)
class RoundRefused(Said, name="round_refused"):
    """The other answer: the request of a Ready cannot be."""

    worker: str
    why: str


@dataclass(frozen=True)
class NoticeSet(Said, name="notice"):
    """The present notice, a level. Sent after a welcome, too."""

    notice: Notice


@dataclass(frozen=True)
class Answer(Said, name="answer"):
    """The answer to an Ask: status and body."""

    number: int
    status: int
    blob: bytes


@dataclass(frozen=True)
class Value(Said, name="value"):
    """A key of the present round that was wanted."""

    round_id: int
    scope: str
    key: str
    blob: bytes


@dataclass(frozen=True)
class Values(Said, name="values"):
    """All keys of a scope, packed (:mod:`~elastic_driver.rendezvous.entries`), as many as were wanted or more."""

    round_id: int
    scope: str
    blob: bytes


@dataclass(frozen=True)
class Listen(Said, name="listen"):
    """For a check of the network: listen where workers would. Answered by Listening. Takes the place of an earlier one.

    Attributes:
        check: number of the check.
        host: its host's name in the job, which it proves to whom it answers.
        secret: of the check, in hexadecimal digits; who does not have it is a stranger.
        address: where to listen.
        ports: first and last port that may be taken; empty for any.
        limit_s: for how long at most, seconds.
    """

    check: int
    host: str
    secret: str = field(repr=False)
    address: str
    ports: list[int]
    limit_s: float


@dataclass(frozen=True)
class Probe(Said, name="probe"):
    """Look whether agents that listen for a check can be reached, and how fast. Answered by Probed, once for all.

    Attributes:
        check: that it belongs to.
        number: of this probe; the Probed has it.
        addresses: where they listen, by host.
        ports: likewise.
        burst_bytes: at most so many are sent each way to see how fast they get there; 0 for none.
        burst_s: for so long at most each way, seconds.
        limit_s: how long all that may take for one host, seconds.
    """

    check: int
    number: int
    addresses: dict[str, str]
    ports: dict[str, int]
    burst_bytes: int
    burst_s: float
    limit_s: float


@dataclass(frozen=True)
class Unlisten(Said, name="unlisten"):
    """The check is over."""

    check: int


@dataclass(frozen=True)
class HoldPort(Said, name="hold_port"):
    """Keep a port from all others, for rank 0 of a generation of workers. Answered by PortHeld.

    Attributes:
        generation: number of the generation.
        ports: first and last port that may be taken; empty for any.
        round_id: its round, for another driver that has to know whose port that is.
    """

    generation: int
    ports: list[int]
    round_id: int


@dataclass(frozen=True)
class LetGo(Said, name="let_go"):
    """The port of that generation is no longer needed."""

    generation: int


@dataclass(frozen=True)
class TakeStacks(Said, name="stacks"):
    """Take the stacks of these workers, or of all that run. Answered by Stacked for each, and StacksTold.

    Attributes:
        number: of the question; the answers have it.
        workers: which; empty for all.
    """

    number: int
    workers: list[str]


@dataclass(frozen=True)
class Close(Said, name="close"):
    """Kill what still runs, pass on what it has written, say Bye, and end.

    Attributes:
        exit_code: of the job, which is over; -1 where it goes on without this host.
        why: the job is over, in words.
        preempted: whether the driver was sent SIGTERM, and may be started again elsewhere.
    """

    exit_code: int = -1
    why: str = ""
    preempted: bool = False


# --- agent to driver ------------------------------------------------------------------------------------------------


class WorkerPhase(StrEnum):
    """How far a worker is, as its agent knows it."""

    ORDERED = "ordered"  # its Start was taken; no process of it runs yet
    RUNS = "runs"
    ENDED = "ended"  # dead, or never started; how comes by a message of its own, or was kept before


@dataclass(frozen=True)
class WorkerLevel:
    """A worker of which its agent has anything left, also one that has ended.

    Attributes:
        worker: which.
        phase: how far it is.
        pid: of its process; 0 for none.
        label: what stands in the prefix of its output.
        rank: for which it was started; -1 where nothing is left of it but its end.
        leaving: whether it has said that nothing more is heard of it.
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
    """A port that an agent holds, see HoldPort.

    Attributes:
        generation, round_id: for whom.
        port: which.
    """

    generation: Annotated[int, Within(1, 1 << 53)]
    round_id: int
    port: Annotated[int, Within(1, 65535)]


@dataclass(frozen=True)
class Levels(Said, name="levels"):
    """All that the agent knows of its workers' processes, and of what it was told. Its first message to a driver that
    has come in the place of another.

    Behind it comes, as ordinary messages, in this order: the last Running of each worker in the present round; each
    Ready that is open; OnDisc; Warmed, Prepared; Leaves; Put of all keys of the present round that workers here have
    set; Wants and Asks that are open, under their numbers; and then what was said before and no driver has kept.

    Attributes:
        workers: all that there are.
        round_id: the last round that it was told of; 0 for none.
        notice_version: of the last notice that a driver has told it of; 0 for none. That the job is over does not
            count: a driver may die while it ends the job, and its journal says nothing of that.
        alone_s: for how long it had not heard of a driver, seconds.
        held: the ports that it holds for workers.
    """

    workers: list[WorkerLevel]
    round_id: int
    notice_version: int
    alone_s: Seconds = 0.0
    held: list[PortLevel] = field(default_factory=list)


@dataclass(frozen=True)
class Started(Said, name="started"):
    """A worker's process runs.

    Attributes:
        worker: whose.
        pid: its id.
        script: the path of the file that its command runs, as far as it names one; else "".
        digest: SHA-256 of what is in it, in hexadecimal digits; "" where that cannot be read.
    """

    worker: str
    pid: int
    script: OsText = ""
    digest: str = ""


@dataclass(frozen=True)
class InputTaken(Said, name="input_taken"):
    """So many bytes of its Input are in the worker's terminal or pipe, or nobody reads them any more."""

    worker: str
    size: int


@dataclass(frozen=True)
class Shown(Said, name="shown"):
    """What a worker has written to its terminal, as it is. The same comes by Output, in lines."""

    worker: str
    blob: bytes


@dataclass(frozen=True)
class Interrupted(Said, name="interrupted", lasts=True):
    """Ctrl-C was pressed on a worker's terminal while no program there was reading keys itself."""

    worker: str


@dataclass(frozen=True)
class NotStarted(Said, name="not_started", lasts=True):
    """It could not be started. ``bad_command``: nor could it anywhere else."""

    worker: str
    error: str
    bad_command: bool


@dataclass(frozen=True)
class Dying(Said, name="dying", lasts=True):
    """A worker is about to end, and not well. ``returncode`` is null when that is not known yet, ``how`` in words.

    ``error_file`` is what it has written into its error file; "" for nothing. ``error_age_s``: how long ago it wrote
    that; null for nothing. ``note``: what else is known of its end. ``error_at``: when it wrote that, by the machine's
    CLOCK_BOOTTIME: it says the same when this is said again.
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
class Exited(Said, name="exited", lasts=True):
    """A worker's process is dead. Its output until then has been sent, unless the driver does not take it.

    ``error_file``, ``error_age_s``, ``note``, ``error_at``: see Dying.
    """

    worker: str
    returncode: int
    last_lines: list[str]
    error_file: str = ""
    error_age_s: float | None = None
    note: str = ""
    error_at: float | None = None


@dataclass(frozen=True)
class Finished(Said, name="finished", lasts=True):
    """All that a dead worker had started is gone, and its output is read to the end. Nothing more comes of it."""

    worker: str


@dataclass(frozen=True)
class Spared(Said, name="spared", lasts=True):
    """See Kill.exits."""

    worker: str


@dataclass(frozen=True)
class Output(Said, name="output", lasts=True):
    """Whole lines that a worker has written, prefix and newline included. ``stream``: "stdout" or "stderr"."""

    worker: str
    stream: str
    blob: bytes


@dataclass(frozen=True)
class Redrawn(Said, name="redrawn"):
    """What a line shows now that a worker redraws (a progress bar). The last of it comes by Output.

    Attributes:
        worker: whose.
        stream: "stdout" or "stderr".
        label: what stands in the prefix.
        is_line: whether files and pipes get it as a line.
        blob: that line, prefix and newline included; empty where there is no such line any more.
    """

    worker: str
    stream: str
    label: str
    is_line: bool
    blob: bytes


@dataclass(frozen=True)
class Ready(Said, name="ready"):
    """A worker asks for its round. Sent again only when it says something else."""

    request: NextRoundRequest


@dataclass(frozen=True)
class Running(Said, name="running"):
    """A member trains."""

    report: RunningReport


@dataclass(frozen=True)
class Heard(Said, name="heard"):
    """Which workers were heard since this was said last.

    Attributes:
        workers: by worker: its progress, and whether it waits for others.
        leaving: of these, who has said that nothing more is heard of it.
        exiting: of these, who runs its exit handlers.
    """

    workers: dict[str, tuple[int, bool]]
    leaving: list[str]
    exiting: list[str]


@dataclass(frozen=True)
class VitalsSeen(Said, name="vitals"):
    """Looks at workers, by worker. Rows: a driver of thousands hears of each once a second."""

    workers: dict[str, Annotated[Vitals, ROW]]


@dataclass(frozen=True)
class FiguresSeen(Said, name="figures"):
    """What trainings have reported of themselves, by worker and name: what is new. null: NaN, or infinite."""

    workers: dict[str, Annotated[dict[str, float | None], Within(0, MOST_NAMES)]]


@dataclass(frozen=True)
class NoFigures(Said, name="no_figures", lasts=True):
    """A worker has reported what is no figure: said of one of a host."""

    worker: str
    why: str


@dataclass(frozen=True)
class GpusSeen(Said, name="gpus"):
    """A look at the GPUs of the host."""

    look: GpuLook


@dataclass(frozen=True)
class OnDisc(Said, name="on_disc"):
    """What a worker says of its commits on disc."""

    worker: str
    disc: DiscReport


@dataclass(frozen=True)
class Ask(Said, name="ask"):
    """A worker's request that the driver itself answers: leave, status, publish, outcome, call, store.

    Attributes:
        number: of the request; the Answer has it.
        worker: who asks, and has proven it to the agent.
        what: name of the route.
        path: what stands behind the name, part by part.
        blob: its body.
    """

    number: int
    worker: str
    what: str
    path: list[str]
    blob: bytes


@dataclass(frozen=True)
class Put(Said, name="put"):
    """A worker sets a key of the present round."""

    round_id: int
    scope: str
    key: str
    blob: bytes


@dataclass(frozen=True)
class Want(Said, name="want"):
    """Workers wait for a key (then ``count`` is 0), or for as many keys of the scope. Answered by Value or Values, if
    ever; said once for all workers of the host.
    """

    round_id: int
    scope: str
    key: str
    count: int


@dataclass(frozen=True)
class Prepared(Said, name="prepared"):
    """It is known whether workers can be forked here (then Warmed has come before), or start afresh."""


@dataclass(frozen=True)
class Warmed(Said, name="warmed"):
    """Workers can be forked from now on: the warmed process's id, and the seconds that it took."""

    pid: int
    took_s: float


@dataclass(frozen=True)
class Warning(Said, name="warning", lasts=True):
    """Something that the user should look at."""

    text: str


@dataclass(frozen=True)
class Listening(Said, name="listening"):
    """The answer to a Listen: the port, or 0 and why there is none."""

    check: int
    port: int
    error: str


@dataclass(frozen=True)
class Probed(Said, name="probed"):
    """The answer to a Probe. Each host is in ``rtt_s`` or in ``failures``.

    Attributes:
        number: of the probe.
        rtt_s: by host: the shortest round trip, seconds.
        speeds: by host: bytes a second there, and from there; only where both were measured.
        failures: by host: why it cannot be reached, in words.
    """

    number: int
    rtt_s: dict[str, float]
    speeds: dict[str, list[float]]
    failures: dict[str, str]


@dataclass(frozen=True)
class Stacked(Said, name="stacked"):
    """Where a worker is.

    Attributes:
        number: of the TakeStacks.
        worker: which.
        pid: of its process.
        state: the letter that the kernel has for it; "" when it is gone.
        reason: why there are no stacks; "" where ``blob`` is their text.
        syscall, wchan: of its main thread: the number of the system call, and where in the kernel it sleeps; "" where
            that is not known.
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
class StacksTold(Said, name="stacks_told"):
    """All that there was to be told of that TakeStacks."""

    number: int


@dataclass(frozen=True)
class PortHeld(Said, name="port_held"):
    """The answer to a HoldPort: the port, or 0 and why there is none."""

    generation: int
    port: int
    error: str


@dataclass(frozen=True)
class Leaves(Said, name="leaves"):
    """The host is to leave the job as if drained. Close comes when its last worker has ended.

    Attributes:
        why: in words.
        within_s: the seconds that are left until its machine is gone; None when nobody has said. Said again when less
            are left than was said.
    """

    why: str
    within_s: float | None = None


@dataclass(frozen=True)
class Bye(Said, name="bye"):
    """The agent ends; nothing of the job is left on its host."""
