"""The objects and their history: what etcd and the API server's registry are.

Used from any thread: every method holds the lock, and is short. Objects that were handed out are never changed again.
"""

from __future__ import annotations

import base64
import bisect
import copy
import datetime
import json
import secrets
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import BUILT_IN, Kind, Object, custom_kinds
from tests.support.clusters.kubernetes_fake.patches import patched
from tests.support.clusters.kubernetes_fake.selectors import Matches

_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"
# Of metadata, what only the server sets.
_SERVERS_OWN = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")
_MOST_BYTES = 3 << 19  # etcd's limit of a request, 1.5 MiB
_MOST_ANNOTATION_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history; ``before`` is what the object was, ``made`` what it is, or was at its end."""

    version: int
    stored_as: tuple[str, str]
    type: str
    made: Object
    before: Object | None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    items: list[Object]
    version: int
    more: str = ""
    remaining: int | None = None


class Storage:
    """See above. Kinds that it does not have yet come with their definitions."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._kinds = {(kind.group, kind.version, kind.plural): kind for kind in BUILT_IN}
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        self._version = 1000
        self._oldest = self._version  # watches go on from this version or a later one
        self._changes: list[Change] = []
        self._snapshots: dict[int, list[Object]] = {}  # of lists that are read page by page, by their versions
        self._listeners: set[Callable[[], None]] = set()
        self._collecting = False
        self._uids: set[str] = set()
        self._owned: Counter[str] = Counter()  # by owner: how many name it

    # --- kinds -----------------------------------------------------------------------------------------------------

    def kind(self, group: str, version: str, plural: str) -> Kind:
        """Raises ApiError: there is none."""
        with self.lock:
            found = self._kinds.get((group, version, plural))
        if found is None:
            raise ApiError("NotFound", "the server could not find the requested resource")
        return found

    def kinds(self) -> list[Kind]:
        with self.lock:
            return list(self._kinds.values())

    def kind_of(self, made: Object) -> Kind:
        """By apiVersion and kind. Raises ApiError."""
        for kind in self.kinds():
            if (kind.api_version, kind.name) == (made.get("apiVersion"), made.get("kind")):
                return kind
        raise ApiError("NotFound", f"no matches for kind {made.get('kind')!r} in version {made.get('apiVersion')!r}")

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Raises ApiError."""
        with self.lock:
            found = self._of(kind).get((namespace, name))
        if found is None:
            raise kind.missing(name)
        return found

    def every(self, kind: Kind, namespace: str = "") -> list[Object]:
        """In etcd's order; of all namespaces for ""."""
        with self.lock:
            return [made for (its, _), made in sorted(self._of(kind).items()) if namespace in ("", its)]

    def page(
        self, kind: Kind, namespace: str, matches: Matches, *, version: str, exact: bool, limit: int, more: str
    ) -> Page:
        """Raises ApiError: the version or the continue token is none that can be had."""
        with self.lock:
            if more:
                at_version, skip = self._token(more)
                snapshot = self._snapshots.get(at_version)
                if snapshot is None:
                    raise ApiError("Expired", "The provided continue parameter is too old to display a consistent list")
            else:
                if version not in ("", "0"):
                    self._check_version(version)
                    if exact and int(version) < self._version:
                        raise ApiError("Expired", f"The resourceVersion for the provided list is too old: {version}")
                at_version, skip, snapshot = self._version, 0, self.every(kind, namespace)
            found = [made for made in snapshot if matches(made)]
            items, rest = found[skip : skip + limit] if limit else found[skip:], len(found) - skip - limit
            if not limit or rest <= 0:
                return Page(items, at_version)
            self._snapshots[at_version] = snapshot
            token = base64.urlsafe_b64encode(json.dumps({"v": "1", "rv": at_version, "skip": skip + limit}).encode())
            return Page(items, at_version, token.decode(), rest)

    def since(self, kind: Kind, version: int, namespace: str, matches: Matches) -> tuple[list[Object], int]:
        """The watch events after a version, and up to which it is. Raises ApiError: it is too old."""
        with self.lock:
            if version < self._oldest:
                raise ApiError("Expired", f"too old resource version: {version} ({self._oldest})")
            events = []
            for change in self._changes[bisect.bisect_right(self._changes, version, key=lambda each: each.version) :]:
                if change.stored_as != kind.stored_as:
                    continue
                if namespace and change.made["metadata"].get("namespace") != namespace:
                    continue
                event = _event(change, matches)
                if event is not None:
                    events.append(event)
            return events, self._version

    def bind(self, kind: Kind, pod: Object, node: str) -> None:
        """What ``pods/binding`` does for a scheduler: the pod has a node, which nobody else may set."""
        with self.lock:
            old = self.get(kind, pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._put(kind, {**old, "spec": {**old["spec"], "nodeName": node}}, old)

    def watch_from(self, version: str) -> int:
        """Where a watch from this version begins. Raises ApiError."""
        self._check_version(version)
        return int(version)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Called after each change, by whoever made it. Returns what ends that."""
        with self.lock:
            self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def compact(self) -> None:
        """Forgets the history: all versions up to now but the last are too old."""
        with self.lock:
            self._oldest = self._version
            self._changes.clear()
            self._snapshots.clear()

    def _check_version(self, version: str) -> None:
        if not version.isdecimal():
            raise ApiError("Invalid", f"resourceVersion: Invalid value: {version!r}")
        if int(version) > self._version:
            raise ApiError(
                "Timeout", f"Too large resource version: {version}, current: {self._version}", retryAfterSeconds=1
            )

    @staticmethod
    def _token(text: str) -> tuple[int, int]:
        try:
            read = json.loads(base64.urlsafe_b64decode(text))
            return int(read["rv"]), int(read["skip"])
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError("BadRequest", f"continue key is not valid: {error}") from error

    def _of(self, kind: Kind) -> dict[tuple[str, str], Object]:
        return self._objects.setdefault(kind.stored_as, {})

    # --- writing ---------------------------------------------------------------------------------------------------

    def create(self, kind: Kind, namespace: str, given: Any, *, dry: bool = False) -> Object:
        """Raises ApiError."""
        made = kind.checked(given, namespace)
        with self.lock:
            if namespace:
                owner = self.get(self.kind("", "v1", "namespaces"), "", namespace)
                if "deletionTimestamp" in owner["metadata"]:
                    raise ApiError(
                        "Forbidden", f"unable to create new content in namespace {namespace}: it is terminated"
                    )
            metadata = made["metadata"]
            if metadata.pop("resourceVersion", ""):
                raise ApiError("BadRequest", "resourceVersion should not be set on objects to be created")
            for each in _SERVERS_OWN:
                metadata.pop(each, None)
            if not metadata.get("name"):
                metadata["name"] = f"{metadata['generateName']}{secrets.token_hex(3)[:5]}"
            name = metadata["name"]
            if (namespace, name) in self._of(kind):
                raise kind.exists(name)
            if namespace:
                metadata["namespace"] = namespace
            if kind.has_status:
                made.pop("status", None)
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = _time()
            if "spec" in made:
                metadata["generation"] = 1
            made = kind.with_defaults(made)
            self._check_size(kind, made)
            if kind.plural == "customresourcedefinitions":
                made = self._define(made)
            return made if dry else self._put(kind, made, None)

    def replace(self, kind: Kind, namespace: str, name: str, given: Any, subresource: str, *, dry: bool) -> Object:
        """Raises ApiError."""
        with self.lock:
            old = self.get(kind, namespace, name)
            if kind.is_custom and isinstance(given, dict) and not given.get("metadata", {}).get("resourceVersion"):
                text = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
                raise kind.invalid(name, text)
            return self._update(kind, old, given, subresource, dry=dry)

    def patch(
        self, kind: Kind, namespace: str, name: str, how: str, patch: Any, subresource: str, *, dry: bool
    ) -> Object:
        """Raises ApiError."""
        with self.lock:
            old = self.get(kind, namespace, name)
            return self._update(kind, old, patched(kind, old, how, patch), subresource, dry=dry)

    def _update(self, kind: Kind, old: Object, given: Any, subresource: str, *, dry: bool) -> Object:
        name, namespace = old["metadata"]["name"], old["metadata"].get("namespace", "")
        new = kind.with_defaults(kind.checked(given, namespace))
        metadata = new["metadata"]
        if metadata.get("name") != name:
            raise ApiError("BadRequest", f"the name of the object ({metadata.get('name')}) is not {name}")
        if metadata.get("resourceVersion", old["metadata"]["resourceVersion"]) != old["metadata"]["resourceVersion"]:
            raise kind.conflict(
                name, "the object has been modified; please apply your changes to the latest version and try again"
            )
        if metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise kind.conflict(name, f"Precondition failed: UID in precondition: {metadata['uid']}")
        if subresource == "status":
            status = new.get("status")
            new = copy.deepcopy(old)
            new.pop("status", None)
            if status is not None:
                new["status"] = status
        else:
            if kind.has_status:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = old["status"]
            for each in _SERVERS_OWN:
                metadata.pop(each, None)
                if each in old["metadata"]:
                    metadata[each] = old["metadata"][each]
            if namespace:
                metadata["namespace"] = namespace
            self._check_update(kind, old, new)
            if any(old.get(key) != new.get(key) for key in {*old, *new} - {"metadata", "status"}) and "spec" in new:
                metadata["generation"] = old["metadata"].get("generation", 0) + 1
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if new == old or dry:
            return new
        self._check_size(kind, new)
        if kind.plural == "customresourcedefinitions":
            new = self._define(new)
        return self._put(kind, new, old)

    def _check_update(self, kind: Kind, old: Object, new: Object) -> None:
        name = old["metadata"]["name"]
        for path in kind.fixed:
            was, is_now = _at(old, path), _at(new, path)
            if was != is_now and not (path == "spec.template" and old["spec"].get("suspend")):
                raise kind.invalid(name, f"{path}: Forbidden: field is immutable")
        if old.get("immutable") and (old.get("data"), True) != (new.get("data"), new.get("immutable")):
            raise kind.invalid(name, "data: Forbidden: field is immutable when `immutable` is set")
        had, has = old["metadata"].get("finalizers", ()), new["metadata"].get("finalizers", ())
        if "deletionTimestamp" in old["metadata"] and set(has) - set(had):
            text = "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted"
            raise kind.invalid(name, text)

    @staticmethod
    def _check_size(kind: Kind, made: Object) -> None:
        annotations = sum(len(key) + len(value) for key, value in made["metadata"].get("annotations", {}).items())
        if annotations > _MOST_ANNOTATION_BYTES:
            raise kind.invalid(
                made["metadata"]["name"], "metadata.annotations: Too long: may not be more than 262144 bytes"
            )
        if len(json.dumps(made)) > _MOST_BYTES:
            raise kind.invalid(made["metadata"]["name"], "etcdserver: request is too large")

    def _define(self, crd: Object) -> Object:
        for kind in custom_kinds(crd):
            self._kinds[kind.group, kind.version, kind.plural] = kind
        now = _time()
        conditions = [
            {"type": each, "status": "True", "reason": each, "message": "", "lastTransitionTime": now}
            for each in ("NamesAccepted", "Established")
        ]
        stored = [each["name"] for each in crd["spec"]["versions"] if each["storage"]]
        crd["status"] = {"conditions": conditions, "acceptedNames": crd["spec"]["names"], "storedVersions": stored}
        return crd

    def _put(self, kind: Kind, made: Object, old: Object | None) -> Object:
        """Keeps an object, or removes it where it is deleted and nobody holds it any more."""
        self._version += 1
        made = copy.deepcopy(made)
        metadata = made["metadata"]
        metadata["resourceVersion"] = str(self._version)
        if not metadata.get("finalizers"):
            metadata.pop("finalizers", None)
        key = (metadata.get("namespace", ""), metadata["name"])
        gone = (
            "deletionTimestamp" in metadata
            and not metadata.get("finalizers")
            and not metadata.get("deletionGracePeriodSeconds", 0)
        )
        if gone:
            self._of(kind).pop(key, None)
            if kind.plural == "customresourcedefinitions":
                self._undefine(made)
        else:
            self._of(kind)[key] = made
        event = "DELETED" if gone else "ADDED" if old is None else "MODIFIED"
        self._changes.append(Change(self._version, kind.stored_as, event, made, old))
        for listener in list(self._listeners):
            listener()
        if self._may_be_garbage(made, old, gone=gone):
            self._collect_garbage()
        return made

    def _may_be_garbage(self, made: Object, old: Object | None, *, gone: bool) -> bool:
        metadata = made["metadata"]
        owners = [each["uid"] for each in metadata.get("ownerReferences", ())]
        if old is not None:
            self._owned.subtract(each["uid"] for each in old["metadata"].get("ownerReferences", ()))
        if gone:
            self._uids.discard(metadata["uid"])
            return bool(owners) or self._owned[metadata["uid"]] > 0
        self._uids.add(metadata["uid"])
        self._owned.update(owners)
        return _FOREGROUND in metadata.get("finalizers", ()) or bool(owners and self._uids.isdisjoint(owners))

    def _undefine(self, crd: Object) -> None:
        for kind in [kind for kind in self.kinds() if kind.is_custom]:
            if kind.stored_as == (crd["spec"]["group"], crd["spec"]["names"]["plural"]):
                for made in self.every(kind):
                    self._remove(kind, made)
                del self._kinds[kind.group, kind.version, kind.plural]

    # --- deletion --------------------------------------------------------------------------------------------------

    def delete(
        self, kind: Kind, namespace: str, name: str, options: Object, *, dry: bool = False
    ) -> tuple[Object, bool]:
        """Returns the object, and whether it is gone already. Raises ApiError."""
        with self.lock:
            made = self.get(kind, namespace, name)
            wanted = options.get("preconditions") or {}
            for key in ("uid", "resourceVersion"):
                if wanted.get(key) and wanted[key] != made["metadata"][key]:
                    raise kind.conflict(name, f"Precondition failed: {key}: {wanted[key]}, {made['metadata'][key]}")
            if dry:
                return made, False
            grace_s = self._grace_s(kind, made, options.get("gracePeriodSeconds"))
            new = copy.deepcopy(made)
            metadata = new["metadata"]
            finalizers = list(metadata.get("finalizers", ()))
            policy = options.get("propagationPolicy") or ("Orphan" if options.get("orphanDependents") else "Background")
            if policy not in ("Background", "Foreground", "Orphan"):
                raise ApiError("Invalid", f"propagationPolicy: Invalid value: {policy!r}")
            if policy == "Foreground" and _FOREGROUND not in finalizers:
                finalizers.append(_FOREGROUND)
            if policy == "Orphan":
                self._orphan(made)
            metadata["finalizers"] = finalizers
            if not finalizers:
                del metadata["finalizers"]
            left_s = metadata.get("deletionGracePeriodSeconds")
            if left_s is None or grace_s < left_s:
                metadata["deletionTimestamp"] = _time(grace_s)
                metadata["deletionGracePeriodSeconds"] = grace_s
            if kind.plural == "namespaces":
                self._empty(name)
            kept = made if new == made else self._put(kind, new, made)
            return kept, (namespace, name) not in self._of(kind)

    def _grace_s(self, kind: Kind, made: Object, asked: int | None) -> int:
        if kind.plural != "pods":
            return 0
        if not made["spec"].get("nodeName") or made["status"]["phase"] in ("Succeeded", "Failed"):
            return 0  # no kubelet has anything to end
        return int(made["spec"]["terminationGracePeriodSeconds"] if asked is None else asked)

    def _remove(self, kind: Kind, made: Object, **options: Any) -> None:
        self.delete(kind, made["metadata"].get("namespace", ""), made["metadata"]["name"], options)

    def _empty(self, namespace: str) -> None:
        for kind in self.kinds():
            if kind.namespaced:
                for made in self.every(kind, namespace):
                    self._remove(kind, made)

    def _orphan(self, owner: Object) -> None:
        for kind, made in self._dependents(owner["metadata"]["uid"]):
            new = copy.deepcopy(made)
            owners = new["metadata"]["ownerReferences"]
            new["metadata"]["ownerReferences"] = [each for each in owners if each["uid"] != owner["metadata"]["uid"]]
            self._put(kind, new, made)

    def _dependents(self, uid: str) -> Iterator[tuple[Kind, Object]]:
        seen = set()
        for kind in self.kinds():
            if kind.stored_as in seen:
                continue
            seen.add(kind.stored_as)
            for made in self.every(kind):
                if any(each["uid"] == uid for each in made["metadata"].get("ownerReferences", ())):
                    yield kind, made

    def _collect_garbage(self) -> None:
        """Deletes what has only owners that are gone, and lets go of those that waited for their dependents."""
        if self._collecting:
            return
        self._collecting = True
        try:
            while self._collect_once():
                pass
        finally:
            self._collecting = False

    def _collect_once(self) -> bool:
        unique = {kind.stored_as: kind for kind in self.kinds()}
        changed = False
        for kind in unique.values():
            for made in self.every(kind):
                metadata = made["metadata"]
                owners = metadata.get("ownerReferences", ())
                if (
                    owners
                    and "deletionTimestamp" not in metadata
                    and self._uids.isdisjoint(each["uid"] for each in owners)
                ):
                    self._remove(kind, made)
                    changed = True
                if _FOREGROUND in metadata.get("finalizers", ()) and "deletionTimestamp" in metadata:
                    changed |= self._go_on_in_the_foreground(kind, made)
        return changed

    def _go_on_in_the_foreground(self, kind: Kind, owner: Object) -> bool:
        uid = owner["metadata"]["uid"]
        dependents = list(self._dependents(uid))
        begun = [each for each in dependents if "deletionTimestamp" not in each[1]["metadata"]]
        for dependent in begun:
            self._remove(*dependent, propagationPolicy="Foreground")
        blocking = [
            made
            for _, made in self._dependents(uid)
            if any(
                each["uid"] == uid and each.get("blockOwnerDeletion") for each in made["metadata"]["ownerReferences"]
            )
        ]
        if blocking:
            return bool(begun)
        new = copy.deepcopy(owner)
        new["metadata"]["finalizers"].remove(_FOREGROUND)
        self._put(kind, new, owner)
        return True


def _event(change: Change, matches: Matches) -> Object | None:
    """As a watcher with a selector sees it: what no longer fits is deleted for it, what begins to fit added."""
    fits = matches(change.made)
    fitted = change.before is not None and matches(change.before)
    if change.type == "DELETED":
        return {"type": "DELETED", "object": change.made} if fits or fitted else None
    if fits:
        return {"type": "MODIFIED" if fitted else "ADDED", "object": change.made}
    if not fitted or change.before is None:
        return None
    last = {**change.before, "metadata": {**change.before["metadata"], "resourceVersion": str(change.version)}}
    return {"type": "DELETED", "object": last}


def _at(made: Object, path: str) -> Any:
    value: Any = made
    for each in path.split("."):
        value = value.get(each) if isinstance(value, dict) else None
    return value


def _time(later_s: float = 0) -> str:
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later_s)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")
