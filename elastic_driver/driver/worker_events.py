"""Events of the workers' processes, for the core and for the user.

Owns what is kept of an ending worker: its process and status until its end is reported, and its error file. Starts and
ends no worker (:mod:`elastic_driver.launch.fleet.workers` does), and decides nothing: the core decides what an end
means.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence

from elastic_driver.core.events import (
    HostLost,
    KillWorker,
    ReportDying,
    ReportExit,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerSpared,
    WorkerStarted,
)
from elastic_driver.core.state import WorkerPhase, record_of
from elastic_driver.driver.scripts import Scripts
from elastic_driver.driver.standings import Standings
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import LaunchError
from elastic_driver.health.last_words import last_words, waited_for_input
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.error_files import pass_on, raised_in
from elastic_driver.launch.fleet.worker import Worker
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.words import ExitCode

_MOST_ERROR_FILES = 100
# The reason is reported once, for the host.
_LOST = ExitStatus(-signal.SIGKILL, "lost with its host")


class WorkerEvents:
    """Receives the calls about the workers' processes, as their WorkerListener. Used on the event loop only.

    Args:
        stepper: takes the events, and has the state.
        chronicle: reports to the user.
        standings: account for the running workers.
        forget: called with each worker that has ended, or could not be started.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        standings: Standings,
        forget: Callable[[WorkerId], None],
    ) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._standings = standings
        self._forget = forget
        # Workers that are dying, or have ended, until the core has said whether that was expected.
        self._scripts = Scripts()
        self._ends: dict[WorkerId, tuple[Worker, ExitStatus | None]] = {}
        self._has_told_of_input = False
        self._error_files: dict[WorkerId, tuple[str, int | None]] = {}  # of workers that failed, and their exit codes

    # --- WorkerListener --------------------------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """Report that a process runs."""
        self._chronicle.worker_started(worker.id, worker.pid)
        if other := self._scripts.started(worker):
            self._chronicle.warning(other)
        self._standings.started(worker.id)
        if not self._stepper.state.policy.on_change.asks_for_rounds:  # otherwise a start alone is no news
            self._stepper.report(WorkerStarted(worker.id))

    def back(self, worker: Worker) -> None:
        """Record a running process that another driver had started."""
        self._chronicle.worker_started(worker.id, worker.pid, again=True)
        self._standings.started(worker.id)
        state = self._stepper.state
        record = record_of(state, worker.id)
        if record is not None and record.phase is WorkerPhase.BOOTING and not state.policy.on_change.asks_for_rounds:
            self._stepper.report(WorkerStarted(worker.id))  # the last driver has died before that was written

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Report that a process could not be started."""
        bad_command = isinstance(error, CommandNotFoundError)
        self._stepper.post(WorkerNotStarted(worker, str(error), random.random(), bad_command))
        self._standings.exited(worker)
        self._chronicle.worker_not_started(worker)
        self._forget(worker)  # it may have existed for a moment, and have sent a request

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        """Report a dying worker, so that the others need not wait until the system has freed all of its memory."""
        if not self._is_known(worker):
            return
        self._ends[worker.id] = worker, None
        returncode, starved = (None, False) if isinstance(status, str) else (status.returncode, status.out_of_memory)
        self._keep_error_file(worker, returncode)
        error, where = _last_words(worker, returncode)
        how, draw, age_s = str(status), random.random(), worker.error_age_s
        self._stepper.report(WorkerDying(worker.id, returncode, how, draw, error, where, starved, age_s))

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        """Report that a process has ended."""
        if not self._is_known(worker):
            return
        self._ends[worker.id] = worker, status
        self._forget(worker.id)
        self._scripts.ended(worker.id)
        if status.returncode:
            self._keep_error_file(worker, status.returncode)
        draw, how = random.random(), str(status)
        error, where = _last_words(worker, status.returncode) if status.returncode else ("", "")
        if waited_for_input(error) and not worker.has_input:
            self._tell_of_input(worker)
        age_s = worker.error_age_s if status.returncode else None
        starved = status.out_of_memory
        self._stepper.report(WorkerExited(worker.id, status.returncode, how, draw, error, where, starved, age_s))

    def _is_known(self, worker: Worker) -> bool:
        """Return whether the job has it. Another driver may have started one that is not in this job's journal."""
        return record_of(self._stepper.state, worker.id) is not None

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        """Report the loss of a host with these workers: one event for each host."""
        hosts: dict[str, list[WorkerId]] = {}
        for worker in workers:
            self._ends[worker.id] = worker, _LOST
            self._forget(worker.id)
            self._scripts.ended(worker.id)
            hosts.setdefault(worker.id.hostname, []).append(worker.id)
        for hostname, there in hosts.items():
            self._stepper.report(HostLost(hostname, why, tuple(there), random.random()))

    def killed(self, order: KillWorker) -> None:
        """Report that a process is being killed."""
        if order.hangs:
            self._chronicle.worker_hung(order.worker, order.reason)
        else:
            self._chronicle.worker_stopped(order.worker, f"it {order.reason}")

    def spared(self, order: KillWorker) -> None:
        """Report that a process is not killed: only what runs around it is left."""
        if order.exits:
            self._stepper.report(WorkerSpared(order.worker))

    def _tell_of_input(self, worker: Worker) -> None:
        if self._has_told_of_input:  # all ranks do the same, as a rule
            return
        self._has_told_of_input = True
        rank = worker.label if worker.label.isdecimal() else "RANK"
        self._chronicle.warning(
            f"worker {worker.id} tried to read its standard input, as breakpoint() does, but has none: run "
            f"elasticrun in a terminal with --stdin {rank} to debug that rank; elasticrun stacks shows where all "
            "ranks are (docs/debugging.md)"
        )

    # --- commands --------------------------------------------------------------------------------------------------

    def report(self, command: ReportDying | ReportExit) -> None:
        """Report an end, now that the core has processed it."""
        worker, status = self._ends[command.worker]
        if isinstance(command, ReportDying):
            self._chronicle.worker_dying(command.worker, worker, command.how)
            return
        assert status is not None
        del self._ends[command.worker]
        self._chronicle.worker_exited(command.worker, worker, status, expected=command.expected)
        self._standings.exited(command.worker)

    # --- error files -----------------------------------------------------------------------------------------------

    def round_begins(self) -> None:
        """Forget the error files so far: the first failure since the last round counts."""
        self._error_files.clear()

    def pass_on_error(self, path: str) -> None:
        """Write the failure of the worker that failed first, if one did, to this process's own error file."""
        failure = self._stepper.state.first_failure
        if failure is not None:
            text, returncode = self._error_files.get(failure.worker, ("", None))
            pass_on(path, text, str(failure), ExitCode.USER_CODE_FAILED if returncode is None else returncode)

    def _keep_error_file(self, worker: Worker, returncode: int | None) -> None:
        # A joiner's failure ends no job. Hosts with ever new names may fail while the job waits for slots.
        state = self._stepper.state
        if state.round_id and not state.is_member(worker.id):
            return
        if worker.id in self._error_files or len(self._error_files) < _MOST_ERROR_FILES:
            self._error_files[worker.id] = worker.error_file, returncode


def _last_words(worker: Worker, returncode: int | None) -> tuple[str, str]:
    """Return a worker's error, and where it was raised, preferably from its error file.

    Args:
        worker: a worker that has ended, or is about to.
        returncode: its exit code, or minus a signal's number; None if its end was not seen.
    """
    raised = raised_in(worker.error_file)
    if raised is None:
        # A process that exits by itself ends by its exception. A signal may come long after an exception that was
        # caught.
        return last_words(worker.last_lines, of_traceback=returncode is not None and returncode > 0)
    return raised.error, last_words(raised.callstack)[1]
