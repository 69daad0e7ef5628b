"""Whether a worker's ``import horovod`` gives Horovod's own library: then it is served in the older protocol.

Owns the asking of the workers' Python, which may be another than this process's, once for each. The rule, in full, is
in docs/horovod.md.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from elastic_driver.dialects.horovod_shim import ALWAYS, ENV_SHIM, SHIM_FOLDER
from elastic_driver.launch.warm.preload import is_python
from elastic_driver.launch.warm.program import Program

# What a Python that has to be read from a slow disc may take to start.
_LIMIT_S = 30.0
# Runs in the workers' Python. The stand-in for Horovod is on its path, and is none.
_ASK = """
import os, sys
from importlib.machinery import PathFinder
shim, *first = map(os.path.abspath, sys.argv[1:])
path = sys.path[1:] if sys.path[:1] == [""] else sys.path  # which "-P" leaves out
folders = [folder for folder in [*first, *path] if os.path.abspath(folder or os.curdir) != shim]
specs = [PathFinder.find_spec("horovod", folders)]
for finder in sys.meta_path:
    if finder is not PathFinder and hasattr(finder, "find_spec"):
        specs.append(finder.find_spec("horovod", None))
origins = [spec.origin for spec in specs if spec is not None and spec.origin]
print(any(os.path.isfile(os.path.join(os.path.dirname(origin), "common", "basics.py")) for origin in origins))
"""


class Detection:
    """See above. Used on the event loop only."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], asyncio.Task[bool | None]] = {}

    async def is_horovods(self, command: tuple[str, ...], env: Mapping[str, str], folder: str) -> bool:
        """Whether workers with this command and environment are Horovod's own.

        Args:
            command: what they run.
            env: their environment.
            folder: their working directory.
        """
        if env.get(ENV_SHIM) == ALWAYS or Program(command, Path(folder)).imports("horovod") is False:
            return False
        python = command[0] if command and is_python(command[0]) else "python3"
        found = shutil.which(python, path=env.get("PATH"))
        if found is None:
            return False
        key = (found, env.get("PYTHONPATH", ""), folder)
        if key not in self._known:
            self._known[key] = asyncio.get_running_loop().create_task(_ask(found, env, folder))
        asked = self._known[key]
        answer = await asyncio.shield(asked)
        if answer is None and self._known.get(key) is asked:
            del self._known[key]  # the next worker may have more luck: a disc that was slow, a machine that was busy
        return answer is True


async def _ask(python: str, env: Mapping[str, str], folder: str) -> bool | None:
    """What that Python says; None when it says nothing in time, or fails."""
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            _ASK,
            SHIM_FOLDER,
            folder,
            env={**env, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=folder if os.path.isdir(folder) else None,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # it may be a wrapper, which ends with all that it has started
        )
        async with asyncio.timeout(_LIMIT_S):
            said, _ = await process.communicate()
    except (OSError, TimeoutError):
        return None
    finally:
        if process is not None and process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return {b"True": True, b"False": False}.get(said.strip().rpartition(b"\n")[2])
