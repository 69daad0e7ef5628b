"""No class grows so large that nobody reads it whole, and no constructor hides how its parts hang together."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "elastic_driver"
CLASS_LINES, CONSTRUCTOR_LINES = 450, 60

pytestmark = pytest.mark.unit


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def behaviour(node: ast.ClassDef) -> int:
    """Its lines; of a dataclass those of its methods, since its fields are data."""
    return sum(map(lines, functions(node))) if is_dataclass(node) else lines(node)


@functools.cache
def classes() -> list[ast.ClassDef]:
    return [
        node
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


class TestSizes:  # in one process, where the package is read once
    def test_no_class_is_too_large(self) -> None:
        assert {node.name for node in classes() if behaviour(node) > CLASS_LINES} == set()

    def test_no_constructor_is_too_large(self) -> None:
        large = [
            f"{node.name}.__init__: {lines(each)} lines"
            for node in classes()
            for each in functions(node)
            if each.name == "__init__" and lines(each) > CONSTRUCTOR_LINES
        ]
        assert large == []
