"""What is said to somebody whose training function has no commit, or whose loop is in no such function; and to whom
nothing is said."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elastic_driver.worker.rounds.advice import LONG_S, OPERATIONS, STEPS, Advice, _is_users, may_commit

pytestmark = pytest.mark.unit


FORGETS = """
import json


def train(state, advice, steps):
    for _ in range(steps):
        advice.note_step()  # state.commit() is not here
"""


class Played:
    """An Advice, with what it has said, and its clock."""

    def __init__(self, rank: int = 0, *, may_change: bool = True) -> None:
        self.said: list[str] = []
        self.now = 100.0
        self.advice = Advice(self.said.append, lambda: self.now)
        self.advice.enter_round(rank, may_change=may_change)

    def enter(self, function: Callable[..., object], commits: int = 0) -> None:
        self.advice.enter_run(function, lambda: commits, finished=7)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.advice.note_step()


Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A script of the user's, and nothing else of theirs: this test's own modules are not."""
    for name, module in list(sys.modules.items()):
        path = vars(module).get("__file__")
        if isinstance(path, str) and _is_users(path):
            monkeypatch.delitem(sys.modules, name)

    def load(text: str) -> ModuleType:
        path = tmp_path / "script.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("script", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "script", module)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_function_without_a_commit_is_told_of_once_and_by_name(load: Load) -> None:
    played, script = Played(), load(FORGETS)
    played.enter(script.train)
    script.train(None, played.advice, STEPS - 1)
    assert played.said == []
    script.train(None, played.advice, 3 * STEPS)
    assert len(played.said) == 1
    assert played.said[0].startswith(f"train() (script.py:5) has trained for {STEPS} steps without a commit: ")
    assert played.said[0].endswith("state.commit()")
    played.enter(script.train)  # after a reset
    script.train(None, played.advice, STEPS)
    assert len(played.said) == 1


def test_after_a_minute_it_need_not_be_that_many_steps(load: Load) -> None:
    played, script = Played(), load(FORGETS)
    played.enter(script.train)
    played.now += LONG_S
    played.advice.look(7)
    script.train(None, played.advice, 1)
    assert played.said == [], "no step was done: a model may be compiled, or the rows be read"
    played.advice.look(7)
    assert played.said == [], "what a step is in the middle of is left alone"
    script.train(None, played.advice, 1)
    assert f"has run for {LONG_S:.0f} s without a commit" in played.said[0]


def test_without_an_optimizer_what_the_engine_has_done_says_that_it_trains(load: Load) -> None:
    played, script = Played(), load(FORGETS)
    played.enter(script.train)
    played.now += LONG_S - 1
    played.advice.look(7 + OPERATIONS)
    played.now += 1
    played.advice.look(6 + OPERATIONS)
    assert played.said == []
    played.advice.look(7 + OPERATIONS)
    assert len(played.said) == 1


def silent(load: Load) -> Iterator[Played]:
    script = load(FORGETS)
    for played in (Played(rank=1), Played(rank=-1)):
        played.enter(script.train)
        yield played
    has_committed = Played()
    has_committed.enter(script.train, commits=1)
    yield has_committed
    done = Played()
    done.enter(script.train)
    done.advice.leave_run()
    yield done
    yield Played(may_change=False)
    fixed = Played(may_change=False)
    fixed.enter(script.train)
    yield fixed
    yield Played(rank=2)
    yield Played(rank=-1)


def test_nothing_is_said_to_others(load: Load) -> None:
    """Ranks but one; jobs without a driver; who has committed; what follows a training; fixed jobs."""
    for played in silent(load):
        played.steps(2 * STEPS)
        played.now += 2 * LONG_S
        played.advice.look(10 * OPERATIONS)
        played.steps(1)
        assert played.said == []


COMMITS = {
    "seldom": "def train(state, n=0):\n    if n % 10_000 == 9_999:\n        state.commit()\n",
    "in another function": "def train(state):\n    pass\n\n\ndef at_the_end_of_an_epoch(state):\n    state.commit()\n",
    "by a callback": "def train(state, hvd=None):\n    hvd.elastic.CommitStateCallback(state)\n",
    "by its name": "def train(state):\n    getattr(state, 'commit')()\n",
    "looks for changes only": "def train(state):\n    state.check_host_updates()\n",
    "saves": "def train(state):\n    state.save()\n",
}


@pytest.mark.parametrize("how", COMMITS)
def test_a_function_that_commits_seldom_is_not_one_without(how: str, load: Load) -> None:
    assert may_commit(load(COMMITS[how]).train)


@pytest.mark.parametrize(
    "text",
    [FORGETS, "def train(state, torch=None):\n    torch.save(state)\n", "def train(state):\n    'a commit of it'\n"],
)
def test_a_function_without_a_commit(text: str, load: Load) -> None:
    assert not may_commit(load(text).train)


def test_what_cannot_be_read_may_commit(load: Load, tmp_path: Path) -> None:
    train = load(FORGETS).train
    (tmp_path / "script.py").write_text("def (  # commit")
    assert may_commit(train)
    (tmp_path / "script.py").unlink()
    assert may_commit(train)
    assert may_commit(print)


OUTSIDE = """
def train(advice, steps):
    for _ in range(steps):
        advice.note_step()


def main(advice, steps):
    train(advice, steps)
"""


def test_a_compiled_module_that_names_a_commit_may_commit(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, compiled = load(FORGETS).train, ModuleType("compiled")
    compiled.__file__ = str(tmp_path / "compiled.so")
    monkeypatch.setitem(sys.modules, "compiled", compiled)
    Path(compiled.__file__).write_bytes(b"\x7fELF\0\xff\0step\0")
    assert not may_commit(train)
    Path(compiled.__file__).write_bytes(b"\x7fELF\0\xff\0step\0commit\0")
    assert may_commit(train)


def test_nothing_that_goes_wrong_here_disturbs_a_training() -> None:
    def say(text: str) -> None:
        raise BrokenPipeError(text)

    advice = Advice(say)
    advice.enter_round(0, may_change=True)
    for _ in range(STEPS):
        advice.note_step()


def test_a_loop_outside_of_elastic_run_is_told_of_once_and_by_its_line(load: Load) -> None:
    played, script = Played(), load(OUTSIDE)
    script.main(played.advice, STEPS - 1)
    assert played.said == []
    script.main(played.advice, STEPS)
    assert len(played.said) == 1
    assert played.said[0].startswith(f"train() (script.py:4) has trained for {STEPS} steps outside of elastic.run: ")
    played.advice.enter_round(0, may_change=True)
    script.main(played.advice, 2 * STEPS)
    assert len(played.said) == 1


def test_a_loop_at_the_top_of_a_script_is_told_of_by_its_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    monkeypatch.setitem(sys.modules, "played", ModuleType("played"))
    sys.modules["played"].__dict__["played"] = played
    load(f"from played import played\nfor _ in range({STEPS}):\n    played.advice.note_step()\n")
    assert played.said[0].startswith(f"script.py:3 has trained for {STEPS} steps outside")


def test_a_few_steps_before_a_training_are_no_loop(load: Load) -> None:
    """A model is tried, or its learning rate looked for; then it trains as it should."""
    played, script = Played(), load(OUTSIDE)
    script.train(played.advice, STEPS - 1)
    played.enter(load(COMMITS["seldom"]).train)
    played.steps(2 * STEPS)
    played.advice.leave_run()
    played.steps(2 * STEPS)
    assert played.said == []
