"""setup.py in a folder of its own, where the extensions are stand-ins."""

from __future__ import annotations

import importlib.machinery
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
OURS, *LATER = importlib.machinery.EXTENSION_SUFFIXES
STABLE = next(suffix for suffix in LATER if ".abi3" in suffix)

pytestmark = pytest.mark.integration


@pytest.fixture
def build_extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the command."""
    monkeypatch.chdir(ROOT)
    with monkeypatch.context() as patched:
        patched.setattr(setuptools, "setup", lambda **options: None)
        return runpy.run_path(str(ROOT / "setup.py"))["BuildExtension"]


@pytest.mark.parametrize(
    ("is_stable", "left"),
    [(True, {STABLE: "new"}), (False, {OURS: "new", STABLE: "old"})],
    ids=["the stable ABI", "this Python only"],
)
def test_a_build_in_a_checkout_removes_what_would_be_loaded_in_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build_extension: Any,
    is_stable: bool,
    left: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    another = ".cpython-399-x86_64-linux-gnu.so"
    source, built = tmp_path / "elastic_driver", tmp_path / "lib" / "elastic_driver"
    for folder in (source, built):
        folder.mkdir(parents=True)
    for suffix in (OURS, STABLE, another):
        (source / f"_native{suffix}").write_text("old")
    (built / f"_native{STABLE if is_stable else OURS}").write_text("new")
    extension = setuptools.Extension("elastic_driver._native", [], py_limited_api=is_stable)
    command = build_extension(setuptools.Distribution({"ext_modules": [extension], "packages": ["elastic_driver"]}))
    command.build_lib = str(tmp_path / "lib")
    command.inplace = True
    command.ensure_finalized()
    command.copy_extensions_to_source()
    found = {path.name.removeprefix("_native"): path.read_text() for path in source.glob("_native*")}
    assert found == {another: "old", **left}
