"""elasticrun --journal: what is kept of a job whose driver dies, with real jobs on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from elastic_driver import codec
from elastic_driver.core.state import JobPhase
from elastic_driver.driver.recording import may_come_back
from elastic_driver.journal.entries import Closed, Entry, Snapshot
from elastic_driver.journal.file import RecordFile
from elastic_driver.journal.folder import JOURNAL, LOCK
from elastic_driver.journal.past import Recorded, read_job
from tests.support.fakes.job_facts import a_took, job_of_one
from tests.support.fakes.left_jobs import STATE
from tests.support.paths import ROOT
from tests.support.processes.hang_jobs import FrozenDisk
from tests.support.processes.jobs import PROGRAM, Job, capture_elasticrun
from tests.support.processes.subcommands import elasticrun

pytestmark = [pytest.mark.integration]

RUN = ("-np", "1", "--on-change", "in-place")


@contextmanager
def job_of_two(folder: Path, *flags: str) -> Iterator[Job]:
    with Job(folder, "localhost:2\n", "-np", "2", "--min-np", "1", "--journal", str(folder / "kept"), *flags) as job:
        job.wait_for_steps(2)
        yield job


def test_a_job_whose_driver_is_killed_is_told_of(tmp_path: Path, runtime: Path) -> None:
    kept = tmp_path / "kept"
    with job_of_two(tmp_path, "--on-change", "in-place") as job:
        started, driver = job.events("job_started")[0], job.driver_pid()
        job.wait_for("the round", lambda: job.events("round_resumed"))
        living = elasticrun("status", "--journal", str(kept))
        assert living.stdout.startswith(f"job {started['job_id']}, running, "), living.stderr
        answer = json.loads(elasticrun("status", "--json", "--journal", str(kept)).stdout)
        assert all(each["pid"] for each in answer["workers"]), "its driver has answered"
        elsewhere = elasticrun("status", "--journal", str(kept), XDG_RUNTIME_DIR=str(tmp_path))
        assert f"process {driver} on " in elsewhere.stdout
        assert ", which cannot be reached from here; this is the job as of its last event, " in elsewhere.stdout
        job.process.kill()
        job.wait()
        end_agents(kept)
        while job.leftovers():
            time.sleep(0.02)

    shown = elasticrun("status", "--journal", str(kept))
    assert (shown.returncode, shown.stderr) == (0, "")
    head, *_ = shown.stdout.splitlines()
    assert re.match(
        rf"no driver for at most \d+ s: process {driver} on \S+ has died; "
        r"this is the job as of its last event, \d{4}-",
        head,
    )
    assert re.search(r"\n +\d+\.\d{3} .*worker localhost\[1\] trains in round 1, from commit \d+", shown.stdout)
    assert f"job {started['job_id']}, running, " in shown.stdout
    assert [line.split()[:3] for line in shown.stdout.splitlines()[-2:]] == [
        ["0", "localhost[0]", "training"],
        ["1", "localhost[1]", "training"],
    ]
    listed = elasticrun("jobs").stdout
    assert re.search(rf"{started['job_id']} +no driver for at most \d+ s: elasticrun resume {kept} ", listed), listed
    asked = elasticrun("stacks", started["job_id"][:6])
    assert asked.stderr.startswith(f"elasticrun: error: job {started['job_id']} has no driver: it has died. ")
    (as_json,) = json.loads(elasticrun("jobs", "--json", started["job_id"]).stdout)
    assert as_json["no_driver_s"] > 0
    assert as_json["journal"] == str(kept)
    assert elasticrun("jobs", "--ids").stdout == ""
    assert elasticrun("status").stdout.startswith("no driver for at most "), "it is the only one"
    assert json.loads(elasticrun("status", "--json", started["job_id"]).stdout)["recorded"]["no_driver_s"] > 0
    told = json.loads(elasticrun("status", "--json", "--journal", str(kept)).stdout)
    assert (told["job_id"], told["phase"], told["round_id"]) == (started["job_id"], "running", 1)
    assert told["recorded"]["pid"] == driver
    assert told["recorded"]["events"][0]["event"]["is"] == "HostsDiscovered"
    found = read_job(kept)
    assert isinstance(found, Recorded)
    assert found.state.phase is JobPhase.RUNNING
    assert found.job.command[-1] == str(PROGRAM)

    # None of its agents is left: the next one there is a new job.
    again = capture_elasticrun(*RUN, "--journal", str(kept), "true")
    assert f"job {started['job_id']} is over: its driver died " in again.stderr
    assert "none of its agents is left; starting a new job" in again.stderr
    closed = read_job(kept)
    assert isinstance(closed, Closed)
    assert (
        elasticrun("jobs").stdout
        == "no job of yours runs on this machine; elasticrun history lists jobs that have ended\n"
    ), "its journal is another's"
    assert (closed.epoch, closed.job_id != started["job_id"]) == (2, True)


def end_agents(kept: Path) -> None:
    """Ends the agents that a journal tells of, and with them their workers. Blocks until then."""
    found = read_job(kept)
    assert isinstance(found, Recorded)
    for agent in found.facts.agents.values():
        os.kill(agent.facts.hello.pid, signal.SIGTERM)
        while may_come_back(agent):
            time.sleep(0.02)


def test_of_a_job_that_has_ended_only_that_is_kept(tmp_path: Path, runtime: Path) -> None:
    kept = tmp_path / "kept"
    epochs = []
    for _ in range(2):
        with job_of_two(tmp_path, "--on-change", "in-place") as job:
            job_id = job.events("job_started")[-1]["job_id"]
            refused = elasticrun(*RUN, "--journal", str(kept), "true")
            assert refused.returncode == 2
            assert f"job {job_id} is driven by process {job.driver_pid()}" in refused.stderr
            drained = elasticrun("drain", "--undo", "localhost")
            assert "was not drained" in drained.stdout
            assert elasticrun("end", job_id).returncode == 0
            assert job.wait() == 143
        shown = elasticrun("status", "--journal", str(kept))
        assert shown.stdout == f"job {job_id} has ended with exit code 143\n"
        found = read_job(kept)
        assert isinstance(found, Closed)
        epochs.append(found.epoch)
        assert "localhost" not in (kept / JOURNAL).read_text(errors="replace")
        assert sorted(each.name for each in kept.iterdir()) == [JOURNAL, LOCK]
        job.event_log.unlink()
        job.step_log.unlink()
    assert epochs == [1, 2]


def test_a_job_loses_a_worker_and_goes_on(tmp_path: Path, runtime: Path) -> None:
    with Job(
        tmp_path, "localhost:1\n127.0.0.1:1\n", "-np", "2", "--min-np", "1", "--journal", str(tmp_path / "kept"),
        "--on-change", "in-place",
    ) as job:  # fmt: skip
        lines = job.wait_for_steps(2)
        os.kill(next(line["pid"] for line in lines if line["rank"] == 1), signal.SIGKILL)
        job.wait_for_steps(1)
        found = read_job(tmp_path / "kept")
        assert isinstance(found, Recorded)
        assert found.state.round_id == 2


def test_a_folder_that_is_removed_while_the_job_runs_is_made_anew(tmp_path: Path, runtime: Path) -> None:
    kept = tmp_path / "kept"
    with job_of_two(tmp_path, "--on-change", "in-place") as job:
        for each in kept.iterdir():
            each.unlink()
        kept.rmdir()
        job.wait_for("its socket", (kept / "driver.sock").exists)
        assert elasticrun("drain", "localhost").returncode == 0
        found = read_job(kept)
        assert isinstance(found, Recorded)
        assert found.state.drained
        job.process.send_signal(signal.SIGTERM)
        job.wait()
    assert isinstance(read_job(kept), Closed)


def test_a_disk_that_is_full_holds_up_what_happens_and_no_end(tmp_path: Path, runtime: Path) -> None:
    """The folder's parent is gone: nothing can be written, until it is back."""
    kept = tmp_path / "above" / "kept"
    kept.parent.mkdir(mode=0o700)
    with Job(
        tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", "--journal", str(kept), "--on-change", "in-place",
    ) as job:  # fmt: skip
        job.wait_for_steps(2)
        kept.parent.rename(tmp_path / "elsewhere")
        job.wait_for("its socket", lambda: "it is now" in job.said())
        # What happens now waits; training goes on.
        with subprocess.Popen([sys.executable, "-m", "elastic_driver", "drain", "localhost"]) as draining:
            job.wait_for("the warning", lambda: "cannot write the journal" in job.said())
            assert "cannot write the journal" in json.loads(elasticrun("status", "--json").stdout)["explain"]
            job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
            assert draining.poll() is None
            (tmp_path / "elsewhere").rename(kept.parent)
            assert draining.wait(150) == 0
        assert "the journal can be written again" in job.said()
        found = read_job(kept)
        assert isinstance(found, Recorded)
        assert found.state.drained
        kept.parent.rename(tmp_path / "elsewhere")
        assert elasticrun("end", job.events("job_started")[0]["job_id"]).returncode == 0
        assert job.wait() == 143
    assert "cannot record the end of the job in the journal" in job.said()


def test_a_driver_that_fails_leaves_what_led_to_it(tmp_path: Path, runtime: Path) -> None:
    program = (
        "import sys\n"
        "from elastic_driver.driver.rounds import Rounds\n"
        "def fail(*_): raise ZeroDivisionError('a bug')\n"
        "Rounds.publish = fail\n"
        "from elastic_driver.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    kept = tmp_path / "kept"
    words = (*RUN, "--journal", str(kept), sys.executable, str(PROGRAM))
    env = {**os.environ, "STEP_LOG": str(tmp_path / "steps")}
    ran = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=150, check=False, env=env
    )
    assert ran.returncode == 70
    assert f"the events before this are kept in {kept}: elasticrun status --journal {kept} shows them" in ran.stderr
    told = json.loads(elasticrun("status", "--json", "--journal", str(kept)).stdout)
    assert told["recorded"]["events"][-1]["event"]["is"] == "WorkerReady"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--parameter-servers", "1", "-H", "chief:2"), "no host can be named chief: that name denotes the script"),
        (("--stdin", "0"), "--journal cannot be combined with --stdin"),
        (("--mpi", "-H", "localhost:1"), "cannot use --journal with --mpi"),
        (("--driver-timeout", "0"), "--driver-timeout 0 is not a number of seconds above 0"),
    ],
)
def test_what_cannot_have_a_journal(tmp_path: Path, flags: tuple[str, ...], why: str) -> None:
    ran = elasticrun("-np", "1", "--journal", str(tmp_path / "kept"), *flags, "true")
    assert ran.returncode == 2
    assert why in ran.stderr
    assert not (tmp_path / "kept").exists()


def test_a_node_of_torchruns_has_one_in_etcd_or_none(tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "localhost:29400")
    ran = elasticrun(*words, "--journal", str(tmp_path / "kept"), "true")
    assert (ran.returncode, "nodes with an --rdzv-endpoint need a journal in etcd" in ran.stderr) == (2, True)
    key = tmp_path / "key"
    key.touch(0o600)
    ran = elasticrun(*words, "--journal", "etcd://localhost:1/job", "--journal-key", str(key), "true")
    assert (ran.returncode, "nodes that meet at etcd need a shared secret" in ran.stderr) == (2, True)


def test_flags_that_need_a_journal_are_refused_without() -> None:
    ran = elasticrun("-np", "1", "--driver-timeout", "5", "true")
    assert ran.stderr == "elasticrun: error: --driver-timeout has no effect: give --journal, too\n"
    ran = elasticrun("-np", "1", "--hand-over", "true")
    assert ran.stderr == "elasticrun: error: --hand-over needs --journal, from which another driver continues the job\n"
    ran = elasticrun("-np", "1", "--standby-driver", "true")
    assert (
        ran.stderr == "elasticrun: error: --standby-driver needs --journal: it stands by for the job recorded there\n"
    )


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    for words in ((*RUN, "--journal", str(tmp_path / "kept"), "true"), ("status", "--journal", str(tmp_path / "kept"))):
        ran = elasticrun(*words)
        assert (ran.returncode, "it is open to other users (chmod 700)" in ran.stderr) == (2, True)
    ran = elasticrun(*RUN, "--journal", str(tmp_path / "none" / "kept"), "true")
    assert (ran.returncode, f"its parent folder {tmp_path}/none does not exist" in ran.stderr) == (2, True)
    ran = elasticrun(*RUN, "--journal", f"/tmp/{300 * 'a'}/kept", "true")
    assert (ran.returncode, "File name too long" in ran.stderr) == (2, True)


def test_a_damaged_journal_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    path = tmp_path / "kept" / JOURNAL
    path.touch(mode=0o600)
    path.write_bytes(b"elastic_driver journal 1\n rubbish")
    for words in ((*RUN, "--journal", str(tmp_path / "kept"), "true"), ("status", "--journal", str(tmp_path / "kept"))):
        ran = elasticrun(*words)
        assert (ran.returncode, "its first record is damaged (byte 25)" in ran.stderr) == (2, True)
    assert path.read_bytes() == b"elastic_driver journal 1\n rubbish"


def test_a_journal_in_another_form_is_refused_in_one_sentence_and_kept(tmp_path: Path) -> None:
    """That of an elastic_driver before 0.1.0, whose version is the same."""
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    body = codec.to_data(tuple[Entry, ...], (a_took(), Snapshot(0.0, job_of_one(), STATE)))
    body[1]["job"]["settings"]["journal"] = "/kept"
    file = RecordFile.new(folder, 1, b"\0" + codec.to_text(body).encode())
    file.close()
    before = (folder / JOURNAL).read_bytes()
    for words in (
        (*RUN, "--journal", str(folder), "true"),
        ("resume", str(folder)),
        ("status", "--journal", str(folder)),
    ):
        ran = elasticrun(*words)
        assert ran.returncode == 2
        assert ran.stderr.splitlines()[-1] == (
            f"elasticrun: error: cannot read {folder / JOURNAL}: elastic_driver 1.2.3 wrote it in a format that "
            "this version cannot read: record[1].job.settings.journal is not an object: '/kept'; use "
            "the version that started the job"
        )
        assert "Traceback" not in ran.stderr
    assert (folder / JOURNAL).read_bytes() == before


def test_a_status_takes_either_a_journal_or_a_job(tmp_path: Path) -> None:
    ran = elasticrun("status", "--journal", str(tmp_path), "0123")
    assert "--journal selects the job" in ran.stderr


@pytest.mark.parametrize("ends", ["asked", "limit"])
def test_a_disk_that_hangs_holds_up_neither_training_nor_the_end(tmp_path: Path, runtime: Path, ends: str) -> None:
    try:
        disk = FrozenDisk(tmp_path / "frozen")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))
    limit = ("--driver-timeout", "3") if ends == "limit" else ()
    flags = ("-np", "2", "--min-np", "1", "--on-change", "in-place", *limit)
    try:
        with Job(tmp_path, "localhost:2\n", *flags, "--journal", str(disk.folder / "kept")) as job:
            job.wait_for("the round", lambda: job.events("round_resumed"))
            disk.freeze()
            job.set_hosts("localhost:2\n127.0.0.1:1\n")
            job.wait_for("the warning", lambda: "the disk does not answer" in job.said())
            if ends == "asked":
                job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
                assert "the disk does not answer" in json.loads(elasticrun("status", "--json").stdout)["explain"]
                job.process.send_signal(signal.SIGTERM)
            job.wait_for("the end", lambda: job.events("job_ended"))
            assert {line["size"] for line in job.steps()} == {2}, "nobody was started for what is not on disk"
            while job.leftovers():
                time.sleep(0.02)
            disk.thaw()
            assert job.wait() == (143 if ends == "asked" else 70)
            if ends == "limit":
                assert "cannot write the journal" in job.events("job_ended")[0]["message"]
    finally:
        disk.thaw()


def test_files_have_what_a_stopped_console_does_not_show(tmp_path: Path) -> None:
    """A terminal after Ctrl-S, a pipe that nobody reads."""
    lines = 1000
    script = f"import signal\nfor _ in range({lines}): print('x' * 9999)\nprint(end='', flush=True)\nsignal.pause()\n"
    words = (*RUN, "--journal", str(tmp_path / "kept"), "--output-filename", str(tmp_path / "output"))
    command = [sys.executable, "-m", "elastic_driver", *words, sys.executable, "-c", script]
    reading_end, writing_end = os.pipe()
    with subprocess.Popen(command, stdout=writing_end, stderr=subprocess.DEVNULL, cwd=tmp_path) as job:
        os.close(writing_end)
        try:
            while sum(each.stat().st_size for each in (tmp_path / "output").rglob("stdout")) < lines * 10_000:
                assert job.poll() is None
                time.sleep(0.02)
        finally:
            os.close(reading_end)
            job.send_signal(signal.SIGTERM)


def test_the_unit_of_the_documentation_is_one(tmp_path: Path) -> None:
    """It was tried under systemd as process 1 of a container. Here systemd reads it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (ROOT / "docs/howto/run-under-systemd.md").read_text()
    lines = text[text.index("    [Service]\n") :].partition("\n\n")[0].splitlines()
    unit = tmp_path / "run7.service"
    unit.write_text("\n".join(lines).replace("    ", "").replace("/opt/train/.venv/bin/elasticrun", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.strip() for line in lines} >= {"Restart=on-failure", "KillMode=process", "SuccessExitStatus=143 75"}


@pytest.mark.parametrize("how", ["damaged", "removed", "folder removed", "moved"])
def test_a_job_whose_journal_is_no_more_is_told_of_and_can_be_ended(tmp_path: Path, runtime: Path, how: str) -> None:
    kept = tmp_path / "kept"
    with job_of_two(tmp_path, "--on-change", "in-place") as job:
        job_id = job.events("job_started")[0]["job_id"]
        driver = psutil.Process(job.driver_pid())
        job.process.kill()
        job.wait()
        driver.wait(150)  # it ends with its parent, a moment later
        match how:
            case "damaged":
                (kept / JOURNAL).write_bytes(b"elastic_driver journal 1\n rubbish")
            case "removed":
                (kept / JOURNAL).unlink()
            case "folder removed":
                shutil.rmtree(kept)
            case _:
                kept.rename(tmp_path / "elsewhere")
        listed = elasticrun("jobs")
        assert re.search(rf"{job_id} +no driver for \d+ s \(localhost: 2 workers\)", listed.stdout), listed
        why = f"job {job_id} has no driver, and no other can take it over: cannot read {kept / JOURNAL}: "
        assert listed.stderr.startswith(why) == (how == "damaged")
        resumed = elasticrun("resume", str(kept))
        assert (resumed.returncode, resumed.stdout) == (2, "")
        assert resumed.stderr.startswith("elasticrun: error: ")
        assert len(resumed.stderr.splitlines()) == 1
        ended = elasticrun("end", job_id)
        assert ended.returncode == 0, ended.stderr
        assert f"job {job_id}: ended on this machine (localhost: 2 workers), without a driver" in ended.stdout
        assert not job.leftovers()


# --- elasticrun resume ----------------------------------------------------------------------------------------------


def test_a_job_that_has_ended_is_not_resumed(tmp_path: Path, runtime: Path) -> None:
    kept = str(tmp_path / "kept")
    nothing = elasticrun("resume", kept)
    assert (nothing.returncode, "cannot use the folder" in nothing.stderr) == (2, True)
    assert capture_elasticrun(*RUN, "--journal", str(kept), "sh", "-c", "exit 3").returncode == 1
    resumed = capture_elasticrun("resume", str(kept))
    assert (resumed.returncode, resumed.stderr) == (1, "")
    assert re.fullmatch(r"job [0-9a-f]{16} has ended with exit code 1\n", resumed.stdout)


def test_a_job_of_which_nobody_is_left_begins_anew_with_its_own_command(tmp_path: Path, runtime: Path) -> None:
    """In its own folder, wherever it is resumed."""
    (tmp_path / "there").mkdir()
    script = "test -e begun && exit 0; touch begun; exec sleep 1000"
    words = [sys.executable, "-m", "elastic_driver", *RUN, "--journal", str(tmp_path / "kept"), "sh", "-c", script]
    with subprocess.Popen(words, cwd=tmp_path / "there", stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        while not (tmp_path / "there" / "begun").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.kill()
    end_agents(tmp_path / "kept")
    resumed = capture_elasticrun("resume", str(tmp_path / "kept"))
    assert "none of its agents is left; starting a new job" in resumed.stderr
    assert "worker localhost[0] exited with code 0 before it called hvd.init()" in resumed.stderr


def test_a_job_without_a_driver_can_be_ended(tmp_path: Path, runtime: Path) -> None:
    with job_of_two(tmp_path, "--on-change", "in-place") as job:
        job_id = job.events("job_started")[0]["job_id"]
        job.process.kill()
        job.wait()
        assert job.leftovers()
        ended = capture_elasticrun("end", job_id[:6])
        assert ended.returncode == 0, ended.stderr
        assert "took over: no driver for" in ended.stderr
        assert "job ended: interrupted by SIGTERM (exit code 143)" in ended.stderr
        assert not job.leftovers()
    closed = read_job(tmp_path / "kept")
    assert isinstance(closed, Closed)
    assert (closed.job_id, closed.exit_code) == (job_id, 143)
    assert (
        elasticrun("jobs").stdout
        == "no job of yours runs on this machine; elasticrun history lists jobs that have ended\n"
    )
