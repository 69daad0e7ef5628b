"""Half a minute of the soak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_half_a_minute_of_random_faults() -> None:
    ran = subprocess.run(
        [ROOT / "scripts" / "soak", "0.5", "1"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "ELASTIC_PYTHON": sys.executable},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "soak: ok" in ran.stdout
