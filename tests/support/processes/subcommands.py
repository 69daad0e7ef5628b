"""elasticrun in the test's own process, for subcommands and what is refused: it takes next to nothing there."""

from __future__ import annotations

import contextlib
import io
import subprocess

import pytest

from elastic_driver.cli.main import main

Ran = subprocess.CompletedProcess[str]


def elasticrun(*words: str, **env: str) -> Ran:
    """What ``elasticrun WORDS`` says, and its exit code. With these variables beside those that are set."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
