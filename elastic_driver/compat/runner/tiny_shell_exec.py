"""``horovod.runner.common.util.tiny_shell_exec``: the output of a shell command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from elastic_driver.errors import in_words

__all__ = ["execute"]


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Run a command in a shell.

    Args:
        command: a command line for ``/bin/sh``.
        env: its whole environment; by default this process's.

    Returns:
        Its output, with standard output and standard error merged, and its exit code; None if it cannot be run.
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
