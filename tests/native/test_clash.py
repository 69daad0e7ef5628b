"""Our Gloo and PyTorch's in one process: 300 symbols have the same names, and both must work, whoever comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

BOTH = """
import os, sys, tempfile, threading
{imports}
import numpy as np
import torch.distributed as dist

native = load()
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
members = [native.ContextGroup([("global", [0, 1], rank)], host="127.0.0.1") for rank in range(2)]
blobs = [member.prepare() for member in members]
def work(rank):
    members[rank].connect(blobs, 3600.0)
    for _ in range(50):
        data = np.ones(10000, np.float32)
        members[rank].allreduce("global", data, "float32", "sum", 3600.0)
        assert data[0] == 2
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
for _ in range(50):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0] == 1
[thread.join() for thread in threads]
[member.close() for member in members]
dist.destroy_process_group()
print("both work")
"""
GLOBALLY = "sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL); import torch; sys.setdlopenflags(os.RTLD_NOW)"
OURS = "from elastic_driver.worker.engine.native_loader import load; load()"


# What clashes where symbols are not global, clashes where they are.
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(f"import torch\n{OURS}", id="torch first", marks=pytest.mark.release),
        pytest.param(f"{OURS}\nimport torch", id="ours first", marks=pytest.mark.release),
        pytest.param(f"{GLOBALLY}\n{OURS}", id="torch first, global symbols"),
        pytest.param(f"{OURS}\n{GLOBALLY}", id="ours first, torch with global symbols"),
    ],
)
def test_both_work_in_one_process(imports: str) -> None:
    pytest.importorskip("torch")
    program = BOTH.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "both work\n", done.stderr
    assert done.returncode == 0, done.stderr
