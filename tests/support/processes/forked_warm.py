"""The warmed process of an agent, forked from one that has imported what workers do, for tests of whole jobs.

To import it takes a third of a second of a processor, and four seconds with PyTorch. What the product does with a
warmed process is the same: its hook (elastic_driver/launch/warm/hook) runs in it, and clones it for each worker. What
Python does before and after that is imitated, so only a command that is Python, a script and its arguments has this
one. Others start afresh, as does the second of an agent, and as all do in a release.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_driver.launch.warm import forks
from tests.support.processes import forked
from tests.support.processes.spare import Spare

_SCRIPT = forks.HOOK / "sitecustomize.py"


def fork_warmed() -> None:
    """From now on this process, an agent that has not begun, has its first warmed process forked from itself."""
    spares = [Spare(_hold)]

    def start(command: Sequence[str], **given: Any) -> subprocess.Popen[bytes] | Spare:
        is_script = len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py")
        if not (spares and is_script):
            return subprocess.Popen(command, **given)
        spare = spares.pop()
        spare.begin(command, **given)
        return spare

    forks.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def _hold(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Is as Python when site has it import the hook; returns from there in clones only, which are workers."""
    sys.orig_argv[:], sys.argv = command, list(command[1:])
    script = Path(command[1]).absolute()
    folders = [str(script.resolve().parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
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
        exec(compile(_SCRIPT.read_bytes(), str(_SCRIPT), "exec"), vars(hook))
    forked.run_main(str(script))
