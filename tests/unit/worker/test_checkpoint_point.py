"""checkpoint_point() without peers, and what it tells the driver. Over peers: test_torchrun_scripts.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import elastic_driver
from elastic_driver.errors import RendezvousClosedError, RendezvousError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, JobKey
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS, ENV_ROUND, ENV_WORKER
from elastic_driver.rendezvous.messages import RunningReport
from elastic_driver.worker import checkpoint
from elastic_driver.worker.checkpoint import _Point, _Reporter

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
ALONE = """
import os, signal, sys, elastic_driver
assert not elastic_driver.checkpoint_point()
assert "torch" not in sys.modules and "numpy" not in sys.modules
os.kill(os.getpid(), signal.SIGTERM)
answers = [elastic_driver.checkpoint_point(every=3) for _ in range(4)]
print(answers)
sys.exit(0)
"""


def python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env = {**clean, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=150)


def test_alone_a_signal_is_noticed_at_the_next_call() -> None:
    done = python(ALONE)
    # It is asked for in each third call only, and the first of these was call 2.
    assert (done.returncode, done.stdout) == (0, "[False, True, True, True]\n"), done.stderr


def test_a_handler_of_the_scripts_own_stays() -> None:
    script = """
import os, signal, elastic_driver
signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
elastic_driver.checkpoint_point()
os.kill(os.getpid(), signal.SIGTERM)
print(elastic_driver.checkpoint_point())
"""
    assert python(script).stdout == "mine\nFalse\n"


def test_several_workers_have_to_be_able_to_agree() -> None:
    done = python("import elastic_driver; elastic_driver.checkpoint_point()", WORLD_SIZE="2")
    assert "call torch.distributed.init_process_group() first" in done.stderr


@pytest.mark.parametrize("imports", ["", "import elastic_driver.elastic; "])
def test_a_script_that_has_only_imported_the_library_tells_how_far_it_is(imports: str) -> None:
    worker = {ENV_RENDEZVOUS: "unix:/nobody/listens", ENV_RANKS_KEY: JobKey.new().of_ranks().hex()}
    worker |= {ENV_WORKER: WorkerId("a", 0, 0).key, ENV_ROUND: "1"}
    ask = "import elastic_driver as library; library.checkpoint_point()"
    said = "import threading; print([thread.name for thread in threading.enumerate()][1:])"
    done = python(f"{imports}{ask}; {said}", **worker)
    assert (done.stdout, done.stderr) == ("['elastic-driver-progress']\n", "")


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        elastic_driver.checkpoint_point(every=0)
    with pytest.raises(ValueError, match="total=0"):
        elastic_driver.checkpoint_point(total=0)


def test_a_thread_does_not_take_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before, answers = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: answers.append(_Point().ask(None, 1, None)))
    thread.start()
    thread.join()
    assert (answers, signal.getsignal(signal.SIGTERM)) == ([False], before)


class Client:
    """A RendezvousClient that fails at first."""

    def __init__(self) -> None:
        self.reports: list[RunningReport] = []
        self.told = threading.Event()
        self.closed = threading.Event()
        self.over = False

    def running(self, report: RunningReport) -> None:
        self.reports.append(report)
        is_over = self.over
        self.told.set()
        if is_over:
            raise RendezvousClosedError("the job is over")
        if len(self.reports) == 1:
            raise RendezvousError("no answer")

    def close(self) -> None:
        self.closed.set()


def test_the_driver_hears_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(checkpoint, "_REPORT_S", 0.01)
    monkeypatch.setattr("elastic_driver.rendezvous.client.RendezvousClient", lambda *way: client)
    worker = WorkerId("a", 0, 0)
    reporter = _Reporter("unix:/nowhere/agent.sock", None, worker, 4)  # type: ignore[arg-type]
    reporter.came_to(7, 0)
    assert client.told.wait(150)
    client.told.clear()
    reporter.came_to(9, 50)
    assert client.told.wait(150), "an error ends nothing"
    assert client.reports[-1] == RunningReport(worker, 4, 9, total=50)
    client.over = True
    reporter.came_to(10, 50)
    assert client.closed.wait(150)
    reporter.came_to(11, 50)
    assert [report.commits for report in client.reports] == [7, 9, 10]


@pytest.mark.parametrize(
    ("round_id", "rank", "step", "told"),
    [(1, "0", None, 0), (2, "0", None, 1), (2, "1", None, 0), (2, "0", 40, 0)],
)
def test_a_restarted_worker_that_counts_its_calls_is_told_once(
    round_id: int,
    rank: str,
    step: int | None,
    told: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = Client()
    client.over = True
    monkeypatch.setattr("elastic_driver.rendezvous.client.RendezvousClient", lambda *way: client)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    reporter = _Reporter("unix:/nowhere/agent.sock", None, WorkerId("a", 0, 1), round_id)  # type: ignore[arg-type]
    monkeypatch.setattr(_Point, "_begin", lambda point: setattr(point, "_reporter", reporter))
    point = _Point()
    for _ in range(3):
        point.ask(step, 1, None)
    assert capsys.readouterr().err.count("checkpoint_point() without step= counts its calls from 0 again") == told
    assert client.closed.wait(150)
