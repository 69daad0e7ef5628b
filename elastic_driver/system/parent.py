"""The parent of a program: passes signals on to it, reaps orphans, and restarts it if it has died.

Owns the needs of two kinds of programs that an ordinary parent does not serve:

- Process 1 of a container. A process whose parent has died becomes a child of process 1, which has to reap it:
  otherwise it stays a zombie, one more for each worker that was killed with children of its own. And process 1 only
  gets signals that it handles. So the program continues in a child, as in any other place.
- A driver with a journal, which is restarted when it is killed or fails (decision 44).

The child is forked, which costs a millisecond; another Python that imports the same again would cost a tenth of a
second. A restarted program is executed anew, as from the command line: its package may be another by now. The kernel
kills the child when its parent dies (:mod:`elastic_driver.system.tether`).

Standard streams, terminal, process group and session are the same in both. So a signal sent to all of them reaches a
driver twice: see :func:`news`.
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

# Signals that end the program. One that has died of these was told to.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Signals that ask for the end for good.
_LASTING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals for workers only.
_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
# By number, so that signals pending together are handled in the same order when passed on.
_PASSED = tuple(sorted((*_ENDING, *_FOR_WORKERS)))
# Linux: signals from the kernel, such as a terminal's, have a code above this. They are sent to the whole group, so the
# child has them already; twice would mean something else there.
_SENT_BY_A_PROCESS = 0
# For a restarted program: its parent, the end of the pipe that ties it, and the end on which it reports that it has
# come up.
_ENV = "ELASTIC_DRIVER_PARENT"
# Precedes the number of the file in memory, in place of the earlier journal file.
_BY_MARK = "mark:"
_BEGUN, _STOOD_BY = b"x", b"s"
# Exit code of a child that has failed, and has left its job to another; for its parent only.
_FAILED = 76
# Exit code of a child whose program could not be executed, or has failed before it knew whose child it is.
_NOT_STARTED = 77
# The number with which a driver's parent passes on the first of the signals above: so the driver knows which it has got
# twice.
_FIRST = signal.SIGRTMIN + 8
_BLOCKED = (*_PASSED, signal.SIGCHLD, *range(_FIRST, _FIRST + len(_PASSED)))


@dataclass(frozen=True, slots=True)
class Again:
    """How to restart the program.

    Attributes:
        command: its words, including Python's (:func:`this_command`).
        environ: as given to this process.
        journal: a file that it leaves if there is something to continue from; a file that was there before does not
            count. None for a journal that is not a file here: the program reports itself that there is one
            (:func:`has_begun`).
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    journal: Path | None


@dataclass(frozen=True, slots=True)
class Started:
    """The facts for a process that its parent has restarted.

    Attributes:
        is_last: whether it has to end the job, with no restart after it.
        before: which file there was at :attr:`Again.journal` at first (:func:`which_file`).
        signals: the user's signals received so far, including those to its parent; :func:`early_signals` takes them.
    """

    is_last: bool
    before: str
    signals: list[signal.Signals]


_has_counting_parent = False
_has_failed = False
_started: Started | None = None
_mark: int | None = None  # a file in memory that records whether there is a journal that is not a file here
_counts: dict[signal.Signals, list[int]] = {}  # how often each has come from others, and from the parent
_held: set[int] | None = None


def hold_signals() -> None:
    """Make signals wait for :func:`go_on_in_a_child`. For process 1, which loses signals that it does not handle."""
    global _held
    _held = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)


def go_on_in_a_child(again: Again | None = None) -> None:
    """Fork, and return in the child; this process ends when the child does, with its exit code.

    To be called before there are threads.

    Args:
        again: how to restart it if it is killed, or fails; None for never.
    """
    # Otherwise the child's exit status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked signals wait, even those that process 1 does not handle.
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
    """Return the facts that the parent has passed to this process if it has restarted it; None otherwise.

    From the first call on the user's signals are kept for :func:`early_signals`. To be called at once.
    """
    global _started, _has_counting_parent, _mark
    parent, _, rest = os.environ.pop(_ENV, "").partition(" ")
    if parent != str(os.getppid()):  # it was meant for an ancestor, which has passed its environment on
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
    """Return the result of :func:`started_again`."""
    return _started


def has_begun(*, was_standby: bool = False) -> None:
    """Record that there is a journal, which is not a file here: a restarted driver continues from it.

    Args:
        was_standby: whether this process has waited for the end of another driver, which owns that job.
    """
    if _mark is not None and (was_standby or not _is_marked()):
        os.pwrite(_mark, _STOOD_BY if was_standby else _BEGUN, 0)


def had_stood_by() -> bool:
    """Return whether an earlier driver of the same parent has reported to :func:`has_begun` that it stood by."""
    return _started is not None and _mark is not None and os.pread(_mark, 1, 0) == _STOOD_BY


def was_begun(journal: Path | None) -> bool:
    """Return whether an earlier driver of the same parent had begun a journal.

    Args:
        journal: its file; None for one that is not a file here. To be called before this process begins one.
    """
    if _started is None:
        return False
    return _is_marked() if journal is None else _started.before != which_file(journal)


def _is_marked() -> bool:
    return _mark is not None and os.fstat(_mark).st_size > 0


def name_of_parent() -> str:
    """Return the unique name of the process that restarts this one; "" if none does."""
    return name_of(os.getppid()) if _has_counting_parent else ""


def begin_with(number: signal.Signals) -> None:
    """Make the driver that this process becomes handle a signal first."""
    global _started
    _started = Started(is_last=True, before="", signals=[number])


def early_signals() -> Iterator[signal.Signals]:
    """Yield the signals received before this process has handlers of its own, each once."""
    while _started is not None and _started.signals:
        yield _started.signals.pop(0)


class Interruption(Protocol):
    """Ends a driver that waits for another's end, if a signal has come for it. To be called again and again."""

    def __call__(self, *, drives: bool) -> None:
        """Raise SystemExit, with the exit code for a signal, if one has come.

        Args:
            drives: whether the other driver is alive, and its job continues without this one.
        """


def interruption() -> Interruption:
    """Return a function that a waiting driver calls again and again. It ends this process after a new signal.

    Earlier signals are meant for the job of a dead driver: this one takes that over, to end it. Signals for workers are
    dropped from now on: it has none yet.
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
    """Record that a driver has failed, and ends without its job. Returns whether its parent starts another for it.

    To be followed by :func:`exit_code`. For a driver whose job is in its journal: one that failed before it wrote
    anything would do so again.
    """
    global _has_failed
    _has_failed = _has_counting_parent and not is_last()
    return _has_failed


def is_last() -> bool:
    """Return whether this process was restarted to end its job, with no restart after it."""
    return _has_counting_parent and _started is not None and _started.is_last


def exit_code(code: int) -> int:
    """Return the exit code with which a program has to end, given its own."""
    return _FAILED if _has_failed else code


def numbers_of(number: signal.Signals) -> tuple[int, ...]:
    """Return the numbers under which this process may get a signal: its own, and the one used by its parent."""
    return (number, _as_passed_on(number)) if _has_counting_parent and number in _PASSED else (number,)


def news(number: int) -> signal.Signals | None:
    """Return the signal that was received; None if this process has had it already.

    A service manager sends it to all processes of a job, so to this one, and to its parent, which passes it on. A
    second one means something else to a driver. So it counts as often as it has come one way or the other, whichever is
    more.

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
    """The role of this process from now on.

    Args:
        again: see :func:`go_on_in_a_child`.
    """

    def __init__(self, again: Again | None) -> None:
        self._again = again
        self._before = self._journal()
        self._failures = 0
        # On which a child reports that it has come up; None for the first, which is a fork of this one.
        self._come_up: int | None = None
        # The signal by which the user has asked for the end. If a program is killed before it has ended, or before it
        # has handled the signal, the next one gets it.
        self._asked: list[signal.Signals] = []

    def _journal(self) -> str:
        """Return an identification of the present journal; "" for none."""
        if self._again is None:
            return ""
        if self._again.journal is None:
            return "begun" if _is_marked() else ""
        return which_file(self._again.journal)

    def watch(self, child: int, rope: int) -> NoReturn:
        """Watch the program, and restart it, until it has ended."""
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
        """Start the next program, as soon as that is possible. Ends this process if it is the last.

        Args:
            again: see :class:`_Parent`.
            how: how the one before ended, in words.
            code: its exit status.
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
                _say(f"{how}: restarting it{f' in {wait_s:.0f} s' if wait_s else ''}")
                if wait_s or not self._asked:
                    signals = _signals_within(wait_s) or signals
                    for number in signals:
                        self._remember(number)
            try:
                started = self._start(again, signals if is_last else self._asked or signals, is_last=is_last)
            except OSError as error:  # no process or descriptor is free
                how, can_start = f"the driver cannot be started ({in_words(error)})", False
                if is_last:
                    _say(f"{how}, and no process is left to end the job")
                    self._end(code)
                self._failures += 1
                continue
            if is_last:
                last = self._outcome_of(started[0])
                if last < 0 or last == _NOT_STARTED:
                    _say(
                        f"the driver (process {started[0]}) that should end the job {_how(last)}: no process is left "
                        "to end the job"
                    )
                self._end(code)
            return started

    def _outcome_of(self, child: int) -> int:
        """Return the same as :meth:`_end_of`, except that a child that has not come up counts as not started."""
        code = self._end_of(child)
        return code if self._has_come_up() or code < 0 else _NOT_STARTED

    def _end_of(self, child: int) -> int:
        """Block until the child has ended, and pass signals on to it. Returns its exit status, like Popen."""
        while True:
            received = signal.sigwaitinfo((*_PASSED, signal.SIGCHLD))
            number = signal.Signals(received.si_signo)
            if number == signal.SIGCHLD:
                code = _reap(child)
                if code is not None:
                    return -_PASSED[-code - _FIRST] if -code in _BLOCKED[-len(_PASSED) :] else code
            elif signal.getsignal(number) is not signal.SIG_IGN:
                self._remember(number)  # even if the child has it already: it may die before it handles it
                if received.si_code <= _SENT_BY_A_PROCESS or _is_for_the_leader(number):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number if self._again is None else _as_passed_on(number))

    def _has_come_up(self) -> bool:
        """Return whether the child that has ended had reached :func:`started_again`. To be called once."""
        if self._come_up is None:
            return True
        try:
            return os.read(self._come_up, 1) != b""
        except BlockingIOError:  # another process has inherited the other end
            return False
        finally:
            os.close(self._come_up)
            self._come_up = None

    def _remember(self, number: signal.Signals) -> None:
        if number in _LASTING and not self._asked:
            self._asked = [number]

    def _goes_on(self, code: int, journal: str) -> bool:
        """Return whether a driver with this end has left a job."""
        if code < 0:
            return bool(journal) and -code not in _ENDING
        if code == _NOT_STARTED:  # for example while its package or its interpreter is being replaced
            return bool(journal)
        return code == _FAILED

    def _start(self, again: Again, signals: Sequence[signal.Signals], *, is_last: bool) -> tuple[int, int]:
        come_up, has_come_up = os.pipe()

        def run(reading_end: int) -> None:
            # Not sent: a sent signal counts as one with the user's next (see news).
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
                _say(f"cannot restart the driver: {error}")

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
        """End this process as its child has ended."""
        if self._again is not None and code in (_FAILED, _NOT_STARTED):
            code = ExitCode.INTERNAL_ERROR
        os._exit(code if code >= 0 else 128 - code)


def _fork(run: Callable[[int], None] | None = None) -> tuple[int, int] | None:
    """Fork a child that the kernel kills when this process dies.

    Args:
        run: becomes another program, given the child's end of the pipe that ties it.

    Returns:
        Its PID, and the pipe's end that holds it; None in a child that continues.

    Raises:
        OSError: no child can be made now.
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
    """Return whether the kernel sends it to the leader of a session only: its terminal is gone."""
    return number == signal.SIGHUP and os.getsid(0) == os.getpid()


def _signals_within(wait_s: float) -> list[signal.Signals]:
    """Wait; the first signal that would end the program ends the wait, and is meant for the next program."""
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
    """Reap all children that have ended. Returns how this one has, like Popen; None while it lives."""
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
        return "could not be started" if code == _NOT_STARTED else "failed"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def which_file(path: Path) -> str:
    """Return an identification of a file, different from earlier and later ones of its name; "" if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}:{status.st_ctime_ns}"


def _say(text: str) -> None:
    """Print a warning, unless a full pipe or stopped terminal would block: signals and the next driver cannot wait."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"elasticrun: warning: {text}\n".encode(errors="replace"))


def this_command() -> list[str]:
    """Return the command line with which this process was started, its interpreter as a path."""
    return [sys.executable, *sys.orig_argv[1:]]
