"""The package's own source, for tests of what stands in it: parsed once in each process that asks."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Mapping, Sequence

from tests.support.paths import ROOT

PACKAGE = ROOT / "elastic_driver"


@functools.cache
def trees() -> Mapping[str, ast.Module]:
    """All modules, by their path in the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    gc.disable()  # no collection is to look at them, now or later
    try:
        return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes() -> Mapping[str, Sequence[ast.AST]]:
    """All that there is in each of them."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def trees_below(folder: str) -> Mapping[str, ast.Module]:
    """Those of one folder."""
    return {path: tree for path, tree in trees().items() if path.startswith(f"{folder}/")}
