"""``elasticrun wrap``: runs a program that starts torchrun's workers by itself, and makes elasticrun run them.

The mechanism is in :mod:`elastic_driver.function.wrapping`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from elastic_driver.cli.parser import Parser
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.function.wrapping import hooked


def parser_of_wrap() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun wrap",
        usage="elasticrun wrap [-h] PROGRAM ...",
        description="Runs a program that calls torchrun's launcher, with elasticrun in place of torchrun and the "
        "options that the program sets: accelerate launch, fabric run, python -m "
        "torch.distributed.run, and scripts that call one of these. The exit code is the program's.",
    )
    parser.add_argument("program", nargs="?", help="e.g. accelerate")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, e.g. launch train.py")
    return parser


def wrap(words: Sequence[str]) -> int:
    """Run the subcommand: replace this process by the program. Returns only if that is not possible.

    Raises:
        SettingsError: bad usage, or there is no such program.
    """
    given = parser_of_wrap().parse_args(words)
    if given.program is None:
        raise SettingsError("no program to run: expected, for example, elasticrun wrap accelerate launch train.py")
    try:
        os.execvpe(given.program, [given.program, *given.arguments], hooked(os.environ))
    except OSError as error:
        raise SettingsError(f"cannot run {given.program!r}: {in_words(error)}") from None
