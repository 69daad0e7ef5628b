"""The history of real jobs: one whose driver is killed, one that ends, and one that is not to be kept."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.processes.jobs import AFRESH, Job
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.integration

SECRET = "xyzzy-is-in-the-environment"
FILES = ("events.jsonl", "job.json", "page.json")


def test_a_job_is_there_when_its_driver_was_killed(tmp_path: Path, runtime: Path) -> None:
    with Job(tmp_path, "localhost:1\n", "-np", "1", env={"PASSWORD": SECRET}) as job:
        job.wait_for_steps(1)
        job_id = job.events("job_started")[0]["job_id"]
        folder = tmp_path / "state/elasticrun/history" / job_id
        job.wait_for("its page is kept, too", lambda: all((folder / name).exists() for name in FILES))
        [listed] = json.loads(elasticrun("history", "--json").stdout)
        assert (listed["job"], listed["how"], listed["workers"]) == (job_id, "runs", 1)
        assert listed["command"] == job.words[-2:]
        job.process.kill()
        job.process.wait(150)
        [listed] = json.loads(elasticrun("history", "--json").stdout)
        assert (listed["how"], listed["exit_code"]) == ("driver was killed", None)
        assert {oct(path.stat().st_mode & 0o7777) for path in folder.iterdir()} == {"0o600"}
        page = json.loads((folder / "page.json").read_text())
        assert [row["rank"] for row in page["frame"]["workers"].values()] == [0]
        assert page["frame"]["job"]["history"] is True
        assert not any(SECRET in path.read_text() for path in folder.iterdir())
        assert f"job {job_id}, " in elasticrun("report").stdout
        assert f"the driver of job {job_id} was killed" in elasticrun("status", job_id).stderr
        shown = elasticrun("page", job_id)
        assert shown.stdout == f"{(folder / 'page.html').as_uri()}\n"
        while job.leftovers():  # its workers, of whom nobody is told when they are gone
            time.sleep(0.02)


def test_a_job_that_has_ended_is_there_with_its_last_words(tmp_path: Path, runtime: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text('echo "these are the words of start $TORCHELASTIC_RESTART_COUNT"; exit 3\n')
    flags = ("--nproc-per-node", "1", "--max-restarts", "1")
    with Job(tmp_path, None, *flags, "--no-python", command=["sh", str(script)]) as job:
        assert job.process.wait(150) == 4
        [listed] = json.loads(elasticrun("history", "--json").stdout)
        assert (listed["how"], listed["exit_code"]) == ("failed (4)", 4)
        page = json.loads((Path(listed["kept_in"]) / "page.json").read_text())
        ends = [(row["how"], row["failed"]) for row in page["frame"]["ended_workers"]]
        assert ends == [("exited with code 3", True)] * 2
        assert ["[0]<stdout>:these are the words of start 1"] in page["outputs"].values()
        assert page["frame"]["job"]["ended"]["exit_code"] == 4


def test_a_job_of_words_that_are_not_utf8_runs_and_is_kept(tmp_path: Path, runtime: Path) -> None:
    with Job(tmp_path, None, "-np", "1", command=["true", "\udcff"], elasticrun=AFRESH) as job:
        assert job.process.wait(150) == 0, job.said()
    [listed] = json.loads(elasticrun("history", "--json").stdout)
    assert (listed["how"], listed["command"]) == ("finished", ["true", "\udcff"])
    assert (Path(listed["kept_in"]) / "page.json").exists()


def test_a_job_that_is_not_to_be_kept_is_not(tmp_path: Path, runtime: Path) -> None:
    with Job(tmp_path, None, "-np", "1", "--no-history", command=["true"]) as job:
        assert job.process.wait(150) == 0
    with Job(tmp_path, None, "-np", "1", command=["true"], env={"ELASTIC_DRIVER_HISTORY": "off"}) as job:
        assert job.process.wait(150) == 0
    assert not (tmp_path / "state").exists()
