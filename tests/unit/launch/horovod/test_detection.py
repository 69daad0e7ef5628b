"""Whether the workers' Python would import Horovod's own library: asked of real Pythons, with packages in folders."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from elastic_driver.dialects.horovod_shim import ALWAYS, ENV_SHIM, SHIM_FOLDER
from elastic_driver.launch.agent.horovod import detection as detection_module
from elastic_driver.launch.agent.horovod.detection import Detection
from tests.support.processes.carriers import carriers_of

pytestmark = pytest.mark.integration


def library(folder: Path, *, basics: bool = True) -> Path:
    """A folder with a package named horovod, as Horovod's is."""
    common = folder / "horovod" / "common"
    common.mkdir(parents=True)
    for file in (folder / "horovod" / "__init__.py", common / "__init__.py"):
        file.write_text("raise SystemExit('it must not be imported')")
    if basics:
        (common / "basics.py").touch()
    return folder


def script(folder: Path, text: str = "import horovod.torch as hvd\n") -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def is_horovods(command: list[str | Path], folder: Path, *path: Path | str, **env: str) -> bool:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    return asyncio.run(Detection().is_horovods(tuple(map(str, command)), env, str(folder)))


def test_a_library_that_is_there_is_found_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path)]
    there = library(tmp_path / "there")
    assert not is_horovods(command, tmp_path)
    assert is_horovods(command, tmp_path, there)
    assert is_horovods(command, tmp_path, SHIM_FOLDER, there)
    assert not is_horovods(command, tmp_path, SHIM_FOLDER)
    assert not is_horovods(command, tmp_path, there, **{ENV_SHIM: ALWAYS})
    assert not is_horovods(command, tmp_path, library(tmp_path / "another", basics=False))


def test_a_library_beside_the_script_counts(tmp_path: Path) -> None:
    library(tmp_path)
    assert is_horovods([sys.executable, script(tmp_path)], tmp_path)


def test_a_script_that_imports_no_horovod_is_none(tmp_path: Path) -> None:
    there = library(tmp_path / "there")
    assert not is_horovods([sys.executable, script(tmp_path, "import torch\n")], tmp_path, there)


def test_who_does_not_name_a_python_is_asked_of_python3(tmp_path: Path) -> None:
    there = library(tmp_path / "there")
    run = tmp_path / "run.sh"
    run.write_text("#!/bin/sh\nexec python3 train.py\n")
    run.chmod(0o755)
    assert is_horovods([run], tmp_path, there)
    assert not is_horovods([run], tmp_path, there, PATH=str(tmp_path))


def python(folder: Path, text: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "text", ["echo rubbish", "exit 3", "kill -9 $$", "head -c 300000 /dev/zero", "echo no; exit 1"]
)
def test_a_python_that_says_something_else_says_no(tmp_path: Path, text: str) -> None:
    assert not is_horovods([python(tmp_path, text), script(tmp_path)], tmp_path)


def test_a_python_that_cannot_be_started_says_no(tmp_path: Path) -> None:
    broken = tmp_path / "python3"
    broken.write_text("#!/nonexistent\n")
    broken.chmod(0o755)
    assert not is_horovods([broken, script(tmp_path)], tmp_path)


@pytest.mark.parametrize("how", ["exec tail -f /dev/null", "tail -f /dev/null; true"])
def test_a_python_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection_module, "_LIMIT_S", 0.5)
    hangs = python(tmp_path, how)
    mark = os.path.basename(tmp_path)
    assert not is_horovods([hangs, script(tmp_path)], tmp_path, MARK=mark)
    end = time.monotonic() + 150
    while carriers_of("MARK", mark.__eq__):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_python_is_asked_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    asked = python(tmp_path, f"echo x >> {count}; echo True")
    command, env = (str(asked), str(script(tmp_path))), {"PATH": os.environ["PATH"]}

    async def main() -> None:
        detection = Detection()
        asking = (detection.is_horovods(command, env, str(tmp_path)) for _ in range(4))
        assert await asyncio.gather(*asking) == [True] * 4
        assert await detection.is_horovods(command, env, str(tmp_path))
        assert count.read_text() == "x\n"
        assert await detection.is_horovods(command, {**env, "PYTHONPATH": "elsewhere"}, str(tmp_path))
        assert count.read_text() == "x\nx\n"

    asyncio.run(main())


def test_a_python_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    asked = python(tmp_path, f"test -e {ready} && echo True")
    command, env = (str(asked), str(script(tmp_path))), {"PATH": os.environ["PATH"]}

    async def main() -> None:
        detection = Detection()
        asking = [detection.is_horovods(command, env, str(tmp_path)) for _ in range(3)]
        assert await asyncio.gather(*asking) == [False] * 3
        ready.touch()
        assert await detection.is_horovods(command, env, str(tmp_path))

    asyncio.run(main())


def test_what_a_python_prints_at_its_start_is_no_answer(tmp_path: Path) -> None:
    noisy = python(tmp_path, "echo hello; echo True")
    assert is_horovods([noisy, script(tmp_path)], tmp_path)


def test_the_first_folder_of_a_safe_path_counts(tmp_path: Path) -> None:
    there = library(tmp_path / "there")
    command = [sys.executable, script(tmp_path)]
    assert is_horovods(command, tmp_path, there, PYTHONSAFEPATH="1")
    assert not is_horovods(command, tmp_path, tmp_path / "nothing", PYTHONSAFEPATH="1")
