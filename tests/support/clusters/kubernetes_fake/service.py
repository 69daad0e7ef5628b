"""The HTTP of the API server: aiohttp's handler over the storage. Lives on one event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.clusters.kubernetes_fake.answers import ApiError
from tests.support.clusters.kubernetes_fake.kinds import Kind, Object
from tests.support.clusters.kubernetes_fake.rules import Book, Request, Users
from tests.support.clusters.kubernetes_fake.selectors import Matches, matcher
from tests.support.clusters.kubernetes_fake.storage import Storage
from tests.support.clusters.kubernetes_fake.targets import (
    Target,
    boolean,
    check_query,
    delete_options,
    integer,
    is_dry,
    json_of,
    target_of,
)

# A real server's are random, between 30 and 60 min.
_LONGEST_WATCH_S = 1800.0
_RBAC = "rbac.authorization.k8s.io"
_VERSION = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.0",
    "gitCommit": "fake",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass
class Refusal:
    """What the test wants refused: those requests that fit, so many times."""

    code: int
    left: int
    retry_after: str | None
    fits: Callable[[Request], bool]


class Faults:
    """What is wrong with the server, as the test has it. May be changed from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slow_s = 0.0
        self.refusals: list[Refusal] = []
        self.gone_as_http = False  # a watch whose version is too old is answered 410, and not an event

    def refusal_of(self, request: Request) -> Refusal | None:
        with self.lock:
            for each in self.refusals:
                if each.left and each.fits(request):
                    each.left -= 1
                    return each
        return None


class Watcher:
    """A watch under way."""

    def __init__(self, kind: Kind, transport: asyncio.BaseTransport | None) -> None:
        self.kind = kind
        self.transport = transport
        self.wake = asyncio.Event()
        self.bookmark_due = False
        self.is_deaf = False


class Service:
    """See above. Made on the loop that serves."""

    def __init__(self, storage: Storage, users: Users, book: Book, faults: Faults) -> None:
        self._storage, self._users, self._book, self._faults = storage, users, book, faults
        self._loop = asyncio.get_running_loop()
        self.watchers: set[Watcher] = set()
        self._unlisten = storage.listen(lambda: self._loop.call_soon_threadsafe(self._wake))

    def close(self) -> None:
        """Cuts all watches, and hears of no change any more."""
        self._unlisten()
        self.cut()

    def cut(self) -> None:
        """Ends the connections of all watches, in the middle of whatever they are in."""
        for watcher in list(self.watchers):
            if watcher.transport is not None:
                watcher.transport.abort()

    def deafen(self) -> None:
        """The watches that there are say nothing any more, and stay."""
        for watcher in self.watchers:
            watcher.is_deaf = True

    def bookmark(self) -> None:
        """Sends those that want them a bookmark."""
        for watcher in self.watchers:
            watcher.bookmark_due = True
            watcher.wake.set()

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.wake.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request."""
        query = dict(request.query)
        user, target, verb = "", None, request.method.lower()
        try:
            user = self._users.of_token(request.headers.get("Authorization", ""))
            target = target_of(request.path)
            verb = _verb(request.method, target, query)
        except ApiError as error:
            return self._refused(_asked(user, verb, target, query, request.path, error.code), error)
        asked = _asked(user, verb, target, query, request.path, 200)
        try:
            if self._faults.slow_s:
                await asyncio.sleep(self._faults.slow_s)
            refusal = self._faults.refusal_of(asked)
            if refusal is not None:
                error = ApiError.of_code(refusal.code, "refused, as the test wants it")
                return self._refused(_asked(user, verb, target, query, request.path, refusal.code), error, refusal)
            check_query(query)
            if target is None:
                return self._answered(asked, self._page_of(request.path))
            return await self._serve(request, asked, target, user, query)
        except ApiError as error:
            return self._refused(_asked(user, verb, target, query, request.path, error.code), error)

    async def _serve(
        self, request: web.Request, asked: Request, target: Target, user: str, query: dict[str, str]
    ) -> web.StreamResponse:
        resource = f"{target.plural}/{target.subresource}" if target.subresource else target.plural
        self._users.check(user, asked.verb, target.group, resource, asked.namespace, target.name)
        storage, namespace, name = self._storage, target.namespace, target.name
        kind = storage.kind(target.group, target.version, target.plural)
        sub = target.subresource
        if (sub and sub not in kind.subresources) or (namespace and not kind.namespaced):
            raise ApiError("NotFound", "the server could not find the requested resource")
        if name and kind.namespaced and not namespace:
            raise ApiError("NotFound", "the server could not find the requested resource")
        if not name and asked.verb in ("list", "watch", "deletecollection"):
            matches = matcher(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
            if asked.verb == "watch":
                return await self._watch(request, asked, kind, namespace, matches, query)
            if asked.verb == "list":
                return self._answered(asked, self._list(kind, namespace, matches, query))
            options = delete_options(await request.read(), query)
            listed = [made for made in storage.every(kind, namespace) if matches(made)]
            for made in listed:
                storage.delete(kind, made["metadata"].get("namespace", ""), made["metadata"]["name"], options)
            return self._answered(asked, _list_of(kind, listed, storage.version))
        if asked.verb == "get":
            return self._answered(asked, _shown(kind, storage.get(kind, namespace, name)))
        body = await request.read()
        if asked.verb == "delete":
            made, gone = storage.delete(kind, namespace, name, delete_options(body, query), dry=is_dry(query))
            return self._answered(asked, _success(kind, made) if gone and kind.plural != "pods" else _shown(kind, made))
        if asked.verb == "create":
            return self._answered(asked, self._create(kind, namespace, name, sub, user, body, query), code=201)
        if asked.verb == "update":
            given = json_of(body)
            self._check_escalation(kind, given, user, namespace)
            made = storage.replace(kind, namespace, name, given, sub, dry=is_dry(query))
        else:
            how = request.headers.get("Content-Type", "").partition(";")[0]
            given = json_of(body)
            if kind.group == _RBAC:
                made = storage.patch(kind, namespace, name, how, given, sub, dry=True)
                self._check_escalation(kind, made, user, namespace)
            made = storage.patch(kind, namespace, name, how, given, sub, dry=is_dry(query))
        return self._answered(asked, _shown(kind, made))

    def _create(
        self, kind: Kind, namespace: str, name: str, sub: str, user: str, body: bytes, query: dict[str, str]
    ) -> Object:
        given = json_of(body)
        if sub == "eviction":
            return self._evict(kind, namespace, name, given)
        if name:
            raise ApiError("MethodNotAllowed", "the server does not allow this method on the requested resource")
        if kind.namespaced and not namespace:
            raise ApiError("BadRequest", "an object of this kind is created in a namespace")
        self._check_escalation(kind, given, user, namespace)
        return _shown(kind, self._storage.create(kind, namespace, given, dry=is_dry(query)))

    def _evict(self, kind: Kind, namespace: str, name: str, given: Any) -> Object:
        if not isinstance(given, dict) or given.get("kind") != "Eviction":
            raise ApiError("BadRequest", "an eviction is expected")
        pod = self._storage.get(kind, namespace, name)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
        others = [each for each in pod["status"].get("conditions", ()) if each["type"] != "DisruptionTarget"]
        patch = {"status": {"conditions": [*others, condition]}}
        self._storage.patch(kind, namespace, name, "application/merge-patch+json", patch, "status", dry=False)
        self._storage.delete(kind, namespace, name, given.get("deleteOptions") or {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _check_escalation(self, kind: Kind, given: Any, user: str, namespace: str) -> None:
        if kind.group == _RBAC and isinstance(given, dict):
            self._users.check_escalation(user, {"metadata": {}, **given, "kind": kind.name}, namespace)

    def _list(self, kind: Kind, namespace: str, matches: Matches, query: dict[str, str]) -> Object:
        match = query.get("resourceVersionMatch", "")
        if match not in ("", "Exact", "NotOlderThan") or (match and not query.get("resourceVersion")):
            raise ApiError("Invalid", f"resourceVersionMatch: Forbidden: {match}")
        page = self._storage.page(
            kind,
            namespace,
            matches,
            version=query.get("resourceVersion", ""),
            exact=match == "Exact",
            limit=integer(query, "limit"),
            more=query.get("continue", ""),
        )
        made = _list_of(kind, page.items, page.version)
        if page.more:
            made["metadata"]["continue"] = page.more
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                made["metadata"]["remainingItemCount"] = page.remaining
        return made

    # --- watches ---------------------------------------------------------------------------------------------------

    async def _watch(
        self,
        request: web.Request,
        asked: Request,
        kind: Kind,
        namespace: str,
        matches: Matches,
        query: dict[str, str],
    ) -> web.StreamResponse:
        version = query.get("resourceVersion", "")
        bookmarks = boolean(query, "allowWatchBookmarks")
        initial = boolean(query, "sendInitialEvents")
        if initial and query.get("resourceVersionMatch") != "NotOlderThan":
            raise ApiError("Invalid", "resourceVersionMatch: Forbidden: sendInitialEvents needs NotOlderThan")
        first: list[Object] = []
        with self._storage.lock:
            if initial or version in ("", "0"):
                now = self._storage.version
                objects = self._storage.every(kind, namespace)
                first = [{"type": "ADDED", "object": made} for made in objects if matches(made)]
            else:
                now = self._storage.watch_from(version)
                if self._faults.gone_as_http:
                    self._storage.since(kind, now, namespace, matches)
        watcher = Watcher(kind, request.transport)
        self.watchers.add(watcher)
        self._book.add(asked)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            for event in first:
                await response.write(_line(kind, event))
            if initial:
                mark = _bookmark(kind, now)
                mark["object"]["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
                await response.write(_line(kind, mark))
            limit_s = float(integer(query, "timeoutSeconds")) or _LONGEST_WATCH_S
            await self._follow(watcher, response, now, namespace, matches, limit_s, bookmarks=bookmarks)
            await response.write_eof()
        except ConnectionError:  # the client's end, or the test's
            pass
        finally:
            self.watchers.discard(watcher)
        return response

    async def _follow(
        self,
        watcher: Watcher,
        response: web.StreamResponse,
        version: int,
        namespace: str,
        matches: Matches,
        limit_s: float,
        *,
        bookmarks: bool,
    ) -> None:
        kind = watcher.kind
        end = self._loop.time() + limit_s
        while True:
            watcher.wake.clear()
            if watcher.is_deaf:
                await asyncio.Event().wait()  # until the client ends it
            try:
                events, version = self._storage.since(kind, version, namespace, matches)
            except ApiError as error:
                await response.write(_line(kind, {"type": "ERROR", "object": error.status()}))
                return
            for event in events:
                await response.write(_line(kind, event))
            if watcher.bookmark_due and bookmarks:
                await response.write(_line(kind, _bookmark(kind, version)))
            watcher.bookmark_due = False
            try:
                async with asyncio.timeout_at(end):
                    await watcher.wake.wait()
            except TimeoutError:
                if bookmarks:  # as the real one does shortly before it ends a watch
                    await response.write(_line(kind, _bookmark(kind, version)))
                return

    # --- what is no resource ---------------------------------------------------------------------------------------

    def _page_of(self, path: str) -> Object:
        words = path.strip("/").split("/")
        match words:
            case ["version"]:
                return _VERSION
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                groups = sorted({kind.group for kind in self._storage.kinds()} - {""})
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [self._group(each) for each in groups]}
            case ["apis", group]:
                return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group)}
            case ["api", "v1"]:
                return self._resources("", "v1")
            case ["apis", group, version]:
                return self._resources(group, version)
            case ["healthz" | "livez" | "readyz"]:
                return {"ok": True}
        raise ApiError("NotFound", "the server could not find the requested resource")

    def _group(self, group: str) -> Object:
        versions = sorted({kind.version for kind in self._storage.kinds() if kind.group == group})
        if not versions:
            raise ApiError("NotFound", "the server could not find the requested resource")
        listed = [{"groupVersion": f"{group}/{each}", "version": each} for each in versions]
        return {"name": group, "versions": listed, "preferredVersion": listed[-1]}

    def _resources(self, group: str, version: str) -> Object:
        kinds = [kind for kind in self._storage.kinds() if (kind.group, kind.version) == (group, version)]
        if not kinds:
            raise ApiError("NotFound", "the server could not find the requested resource")
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": kinds[0].api_version,
            "resources": [entry for kind in kinds for entry in kind.discovery()],
        }

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, asked: Request, made: Object, *, code: int = 200) -> web.Response:
        self._book.add(_with_code(asked, code))
        return web.json_response(made, status=code)

    def _refused(self, asked: Request, error: ApiError, refusal: Refusal | None = None) -> web.Response:
        self._book.add(asked)
        headers = {}
        if refusal is not None and refusal.retry_after is not None:
            headers["Retry-After"] = refusal.retry_after
        return web.json_response(error.status(), status=error.code, headers=headers)


def _verb(method: str, target: Target | None, query: dict[str, str]) -> str:
    if target is None:
        return method.lower()
    if method == "GET":
        return "watch" if boolean(query, "watch") else "get" if target.name else "list"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if method not in _VERBS or (method != "POST" and not target.name):
        raise ApiError("MethodNotAllowed", "the server does not allow this method on the requested resource")
    return _VERBS[method]


def _asked(user: str, verb: str, target: Target | None, query: dict[str, str], path: str, code: int) -> Request:
    if target is None:
        return Request(user, verb, "", "", "", "", "", code, query, path)
    namespace = target.name if (target.group, target.plural) == ("", "namespaces") else target.namespace
    return Request(
        user, verb, target.group, target.plural, target.subresource, namespace, target.name, code, query, path
    )


def _with_code(asked: Request, code: int) -> Request:
    return Request(
        asked.user,
        asked.verb,
        asked.group,
        asked.resource,
        asked.subresource,
        asked.namespace,
        asked.name,
        code,
        asked.query,
        asked.path,
    )


def _shown(kind: Kind, made: Object) -> Object:
    """In the version that was asked for."""
    return made if made["apiVersion"] == kind.api_version else {**made, "apiVersion": kind.api_version}


def _list_of(kind: Kind, items: list[Object], version: int) -> Object:
    if kind.is_custom:
        shown = [_shown(kind, made) for made in items]
    else:  # the items of Kubernetes' own lists do not say what they are
        shown = [{key: value for key, value in made.items() if key not in ("kind", "apiVersion")} for made in items]
    metadata = {"resourceVersion": str(version)}
    return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": shown}


def _success(kind: Kind, made: Object) -> Object:
    details = {"name": made["metadata"]["name"], "kind": kind.plural, "uid": made["metadata"]["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _bookmark(kind: Kind, version: int) -> dict[str, Any]:
    made = {"kind": kind.name, "apiVersion": kind.api_version, "metadata": {"resourceVersion": str(version)}}
    return {"type": "BOOKMARK", "object": made}


def _line(kind: Kind, event: Object) -> bytes:
    made = event["object"]
    shown = made if made["kind"] == "Status" else _shown(kind, made)
    return json.dumps({"type": event["type"], "object": shown}).encode() + b"\n"
