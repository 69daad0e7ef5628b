"""A quarter of a minute of the soak, on this machine and over several, and of a machine that is far too busy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.network.namespaces import cannot_make_namespaces, cannot_serve_ssh

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def run(script: str, *words: str) -> str:
    ran = subprocess.run(
        [ROOT / "scripts" / script, *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "ELASTIC_PYTHON": sys.executable},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def skip_without_machines() -> None:
    if reason := cannot_make_namespaces() or cannot_serve_ssh():
        pytest.skip(reason)


def test_random_faults() -> None:
    assert "soak: ok" in run("soak", "0.2", "1", "--forking")


@pytest.mark.machines
def test_random_faults_of_machines() -> None:
    skip_without_machines()
    assert "soak: ok" in run("soak", "0.25", "1", "--hosts", "3")


@pytest.mark.machines
@pytest.mark.skipif(shutil.which("stress-ng") is None, reason="needs stress-ng (scripts/install-test-hosts)")
def test_a_busy_machine_gives_nobody_up() -> None:
    skip_without_machines()
    assert "stress: ok" in run("soak-stress", "0.25")
