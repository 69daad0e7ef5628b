"""elastic_driver.run: results by rank, errors, threads and loops, interruption, a killed worker."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import elastic_driver
from elastic_driver.errors import JobFailedError, SettingsError
from elastic_driver.function import launch as function_launch
from elastic_driver.function.driver import CALL, SETTINGS
from elastic_driver.function.launch import WorkerTracebackError
from elastic_driver.hosts import Host
from elastic_driver.settings.settings import Settings
from tests.support.processes.forked_function import fork_drivers

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    fork_drivers(monkeypatch)
    yield
    assert not list(folder.glob("elastic-driver-run-*"))
    left = [p.cmdline() for p in psutil.process_iter() if _mentions(p, str(folder))]
    assert not left


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def gather(x: int, *, y: int) -> tuple[int, list[Any]]:
    import horovod

    import elastic_driver as hvd

    assert horovod.__name__
    hvd.init()
    return hvd.rank(), hvd.allgather_object(x * 10 + y + hvd.rank())


def test_results_by_rank() -> None:
    assert elastic_driver.run(gather, (1,), {"y": 2}, np=2) == [(0, [12, 13]), (1, [12, 13])]


def test_large_arguments_and_results_without_a_folder_that_workers_see() -> None:
    given = os.urandom(20 << 20)  # some pieces, and a part of one
    hidden = "import sys; assert not any('elastic-driver-run-' in word for word in sys.argv)"

    def turn(data: bytes) -> bytes:
        exec(hidden)
        return data[::-1]

    assert elastic_driver.run(turn, (given,), np=2) == [given[::-1]] * 2


def fail_on_one() -> None:
    import elastic_driver as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("the shelf is empty")
    hvd.barrier()


def test_exception_reaches_the_caller() -> None:
    with pytest.raises(KeyError, match="the shelf is empty") as caught:
        elastic_driver.run(fail_on_one, np=2)
    assert isinstance(caught.value.__cause__, WorkerTracebackError)
    assert "in fail_on_one" in str(caught.value.__cause__)


def test_a_variable_that_no_worker_can_read_reaches_the_caller() -> None:
    with pytest.raises(SettingsError, match="cannot use HOROVOD_STALL_CHECK_TIME_SECONDS='soon'"):
        elastic_driver.run(gather, (1,), {"y": 2}, np=1, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "soon"})


def test_exit_without_a_result_and_unpicklable_result() -> None:
    with pytest.raises(JobFailedError):
        elastic_driver.run(lambda: os._exit(5))
    with pytest.raises(TypeError, match="pickle"):
        elastic_driver.run(lambda: threading.Lock())


def test_bad_arguments() -> None:
    with pytest.raises(SettingsError, match="min-np 3 is above -np 2"):
        elastic_driver.run(gather, np=2, min_np=3)
    with pytest.raises(SettingsError, match="Gloo only"):
        elastic_driver.run(gather, use_mpi=True)


def test_in_a_running_loop_and_in_a_thread() -> None:
    async def inside() -> list[Any]:
        return elastic_driver.run(os.getenv, ("MARK",), env={"MARK": "loop"})

    assert asyncio.run(inside()) == ["loop"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(elastic_driver.run(lambda: len(found), num_proc=2)))
    thread.start()
    thread.join()
    assert found == [0, 0]


def elastic_count(mark: str) -> tuple[int, int]:
    import elastic_driver as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> int:
        while state.step < 20:
            if state.step == 8 and hvd.rank() == 1 and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
            state.step += 1
            state.commit()
        return int(state.step)

    return hvd.size(), train(hvd.elastic.ObjectState(step=0))


def test_elastic_function_survives_a_kill(tmp_path: Path) -> None:
    results = elastic_driver.run(
        elastic_count, (str(tmp_path / "killed"),), np=2, min_np=1, hosts="localhost:1,127.0.0.1:1"
    )
    assert (tmp_path / "killed").exists()
    assert results == [(2, 20)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_caller_ends_the_workers(tmp_path: Path, number: int) -> None:
    program = tmp_path / "main.py"
    program.write_text(
        "import elastic_driver, os, time, pathlib\n"
        "def work(folder):\n"
        "    pathlib.Path(folder, f'pid-{os.getpid()}').touch()\n"
        "    time.sleep(600)\n"
        f"elastic_driver.run(work, ({str(tmp_path)!r},), np=2)\n"
    )
    caller = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 150
    while len(pids := [int(p.name[4:]) for p in tmp_path.glob("pid-*")]) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    caller.send_signal(number)
    said = caller.communicate(timeout=150)[1]
    assert caller.returncode == -number
    assert number == signal.SIGKILL or "KeyboardInterrupt" in said
    end = time.monotonic() + 150
    while any(psutil.pid_exists(pid) for pid in pids) or list((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_driver_whose_caller_is_gone_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    settings = Settings(command=("sleep", "600"), num_proc=1, min_num_proc=1, hosts=(Host("localhost", 1),))
    (folder / SETTINGS).write_bytes(pickle.dumps(settings))
    (folder / CALL).write_bytes(b"")
    gone = subprocess.Popen(["true"])
    gone.wait()
    program = [sys.executable, "-m", "elastic_driver.function.driver", str(folder), str(gone.pid)]
    assert subprocess.run(program, timeout=150, check=False).returncode == 143
    assert not folder.exists()


def test_parameters_reach_the_job_as_flags_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Settings] = []

    def read(folder: Path, environ: object, asked: object, signals: object) -> None:
        made.append(pickle.loads((folder / SETTINGS).read_bytes()))
        (folder / "exit_code.txt").write_text("1")

    monkeypatch.setattr(function_launch, "_drive", read)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text("params:\n  cycle_time_ms: 7\n")
    given = {
        "discovery_interval": 0.5, "discovery_timeout": 3.0, "heartbeat_timeout": 7.0, "hang_timeout": 8.0,
        "reset_window": 9.0, "drain_timeout": 11.0, "durable_interval": 12.0,
    }  # fmt: skip
    with pytest.raises(JobFailedError):
        elastic_driver.run(
            len, ("",), np=1, max_np=1, reset_limit=4, host_discovery_script="true", durable_dir="commits",
            durable_every=5, durable_keep=6, grace_time=2.0, standby=1, preload=["torch"], rendezvous_port=4321,
            event_log="log", event_hook="cat", page_address="127.0.0.1:4322", page=True, config_file="file.yaml",
            prefix_output_with_timestamp=True, history=False, **given,
        )  # fmt: skip
    (settings,) = made
    assert {name: getattr(settings, f"{name}_s") for name in given} == given
    assert (settings.durable_dir, settings.durable_every, settings.durable_keep) == (tmp_path / "commits", 5, 6)
    assert (settings.grace_s, settings.num_standby, settings.rendezvous_port) == (2.0, 1, 4321)
    assert settings.preload == ("torch",)
    assert (settings.event_log, settings.prefix_timestamp) == (tmp_path / "log", True)
    assert (settings.event_hook, settings.page, settings.page_address) == ("cat", True, "127.0.0.1:4322")
    assert not settings.history
    assert settings.worker_env["HOROVOD_CYCLE_TIME"] == "7"
    with pytest.raises(JobFailedError):
        elastic_driver.run(
            len, ("",), np=1, min_np=1, discovery="kubernetes", selector="app=x", namespace="n", slots_from="cpu",
            pod_names="ip", launcher="none", accept_agents=True,
        )  # fmt: skip
    pods = made[-1]
    assert pods.history
    assert (pods.discovery, pods.pod_selector, pods.pod_namespace) == ("kubernetes", "app=x", "n")
    assert (pods.slots_from, pods.pod_names, pods.launcher, pods.hosts) == ("cpu", "ip", "none", None)
    with pytest.raises(SettingsError, match="--durable-keep 3 has no effect"):
        elastic_driver.run(len, durable_keep=3)
    (tmp_path / "file.yaml").write_text("controller: mpi\n")
    with pytest.raises(SettingsError, match="runs on Gloo only"):
        elastic_driver.run(len, ("",), config_file="file.yaml", use_mpi=False)


def count_on(target: int) -> list[int]:
    import elastic_driver as hvd

    hvd.init()
    state = hvd.elastic.ObjectState(steps=[])

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while len(state.steps) < target:
            state.steps = [*state.steps, target]
            state.commit()

    train(state)
    return list(state.steps)


def test_a_function_goes_on_from_commits_on_disk(tmp_path: Path) -> None:
    assert elastic_driver.run(count_on, (2,), durable_dir=tmp_path / "commits") == [[2, 2]]
    log = tmp_path / "log"
    assert elastic_driver.run(count_on, (3,), np=2, durable_dir=tmp_path / "commits", event_log=log) == [[2, 2, 3]] * 2
    assert '"job_ended"' in log.read_text()
