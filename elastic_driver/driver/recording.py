"""The journal of a job, from its start to its end: whose job is in it, whether it continues, and what is kept.

Owns a job's identity for as long as it lasts, even if a driver dies during it. The stepper and the fleet decide what is
written; :mod:`elastic_driver.journal` writes it to disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

from elastic_driver.dialects.ours import inheritable
from elastic_driver.errors import SettingsError, in_words
from elastic_driver.journal.entries import Closed, JobFacts
from elastic_driver.journal.folder import JOURNAL, JournalError, JournalHeldError, Signature
from elastic_driver.journal.held import FolderJournal, HeldJournal
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded
from elastic_driver.launch.fleet.kept import may_come_back
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.operator_token import read_operator_key
from elastic_driver.rendezvous.token_file import JOIN, new_token, read_token
from elastic_driver.settings.settings import FLAGS, Settings
from elastic_driver.system import parent
from elastic_driver.words import ExitCode, in_seconds

if TYPE_CHECKING:
    from elastic_driver.journal.etcd_lock import EtcdLock

ENDED = 128 + signal.SIGTERM
"""The exit code of a job that an operator ends."""
# Settings that count as given now: those of this driver's terminal, and the place of the journal.
_OF_NOW = ("hands_over", "journal", "log_level", "progress_rank", "quiet", "standby_driver", "verbose")
# Descriptions of settings without a flag of their own. The rest follow from others.
_IN_WORDS = {
    "command": "the command",
    "worker_env": "the tuning flags",
    "nodes": "torchrun's options",
    "logs": "torchrun's options",
}


class NothingLeftError(JournalError):
    """Nothing is left of the job for which this driver has stood by."""


class LinePrinter(Protocol):
    """Prints lines for the user, as the console does."""

    def line(self, text: str) -> None:
        """Print information."""

    def warning(self, text: str) -> None:
        """Print a warning, which may require an action."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A job as its driver begins with it.

    Attributes:
        job: the constant facts of the job.
        journal: where its events are written; None for nowhere.
        before: its past, if its driver has died; None for a new job.
        over: the exit code of a job that had ended, of which nothing is left; None for others.
        held: the place of the journal, which this process has locked; None for nowhere.
        begins: whether another job begins if nothing is left of that one.
        code_in_vain: the exit code if nothing is left of it, and none begins.
    """

    job: JobFacts
    journal: Journal | None = None
    before: Recorded | None = None
    over: int | None = None
    held: HeldJournal | None = None
    begins: bool = True
    code_in_vain: int = ExitCode.INTERNAL_ERROR

    @property
    def lock(self) -> EtcdLock | None:
        """The lock of a journal in etcd: drivers of other machines may take over the job; None if none of them can."""
        return None if self.held is None else self.held.lock


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job to resume: it was seen to have no driver, and may have one by now, or have ended.

    Attributes:
        job_id: its id.
        begins: whether its command begins another one if no worker of it is left.
    """

    job_id: str
    begins: bool = True


def has_journal(settings: Settings) -> bool:
    """Return whether a job may be taken over: then it is uncertain whether the settings given now count."""
    folder = settings.journal_folder
    return settings.has_etcd or (folder is not None and os.path.lexists(folder / JOURNAL))


@contextlib.contextmanager
def recording(
    settings: Settings,
    job_id: str,
    tell: LinePrinter,
    *,
    resumed: Resumed | None = None,
    held: HeldJournal | None = None,
) -> Iterator[Recording]:
    """Lock the journal for as long as this context lasts, if there is one, and read it.

    Args:
        settings: the settings given now.
        job_id: the id of a new job.
        tell: reports whose job it is.
        resumed: the job that must be there; None if a new one may be begun as well.
        held: the place of a job of this process of which nothing is left; None if the journal is not locked yet.

    Raises:
        SettingsError: another driver has the journal, it cannot be used, or nobody can take over the job in it; or it
            is not the job to resume, or the one that was waited for.
    """
    if not settings.has_journal:
        yield Recording(job_of(settings, job_id))
        return
    try:
        if held is None:
            held = _taken(settings, job_id, tell)
        else:
            held.is_of(job_id)
    except JournalHeldError as error:
        if parent.started() is None:
            raise
        tell.warning(f"another driver has taken over this job: {error}")
        yield Recording(job_of(settings, job_id), over=ExitCode.OTHER_DRIVER)
        return
    with held:
        found = held.read()
        follows = _what_follows(found, held, job_id, resumed, tell)
        if isinstance(follows, _Over):
            yield Recording(job_of(settings, follows.job_id), over=follows.exit_code)
            return
        recorded, journal = _begun(settings, held, 0 if found is None else found.epoch, follows, tell)
        if recorded.over is not None:
            found_nothing = isinstance(found, Recorded) and found.state.end is None
            close(journal, recorded.over, tell, found_nothing=found_nothing)
            yield recorded
            return
        try:
            if recorded.lock is not None:
                _check_lease(recorded.lock, recorded.job.settings)
            yield recorded
        except SettingsError:
            if recorded.before is None:
                journal.close(ExitCode.BAD_USAGE)
            else:
                journal.give_up()  # its agents wait for another driver
            raise


def _taken(settings: Settings, job_id: str, tell: LinePrinter) -> HeldJournal:
    """Lock the journal in the settings for this process, as :func:`recording` does."""
    place = settings.journal
    assert place is not None, "it is asked for"
    if place.folder is not None:
        return FolderJournal.take(
            place.folder,
            job_id,
            stands_by=settings.standby_driver,
            on_wait=tell.line,
            look=parent.interruption(),
        )
    from elastic_driver.journal.etcd_journal import EtcdJournal, in_etcd  # late: unsealing it takes a while to load

    return EtcdJournal.take(
        *in_etcd(place),
        job_id,
        stands_by=settings.standby_driver,
        # The agents of a restarted driver wait as long.
        patience_s=0.0 if parent.started() is None else settings.driver_timeout_s,
        on_wait=tell.line,
        look=parent.interruption(),
    )


@dataclass(frozen=True, slots=True)
class _Over:
    """The driver ends at once, and writes nothing.

    Attributes:
        job_id: the id of its job.
        exit_code: the exit code of the driver.
    """

    job_id: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class _Course:
    """The driver writes from here on. Each attribute is as in Recording.

    Attributes:
        job_id: the id of the job.
    """

    job_id: str
    begins: bool
    code_in_vain: int
    before: Recorded | None = None
    over: int | None = None


def _what_follows(
    found: Recorded | Closed | None, held: HeldJournal, job_id: str, resumed: Resumed | None, tell: LinePrinter
) -> _Over | _Course:
    """Decide what a driver does with this content of its journal. Raises the errors of :func:`recording`."""
    there = _job_in(found)
    if held.only_goes_on:
        ended = None if held.waited_for in ("", there) else _of(held.waited_for, held.last)
        if ended is not None:  # and the present one is another's
            tell.line(f"job {held.waited_for} has ended with exit code {ended}")
            return _Over(held.waited_for, ended)
        try:
            resumed = resumed or Resumed(_awaited(found, held))
        except JournalError as error:
            if parent.started() is None:
                raise
            # A driver that was started next would find the same.
            tell.warning(str(error))
            return _Over(job_id, ExitCode.BAD_USAGE)
    elif held.waited_for and held.waited_for == there:
        resumed = Resumed(held.waited_for)
    if resumed is not None:
        _check_is_there(resumed, found, held.name)
    exit_code = _has_ended(found, held.last)
    if exit_code is not None and (resumed is not None or _was_ours(found, held)):
        if resumed is not None:
            tell.line(f"job {there} has ended with exit code {exit_code}")
        held.is_of(there)
        held.has_ended(exit_code)  # for other drivers that stand by
        return _Over(there, exit_code)
    begins = resumed is None or resumed.begins
    code_in_vain = ExitCode.INTERNAL_ERROR if begins else ENDED
    begins = begins and not held.only_goes_on
    anew = _Course(job_id, begins, code_in_vain)
    if not isinstance(found, Recorded) or exit_code is not None:
        return anew
    held.check(found)
    what = "; starting a new job" if begins else "; run the same command to start it again" if held.only_goes_on else ""
    if _can_be_taken_over(found, tell, follows=what):
        parent.has_begun(was_standby=held.only_goes_on)
        return replace(anew, job_id=there, before=found)
    if found.state.end is not None or not begins:
        return replace(anew, job_id=there, over=code_in_vain if found.state.end is None else found.state.end.exit_code)
    return anew


def _begun(
    settings: Settings, held: HeldJournal, last: int, course: _Course, tell: LinePrinter
) -> tuple[Recording, Journal]:
    """Create the recording of the job as it continues or begins, and its journal, without records of this driver.

    Args:
        settings: the settings given now.
        held: the place of the journal.
        last: the epoch of the last driver that has written there; 0 for none.
        course: the decision on what follows.
        tell: warns of settings without effect.
    """
    held.is_of(course.job_id)
    before = course.before
    if before is None:
        job = job_of(held.settings(settings), course.job_id)
        journal = Journal(held.store(), job, epoch=last + 1)
    else:
        job = before.job
        _warn_of_differences(settings, job.settings, tell)
        now = {name: getattr(settings, name) for name in _OF_NOW}
        job = replace(job, settings=held.settings(replace(job.settings, **now)))
        journal = Journal(held.store(), job, epoch=last + 1, facts=before.facts.all())
    if held.lock is not None:
        # So the loss of the job to another driver is known at once, and not only with the next write.
        held.lock.on_lost = journal.look_soon
    recorded = Recording(job, journal, before, course.over, held, course.begins, course.code_in_vain)
    return recorded, journal


def close(journal: Journal, exit_code: int, tell: LinePrinter, *, found_nothing: bool = False) -> bool:
    """Remove the records of a job that has ended, except those that led to an internal error of the driver.

    Args:
        journal: the journal of the job.
        exit_code: the exit code of the driver.
        tell: reports what is kept, and why.
        found_nothing: whether nothing was left of a job to take over.

    Returns:
        Whether the journal records that the job has ended.
    """
    if exit_code == ExitCode.INTERNAL_ERROR and not found_nothing:
        journal.close(exit_code, keeps=True)
        tell.warning(
            f"the events before this are kept in {journal.name}: elasticrun status --journal {journal.name} shows them"
        )
        return False
    why = journal.close(exit_code)
    if why:
        tell.warning(f"cannot record the end of the job in the journal {journal.name}: {why}")
    return not why


def job_of(settings: Settings, job_id: str) -> JobFacts:
    """Return the constant facts of a new job.

    Raises:
        SettingsError: a file of a token cannot be read.
    """
    token_file, join_file = settings.operator_token_file, settings.join_token_file
    key = JobKey.new(b"" if token_file is None else read_operator_key(token_file))
    token = ""
    if settings.accept_agents:
        token = new_token() if join_file is None else read_token(join_file, JOIN)
    mask = os.umask(0)
    os.umask(mask)
    return JobFacts(
        job_id=job_id,
        key=key.secret.hex(),
        operator_key=key.operator.hex(),
        join_token=token,
        settings=settings,
        environment=inheritable(os.environ),
        directory=os.getcwd(),
        umask=mask,
    )


def enter(job: JobFacts) -> None:
    """Move this process to the folder and umask in which the job was started.

    Raises:
        SettingsError: the folder no longer exists.
    """
    try:
        os.chdir(job.directory)
    except OSError as error:
        raise SettingsError(f"its folder {job.directory}: {in_words(error)}") from error
    os.umask(job.umask)


def _job_in(found: Recorded | Closed | None) -> str:
    return "" if found is None else found.job.job_id if isinstance(found, Recorded) else found.job_id


def _check_is_there(resumed: Resumed, found: Recorded | Closed | None, name: str) -> None:
    """Raise SettingsError if that job is no longer there."""
    there = _job_in(found)
    if there != resumed.job_id:
        what = f"now that of job {there}" if there else "gone"
        raise SettingsError(f"cannot continue job {resumed.job_id}: the journal {name} is {what}")


def _check_lease(lock: EtcdLock, settings: Settings) -> None:
    """Raise SettingsError if agents would give up before another driver can take over."""
    if settings.agent_timeout_s < 2 * lock.lease_s:
        raise SettingsError(
            f"--agent-timeout {settings.agent_timeout_s:g} is below {2 * lock.lease_s:g} s, twice the lease of "
            f"{lock.lease_s:g} s that etcd grants: another driver can take over the job only after the lease expires "
            "(etcd's leases are at least 1.5 times its --election-timeout)"
        )


def _awaited(found: Recorded | Closed | None, held: HeldJournal) -> str:
    """Return the job for which a driver has stood by. Raises JournalError if it is no longer there."""
    there = _job_in(found)
    if there and there == (held.waited_for or there):
        return there
    job = f"job {held.waited_for}" if held.waited_for else "the job"
    if there:
        raise JournalError(
            f"cannot take over {job}, for which this driver was standing by: {held.name} is now the journal of job "
            f"{there}"
        )
    raise NothingLeftError(
        f"cannot take over {job}, for which this driver was standing by: nothing is left of it at {held.name}. "
        "If it has not ended, run the same command to start it again"
    )


def _can_be_taken_over(found: Recorded, tell: LinePrinter, *, follows: str) -> bool:
    """Return whether any agent is left that could come back. Otherwise report that the job is over."""
    if any(map(may_come_back, found.facts.agents.values())):
        return True
    if found.state.end is None:
        tell.line(
            f"job {found.job.job_id} is over: its driver died at most {in_seconds(found.away_s)} ago, and none of its "
            f"agents is left{follows}"
        )
    return False


def _has_ended(found: Recorded | Closed | None, last: Signature) -> int | None:
    """Return the exit code of the job there; None if it has not ended, as far as its driver could record that."""
    if isinstance(found, Closed):
        return found.exit_code
    return None if found is None else _of(found.job.job_id, last)


def _of(job_id: str, last: Signature) -> int | None:
    """Return the exit code of a job, as far as it was recorded outside its records."""
    return last.exit_code if last.job == job_id else None


def _was_ours(found: Recorded | Closed | None, held: HeldJournal) -> bool:
    """Return whether a job that has ended was that of this command, whose last driver was killed while ending."""
    if isinstance(found, Closed) and found.exit_code == ExitCode.INTERNAL_ERROR:
        return False  # nothing was left to take over, see close(): another job begins
    return held.is_of_this_command


def _warn_of_differences(given: Settings, kept: Settings, tell: LinePrinter) -> None:
    """Warn of flags that differ from those of the job that is taken over. Omits their values, e.g. of -x."""
    names = (setting.name for setting in fields(Settings) if setting.name not in _OF_NOW)
    differ = (name for name in names if getattr(given, name) != getattr(kept, name))
    said = dict.fromkeys(filter(None, (FLAGS.get(name) or _IN_WORDS.get(name) for name in differ)))
    if said:
        tell.warning(
            "the job continues with the settings it was started with; changed settings have no effect: "
            f"{', '.join(said)}"
        )
