"""The workers of one host: what the driver orders of them is done, and what becomes of them is told.

Owns each worker's process, from the order to start it until nothing is left of it, the key that it proves itself with
here, and how much output may be on its way. Decides nothing. Knows nothing of rounds and connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.launch.error_files import ENV_ERROR_FILE, ErrorFiles, read_error_file
from elastic_driver.launch.launcher import CommandNotFoundError, ExitStatus, Stream
from elastic_driver.launch.local.input import WorkerInput
from elastic_driver.launch.local.launcher import LocalLauncher, LocalWorker
from elastic_driver.launch.processes.spawn import Given
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
    worker_named,
)
from elastic_driver.rendezvous.credentials import ENV_KEY, KEY_BYTES, Identity
from elastic_driver.rendezvous.environment import ENV_OWNER, ENV_RENDEZVOUS, ENV_VITALS
from elastic_driver.system.process_name import name_of_this_process
from elastic_driver.system.tasks import Tasks

# What may be on its way that the driver has not taken. Then output is not read, and again when half of it is taken.
CREDIT_BYTES = 64 << 10


@dataclass(slots=True)
class _Starting:
    """A worker whose process is not there yet.

    Attributes:
        label: as it stands now.
        runs: whether the driver was told that its process is there.
        stop_within_s: it is to be stopped as soon as it is there, with this grace; None for not.
        sever: whether its connections are shut then.
        number: the signal that it gets then.
        is_again: whether the driver takes it for started already.
    """

    label: str
    runs: bool = False
    is_again: bool = False
    stop_within_s: float | None = None
    sever: bool = False
    number: signal.Signals = signal.SIGTERM

    def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> None:
        self.sever = self.sever or sever
        if self.stop_within_s is None:
            self.number = number
        if self.stop_within_s is None or grace_s < self.stop_within_s:
            self.stop_within_s = grace_s


class NodeScreen(Protocol):
    """Shows what the workers of a node write, on that node."""

    def show(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Takes whole lines of a worker's, prefix and newline included."""


class HostWorkers:
    """See above. An OutputSink of its launcher's; gives its server the keys. Used on the event loop only.

    Args:
        welcome: what the driver has told this agent.
        mark: stands in the environment of all that is started here, and nowhere else.
        url: of the server for the workers.
        send: tells the driver something.
        on_gone: told of each worker that has died.
        more_of: what else a worker is to find in its environment, of its command and the rest of that.
        tasks: run what nobody waits for.
        environ: the whole environment of a worker's, of what the driver gives it; its marks come on top.
        own_folder: whether workers run in this process's folder, with its umask, instead of in the driver's.
        stdin: the standard input of the driver's process; None where this process does not have it.
        screen: shows what workers write here, too; None for nobody.

    Attributes:
        ends_by: the signal that workers are ended with from now on, in place of SIGTERM; None for that.
    """

    def __init__(
        self,
        welcome: Welcome,
        mark: str,
        url: str,
        *,
        send: Callable[[Said], None],
        on_gone: Callable[[WorkerId], None],
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
        self._more_of = more_of
        self._tasks = tasks
        self._own = {ENV_RENDEZVOUS: url, ENV_OWNER: name_of_this_process()}
        self._bad_folder = "" if own_folder else _enter(welcome)
        self._launcher = LocalLauncher(
            self,
            prefix_timestamp=welcome.prefix_timestamp,
            mark=mark,
            warn=self.warn,
            warm=welcome.warm,
            warm_first=welcome.warm_first,
            preload=welcome.preload,
            on_warm=lambda pid, took_s: send(Warmed(pid, took_s)),
        )
        self._keys: dict[WorkerId, bytes] = {}
        self._starting: dict[WorkerId, _Starting] = {}
        self._processes: dict[WorkerId, LocalWorker] = {}
        self._error_files = ErrorFiles()
        self._error_file_of: dict[WorkerId, str] = {}
        self._pages: dict[WorkerId, VitalsPage] = {}  # none where no descriptor is to be had
        self._orders: dict[WorkerId, Start] = {}
        self._inputs: dict[WorkerId, WorkerInput] = {}
        self._again: set[WorkerId] = set()  # who is ended to be started once more, and the driver need not know
        self._paused = False
        self.ends_by: signal.Signals | None = None

    # --- for the server and its handler ----------------------------------------------------------------------------

    def of(self, identity: Identity) -> bytes | None:
        """The key of a worker of this host; None for all others."""
        return None if identity.worker is None else self._keys.get(identity.worker)

    def runs(self, worker: WorkerId) -> bool:
        """Whether the worker's process is there, or about to be."""
        process = self._processes.get(worker)
        return worker in self._starting if process is None else not process.exited.done()

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """A worker has told which of its threads live as long as it does."""
        process = self._processes.get(worker)
        if process is not None:
            process.watch_threads(pid, thread)

    def pid(self, worker: WorkerId) -> int | None:
        """Of its process; None when none runs."""
        process = self._processes.get(worker)
        return None if process is None or process.exited.done() else process.pid

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        """See WatchedWorkers."""
        return [
            (worker, process.pid, self._pages.get(worker))
            for worker, process in self._processes.items()
            if not process.exited.done()
        ]

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shuts its connections to and from these addresses and ports."""
        process = self._processes.get(worker)
        if process is not None and not process.exited.done():
            await process.sever(endpoints)

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        """Ends its process and starts another in its place, with these variables. The driver is told nothing.

        Args:
            worker: which.
            env: what is otherwise than in the order to start it.
        """
        process, order = self._processes.get(worker), self._orders.get(worker)
        if process is not None and order is not None and not process.exited.done() and not process.is_ending:
            self._orders[worker] = replace(order, env={**order.env, **env})
            self._again.add(worker)
            process.kill()

    # --- what the driver orders ------------------------------------------------------------------------------------

    def take(self, message: Said) -> bool:
        """Carries out an order. Returns whether it was one.

        Raises:
            RendezvousProtocolError: it names no worker, or no signal.
        """
        match message:
            case Start(key):
                self._begin(worker_named(key), message)
            case Stop(key, grace_s, sever, number):
                self._stop(worker_named(key), grace_s, sever=sever, number=_signal_of(number))
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
                if one := self._inputs.get(worker_named(key)):
                    one.write(message.blob)
                    if end:
                        one.end()
                else:
                    self._send(InputTaken(key, len(message.blob)))
            case Resize(key, rows, columns):
                if one := self._inputs.get(worker_named(key)):
                    one.resize(rows, columns)
            case WarmUp():
                self._launcher.warm_up()
            case Prepare():
                self._tasks.start(self._prepare(message))
            case _:
                return False
        return True

    def pass_on(self, number: signal.Signals) -> None:
        """Sends this signal to the process of each worker that runs; see Launcher."""
        self._launcher.pass_on(number)

    def kill(self) -> None:
        """SIGKILL to all, and to those that are being started as soon as they are there."""
        for starting in self._starting.values():
            starting.stop(0.0)
        self._again.clear()
        self._launcher.kill()

    async def close(self) -> None:
        """Kills what still runs. Blocks until nothing is left, and the driver was told of everything."""
        self.resume()  # what is left in pipes comes now
        self._again.clear()
        await self._launcher.close()
        await asyncio.sleep(0)
        self._error_files.remove()

    def pause(self) -> None:
        """The driver does not take what was sent: workers' output is not read for now."""
        if not self._paused:
            self._paused = True
            self._launcher.pause_output()

    def resume(self) -> None:
        """It does again."""
        if self._paused:
            self._paused = False
            self._launcher.resume_output()

    def warn(self, text: str) -> None:
        """Something that the user should look at."""
        self._send(Warning(text))

    # --- what workers write (OutputSink) ---------------------------------------------------------------------------

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """See OutputSink."""
        starting = self._starting.get(worker)
        if starting is not None:
            starting.runs = True
            if starting.is_again:
                return
        self._send(Started(worker.key, pid))

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """See OutputSink."""
        self._send(Output(worker.key, stream, data))
        if self._screen is not None:
            self._screen.show(worker, stream, data)

    def end(self, worker: WorkerId) -> None:
        """See OutputSink: Finished says it."""

    # --- processes -------------------------------------------------------------------------------------------------

    def _begin(self, worker: WorkerId, order: Start) -> None:
        if worker in self._starting or worker in self._processes:
            return
        self._keys[worker] = secrets.token_bytes(KEY_BYTES)
        self._starting[worker] = _Starting(order.label)
        self._orders[worker] = order
        self._tasks.start(self._start(worker, order))

    async def _prepare(self, order: Prepare) -> None:
        if not self._bad_folder:
            await self._launcher.prepare(order.command, {**self._environ(order.env), **self._own})
        self._send(Prepared())

    async def _start(self, worker: WorkerId, order: Start) -> None:
        error_file = self._error_file_of[worker] = self._error_files.new()
        env = {**self._environ(order.env), **self._own, ENV_KEY: self._keys[worker].hex()}
        env[ENV_ERROR_FILE] = error_file
        env[ENV_VITALS] = self._new_page(worker)
        starting = self._starting[worker]
        try:
            if self._bad_folder:
                raise CommandNotFoundError(self._bad_folder)
            env |= await self._more_of(worker, order.command, env)
            process = await self._launcher.start(
                worker,
                order.command,
                env,
                label=order.label,
                rank_at_launch=order.rank,
                given=self._given(worker, order),
                shown=(lambda data: self._send(Shown(worker.key, data))) if order.stdin == "terminal" else None,
            )
        except LaunchError as error:
            if starting.runs or starting.is_again:  # for a moment
                self._send(Exited(worker.key, -signal.SIGKILL, []))
                self._send(Finished(worker.key))
            else:
                self._send(NotStarted(worker.key, str(error), isinstance(error, CommandNotFoundError)))
            self._keys.pop(worker, None)
            self._orders.pop(worker, None)
            self._error_file_of.pop(worker, None)
            self._close_page(worker)
            self._close_input(worker)
            self._on_gone(worker)
            return
        finally:
            del self._starting[worker]
            if worker in self._inputs:
                self._inputs[worker].started()
        self._processes[worker] = process
        process.label = starting.label
        process.dying.add_done_callback(lambda future: self._dying(process, future))
        process.exited.add_done_callback(lambda _: self._exited(process))
        process.finished.add_done_callback(lambda _: self._finished(process))
        if starting.stop_within_s is not None:
            self._stop(worker, starting.stop_within_s, sever=starting.sever, number=starting.number)

    def _stop(
        self, worker: WorkerId, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM
    ) -> None:
        if self.ends_by is not None and number == signal.SIGTERM:
            number = self.ends_by
        process, starting = self._processes.get(worker), self._starting.get(worker)
        self._again.discard(worker)
        if process is not None:
            self._tasks.start(_stopped(process, grace_s, sever=sever, number=number))
        elif starting is not None:
            starting.stop(grace_s, sever=sever, number=number)

    def _kill(self, worker: WorkerId, order: Kill) -> None:
        process = self._processes.get(worker)
        self._again.discard(worker)
        if process is None:
            self._stop(worker, 0.0)
        elif order.exits or order.stacks_s > 0:
            self._tasks.start(self._kill_hung(process, order))
        else:
            process.kill()

    async def _kill_hung(self, process: LocalWorker, order: Kill) -> None:
        killed = await process.kill_hung(stacks_s=order.stacks_s, exits=order.exits)
        if not killed and not process.exited.done():
            self._send(Spared(process.worker.key))

    def _label(self, worker: WorkerId, label: str) -> None:
        one = self._processes.get(worker) or self._starting.get(worker)
        if one is not None:
            one.label = label

    def _dying(self, process: LocalWorker, future: asyncio.Future[ExitStatus | str]) -> None:
        if future.cancelled() or process.exited.done() or process.worker in self._again:
            return
        status = future.result()
        returncode, note = (None, "") if isinstance(status, str) else (status.returncode, status.note)
        lines, error = list(process.last_lines), self._error_of(process.worker)
        self._send(Dying(process.worker.key, returncode, str(status), lines, error, note))

    def _exited(self, process: LocalWorker) -> None:
        if process.worker in self._again:
            return
        status = process.exited.result()
        error = "" if status.ok else self._error_of(process.worker)
        self._send(Exited(process.worker.key, status.returncode, list(process.last_lines), error, status.note))
        self._on_gone(process.worker)

    def _finished(self, process: LocalWorker) -> None:
        worker = process.worker
        del self._processes[worker]
        self._close_page(worker)
        self._close_input(worker)
        if worker in self._again:
            self._again.discard(worker)
            order = self._orders[worker]
            self._starting[worker] = _Starting(process.label, is_again=True)
            self._tasks.start(self._start(worker, order))
            return
        self._keys.pop(worker, None)
        self._orders.pop(worker, None)
        with contextlib.suppress(OSError):
            os.unlink(self._error_file_of.pop(process.worker, ""))
        self._send(Finished(process.worker.key))

    def _given(self, worker: WorkerId, order: Start) -> Given | None:
        """Its standard input, opened.

        Raises:
            LaunchError: there is no terminal, or no descriptor, to be had.
        """
        if order.stdin == "inherit":
            return None if self._stdin is None else Given(self._stdin)
        if not order.stdin:
            return None
        try:
            one = self._inputs[worker] = WorkerInput(
                order.stdin,
                taken=lambda size: self._send(InputTaken(worker.key, size)),
                interrupted=lambda: self._send(Interrupted(worker.key)),
                stderr_too=order.stderr_too,
                rows=order.rows,
                columns=order.columns,
            )
        except OSError as error:
            raise LaunchError(f"cannot start worker {worker}: no {order.stdin} for it: {error.strerror}") from error
        return one.given

    def _close_input(self, worker: WorkerId) -> None:
        one = self._inputs.pop(worker, None)
        if one is not None:
            one.close()

    def _new_page(self, worker: WorkerId) -> str:
        """Where the worker says how it is; "" where no file is to be had: it is looked at from outside only."""
        self._close_page(worker)
        try:
            page = self._pages[worker] = VitalsPage()
        except OSError:
            return ""
        return page.path

    def _close_page(self, worker: WorkerId) -> None:
        page = self._pages.pop(worker, None)
        if page is not None:
            page.close()

    def _error_of(self, worker: WorkerId) -> str:
        return read_error_file(self._error_file_of.get(worker, ""))


async def _stopped(process: LocalWorker, grace_s: float, *, sever: bool, number: signal.Signals) -> None:
    await process.stop(grace_s, sever=sever, number=number)


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
        return f"cannot start workers on host {welcome.host} in the folder {welcome.cwd}: {error.strerror}"
    return ""
