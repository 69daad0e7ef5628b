"""The environment of a program that is wrapped, and what its workers get of it."""

from __future__ import annotations

import os

import pytest

from elastic_driver.function.wrapping import hooked, unhooked
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("environ", [{"A": "b"}, {"A": "b", "PYTHONPATH": "/one:/two"}])
def test_workers_get_what_the_program_got_without_the_hook(environ: dict[str, str]) -> None:
    inside = hooked(environ)
    first, *others = inside["PYTHONPATH"].split(os.pathsep)
    assert os.path.exists(f"{first}/sitecustomize.py")
    assert first not in unhooked(inside).get("PYTHONPATH", "")
    assert others[:2] == environ.get("PYTHONPATH", "").split(os.pathsep)[:2] or "PYTHONPATH" not in environ
    assert unhooked(environ) == environ


def test_a_program_that_is_not_there() -> None:
    ran = elasticrun("wrap", "no-such-program", "launch")
    assert ran.returncode == 2
    assert "cannot run 'no-such-program': No such file or directory" in ran.stderr
