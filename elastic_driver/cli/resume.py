"""``elasticrun resume DIR``: continues a job whose driver has died, as its own command would.

Owns the reading of that command from the job's journal. Imports little before it runs: its process may become the
parent of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_driver.cli.parser import Parser, add_key_flag
from elastic_driver.settings.journal_place import JournalPlace, place_of


def parser_of_resume() -> Parser:
    """Return its parser."""
    parser = Parser(
        prog="elasticrun resume",
        description="Takes over a job whose driver has died, like running the job's command again with the same flags, "
        "folder and journal: if none of its agents is left, a new job begins. For a job that has ended, "
        "reports its exit code.",
    )
    parser.add_argument(
        "journal", metavar="DIR", help="the job's journal, as given to elasticrun --journal: DIR, or etcd://..."
    )
    add_key_flag(parser)
    return parser


def journal_of(words: Sequence[str]) -> JournalPlace:
    """Return the selected journal.

    Raises:
        SettingsError: bad usage.
    """
    arguments = parser_of_resume().parse_args(words)
    return place_of(arguments.journal, arguments.journal_key)


def go_on(journal: JournalPlace, *, begins: bool = True) -> int:
    """Continue the job of a journal. Blocks until it has ended. Returns its exit code.

    Args:
        journal: of the job.
        begins: whether to start the job anew if nothing of it is left.

    Raises:
        SettingsError: there is no journal, it cannot be read, or another driver has it.
    """
    from elastic_driver.cli.recorded import look_into
    from elastic_driver.driver.job import run_job
    from elastic_driver.driver.recording import Resumed, enter
    from elastic_driver.journal.entries import Closed

    found = look_into(journal)
    if isinstance(found, Closed):
        print(f"job {found.job_id} has ended with exit code {found.exit_code}", flush=True)
        return found.exit_code
    # What the job's own command would do if nothing of the job is left, and a new one begins.
    enter(found.job)
    given = found.job.settings
    # A driver that is to end the job is notified by SIGTERM.
    settings = replace(given, journal=journal, standby_driver=False, hands_over=begins and given.hands_over)
    return run_job(settings, resumed=Resumed(found.job.job_id, begins))
