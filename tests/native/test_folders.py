"""The folders of ``native/`` stand in one order, and what a file includes is never of a later one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
# A file includes what is in its own folder or in one before it; "" is native/ itself.
FOLDERS = ["", "vitals", "arithmetic", "shared_memory", "net", "gloo", "engine", "python", "tests"]
# Of one floor: neither includes the other.
APART = [{"shared_memory", "net"}, {"shared_memory", "gloo"}, {"python", "tests"}]
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def wrong_arrows(root: Path) -> list[str]:
    """What is wrong with the includes between the folders of ``root``, a line for each."""
    files = {path.relative_to(root).as_posix(): path for path in (*root.rglob("*.h"), *root.rglob("*.cpp"))}
    wrong = [f"{name}: its folder is not in the table" for name in files if folder_of(name) not in FOLDERS]
    for name, path in files.items():
        for included in INCLUDE.findall(path.read_text()):
            source, target = folder_of(name), folder_of(included)
            if included not in files:
                wrong.append(f"{name}: there is no native/{included}")
            elif source not in FOLDERS or target not in FOLDERS:
                continue
            elif FOLDERS.index(target) > FOLDERS.index(source) or {source, target} in APART:
                wrong.append(f"{name}: includes {included}, and {source or 'native'}/ stands below {target}/")
    return sorted(wrong)


def test_includes_go_one_way() -> None:
    assert wrong_arrows(NATIVE) == []


def test_all_folders_of_the_table_are_there() -> None:
    assert [folder for folder in FOLDERS if not list((NATIVE / folder).glob("*.h"))] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("net/a.h", '#include "engine/b.h"\n', "net/a.h: includes engine/b.h, and net/ stands below engine/"),
        ("net/a.h", ' # include  "shared_memory/b.h"\n', "net/a.h: includes shared_memory/b.h"),
        ("errors.h", '#include "net/b.h"\n', "errors.h: includes net/b.h, and native/ stands below net/"),
        ("net/a.h", '#include "b.h"\n', "net/a.h: there is no native/b.h"),
        ("cellar/a.h", "", "cellar/a.h: its folder is not in the table"),
    ],
)
def test_an_arrow_up_is_found(tmp_path: Path, name: str, text: str, expected: str) -> None:
    for path in ("engine/b.h", "net/b.h", "shared_memory/b.h", "arithmetic/b.h"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text('#include "arithmetic/b.h"\n' if path != "arithmetic/b.h" else "")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    found = wrong_arrows(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(expected)
