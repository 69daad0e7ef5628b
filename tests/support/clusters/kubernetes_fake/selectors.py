"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import Kind, Object

Matches = Callable[[Object], bool]

_KEY = r"(?P<key>[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?)"
_SET = re.compile(_KEY + r"\s+(?P<word>in|notin)\s*\((?P<values>[^()]*)\)")
_EQUALS = re.compile(_KEY + r"\s*(?P<sign>==|!=|=)\s*(?P<value>[-A-Za-z0-9_.]*)")
_EXISTS = re.compile(r"(?P<not>!?)\s*" + _KEY)
_FIELD = re.compile(r"(?P<key>[A-Za-z.]+)\s*(?P<sign>==|!=|=)\s*(?P<value>.*)")


def matcher(kind: Kind, labels: str, fields: str) -> Matches:
    """Whether an object fits both. Raises ApiError."""
    tests = [_label(each) for each in _split(labels)] + [_field(kind, each) for each in fields.split(",") if each]
    return lambda made: all(test(made) for test in tests)


def _split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    return [each.strip() for each in re.split(r",(?![^()]*\))", text) if each.strip()]


def _label(text: str) -> Matches:
    def value(made: Object) -> str | None:
        found: str | None = made["metadata"].get("labels", {}).get(match["key"])
        return found

    if match := _SET.fullmatch(text):
        values, inside = {each.strip() for each in match["values"].split(",")}, match["word"] == "in"
        return lambda made: (value(made) in values) is inside
    if match := _EQUALS.fullmatch(text):
        wanted, equal = match["value"], match["sign"] != "!="
        return lambda made: (value(made) == wanted) is equal
    if match := _EXISTS.fullmatch(text):
        absent = bool(match["not"])
        return lambda made: (value(made) is None) is absent
    raise ApiError("BadRequest", f"unable to parse requirement: {text!r}")


def _field(kind: Kind, text: str) -> Matches:
    match = _FIELD.fullmatch(text.strip())
    if match is None:
        raise ApiError("BadRequest", f"invalid selector: {text!r}")
    path, wanted, equal = match["key"], match["value"], match["sign"] != "!="
    known = ("metadata.name", *(("metadata.namespace",) if kind.namespaced else ()), *kind.fields)
    if path not in known:
        raise ApiError("BadRequest", f"field label not supported: {path}")
    return lambda made: (_text(made, path) == wanted) is equal


def _text(made: Object, path: str) -> str:
    value: Any = made
    for each in path.split("."):
        value = value.get(each, "") if isinstance(value, dict) else ""
    return str(value).lower() if isinstance(value, bool) else str(value)
