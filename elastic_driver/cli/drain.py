"""``elasticrun drain HOST``: makes the workers of a host leave a running job at their next commit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.cli.target import add_driver_flags, ask, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.messages import DrainHostRequest
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.assembly import number
from elastic_driver.settings.settings import check_seconds


def parser_of_drain() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun drain",
        description="Drains a host: its workers leave the job at their next commit and exit with code 0. No step "
        "is lost, and no failure is counted against the host. The host gets no new workers until it "
        "has left the list of hosts and is listed again.",
    )
    parser.add_argument("host", metavar="HOST", help="the host's name, as the job's discovery script prints it")
    parser.add_argument("--job", metavar="ID", help="job id or its first characters; needed if several jobs run")
    parser.add_argument("--undo", action="store_true", help="undo a drain: allow workers on the host again")
    text = "the machine shuts down in S seconds: workers that have not left one second before are killed"
    parser.add_argument("--within", metavar="S", type=read_by(number), help=text)
    add_driver_flags(parser)
    return parser


def drain(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached.
    """
    arguments = parser_of_drain().parse_args(words)
    if arguments.within is not None:
        check_seconds("--within", arguments.within)
        if arguments.undo:
            raise SettingsError("--within and --undo exclude each other")
    target = target_of(arguments, arguments.job)
    reply = ask(target, lambda client: client.drain(DrainHostRequest(arguments.host, arguments.undo, arguments.within)))
    if not reply.done:
        print(one_line(reply.text))
        return 2
    # Shows which job it was, in case the user meant another one.
    command = "" if target.job is None else f": {shlex.join(target.job.command)}"
    print(one_line(f"{reply.text} (job {target.name}{command})"))
    return 0
