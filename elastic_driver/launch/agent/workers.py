"""The workers of one host: carries out the driver's orders about them, and reports their starts and ends.

Owns what an agent adds to a worker's process (:mod:`elastic_driver.launch.local.keeper`): the key with which the worker
authenticates here, its vitals page, its error file, its standard input, and how much output may be in flight. Decides
nothing. Knows nothing of rounds and connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic_driver.errors import LaunchError, RendezvousProtocolError, in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.backlog import Backlog
from elastic_driver.launch.agent.bars import BarScreen, BarsOfWorkers
from elastic_driver.launch.agent.figures import HostFigures
from elastic_driver.launch.agent.script import script_of
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.launch.error_files import ENV_ERROR_FILE, ErrorFiles, read_error_file
from elastic_driver.launch.local.input import WorkerInput
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.processes.spawn import Given
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus, Stream
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Dying,
    Exited,
    Finished,
    Input,
    InputTaken,
    Interrupted,
    Kill,
    KillAll,
    Labels,
    NotStarted,
    Output,
    PassOn,
    Prepare,
    Prepared,
    Resize,
    Shown,
    Spared,
    Start,
    Started,
    Stop,
    Warmed,
    WarmUp,
    Warning,
    Welcome,
    WorkerLevel,
    WorkerPhase,
    worker_named,
)
from elastic_driver.rendezvous.environment import ENV_CHIEF, ENV_OWNER, ENV_RENDEZVOUS, ENV_VITALS
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Bar

# Limit of unacknowledged bytes. Beyond it output is not read, until half of it is acknowledged.
CREDIT_BYTES = 64 << 10
# Limit of bytes acknowledged but not yet persisted by the driver: the next driver may need them again.
UNKEPT_BYTES = 4 << 20
# States of progress bars are sent only while less than this is unacknowledged, to leave the room to output.
BAR_CREDIT_BYTES = 4 << 10


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker, from the order to start it until nothing is left of it.

    If its process is replaced by another, for another place, the driver is not notified.

    Attributes:
        order: to start it, with later changes applied.
        pid: of the process reported to the driver; 0 before it runs.
        script: the script that it runs, and its digest; see script_of.
        has_ended: whether its death has been reported to the driver.
        replaced: whether its process is being killed to be replaced by another.
        death: of that process, not reported to the driver.
        error_file: the path to which it writes its last error; "" before it is started.
        page: its vitals page; None if no descriptor is available.
        input: its standard input, if that comes from the driver.
    """

    order: Start
    pid: int = 0
    script: tuple[str, str] = ("", "")
    has_ended: bool = False
    replaced: bool = False
    death: Exited | None = None
    error_file: str = ""
    page: VitalsPage | None = None
    input: WorkerInput | None = None

    def new_page(self) -> str:
        """Make its vitals page and return the path; "" if no file is available: it is only observed from outside."""
        with contextlib.suppress(OSError):
            self.page = VitalsPage()
            return self.page.path
        return ""

    def close(self) -> None:
        """Close the files of its process. Harmless when repeated."""
        page, self.page = self.page, None
        if page is not None:
            page.close()
        given, self.input = self.input, None
        if given is not None:
            given.close()


class NodeScreen(BarScreen, Protocol):
    """Shows the output of a node's workers on that node."""

    def show(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Show whole lines of a worker, prefix and newline included."""


class HostWorkers:
    """The workers of this host, also their keeper's OutputSink and ProcessListener. Used on the event loop only.

    Args:
        welcome: the driver's welcome.
        mark: is in the environment of every process started here, and of no other.
        url: of the server for the workers.
        send: sends the driver a message.
        has_room: returns whether the driver accepts output now. While it does not, the workers of a job with a journal
            continue to write, and all others wait.
        has_room_for_bars: returns whether it accepts states of progress bars now.
        on_gone: called with each worker that has died.
        on_failing: called with each worker that fails, and how; perhaps twice.
        more_of: returns further variables for a worker, given its command and its other variables.
        tasks: runs background tasks.
        environ: returns a worker's whole environment, given the variables that the driver sets; its marks are added.
        own_folder: whether workers run in this process's folder, with its umask, instead of in the driver's.
        stdin: the standard input of the driver's process; None if this process does not have it.
        screen: also shows the output of the workers here; None for no screen.

    Attributes:
        bars: selects and sends the workers' progress bars.
        figures: the figures that their training scripts report.
        ends_by: the signal that replaces SIGTERM from now on; None for SIGTERM.
    """

    def __init__(
        self,
        welcome: Welcome,
        mark: str,
        url: str,
        *,
        send: Callable[[AgentMessage], None],
        has_room: Callable[[], bool],
        has_room_for_bars: Callable[[], bool],
        on_gone: Callable[[WorkerId], None],
        on_failing: Callable[[WorkerId, str], None] = lambda worker, how: None,
        more_of: Callable[[WorkerId, Sequence[str], Mapping[str, str]], Awaitable[Mapping[str, str]]],
        tasks: Tasks,
        environ: Callable[[Mapping[str, str]], Mapping[str, str]],
        own_folder: bool = False,
        screen: NodeScreen | None = None,
        stdin: int | None = None,
    ) -> None:
        self._stdin = stdin
        self._environ = environ
        self._screen = screen
        self._send = send
        self._on_gone = on_gone
        self._on_failing = on_failing
        self._more_of = more_of
        self._tasks = tasks
        self._own = {ENV_RENDEZVOUS: url, ENV_OWNER: name_of_this_process()}
        self._bad_folder = "" if own_folder else _enter(welcome)
        self._keeper = ProcessKeeper(
            self,
            self,
            prefix_timestamp=welcome.prefix_timestamp,
            mark=mark,
            warn=self.warn,
            warm=welcome.warm,
            warm_first=welcome.warm_first,
            preload=welcome.preload,
            on_warm=self._is_warm,
            is_watched=lambda label: self.bars.are_watched(label),
        )
        self.bars = BarsOfWorkers(send, lambda: self.has_said_all and has_room_for_bars(), screen, welcome.bars)
        self.figures = HostFigures(send, has_room_for_bars)
        self._workers: dict[WorkerId, _Worker] = {}
        self._warmed: list[AgentMessage] = []  # last reports to the driver about workers that can be forked
        self._error_files = ErrorFiles()
        self._paused = False
        self._backlog = Backlog(send, has_room) if welcome.driver_timeout_s else None
        self.ends_by: signal.Signals | None = None

    # --- for the server and its handler ----------------------------------------------------------------------------

    def has(self, worker: WorkerId | None) -> bool:
        """Return whether it is one of this host's workers; None is not."""
        return worker in self._workers

    def runs(self, worker: WorkerId) -> bool:
        """Return whether the worker's process exists, or is about to."""
        return self._keeper.runs(worker)

    def _process(self, worker: WorkerId) -> ProcessTree | None:
        """Return its process while that is alive."""
        process = self._keeper.process(worker)
        return process if process is not None and process.is_alive else None

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """Watch the threads that a worker reports to live as long as it does."""
        process = self._process(worker)
        if process is not None:
            process.watch_threads(pid, thread)

    def pid(self, worker: WorkerId) -> int | None:
        """Return the PID of its process; None if it is not running."""
        process = self._process(worker)
        return None if process is None else process.pid

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        """Return each running worker, the PID of the process that was started for it, and its page."""
        return [
            (worker, process.pid, one.page)
            for worker, one in self._workers.items()
            if (process := self._process(worker)) is not None
        ]

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shut down its connections to and from these addresses and ports."""
        process = self._process(worker)
        if process is not None:
            await process.sever(endpoints)

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        """Kill its process and start another in its place, with these variables, without notifying the driver.

        Args:
            worker: the worker.
            env: variables that differ from the order to start it.
        """
        process = self._process(worker)
        if process is not None and not process.is_ending:
            one = self._workers[worker]
            one.order = replace(one.order, env={**one.order.env, **env})
            one.replaced = True
            process.kill()

    # --- for a driver that takes the job over ----------------------------------------------------------------------

    def levels(self) -> list[WorkerLevel]:
        """Return the state of every worker of which anything is left here."""
        return [
            WorkerLevel(
                worker.key,
                WorkerPhase.ENDED if one.has_ended else WorkerPhase.RUNS if one.pid else WorkerPhase.ORDERED,
                one.pid,
                one.order.label,
                one.order.rank,
                leaving=False,
                exiting=False,
            )
            for worker, one in self._workers.items()
        ]

    @property
    def warmed(self) -> Sequence[AgentMessage]:
        """The last reports to the driver about workers that can be forked here."""
        return self._warmed

    # --- orders of the driver --------------------------------------------------------------------------------------

    def take(self, message: AgentMessage) -> bool:
        """Carry out an order. Returns whether the message was one.

        Raises:
            RendezvousProtocolError: it names no worker, or no signal.
        """
        match message:
            case Start(key):
                self._begin(worker_named(key), message)
            case Stop(key):
                self._stop(worker_named(key), message)
            case PassOn(number):
                self.pass_on(_signal_of(number))
            case Kill(key):
                self._kill(worker_named(key), message)
            case KillAll():
                self.kill()
            case Labels(labels):
                for key, label in labels.items():
                    self._label(worker_named(key), label)
            case Input(key, end):
                if given := self._input(worker_named(key)):
                    given.write(message.blob)
                    if end:
                        given.end()
                else:
                    self._send(InputTaken(key, len(message.blob)))
            case Resize(key, rows, columns):
                if given := self._input(worker_named(key)):
                    given.resize(rows, columns)
            case WarmUp():
                self._keeper.warm_up()
            case Prepare():
                self._tasks.start(self._prepare(message))
            case _:
                return False
        return True

    def pass_on(self, number: signal.Signals) -> None:
        """Send this signal to the process of each running worker; see ProcessTree."""
        self._keeper.pass_on(number)

    def kill(self) -> None:
        """Send SIGKILL to all workers, and to those being started as soon as they exist."""
        for worker in self._workers:
            self._keep(worker)
        self._keeper.kill_all()

    async def close(self) -> None:
        """Kill all that still run. Blocks until nothing is left, and everything has been reported to the driver."""
        self.resume()  # reads what is left in pipes
        for worker in self._workers:
            self._keep(worker)
        await self._keeper.close()
        self.figures.close()
        self._error_files.remove()

    @property
    def has_said_all(self) -> bool:
        """Whether all output kept here has been sent to the driver."""
        return self._backlog is None or self._backlog.is_empty

    def drop_output(self) -> None:
        """Drop the output kept here: nothing is left to receive it."""
        if self._backlog is not None:
            self._backlog.close()

    def pause(self) -> None:
        """Stop reading the workers' output, or keep it here, until the driver catches up with what was sent."""
        if self._backlog is None and not self._paused:
            self._paused = True
            self._keeper.pause_output()

    def resume(self) -> None:
        """Resume it once the driver keeps up again."""
        if self._backlog is not None:
            self._backlog.go_on()
        if self._paused:
            self._paused = False
            self._keeper.resume_output()
        self.bars.go_on()

    def warn(self, text: str) -> None:
        """Warn the user."""
        self._send(Warning(text))

    # --- output of workers (OutputSink) ----------------------------------------------------------------------------

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """Do nothing: Started reports it."""

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Send the driver whole lines of a worker, or keep them; show them on the node's screen."""
        if self._backlog is not None:
            self._backlog.write(worker.key, stream, data)
        else:
            self._send(Output(worker.key, stream, data))
        if self._screen is not None:
            self._screen.show(worker, stream, data)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Pass on the newest state of a worker's progress bar."""
        self.bars.take(worker, bar)

    def end(self, worker: WorkerId) -> None:
        """Drop its progress bars; Finished reports the end."""
        self.bars.end(worker)

    # --- orders ----------------------------------------------------------------------------------------------------

    def _begin(self, worker: WorkerId, order: Start) -> None:
        if worker not in self._workers:
            self._workers[worker] = _Worker(order)
            self._start(worker)

    def _start(self, worker: WorkerId) -> None:
        self._keeper.start(worker, self._workers[worker].order.label, lambda: self._launch(worker))

    async def _launch(self, worker: WorkerId) -> Launch:
        """Return what to run as this worker.

        Raises:
            LaunchError: something that it needs is missing here.
        """
        one = self._workers[worker]
        one.error_file = self._error_files.new()
        env = {**self._environ(one.order.env), **self._own}
        if ENV_CHIEF in one.order.env:
            env[ENV_RENDEZVOUS] = one.order.env[ENV_RENDEZVOUS]  # it connects to the driver itself, at its socket
        env[ENV_ERROR_FILE] = one.error_file
        env |= {ENV_VITALS: one.new_page(), **self.figures.new(worker)}
        if self._bad_folder:
            raise CommandNotFoundError(self._bad_folder)
        env |= await self._more_of(worker, one.order.command, env)
        one.script = await asyncio.to_thread(script_of, one.order.command, Path.cwd())
        return Launch(
            one.order.command,
            env,
            one.order.rank,
            given=self._given(worker, one),
            shown=(lambda data: self._send(Shown(worker.key, data))) if one.order.stdin == "terminal" else None,
        )

    async def _prepare(self, order: Prepare) -> None:
        if not self._bad_folder:
            await self._keeper.prepare(order.command, {**self._environ(order.env), **self._own})
        self._tell_warmed(Prepared())

    def _stop(self, worker: WorkerId, order: Stop) -> None:
        number = _signal_of(order.signal)
        if self.ends_by is not None and number == signal.SIGTERM:
            number = self.ends_by
        self._keep(worker)
        self._keeper.stop(worker, order.grace_s, sever=order.sever, number=number)

    def _kill(self, worker: WorkerId, order: Kill) -> None:
        self._keep(worker)
        process = self._keeper.process(worker)
        if process is None or not (order.exits or order.stacks_s > 0):
            self._keeper.kill(worker)
        elif not process.kill_hung(stacks_s=order.stacks_s, exits=order.exits) and process.is_alive:
            self._send(Spared(worker.key))

    def _label(self, worker: WorkerId, label: str) -> None:
        if one := self._workers.get(worker):
            one.order = replace(one.order, label=label)
            self._keeper.label(worker, label)

    def _keep(self, worker: WorkerId) -> None:
        """Cancel the replacement of its process, whose end is then the worker's."""
        if one := self._workers.get(worker):
            one.replaced = False
            death, one.death = one.death, None
            if death is not None:
                self._report_death(worker, death)

    def _input(self, worker: WorkerId) -> WorkerInput | None:
        one = self._workers.get(worker)
        return None if one is None else one.input

    # --- starts and ends (ProcessListener) -------------------------------------------------------------------------

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """Report the start of a worker's first process."""
        one = self._workers[worker]
        if one.input is not None:
            one.input.started()
        if not one.pid:
            one.pid = process.pid
            self._send(Started(worker.key, process.pid, *one.script))

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Report that a worker could not be started; if it had a process before, as the death of the worker."""
        one = self._workers[worker]
        if one.pid:
            self._report_death(worker, Exited(worker.key, -signal.SIGKILL, []))
            self._finish(worker)
        else:
            self._forget(worker)
            self._send(NotStarted(worker.key, str(error), isinstance(error, CommandNotFoundError)))
            self._on_gone(worker)

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """Report that a worker is dying, unless its process is being replaced."""
        one = self._workers[worker]
        if not one.replaced:
            returncode, note = (None, "") if isinstance(status, str) else (status.returncode, status.note)
            error, age_s = read_error_file(one.error_file)
            lines, at = list(process.last_lines), _written_at(age_s)
            self._send(Dying(worker.key, returncode, str(status), lines, error, age_s, note, at))
            self._on_failing(worker, str(status))

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """Report that a worker is dead, unless its process is being replaced."""
        one = self._workers[worker]
        self.figures.ended(worker)
        error, age_s = ("", None) if status.ok else read_error_file(one.error_file)
        lines, at = list(process.last_lines), _written_at(age_s)
        death = Exited(worker.key, status.returncode, lines, error, age_s, status.note, at)
        if one.replaced:
            one.death = death
        else:
            self._report_death(worker, death)

    def finished(self, worker: WorkerId) -> None:
        """Report that nothing is left of a worker, or start the process that replaces its last one."""
        one = self._workers[worker]
        with contextlib.suppress(OSError):
            os.unlink(one.error_file)
        if one.replaced:
            one.replaced, one.death = False, None
            one.close()
            self._start(worker)
        else:
            self._finish(worker)

    def _finish(self, worker: WorkerId) -> None:
        """Report to the driver, after the last output, that nothing is left of the worker."""

        def tell() -> None:
            self._forget(worker)
            self._send(Finished(worker.key))

        self._workers[worker].close()
        if self._backlog is None:
            tell()
        else:
            self._backlog.behind(tell)

    def _report_death(self, worker: WorkerId, death: Exited) -> None:
        self._workers[worker].has_ended = True
        self._send(death)
        if death.returncode:
            self._on_failing(worker, str(ExitStatus(death.returncode, note=death.note)))
        self._on_gone(worker)

    def _is_warm(self, pid: int, took_s: float) -> None:
        self._tell_warmed(Warmed(pid, took_s))

    def _tell_warmed(self, news: Warmed | Prepared) -> None:
        self._warmed = [each for each in self._warmed if type(each) is not type(news)] + [news]
        self._send(news)

    def _forget(self, worker: WorkerId) -> None:
        self.figures.ended(worker)
        self._workers.pop(worker).close()

    # --- resources of a worker -------------------------------------------------------------------------------------

    def _given(self, worker: WorkerId, one: _Worker) -> Given | None:
        """Return its standard input, opened.

        Raises:
            LaunchError: no terminal or no descriptor is available.
        """
        order = one.order
        if order.stdin == "inherit":
            return None if self._stdin is None else Given(self._stdin)
        if not order.stdin:
            return None
        try:
            one.input = WorkerInput(
                order.stdin,
                taken=lambda size: self._send(InputTaken(worker.key, size)),
                interrupted=lambda: self._send(Interrupted(worker.key)),
                stderr_too=order.stderr_too,
                rows=order.rows,
                columns=order.columns,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start worker {worker}: cannot open a {order.stdin} for it: {in_words(error)}"
            ) from error
        return one.input.given


def _written_at(age_s: float | None) -> float | None:
    return None if age_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) - age_s


def _signal_of(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError as error:
        raise RendezvousProtocolError(f"cannot send a worker signal {number}: there is no such signal") from error


def _enter(welcome: Welcome) -> str:
    """Switch to the workers' folder and umask. Returns the error message; "" on success."""
    if welcome.umask >= 0:
        os.umask(welcome.umask)
    try:
        os.chdir(welcome.cwd)
    except OSError as error:
        return f"cannot start workers on host {welcome.host} in the folder {welcome.cwd}: {in_words(error)}"
    return ""
