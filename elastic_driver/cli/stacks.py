"""``elasticrun stacks [JOB]``: shows every rank's Python stack, unusual ones first, and which ranks wait for which."""

from __future__ import annotations

import json
from collections.abc import Sequence

from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import add_driver_flags, ask, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.reporting.stacks_text import stacks_text


def parser_of_stacks() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun stacks",
        description="Shows the Python stacks of a running job's workers, with equal stacks grouped and outliers "
        "first, and which collective waits for which rank.",
    )
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="job id or its first characters; needed if several jobs run"
    )
    parser.add_argument("--rank", metavar="R", type=int, help="show all threads of this rank only")
    parser.add_argument("--all", action="store_true", help="show all threads of each rank, ungrouped")
    parser.add_argument("--json", action="store_true", help="print JSON; see docs/reference/status-api.md")
    add_driver_flags(parser)
    return parser


def stacks(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job or rank, or its driver cannot be reached.
    """
    arguments = parser_of_stacks().parse_args(words)
    target = target_of(arguments, arguments.job)
    answer = ask(target, lambda client: client.stacks())
    if arguments.rank is not None:
        answer = {**answer, "stacks": [stack for stack in answer["stacks"] if stack.get("rank") == arguments.rank]}
        if not answer["stacks"]:
            raise SettingsError(f"job {target.name} has no rank {arguments.rank} now")
    if arguments.json:
        print(json.dumps(answer))
    else:
        print(stacks_text(answer, ungrouped=arguments.all or arguments.rank is not None), flush=True)
    return 0
