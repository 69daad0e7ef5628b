"""``elasticrun jobs``: lists this user's jobs on this machine, and writes the token files for access to them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_driver.cli.driverless import DriverlessJob, driverless_jobs
from elastic_driver.cli.parser import Parser
from elastic_driver.cli.tables import table, width_of_output
from elastic_driver.cli.target import ask, choose_job, left_behind, target_of_job
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.credentials import Role, reader_key
from elastic_driver.rendezvous.job_files import JobFile, running_jobs
from elastic_driver.rendezvous.operator_token import read_operator_key
from elastic_driver.rendezvous.token_file import write_secret
from elastic_driver.reporting.lengths import length
from elastic_driver.reporting.metrics import PATH as METRICS
from elastic_driver.reporting.printable import one_line, without_home

if TYPE_CHECKING:
    from elastic_driver.journal.past import Recorded

# A living driver answers within milliseconds; one that is stopped must not delay the list.
_PATIENCE_S = 2.0
_MOST_AT_ONCE = 16


def parser_of_jobs() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun jobs",
        description="Lists your jobs whose driver runs on this machine, and their state; or writes a credentials "
        "file for access to one of them from other machines. Protect that file like a password. It "
        "must not exist yet; only you can read it.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="for --write-...: job id; needed if several jobs run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ids", action="store_true", help="print only the ids, one per line")
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--write-token",
        metavar="FILE",
        type=Path,
        help="write the key for status, drain and end with --driver URL --token-file FILE",
    )
    files.add_argument(
        "--write-join-token",
        metavar="FILE",
        type=Path,
        help="write the token for elasticrun join with --join-token-file FILE",
    )
    files.add_argument(
        "--write-reader-token",
        metavar="FILE",
        type=Path,
        help="write a read-only token, for Prometheus: it permits /metrics and the status",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="for --write-reader-token: a token for all jobs with this --operator-token-file, running or not",
    )
    return parser


def jobs(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; the search for jobs failed, or a file cannot be written.
    """
    arguments = parser_of_jobs().parse_args(words)
    if arguments.token_file is not None:
        if arguments.write_reader_token is None or arguments.job is not None:
            raise SettingsError("--token-file needs --write-reader-token and excludes JOB")
        _write(arguments.write_reader_token, reader_key(read_operator_key(arguments.token_file)).hex())
        return 0
    running = running_jobs()
    if arguments.write_token is not None:
        url = _write_token(choose_job(running, arguments.job), Role.OPERATOR, arguments.write_token)
        return _tell_use(url, arguments.write_token, "elasticrun status", "--token-file")
    if arguments.write_join_token is not None:
        url = _write_token(choose_job(running, arguments.job), Role.JOINER, arguments.write_join_token)
        return _tell_use(url, arguments.write_join_token, "elasticrun join --slots N", "--join-token-file")
    if arguments.write_reader_token is not None:
        url = _write_token(choose_job(running, arguments.job), Role.READER, arguments.write_reader_token)
        print(one_line(f"{url.partition('#')[0]}{METRICS}"))
        return 0
    left: Sequence[Recorded] = ()
    alone: list[DriverlessJob] = []
    if arguments.job is not None or not arguments.ids:  # shell completion must not wait for agents
        behind = left_behind(arguments.job or "")
        left = behind.jobs
        alone = driverless_jobs(arguments.job or "", behind.ids)
    is_there = bool(left or alone)
    if arguments.job is not None and not (is_there and not any(j.job_id.startswith(arguments.job) for j in running)):
        running, left, alone = [choose_job(running, arguments.job)], [], []
    elif arguments.job is not None:
        running = []
    _tell_of_those_out_of_reach(running)
    if arguments.ids:
        print("".join(f"{one_line(job.job_id)}\n" for job in running), end="")
    elif arguments.json:
        shown: list[dict[str, Any]] = [
            {
                "job": job.job_id,
                "pid": job.pid,
                "driver": job.url,
                "command": job.command,
                "folder": job.folder,
                "no_driver_s": None,
                "phase": None if answer is None else answer["phase"],
                "age_s": None if answer is None else answer["age_s"],
                "workers": None if answer is None else len(answer["workers"]),
            }
            for job, answer in zip(running, _asked(running), strict=True)
        ]
        for found in left:
            named = {"job": found.job.job_id, "pid": None, "driver": None, "command": found.job.command}
            journal = str(found.job.settings.journal)
            shown.append({**named, "no_driver_s": round(found.away_s, 3), "journal": journal})
        print(json.dumps([*shown, *(job.document() for job in alone)]))
    elif not running and not left and not alone:
        print("no job of yours runs on this machine; elasticrun history lists jobs that have ended")
    else:
        rows = [_row(job, answer) for job, answer in zip(running, _asked(running), strict=True)]
        rows += [(found.job.job_id, _none(found), "-", "-", "-", "-", shlex.join(found.job.command)) for found in left]
        rows += [(job.job_id, job.words(), "-", "-", "-", "-", "-") for job in alone]
        heads = ("JOB", "STATE", "AGE", "WORKERS", "PID", "FOLDER", "COMMAND")
        print(table(heads, rows, right={"AGE", "WORKERS", "PID"}, width=width_of_output()))
    return 0


def _asked(running: Sequence[JobFile]) -> list[dict[str, Any] | None]:
    """Ask all drivers at once for their status; None for one that does not answer."""

    def status_of(job: JobFile) -> dict[str, Any] | None:
        try:
            return ask(target_of_job(job), lambda client: client.status(), patience_s=_PATIENCE_S)
        except SettingsError:
            return None

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        return list(pool.map(status_of, running))


def _row(job: JobFile, answer: dict[str, Any] | None) -> tuple[str, ...]:
    facts = ("does not respond", "-", "-") if answer is None else _facts(answer)
    return (job.job_id, *facts, str(job.pid), without_home(job.folder) or "-", shlex.join(job.command))


def _facts(answer: dict[str, Any]) -> tuple[str, str, str]:
    phase = "stalled" if answer.get("stalled") else answer["phase"]
    return phase, length(answer["age_s"]), str(len(answer["workers"]))


def _none(found: Recorded) -> str:
    from elastic_driver.cli.recorded import for_how_long

    return f"no driver {for_how_long(found)}: elasticrun resume {shlex.quote(str(found.job.settings.journal))}"


def _tell_of_those_out_of_reach(running: Sequence[JobFile]) -> None:
    """Report jobs with a visible file but no visible socket: this process shares only the files' folder."""
    for job in running:
        if not os.path.exists(job.socket):
            text = (
                f"cannot reach job {job.job_id} from here: {job.socket} does not exist; either its driver uses "
                f"another {Path(job.socket).parent.parent} than this process (a container, a service with a private "
                "/tmp), or the socket was removed"
            )
            print(one_line(text), file=sys.stderr)


def _write_token(job: JobFile, role: Role, path: Path) -> str:
    """Write a token of a job to a new file. Returns the URL at which its driver accepts it."""
    reply = ask(target_of_job(job), lambda client: client.token(role))
    if not reply.token:
        raise SettingsError(f"job {job.job_id} accepts no joining hosts: it was started without --accept-agents")
    _write(path, reply.token)
    if reply.only_here:
        print("the driver listens on loopback only, because the job uses no other machine", file=sys.stderr)
    return reply.url


def _tell_use(url: str, path: Path, command: str, flag: str) -> int:
    print(one_line(f"{command} --driver {_quoted(url)} {flag} {shlex.quote(str(path))}"))
    return 0


def _quoted(url: str) -> str:
    # A "#" begins a comment only at the beginning of a word.
    return url if re.fullmatch(r"[A-Za-z0-9:/.#-]+", url) else shlex.quote(url)


def _write(path: Path, secret: str) -> None:
    try:
        write_secret(path, secret)
    except OSError as error:
        raise SettingsError(f"cannot write the new file {path}: {in_words(error)}") from error
