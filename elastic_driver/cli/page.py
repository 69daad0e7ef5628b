"""``elasticrun page [JOB]``: prints a link to a running job's page, or writes the page of an ended job to a file."""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.cli.kept import ended_job, ending_of
from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import Target, add_driver_flags, ask, left_behind, target_of
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.job_files import put_page, running_jobs
from elastic_driver.rendezvous.messages import PageRequest
from elastic_driver.reporting.history_folder import PAGE, SHORT_ID, SHOWN, KeptJob
from elastic_driver.reporting.printable import one_line
from elastic_driver.system.safe_files import open_inside, put_named

# The name of the file for the browser if the driver is on another machine, so that there is no job file beside it.
_ELSEWHERE = "page"
_LEADS = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<title>elasticrun page</title><meta http-equiv="refresh" content="0; url={url}">
<p><a href="{url}">The job's page</a></p></html>
"""


def parser_of_page() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun page",
        description="Prints a link to a running job's web page. The link is valid for one login within ten "
        "minutes, and gives read access to anyone who has it. From another machine, run ssh -L "
        "PORT:127.0.0.1:PORT to the driver's machine, then open the same link. For a job that has "
        "ended, writes the final page to a self-contained file and prints a link to it.",
    )
    text = "job id or its first characters: see elasticrun jobs, or elasticrun history for jobs that have ended"
    parser.add_argument("job", metavar="JOB", nargs="?", help=text)
    text = "for a job that has ended: write the page to this file instead of the history's folder"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=text)
    text = "the link also permits draining hosts, requesting stacks and ending the job, for eight hours"
    parser.add_argument("--operator", action="store_true", help=text)
    parser.add_argument("--open", action="store_true", help="open the link in a browser on this machine")
    add_driver_flags(parser)
    return parser


def page(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, its driver cannot be reached, or it has no page.
    """
    arguments = parser_of_page().parse_args(words)
    ended = _ended(arguments)
    if ended is not None:
        return _show_ended(ended, arguments)
    if arguments.output is not None:
        raise SettingsError("-o is for a job that has ended: give its id (elasticrun history)")
    target = target_of(arguments, arguments.job)
    try:
        reply = ask(target, lambda client: client.page(PageRequest(arguments.operator)))
    except SettingsError as error:
        if "no such path" in str(error):
            raise SettingsError(f"job {target.name} has no page: it was started with --no-page") from error
        raise
    for url in reply.urls:
        print(one_line(url), flush=True)
    return _open(reply.urls[0], target) if arguments.open else 0


def _ended(arguments: argparse.Namespace) -> KeptJob | None:
    """Return the selected job if it is one that has ended."""
    job: str | None = arguments.job
    if not job or arguments.driver is not None:
        return None
    if any(each.job_id.startswith(job) for each in running_jobs()) or left_behind(job).ids:
        return None
    return ended_job(job)


def _show_ended(job: KeptJob, arguments: argparse.Namespace) -> int:
    """Write the page of a job that has ended, and report its path. Returns the exit code."""
    if arguments.operator:
        raise SettingsError(f"{ending_of(job)}: there is nothing left to operate")
    text = _page_of(job)
    output: Path = job.folder / SHOWN if arguments.output is None else arguments.output.absolute()
    try:
        put_named(output, text, mode=0o600)
    except OSError as error:
        elsewhere = "; -o FILE writes it elsewhere" if arguments.output is None else ""
        raise SettingsError(f"cannot write {output}: {in_words(error)}{elsewhere}") from error
    print(one_line(ending_of(job)), file=sys.stderr)
    if not _is_stdout(output):
        print(one_line(output.as_uri()), flush=True)
    return _browse(output) if arguments.open else 0


def _is_stdout(path: Path) -> bool:
    """Return whether a path is this program's standard output: a link would be in the page, or overwrite it."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(1))
    return False


def _page_of(job: KeptJob) -> str:
    """Return the page as a document. Raises SettingsError if none is kept for the job."""
    from elastic_driver.reporting.page.recorded import recorded_page  # late: the document is large

    report = f"elasticrun report {job.job_id[:SHORT_ID]} shows what happened"
    try:
        with os.fdopen(open_inside(job.folder / PAGE, os.O_RDONLY), "rb") as file:
            document = json.load(file)
        return recorded_page(document)
    except FileNotFoundError:
        raise SettingsError(
            f"no page was kept for job {job.job_id}: it was started with --no-page, or its driver was killed early; "
            f"{report}"
        ) from None
    except OSError as error:
        raise SettingsError(f"cannot read the page of job {job.job_id}: {in_words(error)}; {report}") from error
    except SettingsError as error:
        raise SettingsError(f"{error}; {report}") from error
    except (ValueError, AttributeError, RecursionError):
        raise SettingsError(f"the page of job {job.job_id} is damaged ({job.folder / PAGE}); {report}") from None


def _open(url: str, target: Target) -> int:
    """Open a link in a browser. Returns the exit code.

    The browser gets a file that leads to the link and that only this user can read: every user of the machine can read
    the browser's command line, and the first to follow the link is logged in.
    """
    try:
        file = put_page(_ELSEWHERE if target.job is None else target.job.job_id, _LEADS.format(url=html.escape(url)))
    except OSError as error:
        raise SettingsError(f"cannot write the file that opens the link in the browser: {in_words(error)}") from error
    return _browse(file)


def _browse(file: Path) -> int:
    if not webbrowser.open(file.as_uri()):
        print("no browser found on this machine")
        return 1
    return 0
