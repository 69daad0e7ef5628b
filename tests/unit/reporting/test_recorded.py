"""The page of a job that is over: one file, of which a browser runs nothing that a job has said."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.reporting.page.document import document, policy
from elastic_driver.reporting.page.recorded import recorded_page

pytestmark = pytest.mark.unit

NASTY = "</script><script>alert(1)</script><!-- <script> --> \u2028\u2029 & \ud800 \x00 ]]>"


class Elements(HTMLParser):
    """The elements of a document, and what stands in its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def recorded(frame: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"version": 1, "frame": {"job": {"job_id": "feedface"}} if frame is None else frame, "outputs": {}, **more}


def test_it_is_the_page_with_data_that_comes_back_as_it_was() -> None:
    frame = {"job": {"job_id": NASTY, NASTY: [1, 2.5, None, True]}, "story": [{"text": NASTY}]}
    elements = Elements(recorded_page(recorded(frame, outputs={"a[0]#0": [NASTY]})))
    data, script = elements.scripts
    assert json.loads(data) == {"frame": frame, "outputs": {"a[0]#0": [NASTY]}}
    assert script in document()
    assert [attributes for tag, attributes in elements.found if tag == "script"] == [
        {"type": "application/json", "id": "recorded"},
        {},
    ]


def test_what_a_job_has_said_ends_no_element_and_no_line() -> None:
    page = recorded_page(recorded({"story": [{"text": NASTY}]}, outputs={NASTY: [NASTY]}))
    page.encode()
    data = Elements(page).scripts[0]
    assert not set("<>&\u2028\u2029\ud800\x00") & set(data)


def test_numbers_that_json_has_not_are_none() -> None:
    frame = {"curves": {"t": [1.0, 2.0], "series": {"figures": {"loss": [float("nan"), float("-inf")]}}}}
    data = json.loads(Elements(recorded_page(recorded(frame))).scripts[0])
    assert data["frame"]["curves"]["series"]["figures"]["loss"] == [None, None]


def test_it_loads_nothing_and_runs_only_what_stands_in_it() -> None:
    page = recorded_page(recorded())
    found = Elements(page).found
    (rules,) = [each["content"] or "" for tag, each in found if tag == "meta" and "http-equiv" in each]
    assert "default-src 'none'" in rules
    assert "connect-src 'none'" in rules
    assert "unsafe" not in rules
    assert set(re.findall(r"sha256-[^']+", rules)) == set(re.findall(r"sha256-[^']+", policy(document())))
    # It stands before what it rules.
    assert [tag for tag, _ in found].index("meta") < [tag for tag, _ in found].index("style")
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert not re.search(r"(?:src|href)=\"(?!data:,|#)", page)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "version None"),
        (recorded(version=2), "version 2"),
        (recorded(frame=[]), "not recorded as a whole"),  # type: ignore[arg-type]
        (recorded(outputs=[1]), "not recorded as a whole"),
    ],
)
def test_what_is_no_such_record_is_said(document: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        recorded_page(document)
