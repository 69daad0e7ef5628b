"""Figures: named numbers that a training reports, in the form that workers, agents and the driver share.

Owns the rules for names, their limit, and the format of a line of figures; and the record of a look at GPUs. A worker
writes such lines (:mod:`elastic_driver.worker.api.figures`, or a script by itself), and its agent reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from elastic_driver.codec import Rounded, Within

MOST_NAMES = 64
"""Names that a worker may use, and a job."""
MOST_NAME = 64
"""Characters of a name."""
MOST_LINE = 8192
"""Bytes of a line. A line with the maximum of names is shorter, unless they are very long."""

Figures = Mapping[str, float | None]
"""Values by name; None for NaN and infinities: JSON has neither."""


@dataclass(frozen=True, slots=True)
class GpuLook:
    """One look at the GPUs of a host.

    Attributes:
        count: of the GPUs; 0 if nothing is known of them any more.
        busy: their mean utilization, the share of time in which they did anything, 0..1; None if unknown.
        memory_bytes: in use; 0 if unknown: a GPU never has none in use.
    """

    count: Annotated[int, Within(0, 1 << 16)]
    busy: Annotated[float, Rounded(4), Within(0, 1)] | None
    memory_bytes: Annotated[int, Within(0, (1 << 53) - 1)]


@lru_cache(maxsize=4 * MOST_NAMES)
def fault_of(name: str) -> str:
    """Return why a figure cannot have this name; "" if it can."""
    if not 0 < len(name) <= MOST_NAME:
        return f"a name has 1 to {MOST_NAME} characters, not {len(name)}"
    if not name.isprintable() or name != name.strip():
        return f"a name has printable characters only, and no space around them: {name!r}"
    return ""


def value_of(value: float) -> float | None:
    """Return a number as it is sent."""
    return value if math.isfinite(value) else None


def line_of(figures: Figures) -> bytes:
    """Format figures as a line."""
    return (
        json.dumps({name: None if value is None else value_of(value) for name, value in figures.items()}).encode()
        + b"\n"
    )


def figures_of(line: bytes) -> dict[str, float | None]:
    """Parse a line of figures.

    Raises:
        ValueError: the line is invalid, or one of its figures is.
    """
    try:
        found = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError('a line is an object of numbers, like {"loss": 0.31}')
    for name, value in found.items():
        if fault := fault_of(name):
            raise ValueError(fault)
        if value is not None and type(value) not in (float, int):
            raise ValueError(f"{name} is no number")
    try:
        return {name: None if value is None else value_of(float(value)) for name, value in found.items()}
    except OverflowError as error:  # an integer that no float can hold
        raise ValueError("a number is too large") from error
