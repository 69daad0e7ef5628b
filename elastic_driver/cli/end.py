"""``elasticrun end JOB``: ends a running job, as SIGTERM to its driver does."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import add_driver_flags, ask, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.report.printable import one_line


def parser_of_end() -> Parser:
    """Its flags."""
    parser = Parser(
        prog="elasticrun end",
        description="Ends a running job, as SIGTERM to its elasticrun does: its workers get SIGTERM, and SIGKILL after "
        "its --grace-time; its exit code is 143. Asks nothing, and does not wait.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="the beginning of its id will do: see elasticrun jobs")
    add_driver_flags(parser)
    return parser


def end(words: Sequence[str]) -> int:
    """Runs the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached.
    """
    arguments = parser_of_end().parse_args(words)
    if arguments.job is None and arguments.driver is None:
        raise SettingsError("which job is to end? Give its id, or the beginning of it: see elasticrun jobs")
    target = target_of(arguments, arguments.job)
    reply = ask(target, lambda client: client.end())
    print(one_line(f"job {target.name}: {reply.text}"))
    return 0
