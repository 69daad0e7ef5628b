"""A command that runs another Python than elasticrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic_driver.hosts import Host
from elastic_driver.settings.other_python import is_python, other_python
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import Settings
from elastic_driver.version import __version__

pytestmark = pytest.mark.unit


def python_that_says(folder: Path, words: str) -> Path:
    """A program called python, first on nobody's PATH yet."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    return program


def test_one_without_the_package_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = python_that_says(tmp_path, "echo 3.9.2")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = other_python(("python", "train.py"))
    assert said.startswith(
        f"the workers run another Python than elasticrun: 'python' is {program} (Python 3.9.2), which has no "
        "elastic_driver: "
    )
    assert said.endswith(f"write {sys.executable} in its place")
    assert "\n" not in said
    settings = Settings(command=("python", "-m", "x"), num_proc=1, min_num_proc=1, hosts=(Host("localhost", 1),))
    assert preflight(settings) == [said]
    assert preflight(settings, runs_already=True) == []


def test_workers_that_are_elsewhere_have_the_python_that_is_there(tmp_path: Path) -> None:
    program = python_that_says(tmp_path, "echo 3.9.2")
    settings = Settings(command=(str(program), "x"), num_proc=1, min_num_proc=1, hosts=(Host("elsewhere", 1),))
    assert preflight(settings) == []


def test_one_with_another_version_is_named(tmp_path: Path) -> None:
    program = python_that_says(tmp_path, "echo 3.12.1 0.0.1")
    assert f"{program} (Python 3.12.1), which has elastic_driver 0.0.1, not {__version__}: " in other_python(
        (str(program), "train.py")
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"echo 3.12.1 {__version__}", id="it has this version"),
        pytest.param("exit 1", id="it fails"),
        pytest.param("echo", id="it says nothing"),
    ],
)
def test_nothing_is_said_of_one_that_may_be_right(tmp_path: Path, words: str) -> None:
    assert other_python((str(python_that_says(tmp_path, words)), "train.py")) == ""


def test_this_one_is_not_asked() -> None:
    assert other_python((sys.executable, "train.py")) == ""
    assert other_python(("true",)) == ""
    assert other_python(("/no/such/python3",)) == ""
    assert not is_python("/usr/bin/pythonista")


def test_a_real_one_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment with nothing in it."""
    (tmp_path / "bin").mkdir()
    base = Path(os.path.realpath(sys.executable))
    (tmp_path / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (tmp_path / "bin" / "python").symlink_to(base)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    version = ".".join(str(part) for part in sys.version_info[:3])
    said = other_python((str(tmp_path / "bin" / "python"), "train.py"))
    assert f"(Python {version}), which has no elastic_driver: " in said
    # With this package's folder it has it, and in this version.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    assert other_python((str(tmp_path / "bin" / "python"), "train.py")) == ""
