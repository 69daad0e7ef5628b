"""What workers find of the driver's environment."""

from __future__ import annotations

import pytest

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.ours import OurDialect, inheritable
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import JobKey

pytestmark = pytest.mark.unit

JOB = JobAddress("http://127.0.0.1:1", JobKey(b"k" * 32), "job", "owner")
START = WorkerStart(WorkerId("a", 0, 0), SlotInfo(0, 1, 0, 1, 0, 1), (), 0, 1)
PROVE = ("USER", "PASSWORD", "CERT", "KEY")
SECRET = [f"{of}ETCDCTL_{name}" for of in ("", "ELASTIC_DRIVER_AGENTS_") for name in PROVE]


def test_what_proves_to_etcd_who_asks_is_not_inherited() -> None:
    driver = dict.fromkeys([*SECRET, "ELASTIC_DRIVER_BESIDE"], "x")
    other = {"ETCDCTL_ENDPOINTS": "e", "ETCDCTL_CACERT": "c", "MY_ETCDCTL_USER": "m", "ETCDCTL_USERS": "u"}
    assert inheritable(driver | other) == other
    assert OurDialect(driver, exported={}).environment(START, job=JOB).keys().isdisjoint(driver)


def test_what_is_passed_is_there_all_the_same() -> None:
    """-x is among what is exported."""
    dialect = OurDialect({"ETCDCTL_USER": "jobs:secret"}, exported={"ETCDCTL_USER": "readers:public"})
    assert dialect.environment(START, job=JOB)["ETCDCTL_USER"] == "readers:public"
