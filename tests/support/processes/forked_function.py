"""The drivers of ``elastic_driver.run`` and ``elastic_launch``, forked from a process that has imported them."""

from __future__ import annotations

import functools
import subprocess
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastic_driver.function import launch
from tests.support.paths import PROGRAMS
from tests.support.processes import forked

_PROGRAM = PROGRAMS / "forked_function_driver.py"


def fork_drivers(monkeypatch: pytest.MonkeyPatch, *, torch: bool = False) -> None:
    """From now on, until the test's end, this process forks them. From what they are forked, runs when this returns.

    Args:
        monkeypatch: of the test.
        torch: whether their workers need PyTorch.
    """
    if not forked.starts_afresh():
        forked.start_driver_server(workers=True, torch=torch)
        start = functools.partial(_start, torch=torch)
        monkeypatch.setattr(launch, "subprocess", types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def _start(
    command: Sequence[str],
    *,
    torch: bool,
    stdin: int,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    start_new_session: bool,
) -> subprocess.Popen[bytes] | forked.ForkedProcess:
    assert start_new_session
    if pass_fds:  # to an object that names hosts: for few tests
        return subprocess.Popen(command, stdin=stdin, env=env, pass_fds=pass_fds, start_new_session=True)
    folder = command[3]
    return forked.start_driver([str(_PROGRAM), folder], dict(env), 1, 2, Path.cwd(), workers=True, torch=torch)
