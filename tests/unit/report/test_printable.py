"""What is shown of texts of others."""

from __future__ import annotations

import pytest

from elastic_driver.report.printable import without_home

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read /home/me/data/x: no such file", "cannot read ~/data/x: no such file"),
        ("/home/me", "~"),
        ("'/home/me', /home/me: both", "'~', ~: both"),
        ("/home/meadow and /mnt/home/me", "/home/meadow and /mnt/home/me"),
    ],
)
def test_a_home_is_a_tilde(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me/")
    assert without_home(text) == shown
    monkeypatch.setenv("HOME", "/")
    assert without_home(text) == text
