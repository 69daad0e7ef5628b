"""A hook of MkDocs that builds a site from files that are also readable on a code host.

- The README is the site's home page; CONTRIBUTING.md and CHANGELOG.md are pages, too.
- A file of the repository to which a page links gets a page with its text, so that every link works offline. A link to
  a file that does not exist stays unchanged, and MkDocs rejects it.
- Lists and tables follow CommonMark. Python-Markdown requires an indent of four columns for each level of a list, and a
  blank line before a list or a table: :func:`as_python_markdown` adds these.
- Search leaves out source files, except those that users copy from, and ranks pages for developers below the others.
- In ``nav``, a pattern such as ``howto/*.md`` stands for the pages that match it and are not named elsewhere. It may
  match no page.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

# Files at the top of the repository that are pages of the site.
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The folder of the pages of source files.
SOURCE = "source"
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".md": "markdown"}

# Folders of source files that users copy from. Search finds these, and no other source files.
COPIED = (f"{SOURCE}/examples/", f"{SOURCE}/deploy/")
# How search weighs pages whose paths begin so; all others weigh 1.
BOOSTS = {
    f"{SOURCE}/": 0.2,
    "changelog.md": 0.2,
    "decisions/": 0.2,
    "events.md": 0.3,
    "kubernetes": 0.6,
    "reference/flags.md": 3,
    "reference/python/": 0.5,
    "worlds/": 0.2,
}

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)(.*)$")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/, and replace patterns in the navigation by the pages that they match."""
    for name, place in TOP.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    linked = {target for file in files.documentation_pages() for target in _sources_linked_from(file)}
    for path in sorted(_with_contents(linked)):
        page = File.generated(config, _source_page(path), content=_text_of(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    named = set(_leaves(config.nav))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = _expanded(config.nav, [page for page in pages if page not in named])
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Point links at pages of the site, and write lists and tables as Python-Markdown reads them."""
    place = page.file.src_uri
    page.meta.setdefault("search", search_settings(place))
    folder = posixpath.dirname(_original(place))
    return as_python_markdown(_outside_of_fences(markdown, lambda text: _relinked(text, folder, place)))


def search_settings(place: str) -> dict[str, Any]:
    """Return the settings of Material's search for a page."""
    if place.startswith(f"{SOURCE}/") and not place.startswith(COPIED):
        return {"exclude": True}
    return {"boost": next((boost for begin, boost in BOOSTS.items() if place.startswith(begin)), 1)}


def as_python_markdown(text: str) -> str:
    """Rewrite CommonMark's lists and tables so that Python-Markdown reads the same from them."""
    written: list[str] = []
    levels: list[int] = []  # the column at which the text of each open item begins
    fence, before = "", ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        if fence:
            if line.strip().startswith(fence):
                fence = ""
            written.append(_moved(line, levels))
            continue
        if line.strip():
            item, within = _ITEM.match(line), bool(levels)
            # The continuation lines of a paragraph may be indented less; any other line that is indented less than an
            # item's text ends the item.
            if item or not before.strip() or _FENCE.match(line) or line.startswith("#"):
                while levels and indent < levels[-1]:
                    levels.pop()
            begins_table = line.lstrip().startswith("|") and not before.lstrip().startswith("|")
            begins_list = item is not None and not within and not _ITEM.match(before)
            begins_inner_list = item is not None and levels and levels[-1] == indent and not _in_same_list(written)
            opened = _FENCE.match(line)
            if before.strip() and (begins_table or begins_list or begins_inner_list) and not before.startswith("#"):
                written.append("")
            if item:
                written.append(" " * (4 * len(levels)) + line.lstrip(" "))
                levels.append(indent + len(item[2]) + len(item[3]))
            else:
                written.append(_moved(line, levels))
            if opened:
                fence = opened[1]
        else:
            written.append("")
        before = line
    return "\n".join(written) + "\n"


def _in_same_list(written: list[str]) -> bool:
    """Return whether the previous line begins an item, so that this list needs no blank line."""
    return bool(written) and _ITEM.match(written[-1]) is not None


def _moved(line: str, levels: list[int]) -> str:
    if not levels or not line.strip():
        return line
    indent = len(line) - len(line.lstrip(" "))
    return " " * (4 * len(levels) + max(indent - levels[-1], 0)) + line.lstrip(" ")


def _outside_of_fences(text: str, change: Any) -> str:
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def _original(place: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((name for name, page in TOP.items() if page == place), f"docs/{place}")


def _sources_linked_from(file: File) -> Iterator[str]:
    folder = posixpath.dirname(_original(file.src_uri))
    for _, target, _ in _LINK.findall(file.content_string):
        path = posixpath.normpath(posixpath.join(folder, target))
        if not _is_foreign(target) and path not in TOP and not _is_below_docs(path) and (ROOT / path).exists():
            yield path


def _with_contents(paths: set[str]) -> set[str]:
    """Return the paths, and the files in those that are folders."""
    found = set(paths)
    for path in paths:
        if (ROOT / path).is_dir():
            inside = (each for each in (ROOT / path).rglob("*") if each.is_file() and "__pycache__" not in each.parts)
            found |= {each.relative_to(ROOT).as_posix() for each in inside}
    return found


def _source_page(path: str) -> str:
    return f"{SOURCE}/{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCE}/{path}.md"


def _text_of(path: str) -> str:
    """Return the text of the page of a file or folder of the repository."""
    if (ROOT / path).is_dir():
        names = sorted(each for each in _with_contents({path}) if each != path)
        return f"# {path}\n\n" + "".join(f"- [{name}](/{name})\n" for name in names)
    text = (ROOT / path).read_text(encoding="utf-8")
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"# {path}\n\n{ticks}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{ticks}\n"


def _is_foreign(target: str) -> bool:
    return re.match(r"[a-z][a-z+.-]*:", target) is not None


def _is_below_docs(path: str) -> bool:
    return path == "docs" or path.startswith("docs/")


def _relinked(text: str, folder: str, place: str) -> str:
    """Replace links to files of the repository by links to pages of the site."""

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if _is_foreign(target):
            return match[0]
        # Pages of folders name files relative to the top of the repository.
        path = posixpath.normpath(target[1:] if target.startswith("/") else posixpath.join(folder, target))
        page = _page_of(path)
        if page is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(page, posixpath.dirname(place) or '.')}{match[3]}"

    return _LINK.sub(link, text)


def _page_of(path: str) -> str | None:
    """Return the page of a file of the repository; None without one."""
    if path in TOP:
        return TOP[path]
    if _is_below_docs(path):
        inside = path.removeprefix("docs").removeprefix("/")
        if (ROOT / path).is_dir():
            return posixpath.join(inside, "README.md") if (ROOT / path / "README.md").exists() else None
        return inside
    return _source_page(path) if (ROOT / path).exists() else None


def _leaves(nav: Any) -> Iterator[str]:
    """Yield all pages and patterns of a navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for inside in nav.values():
            yield from _leaves(inside)
    else:
        for inside in nav:
            yield from _leaves(inside)


def _expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    """Return the navigation with patterns replaced by pages; a page replaces the first pattern that it matches."""
    left = list(pages)

    def pick(pattern: str) -> list[str]:
        found = [page for page in left if fnmatch.fnmatchcase(page, pattern)]
        left[:] = [page for page in left if page not in found]
        return found

    def expand(entries: list[Any]) -> list[Any]:
        written: list[Any] = []
        for entry in entries:
            if isinstance(entry, str):
                written.extend(pick(entry) if "*" in entry else [entry])
            else:
                ((title, inside),) = entry.items()
                written.append({title: expand(inside) if isinstance(inside, list) else inside})
        return written

    return expand(nav)
