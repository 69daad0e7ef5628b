"""What is used of TensorFlow that is not public is checked at the import: the names, without TensorFlow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[3] / "elastic_driver/tensorflow"


def private_names(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node


def is_of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_all_that_is_private_is_checked() -> None:
    """Whatever nobody in the package defines is TensorFlow's."""
    used: set[str] = set()
    own: set[str] = set()
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in private_names(tree):
            used.add(node.attr)
            # The classes in private.py extend TensorFlow's: what they set is theirs.
            if isinstance(node.ctx, ast.Store) and is_of_self(node.value) and path.name != "private.py":
                own.add(node.attr)
    tree = ast.parse((PACKAGE / "private.py").read_text(encoding="utf-8"))
    (check,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_faults")
    checked = {node.value for node in ast.walk(check) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    at_import = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    checked |= {node.attr for statement in at_import for node in private_names(statement)}
    assert "_is_worker_failure" in used - own
    assert used - own <= checked, "removed, it would be missed when a worker is lost, and not at the import"
