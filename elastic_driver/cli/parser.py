"""The reader of command lines: bad usage is one line for the user, and says which flag a misspelt one is like."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from elastic_driver.errors import SettingsError
from elastic_driver.settings.journal_place import KEY_FLAG


class Parser(argparse.ArgumentParser):
    """See argparse. Raises SettingsError where that prints the usage and exits.

    Attributes:
        topics: the groups of flags that can be asked for by a word.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ambiguous: dict[str, str] = {}
        self.topics: dict[str, argparse._ArgumentGroup] = {}

    def add_topic(self, topic: str, title: str, description: str | None = None) -> argparse._ArgumentGroup:
        """Adds a group of flags that can be asked for by a word."""
        self.topics[topic] = self.add_argument_group(title, description)
        return self.topics[topic]

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, and says which flag a misspelt one is like."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            if unknown[0] in self._ambiguous:
                self.error(f"ambiguous option: {unknown[0]} could match {self._ambiguous[unknown[0]]}")
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.8)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {near[0]}?)' if near else ''}")
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The flags that this may be short for.

        argparse asks for every word, also for those of the command, which are not its own; and it ends where there are
        several. Here two spellings of one flag are one, and what may be short for several is a fault only where it
        turns out to be no word of the command.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        if len({action.dest for action, *_ in found}) <= 1:
            return found[:1]
        self._ambiguous[option_string] = ", ".join(flag for _, flag, *_ in found)
        return []


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of subcommands that goes with a journal in etcd."""
    parser.add_argument(KEY_FLAG, metavar="FILE", help="file with the key of a journal in etcd, as given to the job")


def read_by(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """What argparse is to call: it takes a reason for the user from one kind of error only."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument
