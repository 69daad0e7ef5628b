"""Kills, freezes and changed rounds while operations run in the device lane, with CPU tensors in the devices' place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import usable_backends

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine")
def test_faults_in_the_device_lane() -> None:
    ran = subprocess.run(
        [ROOT / "scripts" / "soak", "0.2", "7", "--forking"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "ELASTIC_PYTHON": sys.executable, "ELASTIC_DRIVER_DEVICE_LANE": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
