"""``elasticrun status --journal DIR``: shows the last known state of a job whose driver has died.

Owns the presentation of a journal as text and data. Takes no lock: otherwise a driver that starts at this moment
would be rejected.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_driver import codec
from elastic_driver.cli import event_words
from elastic_driver.cli.target import Left
from elastic_driver.core.events import Event
from elastic_driver.core.explain import explain
from elastic_driver.driver.status import standing, standing_of
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.journal.entries import Closed
from elastic_driver.journal.folder import JournalError, check_folder
from elastic_driver.journal.past import Recorded, read_job
from elastic_driver.rendezvous.job_files import forget, left_jobs
from elastic_driver.reporting.lengths import length
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.system.process_name import lives, lives_here, pid_in

# The most events shown as text.
_SHOWN = 20


def look_into(place: JournalPlace) -> Recorded | Closed:
    """Return the content of a journal.

    Raises:
        SettingsError: there is no journal, or it cannot be read.
    """
    if place.folder is None:
        from elastic_driver.journal import etcd_journal  # late: decryption takes a while to import

        found = etcd_journal.read_etcd(*etcd_journal.in_etcd(place))
        if found is None:
            raise SettingsError(f"no journal at {place.url}")
        return found
    folder = place.folder
    try:
        folder = folder.parent.resolve(strict=True) / folder.name
        check_folder(folder)
    except OSError as error:
        raise JournalError(f"cannot use the folder {folder} (--journal): {in_words(error)}") from error
    found = read_job(folder)
    if found is None:
        raise SettingsError(f"no journal in {folder}")
    return found


def left_behind(job_id: str, tell: Callable[[str], object]) -> Left:
    """Return this user's jobs on this machine that have a journal and whose driver has died.

    Args:
        job_id: the beginning of their ids.
        tell: called with a message about an unusable journal: it may be damaged, or of another version.

    Raises:
        SettingsError: the search for jobs failed.
    """
    jobs, taken = [], []
    for file in left_jobs():
        try:
            found = read_job(Path(file.journal))
        except SettingsError as error:
            if file.job_id.startswith(job_id):
                tell(f"job {file.job_id} has no driver, and no other can take it over: {error}")
            continue
        if not isinstance(found, Recorded) or found.job.job_id != file.job_id:
            forget(file)  # the job has ended, its journal was removed, or another job has its folder
        elif file.job_id.startswith(job_id):
            if not has_driver(found):
                jobs.append(found)
            elif lives_here(found.took.process):
                taken.append(file.job_id)
    return Left(jobs, taken)


def has_driver(recorded: Recorded) -> bool:
    """Return whether the driver that has written the journal lives, as far as can be seen from here."""
    return lives(recorded.took.process) if recorded.is_driven is None else recorded.is_driven


def for_how_long(recorded: Recorded) -> str:
    """Format how long there has been no driver; its last write is the last known sign of it."""
    return f"for at most {length(math.ceil(recorded.away_s))}"


def document(recorded: Recorded) -> dict[str, Any]:
    """Return the job's state after its last step, in the form of ``GET /v1/status``, with ``recorded`` in addition."""
    state, now, took = recorded.state, recorded.clock, recorded.took
    return {
        "job_id": recorded.job.job_id,
        "command": list(recorded.job.command),
        **standing(state, now),
        "explain": explain(state, now),
        "workers": [standing_of(record, now) for record in state.workers],
        "recorded": {
            "machine": took.machine,
            "pid": pid_in(took.process),
            "version": took.version,
            "directory": recorded.job.directory,
            "no_driver_s": None if has_driver(recorded) else round(recorded.away_s, 3),
            "last_step_unix_s": round(took.unix_s + now - took.clock, 3),
            "events": [
                {"age_s": round(at - state.began, 3), "event": codec.to_data(Event, event)}
                for at, event in recorded.events
            ],
        },
    }


def words(recorded: Recorded) -> str:
    """Format the text above the status: its age, and the last events."""
    took = recorded.took
    driver = f"process {pid_in(took.process)} on {took.machine}"
    whose = (
        f"it is driven by {driver}, which cannot be reached from here"
        if has_driver(recorded)
        else f"no driver {for_how_long(recorded)}: {driver} has died"
    )
    last = datetime.datetime.fromtimestamp(took.unix_s + recorded.clock - took.clock).astimezone()
    head = f"{whose}; this is the job as of its last event, {last.isoformat(' ', 'seconds')}"
    began = recorded.state.began
    lines = [f"{at - began:10.3f} {event_words.in_words(event)}" for at, event in recorded.events[-_SHOWN:]]
    heading = [f"the last {len(lines)} of {len(recorded.events)} recorded events:"] if lines else []
    return "\n".join([head, *heading, *lines])
