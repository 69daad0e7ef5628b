"""The text of the status line: the job's sentence, followed by its figures.

Pure; does not access a terminal. In a narrow one the sentence is cut first, then figures are dropped from the end.
"""

from __future__ import annotations

_LEAST_SENTENCE = 16
_CUT = "…"


def figures(*, steps_per_s: float | None, steps: int, commits: int, suspected: int) -> tuple[str, ...]:
    """Return the figures after the sentence, the most important first.

    Args:
        steps_per_s: of the training; None while unknown.
        steps: of the training so far, as counted by one worker; 0 if none counts them.
        commits: so far; 0 for none, or if the workers make none.
        suspected: the number of workers suspected to hang.
    """
    found = []
    if suspected:
        found.append(f"{suspected} suspected")
    if steps_per_s is not None:
        found.append(f"{steps_per_s:.3g} steps/s" if steps_per_s < 100 else f"{steps_per_s:.0f} steps/s")
    if commits:
        found.append(f"commit {commits}")
    # If each step ends with a commit, the two numbers are the same.
    if steps and steps != commits:
        found.append(f"step {steps}")
    return tuple(found)


def status_line(sentence: str, figures: tuple[str, ...] = (), *, width: int) -> str:
    """Return the line, at most ``width`` characters wide.

    Args:
        sentence: the job's state, and the reason for it.
        figures: of :func:`figures`.
        width: of the terminal, without its last column.
    """
    shown = figures
    while shown and len(_behind(shown)) + min(len(sentence), _LEAST_SENTENCE) > width:
        shown = shown[:-1]
    behind = _behind(shown)
    room = max(0, width - len(behind))
    if len(sentence) <= room:
        return sentence + behind
    return f"{sentence[: max(0, room - 1)].rstrip()}{_CUT if room else ''}{behind}"


def _behind(figures: tuple[str, ...]) -> str:
    return f" | {', '.join(figures)}" if figures else ""
