"""Workers that are forked from a warmed process: they are what fresh ones are, and faults of it harm none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.processes.guard_link import GuardLink
from elastic_driver.launch.warm import forks as warm
from elastic_driver.launch.warm.forks import ForkedProcess
from elastic_driver.launch.warm.preload import heavy_imports, read_command, shadowed
from elastic_driver.launch.words import ExitStatus
from elastic_driver.rendezvous.environment import ENV_WARM
from tests.support import extent
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes.jobs import Job as ElasticJob
from tests.support.processes.jobs import check_agreement
from tests.support.processes.launching import PATIENCE_S, Job, job, run, stopped

pytestmark = pytest.mark.integration

PROBE = PROGRAMS / "warm_probe.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", "PROBE": "numpy", "HOROVOD_RANK": "0"}


@contextlib.asynccontextmanager
async def warm_job(preload: Sequence[str] | None = None, *, warm_first: bool = False) -> AsyncIterator[Job]:
    async with job() as one:
        one.keeper = one.new_keeper(warm=True, preload=preload, warm_first=warm_first)
        yield one


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is far too busy a worker is started afresh: it is forking that is tested here."""
    monkeypatch.setattr(warm, "FORK_S", 150.0)


def was_forked(process: ProcessTree) -> bool:
    return isinstance(process._popen, ForkedProcess)


async def until(what: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.01)


async def warmed(one: Job, command: Sequence[str], env: dict[str, str] = ENV) -> ProcessTree:
    """Starts a first, fresh worker, and waits until the next can be forked."""
    first = await one.start(command, env=env)
    one.keeper.warm_up()
    assert not was_forked(first)
    await until(lambda: one.warnings or (one.keeper.warm is not None and one.keeper.warm.is_ready()))
    return first


def said(one: Job, mark: str) -> list[Any]:
    found = re.findall(rf">:{mark} (.*)", one.sink.data["stdout"].decode())
    return [json.loads(text) for text in found]


@pytest.mark.parametrize(
    ("options", "how", "libraries"),
    [
        (["-u", "-W", "ignore", "-O"], "script", "numpy"),
        pytest.param([], "script", "torch", marks=pytest.mark.release),
        (["-B"], "relative", "numpy.random"),
        ([], "module", "numpy"),
    ],
)
def test_a_forked_worker_is_what_a_fresh_one_is(
    options: list[str], how: str, libraries: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROBE.parent if how != "script" else tmp_path)
    tail = {"script": [str(PROBE)], "relative": [PROBE.name], "module": ["-m", PROBE.stem]}[how]
    command = [sys.executable, *options, *tail, "--flag", "exit"]
    env = {**ENV, "PROBE": libraries, "PYTHONPATH": str(tmp_path)}

    async def main() -> None:
        async with warm_job([libraries]) as one:
            first = await warmed(one, command, env)
            assert await first.wait() == ExitStatus(7)
            others = []
            for number in (1, 2):
                worker = WorkerId("localhost", number, 0)
                process = await one.start(command, worker=worker, env={**env, "HOROVOD_RANK": str(number)})
                others.append(process)
                assert await process.wait() == ExitStatus(7)
            assert [was_forked(process) for process in others] == [True, True]
            fresh, *forked = said(one, "FACTS")
            tied = [what[3] for _, what in fresh["descriptors"] if what[1]]
            assert tied == ["it", "its group"]
            for number, facts in enumerate(forked, 1):
                expected = json.loads(json.dumps(fresh).replace("localhost[0]#0", f"localhost[{number}]#0"))
                expected["environ"]["HOROVOD_RANK"] = str(number)
                expected["proc_environ"] = [
                    f"HOROVOD_RANK={number}" if item.startswith("HOROVOD_RANK=") else item
                    for item in expected["proc_environ"]
                ]
                expected["main"] = {key: re.sub("0x[0-9a-f]+", "", text) for key, text in expected["main"].items()}
                facts["main"] = {key: re.sub("0x[0-9a-f]+", "", text) for key, text in facts["main"].items()}
                for key in expected:
                    assert facts[key] == expected[key], key
            streams = said(one, "RANDOM")
            assert len({tuple(drawn) for drawn in streams}) == 3
            for column in zip(*streams, strict=True):
                assert len(set(column)) == 3
            assert one.sink.data["stdout"].count(b"SIGNALLED") == 3
            assert one.sink.data["stdout"].count(b"AT EXIT") == 3
            assert one.sink.data["stderr"] == b""
            assert one.warnings == []

    run("uvloop", main)


def test_what_is_imported_before_the_fork_is_left_alone_by_the_garbage_collector(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import gc, json\nprint('frozen', json.dumps(gc.get_freeze_count()))\n")

    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            first = await warmed(one, [sys.executable, str(program)])
            assert await first.wait() == ExitStatus(0)
            forked = await one.start([sys.executable, str(program)], env=ENV)
            assert was_forked(forked)
            assert await forked.wait() == ExitStatus(0)
        fresh, after = said(one, "frozen")
        # Looking at it once, at its exit, a worker would copy nearly all of its memory.
        assert fresh < 1000 < after

    run("asyncio", main)


def test_an_exception_has_the_same_traceback() -> None:
    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            texts = []
            first = await warmed(one, [sys.executable, str(PROBE), "raise"])
            await first.wait()
            texts.append(list(first.last_lines))
            second = await one.start([sys.executable, str(PROBE), "raise"], env=ENV)
            assert was_forked(second)
            assert await second.wait() == ExitStatus(1)
            texts.append(list(second.last_lines))
            assert texts[0] == texts[1]
            assert texts[0][0] == "Traceback (most recent call last):"

    run("asyncio", main)


def test_a_forked_worker_can_spawn_and_fork(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
def square(number):
    return number * number, os.environ["HOROVOD_RANK"], "warm" in str(sys.path)
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [3]))
            pool.close()
            pool.join()
    print("run", subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, check=True).stdout)
    with ThreadPoolExecutor(2) as pool:
        print("threads", list(pool.map(abs, [-1, 2])))
"""
    )

    async def main() -> None:
        async with warm_job(["multiprocessing.pool", "concurrent.futures", "subprocess"]) as one:
            command = [sys.executable, str(script)]
            await (await warmed(one, command)).wait()
            second = await one.start(command, env=ENV)
            assert was_forked(second)
            assert await second.wait() == ExitStatus(0)
            lines = one.sink.lines()
            assert lines[:4] == lines[4:]
            assert lines[0] == "[0]<stdout>:spawn [(9, '0', False)]"
            assert one.sink.data["stderr"] == b""

    run("uvloop", main)


def test_signals_and_stops_reach_a_forked_worker() -> None:
    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            first = await warmed(one, [sys.executable, str(PROBE), "wait"])
            first.kill()
            await first.wait()  # the next has its name here: it would be taken for what the first has left
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
                process = await one.start([sys.executable, str(PROBE), "wait"], env=ENV)
                assert was_forked(process)
                os.kill(process.pid, number)
                assert await process.wait() == ExitStatus(-number)
            process = await one.start([sys.executable, str(PROBE), "wait"], env=ENV)
            assert await stopped(process, 5.0) == ExitStatus(-signal.SIGTERM)

    run("asyncio", main)


def test_what_importing_says_each_worker_says_again(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "loud.py").write_text("import sys\nprint('loaded')\nprint('beware', file=sys.stderr)\n")
    script = tmp_path / "script" / "main.py"
    script.parent.mkdir()
    # A sitecustomize of the user's is run as ever.
    (library / "sitecustomize.py").write_text("import builtins\nbuiltins.ran = 'ran'\n")
    script.write_text("import loud, sys\nprint(ran, sys.modules['sitecustomize'].__file__)\n")

    async def main() -> None:
        async with warm_job(["loud"]) as one:
            env = {**ENV, "PYTHONPATH": str(library)}
            await (await warmed(one, [sys.executable, str(script)], env)).wait()
            second = await one.start([sys.executable, str(script)], env=env)
            assert was_forked(second)
            await second.wait()
            assert (
                one.sink.lines()
                == [
                    "[0]<stdout>:loaded",
                    f"[0]<stdout>:ran {library}/sitecustomize.py",
                ]
                * 2
            )
            assert one.sink.lines("stderr") == ["[0]<stderr>:beware"] * 2

    run("asyncio", main)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n", "threads"),
        ("raise OSError('no such device')\n", "cannot import culprit: no such device"),
    ],
)
def test_modules_that_cannot_be_preloaded_are_refused_once(source: str, why: str, tmp_path: Path) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "culprit.py").write_text(source)
    script = tmp_path / "main.py"
    script.write_text("print('ran')\n")

    async def main() -> None:
        async with warm_job(["culprit"]) as one:
            env = {**ENV, "PYTHONPATH": str(library)}
            await (await warmed(one, [sys.executable, str(script)], env)).wait()
            for _ in range(2):
                again = await one.start([sys.executable, str(script)], env=env)
                assert not was_forked(again)
                assert await again.wait() == ExitStatus(0)
            assert len(one.warnings) == 1
            assert why in one.warnings[0]
            assert one.keeper.warm is not None
            assert one.keeper.warm.pid is None

    run("asyncio", main)


def test_another_environment_needs_another_warmed_process() -> None:
    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            command = [sys.executable, str(PROBE), "exit"]
            await (await warmed(one, command)).wait()
            assert one.keeper.warm is not None
            before = one.keeper.warm.pid
            env = {**ENV, "PYTHONHASHSEED": "3"}
            changed = await one.start(command, env=env)
            assert not was_forked(changed)
            await changed.wait()
            await until(one.keeper.warm.is_ready)
            assert one.keeper.warm.pid != before
            again = await one.start(command, env=env)
            assert was_forked(again)
            await again.wait()
            assert one.warnings == []

    run("asyncio", main)


def test_a_killed_warmed_process_is_replaced_and_takes_no_worker_along() -> None:
    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            command = [sys.executable, str(PROBE), "wait"]
            await warmed(one, command)
            warm = one.keeper.warm
            assert warm is not None
            forked = await one.start(command, env=ENV, worker=WorkerId("localhost", 1, 0))
            assert was_forked(forked)
            for when in ("ready", "importing"):
                pid = warm.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: warm.pid not in (pid, None))
                assert len(one.warnings) == 1 + (when == "importing")
            await until(warm.is_ready)
            assert not forked.exited.done()
            again = await one.start(command, env=ENV, worker=WorkerId("localhost", 2, 0))
            assert was_forked(again)

    run("uvloop", main)


def test_imports_that_hang_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "WARM_UP_S", 0.5)
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(1000)\n")

    async def main() -> None:
        async with warm_job(["stuck"]) as one:
            command = [sys.executable, "-m", "this"]
            env = {**ENV, "PYTHONPATH": str(tmp_path)}
            await (await warmed(one, command, env)).wait()
            assert one.warnings == ["workers start without forking: importing stuck did not finish within 0.5 s"]
            assert one.keeper.warm is not None
            await until(lambda: one.keeper.warm.pid is None)
            again = await one.start(command, env=env)
            assert not was_forked(again)
            assert await again.wait() == ExitStatus(0)

    run("asyncio", main)


def test_a_module_of_the_scripts_own_hides_the_warmed_one(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import decimal\nprint(decimal.__file__)\n")
    (tmp_path / "decimal.py").write_text("")

    async def main() -> None:
        async with warm_job(["statistics"]) as one:
            for _ in range(2):
                await (await warmed(one, [sys.executable, str(script)])).wait()
            assert one.sink.lines() == [f"[0]<stdout>:{tmp_path}/decimal.py"] * 2
            assert len(one.warnings) == 1
            assert "has its own decimal" in one.warnings[0]

    run("asyncio", main)


def test_a_command_that_is_not_pythons_is_told_once() -> None:
    async def main() -> None:
        async with warm_job(["json"]) as one:
            for _ in range(2):
                assert await (await one.start(["true"], env=ENV)).wait() == ExitStatus(0)
            await until(lambda: one.warnings)
            one.keeper.warm_up()
            assert len(one.warnings) == 1
            assert "--preload needs a command like" in one.warnings[0]

    run("asyncio", main)


@pytest.mark.parametrize(
    "flags", [("--preload", "numpy,elastic_driver"), pytest.param(("--no-preload",), marks=pytest.mark.release)]
)
def test_a_job_is_the_same_with_forked_workers(flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("-np", "1", "--min-np", "1", "--heartbeat-timeout", "5", "--prefix-output-with-timestamp", *flags)
    forked = "--preload" in flags
    with ElasticJob(tmp_path, "localhost:1", *flags, env={"OMP_NUM_THREADS": "1"}) as one:
        first = {line["pid"] for line in one.wait_for_steps(1)}
        if forked:
            one.wait_for("a warmed process", lambda: one.events("warmed"))
        one.set_hosts("localhost:1\n127.0.0.1:2\n")
        all_three = one.wait_for_steps(3)
        new = {line["rank"]: line["pid"] for line in all_three if line["pid"] not in first}
        assert sorted(new) == [1, 2]
        # A forked worker's environment ends with the room that its process kept for it.
        kept = [Path(f"/proc/{pid}/environ").read_bytes().endswith(b"\0\0") for pid in new.values()]
        assert kept == [forked, forked]
        at = time.time()
        os.kill(new[2], signal.SIGUSR1)
        one.wait_for_steps(2, after=at)
        [left] = one.wait_for("the end of a worker", lambda: one.events("worker_exited"))
        assert (left["pid"], left["returncode"]) == (new[2], 0)
        at = time.time()
        os.kill(new[1], signal.SIGSTOP)
        one.wait_for_steps(1, after=at)
        [hung] = one.wait_for("a hang", lambda: one.events("worker_hung"))
        assert hung["worker"].startswith("127.0.0.1[0]")
        one.wait_to_say("<stderr>:Fatal Python error: Aborted")
        check_agreement(one.steps())


# It is killed at random moments below.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.release), signal.SIGSTOP])
def test_a_warmed_process_that_fails_while_it_forks_costs_a_fresh_start(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_driver.launch.warm.forks.FORK_S", 2.0)

    async def main() -> None:
        async with warm_job(["numpy"]) as one:
            command = [sys.executable, str(PROBE), "exit"]
            await (await warmed(one, command)).wait()
            warm = one.keeper.warm
            assert warm is not None
            assert warm.pid is not None
            os.kill(warm.pid, number)
            process = await one.start(command, env=ENV)
            assert not was_forked(process)
            assert await process.wait() == ExitStatus(7)
            assert len(one.warnings) <= 1
            monkeypatch.setattr("elastic_driver.launch.warm.forks.FORK_S", PATIENCE_S)
            await until(warm.is_ready)
            process = await one.start(command, env=ENV)
            assert was_forked(process)
            await process.wait()

    run("asyncio", main)


def test_kills_at_random_moments_of_forks_lose_no_worker() -> None:
    async def main() -> None:
        async with warm_job(["json"]) as one:
            command = [sys.executable, "-m", "this"]
            await (await warmed(one, command)).wait()
            warm = one.keeper.warm
            assert warm is not None
            for delay in (0.0, 0.001, 0.004):
                await until(warm.is_ready)
                victim = warm.pid
                assert victim is not None
                starting = asyncio.create_task(one.start(command, env=ENV))
                await asyncio.sleep(delay)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                assert await (await starting).wait() == ExitStatus(0)
                await until(lambda victim=victim: warm.pid not in (victim, None))
                # A whole fork in between: five failures in a row would end warm starts.
                await until(warm.is_ready)
                await (await one.start(command, env=ENV)).wait()

    run("asyncio", main)


def test_forks_leave_nothing() -> None:
    async def main() -> None:
        async with warm_job(["json"]) as one:
            command = [sys.executable, "-m", "keyword"]
            await (await warmed(one, command)).wait()
            warm = one.keeper.warm
            assert warm is not None
            assert warm.pid is not None

            def held() -> tuple[int, int]:
                return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{warm.pid}/fd"))

            await (await one.start(command, env=ENV)).wait()
            before = held()
            for _ in range(10 if extent.is_whole else 3):
                workers = [WorkerId("localhost", slot, 0) for slot in range(4)]
                four = await asyncio.gather(*(one.start(command, env=ENV, worker=worker) for worker in workers))
                assert all(was_forked(process) for process in four)
                statuses = await asyncio.gather(*(process.wait() for process in four))
                assert statuses == [ExitStatus(0)] * 4
            assert held() == before
            assert one.warnings == []
            assert set(one.children()) == {warm.pid, one.keeper.guard_pid}

    run("uvloop", main)


def test_nothing_outlives_a_killed_driver(tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(
        f"""
import asyncio, os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from test_warm import PROBE, ENV, warm_job, warmed
from elastic_driver.hosts import WorkerId
async def main():
    async with warm_job(["numpy"]) as one:
        command = [sys.executable, str(PROBE), "wait"]
        first = await warmed(one, command)
        second = await one.start(command, env=ENV, worker=WorkerId("localhost", 1, 0))
        print(first.pid, second.pid, one.keeper.warm.pid, one.keeper.guard_pid, flush=True)
        await first.exited
asyncio.run(main())
"""
    )
    driver = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    processes = [psutil.Process(int(word)) for word in driver.stdout.readline().split()]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert len(processes) == 4
    deadline = time.monotonic() + PATIENCE_S
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_commands_and_scripts_are_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch.nn as nn, json\ntry:\n    from numpy import array\nexcept OSError: ...\n"
    )
    for command in (
        ["python", "train.py"],
        ["/x/python3.11", "-u", "-W", "error", "train.py"],
        ["python", "-um", "train"],
    ):
        found = read_command(command, tmp_path)
        assert found is not None
        assert found.files == (script,)
        assert found.folder == tmp_path
    for command in (
        ["sh", "train.py"],
        ["python"],
        ["python", "-c", "1"],
        ["python", "-I", "train.py"],
        ["python", "-m"],
        ["python", "-"],
        ["python", "missing.py"],
        ["python", str(tmp_path)],
    ):
        assert read_command(command, tmp_path) is None
    assert heavy_imports([script], tmp_path) == ("torch.nn", "numpy", "torch._dynamo")
    script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n")
    assert heavy_imports([script], tmp_path) == ()
    script.write_text("import sys\nsys.path.insert(0, 'x')\nimport torch\n")
    assert heavy_imports([script], tmp_path) == ()
    script.write_text("import torch\nimport os\nos.environ['A'] = '1'\n")
    assert heavy_imports([script], tmp_path) == ("torch", "torch._dynamo")
    script.write_text("import numpy\nfrom .setup import env\nimport torch\n")
    assert heavy_imports([script], tmp_path) == ("numpy",)
    script.write_text(
        "'''text'''\nfrom packaging import version\nSEED = 3\nimport numpy\nimport comet_ml\nimport torch\n"
    )
    assert heavy_imports([script], tmp_path) == ("numpy",)
    for name in ("lightning.pytorch", "accelerate"):
        script.write_text(f"import {name}\nimport numpy\n")
        assert heavy_imports([script], tmp_path) == ("torch", "torch._dynamo")
    script.write_text("import numpy, warnings\nwarnings.simplefilter('ignore')\nimport torch\n")
    assert heavy_imports([script], tmp_path) == ("numpy",)
    (tmp_path / "data.py").write_text("import scipy\nimport train\ndef load(): ...\n")
    (tmp_path / "setup.py").write_text("import pandas\nprint('set up')\nimport sklearn\n")
    script.write_text("import data\nimport setup\nimport torch\n")
    assert heavy_imports([script], tmp_path) == ("scipy", "pandas")
    package = tmp_path / "pkg" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("import numpy\n")
    (package / "__main__.py").write_text("import torch\n")
    found = read_command(["python", "-m", "pkg.sub"], tmp_path)
    assert found is not None
    assert heavy_imports(found.files, found.folder) == ("numpy", "torch", "torch._dynamo")
    (tmp_path / "pkg" / "__init__.py").write_text("import os\nos.environ['A'] = '1'\n")
    assert heavy_imports(found.files, found.folder) == ()
    script.write_text("this is no Python")
    assert heavy_imports([script], tmp_path) == ()
    assert shadowed(["numpy", "train"], tmp_path) == "train"
    assert shadowed(["numpy"], tmp_path) is None


def test_modules_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    """There are as many ways through them as there are sets of them: nobody sees the end of that."""
    for number in range(40):
        imports = "".join(f"import m{other}\n" for other in range(40) if other != number)
        (tmp_path / f"m{number}.py").write_text(imports + "import numpy\n" * (number == 39))
    assert heavy_imports([tmp_path / "m0.py"], tmp_path) == ("numpy",)


def test_a_python_that_skips_the_hook_begins_no_training(tmp_path: Path) -> None:
    """Some are started by a program of their own that ignores PYTHONPATH."""
    script = tmp_path / "train.py"
    script.write_text("import elastic_driver as hvd\nhvd.init()\nprint('trains', hvd.size())\n")
    environ = {**os.environ, "PYTHONPATH": str(Path(warm.__file__).parents[3]), ENV_WARM: "5:6:7:"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "use --no-preload" in done.stderr
    assert "trains" not in done.stdout


def test_the_first_workers_can_be_forked_too() -> None:
    async def main() -> None:
        async with warm_job(warm_first=True) as one:
            command = [sys.executable, str(PROBE), "${local_rank}"]
            first = await asyncio.gather(
                *(
                    one.start(
                        command,
                        worker=WorkerId("localhost", rank, 0),
                        env={**ENV, "ELASTIC_DRIVER_LOCAL_RANK": str(rank)},
                        label="0",
                    )
                    for rank in range(2)
                )
            )
            assert [was_forked(worker) for worker in first] == [True, True]
            for worker in first:
                assert (await worker.wait()).ok
            said = [json.loads(line.partition("FACTS ")[2]) for line in one.sink.lines() if "FACTS " in line]
            assert sorted(each["argv"][1] for each in said) == ["0", "1"]
            assert sorted(each["orig_argv"][-1] for each in said) == ["0", "1"]
            # What cannot be forked is not waited for.
            other = await one.start([sys.executable, "-c", "pass"], env=ENV)
            assert not was_forked(other)
            assert (await other.wait()).ok
        async with warm_job(warm_first=True) as one:
            alone = await one.start([sys.executable, "-c", "print('afresh')"], env=ENV)
            assert not was_forked(alone)
            assert (await alone.wait()).ok
            assert one.sink.lines() == ["[0]<stdout>:afresh"]

    run("uvloop", main)


def test_a_host_that_cannot_end_its_workers_prepares_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is started there says why not; until then its agent is of use."""

    def ensure(link: GuardLink) -> None:
        raise LaunchError("no descriptor is free")

    monkeypatch.setattr(GuardLink, "ensure", ensure)

    async def main() -> None:
        async with warm_job(warm_first=True) as one:
            await one.keeper.prepare([sys.executable, str(PROBE)], ENV)
            assert one.keeper.warm is None

    run("asyncio", main)


def test_a_host_can_import_before_it_has_workers(tmp_path: Path) -> None:
    """It need not know the place of any. What cannot be imported there is known at once."""

    async def main() -> None:
        command = [sys.executable, str(PROBE)]
        async with warm_job(warm_first=True) as one:
            await one.keeper.prepare(command, {**ENV, "HOROVOD_RANK": "7"})
            assert one.keeper.warm is not None
            assert one.keeper.warm.is_ready()
            first = await one.start(command, env=ENV)
            assert was_forked(first)
            assert (await first.wait()).ok
        async with warm_job(warm_first=True) as one:
            await one.keeper.prepare([sys.executable, "-c", "pass"], ENV)
        async with job() as one:  # whose workers are all started afresh
            await one.keeper.prepare(command, ENV)

    run("uvloop", main)


def test_a_job_that_ends_meanwhile_does_not_wait_for_the_import(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "slow.py").write_text("import time\ntime.sleep(1000)\n")
        (tmp_path / "train.py").write_text("import slow\n")
        env = {**ENV, "PYTHONPATH": str(tmp_path / "lib")}
        async with warm_job(["slow"], warm_first=True) as one:
            starting = asyncio.create_task(one.start([sys.executable, str(tmp_path / "train.py")], env=env))
            await until(lambda: one.keeper.warm is not None and one.keeper.warm.pid is not None)
            await one.close()
            with pytest.raises(LaunchError, match="the job is ending"):
                await starting

    run("uvloop", main)
