"""Pods as hosts, against the fake API server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.discovery.kubernetes import reflector
from elastic_driver.hosts import Host
from tests.support.clusters.kubernetes_fake import FakeKubernetes
from tests.support.clusters.kubernetes_fake.certificate import write_certificate
from tests.support.clusters.kubernetes_fake.rules import Request
from tests.support.clusters.pod_discovery import LABELS, following

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).resolve().parents[3]
_ROLE, _CLUSTER_ROLE = re.findall(r"^```yaml\n(.*?)^```", (_ROOT / "docs/kubernetes_pods.md").read_text(), re.M | re.S)
_DRIVER = "system:serviceaccount:default:train-driver"


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(namespaces=("other",)) as made:
        made.create_node("node-1", labels={"topology.kubernetes.io/zone": "z1"})
        made.create_node("node-2", labels={"topology.kubernetes.io/zone": "z2"})
        yield made


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(150):
            await scenario()

    asyncio.run(limited())


def start(api: FakeKubernetes, *names: str, node: str = "node-1") -> None:
    for name in names:
        api.create_pod(name, labels=LABELS)
        api.run_pod(name, node=node)


def is_watch(request: Request) -> bool:
    return request.verb == "watch" and request.resource == "pods"


def test_pods_become_hosts_when_they_are_ready_and_none_when_they_are_gone(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "w-10", "w-2")
        api.create_pod("web", labels={"app": "web"})
        api.create_pod("w-3", "other", labels=LABELS)
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["w-2", "w-10"])
            assert seen.answers[-1][0] == (Host("w-2", 1, ("rack=z1",)), Host("w-10", 1, ("rack=z1",)))
            api.create_pod("w-4", labels=LABELS)
            api.run_pod("w-4", node="node-2")
            await seen.until(lambda: seen.names == ["w-2", "w-4", "w-10"])
            api.fail_pod("w-2")
            await seen.until(lambda: seen.names == ["w-4", "w-10"])
            api.delete_pod("w-10", grace_s=4000)
            await seen.until(lambda: seen.going)
            assert seen.names == ["w-4", "w-10"]
            assert seen.going["w-10"].why == "its pod w-10 is being deleted"
            within_s = seen.going["w-10"].within_s
            assert within_s is not None
            assert 1000 < within_s <= 4000
            api.finish_pod("w-10")
            await seen.until(lambda: seen.names == ["w-4"])
            assert not seen.going

    run(scenario)


def test_what_says_that_a_host_is_about_to_go(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a", "b")
        start(api, "c", node="node-2")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a", "b", "c"])

            async def goes(*names: str, why: str) -> None:
                await seen.until(lambda: sorted(seen.going) == list(names))
                assert all(why in each.why and each.within_s is None for each in seen.going.values())
                assert seen.names == ["a", "b", "c"]

            async def stay() -> None:
                await seen.until(lambda: not seen.going)

            api.cordon("node-2")
            await goes("c", why="taint node.kubernetes.io/unschedulable:NoSchedule")
            api.uncordon("node-2")
            await stay()
            api.taint("node-1", "example.org/repair", "NoExecute")
            await goes("a", "b", why="its node node-1 has the taint example.org/repair:NoExecute")
            api.untaint("node-1", "example.org/repair")
            await stay()
            api.taint("node-1", "ToBeDeletedByClusterAutoscaler", "NoSchedule", "1")
            await goes("a", "b", why="ToBeDeletedByClusterAutoscaler")
            api.untaint("node-1", "ToBeDeletedByClusterAutoscaler")
            await stay()
            api.taint("node-1", "example.org/tired", "NoSchedule")
            api.set_ready("b", ready=False)
            await goes("b", why="its pod b is not ready")
            api.set_ready("b", ready=True)
            await stay()
            api.disrupt("a", reason="PreemptionByScheduler")
            await goes("a", why="about to be evicted (PreemptionByScheduler)")
            api.evict("a")
            await seen.until(lambda: seen.names == ["b", "c"])
            api.delete("nodes", "node-2")
            await seen.until(lambda: "c" in seen.going)
            assert seen.going["c"].why == "its node node-2 is gone"

    run(scenario)


def test_a_pod_of_the_same_name_is_another_host(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "w-0", "w-1")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["w-0", "w-1"])
            # In one go, as after an outage: nobody has seen that it was away.
            with api.outage():
                api.delete_pod("w-1", grace_s=0)
                start(api, "w-1")
            await seen.until(lambda: seen.names == ["w-0", "w-1"] and len(seen.answers) >= 3)
            lists = [[host.name for host in said] for said, _ in seen.answers if not isinstance(said, str)]
            assert lists == [["w-0", "w-1"], ["w-0"], ["w-0", "w-1"]]

    run(scenario)


def test_slots_and_names(api: FakeKubernetes, tmp_path: Path) -> None:
    api.create_pod("gpus", labels=LABELS, limits={"nvidia.com/gpu": "8", "cpu": "3500m"})
    api.create_pod("said", labels=LABELS, annotations={"elastic-driver.dev/slots": "2"}, limits={"nvidia.com/gpu": "8"})
    api.create_pod("rack", labels=LABELS, annotations={"elastic-driver.dev/labels": "rack=r9 spot"})
    api.create_pod("wrong", labels=LABELS, annotations={"elastic-driver.dev/slots": "many"})
    api.create_pod("job-0-x7", labels=LABELS, hostname="job-0", subdomain="train")
    for name in ("gpus", "said", "rack", "wrong", "job-0-x7"):
        api.run_pod(name, ip="10.0.7.7" if name == "gpus" else "")

    async def hosts(**given: object) -> tuple[dict[str, Host], str]:
        async with following(api, tmp_path, **given) as seen:  # type: ignore[arg-type]
            await seen.until(lambda: True)
            said = seen.answers[-1][0]
            assert not isinstance(said, str), said
            return {host.name: host for host in said}, seen.discovery.remark()

    async def scenario() -> None:
        found, remark = await hosts()
        assert {name: host.slots for name, host in found.items()} == {"gpus": 8, "said": 2, "rack": 1, "job-0-x7": 1}
        assert found["rack"].labels == ("rack=r9", "spot")
        assert "pod wrong: its annotation elastic-driver.dev/slots is 'many'" in remark
        found, remark = await hosts(default_slots=None, slots_from="cpu", names="hostname")
        assert {name: host.slots for name, host in found.items()} == {"gpus": 3, "said": 2}
        assert "pod job-0-x7: its number of slots is unknown: set a limit of cpu" in remark
        found, _ = await hosts(names="dns")
        assert {"job-0.train.default.svc", "10.0.7.7"} <= found.keys()
        assert "job-0" in (await hosts(names="hostname"))[0]

    run(scenario)


def test_a_watch_goes_on_where_it_was_cut(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a"])
            await asyncio.to_thread(api.wait_request, is_watch)
            api.cut_watches()
            start(api, "b")
            await seen.until(lambda: seen.names == ["a", "b"])
            assert sum(each.verb == "list" and each.resource == "pods" for each in api.requests) == 1

            # What a bookmark says counts, too: from there on the history is there, from the last pod's it is not.
            api.create_pod("web", labels={"app": "web"})
            api.bookmark()
            watched = sum(map(is_watch, api.requests))
            version = str(api.storage.version)
            await seen.until(lambda: seen.version == version)
            api.cut_watches()
            again = await asyncio.to_thread(api.wait_request, is_watch, count=watched + 1)
            assert again.query["resourceVersion"] == version
            assert {each.query["labelSelector"] for each in api.requests if is_watch(each)} == {"app=train"}

    run(scenario)


@pytest.mark.parametrize("as_http", [False, True])
def test_a_version_that_is_too_old_has_all_listed_again(api: FakeKubernetes, tmp_path: Path, as_http: bool) -> None:
    api.gone_as_http(as_http)

    async def scenario() -> None:
        start(api, "a", "b")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a", "b"])
            with api.outage():
                api.delete_pod("a", grace_s=0)
                start(api, "c")
                api.compact()
                start(api, "d")
            await seen.until(lambda: seen.names == ["b", "c", "d"])
        assert sum((each.verb, each.resource) == ("list", "pods") for each in api.requests) == 2

    run(scenario)


def test_versions_that_are_too_old_again_and_again(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a")
        api.refuse(410, times=4, when=is_watch)
        async with following(api, tmp_path) as seen:
            await asyncio.to_thread(api.wait_request, is_watch, count=3)
            start(api, "b")
            await seen.until(lambda: seen.names == ["a", "b"])
            await asyncio.to_thread(api.wait_request, lambda each: is_watch(each) and each.code == 200)
        # Once it lists again at once, then with pauses.
        lists = [each for each in api.requests if (each.verb, each.resource) == ("list", "pods")]
        assert len(lists) == 5

    run(scenario)


def test_in_an_outage_the_hosts_stay_and_it_is_told(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a"])
            with api.outage():
                await seen.until(lambda: "cannot read pods in namespace default from Kubernetes" in str(seen.names))
                assert "nothing listens there" in seen.discovery.remark()
            await seen.until(lambda: seen.names == ["a"])
            assert seen.discovery.remark() == ""

    run(scenario)


def test_a_server_that_is_busy_is_asked_again_when_it_says(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a")
        api.refuse(429, retry_after="1", when=lambda request: request.resource == "pods")
        api.refuse(500, when=lambda request: request.resource == "pods")
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a"])
        assert loop.time() - began >= 1
        assert len(seen.answers) == 1  # nobody was told of that

    run(scenario)


def test_what_it_may_not_do_is_told(api: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(api, "a")
    token = api.user(_DRIVER)

    async def forbidden() -> None:
        async with following(api, tmp_path, token=token) as seen:
            await seen.until(lambda: True)
            assert "cannot list resource" in str(seen.names)
            assert "the Role needs the verbs list and watch on pods" in str(seen.names)

    async def without_nodes() -> None:
        async with following(api, tmp_path, token=token) as seen:
            await seen.until(lambda: seen.names == ["a"])
            assert seen.answers[-1][0] == (Host("a", 1),)
            start(api, "b")
            await seen.until(lambda: seen.names == ["a", "b"])

    run(forbidden)
    api.create_all(_ROLE)
    caplog.clear()
    run(without_nodes)
    assert len(caplog.messages) == 1
    assert "cannot read nodes" in caplog.messages[0]
    assert "continuing without racks, taints and cordons" in caplog.messages[0]
    # And it asks for nothing that the documented Role does not have.
    asked = {(each.verb, each.resource) for each in api.requests if each.user == _DRIVER}
    assert asked == {("list", "pods"), ("watch", "pods"), ("list", "nodes")}

    async def with_nodes() -> None:
        async with following(api, tmp_path, token=token) as seen:
            await seen.until(lambda: seen.answers[-1][0] == (Host("a", 1, ("rack=z1",)), Host("b", 1, ("rack=z1",))))
            await asyncio.to_thread(api.wait_request, lambda each: (each.verb, each.resource) == ("watch", "nodes"))

    api.create_all(_CLUSTER_ROLE)
    api.forget_requests()
    run(with_nodes)
    assert {each.code for each in api.requests} == {200}


def test_a_token_that_is_not_good_any_more_is_read_anew(api: FakeKubernetes, tmp_path: Path) -> None:
    async def scenario() -> None:
        start(api, "a")
        old, new = api.user("driver", [{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]), api.user("driver")
        async with following(api, tmp_path, token=old) as seen:
            await seen.until(lambda: seen.names == ["a"])
            await asyncio.to_thread(api.wait_request, is_watch)
            api.kubeconfig(tmp_path / "kubeconfig", token=new)
            api.users.revoke(old)
            api.cut_watches()
            start(api, "b")
            await seen.until(lambda: seen.names == ["a", "b"])
            assert 401 in {each.code for each in api.requests}

    run(scenario)


def test_a_way_to_the_server_that_is_mended(api: FakeKubernetes, tmp_path: Path) -> None:
    start(api, "a")
    path = tmp_path / "later"

    async def scenario() -> None:
        async with following(api, tmp_path, environ={"KUBECONFIG": str(path)}) as seen:
            await seen.until(lambda: "this process does not run in a pod" in str(seen.names))
            assert "this process does not run in a pod" in seen.discovery.remark()
            api.kubeconfig(path)
            await seen.until(lambda: seen.names == ["a"])

    run(scenario)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "this process does not run in a pod"),
        ("{", "cannot use"),
        ("[]", "cannot use"),
        ("{apiVersion: v1, kind: Config, current-context: none, contexts: [], clusters: [], users: []}", "cannot use"),
    ],
)
def test_no_way_to_the_server(api: FakeKubernetes, tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "broken"
    if text is not None:
        path.write_text(text)

    async def scenario() -> None:
        async with following(api, tmp_path, environ={"KUBECONFIG": str(path)}) as seen:
            await seen.until(lambda: said in str(seen.names))

    run(scenario)


def test_a_server_that_does_not_say_what_time_it_is(api: FakeKubernetes, tmp_path: Path) -> None:
    """A proxy in front of it may send no Date: then this machine's clock holds."""
    api.says_date = False
    start(api, "w-1")

    async def scenario() -> None:
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["w-1"])
            api.delete_pod("w-1", grace_s=20)
            await seen.until(lambda: seen.going)
            assert seen.going["w-1"].within_s is not None

    run(scenario)


def test_pages_and_rubbish(api: FakeKubernetes, tmp_path: Path) -> None:
    for number in range(260):
        start(api, f"w-{number}")

    async def scenario() -> None:
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: len(seen.names) == 260)
            assert seen.names == [f"w-{number}" for number in range(260)]
        assert sum("continue" in each.query for each in api.requests) == 1

        async with following(api, tmp_path, selector="app in (x", timeout_s=3) as seen:
            await seen.until(lambda: "unable to parse" in str(seen.names))

    run(scenario)


def test_a_server_that_says_nothing(api: FakeKubernetes, tmp_path: Path) -> None:
    api.slow(60)

    async def scenario() -> None:
        async with following(api, tmp_path, timeout_s=0.5) as seen:
            await seen.until(lambda: "Kubernetes" in str(seen.names))
            assert "no answer within 0.5 s" in str(seen.names) or "has not answered within 0.5 s" in str(seen.names)

    run(scenario)


def test_a_watch_that_is_silent_for_too_long_is_asked_for_anew(
    api: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "_SILENT_S", 0.5)

    async def scenario() -> None:
        start(api, "a")
        async with following(api, tmp_path) as seen:
            await seen.until(lambda: seen.names == ["a"])
            await asyncio.to_thread(api.wait_request, is_watch)
            api.deafen_watches()
            start(api, "b")
            await seen.until(lambda: seen.names == ["a", "b"])
            assert sum(each.verb == "list" and each.resource == "pods" for each in api.requests) == 1

    run(scenario)


def test_inside_of_a_pod(tmp_path: Path) -> None:
    """What a pod is given: HTTPS with an authority of the cluster's, a token that is replaced, its namespace."""
    certificate = write_certificate(tmp_path / "ca.crt")
    with FakeKubernetes(namespaces=("team",), tls=certificate) as api:
        user, rules = "system:serviceaccount:team:driver", {"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}
        old, new = api.user(user, [rules]), api.user(user)
        (tmp_path / "token").write_text(old)
        (tmp_path / "namespace").write_text("team\n")
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api.port),
            "KUBECONFIG": str(tmp_path / "none"),
        }

        async def scenario() -> None:
            api.create_pod("a", "team", labels=LABELS)
            api.run_pod("a", "team")
            async with following(api, tmp_path, environ=environ) as seen:
                await seen.until(lambda: seen.names == ["a"])
                await asyncio.to_thread(api.wait_request, is_watch)
                (tmp_path / "token").write_text(new)
                api.users.revoke(old)
                api.cut_watches()
                api.create_pod("b", "team", labels=LABELS)
                api.run_pod("b", "team")
                await seen.until(lambda: seen.names == ["a", "b"])
            (tmp_path / "token").unlink()
            async with following(api, tmp_path, environ=environ) as seen:
                await seen.until(lambda: "Service token file does not exist" in str(seen.names))

        run(scenario)
