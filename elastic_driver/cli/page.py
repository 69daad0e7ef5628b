"""``elasticrun page [JOB]``: a link to a running job's page in a browser."""

from __future__ import annotations

import html
import webbrowser
from collections.abc import Sequence

from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import Target, add_driver_flags, ask, target_of
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.job_files import put_page
from elastic_driver.rendezvous.messages import PageRequest
from elastic_driver.report.printable import one_line

# For the browser of a driver on another machine, whose job has no file here that it could lie beside.
_ELSEWHERE = "page"
_LEADS = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<title>elasticrun page</title><meta http-equiv="refresh" content="0; url={url}">
<p><a href="{url}">The job's page</a></p></html>
"""


def parser_of_page() -> Parser:
    """Its flags."""
    parser = Parser(
        prog="elasticrun page",
        description="Prints a link to a running job's page. It is good for one login, within ten minutes; whoever has "
        "it may look. From another machine: ssh -L PORT:127.0.0.1:PORT to the driver's, then the same link.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="the beginning of its id will do: see elasticrun jobs")
    text = "whoever logs in by it may also drain hosts, ask for stacks and end the job, for eight hours"
    parser.add_argument("--operator", action="store_true", help=text)
    parser.add_argument("--open", action="store_true", help="open it in a browser on this machine")
    add_driver_flags(parser)
    return parser


def page(words: Sequence[str]) -> int:
    """Runs the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached, or it has no page.
    """
    arguments = parser_of_page().parse_args(words)
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


def _open(url: str, target: Target) -> int:
    """Opens a link in a browser. Returns the exit code.

    By a file that only this user can read and that leads there: every user of the machine can read the browser's
    command line, and the first who follows the link is logged in.
    """
    try:
        file = put_page(_ELSEWHERE if target.job is None else target.job.job_id, _LEADS.format(url=html.escape(url)))
    except OSError as error:
        raise SettingsError(f"cannot write the file that leads the browser there: {in_words(error)}") from error
    if not webbrowser.open(file.as_uri()):
        print("there is no browser here that could be opened")
        return 1
    return 0
