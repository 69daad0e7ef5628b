"""docs/troubleshooting.md quotes lines of the product: each of them still stands in the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.sources import trees

pytestmark = pytest.mark.unit

PAGE = ROOT / "docs" / "troubleshooting.md"
# Blocks of other programs' output (ssh's, a shell's) are marked "console" and are not compared.
_BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"^(elasticrun( join| doctor)?|elastic_driver): ((warning|error): )?")
_PLACEHOLDER = re.compile(r"<[a-z ]+>")
_HOLE = "\0"
# A piece between two placeholders may be as short as " of ". One of each line has to say what it is about.
_TELLING = 12
# A line may consist of several texts: "job failed: ", the reason, "; ", what to do.
_MOST_JOINS = 3
_FEWEST_SYMPTOMS = 30


def quoted() -> list[str]:
    """The lines of the product that the page shows."""
    return [line for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")) for line in block.splitlines()]


def pieces(line: str) -> list[str]:
    """What stands between the placeholders of a line, without the name of the program in front of it."""
    return [piece for piece in _PLACEHOLDER.split(_HEAD.sub("", line)) if piece.strip()]


def missing(line: str) -> list[str]:
    """The pieces of a line that the texts of the source do not make up."""
    return [piece for piece in pieces(line) if not _is_made_up(piece)]


@functools.cache
def _is_made_up(piece: str, *, joins: int = 0) -> bool:
    """Whether a piece is a part of one text of the source, or of several that are put together at their ends."""
    begin = _HOLE if joins else ""
    if begin + piece in source():
        return True
    return joins < _MOST_JOINS and any(
        begin + piece[:at] + _HOLE in source() and _is_made_up(piece[at:], joins=joins + 1)
        for at in reversed(range(1, len(piece)))
    )


@functools.cache
def source() -> str:
    """The texts of the source, with a hole where a value is filled in, and at the ends of each."""
    return _HOLE.join(["", *sorted({*_python_texts(), *_native_texts()}), ""])


def _python_texts() -> Iterator[str]:
    for tree in trees().values():
        for node in _without_docstrings(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[-+.0-9]*[a-z]", _HOLE, node.value)
            elif isinstance(node, ast.JoinedStr):
                yield "".join(_part(value) for value in node.values)


def _without_docstrings(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from _without_docstrings(child)


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else _HOLE


def _native_texts() -> Iterator[str]:
    for path in (ROOT / "native").rglob("*.cpp"):
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
        yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)


def test_there_are_enough_symptoms() -> None:
    assert len(re.findall(r"^### ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) >= _FEWEST_SYMPTOMS


@pytest.mark.parametrize("line", quoted())
def test_a_quoted_line_stands_in_the_source(line: str) -> None:
    assert not missing(line), "no text of the source has this: quote the line as it is now"
    assert max(map(len, pieces(line))) >= _TELLING, "too little of this line is quoted to find it"


@pytest.mark.parametrize("line", ["elasticrun: error: no such words anywhere", "worker <host> was abducted by <who>"])
def test_a_line_that_has_changed_is_found(line: str) -> None:
    assert missing(line)
