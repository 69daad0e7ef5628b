"""The status line fits, and its figures outlast its sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.reporting.status_line import figures, status_line

pytestmark = pytest.mark.unit

SENTENCE = "[00:12] round 3 runs with 4 workers on 2 hosts"


def test_figures_that_are_not_known_are_left_out() -> None:
    assert figures(steps_per_s=None, steps=0, commits=0, suspected=0) == ()
    assert figures(steps_per_s=12.345, steps=900, commits=40, suspected=1) == (
        "1 suspected",
        "12.3 steps/s",
        "commit 40",
        "step 900",
    )
    assert figures(steps_per_s=0.0, steps=40, commits=40, suspected=0) == ("0 steps/s", "commit 40")
    assert figures(steps_per_s=1234.5, steps=0, commits=0, suspected=0) == ("1234 steps/s",)


def test_the_sentence_is_cut_before_the_figures() -> None:
    known = ("12.3 steps/s", "commit 40")
    assert status_line(SENTENCE, known, width=79) == f"{SENTENCE} | 12.3 steps/s, commit 40"
    assert status_line(SENTENCE, known, width=42) == "[00:12] round 3… | 12.3 steps/s, commit 40"
    assert status_line(SENTENCE, known, width=39) == "[00:12] round 3 runs wi… | 12.3 steps/s"
    assert status_line(SENTENCE, known, width=20) == "[00:12] round 3 run…"
    assert status_line(SENTENCE, width=79) == SENTENCE


@given(st.text(max_size=120), st.lists(st.text(min_size=1, max_size=30), max_size=4), st.integers(0, 130))
def test_it_always_fits(sentence: str, known: list[str], width: int) -> None:
    assert len(status_line(sentence, tuple(known), width=width)) <= width
