"""The driver is built whole: no part of it goes on with a default that is there for tests."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from elastic_driver.driver import build

pytestmark = pytest.mark.unit

# What a driver has no use for.
LEFT_OUT = {"RendezvousServer": {"limits", "on_worker_gone"}}
PARTS = {
    "AgentRequests",
    "DriverStandstills",
    "Health",
    "Interrupts",
    "JobEnd",
    "JobStatus",
    "Page",
    "RendezvousServer",
    "Rounds",
}


def test_each_part_is_given_all_that_it_can_have() -> None:
    seen = set()
    for call in ast.walk(ast.parse(Path(build.__file__).read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in PARTS:
            name = call.func.id
            parameters = [*inspect.signature(getattr(build, name)).parameters]
            given = {*parameters[: len(call.args)], *(keyword.arg for keyword in call.keywords)}
            assert set(parameters) - given == LEFT_OUT.get(name, set()), name
            seen.add(name)
    assert seen == PARTS
