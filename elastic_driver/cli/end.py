"""``elasticrun end JOB``: ends a running job, as SIGTERM to its driver does, or drives it to its end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_driver.cli.parser import Parser
from elastic_driver.cli.target import add_driver_flags, ask, left_behind, target_of
from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.job_files import left_jobs, running_jobs
from elastic_driver.report.printable import one_line
from elastic_driver.system import parent
from elastic_driver.system.process_name import pid_in, send

if TYPE_CHECKING:
    from elastic_driver.journal.past import Recorded


def parser_of_end() -> Parser:
    """Its flags."""
    parser = Parser(
        prog="elasticrun end",
        description="Ends a running job, as SIGTERM to its elasticrun does: its workers get SIGTERM, and SIGKILL after "
        "its --grace-time; its exit code is 143. Asks nothing, and waits only for one whose driver has died.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="the beginning of its id will do: see elasticrun jobs")
    add_driver_flags(parser)
    return parser


def end(words: Sequence[str]) -> int:
    """Runs the subcommand. Returns its exit code.

    Raises:
        SettingsError: bad usage; there is no such job, or its driver cannot be reached.
    """
    arguments = parser_of_end().parse_args(words)
    if arguments.job is None and arguments.driver is None:
        raise SettingsError("which job is to end? Give its id, or the beginning of it: see elasticrun jobs")
    if arguments.driver is None and not any(job.job_id.startswith(arguments.job) for job in running_jobs()):
        left = left_behind(arguments.job)
        if len(left.jobs) == 1:
            found = left.jobs[0]
            return 0 if _is_ended_by_parent(found.job.job_id) else _end_without_driver(found)
        from elastic_driver.cli.undriven import end_undriven, undriven_jobs  # late: most jobs have a driver

        alone = undriven_jobs(arguments.job, left.ids)
        if len(alone) == 1:
            have_ended, what = end_undriven(alone[0])
            print(one_line(f"job {alone[0].job_id}: {what}"))
            return 0 if have_ended else 1
    target = target_of(arguments, arguments.job)
    reply = ask(target, lambda client: client.end())
    print(one_line(f"job {target.name}: {reply.text}"))
    return 0


def _is_ended_by_parent(job_id: str) -> bool:
    """Has the elasticrun that is about to start its driver again end it. Returns whether there is one."""
    for file in left_jobs():
        if file.job_id == job_id and send(file.parent, signal.SIGTERM):
            whose = f"its elasticrun (process {pid_in(file.parent)})"
            print(one_line(f"job {job_id}: its driver has died, and {whose} starts another that ends it"))
            return True
    return False


def _end_without_driver(found: Recorded) -> int:
    """Takes it over to end it. Blocks until it has ended."""
    from elastic_driver.cli.resume import go_on

    folder = found.job.settings.journal
    assert folder is not None, "it has a journal"
    parent.begin_with(signal.SIGTERM)
    code = go_on(folder, begins=False)
    return 0 if code == 128 + signal.SIGTERM else code
