"""The warmed process of an agent, forked from one that has imported what workers do, for tests of whole jobs.

To import it takes a third of a second of a processor, and four seconds with PyTorch. What the product does with a
warmed process is the same: its hook (elastic_driver/launch/warm/hook) runs in it, and clones it for each worker. What
Python does before and after that is imitated, so only a command that is Python, a script or a module (-m), and its
arguments has this one. Others start afresh, as does the second of an agent, and as all do in a release.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_driver.launch.warm import forks
from tests.support.processes import forked
from tests.support.processes.program_exit import run_to_exit
from tests.support.processes.spare import Spare

_SCRIPT = forks.HOOK / "sitecustomize.py"
_HOOK = compile(_SCRIPT.read_bytes(), str(_SCRIPT), "exec", dont_inherit=True)


def fork_warmed() -> None:
    """From now on this process, an agent that has not begun, has its first warmed process forked from itself."""
    spares = [Spare(_hold)]

    def start(command: Sequence[str], **given: Any) -> subprocess.Popen[bytes] | Spare:
        is_imitated = command[0] == sys.executable and (command[1] == "-m" or command[1].endswith(".py"))
        if not (spares and is_imitated):
            return subprocess.Popen(command, **given)
        spare = spares.pop()
        spare.begin(command, **given)
        return spare

    forks.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def _hold(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Is as Python when site has it import the hook; returns from there in clones only, which are workers."""
    module = command[2] if command[1] == "-m" else ""
    sys.orig_argv[:], sys.argv = command, [command[1], *command[3 if module else 2 :]]
    script = Path(command[1]).absolute()
    own = os.getcwd() if module else str(script.resolve().parent)
    folders = [own, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.path[:] = [folder for folder in dict.fromkeys(folders) if folder != str(forks.HOOK)]
    forked.take_environment(env)
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw: Any = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it stays open
        stream = io.TextIOWrapper(raw, "utf-8", errors, newline="\n", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    hook = sys.modules["sitecustomize"] = types.ModuleType("sitecustomize")
    hook.__file__ = str(_SCRIPT)
    with contextlib.suppress(ImportError):  # it hides no other sitecustomize
        exec(_HOOK, vars(hook))
    if module:
        run_to_exit(lambda: runpy._run_module_as_main(module))  # type: ignore[attr-defined]
    forked.run_main(str(script))
