"""The driver's record of one worker, and the listener for its starts and ends.

Owns no process. :mod:`elastic_driver.launch.fleet.workers` writes the record, from the reports of the worker's agent.
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
"""Selects the variables of a worker that are sent to it if it runs on the host of this agent."""


class Phase(Enum):
    """The phase of a worker."""

    AWAY = auto()  # ordered by another driver, or to be by this one: its agent is not back yet, and will report
    WAITING = auto()  # for the port of its generation, or for its agent's connection: nothing has been sent
    ORDERED = auto()  # its agent was ordered to start it
    RUNS = auto()  # its process exists
    ENDS = auto()  # it ended while there was no driver, and its agent reports next how
    DEAD = auto()  # its process has ended; its children may live


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, as it is now. Only the keeper writes it.

    Attributes:
        id: the worker's id.
        rank: for which it is started; -1 if there is none.
        label: what stands in the prefix of its output: its current rank.
        phase: its phase.
        link: to the agent that starts it, and whose reports about it are accepted; None while it waits.
        pid: its PID on its host: for people, in messages and logs.
        script, digest: see Started; "" if another driver has started it.
        is_dying: whether it has been reported as failing.
        last_lines: the end of its stderr, or of its stdout if it wrote nothing there; at most 20 lines. If only its
            error file has its traceback, the end of that. Known when it is dying, or dead.
        error_file: the content of its error file (:mod:`elastic_driver.launch.error_files`); "" for nothing.
        error_age_s: how long before it was dying, or dead, it wrote that, seconds; None for nothing.
        stop: how to stop it as soon as its agent is ordered to start it; None for not at all.
        kill: an order that may take its time, or end in sparing it.
        has_input: whether it was given a standard input; others read ``/dev/null``. False if another driver has started
            it.
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
    """Notified of the starts and ends of workers. Called on the event loop.

    For each worker ordered, either ``not_started`` is called, or ``started`` and then ``exited`` or ``lost``, perhaps
    with ``dying`` between them; nothing for those that wait when the job ends.
    """

    def started(self, worker: Worker) -> None:
        """Called when it runs."""

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Called when it could not be started, with a CommandNotFoundError if its command can be run on no host."""

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        """Called when it is about to end with a failure, though it may take seconds until it is dead.

        Args:
            worker: the worker.
            status: how it ends; in words if that is not known yet (it is dumping core).
        """

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        """Called when it is dead. Its output until then has been passed on."""

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        """Called when their host is lost, and they with it: how they ended is not known.

        Args:
            workers: all that ran there; one machine may have several hosts' names.
            why: in words.
        """

    def killed(self, order: KillWorker) -> None:
        """Called when the order is being carried out."""

    def spared(self, order: KillWorker) -> None:
        """Called when the order is not carried out: the process no longer exists, or its script has ended."""


def note_last_words(one: Worker, news: Dying | Exited) -> None:
    """Record a worker's last lines. An error file may contain an error that no line of its output does."""
    one.error_file, one.error_age_s = news.error_file, news.error_age_s
    raised = raised_in(news.error_file) if news.error_file else None
    if raised is None or any(raised.error in line for line in news.last_lines):
        one.last_lines = tuple(news.last_lines)
    else:
        one.last_lines = (*raised.callstack[-19:], raised.error)
