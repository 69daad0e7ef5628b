"""Whether a job's command runs another Python than this one, which has none of what is installed here.

Owns the question to that Python. It is started only where its place says that it is another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.version import __version__

_PYTHON = re.compile(r"python[0-9.]*")
# A Python starts in a fraction of a second. One that does not is left to the job.
_PATIENCE_S = 10.0
# The version file is read, not imported: the package's folder may be another one, with other ideas of what to import.
_ASK = """
import importlib.util, pathlib, re, sys
found = importlib.util.find_spec("elastic_driver")
folders = list(found.submodule_search_locations or ()) if found else []
texts = [path.read_text() for path in (pathlib.Path(folder, "version.py") for folder in folders) if path.is_file()]
versions = [match[1] for match in (re.search('^__version__ = "(.*)"', text, re.M) for text in texts) if match]
print("%d.%d.%d" % sys.version_info[:3], *versions[:1])
"""


def is_python(program: str) -> bool:
    """Whether a command's first word names a Python interpreter."""
    return _PYTHON.fullmatch(Path(program).name) is not None


def other_python(command: Sequence[str]) -> str:
    """One sentence for the user where the command's Python has not this package in this version; else ""."""
    program = command[0]
    found = shutil.which(program) if is_python(program) else None
    if found is None or _place(found) == _place(sys.executable):
        return ""
    has = _versions(found, [word for word in command[1:2] if word in ("-I", "-E")])
    if not has or has[1:] == [__version__]:
        return ""
    lacks = f"has elastic_driver {has[1]}, not {__version__}" if has[1:] else "has no elastic_driver"
    where = f"{program!r} is {found}" if program != found else found
    activate = Path(sys.prefix, "bin", "activate")
    way = f"activate this one's environment (. {activate}), or write" if activate.is_file() else "write"
    return (
        f"the workers run another Python than elasticrun: {where} (Python {has[0]}), which {lacks}: {way} "
        f"{sys.executable} in its place"
    )


def _place(interpreter: str) -> tuple[str, str]:
    """What decides where an interpreter looks for packages: its folder, as in a virtual environment, and its file."""
    return os.path.realpath(Path(interpreter).parent), os.path.realpath(interpreter)


def _versions(interpreter: str, flags: Sequence[str]) -> list[str]:
    """The interpreter's version, and that of the package where it has one; nothing where it does not say."""
    try:
        done = subprocess.run(
            [interpreter, *flags, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
