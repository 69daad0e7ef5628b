"""One request, read: what its path, its query and its body say in Kubernetes' words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.clusters.kubernetes_fake.answers import ApiError

_QUERY = frozenset(
    (
        "watch",
        "labelSelector",
        "fieldSelector",
        "resourceVersion",
        "resourceVersionMatch",
        "limit",
        "continue",
        "timeoutSeconds",
        "allowWatchBookmarks",
        "sendInitialEvents",
        "pretty",
        "dryRun",
        "fieldManager",
        "fieldValidation",
        "gracePeriodSeconds",
        "propagationPolicy",
        "orphanDependents",
        "timeout",
    )
)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False, "": False}


@dataclass(frozen=True, slots=True)
class Target:
    """What a path of a resource names."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def target_of(path: str) -> Target | None:
    """None for a path of no resource. Raises ApiError."""
    words = path.strip("/").split("/")
    if words[:2] == ["api", "v1"] and len(words) > 2:
        group, version, rest = "", "v1", words[2:]
    elif words[0] == "apis" and len(words) > 3:
        group, version, rest = words[1], words[2], words[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if len(rest) > 3 or not all(rest):
        raise ApiError("NotFound", "the server could not find the requested resource")
    plural, name, subresource = [*rest, "", ""][:3]
    return Target(group, version, plural, namespace, name, subresource)


def check_query(query: Mapping[str, str]) -> None:
    """The real one lets these pass; here a slip shows. Raises ApiError."""
    for word in query:
        if word not in _QUERY:
            raise ApiError("BadRequest", f"the query has a word that is not known: {word}")


def boolean(query: Mapping[str, str], key: str) -> bool:
    """Raises ApiError."""
    try:
        return _BOOLEANS[query.get(key, "").lower()]
    except KeyError:
        raise ApiError("BadRequest", f"{key}: invalid boolean {query[key]!r}") from None


def integer(query: Mapping[str, str], key: str) -> int:
    """0 without. Raises ApiError."""
    text = query.get(key) or "0"
    if not text.isdecimal():
        raise ApiError("BadRequest", f"{key}: invalid number {text!r}")
    return int(text)


def is_dry(query: Mapping[str, str]) -> bool:
    """Raises ApiError."""
    if query.get("dryRun", "All") != "All":
        raise ApiError("Invalid", f'dryRun: Unsupported value: {query["dryRun"]!r}: supported values: "All"')
    return "dryRun" in query


def json_of(body: bytes) -> Any:
    """Raises ApiError."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise ApiError("BadRequest", f"the body cannot be read as JSON: {error}") from error


def delete_options(body: bytes, query: Mapping[str, str]) -> dict[str, Any]:
    """From the body and the query. Raises ApiError."""
    options = json_of(body) if body.strip() else {}
    if not isinstance(options, dict):
        raise ApiError("BadRequest", "DeleteOptions are a map")
    for key in ("propagationPolicy",):
        if key in query:
            options.setdefault(key, query[key])
    if "gracePeriodSeconds" in query:
        options.setdefault("gracePeriodSeconds", integer(query, "gracePeriodSeconds"))
    if "orphanDependents" in query:
        options.setdefault("orphanDependents", boolean(query, "orphanDependents"))
    return options
