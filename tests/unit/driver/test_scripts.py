"""Workers of different hosts that run different scripts: who is told of."""

from __future__ import annotations

import pytest

from elastic_driver.driver.scripts import Scripts
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker

pytestmark = pytest.mark.unit


def worker(hostname: str, digest: str, slot: int = 0) -> Worker:
    return Worker(WorkerId(hostname, slot, 0), slot, str(slot), script="/home/me/train.py", digest=digest)


def test_two_hosts_with_different_copies_are_named_with_the_file() -> None:
    scripts = Scripts()
    assert scripts.started(worker("node1", "old")) == ""
    assert scripts.started(worker("node2", "old")) == ""
    said = scripts.started(worker("node3", "new"))
    assert said.startswith("/home/me/train.py is not the same file on hosts node1 and node3: ")


def test_it_is_told_once_however_many_hosts_have_the_other_one() -> None:
    scripts = Scripts()
    scripts.started(worker("node1", "old"))
    said = [
        scripts.started(worker(f"node{n}", "new" if n % 2 else "old", slot)) for n in range(2, 50) for slot in (0, 1)
    ]
    assert len([text for text in said if text]) == 1


def test_of_copies_that_are_all_different_a_few_are_told_of() -> None:
    scripts = Scripts()
    said = [scripts.started(worker(f"node{n}", str(n))) for n in range(50)]
    assert 1 <= len([text for text in said if text]) <= 3


def test_what_cannot_be_read_is_not_another_script() -> None:
    scripts = Scripts()
    assert scripts.started(worker("node1", "old")) == ""
    assert scripts.started(worker("node2", "")) == ""


def test_a_script_that_was_changed_between_two_starts_of_all_is_the_same_for_all() -> None:
    """Workers that are restarted at a change: their user may have mended it meanwhile."""
    scripts, first = Scripts(), [worker("node1", "old"), worker("node2", "old")]
    for one in first:
        scripts.started(one)
    for one in first:
        scripts.ended(one.id)
    assert [scripts.started(worker(name, "new")) for name in ("node1", "node2")] == ["", ""]


def test_on_one_host_it_is_one_file() -> None:
    scripts = Scripts()
    assert [scripts.started(worker("node1", digest, slot)) for slot, digest in enumerate(("old", "new"))] == ["", ""]
