"""A command that runs another Python than elasticrun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_driver.driver.other_python import check_python, other_python
from elastic_driver.hosts import Host
from elastic_driver.settings.settings import Settings
from elastic_driver.version import __version__

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's, with a script that needs this package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import elastic_driver.torch as hvd\n")
    return tmp_path


def python_that_says(folder: Path, words: str) -> Path:
    """A program called python, first on nobody's PATH yet."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    return program


def fresh_python(folder: Path) -> Path:
    """A virtual environment with nothing in it."""
    (folder / "bin").mkdir(parents=True)
    base = Path(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (folder / "bin" / "python").symlink_to(base)
    return folder / "bin" / "python"


def package(folder: Path, name: str) -> None:
    """One that is there."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (folder / name / "version.py").write_text(f'__version__ = "{__version__}"\n')


def test_one_without_the_package_is_named_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = python_that_says(folder, "echo 3.9.2")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    said = other_python(("python", "train.py"), folder)
    assert said.startswith(
        f"the workers run a different Python than elasticrun: 'python' is {program} (Python 3.9.2), which has no "
        "elastic_driver: "
    )
    assert said.endswith(f"use {sys.executable} instead")
    assert "\n" not in said
    command = ("python", "train.py")
    settings = Settings(command=command, num_proc=1, min_num_proc=1, hosts=(Host("localhost", 1),))
    assert check_python(settings) == [said]


def test_workers_that_are_elsewhere_have_the_python_that_is_there(folder: Path) -> None:
    command = (str(python_that_says(folder, "echo 3.9.2")), "train.py")
    settings = Settings(command=command, num_proc=1, min_num_proc=1, hosts=(Host("elsewhere", 1),))
    assert check_python(settings) == []


@pytest.mark.parametrize(
    ("script", "is_named"),
    [
        ("import torch\n", False),
        ("import horovod.torch as hvd\n", True),
        ("import lib\n", True),
        (None, False),
    ],
    ids=["neither", "Horovod's", "by a module beside it", "it cannot be read"],
)
def test_a_script_that_needs_no_package_runs_with_any_python(folder: Path, script: str | None, is_named: bool) -> None:
    program = python_that_says(folder, "echo 3.9.2")
    (folder / "lib.py").write_text("from elastic_driver import init\n")
    if script is not None:
        (folder / "other.py").write_text(script)
    assert bool(other_python((str(program), "-u", "other.py"), folder)) == is_named


def test_one_with_another_version_is_named(folder: Path) -> None:
    program = python_that_says(folder, "echo 3.12.1 0.0.1")
    assert f"{program} (Python 3.12.1), which has elastic_driver 0.0.1, not {__version__}: " in other_python(
        (str(program), "train.py"), folder
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"echo 3.12.1 {__version__}", id="it has this version"),
        pytest.param("exit 1", id="it fails"),
        pytest.param("echo", id="it says nothing"),
    ],
)
def test_nothing_is_said_of_one_that_may_be_right(folder: Path, words: str) -> None:
    assert other_python((str(python_that_says(folder, words)), "train.py"), folder) == ""


def test_this_one_is_not_asked(folder: Path) -> None:
    assert other_python((sys.executable, "train.py"), folder) == ""
    assert other_python(("true",), folder) == ""
    assert other_python(("/no/such/python3", "train.py"), folder) == ""


def test_a_real_one_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fresh_python(folder / "venv")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    version = ".".join(str(part) for part in sys.version_info[:3])
    said = other_python((str(program), "train.py"), folder)
    assert f"(Python {version}), which has no elastic_driver: " in said
    # With this package's folder it has it, and in this version.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    assert other_python((str(program), "train.py"), folder) == ""
    assert "has no elastic_driver" in other_python((str(program), "-E", "train.py"), folder)


def test_it_looks_where_the_script_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the script's folder, not the one that the job is started in: a checkout of this package, say."""
    program = fresh_python(folder / "venv")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    package(folder, "elastic_driver")
    assert other_python((str(program), "train.py"), folder) == ""
    (folder / "scripts").mkdir()
    (folder / "train.py").rename(folder / "scripts" / "train.py")
    assert "has no elastic_driver" in other_python((str(program), "scripts/train.py"), folder)


def test_horovods_own_library_does_without_this_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fresh_python(folder / "venv")
    package(folder / "packages", "horovod")
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))
    (folder / "theirs.py").write_text("import horovod.torch as hvd\n")
    assert other_python((str(program), "theirs.py"), folder) == ""
    assert "has no elastic_driver" in other_python((str(program), "train.py"), folder)


def test_a_wrapper_that_hangs_is_named_and_ends_with_its_child(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "never")
    program = python_that_says(folder, f"cat {folder}/never &\necho $!\nwait")
    children = []

    def time_out(process: subprocess.Popen[str], timeout: float) -> None:
        assert process.stdout is not None
        children.append(psutil.Process(int(process.stdout.readline())))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", time_out)
    said = other_python((str(program), "train.py"), folder)
    assert said == (
        "the workers run a different Python than elasticrun, and it is unknown whether it has elastic_driver: "
        f"{program}, which did not answer within 5 s"
    )
    (child,) = children
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()  # it has been killed, and ends when it is its turn
