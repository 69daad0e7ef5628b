"""scripts/try-wheel with Pythons that are stand-ins: they note what they are asked, and in which environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A virtual environment of it has the same program, and an elasticrun whose job is as it should be.
PYTHON = """#!/bin/sh
echo "$* $PYTHONPATH,$PYTHONHOME,$ELASTIC_DRIVER_DEBUG" >>{notes}
case "$*" in
    "-c import sys"*) echo {version} ;;
    "-m venv "*) {venv} ;;
esac
"""
VENV = """
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho elasticrun $PYTHONPATH,$PYTHONHOME,$ELASTIC_DRIVER_DEBUG >>{notes}
{job}\\n' >"$3/bin/elasticrun"
    chmod 755 "$3/bin/elasticrun" """
NO_VENV = "echo install python3-venv; exit 1"
JOB = "echo total 3 backend native; echo total 3 backend native"

pytestmark = pytest.mark.integration


class Trial:
    """A folder with a wheel, and Pythons to try it with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.wheel = folder / "elastic_driver-1-py3-none-any.whl"
        self.wheel.touch()
        self.pythons: list[Path] = []

    def python(self, version: str, *, venv: str = VENV, job: str = JOB) -> None:
        """One more."""
        path = self.folder / version
        venv = venv.format(notes=self.notes, job=job)
        path.write_text(PYTHON.format(notes=self.notes, version=version, venv=venv))
        path.chmod(0o755)
        self.pythons.append(path)

    def run(self) -> subprocess.CompletedProcess[str]:
        """Tries the wheel from a terminal whose variables lead elsewhere."""
        env = {**os.environ, "PYTHONPATH": "/a/checkout", "PYTHONHOME": "/usr", "ELASTIC_DRIVER_DEBUG": "1"}
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "try-wheel"), str(self.wheel)],
            env={**env, "PYTHONS": " ".join(map(str, self.pythons))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
        )


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_no_variable_leads_to_another_package_than_the_wheels(trial: Trial) -> None:
    trial.python("3.11.9")
    done = trial.run()
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"{trial.wheel.name}: Python 3.11.9: two workers\n"
    notes = trial.notes.read_text().splitlines()
    assert sum(note.startswith("elasticrun ") for note in notes) == 2, notes
    assert any(note.startswith("load.py ") for note in notes), notes
    assert all(note.endswith(" ,,") for note in notes), notes


def test_a_python_that_makes_no_environment_does_not_end_the_trial(trial: Trial) -> None:
    trial.python("3.12.1", venv=NO_VENV)
    trial.python("3.11.9")
    trial.python("3.13.0", job="echo total 1 backend torch")
    done = trial.run()
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines() == [
        f"{trial.wheel.name}: Python 3.12.1: not tried: {trial.pythons[0]} makes no virtual environment",
        "    install python3-venv",
        f"{trial.wheel.name}: Python 3.11.9: two workers",
        f"{trial.wheel.name}: Python 3.13.0: FAILED",
        "    total 1 backend torch",
        "    total 1 backend torch",
    ]


def test_a_wheel_that_was_tried_with_none_has_not_passed(trial: Trial) -> None:
    trial.python("3.12.1", venv=NO_VENV)
    assert trial.run().returncode == 2
