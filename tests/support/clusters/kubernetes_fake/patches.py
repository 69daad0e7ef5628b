"""The three kinds of patches: a new object of an old one and a patch; neither is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jsonpatch

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import Kind, Object

MERGE, JSON, STRATEGIC = (
    "application/merge-patch+json",
    "application/json-patch+json",
    "application/strategic-merge-patch+json",
)
# By what the items of these lists are told apart in a strategic merge; all other lists are replaced.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "conditions": "type",
    "ownerReferences": "uid",
    "secrets": "name",
}


def patched(kind: Kind, old: Object, how: str, patch: Any) -> Object:
    """The object after a patch. Raises ApiError."""
    if how == JSON:
        if not isinstance(patch, list):
            raise ApiError("BadRequest", "a JSON patch is a list")
        try:
            made: Object = jsonpatch.apply_patch(old, patch)
        except (jsonpatch.InvalidJsonPatch, jsonpatch.JsonPointerException) as error:
            raise ApiError("BadRequest", f"the patch cannot be read: {error}") from error
        except jsonpatch.JsonPatchException as error:
            raise ApiError(
                "Invalid", f"the server rejected our request due to an error in our request: {error}"
            ) from error
        return made
    if not isinstance(patch, dict):
        raise ApiError("BadRequest", "a patch is a map")
    if how == MERGE:
        made: Object = merged(copy.deepcopy(old), patch)
        return made
    if how == STRATEGIC and not kind.is_custom:
        return _strategic(copy.deepcopy(old), patch)
    raise ApiError("UnsupportedMediaType", f"the body of the request was in an unknown format: {how}")


def merged(old: Any, patch: Any) -> Any:
    """A value with a JSON merge patch (RFC 7386). Both stay as they are; it shares what is not patched."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    made = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made


def _strategic(old: Object, patch: Object) -> Object:
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            old[name] = [each for each in old.get(name, ()) if each not in value]
        elif key.startswith(("$setElementOrder/", "$retainKeys", "$patch")):
            continue
        elif value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            old[key] = _strategic(old.get(key) or {}, value)
        elif isinstance(value, list) and key in _KEYS and all(isinstance(each, dict) for each in value):
            old[key] = _strategic_list(old.get(key) or [], value, _KEYS[key])
        elif isinstance(value, list) and key == "finalizers":
            old[key] = list(dict.fromkeys([*old.get(key, ()), *value]))
        else:
            old[key] = copy.deepcopy(value)
    return old


def _strategic_list(old: list[Object], patch: list[Object], key: str) -> list[Object]:
    made = list(old)
    for each in patch:
        if key not in each:
            raise ApiError("Invalid", f"map: {each} does not contain declared merge key: {key}")
        at = next((place for place, item in enumerate(made) if item.get(key) == each[key]), None)
        if each.get("$patch") == "delete":
            made = [item for item in made if item.get(key) != each[key]]
        elif at is None:
            made.append(copy.deepcopy(each))
        else:
            made[at] = _strategic(dict(made[at]), each)
    return made
