"""How far those tests go that could go on forever: whole at a release and without ``--group``, else a part of it."""

from __future__ import annotations

is_whole = True  # conftest.py says so at the start
is_for_a_commit = False  # the least; is_whole is then false


def examples(whole: int) -> int:
    """How many random examples are drawn, of a release's ``whole``: a fifth at a landing, a tenth at a commit."""
    return whole if is_whole else max(5, whole // (10 if is_for_a_commit else 5))
