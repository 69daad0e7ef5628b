"""``elasticrun leave``: removes this machine from the job that it has joined, and waits until that is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.errors import LaunchError
from elastic_driver.reporting.printable import one_line
from elastic_driver.settings.assembly import number
from elastic_driver.settings.settings import check_seconds

# Twice the default time for a drained worker to reach a commit (--drain-timeout).
_PATIENCE_S = 600.0


def parser_of_leave() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun leave",
        description="Removes this machine from its job: its workers leave at their next commit, as in a drain. "
        "Waits until they have left, so it suits a pod's preStop hook. Exit codes: 0 this machine has "
        "left, 1 it has not left in time, 2 no agent of yours runs on this machine.",
    )
    parser.add_argument("--host", metavar="NAME", help="this machine's name in the job, if it has several")
    parser.add_argument(
        "--job", metavar="ID", help="job id or its first characters, if this machine works for several jobs"
    )
    text = "seconds to wait (default %(default)g)"
    parser.add_argument("--timeout", metavar="S", type=read_by(number), default=_PATIENCE_S, help=text)
    text = (
        "this machine shuts down in S seconds: workers that have not left one second before are killed, and the "
        "others continue"
    )
    parser.add_argument("--within", metavar="S", type=read_by(number), help=text)
    return parser


def leave(words: Sequence[str]) -> int:
    """Run the subcommand. Blocks until the host has left. Returns its exit code.

    Raises:
        SettingsError: bad usage, or there is no such agent on this machine.
    """
    arguments = parser_of_leave().parse_args(words)
    check_seconds("--timeout", arguments.timeout)
    if arguments.within is not None:
        check_seconds("--within", arguments.within)
    from elastic_driver.launch.agent.control import leave as have_leave  # late: bad usage is reported first

    try:
        said = have_leave(arguments.host, arguments.job, arguments.timeout, within_s=arguments.within)
    except LaunchError as error:
        print(one_line(f"elasticrun: error: {error}"), file=sys.stderr)
        return 1
    print(one_line(said))
    return 0
