"""How gradients travel: as they are, or as float16."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Compressor:
    """The dtype in which floating point values travel; None for their own."""

    wire_dtype: torch.dtype | None

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype on the wire of values of this one."""
        return self.wire_dtype if self.wire_dtype is not None and dtype.is_floating_point else dtype


class Compression:
    """The choices (Horovod's names)."""

    none = Compressor(None)
    fp16 = Compressor(torch.float16)
