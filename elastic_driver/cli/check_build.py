"""The output of ``elasticrun --check-build``: which parts of this installation work, and why others do not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings

from elastic_driver.errors import in_words
from elastic_driver.system.mechanisms import MECHANISMS
from elastic_driver.version import __version__


def report() -> str:
    """Return several lines for the user."""
    lines = [f"elastic_driver {__version__}, Python {sys.version.split()[0]}", "", "Interfaces:"]
    wrong = {module: _why_not(module) for module in ("torch", "numpy")}
    lines.append(_line(not wrong["torch"], "PyTorch (elastic_driver.torch)", wrong["torch"]))
    lines.append(_line(not wrong["numpy"], "numpy (elastic_driver)", wrong["numpy"]))
    if not wrong["torch"]:
        lines += _private_parts()
    lines += ["", "Collectives:"]
    try:
        from elastic_driver.worker.engine.native_loader import load

        load()
    except ImportError as error:
        lines.append(_line(False, "native Gloo extension", str(error)))
    else:
        lines.append(
            _line(True, "native Gloo extension (shared memory and TCP; not Gloo's own transports, as ibverbs)", "")
        )
    lines.append(_line(not wrong["torch"], "PyTorch's Gloo (used instead, by PyTorch users)", wrong["torch"]))
    lines += ["", "Mechanisms of this machine's kernel (docs/platforms.md):", *_mechanisms()]
    return "\n".join([*lines, *_as_horovod_prints_it(has_torch=not wrong["torch"])])


def _why_not(module: str) -> str:
    """Return why a module cannot be imported; "" if it can."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a library is missing, or of another version
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _private_parts() -> list[str]:
    """Return the consequences of a changed torch."""
    import torch

    from elastic_driver.torch_private.features import tried_with
    from elastic_driver.torch_private.lost import lost

    lines = ["", f"Features that depend on private APIs of PyTorch ({torch.__version__}; tested with {tried_with()}):"]
    with warnings.catch_warnings(action="ignore"):  # of torch's own imports
        gone = lost()
    return lines + ([_line(False, each, "") for each in gone] or [_line(True, "all available", "")])


def _mechanisms() -> list[str]:
    """Return a line for each mechanism: whether it works here, and what is lost without it."""
    lines = []
    for mechanism in MECHANISMS:
        try:
            why = mechanism.why_not()
        except OSError as error:
            lines.append(_line(False, mechanism.name, f"cannot check this: {in_words(error)}"))
        else:
            lines.append(_line(not why, mechanism.name, f"{why}: {mechanism.lost}"))
    return lines


def _as_horovod_prints_it(*, has_torch: bool) -> list[str]:
    """Return the lines of ``horovodrun --check-build``, for programs that search for them."""
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
