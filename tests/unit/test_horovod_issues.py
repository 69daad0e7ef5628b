"""The table of Horovod's troubles: every row is answered, and what it names as proof is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TABLE = ROOT / "docs" / "horovod-issues.md"
KEYS = [*map(str, range(1, 37)), *(f"S{number}" for number in range(1, 15))]


def rows() -> dict[str, list[str]]:
    """The cells of each row, by its key."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| S?\d+ \|", line)
    ]
    assert len({row[0] for row in cells}) == len(cells), "a row is there twice"
    return {row[0]: row for row in cells}


def proofs(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[-1])


def missing(proof: str) -> str:
    """What is not there of a proof; nothing when all is well."""
    path, _, name = proof.partition("::")
    if not (TESTS / path).is_file():
        return f"no file tests/{path}"
    if path.endswith(".txt"):
        return "" if not name else f"{path} has no parts"
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    within, _, name = name.rpartition("::")
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == within), tree.body)
    tests = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return "" if name.startswith("test_") and name in tests else f"no test {name} in tests/{path}"


def test_no_row_is_left_out() -> None:
    assert list(rows()) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_a_row_is_answered(key: str) -> None:
    row = rows()[key]
    *_, trouble, here, how, _ = row
    assert len(row) == (5 if key.startswith("S") else 6), "a | in a cell?"
    assert here in ("yes", "in part", "no")
    assert trouble
    assert how
    assert proofs(row), "nothing would fail if this were no longer so"
    assert [text for text in map(missing, proofs(row)) if text] == []


def test_every_issue_that_a_history_names_is_in_the_table() -> None:
    table = rows().values()
    cited = 0
    for path in sorted((TESTS / "scenarios").glob("*.txt")):
        comment = " ".join(
            line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
        )
        for first, others in re.findall(r"\w+/\w+#(\d+)((?:, #\d+)*)", comment):
            for number in (first, *re.findall(r"\d+", others)):
                cited += 1
                row = next((row for row in table if re.search(rf"#{number}\b", row[1])), None)
                assert row is not None, f"{path.name}: #{number}"
                assert f"scenarios/{path.name}" in proofs(row), f"#{number} without {path.name}"
    assert cited > 20


@pytest.mark.parametrize(
    "proof", ["scenarios/nothing.txt", "unit/test_horovod_issues.py::test_absent", "unit/test_horovod_issues.py"]
)
def test_what_is_not_there_is_noticed(proof: str) -> None:
    assert missing(proof)
