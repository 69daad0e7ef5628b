"""How gradients travel: as they are, in 16 bits, or as a class of the user's makes them.

A compressor is a class (or an object) with two functions: ``compress(tensor) -> (tensor, context)`` and
``decompress(tensor, context) -> tensor``. The library's own ones only change the dtype, and say to which; those of
users are called for each gradient.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class Compressor(Protocol):
    """What a compressor has to offer; users' own may derive from it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A tensor that can be reduced in the place of this one, and what ``decompress`` needs to know of this one."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor as one of the shape and dtype that was compressed."""


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See Compressor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See Compressor."""
        return tensor

    @staticmethod
    def dtype_for(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of this one travel."""
        return dtype


class _CastCompressor(Compressor):
    """Floating point values in another dtype; the others as they are."""

    wire_dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See Compressor."""
        return tensor.to(cls.dtype_for(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See Compressor."""
        return tensor.to(ctx)

    @classmethod
    def dtype_for(cls, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of this one travel."""
        return cls.wire_dtype if dtype.is_floating_point else dtype


class FP16Compressor(_CastCompressor):
    """Floating point values travel as float16."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Floating point values travel as bfloat16, which has the range of float32 and 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Compression:
    """The choices (Horovod's names, and bf16)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_dtype(compression: Compressor | type[Compressor], dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which values of this one travel, when that is all a compressor does; None for users' own."""
    if isinstance(compression, type) and issubclass(compression, (NoneCompressor, _CastCompressor)):
        changed = {"compress", "decompress"} & set().union(
            *(vars(cls) for cls in compression.__mro__[: compression.__mro__.index(_base_of(compression))])
        )
        return None if changed else compression.dtype_for(dtype)
    return None


def _base_of(compression: type[Compressor]) -> type[Compressor]:
    return NoneCompressor if issubclass(compression, NoneCompressor) else _CastCompressor
