"""The selection of a job for a subcommand, and the connection to its driver.

Owns the choice among this user's jobs on this machine, and the access to a driver on another machine: its address and
a file with the operator's key.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from elastic_driver.cli.kept import ended_job, ways_back
from elastic_driver.errors import (
    NoTlsError,
    OtherCertificateError,
    RejectedError,
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    SettingsError,
    UnverifiedDriverError,
    WrongTokenError,
)
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.job_files import JobFile, left_jobs, running_jobs
from elastic_driver.rendezvous.operator_token import read_operator_key
from elastic_driver.reporting.printable import one_line

if TYPE_CHECKING:
    from elastic_driver.journal.past import Recorded

# A driver of a running job answers, unless it is stopped or another program has its port.
_PATIENCE_S = 10.0
# A server that does not know the operator's key never will; but an earlier program may still have the port.
_STRANGER_S = 2.0

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Target:
    """A driver to ask.

    Attributes:
        name: of its job, if known; for messages.
        url: its address (:class:`~elastic_driver.rendezvous.driver_url.DriverUrl`).
        credential: for requests.
        job: its job file, if the driver is on this machine.
    """

    name: str
    url: str
    credential: Credential
    job: JobFile | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """Jobs with a journal whose driver has died.

    Attributes:
        jobs: those without another driver.
        taken: ids of those that another driver has taken over, which cannot be asked yet.
    """

    jobs: Sequence[Recorded] = ()
    taken: Sequence[str] = ()

    @property
    def ids(self) -> list[str]:
        """The ids of all of them."""
        return [*(found.job.job_id for found in self.jobs), *self.taken]


def left_behind(job_id: str, said: set[str] | None = None) -> Left:
    """Find such jobs of this user on this machine.

    Args:
        job_id: the beginning of their ids.
        said: warnings already given, which are not repeated; for a command that looks several times.

    Raises:
        SettingsError: the search for jobs failed.
    """
    if not left_jobs():
        return Left()
    from elastic_driver.cli import recorded  # late: it imports the core, which few commands need

    def tell(text: str) -> None:
        if said is None or text not in said:
            print(one_line(text), file=sys.stderr)
        if said is not None:
            said.add(text)

    return recorded.left_behind(job_id, tell)


def add_driver_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a driver on another machine."""
    parser.add_argument("--driver", metavar="URL", help="URL of a driver on another machine; needs --token-file")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file with the job's operator key, written by elasticrun jobs --write-token FILE JOB on the driver's "
        "machine",
    )


def target_of(arguments: argparse.Namespace, job_id: str | None) -> Target:
    """Return the selected driver: that of a job on this machine, or the one named by the flags.

    Args:
        arguments: with those of :func:`add_driver_flags`.
        job_id: the beginning of a job's id; None if there is just one job.

    Raises:
        SettingsError: there is no such job, there are several, or the token cannot be read.
    """
    if (arguments.driver is None) != (arguments.token_file is None):
        raise SettingsError("--driver and --token-file must be given together")
    if arguments.driver is None:
        return target_of_job(choose_job(running_jobs(), job_id))
    if job_id is not None:
        raise SettingsError("--driver selects the job: drop the job id")
    try:
        url = DriverUrl.parse(arguments.driver)
    except RendezvousError as error:
        raise SettingsError(f"argument --driver: {error}") from error
    file = arguments.token_file
    credential = Credential(Identity(Role.OPERATOR), read_operator_key(file), f"the file {file} (--token-file)")
    return Target(f"at {url.url}", str(url), credential)


def target_of_job(job: JobFile) -> Target:
    """Return the driver of a job on this machine."""
    return Target(job.job_id, job.url, Credential(Identity(Role.OPERATOR)), job)


def choose_job(jobs: Sequence[JobFile], job_id: str | None) -> JobFile:
    """Return the selected job.

    Args:
        jobs: the running jobs.
        job_id: the beginning of its id; None if there is just one job.

    Raises:
        SettingsError: there is none, or more than one.
    """
    matching = [job for job in jobs if job_id is None or job.job_id.startswith(job_id)]
    exact = [job for job in matching if job.job_id == job_id]
    if len(exact or matching) == 1:
        return (exact or matching)[0]
    if matching:
        raise SettingsError(f"several jobs are running, name one: {_listed(matching)}")
    left = left_behind("").ids
    alone = [each for each in left if job_id is not None and each.startswith(job_id)]
    if len(alone) == 1:
        raise SettingsError(
            f"job {alone[0]} has no driver: it has died. Take the job over with elasticrun resume and its journal "
            f"(see elasticrun jobs), or end it with elasticrun end {alone[0]}"
        )
    over = None if job_id is None else ended_job(job_id)
    if over is not None:
        raise SettingsError(ways_back(over))
    others = {"running": _listed(jobs), "without a driver": ", ".join(left)}
    listed = "; ".join(f"{what}: {found}" for what, found in others.items() if found)
    if not listed:
        raise SettingsError("no job of yours runs on this machine; elasticrun history lists jobs that have ended")
    raise SettingsError(f"{f'no such job: {job_id}' if job_id else 'no job of yours has a driver here'}; {listed}")


def _listed(jobs: Sequence[JobFile]) -> str:
    return "; ".join(f"{job.job_id} ({shlex.join(job.command)})" for job in jobs)


def ask(target: Target, question: Callable[[RendezvousClient], _Answer], *, patience_s: float = _PATIENCE_S) -> _Answer:
    """Ask the driver. If it does not answer, blocks for a little longer than ``patience_s``.

    Args:
        target: the driver.
        question: sends the request, and returns the answer.
        patience_s: how long a living driver may take to answer, seconds.

    Raises:
        SettingsError: the driver cannot be reached, or rejects the request.
    """
    try:
        client = RendezvousClient(target.url, target.credential, patience_s=patience_s, stranger_s=_STRANGER_S)
        try:
            return question(client)
        finally:
            client.close()
    except RendezvousError as error:
        whose = "" if target.job is None else f"job {target.name}: "
        # On this machine the job file exists, so there is nothing for the user to check.
        hint = "" if target.job else "; check the URL, and that the driver runs"
        raise SettingsError(f"{whose}{error}{_what_to_do(error, hint)}") from error


def _what_to_do(error: RendezvousError, hint: str) -> str:
    command = "elasticrun jobs --write-token FILE, on the driver's machine,"
    match error:
        case RejectedError() | RendezvousClosedError() | RendezvousProtocolError():  # its error says why
            return ""
        case WrongTokenError():
            return f"; {command} writes the current one"
        case OtherCertificateError() | NoTlsError():
            return f"; use the URL that {command} prints"
        case UnverifiedDriverError():
            return f"; {command} prints the URL and writes the key"
        case _:
            return hint
