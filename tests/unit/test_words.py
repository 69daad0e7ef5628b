"""Words that all parts share."""

from __future__ import annotations

import pytest

from elastic_driver.words import in_seconds

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0.01234, 2, "0.012 s"),
        (1.5, 3, "1.5 s"),
        (123.0, 2, "120 s"),
        (3600.0, 3, "3600 s"),
        (3999.2, 3, "4000 s"),
        (86400.0, 3, "86400 s"),
    ],
)
def test_seconds_are_never_a_power_of_ten(seconds: float, digits: int, text: str) -> None:
    assert in_seconds(seconds, digits) == text
