"""The text of the status line: the job's sentence, and its figures behind it.

Pure; knows no terminal. On a narrow one the sentence is cut before a figure is, and figures go from the last on.
"""

from __future__ import annotations

_LEAST_SENTENCE = 16
_CUT = "…"


def figures(*, steps_per_s: float | None, steps: int, commits: int, suspected: int) -> tuple[str, ...]:
    """What stands behind the sentence, the most important first.

    Args:
        steps_per_s: of the training; None while it is not known.
        steps: of its training so far, as one worker counts them; 0 where none does.
        commits: so far; 0 for none, or where the workers make none.
        suspected: workers that seem to hang.
    """
    found = []
    if suspected:
        found.append(f"{suspected} suspected")
    if steps_per_s is not None:
        found.append(f"{steps_per_s:.3g} steps/s" if steps_per_s < 100 else f"{steps_per_s:.0f} steps/s")
    if commits:
        found.append(f"commit {commits}")
    # Where each step ends with a commit they are the same number.
    if steps and steps != commits:
        found.append(f"step {steps}")
    return tuple(found)


def status_line(sentence: str, figures: tuple[str, ...] = (), *, width: int) -> str:
    """The line, at most so many characters wide.

    Args:
        sentence: why the job stands where it stands.
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
