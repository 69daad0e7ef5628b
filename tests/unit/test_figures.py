"""Lines of figures: what they may say, and that nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from elastic_driver.figures import MOST_LINE, MOST_NAME, MOST_NAMES, fault_of, figures_of, line_of

pytestmark = pytest.mark.unit


def test_a_line_is_read_as_it_was_written() -> None:
    line = line_of({"loss": 0.25, "val/accuracy": 1.0, "größe": -1e300, "none": None})
    assert line.endswith(b"\n")
    assert figures_of(line) == {"loss": 0.25, "val/accuracy": 1.0, "größe": -1e300, "none": None}


def test_what_json_has_no_number_for_is_none() -> None:
    line = line_of({"nan": float("nan"), "inf": float("inf")})
    assert json.loads(line) == {"nan": None, "inf": None}
    # json.dumps of a script writes these.
    assert figures_of(b'{"a": NaN, "b": -Infinity, "c": 1e999, "d": 7}') == {"a": None, "b": None, "c": None, "d": 7.0}


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"loss 0.3", b"[1]", b"7", b"null", b'"loss"', b'{"loss": "0.3"}', b'{"loss": true}', b'{"loss": [1]}'),
        *(b'{"": 1}', b'{" a": 1}', b'{"a\\n": 1}', b'{"a": 1} {"b": 2}', b'{"a": 1', b"\xff", b"{1: 2}"),
        *(b"[" * 100_000, b'{"a": ' * 100_000, b'{"a": 1' + 400 * b"0" + b"}", b'{"' + b"x" * 65 + b'": 1}'),
    ],
)
def test_what_is_none_is_refused_with_a_reason(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        figures_of(line)


@pytest.mark.parametrize("name", ["", "x" * 65, " a", "a ", "a\n", "\x1b[31m"])
def test_names_that_nobody_could_read_are_none(name: str) -> None:
    assert fault_of(name)


def test_a_line_of_all_that_may_be_reported_is_no_longer_than_it_may_be() -> None:
    assert len(line_of({f"{index:0{MOST_NAME}}": -1.2345678901234567e-300 for index in range(MOST_NAMES)})) < MOST_LINE
