"""Tables and lengths of time for the terminal."""

from __future__ import annotations

import pytest

from elastic_driver.cli.tables import table
from elastic_driver.reporting.lengths import length

pytestmark = [pytest.mark.unit]


def test_columns_are_aligned() -> None:
    assert table(("A", "LONG"), [("1", "x"), ("234", "")], right={"A"}) == "  A  LONG\n  1  x\n234"


def test_the_widest_columns_are_cut_to_the_width_of_the_line() -> None:
    lines = table(("NAME", "N", "PATH"), [("n" * 30, "123", "p" * 50)], right={"N"}, width=40).split("\n")
    assert max(map(len, lines)) == 40
    assert "123" in lines[1]
    assert lines[1].count("…") == 2
    assert len(table(("NAME",), [("n" * 30,)], width=3)) == len("NAME\n") + 8, "but not to nothing"
    assert len(table(("NAME",), [("n" * 300,)]).split("\n")[1]) == 300, "nor where there is no terminal"


def test_a_cell_stays_on_its_line() -> None:
    assert "\x1b" not in table(("A",), [("x\n\x1b[2Jy",)])
    assert table(("A",), [("x\n\x1b[2Jy",)]).count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.5, "0 s"),
        (0.9, "0 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (172799, "47 h"),
        (172800, "2 d"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert length(seconds) == text
