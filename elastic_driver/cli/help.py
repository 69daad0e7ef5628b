"""``elasticrun --help`` and ``elasticrun help TOPIC``: show some of the flags; ``--help-all`` shows all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from elastic_driver.cli.parser import Parser
from elastic_driver.errors import SettingsError

# Flags that most jobs need, by destination.
_MOST_USED = (
    "num_proc",
    "min_num_proc",
    "max_num_proc",
    "hosts",
    "hostfile",
    "discovery_script",
    "torchrun_nproc_per_node",
    "torchrun_nnodes",
    "torchrun_rdzv_endpoint",
    "reset_limit",
    "elastic_timeout_s",
    "durable_dir",
    "journal",
    "output_filename",
    "event_log",
    "quiet",
)
_WIDTH = 12  # of a topic's name


class _OneSpelling(argparse.RawDescriptionHelpFormatter):
    """Shows only the first spelling of each flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return f"{action.option_strings[0]}{value}"


class ShortHelp(argparse.Action):
    """Prints the flags that most jobs need, and exits with 0."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(short_help(parser), end="")
        parser.exit()


def short_help(parser: Parser) -> str:
    """Return the flags that most jobs need, and where to find the others."""
    actions = {action.dest: action for action in reversed(parser._actions)}  # the first spelling of each
    topics = "\n".join(
        f"  {topic:{_WIDTH}}{(group.title or '').partition(' (')[0]}" for topic, group in parser.topics.items()
    )
    formatter = _OneSpelling(parser.prog)
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(parser.description)
    formatter.start_section("common flags")
    formatter.add_arguments([actions[name] for name in _MOST_USED])
    formatter.end_section()
    formatter.add_text(f"more flags (elasticrun help TOPIC; all flags: elasticrun --help-all):\n{topics}")
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def help_on(parser: Parser, topic: str) -> str:
    """Return the flags of a topic. Raises SettingsError for an unknown topic."""
    group = parser.topics.get(topic)
    if group is None:
        raise SettingsError(f"no help on {topic}: it is not a subcommand and not one of {', '.join(parser.topics)}")
    formatter = argparse.HelpFormatter(parser.prog)
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(group._group_actions)
    formatter.end_section()
    return formatter.format_help()
