"""``elasticrun status --journal DIR``: what is known of a job whose driver has died.

Owns what is made of a journal for people and programs. It takes no lock: a driver that starts at this moment must not
be refused for it.
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
from elastic_driver.report.lengths import length
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.system.process_name import lives, lives_here, pid_in

# Of the events, so many are shown to people.
_SHOWN = 20


def look_into(place: JournalPlace) -> Recorded | Closed:
    """What a journal says.

    Raises:
        SettingsError: there is none, or it cannot be read.
    """
    if place.folder is None:
        from elastic_driver.journal import etcd_journal  # late: what unseals it takes a while to load

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
    """This user's jobs on this machine whose driver has died, and that have a journal.

    Args:
        job_id: how their ids begin.
        tell: is told of a journal that cannot be used: it may be damaged, or of another version.

    Raises:
        SettingsError: the jobs cannot be looked for.
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
            forget(file)  # it has ended, somebody has removed its journal, or another has its folder
        elif file.job_id.startswith(job_id):
            if not has_driver(found):
                jobs.append(found)
            elif lives_here(found.took.process):
                taken.append(file.job_id)
    return Left(jobs, taken)


def has_driver(recorded: Recorded) -> bool:
    """Whether the driver that has written it lives, as far as that can be seen from here."""
    return lives(recorded.took.process) if recorded.is_driven is None else recorded.is_driven


def for_how_long(recorded: Recorded) -> str:
    """How long there has been no driver, in words. What the last one has written is the last that is known of it."""
    return f"for at most {length(math.ceil(recorded.away_s))}"


def document(recorded: Recorded) -> dict[str, Any]:
    """The job as of its last step, in the form of ``GET /v1/status``, with ``recorded`` beside it."""
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
    """What people read above the status: how old it is, and what happened last."""
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
