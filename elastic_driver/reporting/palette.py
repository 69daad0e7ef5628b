"""The colors of a job's page and of the report's picture, for light and dark.

Owns the meaning of colors. A color never stands alone: words say the same.
"""

from __future__ import annotations

# The colors of goodput's categories can be distinguished in both schemes, and with red-green blindness (after Okabe
# and Ito). Start is not a loss, and therefore gray.
LIGHT = {
    "back": "#f6f7f9",
    "card": "#ffffff",
    "text": "#1b1f24",
    "dim": "#59636e",
    "line": "#d6dbe1",
    "soft": "#eceff3",
    "blue": "#1a63d8",
    "good": "#176f31",
    "bad": "#c4232f",
    "warn": "#8f5b00",
    "warn-back": "#fff6dc",
    "bad-back": "#ffebec",
    "host": "#a9c9a4",
    "training": "#0f8a66",
    "reset": "#d55e00",
    "waiting_for_slots": "#e0a100",
    "stalled": "#8b1e1e",
    "recomputed": "#b0408a",
    "start": "#8c959f",
    "idle": "#6ba8d6",
    "unexplained": "#20262c",
    "joiner_boot": "#3f8ea3",
    "drained": "#8f72c4",
}
DARK = {
    "back": "#0e1116",
    "card": "#171b22",
    "text": "#e4e8ee",
    "dim": "#98a3b0",
    "line": "#2f3742",
    "soft": "#212832",
    "blue": "#6cb0ff",
    "good": "#56d364",
    "bad": "#ff7b80",
    "warn": "#e3b341",
    "warn-back": "#2c2412",
    "bad-back": "#331a1d",
    "host": "#3a5f3c",
    "training": "#2ea083",
    "reset": "#f0803c",
    "waiting_for_slots": "#e8b93e",
    "stalled": "#c0504d",
    "recomputed": "#d67fb8",
    "start": "#7d8590",
    "idle": "#5b9bd0",
    "unexplained": "#f0f6fc",
    "joiner_boot": "#6fc0d4",
    "drained": "#a48ad8",
}
FILLS = tuple(LIGHT)[tuple(LIGHT).index("host") :]
"""The colors of areas; for each there is ``--on-NAME``, the color of text on such an area."""
_INKS = ("#ffffff", "#000000")


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors (``#rrggbb``), as defined by WCAG 2: 1 to 21."""
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def colors() -> str:
    """Return style sheet rules that name the colors: ``var(--training)``."""

    def named(scheme: dict[str, str]) -> str:
        inks = {f"on-{name}": max(_INKS, key=lambda ink: contrast(ink, scheme[name])) for name in FILLS}
        return ";".join(f"--{name}:{color}" for name, color in {**scheme, **inks}.items())

    return f":root{{{named(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{named(DARK)}}}}}"


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
