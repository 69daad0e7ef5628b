"""``elasticrun history``: lists this user's last jobs, including those that have ended."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence

from elastic_driver.cli.kept import all_kept, how
from elastic_driver.cli.parser import Parser
from elastic_driver.cli.tables import table, width_of_output
from elastic_driver.reporting.history_folder import PAGE, KeptJob
from elastic_driver.reporting.lengths import length
from elastic_driver.reporting.printable import one_line, without_home


def parser_of_history() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun history",
        description="Lists your recent jobs, newest first, including those that have ended. elasticrun page JOB and "
        "elasticrun report JOB show one of them. The last 50 jobs are kept, in at most 100 MB, except those "
        "started with --no-history.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ids", action="store_true", help="print only the ids, one per line")
    return parser


def history(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage, or the history cannot be read.
    """
    arguments = parser_of_history().parse_args(words)
    jobs = all_kept()
    now = time.time()
    if arguments.ids:
        print("".join(f"{one_line(job.job_id)}\n" for job in jobs), end="")
    elif arguments.json:
        print(json.dumps([_document(job) for job in jobs]))
    elif not jobs:
        print("the history holds no job of yours yet")
    else:
        heads = ("JOB", "ENDED", "HOW", "DURATION", "WORKERS", "FOLDER", "COMMAND")
        rows = [_row(job, now) for job in jobs]
        print(table(heads, rows, right={"DURATION", "WORKERS"}, width=width_of_output()))
    return 0


def _row(job: KeptJob, now: float) -> tuple[str, ...]:
    facts, ended = job.facts, job.ended
    return (
        job.job_id,
        "-" if ended is None else f"{length(now - ended)} ago",
        how(job),
        length((now if ended is None else ended) - facts.began),
        str(facts.workers or "-"),
        without_home(facts.directory) or "-",
        shlex.join(facts.command) or "-",
    )


def _document(job: KeptJob) -> dict[str, object]:
    facts = job.facts
    return {
        "job": job.job_id,
        "how": how(job),
        "began": round(facts.began, 3),
        "ended": None if job.ended is None else round(job.ended, 3),
        "exit_code": facts.exit_code,
        "message": facts.message or None,
        "workers": facts.workers,
        "folder": facts.directory or None,
        "command": list(facts.command),
        "journal": facts.journal or None,
        "kept_in": str(job.folder),
        "has_page": (job.folder / PAGE).exists(),
    }
