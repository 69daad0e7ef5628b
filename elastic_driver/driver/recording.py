"""The journal of a job, from its start to its end: whether the folder can be had, and what stays in it.

Owns nothing. What is written is the stepper's business, and how it gets on disc that of :mod:`elastic_driver.journal`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from elastic_driver.errors import SettingsError
from elastic_driver.journal.entries import JobFacts
from elastic_driver.journal.folder import JournalError, JournalFolder
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.settings.settings import Settings
from elastic_driver.words import ExitCode


class Teller(Protocol):
    """Shows lines to the user; the console is."""

    def line(self, text: str) -> None:
        """What there is to be known."""

    def warning(self, text: str) -> None:
        """What may need something to be done."""


@contextlib.contextmanager
def recording(settings: Settings, job_id: str, tell: Teller) -> Iterator[Journal | None]:
    """Locks the folder for as long as this context lasts; None for a job without a journal.

    Raises:
        SettingsError: another driver has it, it cannot be used, or the job in it has not ended.
    """
    if settings.journal is None:
        yield None
        return
    with JournalFolder.take(settings.journal, job_id, on_wait=tell.line) as folder:
        before = read_job(folder.path)
        if isinstance(before, Recorded):
            raise _not_ended(before, folder.path)
        facts = JobFacts(job_id, settings.command, os.getcwd())
        journal = Journal(folder, facts, epoch=1 if before is None else before.epoch + 1)
        try:
            yield journal
        except SettingsError:
            # Nothing has been started.
            journal.close(ExitCode.BAD_USAGE)
            raise


def close(journal: Journal, exit_code: int, tell: Teller) -> None:
    """Of a job that has ended nothing is kept, but for what led to an error of the driver's own."""
    if exit_code == ExitCode.INTERNAL_ERROR:
        journal.give_up()
        tell.warning(f"what led to this is kept in {journal.path}: elasticrun status --journal {journal.path} shows it")
        return
    why = journal.close(exit_code)
    if why:
        tell.warning(f"cannot write in the journal {journal.path} that the job has ended: {why}")


def _not_ended(before: Recorded, path: Path) -> JournalError:
    return JournalError(
        f"cannot use the journal {path}: job {before.job.job_id} in it has not ended, but its driver has died; "
        f"elasticrun status --journal {path} shows what is known of it; remove {path / 'journal'} to begin another job "
        "there, or name another folder"
    )
