"""Each collective on each engine, against numpy; errors on every rank; process sets across resets."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, NoticeKind
from elastic_driver.worker.engine.choice import usable_backends
from tests.support import extent
from tests.support.fakes.fake_job import FakeJob, workers_on

pytestmark = pytest.mark.integration

ENGINES = [
    pytest.param(
        backend, sharing, id=name, marks=pytest.mark.skipif(backend not in usable_backends(), reason="not to be had")
    )
    for name, backend, sharing in (
        ("native", Backend.NATIVE, "on"),
        ("native-over-the-network", Backend.NATIVE, "off"),
        ("plain-over-torch", Backend.TORCH, "on"),
    )
]


@pytest.mark.parametrize(
    ("backend", "sharing"),
    [
        *ENGINES[:2],
        pytest.param(*ENGINES[2].values, id="plain-over-torch", marks=[*ENGINES[2].marks, pytest.mark.release]),
    ],
)
def test_every_collective(backend: Backend, sharing: str, tmp_path: Path) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend, auto=False) as job:
        for worker in workers:
            env = {"ELASTIC_DRIVER_SHARED_MEMORY": sharing, "PYTHONWARNINGS": "error"}
            kinds = ["FEW"]
            if sharing == "on" and backend is Backend.NATIVE:
                kinds = ["ALL"] if extent.is_whole else ["FLAT", "SHAPED"]
            job.spawn(worker, "ops_program.everything", str(tmp_path), *kinds, env=env)
        job.plan(workers)
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"ok": True}


@pytest.mark.parametrize(("backend", "sharing"), ENGINES)
def test_process_sets_outlive_resets(backend: Backend, sharing: str) -> None:
    workers = workers_on(a=3)
    newcomer = WorkerId("a", 2, 1)
    env = {"ELASTIC_DRIVER_SHARED_MEMORY": sharing}

    def reached(worker: WorkerId, turn: int) -> bool:
        return any(line.get("turn") == turn for line in job.processes[worker].lines)

    with FakeJob(backend=backend, auto=False) as job:
        for worker in workers:
            job.spawn(worker, "ops_program.later_sets", env=env)
        job.plan(workers)
        job.wait_for(lambda: all(reached(worker, 0) for worker in workers), "the first round's turn")
        job.plan(workers[:2], removed=workers[2:])
        job.notify(NoticeKind.HOSTS_UPDATED, "one leaves")
        job.wait_for(lambda: all(reached(worker, 1) for worker in workers[:2]), "the second round's turn")
        job.spawn(newcomer, "ops_program.later_sets", env=env | {"NEWCOMER": "1"})
        job.plan([*workers[:2], newcomer])
        job.notify(NoticeKind.HOSTS_UPDATED, "one comes")
        for worker in (*workers, newcomer):
            job.wait_end(worker)
        for worker in workers[:2]:
            numbers = [line["numbers"] for line in job.processes[worker].lines if "turn" in line]
            assert numbers == [[1, 2, 3], [None, 1, None], [1, 2, 3]]
        assert [line["numbers"] for line in job.processes[newcomer].lines if "turn" in line] == [[None, 2, 3]]
