"""Figures that a training reports, from a worker's call to the job's status and its event log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.job_files import running_jobs
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import FORKED, FORKING, PATIENCE_S, Job

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("elasticrun", "preload"), [(FORKING, ("--preload", "json")), (FORKED, ())], ids=["forked", "fresh"]
)
def test_figures_get_from_workers_to_the_status_and_the_event_log(
    tmp_path: Path, elasticrun: tuple[str, ...], preload: tuple[str, ...]
) -> None:
    command = [sys.executable, str(PROGRAMS / "figures_program.py"), str(tmp_path)]
    with Job(tmp_path, None, *preload, "-np", "2", command=command, elasticrun=elasticrun) as job:
        (started,) = job.wait_for("its start", lambda: job.events("job_started"))
        (file,) = job.wait_for("its file", lambda: [one for one in running_jobs() if one.job_id == started["job_id"]])
        client = RendezvousClient(file.url, Credential(Identity(Role.OPERATOR)), patience_s=PATIENCE_S)
        expected = {"by_api": 1.0, "by_descriptor": 1.0, "by_path": 1.0, "nan": None}
        job.wait_for("rank 0's figures", lambda: client.status()["figures"] == expected)
        client.close()
        (tmp_path / "may_end").touch()
        assert job.wait() == 0
        last = job.events("sampled")[-1]
        assert last["figures"] == {**expected, "by_api": 10.0}
        assert job.said().count("reported an invalid figure, which is dropped: 'epoch 7 is done'") == 1
        assert bool(job.events("warmed")) == bool(preload)
