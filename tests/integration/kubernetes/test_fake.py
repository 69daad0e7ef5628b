"""The fake Kubernetes API server against the client library that the product uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import kubernetes_asyncio.client as k8s
import pytest
from kubernetes_asyncio.client import ApiException
from kubernetes_asyncio.watch import Watch

from tests.support.clusters.kubernetes_fake import FakeKubernetes

pytestmark = pytest.mark.integration

_LIMIT_S = 150
_CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: trains.example.org}
spec:
  group: example.org
  scope: Namespaced
  names: {plural: trains, singular: train, kind: Train, listKind: TrainList, shortNames: [tr]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        required: [spec]
        properties:
          spec:
            type: object
            required: [workers]
            properties:
              workers: {type: integer, minimum: 1}
              image: {type: string, default: train}
              when: {type: string, nullable: true}
          status:
            type: object
            x-kubernetes-preserve-unknown-fields: true
"""


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(namespaces=("other",)) as made:
        yield made


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(_LIMIT_S):
            await scenario()

    asyncio.run(limited())


@asynccontextmanager
async def _client(api: FakeKubernetes, token: str | None = None) -> AsyncIterator[k8s.ApiClient]:
    configuration = k8s.Configuration(host=api.url)
    configuration.api_key = {"BearerToken": f"Bearer {token or api.token}"}
    async with k8s.ApiClient(configuration) as client:
        yield client


def _pod(name: str, **metadata: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "main", "image": "train"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


async def _refused(request: Awaitable[object], code: int, *words: str) -> ApiException:
    with pytest.raises(ApiException) as refused:
        await request
    assert refused.value.status == code, refused.value
    for word in words:
        assert word in str(refused.value.body), refused.value.body
    return refused.value


def test_objects_are_created_changed_and_refused_as_kubernetes_does(api: FakeKubernetes) -> None:
    async def scenario() -> None:
        async with _client(api) as client:
            core = k8s.CoreV1Api(client)
            made = await core.create_namespaced_pod("default", _pod("a"))
            assert (made.status.phase, made.metadata.generation) == ("Pending", 1)
            assert made.spec.termination_grace_period_seconds == 30
            await _refused(core.create_namespaced_pod("default", _pod("a")), 409, "AlreadyExists")
            await _refused(core.create_namespaced_pod("nowhere", _pod("a")), 404, "namespaces")
            await _refused(core.create_namespaced_pod("default", _pod("A_b")), 422, "metadata.name")
            unknown = _pod("b") | {"spec": {"containers": [{"name": "main", "imgae": "train"}]}}
            await _refused(core.create_namespaced_pod("default", unknown), 400, "unknown field")
            missing = _pod("b") | {"spec": {"containers": [{"image": "train"}]}}
            await _refused(core.create_namespaced_pod("default", missing), 422, "required")
            await _refused(core.read_namespaced_pod("b", "default"), 404, '"reason": "NotFound"')
            stale = await core.read_namespaced_pod("a", "default")
            patch: Any = {"metadata": {"labels": {"app": "x"}}}
            await core.patch_namespaced_pod("a", "default", patch)
            await _refused(core.replace_namespaced_pod("a", "default", stale), 409, "modified")
            fresh = await core.read_namespaced_pod("a", "default")
            fresh.metadata.annotations = {"said": "twice"}
            again = await core.replace_namespaced_pod("a", "default", fresh)
            assert again.metadata.labels == {"app": "x"}
            assert again.metadata.generation == 1
            same = await core.patch_namespaced_pod("a", "default", patch)
            assert same.metadata.resource_version == again.metadata.resource_version
            patch = [{"op": "test", "path": "/metadata/labels/app", "value": "y"}]
            await _refused(core.patch_namespaced_pod("a", "default", patch), 422)
            await _refused(core.patch_namespaced_pod("a", "default", {"spec": {"nodeName": "n"}}), 422, "immutable")
            status: Any = {"status": {"phase": "Running"}, "spec": {"nodeName": "n"}}
            said = await core.patch_namespaced_pod_status("a", "default", status)
            assert (said.status.phase, said.spec.node_name) == ("Running", None)

    _run(scenario)


def test_lists_have_selectors_and_pages(api: FakeKubernetes) -> None:
    for number in range(5):
        api.create_pod(f"p{number}", labels={"app": "x" if number % 2 else "y"})
    api.create_pod("p9", "other", labels={"app": "x"})
    api.run_pod("p1", node="node-7")

    async def scenario() -> None:
        async with _client(api) as client:
            core = k8s.CoreV1Api(client)

            async def names(**given: Any) -> list[str]:
                return [each.metadata.name for each in (await core.list_namespaced_pod("default", **given)).items]

            assert await names(label_selector="app=x") == ["p1", "p3"]
            assert await names(label_selector="app notin (x, z),!rack") == ["p0", "p2", "p4"]
            assert await names(field_selector="status.phase=Running,spec.nodeName=node-7") == ["p1"]
            assert await names(field_selector="metadata.name!=p0", label_selector="app==y") == ["p2", "p4"]
            await _refused(core.list_namespaced_pod("default", field_selector="spec.hostname=x"), 400)
            assert len((await core.list_pod_for_all_namespaces(label_selector="app=x")).items) == 3
            first = await core.list_namespaced_pod("default", limit=2)
            assert first.metadata.remaining_item_count == 3
            api.create_pod("p00")
            rest = await core.list_namespaced_pod("default", limit=9, _continue=first.metadata._continue)
            assert [each.metadata.name for each in (*first.items, *rest.items)] == ["p0", "p1", "p2", "p3", "p4"]
            assert rest.metadata.resource_version == first.metadata.resource_version
            api.compact()
            late = core.list_namespaced_pod("default", limit=2, _continue=first.metadata._continue)
            await _refused(late, 410, "Expired")

    _run(scenario)


def test_watches_go_on_from_a_version_and_end_in_all_ways(api: FakeKubernetes) -> None:
    async def scenario() -> None:
        async with _client(api) as client:
            core = k8s.CoreV1Api(client)
            api.create_pod("a", labels={"app": "x"})
            listed = await core.list_namespaced_pod("default")
            version = listed.metadata.resource_version
            seen: list[tuple[str, str]] = []
            came = asyncio.Condition()

            async def watch(**given: Any) -> None:
                given = {"timeout_seconds": 60, "allow_watch_bookmarks": True, **given}
                async with Watch().stream(core.list_namespaced_pod, "default", **given) as events:
                    async for event in events:
                        async with came:
                            seen.append((event["type"], event["raw_object"]["metadata"].get("name", "")))
                            came.notify_all()

            async def until(last: str) -> None:
                async with came:
                    await came.wait_for(lambda: seen and seen[-1][0] == last and len(seen) >= 4)

            following = asyncio.create_task(watch(resource_version=version, label_selector="app=x"))
            await asyncio.to_thread(api.wait_request, lambda request: request.verb == "watch")
            api.create_pod("b", labels={"app": "x"})
            api.create_pod("c", labels={"app": "y"})
            api.patch("pods", "c", {"metadata": {"labels": {"app": "x"}}})
            api.patch("pods", "b", {"metadata": {"labels": {"app": "z"}}})
            api.delete("pods", "c")
            await until("DELETED")
            assert seen == [("ADDED", "b"), ("ADDED", "c"), ("DELETED", "b"), ("DELETED", "c")]
            api.bookmark()
            await until("BOOKMARK")
            api.cut_watches()
            with pytest.raises(Exception, match=r"(?i)payload|closed|reset|disconnected"):
                await following
            seen.clear()
            await watch(resource_version=version, timeout_seconds=1)
            assert seen[0] == ("ADDED", "b")
            assert seen[-1] == ("BOOKMARK", "")
            api.compact()
            api.create_pod("d")
            with pytest.raises(ApiException) as gone:
                await watch(resource_version=version)
            assert gone.value.status == 410
            api.gone_as_http()
            with pytest.raises(ApiException) as gone:
                await watch(resource_version=version)
            assert gone.value.status == 410
            seen.clear()
            await watch(timeout_seconds=1)
            assert [each for each in seen if each[0] == "ADDED"] == [("ADDED", name) for name in ("a", "b", "d")]

    _run(scenario)


def test_pods_are_deleted_with_grace_and_finalizers(api: FakeKubernetes) -> None:
    async def scenario() -> None:
        async with _client(api) as client:
            core = k8s.CoreV1Api(client)
            api.create_pod("queued")
            await core.delete_namespaced_pod("queued", "default")
            assert api.get("pods", "queued") is None
            api.create_pod("a", grace_s=25)
            api.run_pod("a")
            deleted = await core.delete_namespaced_pod("a", "default")
            assert deleted.metadata.deletion_grace_period_seconds == 25
            assert (await core.read_namespaced_pod("a", "default")).metadata.deletion_timestamp is not None
            shorter = await core.delete_namespaced_pod("a", "default", grace_period_seconds=5)
            assert shorter.metadata.deletion_grace_period_seconds == 5
            api.patch("pods", "a", {"metadata": {"finalizers": None}})
            api.finish_pod("a")
            assert api.get("pods", "a") is None
            api.create(_pod("held", finalizers=["example.org/hold"]))
            await core.delete_namespaced_pod("held", "default")
            more: Any = {"metadata": {"finalizers": ["example.org/hold", "example.org/more"]}}
            await _refused(core.patch_namespaced_pod("held", "default", more), 422)
            less: Any = {"metadata": {"finalizers": None}}
            await core.patch_namespaced_pod("held", "default", less)
            assert api.get("pods", "held") is None
            api.create_pod("b")
            api.run_pod("b")
            body = k8s.V1Eviction(
                api_version="policy/v1", kind="Eviction", metadata=k8s.V1ObjectMeta(name="b", namespace="default")
            )
            await core.create_namespaced_pod_eviction("b", "default", body)
            evicted = await core.read_namespaced_pod("b", "default")
            assert evicted.metadata.deletion_timestamp is not None
            assert [each.type for each in evicted.status.conditions if each.status == "True"][-1] == "DisruptionTarget"
            wrong = k8s.V1DeleteOptions(preconditions=k8s.V1Preconditions(uid="another"))
            await _refused(core.delete_namespaced_pod("b", "default", body=wrong), 409)

    _run(scenario)


def test_owners_take_what_they_own_with_them(api: FakeKubernetes) -> None:
    def owner(made: dict[str, Any], *, blocks: bool = False) -> dict[str, Any]:
        metadata = made["metadata"]
        ref = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": metadata["name"], "uid": metadata["uid"]}
        return ref | ({"blockOwnerDeletion": True} if blocks else {})

    def config(name: str, **metadata: Any) -> dict[str, Any]:
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}}
        return api.create(made)

    top = config("top")
    middle = config("middle", ownerReferences=[owner(top)])
    config("bottom", ownerReferences=[owner(middle)])
    config("two-owners", ownerReferences=[owner(top), owner(config("other"))])
    api.delete("configmaps", "top")
    assert [each["metadata"]["name"] for each in api.list("configmaps")] == ["other", "two-owners"]
    config("orphan", ownerReferences=[owner(top)])
    assert api.get("configmaps", "orphan") is None  # its owner is none that there is

    boss = config("boss")
    api.create(_pod("slow", ownerReferences=[owner(boss, blocks=True)]))
    api.run_pod("slow")
    api.delete("configmaps", "boss", propagationPolicy="Foreground")
    waiting = api.get("configmaps", "boss")
    assert waiting is not None
    assert "deletionTimestamp" in waiting["metadata"]
    pod = api.get("pods", "slow")
    assert pod is not None
    assert "deletionTimestamp" in pod["metadata"]
    api.finish_pod("slow")
    assert api.get("pods", "slow") is None
    assert api.get("configmaps", "boss") is None

    keeper = config("keeper")
    config("kept", ownerReferences=[owner(keeper)])
    api.delete("configmaps", "keeper", propagationPolicy="Orphan")
    kept = api.get("configmaps", "kept")
    assert kept is not None
    assert not kept["metadata"].get("ownerReferences")


def test_custom_resources_have_schemas_status_and_discovery(api: FakeKubernetes) -> None:
    async def scenario() -> None:
        async with _client(api) as client:
            custom = k8s.CustomObjectsApi(client)
            at = ("example.org", "v1", "default", "trains")
            train: dict[str, Any] = {"apiVersion": "example.org/v1", "kind": "Train", "metadata": {"name": "t"}}
            await _refused(custom.create_namespaced_custom_object(*at, {**train, "spec": {"workers": 1}}), 404)
            api.create(_CRD)
            refused = custom.create_namespaced_custom_object(*at, {**train, "spec": {"workers": 0}})
            await _refused(refused, 422, "minimum")
            spec = {"workers": 2, "unknown": 1, "when": None}
            made = await custom.create_namespaced_custom_object(*at, {**train, "spec": spec, "status": {"x": 1}})
            assert made["spec"] == {"workers": 2, "image": "train"}
            assert "status" not in made
            patch = {"status": {"ready": 1}, "spec": {"workers": 9}}
            said = await custom.patch_namespaced_custom_object_status(
                *at, "t", patch, _content_type="application/merge-patch+json"
            )
            assert (said["status"], said["spec"]["workers"], said["metadata"]["generation"]) == ({"ready": 1}, 2, 1)
            patch = {"spec": {"workers": 9}}
            said = await custom.patch_namespaced_custom_object(
                *at, "t", patch, _content_type="application/merge-patch+json"
            )
            assert (said["status"], said["metadata"]["generation"]) == ({"ready": 1}, 2)
            said["metadata"].pop("resourceVersion")
            await _refused(custom.replace_namespaced_custom_object(*at, "t", said), 422, "must be specified")
            listed = await k8s.ApisApi(client).get_api_versions()
            assert "example.org" in [group.name for group in listed.groups]
            resources = await custom.get_api_resources("example.org", "v1")
            assert {each.name for each in resources.resources} == {"trains", "trains/status"}
            core = await k8s.CoreV1Api(client).get_api_resources()
            assert {"pods", "pods/status", "pods/eviction", "nodes"} <= {each.name for each in core.resources}
            assert (await k8s.VersionApi(client).get_code()).major == "1"
            api.delete("customresourcedefinitions", "trains.example.org")
            await _refused(custom.get_namespaced_custom_object(*at, "t"), 404)

    _run(scenario)


def test_everybody_may_do_what_roles_say_and_all_is_written_down(api: FakeKubernetes) -> None:
    api.create_all(
        """
        {apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: driver}, rules: [
          {apiGroups: [""], resources: [pods], verbs: [get, list]},
          {apiGroups: [""], resources: [configmaps], resourceNames: [mine], verbs: [get]},
          {apiGroups: [rbac.authorization.k8s.io], resources: [roles], verbs: [create]}]}
---
        {apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: driver},
         subjects: [{kind: ServiceAccount, name: driver, namespace: default}],
         roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: driver}}
"""
    )
    user = "system:serviceaccount:default:driver"
    token = api.user(user)

    async def scenario() -> None:
        async with _client(api, token) as client, _client(api, "nobody's") as stranger:
            core = k8s.CoreV1Api(client)
            assert (await core.list_namespaced_pod("default")).items == []
            await _refused(core.list_namespaced_pod("other"), 403, "cannot list resource", "other", user)
            await _refused(core.list_node(), 403, "cluster scope")
            await _refused(core.delete_namespaced_pod("a", "default"), 403)
            await _refused(core.read_namespaced_config_map("mine", "default"), 404)
            await _refused(core.read_namespaced_config_map("yours", "default"), 403)
            rbac = k8s.RbacAuthorizationV1Api(client)
            role = k8s.V1Role(metadata=k8s.V1ObjectMeta(name="more"))
            role.rules = [k8s.V1PolicyRule(api_groups=[""], resources=["pods"], verbs=["get"])]
            await rbac.create_namespaced_role("default", role)
            role.metadata.name, role.rules[0].verbs = "most", ["delete"]
            await _refused(rbac.create_namespaced_role("default", role), 403, "not currently held")
            await _refused(k8s.CoreV1Api(stranger).list_node(), 401)
            api.users.revoke(token)
            await _refused(core.list_namespaced_pod("default"), 401)

    _run(scenario)
    assert [(each.user, each.verb, each.resource, each.namespace, each.code) for each in api.requests[:3]] == [
        (user, "list", "pods", "default", 200),
        (user, "list", "pods", "other", 403),
        (user, "list", "nodes", "", 403),
    ]


def test_it_refuses_and_is_away_as_the_test_wants(api: FakeKubernetes) -> None:
    async def scenario() -> None:
        async with _client(api) as client:
            core = k8s.CoreV1Api(client)
            api.refuse(429, retry_after="7", when=lambda request: request.verb == "list")
            api.create_pod("a")
            await core.read_namespaced_pod("a", "default")
            refused = await _refused(core.list_namespaced_pod("default"), 429)
            assert refused.headers["Retry-After"] == "7"
            await core.list_namespaced_pod("default")
            with api.outage(), pytest.raises(Exception, match=r"(?i)connect"):
                await core.list_namespaced_pod("default")
            assert len((await core.list_namespaced_pod("default")).items) == 1
            api.slow(30)
            with pytest.raises(asyncio.TimeoutError):
                await core.list_namespaced_pod("default", _request_timeout=0.1)

    _run(scenario)


def test_what_happens_to_pods_and_nodes(api: FakeKubernetes) -> None:
    api.create_node("node-1", labels={"topology.kubernetes.io/zone": "z1"})
    api.create_pod("a", limits={"nvidia.com/gpu": "4"})
    ready = api.run_pod("a")
    assert ready["spec"]["nodeName"] == "node-1"
    assert {each["type"]: each["status"] for each in ready["status"]["conditions"]}["Ready"] == "True"
    assert {each["type"]: each["status"] for each in api.set_ready("a", ready=False)["status"]["conditions"]}[
        "Ready"
    ] == "False"
    gone = api.evict("a")
    assert (gone["status"]["phase"], gone["status"]["reason"]) == ("Failed", "Evicted")
    api.delete_pod("a")
    assert api.get("pods", "a") is None  # it had ended, so there was nothing to wait for
    api.cordon("node-1")
    tainted = api.taint("node-1", "node.kubernetes.io/out-of-service", "NoExecute", "nodeshutdown")
    assert tainted["spec"]["unschedulable"] is True
    assert len(tainted["spec"]["taints"]) == 2
    api.untaint("node-1", "node.kubernetes.io/out-of-service")
    free = api.uncordon("node-1")
    assert "unschedulable" not in free["spec"]
    assert free["spec"]["taints"] == []
    with pytest.raises(Exception, match="immutable"):
        api.patch("pods", api.create_pod("b")["metadata"]["name"], {"spec": {"restartPolicy": "Never"}})
