"""Reads of peers' private memory under Yama, which a library plays (yama.c): few kernels that tests run on have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import conftest  # noqa: F401 - skips these tests where there is no extension

ROOT = Path(__file__).resolve().parents[2]
# Three ranks, of which the last has a parent of its own, reduce 4 MB, and count what that takes of shared memory.
PROGRAM = """
import os, sys
import numpy as np
from tests.native.engines import EngineProcesses, allreduce, barrier, make_engine
from tests.native.test_engine import shared_memory_bytes

class Grandchild(EngineProcesses):
    @staticmethod
    def _main(rank, size, pipe, body, machines):
        if rank == 2:
            child = os.fork()
            if child:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        EngineProcesses._main(rank, size, pipe, body, machines)
        os._exit(0)

def body(engine, rank, pipe):
    array = np.ones(1 << 20, np.float32)
    allreduce(engine, array)
    assert set(array) == {3}
    barrier(engine)
    pipe.send(shared_memory_bytes())
    barrier(engine)

world = Grandchild(3, body)
print(os.getpid(), *[pipe.recv() for pipe in world.pipes])
for process in world.processes:
    process.join()
"""


@pytest.mark.parametrize(("scope", "direct"), [(0, True), (1, True), (2, False)])
def test_ranks_let_each_other_read(tmp_path: Path, scope: int, direct: bool) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "yama.so"
    source = Path(__file__).with_name("yama.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=200)
    (tmp_path / "scope").write_text(f"{scope}\n")
    environment = os.environ | {"LD_PRELOAD": str(library), "YAMA_SCOPE": str(scope), "YAMA_FOLDER": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    launcher, *taken = map(int, ran.stdout.split())
    assert len(taken) == 3
    assert all((each == 1 << 20) == direct for each in taken), taken  # else two slices' room beside the first MB
    declared = [int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert declared == ([launcher] * 3 if scope == 1 else [])
