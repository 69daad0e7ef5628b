"""Requests to the API server, with objects as plain JSON.

Owns the URL paths of the kinds that a job uses, the pages of lists, and the preconditions of changes and deletions: the
object must be unchanged since it was read. Knows nothing of the objects' meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from kubernetes_asyncio.client import ApiClient
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.client.rest import RESTResponse

from elastic_driver.kubernetes.objects import Object
from elastic_driver.kubernetes.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION

# The time limit for an answer of the API server.
_ANSWER_S = 30.0
GONE = 404
"""The status of an answer: the object does not exist."""

_PATHS = {
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{namespace}/configmaps",
    ("v1", "Secret"): "/api/v1/namespaces/{namespace}/secrets",
    ("v1", "ServiceAccount"): "/api/v1/namespaces/{namespace}/serviceaccounts",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("batch/v1", "Job"): "/apis/batch/v1/namespaces/{namespace}/jobs",
    ("rbac.authorization.k8s.io/v1", "Role"): "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): (
        "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    ),
    (API_VERSION, KIND): f"/apis/{GROUP}/{VERSION}/namespaces/{{namespace}}/{PLURAL}",
}


class Api:
    """A client of the API server, for objects as plain JSON.

    Args:
        client: sends the requests; closed by :meth:`close`.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """Return one object; None if it does not exist. Raises ApiException."""
        try:
            return await self._call("GET", f"{_path(api_version, kind, namespace)}/{name}")
        except ApiException as error:
            if error.status == GONE:
                return None
            raise

    async def list(self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Object]:
        """Return all objects with these labels, read page by page. Raises ApiException."""
        query = [("labelSelector", ",".join(f"{key}={value}" for key, value in labels.items())), ("limit", "500")]
        found: list[Object] = []
        following = ""
        while True:
            more = [("continue", following)] if following else []
            page = await self._call("GET", _path(api_version, kind, namespace), query=[*query, *more])
            # Objects in a list lack these two fields.
            found += [{"apiVersion": api_version, "kind": kind, **item} for item in page.get("items") or ()]
            following = (page.get("metadata") or {}).get("continue") or ""
            if not following:
                return found

    async def create(self, body: Object) -> Object:
        """Create an object. Raises ApiException."""
        return await self._call("POST", _path_of(body, named=False), body)

    async def patch(self, seen: Object, changes: Object, *, part: str = "") -> Object:
        """Apply a JSON merge patch to an object, unless it has changed since it was read. Raises ApiException."""
        version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
        metadata = {**changes.get("metadata", {}), **version}
        path = _path_of(seen) + (f"/{part}" if part else "")
        return await self._call("PATCH", path, {**changes, "metadata": metadata}, kind="application/merge-patch+json")

    async def delete(self, seen: Object) -> None:
        """Delete an object, if its uid is still the same. Raises ApiException."""
        options = {"preconditions": {"uid": seen["metadata"]["uid"]}, "propagationPolicy": "Background"}
        await self._call("DELETE", _path_of(seen), options)

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        kind: str = "application/json",
    ) -> Object:
        answer = await self._client.call_api(
            path,
            method,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            response_types_map={},
            _preload_content=False,
            _request_timeout=_ANSWER_S,
        )
        # Unparsed, because the library would convert it to its own classes.
        data = await answer.read()
        if not 200 <= answer.status < 300:
            raise ApiException(http_resp=RESTResponse(answer, data))  # type: ignore[arg-type]
        return cast(Object, json.loads(data))


def _path(api_version: str, kind: str, namespace: str) -> str:
    return _PATHS[api_version, kind].format(namespace=namespace)


def _path_of(body: Object, *, named: bool = True) -> str:
    metadata = body["metadata"]
    path = _path(body["apiVersion"], body["kind"], metadata["namespace"])
    return f"{path}/{metadata['name']}" if named else path
