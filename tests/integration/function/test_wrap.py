"""Programs that start torchrun's workers themselves, under ``elasticrun wrap``."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes.jobs import PATIENCE_S

pytestmark = pytest.mark.integration

_WORKER = """
import os, signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
names = ("RANK", "WORLD_SIZE", "ELASTIC_DRIVER_WORKER", "OF_THE_PROGRAM")
print("runs", *(os.environ[name] for name in names), "wrap_hook" in os.environ["PYTHONPATH"], *sys.argv[1:], flush=True)
if "stay" in sys.argv:
    signal.pause()
"""


def wrapped(*words: str) -> list[str]:
    return [sys.executable, "-m", "elastic_driver.cli.main", "wrap", *words]


def test_torchs_own_launcher_runs_its_workers_by_elasticrun(tmp_path: Path) -> None:
    """As accelerate does: in the program's own process, with variables of its own. And the flag that launch adds.

    The program does so twice, as it imports torch for seconds. The second time it ends by a signal.
    """
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(_WORKER)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from torch.distributed import launch\n"
        "os.environ['OF_THE_PROGRAM'] = 'bf16'\n"
        "launch.main(['--nproc-per-node=2', *sys.argv[1:]])\n"
        "print('the program goes on', flush=True)\n"
        "launch.main(['--nproc-per-node=2', *sys.argv[1:], 'stay'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = wrapped(sys.executable, str(program), str(script))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        said = list(itertools.takewhile("the program goes on\n".__ne__, process.stdout))
        for rank in range(2):
            line = f"[{rank}]<stdout>:runs {rank} 2 localhost[{rank}]#0 bf16 False --local-rank={rank}\n"
            assert line in said
        assert all("runs" in process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().count("saved") == 2, "it ends after its workers"
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_python_dash_m_in_torchruns_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    command = [sys.executable, "-m", "elastic_driver.torchrun", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[0]<stdout>:0 1\n"
