"""Jobs of the history, for subcommands: their selection, how they ended, and how to open them again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.reporting.history_folder import SHORT_ID, KeptJob, NoHistoryError, history_folder, kept_jobs
from elastic_driver.reporting.lengths import length
from elastic_driver.words import ExitCode


def all_kept() -> list[KeptJob]:
    """Return all kept jobs, the latest first.

    Raises:
        SettingsError: the history cannot be read.
    """
    folder: object = ""
    try:
        folder = history_folder(os.environ)
        return kept_jobs(folder)
    except NoHistoryError as error:
        raise SettingsError(
            f"cannot find the history of jobs: {in_words(error)}; set XDG_STATE_HOME to a folder for it"
        ) from error
    except OSError as error:
        raise SettingsError(f"cannot read the history of jobs in {folder}: {in_words(error)}") from error


def choose_kept(job_id: str) -> KeptJob | None:
    """Return the job whose id begins like this; for "" the last one; None if there is none.

    Raises:
        SettingsError: there are several, or the history cannot be read.
    """
    found = all_kept()
    if not job_id:
        return found[0] if found else None
    matching = [job for job in found if job.job_id.startswith(job_id)]
    if len(matching) > 1:
        raise SettingsError(f"several job ids begin with {job_id}: {', '.join(job.job_id for job in matching)}")
    return matching[0] if matching else None


def ended_job(job_id: str) -> KeptJob | None:
    """Return the ended job whose id begins like this; None if there is none, or no place for a history.

    Raises:
        SettingsError: there are several, or the history cannot be read.
    """
    try:
        found = choose_kept(job_id)
    except SettingsError as error:
        if isinstance(error.__cause__, NoHistoryError):
            return None
        raise
    return None if found is None or found.is_running else found


def how(job: KeptJob) -> str:
    """Describe how it ended, in few words."""
    code = job.facts.exit_code
    if job.is_running:
        return "runs"
    if code is None:
        return "no driver" if job.facts.journal else "driver was killed"
    if code == ExitCode.SUCCESS:
        return "finished"
    return f"interrupted ({code})" if 128 < code < 192 else f"failed ({code})"


def ending_of(job: KeptJob) -> str:
    """Describe when and how a job ended, in a sentence."""
    ago = f"{length(time.time() - (job.ended or 0.0))} ago"
    if job.facts.exit_code is None:
        return f"the driver of job {job.job_id} was killed {ago}"
    return f"job {job.job_id} ended {ago} with exit code {job.facts.exit_code}: {job.facts.message}"


def ways_back(job: KeptJob) -> str:
    """Return the message for a user who selected this job as a running one."""
    short = job.job_id[:SHORT_ID]
    return f"{ending_of(job)}; see elasticrun page {short} or elasticrun report {short}"


def listed(jobs: Sequence[KeptJob]) -> str:
    """List some jobs, for a user who selected an unknown one."""
    if not jobs:
        return "there is none yet"
    more = f" and {len(jobs) - 3} more (elasticrun history)" if len(jobs) > 3 else ""
    return ", ".join(job.job_id for job in jobs[:3]) + more
