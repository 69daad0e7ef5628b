"""``elasticrun``: the command line. Makes Settings from flags, config file and environment, and runs the job.

Heavy imports are late, so that ``--help`` is quick.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_driver.cli.flags import parse
from elastic_driver.errors import SettingsError, TakeoverError, in_words, shortage
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.assembly import settings_from
from elastic_driver.system import parent
from elastic_driver.system.leash import ignore_signals, is_held
from elastic_driver.words import ExitCode

if TYPE_CHECKING:
    from elastic_driver.launch.dial.early import EarlyAgent
    from elastic_driver.settings.journal_place import JournalPlace

# Errors of a write to an open file, whose name is unknown then.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
ENV_OPTIONS = "ELASTIC_DRIVER_OPTIONS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elasticrun``. Returns its exit code; for bad usage, one line on standard error and 2."""
    _open_standard_streams()
    if argv is None and is_held(os.environ):
        ignore_signals()
    place = _Place() if argv is None else None
    try:
        words = _as_flags(sys.argv[1:] if argv is None else list(argv))
        if words[:1] == ["resume"]:
            from elastic_driver.cli.resume import go_on, journal_of

            journal = journal_of(words[1:])
            if place is not None:
                place.leave(journal)
            return parent.exit_code(go_on(journal))
        if words[:1] == ["help"]:
            from elastic_driver.cli.flags import build_parser
            from elastic_driver.cli.help import help_on

            print(help_on(build_parser(), words[1]), end="")
            return 0
        if words[:1] == ["doctor"]:  # checks what a job with these flags would find
            words[1:1] = _options_of(os.environ)
        subcommand = _subcommand(words[0]) if words else None
        if subcommand is not None:
            if place is not None:
                place.leave(None)
            return _run_subcommand(subcommand, words[1:])
        options = _options_of(os.environ)
        if not options:
            _refuse_slips(words)
        given = parse((*options, *words))
        if given.pop("check_build", False):
            from elastic_driver.cli.check_build import report

            print(report())
            return 0
        settings = settings_from(given, os.environ)
        nodes = settings.nodes_at_endpoint
        if place is not None:
            # A node with a journal is an agent, with its driver beside it.
            place.leave(None if nodes is not None and not is_held(os.environ) else settings.journal)
        if settings.mpi is not None:
            from elastic_driver.driver.mpirun import run_by_mpirun

            run_by_mpirun(settings, os.environ)
        if nodes is not None:
            from elastic_driver.driver.nodes import run_node

            return parent.exit_code(run_node(settings, nodes))
        # Agents that a driver elsewhere may have started are unknown here.
        has_agents = settings.standby_driver or settings.has_etcd
        early = None if has_agents else _early_agent(settings.journal_folder)
        from elastic_driver.driver.job import run_job

        return parent.exit_code(run_job(settings, early=early))
    except SettingsError as error:
        return _refused(error, place)
    except KeyboardInterrupt:
        # Before the job's own handler is installed: nothing runs yet.
        return 130
    except Exception:
        if parent.started() is None:
            raise
        sys.excepthook(*sys.exc_info())
        _leave_job(place)
        return parent.exit_code(1)


def _refused(error: SettingsError, place: _Place | None) -> int:
    """Report why there is no driver. Returns the exit code."""
    code, why = ExitCode.BAD_USAGE, error.__cause__
    is_takeover = isinstance(error, TakeoverError)
    if is_takeover and why is not None and not isinstance(why, SettingsError) and not shortage(why):
        sys.excepthook(type(why), why, why.__traceback__)
        code = ExitCode.INTERNAL_ERROR
    # The message may quote the user's words; it stays one line without control characters, whatever they contain.
    print(f"elasticrun: error: {one_line(str(error))}", file=sys.stderr)
    # An error that the user has to fix is not retried; otherwise the parent would start this process again until it
    # ends the job.
    if parent.started() is not None or (is_takeover and not isinstance(why, SettingsError)):
        _leave_job(place)
    return parent.exit_code(code)


def _as_flags(words: list[str]) -> list[str]:
    """Turn ``help``, ``help SUBCOMMAND`` and ``version``, which new users try first, into flags."""
    match words:
        case ["help"]:
            return ["--help"]
        case ["help", word, *_] if _subcommand(word) is not None or word == "resume":
            return [word, "--help"]
        case ["version"]:
            return ["--version"]
        case _:
            return words


class _Place:
    """The role of this process: the user's own, process 1 of a container, or a child that its parent has started again.

    Must be created before anything else is done.

    Attributes:
        journal: of the job that it runs; None for none, and until it is known.
    """

    def __init__(self) -> None:
        self.journal: JournalPlace | None = None
        self._started = parent.started_again()
        self._environ = dict(os.environ)
        if os.getpid() == 1:
            parent.hold_signals()

    def leave(self, journal: JournalPlace | None) -> None:
        """Return in a child process if this process has to be its parent, which restarts it if there is a journal.

        Args:
            journal: of the job; None for none.
        """
        self.journal = journal
        if self._started is None and (journal is not None or os.getpid() == 1):
            again = None
            if journal is not None:
                from elastic_driver.journal.folder import JOURNAL

                file = None if journal.folder is None else journal.folder / JOURNAL
                again = parent.Again(parent.this_command(), self._environ, file)
            parent.go_on_in_a_child(again)


def _leave_job(place: _Place | None) -> None:
    """Leave a job that this process was to continue and cannot: too little memory, or a package that is being replaced.
    If no other process is or will be started for the job, end as much of it as possible.
    """
    if parent.leave_to_another() or not parent.is_last():
        return
    ended = why = ""
    try:
        from elastic_driver.cli.driverless import end_here

        folder = None if place is None or place.journal is None else place.journal.folder
        ended = "" if folder is None else end_here(folder)
    except Exception as error:  # the cause may be the same as for leaving the job
        why = f" ({one_line(in_words(error))})"
    left = f"the job was not ended: its workers wait for another driver until --driver-timeout expires{why}"
    print(f"elasticrun: warning: {ended or left}", file=sys.stderr)


def _early_agent(journal: Path | None) -> EarlyAgent | None:
    """Start an agent while the driver is imported. Returns None if a job continues, which has its agents: it would only
    take processor time from the driver.
    """
    if journal is not None:
        from elastic_driver.journal.file import has_job

        if has_job(journal):
            return None
    from elastic_driver.launch.dial.early import EarlyAgent

    return EarlyAgent(with_stdin=journal is None)


def _refuse_slips(words: Sequence[str]) -> None:
    """Report likely mistakes before the less helpful message that -np is missing.

    Raises:
        SettingsError: there are no words at all, or the first one looks like a subcommand that does not exist.
    """
    if not words:
        raise SettingsError(
            "no command to run: expected, for example, elasticrun -np 2 python train.py (see elasticrun --help)"
        )
    word = words[0]
    if word.isalpha() and shutil.which(word) is None:
        from elastic_driver.cli.completion import SUBCOMMANDS

        if word == "run" and not Path(word).exists():
            raise SettingsError("there is no subcommand run: elasticrun -np N COMMAND starts a job")
        near = difflib.get_close_matches(word, (*SUBCOMMANDS, "help", "version"), n=1)
        if near:
            raise SettingsError(f"there is no subcommand {word} (did you mean {near[0]}?), and no such command")


def _options_of(environ: MutableMapping[str, str]) -> list[str]:
    """Return flags that a controller or a cluster sets by a variable, which precede the command's own.

    Raises:
        SettingsError: the value cannot be split into words, or does not begin with a flag.
    """
    text = environ.pop(ENV_OPTIONS, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"cannot read {ENV_OPTIONS}: {error}") from None
    if words and not words[0].startswith("-"):
        raise SettingsError(f"cannot read {ENV_OPTIONS}: it begins with {words[0][:40]!r}, which is not a flag")
    return words


def _run_subcommand(subcommand: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a subcommand. It exits silently when its reader has closed the pipe (``elasticrun status | head``).

    If its output cannot be written because a disk is full (``elasticrun doctor > FILE``), it reports that in one line.
    """
    _tell_warnings()
    try:
        code = subcommand(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        _drop_output()
        print(f"elasticrun: error: cannot write to standard output: {in_words(error)}", file=sys.stderr)
        return ExitCode.INTERNAL_ERROR


def _drop_output() -> None:
    """Redirect standard output to /dev/null, else Python reports at exit that it cannot write the rest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@functools.cache
def _tell_warnings() -> None:
    """Show the package's log messages that no other handler shows, like warnings of a job."""
    import logging  # late: --help does not need it

    before = logging.lastResort

    class ToStderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] == "elastic_driver" and not record.exc_info:
                print(f"elasticrun: warning: {one_line(record.getMessage())}", file=sys.stderr, flush=True)
            elif before is not None:
                before.handle(record)

    logging.lastResort = ToStderr(logging.WARNING)


def _subcommand(word: str) -> Callable[[Sequence[str]], int] | None:
    match word:
        case "completion":
            from elastic_driver.cli.completion import completion

            return completion
        case "doctor":
            from elastic_driver.cli.doctor import doctor

            return doctor
        case "drain":
            from elastic_driver.cli.drain import drain

            return drain
        case "end":
            from elastic_driver.cli.end import end

            return end
        case "history":
            from elastic_driver.cli.history import history

            return history
        case "jobs":
            from elastic_driver.cli.jobs import jobs

            return jobs
        case "join":
            from elastic_driver.cli.join import join

            return join
        case "leave":
            from elastic_driver.cli.leave import leave

            return leave
        case "report":
            from elastic_driver.cli.report import report

            return report
        case "page":
            from elastic_driver.cli.page import page

            return page
        case "rendezvous":
            from elastic_driver.cli.rendezvous import rendezvous

            return rendezvous
        case "stacks":
            from elastic_driver.cli.stacks import stacks

            return stacks
        case "status":
            from elastic_driver.cli.status import status

            return status
        case "token":
            from elastic_driver.cli.token import token

            return token
        case "wrap":
            from elastic_driver.cli.wrap import wrap

            return wrap
        case _:
            return None


def _open_standard_streams() -> None:
    """Open closed standard streams (``2>&-``) as /dev/null, else the next file opened would get their output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one


if __name__ == "__main__":
    sys.exit(main())
