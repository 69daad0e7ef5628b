"""The library works under any default device of PyTorch: it names the device of each tensor that it makes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elastic_driver

torch = pytest.importorskip("torch")

from torch.utils._device import _device_constructors  # noqa: E402

pytestmark = pytest.mark.unit

PACKAGE = Path(elastic_driver.__file__).parent


def nameless(source: str) -> list[int]:
    """The lines of calls that make a tensor wherever the default device is."""
    makes = {func.__name__ for func in _device_constructors()}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in makes
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_a_call_without_a_device_is_found() -> None:
    assert nameless("torch.zeros(3)\ntorch.zeros(3, device='cpu')\nnp.zeros(3)\ntorch.zeros_like(x)\n") == [1]


def test_each_tensor_that_is_made_has_its_device_named() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := nameless(path.read_text()))
    }
    assert found == {}
