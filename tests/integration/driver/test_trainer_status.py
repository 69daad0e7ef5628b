"""Kubeflow Trainer is told how far a job is: by a thread, over HTTPS, and never in the way."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.driver import trainer_status
from elastic_driver.driver.trainer_status import ReportTarget, Standing, TrainerStatus, standing_of
from elastic_driver.errors import SettingsError
from tests.support.clusters.fake_trainer import FakeTrainer, fake_trainer
from tests.support.clusters.kubernetes_fake.certificate import write_certificate
from tests.support.processes import subcommands
from tests.support.processes.jobs import FAULTY, Job

pytestmark = pytest.mark.integration

STANDING = Standing(45, 1e12, {"round": "3"})


def with_trainer(
    folder: Path, main: Callable[[FakeTrainer, TrainerStatus, list[str]], Coroutine[Any, Any, None]]
) -> None:
    async def run(trainer: FakeTrainer) -> None:
        way = ReportTarget.of(trainer.environment)
        assert way is not None
        warnings: list[str] = []
        await main(trainer, TrainerStatus(way, lambda: STANDING, warnings.append), warnings)

    with fake_trainer(folder) as trainer:
        asyncio.run(run(trainer))


async def until(trainer: FakeTrainer, what: str, holds: Callable[[FakeTrainer], Any]) -> None:
    await asyncio.to_thread(trainer.wait_for, what, holds)


@pytest.fixture(autouse=True)
def fast_and_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_status, "_INTERVAL_S", 0.05)
    monkeypatch.setattr(trainer_status, "_MOST_PAUSE_S", 0.1)
    for name in ("_CONNECT_S", "_READ_S", "_LAST_S"):
        monkeypatch.setattr(trainer_status, name, 1000.0)


def test_what_it_is_told(tmp_path: Path) -> None:
    async def main(trainer: FakeTrainer, status: TrainerStatus, warnings: list[str]) -> None:
        await until(trainer, "twice", lambda one: len(one.told) > 1)
        await status.close(0)
        first, last = trainer.told[0], trainer.told[-1]
        assert first["progressPercentage"] == 45
        assert first["estimatedRemainingSeconds"] == (1 << 31) - 1
        assert first["metrics"] == [{"name": "round", "value": "3"}]
        assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
        assert warnings == []

    with_trainer(tmp_path, main)


def test_a_job_that_fails_has_not_come_to_its_end(tmp_path: Path) -> None:
    async def main(trainer: FakeTrainer, status: TrainerStatus, warnings: list[str]) -> None:
        await until(trainer, "once", lambda one: one.told)
        await status.close(1)
        assert {told["progressPercentage"] for told in trainer.told} == {45}

    with_trainer(tmp_path, main)


def test_the_token_and_the_authority_change(tmp_path: Path) -> None:
    async def main(trainer: FakeTrainer, status: TrainerStatus, warnings: list[str]) -> None:
        await until(trainer, "once", lambda one: one.told)
        trainer.token = "second.token"
        await until(trainer, "a refusal", lambda one: 403 in one.refused)
        trainer.give_token("second.token\n")
        known = len(trainer.told)
        await until(trainer, "the new token", lambda one: len(one.told) > known)
        ca, ours = tmp_path / "ca.crt", (tmp_path / "ca.crt").read_bytes()
        other = write_certificate(tmp_path / "other.crt")
        other.replace(ca)
        while len(warnings) < 2:
            await asyncio.sleep(0.01)
        known = len(trainer.told)
        ca.write_bytes(ours)
        await until(trainer, "the authority", lambda one: len(one.told) > known)
        await status.close(None)
        assert "it answered 403 Forbidden; it keeps retrying" in warnings[0]
        assert "CERTIFICATE_VERIFY_FAILED" in warnings[1]
        assert len(warnings) == 2, "each time once"

    with_trainer(tmp_path, main)


@pytest.mark.parametrize("trouble", ["nobody", "token", "rubbish", "500", "folder"])
def test_what_cannot_be_told_is_said_once(tmp_path: Path, trouble: str) -> None:
    async def main(trainer: FakeTrainer, status: TrainerStatus, warnings: list[str]) -> None:
        await status.close(None)
        environ = trainer.environment
        match trouble:
            case "nobody":
                environ["KUBEFLOW_TRAINER_SERVER_URL"] = "https://127.0.0.1:1/status"
            case "token":
                (tmp_path / "token").unlink()
            case "rubbish":
                (tmp_path / "token").write_bytes(b"\xff\n\x00")
            case "folder":
                environ["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(tmp_path)
            case "500":
                trainer.status = 500
        way = ReportTarget.of(environ)
        assert way is not None
        looks = 0

        def look() -> Standing:
            nonlocal looks
            looks += 1
            return STANDING

        status = TrainerStatus(way, look, warnings.append)
        while looks < 4:
            await asyncio.sleep(0.01)
        await status.close(0)
        assert len(warnings) == 1
        assert warnings[0].startswith("cannot report progress to Kubeflow Trainer: ")
        assert "\n" not in warnings[0]

    with_trainer(tmp_path, main)


def test_one_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_status, "_LAST_S", 0.3)

    async def main(trainer: FakeTrainer, status: TrainerStatus, warnings: list[str]) -> None:
        trainer.status = 0
        await until(trainer, "once", lambda one: one.told)
        known = len(trainer.told)
        await status.close(0)  # an answer would be waited for a thousand seconds
        assert len(trainer.told) == known, "one at a time"

    with_trainer(tmp_path, main)


def test_where_nobody_wants_to_know() -> None:
    assert ReportTarget.of({}) is None
    whole = {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://a/b",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": "/token",
    }
    assert ReportTarget.of(whole) == ReportTarget("https://a/b", Path("/ca"), Path("/token"))
    assert ReportTarget.of({**whole, "ELASTIC_DRIVER_TRAINER_STATUS": "off"}) is None
    for change in ({"KUBEFLOW_TRAINER_SERVER_TOKEN": ""}, {"KUBEFLOW_TRAINER_SERVER_URL": "http://a/b"}):
        with pytest.raises(SettingsError, match="cannot report progress to Kubeflow Trainer"):
            ReportTarget.of({**whole, **change})


SCRIPT = """
import itertools, os, sys, time
import elastic_driver
for step in itertools.count(1):
    time.sleep(0.02)
    if elastic_driver.checkpoint_point(step=min(step, 900), total=1000) or os.path.exists(sys.argv[1]):
        break
"""


# A busy machine may take longer than a driver waits for Trainer, even at the job's end.
PATIENT = """
from elastic_driver.driver import trainer_status
trainer_status._CONNECT_S = trainer_status._READ_S = trainer_status._LAST_S = 1000.0
"""


def known_step() -> int:
    """The step that the driver of the only job knows of; 0 for none, or while it cannot be found yet."""
    status = subcommands.elasticrun("status", "--json")
    return 0 if status.returncode else int(json.loads(status.stdout)["progress"]["step"] or 0)


def test_a_job_inside_a_trainjob(tmp_path: Path, runtime: Path) -> None:
    """Its first word comes at its start, its last one says how it has ended; workers are asked in between."""
    program, enough = tmp_path / "train.py", tmp_path / "enough"
    program.write_text(SCRIPT)
    with fake_trainer(tmp_path / "trainer") as trainer:
        flags = ("-np", "1", "--on-change", "restart")
        command = [sys.executable, str(program), str(enough)]
        elasticrun = (*FAULTY, PATIENT)
        with Job(tmp_path, None, *flags, command=command, env=trainer.environment, elasticrun=elasticrun) as job:
            trainer.wait_for("its start", lambda one: one.told)
            job.wait_for("steps that the driver knows of", lambda: known_step() > 50)
            enough.touch()
            assert job.wait() == 0, job.said()
        first, last = trainer.told[0], trainer.told[-1]
        assert "progressPercentage" not in first, "nobody knows yet"
        metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
        assert last["progressPercentage"] == 100
        assert metrics["total_steps"] == "1000"
        assert 50 < int(metrics["step"]) <= 900
        assert "Kubeflow" not in job.said()


def test_a_job_whose_trainer_is_gone(tmp_path: Path) -> None:
    with fake_trainer(tmp_path / "trainer") as trainer:
        environ = trainer.environment
    with Job(tmp_path, None, "-np", "1", command=["true"], env=environ, elasticrun=(*FAULTY, PATIENT)) as job:
        assert job.wait() == 0
        assert job.said().count("cannot report progress to Kubeflow Trainer") == 1


def test_from_what_a_driver_knows() -> None:
    status = {
        "round_id": 4,
        "resets": 2,
        "commits": 120,
        "workers": [{"phase": "member"}, {"phase": "booting"}, {"phase": "member"}],
        "progress": {"step": 120, "total": 480, "per_s": 2.0, "left_s": 180.0},
    }
    metrics = {"round": "4", "workers": "2", "resets": "2", "commits": "120", "step": "120", "total_steps": "480"}
    assert standing_of(status) == Standing(25, 180.0, {**metrics, "steps_per_second": "2"})
    bare = {"step": 120, "total": None, "per_s": None, "left_s": None}
    assert standing_of({**status, "progress": bare}).percentage is None


@pytest.mark.parametrize("text", ["", "two\nlines-of-a-secret", "a secret", "secret\x00", "s\u00e9cret"])
def test_a_token_that_is_none_is_not_told(text: str, tmp_path: Path) -> None:
    """The libraries' own errors would quote it, and this goes to the job's log."""
    (tmp_path / "token").write_text(text)
    way = ReportTarget("https://127.0.0.1:9/", tmp_path / "ca", tmp_path / "token")
    with pytest.raises(OSError, match="does not contain a token") as caught:
        way.tell(STANDING)
    assert "cret" not in str(caught.value).replace(str(tmp_path), "")
