"""Tests run side by side (pytest-xdist), each in whatever process is free. What they share is in ``tests/support``."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import groups
import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.support import extent
from tests.support.processes import forked

# The same examples for everybody, so that a run is green or red for a reason; `NEW_SEEDS=1` draws others. How long an
# example takes is the machine's affair.
if os.environ.get("NEW_SEEDS") == "1":
    hypothesis.settings.register_profile("fresh", deadline=None)
    hypothesis.settings.load_profile("fresh")
else:
    hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("same")
    # It draws numbers that stand in the modules of this package, too, as far as they are imported by then: a test would
    # have other examples alone than among others, and in each process of pytest-xdist.
    if hasattr(providers, "_get_local_constants"):
        nothing = providers.Constants()
        providers._get_local_constants = lambda: nothing

# A shell starts jobs in the background with SIGINT and SIGQUIT ignored, nohup does so with SIGHUP, and what is ignored
# stays so in every process that a test starts. Tests send these signals.
_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for number, handler in _HANDLERS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _variables_stay() -> Iterator[None]:
    """What a test leaves in the environment, all that its process runs later would have: other tests, and jobs."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for variables in (before, after):
        for name in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"):  # of pytest's own, and of torch's
            variables.pop(name, None)
    if after != before:
        os.environ.clear()
        os.environ.update(before)
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        pytest.fail(f"the test has changed the environment: {', '.join(sorted(changed))}")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where job files and agents' sockets are, for one test; its jobs have a history of their own, too."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


# What stays together: a wheel is built once, a training alone is run once for each example, checks of one program share
# a job, and the jobs that hang do so side by side. The tests of a class look at one job from several sides. What reads
# the whole package (tests/support/sources.py) parses it once, and what uses PyTorch in the test's own process has it
# import once what it imports when it is first used.
_TOGETHER = re.compile(
    r"(test_wheel)|(hangs/test_\w+)\.py|(test_examples)\.py::.*\[(train_[a-z]+)"
    r"|(test_(?:optimizer|sync_batch_norm|other_default_device)\.py::\w+)"
    r"|(\w+/test_\w+\.py::Test\w+)::"
    r"|(unit)/(?:torch/|(?:worker/test_(?:state|adapters|durable)|driver/test_memory|test_(?:sizes|errors))\.py)"
)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = _TOGETHER.search(nodeid)
            return " ".join(filter(None, shared.groups())) if shared else nodeid

        # Tests at the beginning wait much of their time, for jobs; those at the end only compute. One process in four
        # begins there: beside it the others' waiting costs nothing.
        def _assign_work_unit(self, node: Any) -> None:
            if self.nodes.index(node) % 4 == 3:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return Scheduler(config, log)


# Where jobs leave their files: not among those of the user who runs the tests.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="elasticrun-tests-")
os.environ["XDG_STATE_HOME"] = f"{os.environ['XDG_RUNTIME_DIR']}/state"
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# The processes that are started to run tests, too, fork from what is imported once.
forked.share()


# What is imported and collected lives until the end. No collection is to look at it: neither while there is more and
# more of it, nor those that many tests ask for.
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", choices=groups.GROUPS, help="run these tests and those of the groups before, else all")
    parser.addoption("--slow-torchrun", action="store_true", help="run the tests with many agents of torchrun, too")
    parser.addoption(
        "--tensorflow-soak",
        type=float,
        metavar="MINUTES",
        help="how long each test of random changes takes (else 15 s)",
    )
    parser.addoption("--torch-source", metavar="DIR", help="PyTorch's source, for tests/torch_source")
    parser.addoption(
        "--horovod-source",
        type=Path,
        metavar="DIR",
        help="a checkout of Horovod's repository: its own tests are run (tests/horovod_source), and its names compared",
    )
    parser.addoption(
        "--horovod-launcher",
        choices=("elasticrun", "horovodrun", "both"),
        default="elasticrun",
        help="what starts the jobs of tests/horovod",
    )


def pytest_configure(config: pytest.Config) -> None:
    group = config.getoption("--group")
    extent.is_whole, extent.is_for_a_commit = group in (None, "release"), group == "commit"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if groups.is_left_out(collection_path, config.getoption("--group")) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped if isinstance(report.longrepr, tuple)]
    if reasons:
        terminalreporter.write_line(f"skipped: {groups.why_skipped(reasons)}")
    left_out = groups.what_is_left_out(config.getoption("--group") or groups.GROUPS[-1])
    if left_out:
        terminalreporter.write_line(left_out)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow-torchrun"):
        for item in items:
            if item.get_closest_marker("slow_torchrun"):
                item.add_marker(pytest.mark.skip(reason="many agents of torchrun: --slow-torchrun runs this"))
    if not extent.is_whole:
        put_off = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=put_off)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
    # What takes long comes first: begun last, it would run alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
