"""``elasticrun completion SHELL``: prints a script that completes subcommands, flags, choices, files and ids of jobs.

Owns the completion of each flag's value. shtab generates the script from our parsers; it calls ``elasticrun jobs
--ids`` and ``elasticrun history --ids`` for the jobs, and nothing else runs at a TAB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_driver.cli.doctor import parser_of_doctor
from elastic_driver.cli.drain import parser_of_drain
from elastic_driver.cli.end import parser_of_end
from elastic_driver.cli.flags import build_parser
from elastic_driver.cli.history import parser_of_history
from elastic_driver.cli.jobs import parser_of_jobs
from elastic_driver.cli.join import parser_of_join
from elastic_driver.cli.leave import parser_of_leave
from elastic_driver.cli.page import parser_of_page
from elastic_driver.cli.parser import Parser
from elastic_driver.cli.rendezvous import parser_of_rendezvous
from elastic_driver.cli.report import parser_of_report
from elastic_driver.cli.resume import parser_of_resume
from elastic_driver.cli.stacks import parser_of_stacks
from elastic_driver.cli.status import parser_of_status
from elastic_driver.cli.token import parser_of_token
from elastic_driver.cli.wrap import parser_of_wrap
from elastic_driver.errors import SettingsError

_SHELLS = ("bash", "zsh", "fish")
_JOBS = "elasticrun jobs --ids 2>/dev/null"
# Including jobs that have ended.
_KEPT = "elasticrun history --ids 2>/dev/null; elasticrun jobs --ids 2>/dev/null"
_SHOW_ENDED = ("elasticrun page", "elasticrun report")
# shtab's own form for zsh calls this once, while the script is loaded: the list would never be updated.
_JOBS_IN_ZSH = f"""
_elasticrun_jobs() {{
  local -a ids=(${{(f)"$({_JOBS})"}})
  _wanted jobs expl 'running job' compadd -a ids
}}
"""
_KEPT_IN_ZSH = f"""
_elasticrun_kept() {{
  local -a ids=(${{(f)"$({_KEPT})"}})
  _wanted jobs expl 'job' compadd -a ids
}}
_elasticrun_kept_or_files() {{
  _alternative 'jobs:job:_elasticrun_kept' 'files:file:_files'
}}
"""
_FILES, _FOLDERS = frozenset({"FILE", "YAML", "PATH", "COMMAND"}), frozenset({"DIR"})


def parser_of_completion() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun completion",
        description="Prints a shell completion script for elasticrun's subcommands, flags, flag values, files and "
        "running jobs. See docs/howto/shell-completion.md for where to install it.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"one of {', '.join(_SHELLS)}")
    return parser


SUBCOMMANDS: Mapping[str, Callable[[], Parser]] = {
    "completion": parser_of_completion,
    "doctor": parser_of_doctor,
    "drain": parser_of_drain,
    "end": parser_of_end,
    "history": parser_of_history,
    "jobs": parser_of_jobs,
    "join": parser_of_join,
    "leave": parser_of_leave,
    "page": parser_of_page,
    "rendezvous": parser_of_rendezvous,
    "report": parser_of_report,
    "resume": parser_of_resume,
    "stacks": parser_of_stacks,
    "status": parser_of_status,
    "token": parser_of_token,
    "wrap": parser_of_wrap,
}
"""The parser of each subcommand."""


def completion(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage, or shtab is not installed.
    """
    shell = parser_of_completion().parse_args(words).shell
    try:
        import shtab
    except ImportError:
        raise SettingsError("cannot generate a completion script without shtab: pip install shtab") from None
    parser = build_parser()
    # The shell itself completes the training command's words as files.
    command = next(action for action in parser._actions if action.dest == "command")
    parser._remove_action(command)
    subparsers = parser.add_subparsers(dest="subcommand", parser_class=Parser)
    for name, make in SUBCOMMANDS.items():
        made = make()
        # There is room for a sentence beside its name.
        made.description = (made.description or "").split(". ")[0].removesuffix(".")
        # Its own parser replaces the empty one that argparse creates.
        subparsers.add_parser(name, help=made.description, add_help=False)
        subparsers.choices[name] = made
        subparsers._name_parser_map[name] = made
    for each_parser in (parser, *subparsers.choices.values()):
        for action in each_parser._actions:
            _complete(action, shtab, shows_ended=each_parser.prog in _SHOW_ENDED)
    print(_with_files(shtab.complete(parser, shell), shell))
    return 0


def _with_files(script: str, shell: str) -> str:
    """Add the completion of the training command's words as files, where nothing of ours fits."""
    match shell:
        case "bash":
            return script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F")
        case "zsh":
            end = "      esac\n  esac\n"
            return script.replace(end, f"        *) _files ;;\n{end}")
        case _:
            has_words = "test (count (string match -v -- '-*' (commandline -opc))) -gt 1"
            ours = " ".join(SUBCOMMANDS)
            return f'{script}\ncomplete -c elasticrun -n "not __fish_seen_subcommand_from {ours}; and {has_words}" -F'


def _complete(action: argparse.Action, shtab: Any, *, shows_ended: bool) -> None:
    """Define the completion of an argument's values, unless it has choices."""
    found: Any = None
    if action.choices or action.nargs == 0:
        return
    if shows_ended and action.dest in ("job", "events") and not action.option_strings:
        found = shtab.cmd(_KEPT)
        of_zsh = "_elasticrun_kept" if action.dest == "job" else "_elasticrun_kept_or_files"
        found |= {"zsh": of_zsh, "preamble": {**found["preamble"], "zsh": _KEPT_IN_ZSH}}
        if action.dest == "events":
            found["fish"] = f"({_KEPT}; __fish_complete_path (commandline -ct))"
    elif action.metavar == "JOB" or (action.metavar == "ID" and action.dest == "job"):
        found = shtab.cmd(_JOBS)
        found |= {"zsh": "_elasticrun_jobs", "preamble": {**found["preamble"], "zsh": _JOBS_IN_ZSH}}
    elif action.metavar in _FILES:
        found = shtab.FILE
    elif action.metavar in _FOLDERS:
        found = shtab.DIRECTORY
    if found is not None:
        action.complete = found  # type: ignore[attr-defined]
