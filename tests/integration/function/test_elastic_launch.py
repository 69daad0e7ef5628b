"""elastic_launch with real workers: results, restarts, errors by rank, commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver import LaunchConfig, elastic_launch
from elastic_driver.errors import SettingsError
from elastic_driver.function import torch_launcher
from tests.support.network.ports import free_port
from tests.support.processes.forked_function import fork_drivers

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    fork_drivers(monkeypatch, torch=True)
    before = set(psutil.Process().children(recursive=True))  # multiprocessing's helpers of other tests
    yield
    assert not list(folder.glob("elastic-driver-run-*"))
    left = [process.cmdline() for process in psutil.Process().children(recursive=True) if process not in before]
    assert not left


def place(*args: object) -> tuple[object, ...]:
    names = ("RANK", "WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID")
    return (*(os.environ[name] for name in names), *args)


def test_results_by_global_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of torchrun are not read."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_ROLE", "nobody")
    results = elastic_launch(LaunchConfig(1, 1, 2, run_id="job"), place)(1, "x")
    assert results == {rank: (str(rank), "2", "default_role", "job", 1, "x") for rank in range(2)}


def place_or_fail(fails: str) -> str:
    if os.environ["RANK"] == fails:
        raise ValueError("on purpose")
    if fails:
        signal.pause()
    return os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("fails", ["", pytest.param("1", marks=pytest.mark.release)])
def test_each_of_several_nodes_gets_what_its_own_workers_returned(fails: str) -> None:
    """Or what they raised, which the driver's node knows of all nodes."""
    config = LaunchConfig(2, 2, 1, run_id="job", rdzv_endpoint=f"127.0.0.1:{free_port()}", max_restarts=0)

    def one_node() -> object:
        try:
            return elastic_launch(config, place_or_fail)(fails)
        except Exception as error:
            return f"{type(error).__name__} {sorted(getattr(error, 'failures', ()))}"

    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(one_node) for _ in range(2)]]
    assert sorted(found, key=str) == (["ChildFailedError [1]"] * 2 if fails else [{0: "2"}, {1: "2"}])


def leave_or_return(code: int) -> str:
    if os.environ["RANK"] == "0":
        sys.exit(code)
    return "returned"


def test_who_leaves_by_sys_exit_has_ended_well_and_returns_nothing() -> None:
    assert elastic_launch(LaunchConfig(1, 1, 2), leave_or_return)(0) == {0: None, 1: "returned"}


def fail_at_first(marker: str) -> str:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("only once")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()
    return f"{marker} {os.environ['TORCHELASTIC_RESTART_COUNT']}"


def test_a_failure_restarts_all() -> None:
    results = elastic_launch(LaunchConfig(1, 1, 2, max_restarts=1), fail_at_first)("again")
    assert results == {0: "again 1", 1: "again 1"}


def fail_always() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("always")
    signal.pause()


def test_the_error_is_torchs(tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(errors.ChildFailedError, match="fail_always FAILED") as caught:
        elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0), fail_always)()
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert failure.message["message"] == "ValueError: always"
    assert "in fail_always" in failure.message["extraInfo"]["py_callstack"]
    assert set(caught.value.failures) == {1}
    assert Path(failure.error_file).is_file()


def test_the_error_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing", None)
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing.errors", None)
    with pytest.raises(torch_launcher.ChildFailedError, match=r"fail_always failed on rank 1 .*ValueError: always"):
        elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0), fail_always)()


def test_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['RANK'])")
    config = LaunchConfig(1, 1, 2, log_line_prefix_template="${local_rank}|")
    assert elastic_launch(config, str(script))("a", 1) == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["0|['a', '1'] 0", "1|['a', '1'] 1"]
    assert elastic_launch(config, sys.executable)("-u", str(script), "b") == {0: None, 1: None}


def test_a_command_that_fails() -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(errors.ChildFailedError, match="sh FAILED") as caught:
        elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0), "sh")("-c", "kill -KILL $$")
    assert [failure.exitcode for failure in caught.value.failures.values()] == [-signal.SIGKILL]
    with pytest.raises(SettingsError, match="no-such-program"):
        elastic_launch(LaunchConfig(1, 1, 1), "no-such-program")()


def test_a_process_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def train(x: int) -> int:
        import torch
        import torch.distributed as dist

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
        total = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(total)

    assert elastic_launch(LaunchConfig(1, 1, 2), train)(10) == {0: 21, 1: 21}


GROUP = """\
import os
from elastic_driver import LaunchConfig, elastic_launch

def train(x):
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://STORE", rank=rank, world_size=size)
    total = torch.tensor([x + dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)

print(elastic_launch(LaunchConfig(1, 1, 2), train)(10))
"""


@pytest.mark.release  # the same in a script, which imports torch three times
@pytest.mark.slow
def test_a_script_with_a_process_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(GROUP.replace("STORE", str(tmp_path / "store")))
    done: Any = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{0: 21, 1: 21}"
