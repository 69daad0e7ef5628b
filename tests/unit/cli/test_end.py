"""Which jobs elasticrun end ends, and how, where their driver has died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from elastic_driver.cli import driverless
from elastic_driver.cli import end as module
from elastic_driver.cli.main import main
from elastic_driver.cli.target import Target, left_behind
from elastic_driver.journal import journal as journal_module
from elastic_driver.journal.folder import JOURNAL, JournalFolder
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.store import FolderStore
from elastic_driver.launch.agent.control import AgentHere
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.messages import EndReply
from elastic_driver.system.process_name import name_of, place_of_processes
from tests.support.fakes.job_facts import job_of_one
from tests.support.fakes.left_jobs import leave

pytestmark = pytest.mark.unit

JOB = "0123"


def post(kept: Path, *, lives: bool, parent: str = "") -> Posting:
    """The file of a driver."""
    posting = Posting.post(JOB, kept / "driver.sock", ["true"], journal=kept, parent=parent)
    assert posting is not None
    if not lives:
        os.close(posting._descriptor)
    return posting


def test_a_job_that_another_driver_takes_over_at_this_moment_is_not_one_without(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver is in its journal, and has no file yet."""
    kept = tmp_path / "kept"
    agents = {Path("agent.sock"): AgentHere(JOB, "localhost", connected=False, pid=1, workers=2, alone_s=3.0)}
    monkeypatch.setattr(driverless, "agents_here", lambda: agents)
    post(kept, lives=False)
    assert [job.job_id for job in driverless.driverless_jobs(JOB, left_behind(JOB).ids)] == [JOB], "nothing tells of it"
    leave(kept)  # with this process as its driver
    post(kept, lives=False)
    left = left_behind(JOB)
    assert (left.jobs, left.taken) == ([], [JOB])
    assert driverless.driverless_jobs(JOB, left.ids) == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs whose drivers were asked to end them."""
    names: list[str] = []

    def ask(target: Target, question: object) -> EndReply:
        names.append(target.name)
        return EndReply("the job is ending")

    monkeypatch.setattr(module, "ask", ask)
    return names


def test_a_driver_that_takes_the_job_over_at_this_moment_is_asked(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    kept = tmp_path / "kept"
    leave(kept)
    post(kept, lives=False)
    new: list[Posting] = []
    monkeypatch.setattr(module.time, "sleep", lambda s: new.append(post(kept, lives=True)))
    assert main(["end", JOB[:2]]) == 0
    assert asked == [JOB]
    assert len(new) == 1
    new[0].remove()


@pytest.mark.parametrize("stands_by", [True, False])
def test_whoever_starts_the_driver_again_is_waited_for(
    tmp_path: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    stands_by: bool,
) -> None:
    """Another driver, which stood by, may be the one that has the job then."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(journal_module, "name_of_this_process", lambda: f"{place_of_processes()} {os.getpid()} 1")
    leave(kept)
    new: list[Posting] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the child
    with subprocess.Popen(["sleep", "1000"]) as parent:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        post(kept, lives=False, parent=name_of(parent.pid))

        def sleep(s: float) -> None:
            pending = re.search(r"^ShdPnd:\t(.*)", Path(f"/proc/{parent.pid}/status").read_text(), re.MULTILINE)
            assert pending is not None
            assert int(pending[1], 16) == 1 << signal.SIGTERM - 1
            parent.kill()
            parent.wait()
            if stands_by:
                new.append(post(kept, lives=True))
            else:
                with JournalFolder.take(kept, JOB) as folder:
                    Journal(FolderStore(folder), job_of_one(), epoch=5).close(143)

        monkeypatch.setattr(module.time, "sleep", sleep)
        assert main(["end", JOB]) == 0
        first, second = capsys.readouterr().out.splitlines()
    whose = f"its elasticrun (process {parent.pid})"
    assert first == f"job {JOB}: its driver has died, and {whose} starts another driver, which ends the job"
    assert second == f"job {JOB}: {'the job is ending' if stands_by else 'it has ended'}"
    assert asked == [JOB] * stands_by
    for posting in new:
        posting.remove()


def test_a_journal_that_cannot_be_read_is_told_of_once(
    tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    leave(kept)
    post(kept, lives=False)
    (kept / JOURNAL).write_bytes(b"rubbish")
    said: set[str] = set()
    for _ in range(2):
        assert left_behind(JOB, said).ids == []
    assert len(capsys.readouterr().err.splitlines()) == 1
