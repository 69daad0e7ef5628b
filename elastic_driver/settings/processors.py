"""How many workers a machine can run: ``--nproc-per-node auto``, ``cpu``, ``gpu`` and ``xpu``.

Owns the counting of devices without loading a framework, which would take longer than the rest of a start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_TORCH_S = 120.0
_ASK_XPUS = "import torch; print(torch.xpu.device_count() if torch.xpu.is_available() else 0)"


def count_processes(text: str, environ: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """Parse a number, ``auto`` (GPUs, or processors if there are none), ``cpu``, ``gpu`` or ``xpu``.

    Args:
        text: the user's text.
        environ: determines which devices are visible.
        root: of the file system.

    Raises:
        ValueError: it is none of them, or there is no such device; a reason for the user.
    """
    if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        return int(text)
    match text.strip().lower():
        case "cpu":
            return len(os.sched_getaffinity(0))
        case "gpu":
            count = count_gpus(environ, root=root)
            if not count:
                raise ValueError("'gpu' cannot be used: no GPU is visible on this machine; give a number")
            return count
        case "auto":
            return count_gpus(environ, root=root) or len(os.sched_getaffinity(0))
        case "xpu":
            return _count_xpus()
        case _:
            raise ValueError(f"{text[:40]!r} is not a number, auto, cpu, gpu or xpu")


def count_gpus(environ: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """Count the NVIDIA or AMD devices visible to a process here, by their files and the variables that restrict
    them.
    """
    nvidia = [path for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdecimal()]
    if nvidia:
        return _visible(len(nvidia), environ.get("CUDA_VISIBLE_DEVICES"))
    if not (root / "dev/kfd").exists():
        return 0
    # A node of the topology that is a processor has the id 0.
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    count = sum(_read(path) not in ("", "0") for path in nodes)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        count = _visible(count, environ.get(variable))
    return count


def _visible(count: int, chosen: str | None) -> int:
    """Return how many devices a variable leaves visible, by CUDA's rules: an invalid entry ends the list."""
    if chosen is None:
        return count
    words = [word.strip() for word in chosen.split(",")]
    if words[0].startswith("MIG-"):
        return 1  # CUDA gives a process at most one part of a device
    seen: list[str] = []
    for word in words:
        if word.isdecimal():
            if int(word) >= count:
                break
        elif not re.fullmatch(r"(GPU-)?[0-9a-fA-F-]+", word) or word.startswith("-"):
            break
        if word in seen:
            return 0
        seen.append(word)
    return min(count, len(seen))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _count_xpus() -> int:
    """Ask PyTorch: no file shows which of the machine's Intel devices it supports."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_XPUS], capture_output=True, text=True, timeout=_TORCH_S, check=True
        )
        count = int(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise ValueError("'xpu' cannot be used: cannot query PyTorch for XPUs here; give a number") from None
    if count <= 0:
        raise ValueError("'xpu' cannot be used: PyTorch finds no XPU here; give a number")
    return count
