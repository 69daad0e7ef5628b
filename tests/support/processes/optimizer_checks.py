"""Runs checks of ``optimizer_program`` in one job."""

from __future__ import annotations

import functools

import pytest

from elastic_driver.words import Backend
from tests.support.fakes.fake_job import PATIENCE_S, FakeJob, workers_on


@functools.cache
def run_checks(
    backend: Backend, size: int, checks: tuple[str, ...], env: tuple[tuple[str, str], ...] = ()
) -> tuple[dict[str, str], str]:
    """Runs checks in one job, since starting processes costs more than they do: what each said, and all output."""
    workers = workers_on(a=size)
    with FakeJob(backend=backend, auto=False) as job:
        job.start(workers, "optimizer_program.run_checks", *checks, env=dict(env))
        for worker in workers:
            job.processes[worker].popen.wait(PATIENCE_S)
            job.processes[worker].reader.join()
        said: dict[str, str] = {}
        for worker in workers:
            for line in job.processes[worker].lines:
                if line.get("ok"):
                    said.setdefault(line["check"], "ok")
                else:
                    said[line["check"]] = f"{worker}: {line['error']}"
        return said, job.story()


def assert_ok(said: dict[str, str], story: str, check: str) -> None:
    if check not in said:
        failed = [name for name, answer in said.items() if answer != "ok"]
        pytest.fail(f"not reached: {failed[0]} failed before it" if failed else f"not reached\n{story}")
    assert said[check] == "ok", said[check]
