"""The event hook: a command of the user's, run once for each event of the job, with the event on its standard input.

Owns the runs: their order, their time, their output and their processes. The format of an event is defined in
:mod:`elastic_driver.reporting.event_records`.

A hook must neither end nor delay the job: one thread runs it, event after event; events with which it cannot keep up
are dropped and counted. The job's end is never dropped: most hooks exist for that event, and thousands of workers may
end just before it. A failure of the hook is reported once for each kind, and not as an event: the hook would fail at
that event, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import queue
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil

from elastic_driver.errors import in_words
from elastic_driver.health.sampler import Sampled
from elastic_driver.rendezvous.environment import ENV_JOB
from elastic_driver.reporting.event_records import line_of, records_of
from elastic_driver.reporting.happenings import Happening, JobEnded
from elastic_driver.reporting.instant import Instant
from elastic_driver.system.kernel import end_of_child, memory_file
from elastic_driver.words import counted

RUN_S = 30.0
"""How long a run may take."""
GRACE_S = 3.0
"""How long the end of the job waits for the remaining runs."""
LAST_S = 1.5
"""How much of that is reserved for the event of the end itself."""
MOST_WAITING = 1000
"""The most events waiting for their run; each may have some 100 bytes per worker."""
# A killed process ends at once, unless the kernel blocks it (a dead network disk).
_REAP_S = 2.0
# How much of its output is kept, and shown.
_OUTPUT_BYTES = 65536
_OUTPUT_LINES = 5
_MOST_SAID = 1000
# Identifies the processes of a run, including those that have left its session.
_ENV_RUN = "ELASTIC_DRIVER_HOOK_RUN"
# With the job's own mark the command's processes would be killed with the job's, before they get the event of its end.
# Instead a process of the session waits for the end of a pipe that only the driver holds. It is not one of
# the command's own jobs, for all of which it may wait. %d is the event's descriptor; shells need not support numbers
# above 9.
_SHELL = "/bin/sh"
_TIED = f'exec 3<&0; {{ read _; kill -9 -$$; }} <&3 3<&- >/dev/null 2>&1 & exec {_SHELL} -c "$1" 3<&- </proc/self/fd/%d'
_Tell = Callable[[str], None]


class EventHook:
    """Runs the command for each event. A Listener.

    Args:
        command: a shell command; "" for none.
        job_id: the value of ELASTIC_DRIVER_JOB for the command.
        on_warning: called once for each kind of failure, at the next happening or at the end.
        on_detail: called for each failure, with the last lines that the command has printed.
        run_s: how long a run may take, seconds; then its whole process tree is killed.
        grace_s: how long the end waits for the remaining runs, seconds.
        instant: the time of each happening.
    """

    live = False

    def __init__(
        self,
        command: str,
        *,
        job_id: str,
        on_warning: _Tell,
        on_detail: _Tell,
        run_s: float = RUN_S,
        grace_s: float = GRACE_S,
        instant: Instant | None = None,
    ) -> None:
        self._instant = instant or Instant()
        self._command = command
        self._job_id = job_id
        self._on_warning, self._on_detail = on_warning, on_detail
        self._run_s, self._grace_s = run_s, grace_s
        self._events: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._said: queue.SimpleQueue[tuple[_Tell, str]] = queue.SimpleQueue()  # by the thread, reported on the loop
        self._told: set[str] = set()  # kinds of failures
        self._dropped = 0
        self._last: tuple[str, bytes] | None = None  # the event of the job's end
        self._hurrying = False  # whether to skip to the last event
        self._was_cut = False  # whether events were skipped for that
        self._closing = False
        self._thread: threading.Thread | None = None
        if command:
            self._stop_reader, self._stop_writer = os.pipe()
            self._hurry_reader, self._hurry_writer = os.pipe()
            self._tie_reader, self._tie_writer = os.pipe()
            # Woken by the queue, ended by None in it; a run in progress by the pipe. A daemon: a process that the
            # kernel does not let die must not keep this one alive.
            self._thread = threading.Thread(target=self._run_all, name="elasticrun-hook", daemon=True)
            self._thread.start()

    def hear(self, happening: Happening) -> None:
        """Queue the events of a happening (Listener)."""
        if self._thread is None:
            return
        # Samples are taken every few seconds: a run for each would be wasteful.
        for record in () if isinstance(happening, Sampled) else records_of(happening):
            if isinstance(happening, JobEnded):
                self._last = record["event"], line_of(record, self._instant)
            elif self._events.qsize() >= MOST_WAITING:
                self._drop()
            else:
                self._events.put((record["event"], line_of(record, self._instant)))
        self._tell()

    def _drop(self) -> None:
        self._dropped += 1
        if self._dropped == 1:
            self._on_warning(f"{self._subject} cannot keep up: dropping events ({MOST_WAITING} are queued)")

    def _tell(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                tell, text = self._said.get_nowait()
                tell(text)

    def close(self) -> None:
        """Stop when all events are delivered, or the grace time is over: then the present run is killed. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._events.put(None)
        keep_s = min(LAST_S, self._grace_s / 2) if self._last is not None else 0.0
        thread.join(self._grace_s - keep_s)
        left = max(0, self._events.qsize() - 1)
        if thread.is_alive() and self._last is not None:
            self._hurrying = True
            os.write(self._hurry_writer, b"x")
            thread.join(keep_s)
            left = left + 1 if self._was_cut else 0  # including the one in progress
        if thread.is_alive():
            self._closing = True
            os.write(self._stop_writer, b"x")
            thread.join(_REAP_S + 1.0)
            more = f", and {left} more {'event was' if left == 1 else 'events were'} dropped"
            self._on_warning(
                f"{self._subject} was still running {self._grace_s:g} s after the job ended and was "
                f"killed{more if left else ''}"
            )
        elif self._was_cut:
            number = counted(left, "event")
            self._on_warning(f"{self._subject} missed {number} at the end of the job: it could not keep up")
        self._tell()
        if self._dropped:
            number = counted(self._dropped, "event")
            self._on_warning(f"{self._subject} missed {number}: it could not keep up")
        if not thread.is_alive():  # else it may still use these
            for pipe in (self._stop_reader, self._stop_writer, self._hurry_reader, self._hurry_writer):
                os.close(pipe)
            os.close(self._tie_reader)
            os.close(self._tie_writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- in the thread ---------------------------------------------------------------------------------------------

    @property
    def _subject(self) -> str:
        return f"the event hook {self._command!r}"

    def _run_all(self) -> None:
        while not self._hurries and (item := self._events.get()) is not None:
            self._run_once(*item)
        self._was_cut = self._hurries
        if self._last is not None and not self._closing:
            self._run_once(*self._last, is_last=True)

    @property
    def _hurries(self) -> bool:
        return self._hurrying or self._closing

    def _run_once(self, event: str, line: bytes, *, is_last: bool = False) -> None:
        try:
            failure, output = self._run(line, is_last=is_last)
        except (OSError, MemoryError, RuntimeError, psutil.Error) as error:  # no descriptors, no processes
            failure, output = f"cannot be run: {in_words(error)}", b""
        if failure and not self._closing and (is_last or not self._hurrying):
            self._complain(event, failure, output)

    def _complain(self, event: str, failure: str, output: bytes) -> None:
        if failure not in self._told:
            self._told.add(failure)
            self._said.put(
                (
                    self._on_warning,
                    f"{self._subject} {failure}, on the event {event}; the same failure is not reported again",
                )
            )
        printed = " | ".join(output.decode(errors="replace").strip().splitlines()[-_OUTPUT_LINES:])[-_MOST_SAID:]
        said = f": {printed}" if printed else " and printed nothing"
        self._said.put((self._on_detail, f"{self._subject} {failure}, on the event {event}{said}"))

    def _run(self, line: bytes, *, is_last: bool) -> tuple[str, bytes]:
        """Run the command once. Returns how it failed, "" if it has not, and the end of its output."""
        mark = secrets.token_hex(8)
        # A file and not a pipe: a command that does not read blocks nothing, and one that exits early breaks nothing.
        with _above_shells(memory_file("event")) as event:
            event.write(line)
            popen = subprocess.Popen(
                (_SHELL, "-c", _TIED % event.fileno(), "sh", self._command),
                stdin=self._tie_reader,
                pass_fds=(event.fileno(),),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, ENV_JOB: self._job_id, _ENV_RUN: mark},
            )
        try:
            ended, output = self._follow(popen, is_last=is_last)
            if not ended:
                _kill_tree(popen, mark)
                return f"did not exit within {self._run_s:g} s and was killed", output
        except BaseException:
            _kill_tree(popen, mark)
            raise
        finally:
            _kill_group(popen.pid)  # before the shell is reaped: its id cannot be reused yet
            if popen.stdout is not None:
                popen.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(_REAP_S)
        return _failed(popen.returncode), output

    def _follow(self, popen: subprocess.Popen[bytes], *, is_last: bool) -> tuple[bool, bytes]:
        """Read its output until the shell has ended. Returns whether it has, and the end of the output."""
        assert popen.stdout is not None
        output, deadline = b"", time.monotonic() + self._run_s
        descriptor = popen.stdout.fileno()
        os.set_blocking(descriptor, False)
        shell = end_of_child(popen.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(shell, selectors.EVENT_READ)
                selector.register(self._stop_reader, selectors.EVENT_READ)
                if not is_last:
                    selector.register(self._hurry_reader, selectors.EVENT_READ)
                while (left_s := deadline - time.monotonic()) > 0:
                    ready = {key.fd for key, _ in selector.select(left_s)}
                    if ready & {self._stop_reader, self._hurry_reader}:
                        return False, output
                    if descriptor in ready:
                        piece = _read(descriptor)
                        output = (output + piece)[-_OUTPUT_BYTES:]
                        if not piece:
                            selector.unregister(descriptor)
                    if shell in ready:
                        # Its output is complete by now; a process that it has left running need not end.
                        return True, (output + _read(descriptor))[-_OUTPUT_BYTES:]
        finally:
            os.close(shell)
        return False, output


def _above_shells(descriptor: int) -> io.FileIO:
    """Return the same file with a descriptor number that a shell's script does not use."""
    try:
        return io.FileIO(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10), "r+")
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """Read available bytes; b"" at the end, and if there are none."""
    try:
        return os.read(descriptor, _OUTPUT_BYTES)
    except (BlockingIOError, InterruptedError):
        return b""


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _kill_tree(popen: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the shell and all processes that this run has started, including those that have left its session."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error, OSError):
        tree = psutil.Process(popen.pid).children(recursive=True)
    _kill_group(popen.pid)
    for process in tree:
        with contextlib.suppress(psutil.Error, OSError):
            process.kill()
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_ENV_RUN) == mark:
                    process.kill()


def _failed(returncode: int | None) -> str:
    if returncode is None:
        return "was killed, and has not ended"
    if returncode > 0:
        return f"failed with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}" if returncode else ""
    except ValueError:
        return f"was killed by signal {-returncode}"
