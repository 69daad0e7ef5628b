"""Every relative link and anchor in the repository's pages leads somewhere, and so does each page that code names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Folders at the top that hold no pages of this repository: what a build or a script made.
_MADE = {"build", "dist", "demo-output", "site"}

pytestmark = pytest.mark.unit


def files(*suffixes: str) -> list[Path]:
    """The repository's files with these suffixes; not those of virtual environments and of builds."""
    found = []
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [
            name
            for name in inside
            if not name.startswith(".") and name != "__pycache__" and not (folder == str(ROOT) and name in _MADE)
        ]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


@cache
def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as source hosts derive them, and those that it sets in HTML."""
    found: set[str] = set(re.findall(r'\b(?:id|name)="([^"]+)"', prose(page)))
    for heading in re.findall(r"^#{1,6} +(.*?) *$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = 0
        while (name := f"{slug}-{again}" if again else slug) in found:
            again += 1
        found.add(name)
    return found


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    yield from re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    yield from re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M)
    yield from re.findall(r'\b(?:src|href)="([^"]+)"', text)


def broken(page: Path) -> Iterator[str]:
    """Those of its links that lead nowhere."""
    for link in links(page):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue  # an address elsewhere
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            yield f"{page.relative_to(ROOT)}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_anchors_are_those_of_source_hosts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# `--on-change`: A "b", c_d & e\n## Twice\n```\n# no heading\n```\n## Twice\n<a id="old"></a>\n')
    assert anchors(page) == {"--on-change-a-b-c_d--e", "twice", "twice-1", "old"}


def test_links_in_code_are_not_links(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](b.md#c) `[d](e.md)`\n```\n[f](g.md)\n```\n![h](i.svg)\n[`j`](k.md)\n")
    assert list(links(page)) == ["b.md#c", "i.svg", "k.md"]


def test_every_link_and_anchor_leads_somewhere() -> None:
    pages = files(".md")
    assert {ROOT / "README.md", ROOT / "docs/operations.md", ROOT / "docs/howto/drain-a-host.md"} <= set(pages)
    assert [line for page in pages for line in broken(page)] == []


def test_every_page_of_docs_that_code_names_exists() -> None:
    missing = []
    for path in files(".py", ".js", ".cpp", ".h", ".yaml", ".toml", ".sh"):
        if path == Path(__file__).resolve():
            continue
        named = re.findall(r"(?<![\w/])docs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
        missing += [f"{path.relative_to(ROOT)}: {page}" for page in named if not (ROOT / page).exists()]
    assert missing == []


def test_running_jobs_lists_every_task_and_reference() -> None:
    docs = ROOT / "docs"
    listed = {link.partition("#")[0] for link in links(docs / "operations.md")}
    there = {str(page.relative_to(docs)) for folder in ("howto", "reference") for page in (docs / folder).glob("*.md")}
    assert there - listed == set()
