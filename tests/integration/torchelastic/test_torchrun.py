"""torchrun's own agents at ``elasticrun rendezvous``. The faults are those of torch's own rendezvous.

An import of torch is seconds of a processor, in each agent and in each worker: one job goes through several changes.
What takes more agents is marked ``slow_torchrun``, and runs with ``--slow-torchrun`` (see CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes.rendezvous_process import RendezvousProcess, a_rendezvous
from tests.support.processes.torchrun import PATIENCE_S, Torchrun

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch"),
]

Jobs = Callable[..., Torchrun]


@pytest.fixture
def rendezvous() -> Iterator[RendezvousProcess]:
    with a_rendezvous() as running:
        yield running


@pytest.fixture
def a_job(tmp_path: Path, rendezvous: RendezvousProcess) -> Iterator[Jobs]:
    made: list[Torchrun] = []

    def make(**options: object) -> Torchrun:
        job = Torchrun(tmp_path, rendezvous, **options)  # type: ignore[arg-type]
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()


def test_the_entry_point() -> None:
    """The tests write it themselves: this is what an installation has."""
    root = Path(__file__).resolve().parents[3]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    assert points == {"elastic": "elastic_driver.torchelastic.plugin:get_handler"}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow_torchrun)])
def test_failures_growth_at_once_and_loss(a_job: Jobs, rendezvous: RendezvousProcess, workers: int) -> None:
    """Two agents. Faults 1, 2, 3 and 6 of torch's own; then the job's id is used again."""
    both = ["a"] * workers + ["b"] * workers
    job = a_job(nnodes="1:2", workers=workers, conf="grow=now,last_call_timeout=2", flags=("--max-restarts=2",))
    job.start("a")
    first, *_ = job.until_trains("a", workers=workers)
    # A newcomer enters at once. (torch's own: both agents end after 60 s, or wait for half an hour.)
    job.start("b")
    rows = job.until_trains("a", "b", workers=workers)
    assert [row["agent"] for row in rows] == both, "who was there keeps its ranks"
    assert {row["pid"] for row in rows}.isdisjoint({first["pid"]})
    # A worker dies: all are started again, with the same ranks. (torch's own: hangs over old keys.)
    began = len(job.steps)
    os.kill(rows[-1]["pid"], signal.SIGKILL)
    rows = job.until_trains("a", "b", workers=workers, after=began + 2 * workers)
    assert [row["agent"] for row in rows] == both
    assert sum(row["restarts"] for row in rows[::workers]) >= 1
    # The rendezvous dies, and is started again without what it knew: nobody is restarted for that.
    rendezvous.kill()
    rendezvous.start_again()
    rendezvous.until("runs on 2 nodes")
    began = len(job.steps)
    later = job.until_trains("a", "b", workers=workers, after=began)
    assert [row["pid"] for row in later] == [row["pid"] for row in rows]
    # The first agent dies without a word; it holds the store that its workers have met at.
    began = len(job.steps)
    job.agents["a"].kill()
    for row in rows[:workers]:
        os.kill(row["pid"], signal.SIGKILL)  # of those torchrun leaves behind
    rendezvous.until("node", after=len(rendezvous.lines) - 1)
    rows = job.until_trains("b", workers=workers, after=began + 2 * workers)
    assert rows[0]["rank"] == 0
    job.finish("b")
    rendezvous.until("it has ended")
    # The same id, once more. (torch's own: closed forever.)
    job.start("c")
    assert job.agents["c"].wait(PATIENCE_S) == 0, job.story()
    assert job.steps[-1]["agent"] == "c"


@pytest.mark.slow_torchrun
def test_a_spare_a_stopped_agent_and_one_that_is_told_to_end(a_job: Jobs, rendezvous: RendezvousProcess) -> None:
    """Fault 4: whoever is gone on without hears of it as soon as it goes on, and nobody trains beside the others."""
    job = a_job(nnodes="2:2", conf="last_call_timeout=2")
    job.start("a", "b")
    rows = job.until_trains("a", "b")
    job.start("c")
    rendezvous.until("1 wait")
    assert job.agents["c"].poll() is None
    began = len(job.steps)
    # The agent is stopped, its worker is not.
    os.kill(job.agents["b"].pid, signal.SIGSTOP)
    rows = job.until_trains("a", "c", after=began)
    assert [row["agent"] for row in rows] == ["a", "c"]
    os.kill(job.agents["b"].pid, signal.SIGCONT)
    rendezvous.until("1 wait", after=len(rendezvous.lines))
    began = len(job.steps)
    together = job.until_trains("a", "c", after=began)
    assert [row["pid"] for row in together] == [row["pid"] for row in rows], "nobody was disturbed by its return"
    assert all(step["agent"] != "b" for step in job.steps[began:])
    # An agent is told to end: the spare takes over, and the others' agents go on.
    began = len(job.steps)
    job.agents["a"].terminate()
    rows = job.until_trains("b", "c", after=began)
    assert [row["agent"] for row in rows] == ["c", "b"]
    assert job.agents["a"].wait(PATIENCE_S) == 1
    # The end: a spare ends with success, too.
    began = len(rendezvous.lines)
    job.start("d")
    rendezvous.until("1 wait", after=began)
    job.finish("b", "c", "d")


@pytest.mark.slow_torchrun
def test_newcomers_wait_for_the_next_restart(a_job: Jobs, rendezvous: RendezvousProcess) -> None:
    job = a_job(nnodes="1:3", conf="last_call_timeout=2", flags=("--max-restarts=2",))
    job.start("a")
    (first,) = job.until_trains("a")
    job.start("b", "c")
    rendezvous.until("2 wait")
    began = len(job.steps)
    (still,) = job.until_trains("a", after=began)
    assert still["pid"] == first["pid"]
    os.kill(first["pid"], signal.SIGKILL)
    rows = job.until_trains("a", "b", "c", after=len(job.steps))
    assert rows[0]["agent"] == "a"
    # A loss, with workers that hang in a collective: all of the others' are started again, and nobody's agent ends.
    began = len(job.steps)
    job.agents["b"].kill()
    rows = job.until_trains("a", "c", after=began)
    assert [row["agent"] for row in rows] == ["a", "c"]
    # Another one: neither counts against --max-restarts.
    began = len(job.steps)
    job.agents["c"].kill()
    job.until_trains("a", after=began)
    job.finish("a")


@pytest.mark.slow_torchrun
def test_four_of_five_train(a_job: Jobs, rendezvous: RendezvousProcess) -> None:
    job = a_job(nnodes="4", conf="last_call_timeout=2")
    job.start("a", "b", "c", "d")
    job.until_trains("a", "b", "c", "d")
    job.start("e")
    rendezvous.until("1 wait")
    began = len(job.steps)
    job.agents["c"].kill()
    rows = job.until_trains("a", "b", "d", "e", after=began)
    assert rows[-1]["agent"] == "e"
    job.finish("a", "b", "d", "e")


@pytest.mark.slow_torchrun
def test_what_cannot_be(a_job: Jobs, rendezvous: RendezvousProcess, tmp_path: Path) -> None:
    """Each is told in a sentence, and ends with 1."""
    for conf, said in (
        ("grwo=now", "cannot use --rdzv-conf grwo: did you mean grow?"),
        ("grow=later", "expected now or restart"),
        ("heartbeat=0", "it must be above 0 seconds"),
        ("join_timeout=0.2", "waiting for nodes: 1 of at least 2 have joined"),
        (f"token_file={tmp_path / 'none'}", "cannot read the rendezvous token file"),
    ):
        job = a_job(nnodes="2", conf=conf)
        job.start("a")
        assert job.agents["a"].wait(PATIENCE_S) == 1
        assert said in (tmp_path / "a.log").read_text()
