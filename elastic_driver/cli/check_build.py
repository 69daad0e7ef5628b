"""What ``elasticrun --check-build`` prints: which parts of this installation work, and why others do not."""

from __future__ import annotations

import importlib.util
import sys

from elastic_driver.version import __version__


def report() -> str:
    """Several lines for the user."""
    lines = [f"elastic_driver {__version__}, Python {sys.version.split()[0]}", "", "Interfaces:"]
    for module, text in (("torch", "PyTorch (elastic_driver.torch)"), ("numpy", "numpy (elastic_driver)")):
        lines.append(_line(importlib.util.find_spec(module) is not None, text, f"{module} is not installed"))
    lines += ["", "Collectives:"]
    try:
        from elastic_driver.worker.engine.native_loader import load

        load()
    except ImportError as error:
        lines.append(_line(False, "native Gloo extension", str(error)))
    else:
        lines.append(_line(True, "native Gloo extension", ""))
    torch = importlib.util.find_spec("torch") is not None
    lines.append(_line(torch, "PyTorch's Gloo (takes its place for PyTorch users)", "torch is not installed"))
    return "\n".join([*lines, *_as_horovod_prints_it(has_torch=torch)])


def _as_horovod_prints_it(*, has_torch: bool) -> list[str]:
    """The lines of ``horovodrun --check-build``, for programs that look for them."""
    from elastic_driver.worker.launched import across

    has_mpi = across.is_installed()
    sections = {
        "Frameworks": {"TensorFlow": False, "PyTorch": has_torch, "MXNet": False},
        "Controllers": {"MPI": has_mpi, "Gloo": True},
        "Tensor Operations": {"NCCL": False, "DDL": False, "CCL": False, "MPI": False, "Gloo": True},
    }
    lines = []
    for name, parts in sections.items():
        lines += ["", f"Available {name}:", *(_line(there, part, "") for part, there in parts.items())]
    return lines


def _line(available: bool, text: str, reason: str) -> str:  # noqa: FBT001 - the mark's state
    return f"    [{'X' if available else ' '}] {text}" + (f": {reason}" if reason and not available else "")
