"""``elasticrun wrap``: runs a program that starts torchrun's workers by itself, and has them be elasticrun's.

Owns the environment that the program gets for that, and what of it its workers do not get. What happens in the program
is told by ``wrap_hook/sitecustomize.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_driver.cli.parser import Parser
from elastic_driver.errors import SettingsError
from elastic_driver.launch.dial.here import source_folder

_HOOK = str(Path(__file__).absolute().with_name("wrap_hook"))
_PATH = "PYTHONPATH"


def parser_of_wrap() -> Parser:
    """Its flags."""
    parser = Parser(
        prog="elasticrun wrap",
        usage="elasticrun wrap [-h] PROGRAM ...",
        description="Runs a program that starts torchrun's workers itself, and has elasticrun run them, with what the "
        "program asks for. Such are accelerate launch, fabric run, python -m torch.distributed.run, and scripts that "
        "call one of these. The exit code is the program's.",
    )
    parser.add_argument("program", nargs="?", help="for instance accelerate")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, for instance: launch train.py")
    return parser


def wrap(words: Sequence[str]) -> int:
    """Runs the subcommand: becomes the program. Returns only where that is not possible.

    Raises:
        SettingsError: bad usage, or there is no such program.
    """
    given = parser_of_wrap().parse_args(words)
    if given.program is None:
        raise SettingsError("no program to run, as in: elasticrun wrap accelerate launch train.py")
    try:
        os.execvpe(given.program, [given.program, *given.arguments], hooked(os.environ))
    except OSError as error:
        raise SettingsError(f"cannot run {given.program!r}: {error.strerror}") from None


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which torch's launcher runs its workers by elasticrun."""
    entries = [_HOOK, environ.get(_PATH, ""), source_folder()]
    return {**environ, _PATH: os.pathsep.join(filter(None, entries))}


def unhooked(environ: Mapping[str, str]) -> dict[str, str]:
    """The same without that, for the workers."""
    entries = [entry for entry in environ.get(_PATH, "").split(os.pathsep) if entry != _HOOK]
    kept = {name: value for name, value in environ.items() if name != _PATH}
    return {**kept, _PATH: os.pathsep.join(entries)} if any(entries) else kept
