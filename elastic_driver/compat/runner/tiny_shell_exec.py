"""``horovod.runner.common.util.tiny_shell_exec``: what a command says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from elastic_driver.errors import in_words

__all__ = ["execute"]


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Runs a command in a shell: what it says, on both streams together, and its exit code.

    Args:
        command: for ``/bin/sh``.
        env: all variables; those of this process by default.

    Returns:
        None when it cannot be run.
    """
    try:
        done = subprocess.run(
            command,
            shell=True,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, ValueError) as error:
        print(f"cannot run {command!r}: {in_words(error)}", file=sys.stderr)
        return None
    return done.stdout, done.returncode
