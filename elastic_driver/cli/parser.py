"""The parser of command lines: reports bad usage in one line, with a suggestion for a misspelt flag."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from elastic_driver.errors import SettingsError
from elastic_driver.settings.journal_place import KEY_FLAG


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises SettingsError instead of printing the usage and exiting.

    Attributes:
        topics: the groups of flags for ``elasticrun help TOPIC``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ambiguous: dict[str, str] = {}
        self.topics: dict[str, argparse._ArgumentGroup] = {}

    def add_topic(self, topic: str, title: str, description: str | None = None) -> argparse._ArgumentGroup:
        """Add a group of flags for ``elasticrun help TOPIC``."""
        self.topics[topic] = self.add_argument_group(title, description)
        return self.topics[topic]

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and suggest a flag for a misspelt one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            if unknown[0] in self._ambiguous:
                self.error(f"ambiguous option: {unknown[0]} could match {self._ambiguous[unknown[0]]}")
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.8)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {near[0]}?)' if near else ''}")
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags of which this may be an abbreviation.

        argparse calls this for every word, including those of the command, and fails if there are several such flags.
        Here two spellings of one flag count once, and an ambiguous word is an error only if it turns out not to belong
        to the command.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        if len({action.dest for action, *_ in found}) <= 1:
            return found[:1]
        self._ambiguous[option_string] = ", ".join(flag for _, flag, *_ in found)
        return []


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for subcommands with a journal in etcd."""
    parser.add_argument(KEY_FLAG, metavar="FILE", help="file with the key of a journal in etcd, as given to the job")


def read_by(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a converter for argparse, which shows the user the reason of one kind of error only."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument
