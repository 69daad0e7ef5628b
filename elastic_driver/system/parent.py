"""The parent of a program: passes signals on to it, reaps orphans, and starts it again where it has died.

Owns what two kinds of programs need beside them, which an ordinary parent does not do:

- Process 1 of a container. A process whose parent has died becomes a child of process 1, which has to reap it: else it
  stays as a zombie, one more for each worker that was killed with children of its own. And process 1 gets only those
  signals that it handles. So the program goes on in a child, as in any other place.
- A driver with a journal, which is started again when it is killed or fails (decision 44).

The child is forked: it costs a millisecond, where another Python that imports the same again would cost a tenth of a
second. Who is started again is executed anew, as from the command line: its package may be another by now. The kernel
kills the child when its parent dies (:mod:`elastic_driver.system.tether`).

Standard streams, terminal, process group and session are the same in both. So a signal that somebody sends to all of
them reaches a driver twice: see :func:`news`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from elastic_driver.errors import in_words
from elastic_driver.system.kernel import memory_file
from elastic_driver.system.process_name import name_of
from elastic_driver.system.tether import tie
from elastic_driver.words import LONG_ROUND_S, PAUSE_RANGE_S, SETBACKS_LIMIT, ExitCode, pause_s

# Ends the program. One that has died of these was told to.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What asks for the end once and for all.
_LASTING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What is for workers alone.
_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
# By number: so those that wait together are taken in the same order when they are passed on.
_PASSED = tuple(sorted((*_ENDING, *_FOR_WORKERS)))
# Linux: what the kernel sends, a terminal's for instance, has a code above this. It is sent to the whole group, so the
# child has it already; twice would mean something else there.
_SENT_BY_A_PROCESS = 0
# Of who is started again: its parent, the end of the pipe that ties it, and that on which it says that it has come up.
_ENV = "ELASTIC_DRIVER_PARENT"
# Begins, instead of what was there before, the number of the file in memory.
_BY_MARK = "mark:"
_BEGUN, _STOOD_BY = b"x", b"s"
# What the child ends with that has failed, and has left its job to another; for its parent alone.
_FAILED = 76
# What the child ends with whose program could not be executed, or has failed before it knew whose child it is.
_NOT_STARTED = 77
# By which a driver's parent passes on the first of the signals above: so the driver knows which it has got twice.
_FIRST = signal.SIGRTMIN + 8
_BLOCKED = (*_PASSED, signal.SIGCHLD, *range(_FIRST, _FIRST + len(_PASSED)))


@dataclass(frozen=True, slots=True)
class Again:
    """How the program is started again.

    Attributes:
        command: its words, those of Python included (:func:`this_command`).
        environ: as this process was given it.
        journal: a file that it leaves where there is something to go on from. One that was there before is not that.
            None for a journal that is no file here: the program says itself that there is one (:func:`has_begun`).
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    journal: Path | None


@dataclass(frozen=True, slots=True)
class Started:
    """That this process was started again by its parent.

    Attributes:
        is_last: whether it is to end the job, and nobody is started after it.
        before: which file there was at :attr:`Again.journal` before all (:func:`which_file`).
        signals: those of the user's that have come, to its parent too, which :func:`early_signals` takes.
    """

    is_last: bool
    before: str
    signals: list[signal.Signals]


_has_counting_parent = False
_has_failed = False
_started: Started | None = None
_mark: int | None = None  # a file in memory that says whether there is a journal, where that is no file here
_counts: dict[signal.Signals, list[int]] = {}  # how often each has come from others, and from the parent
_held: set[int] | None = None


def hold_signals() -> None:
    """Has signals wait for :func:`go_on_in_a_child`. For process 1, which loses all that it does not handle."""
    global _held
    _held = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)


def go_on_in_a_child(again: Again | None = None) -> None:
    """Returns in a child; this process ends when that does, with its exit code.

    To be called before there are threads.

    Args:
        again: how it is started again where it is killed, or fails; None where it never is.
    """
    # Else nobody would be told how the child has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked signals wait, also those that process 1 does not handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    global _has_counting_parent, _mark
    if again is not None and again.journal is None:
        _mark = memory_file("elasticrun-journal")
    parent = _Parent(again)
    child = _fork()
    if child is not None:
        parent.watch(*child)
    _has_counting_parent = again is not None
    signal.pthread_sigmask(signal.SIG_SETMASK, before if _held is None else _held)


def started_again() -> Started | None:
    """What this process was told where its parent has started it again; None otherwise.

    From the first call on the user's signals are kept for :func:`early_signals`. To be called at once.
    """
    global _started, _has_counting_parent, _mark
    parent, _, rest = os.environ.pop(_ENV, "").partition(" ")
    if parent != str(os.getppid()):  # it is another's, which has left its environment to its children
        return _started
    reading_end, has_come_up, is_last, numbers, before = rest.split(" ", 4)
    os.set_inheritable(int(reading_end), False)
    if before.startswith(_BY_MARK):
        _mark, before = int(before.removeprefix(_BY_MARK)), ""
        os.set_inheritable(_mark, False)
    os.write(int(has_come_up), b"x")
    os.close(int(has_come_up))
    signals = [signal.Signals(int(number)) for number in numbers.split(",") if number]
    _has_counting_parent, _started = True, Started(is_last == "last", before, signals)
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            for each in numbers_of(number):
                signal.signal(each, lambda got, frame: _early(got))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    return _started


def started() -> Started | None:
    """What :func:`started_again` has found."""
    return _started


def has_begun(*, has_stood_by: bool = False) -> None:
    """There is a journal, which is no file here: whoever is started again goes on from it.

    Args:
        has_stood_by: whether this process has waited for the end of another driver, whose job that is.
    """
    if _mark is not None and (has_stood_by or not _is_marked()):
        os.pwrite(_mark, _STOOD_BY if has_stood_by else _BEGUN, 0)


def had_stood_by() -> bool:
    """Whether a driver that was started before this one, by the same parent, had told so of :func:`has_begun`."""
    return _started is not None and _mark is not None and os.pread(_mark, 1, 0) == _STOOD_BY


def was_begun(journal: Path | None) -> bool:
    """Whether a driver that was started before this one, by the same parent, had begun a journal.

    Args:
        journal: its file; None for one that is none here. To be asked before this process begins one.
    """
    if _started is None:
        return False
    return _is_marked() if journal is None else _started.before != which_file(journal)


def _is_marked() -> bool:
    return _mark is not None and os.fstat(_mark).st_size > 0


def name_of_parent() -> str:
    """What tells the process that starts this one again from all others; "" where none does."""
    return name_of(os.getppid()) if _has_counting_parent else ""


def begin_with(number: signal.Signals) -> None:
    """Has the driver that this process becomes take a signal before all else."""
    global _started
    _started = Started(is_last=True, before="", signals=[number])


def early_signals() -> Iterator[signal.Signals]:
    """Those that have come before this process has handlers of its own. Each is told of once."""
    while _started is not None and _started.signals:
        yield _started.signals.pop(0)


class Interruption(Protocol):
    """Ends a driver that waits for another's end, where a signal has come for it. To be called again and again."""

    def __call__(self, *, drives: bool) -> None:
        """Raises SystemExit with the exit code of one that a signal has ended.

        Args:
            drives: whether the other lives, and its job goes on without this one.
        """


def interruption() -> Interruption:
    """What a driver that waits calls again and again. It ends this process once a signal has come since.

    What has come before is for the job of a driver that is dead: this one takes that over, to end it. Signals that are
    for workers mean nothing to it from now on: it has none yet.
    """
    if threading.current_thread() is threading.main_thread():
        for each in (each for number in _FOR_WORKERS for each in numbers_of(number)):
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, lambda got, frame: None)  # not ignored: workers would inherit that
    before = 0 if _started is None else len(_started.signals)

    def look(*, drives: bool) -> None:
        if _started is not None and (signals := _started.signals[0 if drives else before :]):
            sys.exit(128 + signals[0])

    return look


def leave_to_another() -> bool:
    """A driver has failed, and ends without its job. Returns whether its parent starts another for it.

    To be followed by :func:`exit_code`. For a driver whose job is in its journal: one that has failed before it had
    written anything would do so again.
    """
    global _has_failed
    _has_failed = _has_counting_parent and not is_last()
    return _has_failed


def is_last() -> bool:
    """Whether this process was started again to end its job, and nobody is started after it."""
    return _has_counting_parent and _started is not None and _started.is_last


def exit_code(code: int) -> int:
    """What a program ends with, whose own exit code that is."""
    return _FAILED if _has_failed else code


def numbers_of(number: signal.Signals) -> tuple[int, ...]:
    """By which numbers this process may get a signal: its own, and the one by which its parent passes it on."""
    return (number, _as_passed_on(number)) if _has_counting_parent and number in _PASSED else (number,)


def news(number: int) -> signal.Signals | None:
    """What a signal that has come says; None for one that this process has had already.

    A service manager sends it to all processes of a job, so to this one, and to its parent, which passes it on. A
    second one means something else to a driver. So it counts as often as it has come one way or the other, whichever
    is more.

    Args:
        number: one of :func:`numbers_of`.
    """
    is_passed_on = number >= signal.SIGRTMIN
    meant = _PASSED[number - _FIRST] if is_passed_on else signal.Signals(number)
    counts = _counts.setdefault(meant, [0, 0])
    counts[is_passed_on] += 1
    return meant if counts[is_passed_on] > counts[not is_passed_on] else None


def _as_passed_on(number: signal.Signals) -> int:
    return _FIRST + _PASSED.index(number)


def _early(number: int) -> None:
    assert _started is not None
    if (meant := news(number)) is not None:
        _started.signals.append(meant)


class _Parent:
    """What this process does from now on.

    Args:
        again: see :func:`go_on_in_a_child`.
    """

    def __init__(self, again: Again | None) -> None:
        self._again = again
        self._before = self._journal()
        self._failures = 0
        # Where a child says that it has come up; None for the first, which is a fork of this one.
        self._come_up: int | None = None
        # The signal by which the user has asked for the end. A program that is killed before it has ended, or before it
        # has taken the signal, leaves that to the next one.
        self._asked: list[signal.Signals] = []

    def _journal(self) -> str:
        """What tells the journal that there is from others; "" for none."""
        if self._again is None:
            return ""
        if self._again.journal is None:
            return "begun" if _is_marked() else ""
        return which_file(self._again.journal)

    def watch(self, child: int, rope: int) -> NoReturn:
        """Until the program has ended."""
        again = self._again
        while True:
            began = time.monotonic()
            code = self._outcome_of(child)
            os.close(rope)
            if again is None or not self._goes_on(code, self._journal()):
                self._end(code)
            self._failures = 1 if time.monotonic() - began >= LONG_ROUND_S else self._failures + 1
            child, rope = self._next(again, f"the driver (process {child}) {_how(code)}", code)

    def _next(self, again: Again, how: str, code: int) -> tuple[int, int]:
        """Starts the next one, as soon as that can be done. Ends this process where it is the last.

        Args:
            again: see :class:`_Parent`.
            how: what has become of the one before, in words.
            code: how that one has ended.
        """
        can_start = code != _NOT_STARTED
        signals: list[signal.Signals] = []
        while True:
            is_last = self._failures >= SETBACKS_LIMIT
            wait_s = 0.0 if is_last or (self._asked and can_start) else pause_s(self._failures, PAUSE_RANGE_S)
            if is_last:
                _say(f"{how}, {self._failures} times in a row: ending the job")
                signals = [signal.SIGTERM]
            else:
                _say(f"{how}: starting it again{f' in {wait_s:.0f} s' if wait_s else ''}")
                if wait_s or not self._asked:
                    signals = _signals_within(wait_s) or signals
                    for number in signals:
                        self._remember(number)
            try:
                started = self._start(again, signals if is_last else self._asked or signals, is_last=is_last)
            except OSError as error:  # no process or descriptor is free
                how, can_start = f"the driver cannot be started ({in_words(error)})", False
                if is_last:
                    _say(f"{how}, and nobody ends the job")
                    self._end(code)
                self._failures += 1
                continue
            if is_last:
                last = self._outcome_of(started[0])
                if last < 0 or last == _NOT_STARTED:
                    _say(f"the driver (process {started[0]}) that was to end it {_how(last)}: nobody ends the job")
                self._end(code)
            return started

    def _outcome_of(self, child: int) -> int:
        """The same as :meth:`_end_of`. One that has not come up was not started, whatever its exit code is."""
        code = self._end_of(child)
        return code if self._has_come_up() or code < 0 else _NOT_STARTED

    def _end_of(self, child: int) -> int:
        """How the child has ended, as Popen says it. Blocks until it has, and passes signals on to it."""
        while True:
            received = signal.sigwaitinfo((*_PASSED, signal.SIGCHLD))
            number = signal.Signals(received.si_signo)
            if number == signal.SIGCHLD:
                code = _reap(child)
                if code is not None:
                    return -_PASSED[-code - _FIRST] if -code in _BLOCKED[-len(_PASSED) :] else code
            elif signal.getsignal(number) is not signal.SIG_IGN:
                self._remember(number)  # also what the child has itself: it may die before it takes it
                if received.si_code <= _SENT_BY_A_PROCESS or _is_for_the_leader(number):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number if self._again is None else _as_passed_on(number))

    def _has_come_up(self) -> bool:
        """Whether the child that has ended had got as far as :func:`started_again`. To be asked once."""
        if self._come_up is None:
            return True
        try:
            return os.read(self._come_up, 1) != b""
        except BlockingIOError:  # somebody has inherited the other end
            return False
        finally:
            os.close(self._come_up)
            self._come_up = None

    def _remember(self, number: signal.Signals) -> None:
        if number in _LASTING and not self._asked:
            self._asked = [number]

    def _goes_on(self, code: int, journal: str) -> bool:
        """Whether a driver that has ended so has left a job."""
        if code < 0:
            return bool(journal) and -code not in _ENDING
        if code == _NOT_STARTED:  # its package or its interpreter is being replaced, say
            return bool(journal)
        return code == _FAILED

    def _start(self, again: Again, signals: Sequence[signal.Signals], *, is_last: bool) -> tuple[int, int]:
        come_up, has_come_up = os.pipe()

        def run(reading_end: int) -> None:
            # Not sent: what is sent counts as one with what the user sends next (see news).
            numbers = ",".join(str(int(number)) for number in signals)
            ends = f"{os.getppid()} {reading_end} {has_come_up}"
            before = self._before if _mark is None else f"{_BY_MARK}{_mark}"
            mark = f"{ends} {'last' if is_last else 'next'} {numbers} {before}"
            try:
                if _mark is not None:
                    os.set_inheritable(_mark, True)
                os.set_inheritable(reading_end, True)
                os.set_inheritable(has_come_up, True)
                os.execve(again.command[0], list(again.command), {**again.environ, _ENV: mark})
            except OSError as error:
                _say(f"cannot start the driver again: {error}")

        try:
            started = _fork(run)
        except OSError:
            os.close(come_up)
            raise
        finally:
            os.close(has_come_up)
        assert started is not None
        os.set_blocking(come_up, False)
        self._come_up = come_up
        return started

    def _end(self, code: int) -> NoReturn:
        """This process ends as its child has."""
        if self._again is not None and code in (_FAILED, _NOT_STARTED):
            code = ExitCode.INTERNAL_ERROR
        os._exit(code if code >= 0 else 128 - code)


def _fork(run: Callable[[int], None] | None = None) -> tuple[int, int] | None:
    """A child that the kernel kills when this process dies.

    Args:
        run: becomes another program, with the child's end of what ties it.

    Returns:
        Its number, and what holds it; None in a child that goes on.

    Raises:
        OSError: there cannot be one now.
    """
    reading_end, writing_end = os.pipe()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os.close(reading_end)
        os.close(writing_end)
        raise
    if child:
        os.close(reading_end)
        return child, writing_end
    os.close(writing_end)
    tie(reading_end, os.getpid())
    if os.getppid() != parent:  # it has died before
        os._exit(ExitCode.INTERNAL_ERROR)
    if run is not None:
        try:
            run(reading_end)
        finally:
            os._exit(_NOT_STARTED)
    return None


def _is_for_the_leader(number: int) -> bool:
    """Whether it is one that the kernel sends to the leader of a session alone: its terminal is gone."""
    return number == signal.SIGHUP and os.getsid(0) == os.getpid()


def _signals_within(wait_s: float) -> list[signal.Signals]:
    """Waits; the first signal that would end the program ends the wait, and is for who is started next."""
    until = time.monotonic() + wait_s
    while True:
        received = signal.sigtimedwait((*_PASSED, signal.SIGCHLD), max(0.0, until - time.monotonic()))
        if received is None:
            return []
        if received.si_signo == signal.SIGCHLD:
            _reap(0)
        elif received.si_signo in _ENDING and signal.getsignal(received.si_signo) is not signal.SIG_IGN:
            return [signal.Signals(received.si_signo)]


def _reap(child: int) -> int | None:
    """Reaps whoever has ended. Returns how the child has, as Popen says it; None while it lives."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return None
            if pid == child:
                return os.waitstatus_to_exitcode(status)
    return None


def _how(code: int) -> str:
    if code >= 0:
        return "could not be started" if code == _NOT_STARTED else "has failed"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def which_file(path: Path) -> str:
    """What tells a file from those that have its name before and after; "" where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}:{status.st_ctime_ns}"


def _say(text: str) -> None:
    """Says nothing where nobody reads, a full pipe or a stopped terminal: signals and the next driver cannot wait."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"elasticrun: warning: {text}\n".encode(errors="replace"))


def this_command() -> list[str]:
    """The words that this process was started with, its interpreter as a path."""
    return [sys.executable, *sys.orig_argv[1:]]
