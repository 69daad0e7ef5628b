"""The documentation site: it builds without a warning, lists every page and every public name, and can be searched."""

from __future__ import annotations

import argparse
import html
import importlib
import importlib.util
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from elastic_driver.cli.flags import build_parser

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.docs

_FOUND = "return [...document.querySelectorAll('.md-search-result__item > a')].map(link => link.href)"


def pages(site: Path) -> list[Path]:
    return [page for page in site.rglob("*.html") if page.name != "404.html"]


def building(name: str) -> Any:
    pytest.importorskip("mkdocs", reason="mkdocs is missing: scripts/install-docs")
    spec = importlib.util.spec_from_file_location(f"building_{name}", ROOT / "docs" / "building" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_of_docs_is_in_the_navigation(site: Path) -> None:
    navigation = re.findall(r'href="?([^"# >]+\.html)"?', (site / "index.html").read_text(encoding="utf-8"))
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix(".html")
        place = place.with_name("index.html") if place.name == "README.html" else place
        assert place.as_posix() in navigation, page


def test_each_public_name_is_in_the_reference(site: Path) -> None:
    reference = building("reference")
    for page, (name, _) in reference.MODULES.items():
        text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        names = reference.public_names(importlib.import_module(name))
        assert names
        assert not [each for each in names if f'id="{name}.{each}"' not in text], name


def test_each_flag_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "flags.html").read_text(encoding="utf-8")
    shown = [action for action in build_parser(shows_all=True)._actions if action.help != argparse.SUPPRESS]
    flags = {flag for action in shown for flag in action.option_strings}
    assert "--min-np" in flags
    assert not [flag for flag in flags if not re.search(rf"<code>{re.escape(flag)}[ <]", text)]


def test_each_link_leads_to_a_page_and_an_anchor_of_the_site(site: Path) -> None:
    anchors = {
        page: set(re.findall(r'\b(?:id|name)="([^"]+)"', page.read_text(encoding="utf-8"))) for page in pages(site)
    }
    for page in anchors:
        for target in re.findall(r'\b(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8")):
            address, fragment = urldefrag(html.unescape(target))
            if re.match(r"[a-z]+:", address):
                continue
            path = (page.parent / unquote(address)).resolve() if address else page
            assert path.exists(), (page, target)
            if fragment and path in anchors:
                assert unquote(fragment) in anchors[path] or fragment == "__codelineno", (page, target)


def test_pictures_are_as_they_are_drawn() -> None:
    figures = building("figures")
    for name, draw in figures.PICTURES.items():
        assert (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw().svg(), name


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)", text)
        assert not loaded, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.parametrize("word", ["checkpoint", "disk", "preemption", "spot", "resume", "OOM", "NFS", "tqdm", "wandb"])
def test_search_finds(site: Path, word: str) -> None:
    lunr = pytest.importorskip("lunr", reason="lunr is missing: scripts/install-docs")
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for entry in entries:  # the theme's search reads the text of elements, too
        entry["text"] = html.unescape(re.sub(r"<[^>]*>", " ", entry["text"]))
    index = lunr.lunr(ref="location", fields=({"field_name": "title", "boost": 10}, "text"), documents=entries)
    assert index.search(word), word


def test_search_works_from_files(site: Path) -> None:
    """What a browser needs for pages that are read from files is there."""
    assert (site / "search" / "search_index.js").is_file()
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("--standalone", "torchrun_flags.html"),
        ("-np", "reference/flags.html"),
        ("elasticrun: warning: worker 10.0.0.1[1] killed by SIGKILL", "troubleshooting.html"),
        ("breakpoint()", "debugging.html"),
        ("sbatch", "howto/start-agents.html"),
        ("waiting for slots", "troubleshooting.html"),
        ("NFS", "durable.html"),
    ],
)
def test_the_search_box_finds(site: Path, chromium: Any, query: str, page: str) -> None:
    """Flags and pasted messages, too, which the search's own syntax would reject."""
    chromium.get((site / "index.html").as_uri())
    box = chromium.find_element("css selector", ".md-search__input")
    chromium.execute_script("document.getElementById('__search').click()")
    chromium.execute_script("arguments[0].value = arguments[1]", box, query)
    end, found = time.monotonic() + 60, []
    while not found and time.monotonic() < end:
        chromium.execute_script("arguments[0].dispatchEvent(new Event('keyup'))", box)
        time.sleep(0.2)
        found = chromium.execute_script(_FOUND)
    assert any(page in each for each in found[:10]), found
    assert not chromium.get_log("browser")


def test_source_files_are_not_found_unless_users_copy_them(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    sources = {entry["location"] for entry in entries if entry["location"].startswith("source/")}
    assert sources
    assert all(source.startswith(("source/examples/", "source/deploy/")) for source in sources)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("words\n- a\n- b\n", "words\n\n- a\n- b\n"),
        ("- a\n  - b\n- c\n", "- a\n    - b\n- c\n"),
        ("1. a\n   ```sh\n   b\n   ```\n2. c\n", "1. a\n    ```sh\n    b\n    ```\n2. c\n"),
        ("words\n| a |\n|---|\n", "words\n\n| a |\n|---|\n"),
        ("- a\n\n  b\n\nc\n", "- a\n\n    b\n\nc\n"),
        ("```text\nwords\n- a\n```\n", "```text\nwords\n- a\n```\n"),
    ],
)
def test_lists_and_tables_are_those_of_commonmark(written: str, read: str) -> None:
    assert building("pages").as_python_markdown(written) == read
