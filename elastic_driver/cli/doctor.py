"""``elasticrun doctor``: checks the hosts of a job before it runs there, and reports what would stop it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from elastic_driver.cli.doctor_text import as_data, text_of
from elastic_driver.cli.flags import build_parser, parse_by
from elastic_driver.cli.parser import Parser, read_by
from elastic_driver.reporting.printable import without_home
from elastic_driver.settings.assembly import number, settings_from
from elastic_driver.settings.settings import check_seconds
from elastic_driver.words import ExitCode

_TIMEOUT_S = 60.0  # for ssh, a Python on a slow disk, and PyTorch's import together
_STOPS = 1
_HOSTS = ("hosts", "hostfile", "discovery_script")
# A job must have a command; it is not run.
_NO_COMMAND = ("no-command",)


def parser_of_doctor() -> Parser:
    """Return its parser: elasticrun's flags, of which the help shows those for hosts, and two of its own."""
    parser = build_parser(shows_all=True)
    for action in parser._actions:
        if action.dest not in ("help", "command", *_HOSTS):
            action.help = argparse.SUPPRESS
        elif action.dest == "command":
            action.help = "the job's command, as given to elasticrun; only its Python interpreter is used"
    for group in parser._action_groups:
        if all(action.help == argparse.SUPPRESS for action in group._group_actions):
            group.description = None
    parser.prog = "elasticrun doctor"
    parser.usage = "elasticrun doctor [-H HOST,...] [flags of elasticrun] [--json] [--timeout S] [command ...]"
    parser.description = """\
Checks the hosts of a job before it runs: starts one worker on each host, as the job would, and
reports what would stop or slow the job: versions, GPUs, clocks, limits, disks, memory, the network
between all hosts, an allreduce. Changes nothing on them. Accepts the flags of elasticrun, so the
job's whole command line can follow. docs/debugging.md lists the checks."""
    parser.epilog = (
        "Exit codes: 0 nothing would stop a job, 1 something would, 2 bad usage, 70 internal error or\nstandard "
        "output not writable, 130 interrupted."
    )
    add = parser.add_argument
    add("--json", action="store_true", default=False, help="print all findings as JSON")
    text = f"how long to wait for hosts to start and answer (default {_TIMEOUT_S:g})"
    add("--timeout", metavar="S", type=read_by(number), default=_TIMEOUT_S, help=text)
    return parser


def doctor(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage, or these hosts cannot be checked.
    """
    given = parse_by(parser_of_doctor(), words)
    as_json, timeout_s = given.pop("json"), given.pop("timeout")
    check_seconds("--timeout", timeout_s)
    given.pop("check_build", None)
    given["command"] = given["command"] or _NO_COMMAND
    if not given.get("torchrun"):
        given.setdefault("num_proc", 1)
    settings = settings_from(given, os.environ)
    # Late: --help does not need the driver.
    from elastic_driver.doctor.checkup import check_up
    from elastic_driver.doctor.findings import findings_of, stops

    if sys.stderr.isatty():
        print("elasticrun doctor: checking the hosts; this takes a few seconds ...", file=sys.stderr, flush=True)
    try:
        found = check_up(settings, timeout_s)
    except KeyboardInterrupt:
        print("elasticrun doctor: interrupted; all its processes have ended", file=sys.stderr)
        return 130
    findings = findings_of(found.hosts, found.facts, found.seen, limit_s=timeout_s)
    if as_json:
        print(json.dumps(as_data(found, findings)))
    else:
        print(text_of(found, findings))
    if found.said:
        said = without_home(found.said)
        print(f"elasticrun doctor: internal error; please report the lines below\n{said}", file=sys.stderr)
        return ExitCode.INTERNAL_ERROR
    return _STOPS if stops(findings) else 0
