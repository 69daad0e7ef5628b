"""Workers forked from a warmed process: the keeper's end.

Keeps one process that has imported the heavy modules of the workers' command (``launch/warm/hook/sitecustomize.py``
runs in it), and asks it for workers. It is only an optimization: whatever goes wrong with it, the worker is started
without it, and a warning says why if that is permanent.

Each process made there is this process's own child, so that it is watched, signaled and reaped like any other. Until
its keeper knows of it, it is in the warmed process's group; killing and reaping that group leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from elastic_driver.dialects.horovod import ENV_ADDRESS, ENV_INTERFACE, ENV_PORT, ENV_STORE_PORT
from elastic_driver.dialects.torchrun import PLACE_VARIABLES
from elastic_driver.errors import in_words
from elastic_driver.launch.processes.death import exit_status, set_once, watch_child
from elastic_driver.launch.processes.guard_link import GuardLink
from elastic_driver.launch.processes.spawn import Given, Spawned, output_ends
from elastic_driver.launch.warm.preload import heavy_imports, is_program, read_command, shadowed
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY
from elastic_driver.rendezvous.environment import (
    ENV_LOCAL_RANK,
    ENV_PLACE,
    ENV_RENDEZVOUS,
    ENV_REPORT,
    ENV_REPORT_FD,
    ENV_ROUND,
    ENV_VITALS,
    ENV_WARM,
    ENV_WORKER,
)
from elastic_driver.system.tasks import start_task
from elastic_driver.system.tether import Tether

HOOK = Path(__file__).with_name("hook")
# Variables in which workers differ, and those that name the driver: imported code must not pass for a worker. All
# others must be equal: a library may have read them while it was imported.
_OWN = frozenset(
    (
        ENV_WORKER,
        ENV_LOCAL_RANK,
        ENV_PLACE,
        ENV_ROUND,
        ENV_VITALS,
        ENV_REPORT,
        ENV_REPORT_FD,
        ENV_RENDEZVOUS,
        ENV_RANKS_KEY,
        ENV_ADDRESS,
        ENV_PORT,
        ENV_STORE_PORT,
        ENV_INTERFACE,
        "HOROVOD_HOSTNAME",
        *PLACE_VARIABLES,
        *(f"HOROVOD_{scope}{number}" for scope in ("", "LOCAL_", "CROSS_") for number in ("RANK", "SIZE")),
    )
)
# Room for those variables in the memory where /proc reads a process's environment.
_ROOM = 4096
# Imports of more than a minute hang, or read from a hung disk.
WARM_UP_S = 60.0
# A fork takes milliseconds. A worker waits this long for a warmed process that was stopped, then it starts afresh.
FORK_S = 2.0
# After this many failures without a fork in between, something here prevents it from running.
_MAX_FAILURES = 5
# A SIGKILLed process can linger in the kernel, when it imports from a dead network disk; then it is left behind.
_KILL_S = 5.0


class ForkedProcess:
    """A child that another process made for this one. Reaps like :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._reaped = False

    def wait(self) -> None:
        """Wait until it is dead, and reap it. Blocks until then. Harmless when repeated."""
        if not self._reaped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._reaped = True


@dataclass(frozen=True, slots=True)
class _Plan:
    """The workers for which a warmed process is made: those with this command, environment, folder and umask."""

    command: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    umask: int
    preload: tuple[str, ...]
    must: bool
    folder: Path


@dataclass(eq=False, slots=True)
class _Warmed:
    """A warmed process.

    Attributes:
        ready: whether it accepts requests.
        reason: why it was killed; None if this process did not kill it.
        wanted: whether its death is a failure.
        ended: whether it is killed and reaped.
        settled: done when it is known whether it will ever be ready.
    """

    plan: _Plan
    popen: subprocess.Popen[bytes]
    control: socket.socket
    began: float
    dead: asyncio.Future[None]
    settled: asyncio.Future[None]
    ready: bool = False
    reason: str | None = None
    wanted: bool = True
    ended: bool = False
    has_reader: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)


class WarmStarts:
    """Keeps the warmed process and forks workers. Create it on the event loop.

    Args:
        preload: modules to import; None to choose them by the script.
        pool: runs blocking work.
        guard: ends the warmed process when the driver is dead.
        tether: ends the workers then.
        warn: called with one-line warnings.
        on_ready: called with the warmed process's PID and the seconds it took, whenever workers can be forked from now
            on.
    """

    def __init__(
        self,
        preload: Sequence[str] | None,
        *,
        pool: ThreadPoolExecutor,
        guard: GuardLink,
        tether: Tether,
        warn: Callable[[str], None],
        on_ready: Callable[[int, float], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._preload = None if preload is None else tuple(preload)
        self._pool = pool
        self._guard = guard
        self._tether = tether
        self._warn = warn
        self._on_ready = on_ready
        # Held during each fork, and while a warmed process is killed and reaped: never both at once.
        self._lock = threading.Lock()
        self._wanted_plan: _Plan | None = None
        self._last_inputs: tuple[object, ...] = ()
        self._current: _Warmed | None = None
        self._burials: set[asyncio.Task[None]] = set()
        self._off = False
        self._failures = 0
        self._was_first = False  # whether there has been a warmed process, or cannot be one

    @property
    def pid(self) -> int | None:
        """The warmed process's PID; None if there is none."""
        return None if self._current is None else self._current.popen.pid

    def is_ready(self) -> bool:
        """Return whether the next worker can be forked."""
        return self._current is not None and self._current.ready

    def warm_up(self) -> None:
        """Start the warmed process, if the workers' command can have one and there is none."""
        if self._off or self._current is not None or self._wanted_plan is None:
            return
        try:
            self._current = self._start(self._wanted_plan)
        except (OSError, MemoryError, RuntimeError) as error:
            self._give_up(f"cannot start the warmed process: {in_words(error)}")

    async def wait_first(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Fork the first workers, too: one import for all of a host instead of one for each.

        Starts the warmed process from which this worker can be forked, and blocks until it is ready, or known not to
        become so. Does nothing if there has been one.
        """
        if self._off or self._was_first:
            return
        if self._current is None:
            await self._loop.run_in_executor(self._pool, self._look_at, command, env)
            self.warm_up()
        if self._current is not None:
            await asyncio.shield(self._current.settled)
        self._was_first = True

    def wait_no_more(self) -> None:
        """Make :meth:`wait_first` return now."""
        self._was_first = True
        if self._current is not None:
            set_once(self._current.settled)

    async def close(self) -> None:
        """End the warmed process. Blocks until it is gone."""
        self._off = True
        current = self._current
        if current is not None:
            await self._loop.run_in_executor(self._pool, self._discard, current)
            await asyncio.wait((current.dead,), timeout=1.0)
            if not current.dead.done():
                self._warn(
                    f"cannot kill the warmed process {current.popen.pid}: still alive after SIGKILL; left behind"
                )
                current.control.close()
        while self._burials:
            await asyncio.wait(tuple(self._burials))

    # --- on the event loop -----------------------------------------------------------------------------------------

    def _start(self, plan: _Plan) -> _Warmed:
        with contextlib.ExitStack() as our_ends, contextlib.ExitStack() as childs_ends:
            control, far = socket.socketpair()
            our_ends.callback(control.close)
            childs_ends.callback(far.close)
            ends: list[int] = []
            for _ in range(2):
                ends += os.pipe()
                for descriptor in ends[-2:]:
                    childs_ends.callback(os.close, descriptor)
            out_read, out_write, err_read, err_write = ends
            path = plan.env.get("PYTHONPATH")
            env = {
                **plan.env,
                "PYTHONPATH": str(HOOK) if not path else f"{HOOK}{os.pathsep}{path}",
                ENV_WARM: f"{far.fileno()}:{out_read}:{err_read}:" + "." * _ROOM,
            }
            # What it writes while it imports stays in the pipes until it reads them itself: each worker writes it
            # again.
            popen = subprocess.Popen(
                plan.command,
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=err_write,
                cwd=plan.cwd,
                env=env,
                start_new_session=True,
                pass_fds=(far.fileno(), out_read, err_read),
            )
            dead: asyncio.Future[None] = self._loop.create_future()
            warmed = _Warmed(plan, popen, control, time.monotonic(), dead, self._loop.create_future())
            try:
                # The buffer takes it at once; if it does not, this environment is too large to fork with.
                control.setblocking(False)
                _send(control, {"env": plan.env, "preload": list(plan.preload), "must": plan.must})
                control.settimeout(FORK_S)
                watch_child(popen.pid, lambda: self._died(warmed))
            except BaseException:
                _kill_group(popen)
                raise
            our_ends.pop_all()
        self._guard.started(popen.pid)
        warmed.has_reader = True
        self._loop.add_reader(control.fileno(), self._answered, warmed)
        warmed.timer = self._loop.call_later(WARM_UP_S, self._too_slow, warmed)
        return warmed

    def _answered(self, warmed: _Warmed) -> None:
        self._take_answer(warmed)
        set_once(warmed.settled)

    def _take_answer(self, warmed: _Warmed) -> None:
        self._stop_reading(warmed)
        try:
            answer = _receive(warmed.control)
        except (OSError, EOFError, ValueError):
            return  # it is dead, or about to be: _died() follows
        if "refused" in answer:
            warmed.wanted = False
            self._give_up(str(answer["refused"]))
            return
        hidden = shadowed(answer["loaded"], warmed.plan.folder)
        if hidden is not None:
            warmed.wanted = False
            self._give_up(f"{warmed.plan.folder} has its own {hidden}, which must be imported instead")
            self._kill_soon(warmed)
            return
        warmed.ready = True
        if self._on_ready is not None:
            self._on_ready(warmed.popen.pid, time.monotonic() - warmed.began)

    def _too_slow(self, warmed: _Warmed) -> None:
        warmed.wanted = False
        self._give_up(f"importing {', '.join(warmed.plan.preload)} did not finish within {WARM_UP_S:g} s")
        self._kill_soon(warmed)
        set_once(warmed.settled)

    def _kill_soon(self, warmed: _Warmed) -> None:
        warmed.ready = False
        self._pool.submit(self._discard, warmed)

    def _stop_reading(self, warmed: _Warmed) -> None:
        if warmed.has_reader:
            warmed.has_reader = False
            self._loop.remove_reader(warmed.control.fileno())
        if warmed.timer is not None:
            warmed.timer.cancel()

    def _died(self, warmed: _Warmed) -> None:
        if warmed.has_reader:
            self._answered(warmed)  # it may have reported why
        warmed.ready = False
        set_once(warmed.settled)
        burial = start_task(self._bury(warmed))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)
        set_once(warmed.dead)

    async def _bury(self, warmed: _Warmed) -> None:
        await self._loop.run_in_executor(self._pool, self._discard, warmed)
        warmed.control.close()
        self._guard.gone(warmed.popen.pid)
        self._current = None
        if self._off:
            return
        if warmed.wanted:
            self._failures += 1
            how = warmed.reason or str(ExitStatus(warmed.popen.wait()))
            if self._failures >= _MAX_FAILURES:
                self._give_up(f"the warmed process failed {self._failures} times; last: {how}")
                return
            self._warn(f"the warmed process has ended ({how}); starting another")
        self.warm_up()

    def _give_up(self, why: str) -> None:
        if not self._off:
            self._off = True
            self._warn(f"workers start without forking: {why}")

    # --- in a thread -----------------------------------------------------------------------------------------------

    def _look_at(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        with self._lock, contextlib.suppress(OSError, MemoryError):
            self._plan(tuple(command), env)

    def fork(self, command: Sequence[str], env: Mapping[str, str], given: Given | None = None) -> Spawned | None:
        """Fork a worker. Blocks until it is about to run its program.

        Args:
            command, env: what it runs, and its whole environment.
            given: its standard input, or None.

        Returns:
            None if there is nothing to fork it from: it has to be started afresh.
        """
        if self._off:
            return None
        with self._lock:
            try:
                plan = self._plan(tuple(command), env)
            except (OSError, MemoryError):
                return None
            warmed = self._current
            if plan is None or warmed is None or warmed.ended:
                return None
            if plan != warmed.plan:
                # The next workers are most likely to be like this one.
                warmed.wanted = False
                self._end(warmed)
                return None
            if not warmed.ready:
                return None
            try:
                request = {"env": dict(env), "cwd": plan.cwd, "umask": plan.umask}
                spawned = _fork(warmed.control, request, self._tether, given)
            except (OSError, EOFError, ValueError, MemoryError, psutil.Error) as error:
                warmed.reason = "did not fork in time" if isinstance(error, TimeoutError) else None
                self._end(warmed)
                return None
            self._failures = 0
            return spawned

    def _plan(self, command: tuple[str, ...], env: Mapping[str, str]) -> _Plan | None:
        common = {name: value for name, value in env.items() if name not in _OWN}
        inputs = (command, common, os.getcwd(), _umask())
        if inputs != self._last_inputs:
            self._last_inputs = inputs
            self._wanted_plan = self._new_plan(*inputs)
        return self._wanted_plan

    def _new_plan(self, command: tuple[str, ...], env: dict[str, str], cwd: str, umask: int) -> _Plan | None:
        program = read_command(command, Path(cwd))
        if program is None or not is_program(shutil.which(command[0], path=env.get("PATH"))):
            if self._preload:
                self._loop.call_soon_threadsafe(
                    self._give_up,
                    "--preload needs a command like 'python train.py' or 'python -m train', not "
                    + " ".join(command[:2]),
                )
            return None
        names = heavy_imports(program.files, program.folder) if self._preload is None else self._preload
        if not names:
            return None
        return _Plan(command, env, cwd, umask, names, self._preload is not None, program.folder)

    def _discard(self, warmed: _Warmed) -> None:
        with self._lock:
            self._end(warmed)

    def _end(self, warmed: _Warmed) -> None:
        warmed.ready = False
        if not warmed.ended:
            warmed.ended = True
            _kill_group(warmed.popen)


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    """Kill and reap the warmed process, and its clones not yet known to this process."""
    with contextlib.suppress(OSError):
        os.killpg(popen.pid, signal.SIGKILL)
    try:
        popen.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-popen.pid, 0)


def _fork(control: socket.socket, request: Mapping[str, Any], tether: Tether, given: Given | None) -> Spawned:
    deadline = time.monotonic() + FORK_S
    with contextlib.ExitStack() as our_ends, contextlib.ExitStack() as childs_ends:
        launch, far = socket.socketpair()
        childs_ends.callback(far.close)
        with launch:
            pipes, ends = output_ends(given, our_ends, childs_ends)
            tied = tether.ends()
            our_ends.callback(tied.close)
            stdin = () if given is None else (given.descriptor,)
            asked = {
                **request,
                "stdin": given is not None,
                "terminal": given is not None and given.terminal is not None,
            }
            _send(control, asked, far.fileno(), *stdin, *ends.values(), *tied.descriptors())
            childs_ends.close()
            pid = struct.unpack("=q", _exactly(launch, 8, deadline))[0]
            # It still waits for the signal to continue, so it ends if this fails.
            leader = psutil.Process(pid)
            if exit_status(pid) is not None:
                raise EOFError
            tied.tie(pid)
            launch.sendall(b"!")
            try:
                _exactly(launch, 1, deadline)
            except BaseException:
                # It may have left the group that is killed next: nothing else would end it.
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                ForkedProcess(pid).wait()
                raise
        our_ends.pop_all()
        tied.close()
        return Spawned(ForkedProcess(pid), leader, pipes)


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _send(control: socket.socket, value: Any, *descriptors: int) -> None:
    data = marshal.dumps(value, 2)
    if descriptors:
        socket.send_fds(control, [struct.pack("=Q", len(data))], descriptors)
        control.sendall(data)
    else:
        control.sendall(struct.pack("=Q", len(data)) + data)


def _receive(control: socket.socket) -> Any:
    deadline = time.monotonic() + FORK_S
    size = struct.unpack("=Q", _exactly(control, 8, deadline))[0]
    return marshal.loads(_exactly(control, size, deadline))


def _umask() -> int:
    """Return the umask, without changing it for a moment, as os.umask() would."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o22
