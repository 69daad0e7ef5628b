"""The driver's standard input, given to the worker that is started for one rank, wherever it runs.

Owns reading it, and the terminal's settings meanwhile. A worker is given one of these:

    inherit     a file, a pipe or a socket, on the driver's machine: the worker reads from it itself
    pipe        the same, on another machine, or a terminal that does not show its output: the driver reads it
    terminal    a terminal that shows its output: the worker has a terminal of its own, whose keys come from here, and
                whose output is shown as it is

The worker keeps it until its process has ended; then the next one started for that rank gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.words import Stream
from elastic_driver.rendezvous.agent_messages import AgentMessage, Input, InputTaken, Interrupted, Resize, Shown, Start
from elastic_driver.system.tasks import start_task
from elastic_driver.system.terminal import Terminal

# Limit of bytes in flight to a worker or waiting for room in its input: as much as a pipe holds.
_AHEAD_BYTES = 64 << 10
_READ_BYTES = 16 << 10
# The kernel does not notify a process that it is in the foreground now.
_LOOK_S = 0.5
# After a Ctrl-C that its agent has not answered for so long, the next one is not left to the agent.
_ANSWERS_S = 1.0
_CTRL_C = b"\x03"
# Variables that influence programs writing to a terminal.
_TERMINAL_VARIABLES = ("TERM", "COLORTERM", "NO_COLOR")


class Screen(Protocol):
    """The terminal's output side; the console implements it."""

    def lend(self, lent: bool) -> None:  # noqa: FBT001 - says it all
        """Lend the terminal to a worker, or take it back."""

    def show(self, data: bytes) -> None:
        """Show output of the worker that has the terminal."""


@dataclass(slots=True)
class _Holder:
    """The worker that has the standard input.

    Attributes:
        worker, link: the worker, and its agent.
        kind: see Start.
        stderr_too: see Start.
        runs: whether its process exists.
        ahead: bytes sent to it that have not reached its input.
        ended: whether it has been notified of the end of the input.
        asked_at: when a Ctrl-C was sent, if its agent has sent nothing since, seconds of the loop's clock.
    """

    worker: WorkerId
    link: AgentLink
    kind: str
    stderr_too: bool
    runs: bool = False
    ahead: int = 0
    ended: bool = False
    asked_at: float | None = None


class StandardInput:
    """Forwards the driver's standard input to one worker. Used on the event loop, except for :meth:`close`.

    Args:
        rank: the rank whose worker gets it, or None.
        screen: shows the output on a worker's terminal; None for no worker's.
        shows: returns whether the screen shows a stream of a worker at all.
        only_here: whether an input that is not a terminal is only given to a worker on this machine, which reads it
            itself.
        descriptor: of the standard input; its output is the next one, and its errors the one after.
    """

    def __init__(
        self,
        rank: int | None,
        screen: Screen | None,
        *,
        shows: Callable[[WorkerId, Stream], bool] = lambda worker, stream: True,
        only_here: bool = False,
        descriptor: int = 0,
    ) -> None:
        self._rank = rank
        self._screen = screen
        self._shows = shows
        self._only_here = only_here
        self._descriptor = descriptor
        self._holder: _Holder | None = None
        self._ended = False
        self._reads = False
        self._reading: asyncio.Task[None] | None = None
        self._look: asyncio.TimerHandle | None = None
        self._watches_signals = False
        is_terminal = rank is not None and _is_terminal(descriptor)
        self._terminal = Terminal(descriptor) if is_terminal else None
        self._has_screen = is_terminal and screen is not None and _is_terminal(descriptor + 1)
        self._stderr_too = self._has_screen and _is_terminal(descriptor + 2)
        if rank is not None and not is_terminal and _is_nothing(descriptor):
            self._rank = None

    def is_shown(self, worker: WorkerId, stream: Stream) -> bool:
        """Return whether a stream of a worker is on its terminal, and so on the screen exactly as written."""
        holder = self._holder
        if holder is None or holder.worker != worker or holder.kind != "terminal":
            return False
        return stream == "stdout" or holder.stderr_too

    # --- workers ---------------------------------------------------------------------------------------------------

    def given_by(self, order: Start, worker: WorkerId, link: AgentLink) -> Start:
        """Return the order to start a worker, with its standard input added."""
        if self._rank is None or order.rank != self._rank or self._holder is not None:
            return order
        kind = self._kind(worker, link)
        if not kind:
            return order
        stderr_too = kind == "terminal" and self._stderr_too and self._shows(worker, "stderr")
        self._holder = _Holder(worker, link, kind, stderr_too)
        if kind != "terminal" or self._terminal is None:
            return replace(order, stdin=kind)
        rows, columns = self._terminal.size()
        env = order.env | {name: os.environ[name] for name in _TERMINAL_VARIABLES if name in os.environ}
        return replace(order, env=env, stdin=kind, stderr_too=stderr_too, rows=rows, columns=columns)

    def _kind(self, worker: WorkerId, link: AgentLink) -> str:
        if self._has_screen and self._shows(worker, "stdout"):
            return "terminal"
        if self._terminal is None and link.facts.local and not link.facts.joined:
            return "inherit"
        return "pipe" if self._terminal is not None or not self._only_here else ""

    def started(self, worker: WorkerId) -> None:
        """Start to read for a worker whose process exists now."""
        holder = self._holder
        if holder is None or holder.worker != worker or holder.kind == "inherit":
            return
        holder.runs = True
        self._watch_signals()
        self._follow()

    def gone(self, worker: WorkerId) -> None:
        """Take the standard input back from a worker that has ended, or could not be started."""
        if self._holder is not None and self._holder.worker == worker:
            self._holder = None
            self._follow()

    def take(self, worker: WorkerId, message: AgentMessage) -> None:
        """Handle a message of its agent: InputTaken, Shown or Interrupted."""
        holder = self._holder
        if holder is None or holder.worker != worker:
            return
        holder.asked_at = None
        match message:
            case InputTaken(_, size):
                holder.ahead -= min(max(size, 0), holder.ahead)
                self._follow()
            case Shown(_, data) if self._screen is not None and holder.kind == "terminal":
                self._screen.show(data)
            case Interrupted() if holder.kind == "terminal":  # else it cannot have been pressed there
                self._interrupt()
            case _:
                pass

    def _interrupt(self) -> None:
        if self._screen is not None:
            self._screen.show(b"^C")
        # As the terminal would have: also to the process that runs this program.
        os.kill(0, signal.SIGINT)

    def close(self) -> None:
        """Stop reading and restore the terminal, since the job has ended."""
        if self._terminal is not None:
            self._terminal.close()
        self._lend(wanted=False)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Adapt the terminal's settings, and whether it is read, to the present holder and the foreground process."""
        holder = self._holder
        is_used = holder is not None and holder.runs
        may_read = is_used and (self._terminal is None or self._terminal.in_foreground())
        if self._terminal is not None:
            if may_read and holder is not None and holder.kind == "terminal":
                self._terminal.pass_keys()
                self._lend(wanted=True)
            else:
                self._terminal.restore()
                self._lend(wanted=False)
            self._look_again(wanted=is_used and not may_read)
        if may_read and self._ended and holder is not None and not holder.ended:
            holder.ended = True
            holder.link.send(Input(holder.worker.key, end=True, blob=b""))
        self._read_if(wanted=may_read and holder is not None and not holder.ended and holder.ahead < _AHEAD_BYTES)

    def _lend(self, *, wanted: bool) -> None:
        if self._screen is not None:
            self._screen.lend(wanted)

    def _look_again(self, *, wanted: bool) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if wanted:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._follow)

    def _read_if(self, *, wanted: bool) -> None:
        loop = asyncio.get_running_loop()
        if wanted == self._reads:
            return
        if not wanted:
            self._reads = False
            loop.remove_reader(self._descriptor)
        elif self._reading is None:
            try:
                loop.add_reader(self._descriptor, self._read)
                self._reads = True
            except PermissionError:  # a file: always readable, and cannot be watched by a loop. Its disk may be slow
                self._reading = start_task(self._read_file())

    def _read(self) -> None:
        if self._terminal is not None and not self._terminal.in_foreground():
            self._follow()  # what is typed is for others
            return
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it hung up
            data = b""
        self._has_read(data)

    async def _read_file(self) -> None:
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, os.read, self._descriptor, _READ_BYTES)
        except OSError:
            data = b""
        self._reading = None
        self._has_read(data)

    def _has_read(self, data: bytes) -> None:
        holder = self._holder
        if not data:
            # From a terminal it is a Ctrl-D, of no concern to the next worker; or its end, which ends the job.
            self._ended = self._terminal is None
            if holder is not None and not holder.ended:
                holder.ended = True
                holder.link.send(Input(holder.worker.key, end=True, blob=b""))
        elif holder is not None:
            holder.ahead += len(data)
            holder.link.send(Input(holder.worker.key, end=False, blob=data))
            if holder.kind == "terminal" and _CTRL_C in data:
                self._note_interrupt(holder)
        self._follow()

    def _note_interrupt(self, holder: _Holder) -> None:
        """Interrupt the job if its agent has not answered an earlier Ctrl-C: it may be stopped or cut off."""
        now = asyncio.get_running_loop().time()
        if holder.asked_at is None:
            holder.asked_at = now
        elif now - holder.asked_at >= _ANSWERS_S:
            self._interrupt()

    # --- the terminal's signals ------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        if self._terminal is None or self._watches_signals:
            return
        self._watches_signals = True
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread
            loop.add_signal_handler(signal.SIGWINCH, self._resized)
            loop.add_signal_handler(signal.SIGCONT, self._resized)
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                loop.add_signal_handler(signal.SIGTSTP, self._stop)

    def _resized(self) -> None:
        """Send the terminal's size, which has changed, or may have while this process was stopped."""
        self._follow()
        holder = self._holder
        if holder is not None and holder.runs and holder.kind == "terminal" and self._terminal is not None:
            holder.link.send(Resize(holder.worker.key, *self._terminal.size()))

    def _stop(self) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, and stop this process until it is continued."""
        assert self._terminal is not None
        self._terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._follow()


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _is_nothing(descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    except OSError:
        return True
