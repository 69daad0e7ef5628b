"""The colors: told apart, readable, and all there."""

from __future__ import annotations

import itertools
import re

import pytest

from elastic_driver.reporting.drawing import style
from elastic_driver.reporting.goodput import Category
from elastic_driver.reporting.page.document import document
from elastic_driver.reporting.palette import DARK, FILLS, LIGHT, colors, contrast

pytestmark = pytest.mark.unit

SCHEMES = {"light": LIGHT, "dark": DARK}


def parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:], 16)


def test_contrast_is_what_wcag_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_readable_on_what_is_behind_it(scheme: str) -> None:
    named = SCHEMES[scheme]
    inks, grounds = ("text", "dim", "bad", "good", "warn", "blue"), ("back", "card", "soft")
    pairs = [*itertools.product(inks, grounds), ("text", "bad-back"), ("text", "warn-back"), ("card", "blue")]
    assert [(ink, ground) for ink, ground in pairs if contrast(named[ink], named[ground]) < 4.5] == []
    assert all(max(contrast(named[fill], ink) for ink in ("#ffffff", "#000000")) >= 4.5 for fill in FILLS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_start_is_grey_and_nothing_else_is_like_it(scheme: str) -> None:
    named = SCHEMES[scheme]
    assert max(parts(named["start"])) - min(parts(named["start"])) < 24
    alike = [
        (one, other)
        for one, other in itertools.combinations(FILLS, 2)
        if sum(abs(a - b) for a, b in zip(parts(named[one]), parts(named[other]), strict=True)) < 60
    ]
    assert alike == []


def test_each_category_has_a_color_in_both_schemes() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert {category.value for category in Category} <= set(FILLS)


@pytest.mark.parametrize("sheet", [style(), document()], ids=["picture", "page"])
def test_each_color_that_is_used_has_its_name_here_and_no_other_is_written_down(sheet: str) -> None:
    assert colors() in sheet
    used = set(re.findall(r"var\(--([\w-]+)\)", sheet))
    assert used
    assert used <= {*LIGHT, *(f"on-{name}" for name in FILLS)}
    assert re.findall(r"[:\s]#[0-9a-f]{3,8}\b(?=[;}])", sheet.replace(colors(), "")) == []
