"""The journal of a job, from its start to its end: whose job is in it, whether it goes on, and what stays.

Owns what a job is known by for as long as it lasts, whether a driver has died during it or not. What is written is the
stepper's and the fleet's business, and how it gets on disc that of :mod:`elastic_driver.journal`.
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
"""What a job ends with that an operator ends."""
# What is shown on this driver's terminal, and where the journal is, is as it was given now.
_OF_NOW = ("hands_over", "journal", "log_level", "progress_rank", "quiet", "standby_driver", "verbose")
# What has no flag of its own, in words. The rest follows from others.
_IN_WORDS = {
    "command": "the command",
    "worker_env": "the tuning flags",
    "nodes": "torchrun's options",
    "logs": "torchrun's options",
}


class NothingLeftError(JournalError):
    """Nothing is there any more of a job that this driver has stood by for."""


class Teller(Protocol):
    """Shows lines to the user; the console is."""

    def line(self, text: str) -> None:
        """What there is to be known."""

    def warning(self, text: str) -> None:
        """What may need something to be done."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A job as its driver begins with it.

    Attributes:
        job: what does not change while it lasts.
        journal: what happens to it is written there; None for nowhere.
        before: what there is of it already, where its driver has died; None for a new job.
        over: the exit code of a job that had ended, of which nothing is left; None for others.
        held: where the journal is, which this process has for itself; None for nowhere.
        begins: whether another job begins where nothing is left of that one.
        code_in_vain: the exit code where nothing is left of it, and none begins.
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
        """That of a journal in etcd: drivers of other machines may have the job; None where none of those can."""
        return None if self.held is None else self.held.lock


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job that is gone on with: it was seen to have no driver, and may have one by now, or have ended.

    Attributes:
        job_id: which.
        begins: whether its command begins another one where nobody is left of it.
    """

    job_id: str
    begins: bool = True


def has_journal(settings: Settings) -> bool:
    """Whether a job may be taken over: nothing that was asked for now is certain to count."""
    folder = settings.journal_folder
    return settings.has_etcd or (folder is not None and os.path.lexists(folder / JOURNAL))


@contextlib.contextmanager
def recording(
    settings: Settings,
    job_id: str,
    tell: Teller,
    *,
    resumed: Resumed | None = None,
    held: HeldJournal | None = None,
) -> Iterator[Recording]:
    """Locks the journal for as long as this context lasts, where there is one, and reads what is in it.

    Args:
        settings: what the user asks for now.
        job_id: of a new job.
        tell: is told whose job it is.
        resumed: the job that has to be there; None where a new one may be begun as well.
        held: where a job of this process was, of which nothing is left; None where the journal is not locked yet.

    Raises:
        SettingsError: another driver has it, it cannot be used, or nobody can take over the job in it; or it is not
            that which is gone on with, or was waited for.
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
        tell.warning(f"another driver has this job by now: {error}")
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
            is_in_vain = isinstance(found, Recorded) and found.state.end is None
            close(journal, recorded.over, tell, is_in_vain=is_in_vain)
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


def _taken(settings: Settings, job_id: str, tell: Teller) -> HeldJournal:
    """The journal that is asked for, for this process alone. See :func:`recording`."""
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
    from elastic_driver.journal.etcd_journal import EtcdJournal, in_etcd  # late: what unseals it takes a while to load

    return EtcdJournal.take(
        *in_etcd(place),
        job_id,
        stands_by=settings.standby_driver,
        # Of one that was started again the agents wait as long.
        patience_s=0.0 if parent.started() is None else settings.driver_timeout_s,
        on_wait=tell.line,
        look=parent.interruption(),
    )


@dataclass(frozen=True, slots=True)
class _Over:
    """The driver ends at once, and writes nothing.

    Attributes:
        job_id: which job it was for.
        exit_code: its own.
    """

    job_id: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class _Course:
    """The driver writes from here on. Each is as in Recording.

    Attributes:
        job_id: of the job.
    """

    job_id: str
    begins: bool
    code_in_vain: int
    before: Recorded | None = None
    over: int | None = None


def _what_follows(
    found: Recorded | Closed | None, held: HeldJournal, job_id: str, resumed: Resumed | None, tell: Teller
) -> _Over | _Course:
    """What a driver does that finds this in its journal. See :func:`recording`, for what it raises too."""
    there = _job_in(found)
    if held.only_goes_on:
        ended = None if held.waited_for in ("", there) else _of(held.waited_for, held.last)
        if ended is not None:  # and what is there is another's
            tell.line(f"job {held.waited_for} has ended with exit code {ended}")
            return _Over(held.waited_for, ended)
        try:
            resumed = resumed or Resumed(_awaited(found, held))
        except JournalError as error:
            if parent.started() is None:
                raise
            # Whoever was started next would find the same.
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
        held.has_ended(exit_code)  # whoever else stands by looks at that next
        return _Over(there, exit_code)
    begins = resumed is None or resumed.begins
    code_in_vain = ExitCode.INTERNAL_ERROR if begins else ENDED
    begins = begins and not held.only_goes_on
    anew = _Course(job_id, begins, code_in_vain)
    if not isinstance(found, Recorded) or exit_code is not None:
        return anew
    held.check(found)
    what = "; this is a new job" if begins else "; the same command begins it anew" if held.only_goes_on else ""
    if _can_be_taken_over(found, tell, follows=what):
        parent.has_begun(has_stood_by=held.only_goes_on)
        return replace(anew, job_id=there, before=found)
    if found.state.end is not None or not begins:
        return replace(anew, job_id=there, over=code_in_vain if found.state.end is None else found.state.end.exit_code)
    return anew


def _begun(
    settings: Settings, held: HeldJournal, last: int, course: _Course, tell: Teller
) -> tuple[Recording, Journal]:
    """The job as it goes on, or begins, and its journal, which has nothing of this driver's yet.

    Args:
        settings: what the user asks for now.
        held: where it is.
        last: the epoch of the last driver that has written there; 0 for none.
        course: what follows from what is there.
        tell: is told of settings that are without effect.
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
        # Whether another driver has the job is then known at once, and not only with what is written next.
        held.lock.on_lost = journal.look_soon
    recorded = Recording(job, journal, before, course.over, held, course.begins, course.code_in_vain)
    return recorded, journal


def close(journal: Journal, exit_code: int, tell: Teller, *, is_in_vain: bool = False) -> bool:
    """Of a job that has ended nothing is kept, but for what led to an error of the driver's own.

    Args:
        journal: of the job.
        exit_code: of the driver.
        tell: is told what stays, and why.
        is_in_vain: whether nothing was left of a job that was taken over.

    Returns:
        Whether the journal says that the job has ended.
    """
    if exit_code == ExitCode.INTERNAL_ERROR and not is_in_vain:
        journal.close(exit_code, keeps=True)
        tell.warning(f"what led to this is kept in {journal.name}: elasticrun status --journal {journal.name} shows it")
        return False
    why = journal.close(exit_code)
    if why:
        tell.warning(f"cannot write in the journal {journal.name} that the job has ended: {why}")
    return not why


def job_of(settings: Settings, job_id: str) -> JobFacts:
    """What a new job is known by.

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
    """Has this process be where the job was started.

    Raises:
        SettingsError: there is no such folder any more.
    """
    try:
        os.chdir(job.directory)
    except OSError as error:
        raise SettingsError(f"its folder {job.directory}: {in_words(error)}") from error
    os.umask(job.umask)


def _job_in(found: Recorded | Closed | None) -> str:
    return "" if found is None else found.job.job_id if isinstance(found, Recorded) else found.job_id


def _check_is_there(resumed: Resumed, found: Recorded | Closed | None, name: str) -> None:
    """Raises SettingsError where that job is not there any more."""
    there = _job_in(found)
    if there != resumed.job_id:
        what = f"that of job {there}" if there else "gone"
        raise SettingsError(f"cannot go on with job {resumed.job_id}: the journal {name} is {what} by now")


def _check_lease(lock: EtcdLock, settings: Settings) -> None:
    """Raises SettingsError where agents would give up before another driver can be there."""
    if settings.agent_timeout_s < 2 * lock.lease_s:
        raise SettingsError(
            f"--agent-timeout {settings.agent_timeout_s:g} is below {2 * lock.lease_s:g} s, twice the lease of "
            f"{lock.lease_s:g} s that etcd grants: another driver has the job only when that is over (etcd's leases "
            "are not shorter than 1.5 times its --election-timeout)"
        )


def _awaited(found: Recorded | Closed | None, held: HeldJournal) -> str:
    """The job that a driver has stood by for, and finds. Raises JournalError where that is not there any more."""
    there = _job_in(found)
    if there and there == (held.waited_for or there):
        return there
    job = f"job {held.waited_for}" if held.waited_for else "the job"
    if there:
        raise JournalError(
            f"cannot take over {job}, for which this driver has stood by: {held.name} is that of job {there} by now"
        )
    raise NothingLeftError(
        f"cannot take over {job}, for which this driver has stood by: nothing is left of it at {held.name}. "
        "Unless it has ended, begin it anew with the same command"
    )


def _can_be_taken_over(found: Recorded, tell: Teller, *, follows: str) -> bool:
    """Whether somebody is left who could come back. Else that job is over, and the user is told what follows."""
    if any(map(may_come_back, found.facts.agents.values())):
        return True
    if found.state.end is None:
        tell.line(
            f"job {found.job.job_id} is over: its driver died at most {in_seconds(found.away_s)} ago, and none of its "
            f"agents is left{follows}"
        )
    return False


def _has_ended(found: Recorded | Closed | None, last: Signature) -> int | None:
    """The exit code of the job that is there; None for one that has not ended, as far as its driver could say so."""
    if isinstance(found, Closed):
        return found.exit_code
    return None if found is None else _of(found.job.job_id, last)


def _of(job_id: str, last: Signature) -> int | None:
    """The exit code of a job, as far as it was said apart from the records."""
    return last.exit_code if last.job == job_id else None


def _was_ours(found: Recorded | Closed | None, held: HeldJournal) -> bool:
    """Whether a job that has ended was that of this command, whose last driver was killed on its way out."""
    if isinstance(found, Closed) and found.exit_code == ExitCode.INTERNAL_ERROR:
        return False  # nothing was left to take over, see close(): another job begins
    return held.is_of_this_command


def _warn_of_differences(given: Settings, kept: Settings, tell: Teller) -> None:
    """Tells which flags were given otherwise than to the job that is taken over. Without their values: see -x."""
    names = (each.name for each in fields(Settings) if each.name not in _OF_NOW)
    differ = (name for name in names if getattr(given, name) != getattr(kept, name))
    said = dict.fromkeys(filter(None, (FLAGS.get(name) or _IN_WORDS.get(name) for name in differ)))
    if said:
        tell.warning(
            f"the job that is taken over goes on as it was started; what differs now is without effect: "
            f"{', '.join(said)}"
        )
