"""Compression of gradients: none, 16 bits, or a class of the user's.

A compressor is a class (or an object) with two functions: ``compress(tensor) -> (tensor, context)`` and
``decompress(tensor, context) -> tensor``. The library's own ones only change the dtype, and report it; users' own ones
are called for each gradient.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class Compressor(Protocol):
    """The interface of a compressor; users' own may derive from it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a tensor to reduce instead of this one, and a context for ``decompress``."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Convert the reduced tensor back to the shape and dtype before compression."""


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor unchanged."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor

    @staticmethod
    def dtype_for(dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of this dtype are sent."""
        return dtype


class _CastCompressor(Compressor):
    """Sends floating point values in another dtype; others unchanged."""

    wire_dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast the tensor to the dtype in which it is sent."""
        return tensor.to(cls.dtype_for(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cast the tensor back."""
        return tensor.to(ctx)

    @classmethod
    def dtype_for(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of this dtype are sent."""
        return cls.wire_dtype if dtype.is_floating_point else dtype


class FP16Compressor(_CastCompressor):
    """Sends floating point values as float16."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating point values as bfloat16, which has the range of float32 and 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Compression:
    """The available compressors (Horovod's names, and bf16)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_dtype(compression: Compressor | type[Compressor], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which values are sent, if the compressor only changes that; None for users' own."""
    if isinstance(compression, type) and issubclass(compression, (NoneCompressor, _CastCompressor)):
        changed = {"compress", "decompress"} & set().union(
            *(vars(cls) for cls in compression.__mro__[: compression.__mro__.index(_base_of(compression))])
        )
        return None if changed else compression.dtype_for(dtype)
    return None


def _base_of(compression: type[Compressor]) -> type[Compressor]:
    return NoneCompressor if issubclass(compression, NoneCompressor) else _CastCompressor
