"""Hosts from a script that is run repeatedly.

Owns the runs of the script: their time limit, output and process tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from elastic_driver.errors import DiscoveryError, SettingsError, in_words
from elastic_driver.hosts import Departure, Host, in_natural_order, parse_hosts
from elastic_driver.launch.processes.death import set_once, watch_child
from elastic_driver.rendezvous.environment import ENV_MARK
from elastic_driver.settings.settings import script_words
from elastic_driver.system.job_clock import CallLater, time_limit
from elastic_driver.system.mounted_volumes import is_in_mounted_volume
from elastic_driver.system.tether import Tether

# A list of 4,096 hosts with long names is under 300 KB.
_MAX_OUTPUT_BYTES = 1 << 20
# How much of the script's standard error is kept, and shown.
_STDERR_BYTES = 65536
_STDERR_LINES = 5
_MAX_SAID = 1000
# A shell's exit codes for a command that cannot be executed, or is not found.
_CANNOT_RUN = (126, 127)
# A killed process ends at once, unless it is blocked in the kernel (a dead network file system).
_REAP_S = 5.0
# A job that waits for a script that runs longer reports it.
_SLOW_S = 2.0
# A script in a volume that Kubernetes fills may be missing for a moment; the kubelet takes far less to swap its files.
_SWAP_S, _SWAP_PAUSE_S = 5.0, 0.1
# Marks the processes of one run of the script, also those that have left its session.
_ENV_RUN = "ELASTIC_DRIVER_DISCOVERY_RUN"


class ScriptDiscovery:
    """The hosts that the user's script prints.

    Args:
        script: a shell command; its standard output is the list.
        default_slots: slots of a host that the script lists without slots; None makes that an error.
        timeout_s: the limit of one run, seconds; then its whole process tree is killed.
        job_id: marks its processes, so that if the driver is killed and this machine's agent ends with it, those that
            have left its session end, too.
        call_later: the timer for a run. By default the loop's, which counts the time while this process is stopped.
        orders_hosts: whether to sort its hosts by name, numbers as numbers.
    """

    def __init__(
        self,
        script: str,
        default_slots: int | None,
        timeout_s: float,
        *,
        job_id: str = "",
        call_later: CallLater | None = None,
        orders_hosts: bool = False,
    ) -> None:
        self._script = script
        self._file = file_of(script)
        self._orders_hosts = orders_hosts
        self._has_answered = False
        self._job_id = job_id
        self._default_slots = default_slots
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._began: float | None = None  # when the current run began
        self._run: _Run | None = None  # the last
        self._lists_none: str | None = None  # the last run's standard error, if it listed no hosts

    def departures(self) -> tuple[Departure, ...]:
        """Return an empty tuple: a script cannot announce departures."""
        return ()

    def remark(self) -> str:
        """Return the remark that it takes long, or lists no hosts, with its standard error."""
        took_s = 0.0 if self._began is None else time.monotonic() - self._began
        if took_s >= _SLOW_S:
            state, output = (
                f"has been running for {took_s:.0f} s (limit: {self._timeout_s:g} s, --discovery-timeout)",
                self._error_output(),
            )
        elif self._lists_none is not None:
            state, output = "lists no hosts", self._lists_none
        else:
            return ""
        return f"{self._subject} {state}" + (f"; its standard error: {output}" if output else "")

    async def wait_change(self, limit_s: float) -> None:
        """Wait for ``limit_s``: the script is polled."""
        await asyncio.sleep(limit_s)

    async def find_hosts(self) -> tuple[Host, ...]:
        """Run the script once.

        Returns:
            Its hosts, in the order of its lines; none for an empty answer, which is not a failure.

        Raises:
            DiscoveryError: it failed, hung, did not print a list of hosts, or printed an invalid one.
        """
        self._began = time.monotonic()
        try:
            hosts = await (self._find_hosts() if self._has_answered else self._find_first_hosts())
        finally:
            self._began = None
        self._has_answered = True
        self._lists_none = None if hosts else self._error_output()
        return in_natural_order(hosts) if self._orders_hosts else hosts

    async def _find_first_hosts(self) -> tuple[Host, ...]:
        """Retry the first run while the script's file may be being swapped: a failure there would end the job."""
        end = time.monotonic() + _SWAP_S
        while True:
            try:
                return await self._find_hosts()
            except DiscoveryError:
                if self._file is None or not is_in_mounted_volume(self._file) or time.monotonic() >= end:
                    raise
            await asyncio.sleep(_SWAP_PAUSE_S)

    async def _find_hosts(self) -> tuple[Host, ...]:
        self._run = None
        self._check_not_empty()  # repeated below if it lists no hosts
        try:
            self._run = run = _Run(self._script, self._job_id)
        except OSError as error:
            raise DiscoveryError(f"cannot run {self._subject}: {in_words(error)}") from error
        try:
            async with time_limit(self._timeout_s, self._call_later):
                stdout = await run.output()
                await asyncio.shield(run.ended)
        except TimeoutError:
            # The shell may have ended while one of its children holds its output open.
            happened = "did not close its output (held open by a child process)" if run.ended.done() else "did not end"
            await run.kill_tree()
            output = self._error_output()
            raise DiscoveryError(
                f"{self._subject} {happened} within {self._timeout_s:g} s (--discovery-timeout) and was killed"
                f"{output and f': {output}'}",
                may_pass=True,
            ) from None
        except _TooMuchError:
            await run.kill_tree()
            raise DiscoveryError(f"{self._subject} printed more than {_MAX_OUTPUT_BYTES} bytes") from None
        except BaseException:
            await run.kill_tree()
            raise
        returncode = run.bury()
        if returncode:
            output = self._error_output()
            raise DiscoveryError(
                f"{self._subject} {_failed(returncode)}: {output or 'its standard error is empty'}",
                may_pass=returncode not in _CANNOT_RUN,
            )
        try:
            hosts = parse_hosts(stdout.decode().splitlines(), default_slots=self._default_slots, least_slots=0)
        except UnicodeDecodeError as error:
            near = stdout[max(0, error.start - 20) : error.start + 20]
            raise DiscoveryError(f"{self._subject} printed bytes that are not UTF-8: {near!r}") from None
        except SettingsError as error:
            raise DiscoveryError(f"{self._subject} did not print a valid list of hosts: {_cut(str(error))}") from error
        if not hosts:
            self._check_not_empty()
        return hosts

    def _check_not_empty(self) -> None:
        """Raise DiscoveryError if the script's file is empty: it is being written."""
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.stat().st_size == 0:
                raise DiscoveryError(f"{self._subject} is an empty file")

    @property
    def _subject(self) -> str:
        return f"the host discovery script {self._script!r}"

    def _error_output(self) -> str:
        """Return the last lines of the last run's standard error, joined."""
        errors = b"" if self._run is None else self._run.errors
        return _cut(" | ".join(errors.decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]))


def file_of(script: str) -> Path | None:
    """Return the file that a script's command line runs; None if only the shell knows, or looks it up in PATH."""
    with contextlib.suppress(SettingsError):
        program = script_words(script)[0]
        return Path(program) if "/" in program else None
    return None


class _TooMuchError(Exception):
    """The script printed too much."""


class _Run:
    """One run of the script, in a session of its own, which ends with this process. Created on the running loop.

    Its shell is reaped only after its session was killed: until then the session's number cannot be reused.

    Attributes:
        ended: done when the shell is dead.
        errors: the end of its standard error so far.
    """

    def __init__(self, script: str, job_id: str) -> None:
        """Start the script. Raises OSError."""
        self._mark = secrets.token_hex(8)
        with contextlib.ExitStack() as on_error:
            tether = Tether()
            self._tether: Tether | None = tether
            on_error.callback(tether.close)
            with contextlib.closing(tether.ends()) as ends:
                self._popen = subprocess.Popen(
                    script,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=ends.descriptors(),
                    env={**os.environ, ENV_MARK: job_id, _ENV_RUN: self._mark},
                )
                ends.tie(self._popen.pid)
            on_error.pop_all()
        self.errors = b""
        self._pipes: list[_Pipe] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            watch_child(self._popen.pid, lambda: set_once(self.ended))
        except OSError:
            self.bury()
            raise

    async def output(self) -> bytes:
        """Read both streams to their ends, and return all of stdout. Raises _TooMuchError."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        stdout = bytearray()

        def add(piece: bytes) -> None:
            stdout.extend(piece)
            if len(stdout) > _MAX_OUTPUT_BYTES:
                raise _TooMuchError

        def add_error(piece: bytes) -> None:
            self.errors = (self.errors + piece)[-_STDERR_BYTES:]

        # One by one: if the second fails, the first is registered, and gets closed.
        self._pipes.append(_Pipe(self._popen.stdout, add))
        self._pipes.append(_Pipe(self._popen.stderr, add_error))
        await asyncio.gather(*(pipe.ended for pipe in self._pipes))
        return bytes(stdout)

    def bury(self) -> int:
        """Kill the processes left in the dead shell's session, and reap the shell. Returns its exit code."""
        self._kill_group()
        self._close()
        return self._popen.wait()

    async def kill_tree(self) -> None:
        """Kill the script and all processes of this run. Waits for the script's end."""
        tree: list[psutil.Process] = []
        # The run has to be closed and reaped even if the machine has no free descriptors or threads.
        with contextlib.suppress(psutil.Error, OSError):
            root = psutil.Process(self._popen.pid)
            tree = [*root.children(recursive=True), root]
        # The group first: at once, and before any of its members can leave another descendant behind.
        self._kill_group()
        for process in tree:
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()
        with contextlib.suppress(OSError, MemoryError, RuntimeError):
            await asyncio.to_thread(_kill_run, self._mark)
        self._close()
        await asyncio.wait((self.ended,), timeout=_REAP_S)
        if self.ended.done():
            self.bury()
        else:
            self.ended.add_done_callback(lambda _: self.bury())

    def _close(self) -> None:
        """Close the tether and the streams. Its session has been killed. Idempotent."""
        tether, self._tether = self._tether, None
        if tether is not None:
            tether.close()
        for pipe in self._pipes:
            pipe.close()
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._popen.pid, signal.SIGKILL)


class _Pipe:
    """A reader of one stream of a run, on the running loop. The owner of the file closes it, after this.

    Not a transport of the loop's: uvloop's closes the descriptor twice, and in between another thread may have got its
    number.

    Attributes:
        ended: done when everything was read; its exception is the one that ``on_data`` raised.
    """

    def __init__(self, file: IO[bytes], on_data: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = file.fileno()
        self._on_data = on_data
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(self._descriptor, False)
        self._loop.add_reader(self._descriptor, self._read)
        self._reads = True

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._descriptor)
        set_once(self.ended)

    def _read(self) -> None:
        if not self._reads:  # it was closed after the loop had found it readable
            return
        try:
            data = os.read(self._descriptor, 65536)
            if data:
                self._on_data(data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        except Exception as error:  # such as no memory: raised in the waiter, since on the loop it would end the job
            data = b""
            if not self.ended.done():
                self.ended.set_exception(error)
        if not data:
            self.close()


def _kill_run(run: str) -> None:
    """Kill the processes that have left the script's session and tree: they may hold the output open.

    Reads the environments of all processes, which takes a while.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_ENV_RUN) == run:
                process.kill()


def _failed(returncode: int) -> str:
    if returncode > 0:
        how = ""
        with contextlib.suppress(ValueError):
            # A shell's way to report that a signal killed its command.
            how = f" ({signal.Signals(returncode - 128).name})" if returncode > 128 else ""
        return f"failed with exit code {returncode}{how}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _cut(text: str) -> str:
    """Cut a text so that it stays one readable line, whatever the script printed."""
    return text if len(text) <= _MAX_SAID else f"{text[: _MAX_SAID // 2]} ... {text[-_MAX_SAID // 2 :]}"
