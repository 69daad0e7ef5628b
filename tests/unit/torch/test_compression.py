"""Compressors: the library's own and users'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_driver.torch.optimizer.compression import Compression, Compressor, wire_dtype

pytestmark = pytest.mark.unit

OWN = [
    (Compression.none, torch.float32),
    (Compression.fp16, torch.float16),
    (Compression.bf16, torch.bfloat16),
]


@pytest.mark.parametrize(("compressor", "wire"), OWN)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_round_trip(compressor: Any, wire: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    compressed, context = compressor.compress(tensor)
    assert compressed.dtype == wire
    assert wire_dtype(compressor, tensor.dtype) == wire
    restored = compressor.decompress(compressed, context)
    assert restored.dtype == torch.float32
    assert restored.shape == tensor.shape
    assert torch.allclose(restored, tensor, rtol=1e-2)


@pytest.mark.parametrize(("compressor", "_wire"), OWN)
def test_integers_are_left_alone(compressor: Any, _wire: torch.dtype) -> None:
    tensor = torch.arange(70_000, 70_005)
    compressed, context = compressor.compress(tensor)
    assert compressed.dtype == torch.int64
    assert torch.equal(compressor.decompress(compressed, context), tensor)
    assert wire_dtype(compressor, torch.int64) == torch.int64


def test_bfloat16_keeps_the_range_that_float16_has_not() -> None:
    large = torch.tensor([1e20])
    assert torch.isinf(Compression.fp16.compress(large)[0]).all()
    assert torch.isfinite(Compression.bf16.compress(large)[0]).all()


def test_users_compressors_are_called() -> None:
    class Mine(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor * 2, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor / 2

    class Derived(Compression.fp16):
        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.float() * 3

    class Same(Compression.fp16):
        """Changes neither function."""

    assert wire_dtype(Mine, torch.float32) is None
    assert wire_dtype(Derived, torch.float32) is None
    assert wire_dtype(Same, torch.float32) is torch.float16
    assert wire_dtype(Compression.fp16(), torch.float32) is None
