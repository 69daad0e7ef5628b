"""How far those tests go that could go on for ever: whole at a release and without ``--group``, else a part of it."""

from __future__ import annotations

is_whole = True  # conftest.py says so at the start


def examples(whole: int) -> int:
    """How many random examples are drawn, where a release draws ``whole``."""
    return whole if is_whole else max(5, whole // 3)
