"""The faults made by hand (scripts/mutate) fit into the program as it is: one that does not is put nowhere, and proves
nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.unit


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_loader("mutate", SourceFileLoader("mutate", str(ROOT / "scripts" / "mutate")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutate", module)  # its dataclasses ask for it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    return module


def test_each_fault_fits_in_one_place_and_asks_tests_that_there_are(mutate: Any) -> None:
    faults = mutate.faults()
    assert faults
    for fault in faults:
        text = (ROOT / fault.path).read_text(encoding="utf-8")
        assert fault.put_into(text) != text
        files = [word.partition("::")[0] for words in fault.questions for word in words if word.startswith("tests/")]
        assert files, fault.why
        assert [name for name in files if not (ROOT / name).exists()] == []
