"""No class grows so large that nobody reads it whole, and no constructor hides how its parts hang together."""

from __future__ import annotations

import ast

import pytest

from tests.support.sources import nodes

CLASS_LINES, CONSTRUCTOR_LINES = 450, 60

pytestmark = pytest.mark.unit


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def behavior(node: ast.ClassDef) -> int:
    """Its lines; of a dataclass those of its methods, since its fields are data."""
    return sum(map(lines, functions(node))) if is_dataclass(node) else lines(node)


def classes() -> list[ast.ClassDef]:
    return [node for inside in nodes().values() for node in inside if isinstance(node, ast.ClassDef)]


def test_no_class_is_too_large() -> None:
    assert {node.name for node in classes() if behavior(node) > CLASS_LINES} == set()


def test_no_constructor_is_too_large() -> None:
    large = [
        f"{node.name}.__init__: {lines(each)} lines"
        for node in classes()
        for each in functions(node)
        if each.name == "__init__" and lines(each) > CONSTRUCTOR_LINES
    ]
    assert large == []
