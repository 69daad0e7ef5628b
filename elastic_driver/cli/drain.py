"""``elasticrun drain HOST``: has the workers of a host leave a running job at their next commit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from elastic_driver.errors import RendezvousError, SettingsError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.job_files import JobFile, running_jobs
from elastic_driver.rendezvous.messages import DrainHostRequest
from elastic_driver.report.printable import one_line

# Its driver lives, and answers unless it is stopped or somebody else has its port.
_PATIENCE_S = 10.0


def drain(words: Sequence[str]) -> int:
    """Runs the subcommand. Returns its exit code.

    Raises:
        SettingsError: there is no such job, or its driver cannot be reached.
    """
    parser = argparse.ArgumentParser(
        prog="elasticrun drain",
        description="Has the workers of a host leave a running job at their next commit: they exit with code 0, no "
        "step is lost, the host is not blamed. It gets no workers until it has left the list of hosts and come back.",
    )
    parser.add_argument("host", help="as the job's discovery script names it")
    parser.add_argument("--job", metavar="ID", help="which job, where several run (the beginning of its id will do)")
    parser.add_argument("--undo", action="store_true", help="let the host have workers again")
    arguments = parser.parse_args(words)
    job = _choose(running_jobs(), arguments.job)
    client = RendezvousClient(job.url, job.credential, patience_s=_PATIENCE_S)
    try:
        reply = client.drain(DrainHostRequest(arguments.host, arguments.undo))
    except RendezvousError as error:
        raise SettingsError(f"cannot reach the driver of job {job.job_id}: {error}") from error
    finally:
        client.close()
    if not reply.done:
        print(one_line(reply.text))
        return 2
    # Which job it was, so that who meant another one sees it.
    print(one_line(f"{reply.text} (job {job.job_id}: {' '.join(job.command)})"))
    return 0


def _choose(jobs: list[JobFile], job_id: str | None) -> JobFile:
    matching = [job for job in jobs if job_id is None or job.job_id.startswith(job_id)]
    if len(matching) == 1:
        return matching[0]
    listed = "; ".join(f"{job.job_id} ({' '.join(job.command)})" for job in jobs)
    if not jobs:
        raise SettingsError("no job of yours runs on this machine")
    if not matching:
        raise SettingsError(f"there is no job {job_id}; running: {listed}")
    raise SettingsError(f"several jobs run, name one with --job: {listed}")
