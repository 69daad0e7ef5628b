"""The schema of events, as strict as tests want it: what is not documented there is a mistake."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.paths import ROOT

SCHEMA = ROOT / "elastic_driver/reporting/events.schema.json"


@functools.cache
def schema() -> dict[str, Any]:
    """As it is."""
    read: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return read


@functools.cache
def _validators() -> dict[str, Any]:
    from jsonschema import Draft202012Validator

    found = {}
    for name, described in schema()["$defs"].items():
        strict = copy.deepcopy(described)
        _forbid_others(strict)
        strict["properties"] |= schema()["properties"]
        strict["required"] = [*strict["required"], *schema()["required"]]
        found[name] = Draft202012Validator(strict)
    return found


def _forbid_others(described: dict[str, Any]) -> None:
    if "properties" in described:
        described["additionalProperties"] = False
        for each in described["properties"].values():
            _forbid_others(each)
    if isinstance(described.get("items"), dict):
        _forbid_others(described["items"])


def complaints(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with these events, and what is not documented; nothing where jsonschema is not installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return []
    found = []
    for event in events:
        validator = _validators().get(str(event.get("event")))
        if validator is None:
            found.append(f"no such event is documented: {event}")
        else:
            found += [f"{event['event']}: {error.message}" for error in validator.iter_errors(event)]
    return found
