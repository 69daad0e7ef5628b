"""Whether a worker's ``import horovod`` loads Horovod's own library: then it is served in the older protocol.

Owns asking the workers' Python, which may be another than this process's, once for each. The complete rule is in
docs/horovod.md.
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

# How long a Python read from a slow disk may take to start.
_LIMIT_S = 30.0
# Runs in the workers' Python. The stand-in for Horovod is on its path, but must not count.
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
    """Detects workers with Horovod's own library, and remembers the answers. Used on the event loop only."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], asyncio.Task[bool | None]] = {}

    async def is_horovods(self, command: tuple[str, ...], env: Mapping[str, str], folder: str) -> bool:
        """Return whether workers with this command and environment use Horovod's own library.

        Args:
            command: the command that they run.
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
            del self._known[key]  # ask again for the next worker: the disk may have been slow, or the machine busy
        return answer is True


async def _ask(python: str, env: Mapping[str, str], folder: str) -> bool | None:
    """Ask that Python; None if it does not answer in time, or fails."""
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
            start_new_session=True,  # it may be a wrapper, which is ended with all of its children
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
