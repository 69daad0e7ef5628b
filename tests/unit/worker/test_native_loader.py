"""What is said where the native extension is not for this Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import elastic_driver
from elastic_driver.worker.engine import native_loader

pytestmark = pytest.mark.unit


def test_one_of_the_stable_abi_is_not_for_earlier_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would load it, and crash sooner or later."""
    extension = tmp_path / "_native.abi3.so"
    extension.touch()
    with monkeypatch.context() as patched:
        patched.setattr(native_loader, "_loaded", None)
        patched.setattr(native_loader, "_reason", "")
        patched.setattr(native_loader, "_PACKAGE", tmp_path)
        patched.setattr(elastic_driver, "__path__", [str(tmp_path)])
        patched.delitem(sys.modules, "elastic_driver._native", raising=False)
        patched.setattr(sys, "version_info", (3, 11, 7, "final", 0))
        with pytest.raises(native_loader.NativeUnavailableError) as caught:
            native_loader.load()
    assert str(caught.value) == (
        f"the native extension cannot be loaded: {extension} is for Python 3.12 and later, but this is Python 3.11; "
        "install the package with this Python"
    )
