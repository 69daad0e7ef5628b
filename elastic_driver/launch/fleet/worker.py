"""What the driver knows of one worker, and who is told what becomes of it.

Owns no process. :mod:`elastic_driver.launch.fleet.workers` writes it, as the worker's agent says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from elastic_driver.core.events import KillWorker
from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.error_files import raised_in
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.agent_messages import Dying, Exited
from elastic_driver.words import Ending

Variables = Callable[[AgentFacts, Mapping[str, str]], dict[str, str]]
"""What of a worker's variables it is sent, if it runs on the host of this agent."""


class Phase(Enum):
    """How far a worker is."""

    AWAY = auto()  # another driver has ordered it, or this one was to: its agent is not back yet, and will say
    WAITING = auto()  # for the port of its generation, or for its agent's connection: nothing was sent
    ORDERED = auto()  # its agent was told to start it
    RUNS = auto()  # its process is there
    ENDS = auto()  # it has ended while there was no driver, and its agent says next how
    DEAD = auto()  # its process is not; what it has started may be


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, as it is now. The keeper alone writes it.

    Attributes:
        id: which.
        rank: for which it is started; -1 for none.
        label: what stands in the prefix of its output: its current rank.
        phase: how far it is.
        link: to the agent that starts it, and whose word is taken on it; None while it waits.
        pid: its process's id on its host: for people, in messages and logs.
        script, digest: see Started; "" where another driver has started it.
        is_dying: whether it was told that it ends, and not well.
        last_lines: the end of its stderr, or of its stdout when it wrote nothing there; 20 lines at most. Where it left
            its traceback in its error file only, with the end of that. Known when it is dying, or dead.
        error_file: what it has written into its error file (:mod:`elastic_driver.launch.error_files`); "" for nothing.
        error_age_s: how long before it was dying, or dead, it wrote that; None for nothing.
        stop: how it is stopped as soon as its agent is told to start it; None where it is not.
        kill: an order that may take its time, or end in sparing it.
        has_input: whether it was given a standard input; others read ``/dev/null``. False for one that another driver
            has had started.
    """

    id: WorkerId
    rank: int
    label: str
    phase: Phase = Phase.WAITING
    link: AgentLink | None = None
    pid: int = 0
    script: str = ""
    digest: str = ""
    is_dying: bool = False
    last_lines: Sequence[str] = ()
    error_file: str = ""
    error_age_s: float | None = None
    stop: Ending | None = None
    kill: KillWorker | None = None
    has_input: bool = False


class WorkerListener(Protocol):
    """Is told what becomes of the workers. Called on the event loop.

    Of each worker that was ordered comes either ``not_started``, or ``started`` and then ``exited`` or ``lost``, and
    perhaps ``dying`` between them; nothing of those that wait when the job ends.
    """

    def started(self, worker: Worker) -> None:
        """It runs."""

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """It could not be started; a CommandNotFoundError where its command can be run on no host."""

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        """It is about to end, and not well, though it may take seconds until it is dead.

        Args:
            worker: which.
            status: how it ends; in words when that is not known yet (it dumps its core).
        """

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        """It is dead. What it wrote until then has been passed on."""

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        """Their host is lost, and they with it: nobody has seen how they ended.

        Args:
            workers: all that ran there; one machine may have several hosts' names.
            why: in words.
        """

    def killed(self, order: KillWorker) -> None:
        """The order is being carried out."""

    def spared(self, order: KillWorker) -> None:
        """It is not: there is no such process any more, or its script has ended."""


def note_last_words(one: Worker, news: Dying | Exited) -> None:
    """Takes what a worker has said last. An error file may say what no line of its output does."""
    one.error_file, one.error_age_s = news.error_file, news.error_age_s
    raised = raised_in(news.error_file) if news.error_file else None
    if raised is None or any(raised.error in line for line in news.last_lines):
        one.last_lines = tuple(news.last_lines)
    else:
        one.last_lines = (*raised.callstack[-19:], raised.error)
