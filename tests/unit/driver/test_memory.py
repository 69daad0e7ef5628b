"""docs/driver-memory.md names every attribute that the driver remembers something in, so none is lost unseen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.sources import trees, trees_below

pytestmark = pytest.mark.unit

DOCUMENT = ROOT / "docs/driver-memory.md"
# Where the driver remembers something. Connections, frames and requests are remembered for as long as they last only.
PLACES = (
    "driver",
    "discovery",
    "health",
    "journal",
    "launch/dial",
    "launch/fleet",
    "launch/error_files.py",
    "launch/log_files.py",
    "launch/output_files.py",
    "launch/rank_logs.py",
    "reporting",
    "rendezvous/server/keys.py",
    "rendezvous/server/store.py",
    "rendezvous/server/store_route.py",
    "rendezvous/server/values.py",
    "system/job_clock.py",
    "system/keeping.py",
)
# Of other processes: subcommands, other launchers.
OTHERS = (
    *(
        "driver/mpirun.py",
        "driver/node.py",
        "driver/nodes.py",
        "driver/node_driver.py",
        "driver/nodes_in_etcd.py",
        "driver/endpoint.py",
    ),
    *("reporting/picture.py", "reporting/story.py"),
)
CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict", "SimpleQueue", "fromkeys"}
CHANGING = CONTAINERS | {"Event", "count", "create_future"}
BECOMES = {"journal", "asked", "derived", "anew", "gone", "stage B"}


def changes(value: ast.expr | None) -> bool:
    """Whether what an attribute is made of may change though the attribute is never set again."""
    if isinstance(value, ast.Call):
        called = value.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        return name in CHANGING
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.SetComp | ast.DictComp)


def assigned(function: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The attributes of self that a method sets, and to what."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    yield each.attr, getattr(node, "value", None)


def memory_of(kind: ast.ClassDef) -> set[str]:
    """The attributes of a class that change while its objects live."""
    decorators = [ast.unparse(each) for each in kind.decorator_list]
    if any("frozen=True" in each for each in decorators):
        return set()
    is_record = any("dataclass" in each for each in decorators)
    found: set[str] = set()
    for member in kind.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            at_first = member.name == "__init__"
            found |= {name for name, value in assigned(member) if not at_first or changes(value)}
        elif is_record and isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            found.add(member.target.id)
    return found


def remembered() -> set[str]:
    """ "folder/module.py Class.attribute" of all that the driver remembers."""
    found = set()
    for place in PLACES:
        for name in [place] if place.endswith(".py") else trees_below(place):
            if name in OTHERS:
                continue
            kinds = [node for node in ast.walk(trees()[name]) if isinstance(node, ast.ClassDef)]
            found |= {f"{name} {kind.name}.{attribute}" for kind in kinds for attribute in memory_of(kind)}
    return found


def described() -> list[tuple[str, str]]:
    """What the document's tables say: the same, and what becomes of it."""
    rows = []
    module = ""
    for line in DOCUMENT.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 4 or not re.match(r"`\w+`$", cells[1]):
            continue
        module = cells[0].strip("`") or module
        rows += [(f"{module} {cells[1].strip('`')}.{name}", cells[3]) for name in re.findall(r"`(\w+)`", cells[2])]
    return rows


def test_each_attribute_of_the_driver_is_in_the_document_once() -> None:
    rows = [name for name, _ in described()]
    assert sorted(set(rows)) == sorted(rows), "twice"
    there, told = remembered(), set(rows)
    assert len(there) > 300
    missing, gone = sorted(there - told), sorted(told - there)
    assert not missing, f"new in the driver: say in docs/driver-memory.md what a later driver has of it: {missing}"
    assert not gone, f"in docs/driver-memory.md, and no longer in the driver: {gone}"


def test_each_has_a_known_fate() -> None:
    assert {becomes.split(":")[0].split(",")[0].strip() for _, becomes in described()} <= BECOMES
