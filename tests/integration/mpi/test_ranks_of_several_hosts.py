"""Rank 0's server as ranks of other hosts reach it: over TLS, with the job's key and the fingerprint from MPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_driver.errors import RendezvousError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.worker.launched.host import JobHost
from elastic_driver.worker.launched.job import LaunchedJob
from elastic_driver.worker.launched.meeting import Welcome
from elastic_driver.worker.settings import DEFAULTS

pytestmark = pytest.mark.integration

WORKERS = (WorkerId("a", 0, 0), WorkerId("b", 1, 0))
SLOTS = (SlotInfo(0, 2, 0, 1, 0, 2), SlotInfo(1, 2, 0, 1, 1, 2))
PATIENCE_S = 150.0


@pytest.fixture
def welcome() -> Iterator[Welcome]:
    host = JobHost(WORKERS, SLOTS, start_timeout_s=PATIENCE_S)
    try:
        yield host.serve("127.0.0.1", None)
    finally:
        host.close(wait_for_others=False)


def test_a_rank_of_another_host_asks_with_the_job_s_key(welcome: Welcome) -> None:
    job = LaunchedJob(None, SLOTS[1], "127.0.0.1", welcome, WORKERS[1], None)
    settings = job.adapt(DEFAULTS)
    assert settings.credential is not None
    assert DriverUrl.parse(settings.rendezvous).fingerprint
    client = RendezvousClient(settings.rendezvous, settings.credential, patience_s=PATIENCE_S)
    with pytest.raises(RendezvousError, match="404"):
        client.status()
    client.close()


@pytest.mark.parametrize("knows_the_certificate", [True, False])
def test_a_stranger_is_not_served_and_a_stranger_s_server_is_not_asked(
    welcome: Welcome, knows_the_certificate: bool
) -> None:
    identity = Identity(Role.WORKER, WORKERS[1])
    url = DriverUrl.parse(welcome.url)
    if knows_the_certificate:
        key, why = JobKey.new().of(identity), "did not prove to be this job's driver"
    else:
        key, why = (
            JobKey(bytes.fromhex(welcome.secret)).of(identity),
            "the certificate there does not match the fingerprint in the URL",
        )
        url = DriverUrl(url.url, "ab" * 32)
    client = RendezvousClient(str(url), Credential(identity, key), patience_s=0.5)
    with pytest.raises(RendezvousError, match=why):
        client.status()
    client.close()
