"""A hook of MkDocs that generates reference pages from the code: flags, subcommands, and the Python API.

The public names come from the package itself; mkdocstrings reads their docstrings.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from elastic_driver.cli import completion
from elastic_driver.cli.flags import build_parser

_FROM_SOURCE = "This page is generated from the source of the version that you read about.\n"

# The modules whose names users import: page -> module, and its purpose.
MODULES = {
    "python/numpy": ("elastic_driver", "The API for numpy arrays, and what launches jobs from Python."),
    "python/torch": ("elastic_driver.torch", "The API for PyTorch, with the names and arguments of `horovod.torch`."),
    "python/elastic": ("elastic_driver.elastic", "`hvd.elastic` of the numpy API."),
    "python/torch-elastic": ("elastic_driver.torch.elastic", "`hvd.elastic` of the PyTorch API."),
    "python/tensorflow": ("elastic_driver.tensorflow", "Parameter servers whose workers come and go."),
    "python/errors": ("elastic_driver.errors", "Every exception class of the package."),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    texts = {"flags": flags_page(), "commands": commands_page()}
    texts |= {page: module_page(module, purpose) for page, (module, purpose) in MODULES.items()}
    for page, text in texts.items():
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    return files


def flags_page() -> str:
    """Return the page of all flags of ``elasticrun``, by group."""
    parser = build_parser(shows_all=True)
    parts = ["# Flags of elasticrun\n", _FROM_SOURCE, "`elasticrun --help-all` prints the same flags.\n"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings]
        if not actions:
            continue
        title = "General" if group.title in ("options", "optional arguments") else _sentence(group.title or "")
        parts.append(f"## {title}\n")
        if group.description:
            parts.append(f"{_escaped(group.description)}\n")
        parts.append(_table(parser, actions))
    return "\n".join(parts)


def commands_page() -> str:
    """Return the page of the subcommands, with their flags."""
    parts = ["# Subcommands of elasticrun\n", _FROM_SOURCE]
    for parser in _subcommands():
        parts.append(f"## {parser.prog}\n")
        if parser.description:
            parts.append(f"{_escaped(' '.join(parser.description.split()))}\n")
        parts.append(f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n")
        actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
        if actions:
            parts.append(_table(parser, actions))
    return "\n".join(parts)


def module_page(name: str, purpose: str) -> str:
    """Return the page of a module's public names, with their docstrings."""
    module = importlib.import_module(name)
    parts, constants = [f"# {name}\n", f"{purpose}\n"], []
    for each in public_names(module):
        home = _home(module, each)
        if home is None:
            constants.append(f"| [](){{#{name}.{each}}}`{each}` | `{_plain(getattr(module, each))}` |")
        else:
            parts.append(_directive(f"{name}.{each}", each, home))
    if constants:
        parts += ["## Constants\n\n| name | value |\n|---|---|", *constants]
    return "\n".join(parts) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Return the names in a module that users may import."""
    if module.__name__ == "elastic_driver":
        # It has the names of another module, for arrays, and further names.
        names = {*_public(importlib.import_module(vars(module)["_API"])), *vars(module)["_ELSEWHERE"]}
    elif module.__name__ == "elastic_driver.errors":
        names = {each for each, value in vars(module).items() if inspect.isclass(value)}
    else:
        names = {*module.__all__} - {"elastic"}  # a module, which has its own page
    return sorted(names, key=str.lower)


def _public(module: ModuleType) -> list[str]:
    return [each for each in dir(module) if not each.startswith("_")]


def _home(module: ModuleType, name: str) -> str | None:
    """Return the path of the object that has the docstring of a function or class; None for other values."""
    elsewhere = vars(module).get("_ELSEWHERE", {})
    if name in elsewhere:
        return f"{elsewhere[name]}.{name}"
    if name in (homes := vars(module).get("_HOMES", {})):  # not imported: TensorFlow may be missing
        return f"{module.__name__}.{homes[name]}.{name}"
    value = getattr(module, name)
    value = getattr(value, "__func__", value)
    home, inside = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if home is None or inside is None or not home.startswith("elastic_driver") or "<" in inside:
        return None
    return f"{home}.{inside}"


def _directive(public: str, name: str, home: str) -> str:
    return f"[](){{#{public}}}\n::: {home}\n    options:\n      heading: {name}\n      toc_label: {name}\n"


def _plain(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__}" if " at 0x" in text else text


def _subcommands() -> Iterator[argparse.ArgumentParser]:
    makers = {name: make for name, make in vars(completion).items() if name.startswith("parser_of_")}
    return (makers[name]() for name in sorted(makers))


def _table(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    rows = ["| flag | meaning |", "|---|---|"]
    # A setting may have several spellings, which are actions with the same help.
    for action in actions:
        if action.help == argparse.SUPPRESS:
            continue
        rows.append(f"| {_names(action)} | {_escaped(_help(parser, action))} |")
    return "\n".join(rows) + "\n"


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    if not action.option_strings:
        return f"`{value or action.dest}`"
    *others, last = action.option_strings
    return ", ".join([*(f"`{each}`" for each in others), f"`{last}{' ' if value else ''}{value}`"]).replace("|", "\\|")


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(str(each) for each in action.choices)
    return action.dest.upper()


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def _escaped(text: str) -> str:
    for sign in "\\|<*_[]":
        text = text.replace(sign, f"\\{sign}" if sign != "<" else "&lt;")
    return text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
