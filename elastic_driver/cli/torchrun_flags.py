"""torchrun's flags on ``elasticrun``: in both spellings, with dashes and with underscores.

Owns the parsing of these flags. Their meanings, the rejection of some, and the variables that can replace them are in
:mod:`elastic_driver.settings.torchrun_options`.
"""

from __future__ import annotations

import argparse
from typing import Any

from elastic_driver.cli.parser import Parser
from elastic_driver.settings.torchrun_options import OPTIONS

_PREFIX = "torchrun_"
_GROUP = (
    "torchrun's flags",
    "Scripts for torchrun run unchanged: with one of these flags, or its variable (PET_NPROC_PER_NODE and so on), "
    "'train.py' means 'python -u train.py'. Underscores may replace dashes. See docs/torchrun_flags.md.",
)


def add_torchrun_flags(parser: Parser) -> None:
    """Add all of them, as a group. Flags that are not given are not in the result."""
    group = parser.add_topic("torchrun", *_GROUP)
    for option in OPTIONS.values():
        more: dict[str, Any] = (
            {"metavar": option.metavar} if option.metavar else {"action": "store_const", "const": "1"}
        )
        more["dest"] = _PREFIX + option.name
        group.add_argument(*filter(None, (option.short, option.flag)), help=option.help, **more)
        if option.flag != option.underscored:
            group.add_argument(option.underscored, help=argparse.SUPPRESS, **more)


def take_torchrun_flags(given: dict[str, Any]) -> None:
    """Collect the given ones under ``torchrun``: the text of each by its name."""
    names = [name for name in given if name.startswith(_PREFIX)]
    given["torchrun"] = {name.removeprefix(_PREFIX): given.pop(name) for name in names}
