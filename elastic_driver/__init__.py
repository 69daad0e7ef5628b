"""An elastic driver for distributed training: the job keeps going while machines come and go."""

from __future__ import annotations

__version__ = "0.1.0"
