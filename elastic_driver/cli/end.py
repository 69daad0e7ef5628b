"""``elasticrun end JOB``: ends a running job, like SIGTERM to its driver; takes over a job without a driver."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import add_driver_flags, ask, left_behind, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.job_files import left_jobs, running_jobs
from elastic_driver.reporting.printable import one_line
from elastic_driver.system import parent
from elastic_driver.system.process_name import lives, pid_in, send
from elastic_driver.words import ExitCode

if TYPE_CHECKING:
    from elastic_driver.journal.past import Recorded

# How often to check whether another driver has ended.
_LOOK_S = 0.1


def parser_of_end() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun end",
        description="Ends a running job, as SIGTERM to its elasticrun does: its workers get SIGTERM, then SIGKILL "
        "after --grace-time, and the job exits with code 143. Asks for confirmation on a terminal. "
        "Returns at once, except for a job whose driver has died.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="job id or its first characters: see elasticrun jobs")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    add_driver_flags(parser)
    return parser


def end(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached.
    """
    arguments = parser_of_end().parse_args(words)
    if arguments.job is None and arguments.driver is None:
        raise SettingsError("no job given: name one by its id or its first characters (see elasticrun jobs)")
    if arguments.driver is None:
        code = _end_without_driver(arguments)
        if code is not None:
            return code
    target = target_of(arguments, arguments.job)
    if not _is_meant(arguments, target.name, () if target.job is None else target.job.command):
        return 1
    reply = ask(target, lambda client: client.end())
    _say(target.name, reply.text)
    return 0


def _end_without_driver(arguments: argparse.Namespace) -> int | None:
    """End the selected job if its driver has died. Blocks until it has ended.

    Another driver may take it over at any moment, even one that is unaware of this command: so this checks again until
    the job is gone. The arguments then select a single job.

    Returns:
        The exit code; None if there is a driver to ask.
    """
    said: set[str] = set()
    asked, is_known = "", False  # the process notified to end it; whether there was such a job
    while True:
        running = [job for job in running_jobs() if job.job_id.startswith(arguments.job)]
        if any(not asked or job.parent != asked for job in running):
            return None
        if running or lives(asked):
            time.sleep(_LOOK_S)
            continue
        left = left_behind(arguments.job, said)
        if len(left.jobs) == 1:
            job = left.jobs[0].job
            if not _is_meant(arguments, job.job_id, job.settings.command):
                return 1
            arguments.job, is_known = job.job_id, True
            asked = _told_parent(arguments.job)
            if not asked and (code := _taken_over(left.jobs[0])) != ExitCode.OTHER_DRIVER:
                return code
        elif len(left.ids) == 1:
            arguments.job, is_known = left.ids[0], True
            time.sleep(_LOOK_S)
        else:
            from elastic_driver.cli.driverless import driverless_jobs, end_driverless  # late: most jobs have a driver

            alone = driverless_jobs(arguments.job, left.ids)
            if len(alone) == 1:
                if not _is_meant(arguments, alone[0].job_id, ()):
                    return 1
                have_ended, what = end_driverless(alone[0])
                _say(alone[0].job_id, what)
                return 0 if have_ended else 1
            if is_known:
                _say(arguments.job, "it has ended")
                return 0
            return None


def _is_meant(arguments: argparse.Namespace, name: str, command: Sequence[str]) -> bool:
    """Return whether the user confirms the end of this job. Asks once, and only on a terminal.

    Args:
        arguments: of this subcommand.
        name: of the job.
        command: of the job; empty if unknown.
    """
    if arguments.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    what = f"job {name}" + (f" ({shlex.join(command)})" if command else "")
    print(one_line(f"end {what}? [y/N]"), end=" ", file=sys.stderr, flush=True)
    arguments.yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not arguments.yes:
        print("the job keeps running", file=sys.stderr)
    return bool(arguments.yes)


def _told_parent(job_id: str) -> str:
    """Have the elasticrun that is about to restart the driver end the job. Returns that process; "" if none."""
    for file in left_jobs():
        if file.job_id == job_id and send(file.parent, signal.SIGTERM):
            whose = f"its elasticrun (process {pid_in(file.parent)})"
            _say(job_id, f"its driver has died, and {whose} starts another driver, which ends the job")
            return file.parent
    return ""


def _taken_over(found: Recorded) -> int:
    """Take the job over to end it. Blocks until it has ended. Returns the exit code."""
    from elastic_driver.cli.resume import go_on
    from elastic_driver.driver.recording import ENDED

    journal = found.job.settings.journal
    assert journal is not None, "it was found there"
    parent.begin_with(signal.SIGTERM)
    code = go_on(journal, begins=False)
    return 0 if code == ENDED else code


def _say(job_id: str, text: str) -> None:
    print(one_line(f"job {job_id}: {text}"), flush=True)
