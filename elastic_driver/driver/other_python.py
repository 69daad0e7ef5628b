"""Check whether a job's command runs another Python than this one, which lacks the packages installed here.

Owns the question to that Python. It is started only if its path differs, and only for a script that visibly imports
this library, or Horovod: other scripts run with any Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.launch.warm.preload import is_python
from elastic_driver.launch.warm.program import Program
from elastic_driver.settings.preflight import lists_this_machine
from elastic_driver.settings.settings import Settings
from elastic_driver.version import __version__

# A Python starts in a fraction of a second. A slower one is not waited for.
_PATIENCE_S = 5.0
# Options that change where Python looks for packages.
_OPTIONS = ("-I", "-E", "-P")
# The version file is read, not imported: the package's folder may be another one, with other imports. Python puts first
# on its path this process's folder here (""), and the script's in the job.
_ASK = """
import importlib.util, pathlib, re, sys
folder, *instead = sys.argv[1:]
if sys.path[:1] == [""]:
    sys.path[0] = folder
if any(importlib.util.find_spec(name) for name in instead):
    sys.exit()
found = importlib.util.find_spec("elastic_driver")
folders = list(found.submodule_search_locations or ()) if found else []
texts = [path.read_text() for path in (pathlib.Path(folder, "version.py") for folder in folders) if path.is_file()]
versions = [match[1] for match in (re.search('^__version__ = "(.*)"', text, re.M) for text in texts) if match]
print("%d.%d.%d" % sys.version_info[:3], *versions[:1])
"""


def check_python(settings: Settings) -> list[str]:
    """Return warnings on the Python of workers on this machine, if the settings list it; often none.

    Args:
        settings: those of the job, before its workers have been started.
    """
    said = other_python(settings.command, Path.cwd()) if lists_this_machine(settings) else ""
    return [said] if said else []


def other_python(command: Sequence[str], cwd: Path) -> str:
    """Return a warning if the command's Python lacks what its script imports of this package; otherwise "".

    Args:
        command: what each worker runs.
        cwd: its working directory.
    """
    program = command[0]
    found = shutil.which(program) if is_python(program) else None
    if found is None or _place(found) == _place(sys.executable):
        return ""
    options = [word for word in command[1:2] if word in _OPTIONS]
    script = Program((program, *command[1 + len(options) :]), cwd)
    needs_ours = script.imports("elastic_driver")
    if not needs_ours and not script.imports("horovod"):
        return ""
    # With Horovod's own library, a script for Horovod does not need this one.
    answer = _ask([found, *options, "-c", _ASK, str(script.folder), *([] if needs_ours else ["horovod"])])
    where = f"{program!r} is {found}" if program != found else found
    if answer is None:
        return (
            "the workers run a different Python than elasticrun, and it is unknown whether it has elastic_driver: "
            f"{where}, which did not answer within {_PATIENCE_S:g} s"
        )
    if not answer or answer[1:] == [__version__]:
        return ""
    lacks = f"has elastic_driver {answer[1]}, not {__version__}" if answer[1:] else "has no elastic_driver"
    activate = Path(sys.prefix, "bin", "activate")
    way = f"activate elasticrun's environment (. {activate}), or use" if activate.is_file() else "use"
    return (
        f"the workers run a different Python than elasticrun: {where} (Python {answer[0]}), which {lacks}: {way} "
        f"{sys.executable} instead"
    )


def _place(interpreter: str) -> tuple[str, str]:
    """Return what determines an interpreter's packages: its folder, as in a virtual environment, and its file."""
    return os.path.realpath(Path(interpreter).parent), os.path.realpath(interpreter)


def _ask(command: Sequence[str]) -> list[str] | None:
    """Return the interpreter's version, and that of the package if it has one; [] if it fails.

    None if it does not respond in time. It may be a wrapper: its child processes are killed with it.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except OSError:
        return []
    with process:
        try:
            said, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return said.split() if process.returncode == 0 else []
