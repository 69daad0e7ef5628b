"""``elasticrun status [JOB]``: shows the state of a job, its hosts and its workers."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic_driver.cli.parser import Parser, add_key_flag
from elastic_driver.cli.tables import table, width_of_output
from elastic_driver.cli.target import Target, add_driver_flags, ask, left_behind, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.reporting.lengths import length
from elastic_driver.reporting.printable import one_line
from elastic_driver.reporting.status_line import figures
from elastic_driver.settings.journal_place import place_of
from elastic_driver.words import OnChange, counted

if TYPE_CHECKING:
    from elastic_driver.journal.past import Recorded

_INTERVAL_S = 2.0
_TO_THE_TOP = "\x1b[H\x1b[2J"
_SENTENCE = 78
_MOST_FIGURES = 4


def parser_of_status() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun status",
        description="Shows what a running job is doing, its hosts and its workers.",
    )
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="job id or its first characters; needed if several jobs run"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one line each time; see docs/reference/status-api.md"
    )
    parser.add_argument(
        "--journal",
        metavar="DIR",
        help="show the job recorded in this journal (elasticrun --journal DIR, or etcd://...), even if its driver "
        "has died",
    )
    add_key_flag(parser)
    parser.add_argument("--watch", action="store_true", help="repeat every 2 seconds until the job has ended")
    add_driver_flags(parser)
    return parser


def status(words: Sequence[str]) -> int:
    """Run the subcommand. Returns its exit code. With --watch it blocks until the job has ended.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached.
    """
    arguments = parser_of_status().parse_args(words)
    if arguments.journal is not None:
        job_id = _kept(arguments)
        if job_id is None:
            return 0
        arguments.job = job_id
    elif arguments.driver is None and _is_left(arguments):
        return 0
    target = target_of(arguments, arguments.job)
    answer = ask(target, lambda client: client.status())
    while True:
        shown = json.dumps(answer) if arguments.json else page(target.name, answer, width=width_of_output())
        clears = arguments.watch and not arguments.json and sys.stdout.isatty()
        print(f"{_TO_THE_TOP if clears else ''}{shown}", flush=True)
        if not arguments.watch:
            return 0
        try:
            time.sleep(_INTERVAL_S)
            answer = ask(target, lambda client: client.status())
        except KeyboardInterrupt:
            return 0
        except SettingsError:
            if _lives(target):
                raise
            print(f"job {target.name} has ended", file=sys.stderr)
            return 0


def _kept(arguments: argparse.Namespace) -> str | None:
    """Print a journal's state of its job; return the job's id, and print nothing, if its driver can be asked.

    Raises:
        SettingsError: the journal cannot be read, or the flags are for another job.
    """
    from elastic_driver.cli import recorded  # late: it imports the core, which is not needed otherwise
    from elastic_driver.journal.entries import Closed

    if arguments.job is not None or arguments.driver is not None:
        raise SettingsError("--journal selects the job: drop the job id and --driver")
    found = recorded.look_into(place_of(arguments.journal, arguments.journal_key))
    if isinstance(found, Closed):
        print(f"job {found.job_id} has ended with exit code {found.exit_code}")
        return None
    if recorded.has_driver(found) and found.job.job_id in {job.job_id for job in running_jobs()}:
        return found.job.job_id
    _print_recorded(found, arguments)
    return None


def _is_left(arguments: argparse.Namespace) -> bool:
    """Print what is known of the selected job if it has no driver; return whether that is so.

    Raises:
        SettingsError: the search for jobs failed.
    """
    given: str = arguments.job or ""
    meant = left_behind(given).jobs
    if len(meant) != 1 or any(job.job_id.startswith(given) for job in running_jobs()):
        return False
    _print_recorded(meant[0], arguments)
    return True


def _print_recorded(found: Recorded, arguments: argparse.Namespace) -> None:
    from elastic_driver.cli import recorded

    answer = recorded.document(found)
    if arguments.json:
        print(json.dumps(answer))
    else:
        print(f"{recorded.words(found)}\n\n{page(found.job.job_id, answer, width=width_of_output())}")


def _lives(target: Target) -> bool:
    return target.job is None or target.job.job_id in {job.job_id for job in running_jobs()}


def page(name: str, answer: dict[str, Any], *, width: int = 0) -> str:
    """Format the status as text.

    Args:
        name: of the job.
        answer: of ``GET /v1/status``.
        width: of the terminal, characters; 0 for unlimited.
    """
    command = shlex.join(map(str, answer["command"]))
    phase = "stalled" if answer.get("stalled") else answer["phase"]
    title = f"job {name}, {phase}, {length(answer['age_s'])} old: {command}"
    restarts = answer.get("on_change", OnChange.IN_PLACE) != OnChange.IN_PLACE
    # Workers that are restarted have no commits, but may report steps. Workers that run Horovod's own library report no
    # commits.
    has_commits = not restarts and answer.get("tells_commits", True)
    began = f"from commit {answer['commits']}, " if has_commits else ""
    facts = f"round {answer['round_id']}, {began}{counted(answer['resets'], 'reset')}"
    if "chief" in answer:
        chief = answer["chief"]
        there = f"chief {chief['number']} {chief['phase']} for {length(chief['since_s'])}" if chief else "no chief yet"
        facts = f"{there}, {counted(answer['resets'], 'unplanned restart')}"
    told = (title, answer["explain"], facts, _progress(answer, has_commits=has_commits))
    parts = [
        "\n".join(
            textwrap.fill(one_line(line), min(width, _SENTENCE) or _SENTENCE, break_on_hyphens=False)
            for line in filter(None, told)
        )
    ]
    hosts = _hosts(answer)
    if hosts:
        parts.append(table(("HOST", "SLOTS", "WORKERS", ""), hosts, right={"SLOTS", "WORKERS"}, width=width))
    if "chief" in answer:
        rows = [_server(worker) for worker in sorted(answer["workers"], key=_server_order)]
        if rows:
            parts.append(
                table(("TASK", "WORKER", "PHASE", "FOR", "ADDRESS", "PID"), rows, right={"FOR", "PID"}, width=width)
            )
    elif answer["workers"]:
        heads = ("RANK", "WORKER", "PHASE", "FOR", "STEP" if restarts else "COMMIT", "PID")
        rows = [
            _worker(worker, restarts=restarts, has_commits=has_commits)
            for worker in sorted(answer["workers"], key=_order)
        ]
        parts.append(table(heads, rows, right={"RANK", "FOR", "STEP", "COMMIT", "PID"}, width=width))
    return "\n\n".join(parts)


def _progress(answer: dict[str, Any], *, has_commits: bool) -> str:
    """Format the training's progress, in the figures of the driver's status line; "" if nothing is known."""
    commits = answer.get("newest_commit", 0)
    told = figures(
        steps_per_s=answer.get("steps_per_s"),
        steps=answer.get("steps") or 0,
        commits=commits if has_commits and commits > answer["commits"] else 0,
        suspected=len(answer.get("suspected", ())),
    )
    goodput = answer.get("goodput")
    share = [f"goodput {100 * goodput['share']:.1f} %"] if goodput else []
    return ", ".join((*told, *share, *_reported(answer.get("figures") or {})))


def _reported(reported: dict[str, float | None]) -> list[str]:
    """Format the figures that the training reports: the first names of them."""
    shown = [
        f"{one_line(name)} {'nan' if value is None else f'{value:.4g}'}"
        for name, value in list(reported.items())[:_MOST_FIGURES]
    ]
    more = len(reported) - len(shown)
    return [*shown, *([f"{more} more figures"] if more > 0 else [])]


_REMARKS = {"blacklisted": "blacklisted", "drained": "drained", "left_out": "left out", "silent": "not responding"}


def _hosts(answer: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    listed = {host["name"]: host["slots"] for host in answer["hosts"]}
    labels = {host["name"]: host.get("labels", []) for host in answer["hosts"]}
    of_workers = [worker["host"] for worker in answer["workers"]]
    rows = []
    for name in dict.fromkeys([*listed, *of_workers]):
        remarks = [word for kind, word in _REMARKS.items() if name in answer.get(kind, [])]
        if slots := answer.get("drained_slots", {}).get(name):
            remarks.append(f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))} drained")
        remarks += [] if name in listed else ["not listed"]
        remarks += labels.get(name, [])
        rows.append((name, str(listed.get(name, "-")), str(of_workers.count(name)), ", ".join(remarks)))
    return rows


def _order(worker: dict[str, Any]) -> tuple[bool, int, str, int]:
    has_rank = _has_rank(worker)
    return not has_rank, worker["rank"] if has_rank else 0, worker["host"], worker["slot"]


def _has_rank(worker: dict[str, Any]) -> bool:
    # Other workers keep the rank of a round that they have left: two of them may have had the same one.
    return worker["phase"] == "member" and worker["rank"] is not None


def _worker(worker: dict[str, Any], *, restarts: bool, has_commits: bool) -> tuple[str, ...]:
    phase = worker["phase"]
    if phase == "member":
        phase = "training" if worker["running"] else "running" if restarts else "joining"
    return (
        str(worker["rank"]) if _has_rank(worker) else "-",
        f"{worker['host']}[{worker['slot']}]",
        phase,
        length(worker["since_s"]),
        str(worker["commits"]) if has_commits or (restarts and worker["commits"]) else "-",
        "-" if worker["pid"] is None else str(worker["pid"]),
    )


def _server_order(worker: dict[str, Any]) -> tuple[bool, int, str, int]:
    index = worker.get("parameter_server")
    return index is None, index or 0, worker["host"], worker["slot"]


def _server(worker: dict[str, Any]) -> tuple[str, ...]:
    index = worker.get("parameter_server")
    return (
        "worker" if index is None else f"ps{index}",
        f"{worker['host']}[{worker['slot']}]",
        "serving" if worker["phase"] == "member" else worker["phase"],
        length(worker["since_s"]),
        worker.get("address") or "-",
        "-" if worker["pid"] is None else str(worker["pid"]),
    )
