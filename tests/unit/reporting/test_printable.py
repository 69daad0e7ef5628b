"""What is shown of texts of others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elastic_driver.reporting.printable import all_without_home, without_home

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


@dataclass(frozen=True)
class _Deep:
    text: str
    more: tuple[_Deep, ...] = ()


def test_a_home_is_a_tilde_however_deep_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    value = {"one": [_Deep("/home/me/a", (_Deep("/home/me"),))], "two": ("/home/me/b", 3, None)}
    assert all_without_home(value) == {"one": [_Deep("~/a", (_Deep("~"),))], "two": ("~/b", 3, None)}
