"""docs/design.md: each folder is on its map, each file that it names exists, each message of agents is in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_driver.rendezvous import agent_messages

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, NATIVE = ROOT / "elastic_driver", ROOT / "native"
_DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
_MAP = re.search(r"^## The map$.*?(?=^## )", _DESIGN, re.M | re.S)

pytestmark = pytest.mark.unit


def named(pattern: str) -> set[str]:
    assert _MAP is not None
    return set(re.findall(pattern, _MAP[0], re.M))


def folders(root: Path, suffix: str) -> set[str]:
    return {f"{path.parent.relative_to(root)}/" for path in root.rglob(f"*{suffix}") if path.parent != root}


def test_every_folder_is_on_the_map() -> None:
    # What stands below these is one thing with them.
    inside = ("compat/", "function/wrap_hook/", "launch/warm/hook/", "tests/")
    there = folders(PACKAGE, ".py") | folders(NATIVE, ".cpp")
    rows = named(r"^\| `([\w/]+/)` \|")
    assert {folder for folder in there if not folder.startswith(inside)} | {"compat/"} == rows


def test_every_file_that_the_map_names_exists() -> None:
    begins = {folder + file for folder, file in named(r"^\| `([\w/]+/)` \|.*\| `(\w+\.py)`") if file}
    mentioned = named(r"`((?:\w+/)+\w+\.(?:py|cpp))`")
    assert len(begins) > 15
    assert len(mentioned) > 10
    assert [
        file for file in sorted(begins | mentioned) if not (PACKAGE / file).exists() and not (ROOT / file).exists()
    ] == []


def test_every_message_of_agents_is_in_the_table() -> None:
    of_agents = re.search(r"^### Agents$.*?(?=^### )", _DESIGN, re.M | re.S)
    assert of_agents is not None
    messages = {kind.name for kind in agent_messages.AgentMessage.__subclasses__()}
    assert len(messages) > 40
    assert messages - set(re.findall(r"`(\w+)`", of_agents[0])) == set()
