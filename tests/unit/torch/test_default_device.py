"""The library works under any default device of PyTorch: it names the device of each tensor that it makes."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")

from torch.utils._device import _device_constructors  # noqa: E402

from tests.support import sources  # noqa: E402

pytestmark = pytest.mark.unit


def nameless(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines of calls that make a tensor wherever the default device is."""
    makes = {func.__name__ for func in _device_constructors()}
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in makes
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_a_call_without_a_device_is_found() -> None:
    source = "torch.zeros(3)\ntorch.zeros(3, device='cpu')\nnp.zeros(3)\ntorch.zeros_like(x)\n"
    assert nameless(ast.walk(ast.parse(source))) == [1]


def test_each_tensor_that_is_made_has_its_device_named() -> None:
    found = {path: lines for path, inside in sources.nodes().items() if (lines := nameless(inside))}
    assert found == {}
