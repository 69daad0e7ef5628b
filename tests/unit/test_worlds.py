"""docs/worlds: what belongs to torchrun, Horovod, MPI, TensorFlow and Kubernetes is found from one page each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "elastic_driver"
PAGES = sorted((ROOT / "docs/worlds").glob("*.md"))
# A module belongs to a world if its path has one of these words ...
_WORDS = re.compile(r"torchrun|torchelastic|wrap|horovod|compat|mpi|launched|tensorflow|chief|kubernetes|pods|trainer")
# ... or begins with one of these.
_MORE = ("service/", "task_server.py", "dialects/servers.py", "driver/servers.py", "system/mounted_volumes.py")

pytestmark = pytest.mark.unit


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def of_a_world(module: str) -> bool:
    return bool(_WORDS.search(module)) or module.startswith(_MORE)


def entries(page: Path) -> Iterator[str]:
    """The modules and folders in the first column of its table."""
    for row in re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), re.M):
        yield from re.findall(r"`([^`]+)`", row)


def test_there_is_a_page_for_each() -> None:
    assert [page.stem for page in PAGES] == ["horovod", "kubernetes", "mpi", "tensorflow", "torchrun"]
    linked = {"docs/design.md": "worlds/", "CONTRIBUTING.md": "docs/worlds/"}
    for text, folder in linked.items():
        said = (ROOT / text).read_text(encoding="utf-8")
        assert [page.name for page in PAGES if f"({folder}{page.name})" not in said] == [], text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    found = list(entries(page))
    assert len(found) > 3
    assert [entry for entry in found if not (PACKAGE / entry).exists()] == []
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
    # What else it names, in its text.
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
    assert [module for module in named if not (PACKAGE / module).exists()] == []


def test_each_module_of_a_world_is_in_one_page() -> None:
    times: Counter[str] = Counter()
    everywhere = modules()
    for page in PAGES:
        for entry in entries(page):
            times.update(
                module for module in everywhere if module == entry or (entry[-1] == "/" and module.startswith(entry))
            )
    assert [module for module in everywhere if of_a_world(module) and not times[module]] == []
    assert [module for module, count in times.items() if count > 1] == []
