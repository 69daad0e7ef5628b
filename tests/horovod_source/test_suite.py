"""Horovod's own tests, out of a checkout of its repository: ``--horovod-source DIR``. Nothing of it is copied.

Each file runs in a pytest of its own, where ``import horovod`` gives this package; those of collectives in every worker
of a job. A test that asks for a module or name that there is not is skipped (horovod_source_plugin.py). What fails
otherwise must stand here, with its reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import horovod_source_plugin
import pytest

REPOSITORY = Path(__file__).parents[2]

_PRIVATE = "looks at what is private in Horovod's driver"
_OTHERS = "needs horovod.runner.common.util.safe_shell_exec in a process of its own"
_TORCH = "makes one of every optimizer that torch has, and Muon takes matrices only"


@dataclass(frozen=True)
class Suite:
    """A file of Horovod's tests.

    Attributes:
        path: under ``test``.
        ranks: of the job whose workers run it; 0 for no job.
        passes: so many pass at least, in each process.
        fails: tests that may fail, and why.
        left_out: tests that are not run, as pytest's -k takes it.
    """

    path: str
    passes: int
    ranks: int = 0
    fails: dict[str, str] = field(default_factory=dict)
    left_out: str = ""


SUITES = (
    Suite(
        "single/test_elastic_driver.py",
        passes=9,
        fails={
            "test_send_notifications_without_assignments": _PRIVATE,
            "test_shutdown_on_initial_discovery_failure": _PRIVATE,
            "test_wait_for_available_slots": _PRIVATE,
            "test_wait_for_min_hosts": _PRIVATE,
        },
    ),
    Suite("single/test_elastic_run.py", passes=2),
    Suite("single/test_run.py", passes=8, fails={"test_safe_shell_exec_interrupts_on_parent_shutdown": _OTHERS}),
    Suite("single/test_torch_elastic.py", passes=2),
    Suite("parallel/test_common.py", passes=6, ranks=2),
    Suite("parallel/test_timeline.py", passes=1, ranks=2),
    Suite(
        "parallel/test_torch.py",
        passes=95,
        ranks=2,
        fails=dict.fromkeys(("test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"), _TORCH),
        # The last rank's first operation may be done before its second of that name comes
        # (docs/reference/horovod-differences.md). Then the ranks are in different tests from there on.
        left_out="duplicate_name_error",
    ),
)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.path.rpartition("/")[2].removesuffix(".py"))
def test_horovods_own(suite: Suite, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path | None = request.config.getoption("--horovod-source")
    if source is None:
        pytest.skip("no source of Horovod: give --horovod-source DIR")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    folder = source.resolve() / "test"
    results = tmp_path / "results"
    results.mkdir()
    # The file alone: Horovod's settings of pytest, and those of this repository, are not its business.
    command = [sys.executable, "-m", "pytest", "-q", "-p", horovod_source_plugin.__name__, "-p", "no:cacheprovider"]
    command += ["--timeout", "120", "-c", os.devnull, "--rootdir", str(folder), str(folder / suite.path)]
    if suite.left_out:
        command += ["-k", f"not {suite.left_out}"]
    if suite.ranks:
        command = [sys.executable, "-m", "elastic_driver", "-np", str(suite.ranks), *command]
    paths = (REPOSITORY, REPOSITORY / "tests/support", folder / "utils", *sys.path)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
        horovod_source_plugin.RESULTS: str(results),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    outcomes = [json.loads(file.read_text()) for file in results.iterdir()]
    assert len(outcomes) == max(suite.ranks, 1), done.stdout[-5000:]
    for process in outcomes:
        failed = {name: text for name, (outcome, text) in process.items() if outcome == "failed"}
        unexpected = {name: text for name, text in failed.items() if name not in suite.fails}
        assert not unexpected, "\n".join(f"{name}: {text}" for name, text in unexpected.items())
        assert sum(outcome == "passed" for outcome, _ in process.values()) >= suite.passes, done.stdout[-5000:]
