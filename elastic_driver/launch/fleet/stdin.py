"""Whose the driver's standard input is: the worker that is started for one rank, wherever it runs.

Owns the reading of it, and the terminal's settings meanwhile. A worker is given one of these:

    inherit     of a file, a pipe or a socket, on the driver's machine: the worker reads from it itself
    pipe        of the same, on another machine, or of a terminal that does not show its output: it is read here
    terminal    of a terminal that shows its output: it has one of its own, whose keys come from here, and whose output
                is shown as it is

Who has it keeps it until its process has ended; the next one that is started for that rank gets it then.
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
from elastic_driver.rendezvous.agent_messages import Input, InputTaken, Interrupted, Resize, Said, Shown, Start
from elastic_driver.system.tasks import start_task
from elastic_driver.system.terminal import Terminal

# What may be on its way to a worker, or wait until it reads on: as much as a pipe holds.
_AHEAD_BYTES = 64 << 10
_READ_BYTES = 16 << 10
# The kernel tells nobody that a job has come to the foreground.
_LOOK_S = 0.5
# A Ctrl-C that its agent has not answered for so long: the next one is not left to it.
_ANSWERS_S = 1.0
_CTRL_C = b"\x03"
# What a program goes by that writes to a terminal.
_TERMINAL_VARIABLES = ("TERM", "COLORTERM", "NO_COLOR")


class Screen(Protocol):
    """The terminal's other side; the console is."""

    def lend(self, lent: bool) -> None:  # noqa: FBT001 - says it all
        """From now on a worker has the terminal, or no more."""

    def show(self, data: bytes) -> None:
        """What that one writes."""


@dataclass(slots=True)
class _Holder:
    """The worker that has it.

    Attributes:
        worker, link: which, and its agent.
        kind: see Start.
        stderr_too: see Start.
        runs: whether its process is there.
        ahead: bytes that it was sent and has not taken.
        ended: whether it has been told that nothing follows.
        asked_at: when a Ctrl-C was sent, if nothing has come of its agent since, seconds of the loop's clock.
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
    """See above. Used on the event loop, but for :meth:`close`.

    Args:
        rank: for which a worker has to be started to get it; None for nobody.
        screen: shows what a terminal of a worker's shows; None for nobody's.
        shows: whether the screen shows a stream of a worker at all.
        only_here: whether what is not a terminal is only given to a worker on this machine, which reads from it itself.
        descriptor: of the standard input; its output is the next one's, and its errors those of the one after.
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
        """Whether a stream of a worker is on its terminal, and so on the screen as it was written."""
        holder = self._holder
        if holder is None or holder.worker != worker or holder.kind != "terminal":
            return False
        return stream == "stdout" or holder.stderr_too

    # --- workers ---------------------------------------------------------------------------------------------------

    def given_by(self, order: Start, worker: WorkerId, link: AgentLink) -> Start:
        """The order to start a worker, with what it is given as its standard input."""
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
        """Its process is there."""
        holder = self._holder
        if holder is None or holder.worker != worker or holder.kind == "inherit":
            return
        holder.runs = True
        self._watch_signals()
        self._follow()

    def gone(self, worker: WorkerId) -> None:
        """It has ended, or could not be started."""
        if self._holder is not None and self._holder.worker == worker:
            self._holder = None
            self._follow()

    def take(self, worker: WorkerId, message: Said) -> None:
        """What its agent says of it: InputTaken, Shown or Interrupted."""
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
            case Interrupted() if holder.kind == "terminal":  # else nobody can have pressed it there
                self._interrupt()
            case _:
                pass

    def _interrupt(self) -> None:
        if self._screen is not None:
            self._screen.show(b"^C")
        # As the terminal would have: to whoever runs this program, too.
        os.kill(0, signal.SIGINT)

    def close(self) -> None:
        """The job has ended: nothing more is read, and the terminal is as it was."""
        if self._terminal is not None:
            self._terminal.close()
        self._lend(wanted=False)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Has the terminal's settings, and whether it is read, follow who has it and who is in the foreground."""
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
            except PermissionError:  # a file: always readable, and no loop waits for one. Its disc may be slow
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
            # Of a terminal it is a Ctrl-D, which the next worker need not know of; or its end, which ends the job.
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
        """Its agent says whether Ctrl-C is the job's; of one that is stopped, or cut off, nothing comes."""
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
        with contextlib.suppress(ValueError, RuntimeError):  # no main thread
            loop.add_signal_handler(signal.SIGWINCH, self._resized)
            loop.add_signal_handler(signal.SIGCONT, self._resized)
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                loop.add_signal_handler(signal.SIGTSTP, self._stop)

    def _resized(self) -> None:
        """It has, or may have since this process was stopped."""
        self._follow()
        holder = self._holder
        if holder is not None and holder.runs and holder.kind == "terminal" and self._terminal is not None:
            holder.link.send(Resize(holder.worker.key, *self._terminal.size()))

    def _stop(self) -> None:
        """Ctrl-Z: the shell gets its terminal back as it was, and this process stops until it goes on."""
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
