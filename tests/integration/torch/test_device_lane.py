"""Operations on devices, with CPU tensors in their place: each collective, errors, joins; and which group is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import usable_backends
from tests.support import extent
from tests.support.fakes.fake_job import FakeJob, workers_on

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine"),
]

# Of optimizer_program: what differs when buckets go this way.
OPTIMIZER_CHECKS = (
    "plain_averages",
    "several_passes",
    "compressed",
    "grouped",
    "gradients_live_in_the_buffer",
    "kept_gradients_stay",
    "clipping",
    "missing_gradients",
    "sparse_gradients",
    "closures",
    "uneven_inputs",
    "other_shapes_are_an_error",
)


def run(
    program: str, *arguments: str, size: int = 3, env: dict[str, str] | None = None
) -> list[list[dict[str, object]]]:
    workers = workers_on(a=size)
    lane = {"ELASTIC_DRIVER_DEVICE_LANE": "cpu", "PYTHONWARNINGS": "error", **(env or {})}
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            job.spawn(worker, program, *arguments, env=lane)
        job.plan(workers)
        return [job.wait_end(worker).lines for worker in workers]


def test_every_collective(tmp_path: Path) -> None:
    kinds = "FLAT" if extent.is_whole else "FEW"
    assert all(lines[-1] == {"ok": True} for lines in run("ops_program.everything", str(tmp_path), kinds))


def test_collectives_of_a_device() -> None:
    assert all(lines[-1]["on_device"] for lines in run("device_program.collectives", "cpu", size=2))


def test_optimizer() -> None:
    for lines in run("optimizer_program.run_checks", *OPTIMIZER_CHECKS, size=2):
        assert [(line["check"], line.get("error")) for line in lines if "check" in line] == [
            (check, None) for check in OPTIMIZER_CHECKS
        ]


def test_fast_group_that_works_is_used() -> None:
    for lines in run("device_program.agreement", "none", size=2):
        assert lines[-1] == {"ok": True, "warnings": [], "errors": [], "fast": [True]}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("fails", "rank 1: it failed: no transport"),
        ("hangs", "rank 0: its first allreduce did not finish within 8 s"),  # nor that of rank 1
        ("wrong", "rank 1: its first allreduce returned 4 instead of 3"),
        ("shared", "ranks 0 and 1 share a device (the only one)"),
    ],
)
def test_one_fault_turns_all_ranks_away_from_the_fast_group(fault: str, text: str) -> None:
    # Where one is not heard of, or hangs, the others wait for so long, or half of it.
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "16"} if fault in ("fails", "hangs") else {}
    ends = run("device_program.agreement", fault, size=2, env=env)
    for rank, lines in enumerate(ends):
        told = [f"elastic_driver: the fast group for cpu tensors is not used: {text}; tensors go through the CPU"]
        assert lines[-1] == {"ok": True, "warnings": told if rank == 0 else [], "errors": [], "fast": [False]}


def test_fault_is_an_error_on_all_ranks_when_nothing_else_is_wanted() -> None:
    for lines in run("device_program.agreement", "wrong", "strict", size=2):
        errors = lines[-1]["errors"]
        assert isinstance(errors, list)
        assert len(errors) == 3
        assert all("which was requested: rank 1: its first allreduce returned 4" in error for error in errors)


def test_failure_that_only_the_device_sees_is_no_result() -> None:
    for lines in run("device_program.agreement", "late", size=2):
        errors = lines[-1]["errors"]
        assert isinstance(errors, list)
        assert len(errors) == 1
        assert errors[0].startswith("internal: ")


def test_joined_rank_takes_part_in_sets_that_it_has_not_used() -> None:
    assert all(lines[-1]["ok"] for lines in run("device_program.absent_from_a_set"))


def test_groups_of_removed_sets_are_freed() -> None:
    assert all(lines[-1] == {"ok": True, "left": 1} for lines in run("device_program.removed_sets"))
