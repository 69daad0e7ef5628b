"""What a training tells of itself: figures, each with a name, as workers, agents and the driver have them.

Owns what a name may be, how many there may be, and how a line of them is read; and the shape of a look at GPUs. A
worker writes such lines (:mod:`elastic_driver.worker.api.figures`, or a script by itself), and its agent reads them.
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
"""That a worker may use, and a job."""
MOST_NAME = 64
"""Characters of one."""
MOST_LINE = 8192
"""Bytes of a line. One with as many names as there may be is shorter, unless they are very long."""

Figures = Mapping[str, float | None]
"""By name; None for NaN and what is infinite: JSON has neither."""


@dataclass(frozen=True, slots=True)
class GpuLook:
    """How the GPUs of a host are.

    Attributes:
        count: of them; 0 where nothing is known of them any more.
        busy: their mean share of time in which they did anything, 0..1; None where that is not told.
        memory_bytes: in use; 0 where that is not told: some always are.
    """

    count: Annotated[int, Within(0, 1 << 16)]
    busy: Annotated[float, Rounded(4), Within(0, 1)] | None
    memory_bytes: Annotated[int, Within(0, (1 << 53) - 1)]


@lru_cache(maxsize=4 * MOST_NAMES)
def fault_of(name: str) -> str:
    """Why a figure cannot have this name; "" where it can."""
    if not 0 < len(name) <= MOST_NAME:
        return f"a name has 1 to {MOST_NAME} characters, not {len(name)}"
    if not name.isprintable() or name != name.strip():
        return f"a name has printable characters only, and no space around them: {name!r}"
    return ""


def value_of(value: float) -> float | None:
    """A number as it is told."""
    return value if math.isfinite(value) else None


def line_of(figures: Figures) -> bytes:
    """As they are written."""
    return (
        json.dumps({name: None if value is None else value_of(value) for name, value in figures.items()}).encode()
        + b"\n"
    )


def figures_of(line: bytes) -> dict[str, float | None]:
    """The figures of a line.

    Raises:
        ValueError: it is none, or has what is no figure.
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
