"""Whom each listener of the product admits: all names that there are, tried at each. Who may do what is in
test_permissions.py, who gets to a Unix socket at all in test_where_it_listens.py and test_strangers.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.system.local_socket import path_of
from elastic_driver.worker.launched.host import JobHost
from tests.support.network.admitted import admitted_here, admitted_over_tls
from tests.support.processes.jobs import Job
from tests.support.processes.rendezvous_process import a_rendezvous
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.integration

PATIENCE_S = 150.0
# Each role, with the name of nobody where it has names, and what is no name.
STRANGERS = (
    *("operator", "joiner", "member", "reader", "chief 1", "ranks", "driver"),
    *(f"ticket {'ab' * 16}", f"agent {'ab' * 16}", "worker elsewhere[0]#0"),
)
WORKERS = (WorkerId("a", 0, 0), WorkerId("b", 1, 0))
SLOTS = (SlotInfo(0, 2, 0, 1, 0, 2), SlotInfo(1, 2, 0, 1, 1, 2))


@pytest.fixture(autouse=True)
def private_runtime(runtime: Path) -> Path:
    """The only job there is can be named by its absence."""
    return runtime


@pytest.mark.parametrize("accepts", [True, False])
def test_of_a_job(tmp_path: Path, private_runtime: Path, *, accepts: bool) -> None:
    said = tmp_path / "environment"
    command = ["sh", "-c", f"env > {said}.new && mv {said}.new {said} && exec sleep 1000"]
    flags = ("--accept-agents",) if accepts else ()
    with Job(tmp_path, "localhost:1\n", "-np", "1", *flags, command=command) as job:
        job.wait_for("the worker", said.exists)
        env = dict(line.split("=", 1) for line in said.read_text().splitlines() if "=" in line)
        workers = path_of(env["ELASTIC_DRIVER_RENDEZVOUS"])
        assert workers is not None
        driver = Path(running_jobs()[0].socket)
        (agent,) = (f"agent {path.stem.partition('-')[2]}" for path in private_runtime.rglob("agent-*.sock"))
        worker = f"worker {env['ELASTIC_DRIVER_WORKER']}"
        port = int(elasticrun("page").stdout.partition("127.0.0.1:")[2].partition("/")[0])
        everybody = (*STRANGERS, agent, worker)
        ours = {"operator", agent} | ({"joiner"} if accepts else set())
        assert admitted_here(driver, everybody) == ours
        assert admitted_over_tls(port, everybody) == ours
        assert admitted_here(workers, everybody) == {worker}
        assert job.process.poll() is None


def test_of_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that are none of the job's were let in once, and their end was an error of its server."""
    everybody = (*STRANGERS, *(f"worker {worker.key}" for worker in WORKERS))
    ranks = {f"worker {worker.key}" for worker in WORKERS}
    host = JobHost(WORKERS, SLOTS, start_timeout_s=PATIENCE_S)
    try:
        path = path_of(host.serve_here().url)
        assert path is not None
        with contextlib.closing(
            RendezvousClient(f"unix:{path}", Credential(Identity(Role.WORKER, WORKERS[1])), patience_s=PATIENCE_S)
        ) as rank:
            with pytest.raises(Exception, match="404"):
                rank.status()
            assert admitted_here(path, STRANGERS) == set()
            with pytest.raises(Exception, match="404"):
                rank.status()
        assert admitted_here(path, everybody) == ranks
    finally:
        host.close(wait_for_others=False)
    host = JobHost(WORKERS, SLOTS, start_timeout_s=PATIENCE_S)
    try:
        port = int(DriverUrl.parse(host.serve("127.0.0.1", None).url).url.rpartition(":")[2])
        assert admitted_over_tls(port, everybody) == ranks
    finally:
        host.close(wait_for_others=False)
    assert caplog.records == []


def test_of_the_rendezvous_of_torchrun_s_jobs() -> None:
    with a_rendezvous() as rendezvous:
        assert admitted_over_tls(rendezvous.port, STRANGERS) == {"member"}
