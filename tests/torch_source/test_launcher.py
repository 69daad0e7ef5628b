"""torch's own tests of torchrun, as they are, with elasticrun in torchrun's place (``elasticrun wrap``).

Run where PyTorch's source is: ``--torch-source DIR``, see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# What cannot hold here, by the name of the test, and why.
_OTHERWISE = {
    "test_launch_elastic_agent_raise_exception": "looks into torch's agent, which does not run",
    "test_launch_elastic_worker_raise_exception": "counts the events that torch's agent records",
    "test_launch_shutdown": "looks into torch's agent, which does not run",
    "test_capture_logs_using_default_logs_specs": "looks for output in sys.stdout, not in standard output",
    # torch 2.13 fails it itself: older tests replace functions that it no longer asks.
    "test_nproc_gpu_launch_configurations": "is of an older torch",
}
_LIMIT_S = 540


@pytest.mark.timeout(_LIMIT_S + 60)
@pytest.mark.parametrize("file", ["test_run.py", "launch_test.py"])
def test_torchs_own_tests(file: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = request.config.getoption("--torch-source")
    if source is None:
        pytest.skip("no source of PyTorch is given: --torch-source DIR")
    for module in ("torch", "expecttest"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module}")
    path = Path(source).absolute() / "test/distributed/launcher" / file
    chosen = " and ".join(f"not {name}" for name in _OTHERWISE)
    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(path.parent), "-k", chosen]
    wrap = [sys.executable, "-m", "elastic_driver.cli.main", "wrap"]
    command = [*wrap, sys.executable, "-m", "pytest", *words, str(path)]
    search = [str(ROOT), *(entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_LIMIT_S, check=False, cwd=tmp_path)
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert passed is not None
    assert int(passed[1]) > 0
