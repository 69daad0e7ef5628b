"""The workers of one host: carries out what the driver orders of them, and reports what becomes of them.

Owns what an agent adds to a worker's process (:mod:`elastic_driver.launch.local.keeper`): the key that the worker
proves itself with here, its vitals page, its error file, its standard input, and how much output may be on its way.
Decides nothing. Knows nothing of rounds and connections.
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
    Said,
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

# What may be on its way that the driver has not taken. Then output is not read, and again when half of it is taken.
CREDIT_BYTES = 64 << 10
# Likewise, of what it has taken and would not outlive it: it may be said once more, to the next one.
UNKEPT_BYTES = 4 << 20
# States of progress bars are sent only where less than this is on its way, so that they take no room of output.
BAR_CREDIT_BYTES = 4 << 10


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker, from the order to start it until nothing is left of it.

    A process of its that is replaced by another, for another place, is nothing to the driver.

    Attributes:
        order: to start it, with what has changed since.
        pid: the process that the driver was told of; 0 before it runs.
        script: what it runs, and the digest of that; see script_of.
        has_ended: whether the driver was told that it is dead.
        replaced: whether its process is ended to be replaced by another.
        death: of that process, which the driver was not told.
        error_file: where it leaves its last error; "" before it is started.
        page: where it says how it is; None where no descriptor is to be had.
        input: its standard input, where that comes from the driver.
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
        """Where its process says how it is; "" where no file is to be had: it is looked at from outside only."""
        with contextlib.suppress(OSError):
            self.page = VitalsPage()
            return self.page.path
        return ""

    def close(self) -> None:
        """Closes what its process had. Harmless when repeated."""
        page, self.page = self.page, None
        if page is not None:
            page.close()
        given, self.input = self.input, None
        if given is not None:
            given.close()


class NodeScreen(BarScreen, Protocol):
    """Shows what the workers of a node write, on that node."""

    def show(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Takes whole lines of a worker's, prefix and newline included."""


class HostWorkers:
    """See above. Its keeper's OutputSink and ProcessListener. Used on the event loop only.

    Args:
        welcome: what the driver has told this agent.
        mark: stands in the environment of all that is started here, and nowhere else.
        url: of the server for the workers.
        send: tells the driver something.
        has_room: whether the driver takes output now. Where it does not, the workers of a job with a journal write on,
            and all others wait.
        has_room_for_bars: whether it takes states of progress bars now.
        on_gone: told of each worker that has died.
        on_failing: told of each that ends, and not well, and how; perhaps twice.
        more_of: what else a worker is to find in its environment, of its command and the rest of that.
        tasks: run what nobody waits for.
        environ: the whole environment of a worker's, of what the driver gives it; its marks come on top.
        own_folder: whether workers run in this process's folder, with its umask, instead of in the driver's.
        stdin: the standard input of the driver's process; None where this process does not have it.
        screen: shows what workers write here, too; None for nobody.

    Attributes:
        bars: which of the workers' are told of.
        figures: what their trainings tell of themselves.
        ends_by: the signal that workers are ended with from now on, in place of SIGTERM; None for that.
    """

    def __init__(
        self,
        welcome: Welcome,
        mark: str,
        url: str,
        *,
        send: Callable[[Said], None],
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
        self._warmed: list[Said] = []  # what the driver was told of workers that can be forked
        self._error_files = ErrorFiles()
        self._paused = False
        self._backlog = Backlog(send, has_room) if welcome.driver_timeout_s else None
        self.ends_by: signal.Signals | None = None

    # --- for the server and its handler ----------------------------------------------------------------------------

    def has(self, worker: WorkerId | None) -> bool:
        """Whether it is one of this host's; None is not."""
        return worker in self._workers

    def runs(self, worker: WorkerId) -> bool:
        """Whether the worker's process is there, or about to be."""
        return self._keeper.runs(worker)

    def _process(self, worker: WorkerId) -> ProcessTree | None:
        """Its process, while that lives."""
        process = self._keeper.process(worker)
        return process if process is not None and process.is_alive else None

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """A worker has told which of its threads live as long as it does."""
        process = self._process(worker)
        if process is not None:
            process.watch_threads(pid, thread)

    def pid(self, worker: WorkerId) -> int | None:
        """Of its process; None when none runs."""
        process = self._process(worker)
        return None if process is None else process.pid

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        """See WatchedWorkers."""
        return [
            (worker, process.pid, one.page)
            for worker, one in self._workers.items()
            if (process := self._process(worker)) is not None
        ]

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shuts its connections to and from these addresses and ports."""
        process = self._process(worker)
        if process is not None:
            await process.sever(endpoints)

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        """Ends its process and starts another in its place, with these variables. The driver is told nothing.

        Args:
            worker: which.
            env: what is otherwise than in the order to start it.
        """
        process = self._process(worker)
        if process is not None and not process.is_ending:
            one = self._workers[worker]
            one.order = replace(one.order, env={**one.order.env, **env})
            one.replaced = True
            process.kill()

    # --- for a driver that comes in the place of another -----------------------------------------------------------

    def levels(self) -> list[WorkerLevel]:
        """All of whom anything is left here."""
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
    def warmed(self) -> Sequence[Said]:
        """What the last driver was told of workers that can be forked here."""
        return self._warmed

    # --- what the driver orders ------------------------------------------------------------------------------------

    def take(self, message: Said) -> bool:
        """Carries out an order. Returns whether it was one.

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
        """Sends this signal to the process of each worker that runs; see ProcessTree."""
        self._keeper.pass_on(number)

    def kill(self) -> None:
        """SIGKILL to all, and to those that are being started as soon as they are there."""
        for worker in self._workers:
            self._keep(worker)
        self._keeper.kill_all()

    async def close(self) -> None:
        """Kills what still runs. Blocks until nothing is left, and the driver was told of everything."""
        self.resume()  # what is left in pipes comes now
        for worker in self._workers:
            self._keep(worker)
        await self._keeper.close()
        self.figures.close()
        self._error_files.remove()

    @property
    def has_said_all(self) -> bool:
        """Whether no output is kept here that the driver was not sent."""
        return self._backlog is None or self._backlog.is_empty

    def drop_output(self) -> None:
        """Drops what is: nobody is left to be told."""
        if self._backlog is not None:
            self._backlog.close()

    def pause(self) -> None:
        """The driver does not take or keep what was sent: workers' output is not read for now, or is kept here."""
        if self._backlog is None and not self._paused:
            self._paused = True
            self._keeper.pause_output()

    def resume(self) -> None:
        """It does again."""
        if self._backlog is not None:
            self._backlog.go_on()
        if self._paused:
            self._paused = False
            self._keeper.resume_output()
        self.bars.go_on()

    def warn(self, text: str) -> None:
        """Something that the user should look at."""
        self._send(Warning(text))

    # --- what workers write (OutputSink) ---------------------------------------------------------------------------

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """See OutputSink: Started says it."""

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """See OutputSink."""
        if self._backlog is not None:
            self._backlog.write(worker.key, stream, data)
        else:
            self._send(Output(worker.key, stream, data))
        if self._screen is not None:
            self._screen.show(worker, stream, data)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """See OutputSink."""
        self.bars.take(worker, bar)

    def end(self, worker: WorkerId) -> None:
        """See OutputSink: Finished says it."""
        self.bars.end(worker)

    # --- orders ----------------------------------------------------------------------------------------------------

    def _begin(self, worker: WorkerId, order: Start) -> None:
        if worker not in self._workers:
            self._workers[worker] = _Worker(order)
            self._start(worker)

    def _start(self, worker: WorkerId) -> None:
        self._keeper.start(worker, self._workers[worker].order.label, lambda: self._launch(worker))

    async def _launch(self, worker: WorkerId) -> Launch:
        """What is run as this worker.

        Raises:
            LaunchError: it lacks something here.
        """
        one = self._workers[worker]
        one.error_file = self._error_files.new()
        env = {**self._environ(one.order.env), **self._own}
        if ENV_CHIEF in one.order.env:
            env[ENV_RENDEZVOUS] = one.order.env[ENV_RENDEZVOUS]  # it asks the driver itself, at its socket
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
        """Its process is not replaced any more: its end is the worker's."""
        if one := self._workers.get(worker):
            one.replaced = False
            death, one.death = one.death, None
            if death is not None:
                self._report_death(worker, death)

    def _input(self, worker: WorkerId) -> WorkerInput | None:
        one = self._workers.get(worker)
        return None if one is None else one.input

    # --- what becomes of them (ProcessListener) --------------------------------------------------------------------

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """See ProcessListener."""
        one = self._workers[worker]
        if one.input is not None:
            one.input.started()
        if not one.pid:
            one.pid = process.pid
            self._send(Started(worker.key, process.pid, *one.script))

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """See ProcessListener. To the driver the end of one that has taken another's place is that of both."""
        one = self._workers[worker]
        if one.pid:
            self._report_death(worker, Exited(worker.key, -signal.SIGKILL, []))
            self._finish(worker)
        else:
            self._forget(worker)
            self._send(NotStarted(worker.key, str(error), isinstance(error, CommandNotFoundError)))
            self._on_gone(worker)

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """See ProcessListener."""
        one = self._workers[worker]
        if not one.replaced:
            returncode, note = (None, "") if isinstance(status, str) else (status.returncode, status.note)
            error, age_s = read_error_file(one.error_file)
            lines, at = list(process.last_lines), _written_at(age_s)
            self._send(Dying(worker.key, returncode, str(status), lines, error, age_s, note, at))
            self._on_failing(worker, str(status))

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """See ProcessListener."""
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
        """See ProcessListener."""
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
        """The driver is told that nothing is left of it, behind its last output."""

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

    # --- what a worker is given ------------------------------------------------------------------------------------

    def _given(self, worker: WorkerId, one: _Worker) -> Given | None:
        """Its standard input, opened.

        Raises:
            LaunchError: there is no terminal, or no descriptor, to be had.
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
            raise LaunchError(f"cannot start worker {worker}: no {order.stdin} for it: {in_words(error)}") from error
        return one.input.given


def _written_at(age_s: float | None) -> float | None:
    return None if age_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) - age_s


def _signal_of(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError as error:
        raise RendezvousProtocolError(f"cannot send a worker signal {number}: there is none") from error


def _enter(welcome: Welcome) -> str:
    """Takes over the workers' folder and umask. Returns why that cannot be; "" where it can."""
    if welcome.umask >= 0:
        os.umask(welcome.umask)
    try:
        os.chdir(welcome.cwd)
    except OSError as error:
        return f"cannot start workers on host {welcome.host} in the folder {welcome.cwd}: {in_words(error)}"
    return ""
