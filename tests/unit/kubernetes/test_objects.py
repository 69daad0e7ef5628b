"""The objects of a job, and the manifests, against Kubernetes's published schemas."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elastic_driver.cli.flags import parse
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.kubernetes import objects
from elastic_driver.kubernetes.objects import Object
from elastic_driver.kubernetes.spec import ElasticJob, SpecError, Transport
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import Settings
from tests.support.clusters.elastic_job_objects import UID, Cluster, resource

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "controller"
TRANSPORTS = list(Transport)
JOURNAL = "etcd://etcd-0.etcd:2379,etcd-1.etcd:2379/jobs/digits"


def check(body: Object) -> None:
    """Raises for what an API server would refuse, and for fields that it does not know."""
    kubernetes_validate.validate(body, kubernetes_validate.latest_version(), strict=True)


def job_of(transport: str = "join", **more: Any) -> ElasticJob:
    return ElasticJob.of(resource(transport=transport, **more))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_objects_are_as_the_schemas_have_them(transport: str) -> None:
    cluster = Cluster(resource(transport=transport, runPolicy={"backoffLimit": 2, "activeDeadlineSeconds": 60}))
    cluster.settle()
    cluster.settle()
    for body in (*cluster.others.values(), *(objects.worker_pod(cluster.job, index) for index in range(2))):
        check(body)
        assert body["metadata"]["ownerReferences"][0]["uid"] == cluster.job.uid


def test_manifests_are_as_the_schemas_have_them() -> None:
    kinds = []
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text()):
            if path.name not in ("kustomization.yaml", "example.yaml"):
                check(body)
                kinds.append(body["kind"])
    assert {"CustomResourceDefinition", "ClusterRole", "Deployment"} <= set(kinds)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl (Debian: kubernetes-client) is not installed")
def test_kustomize_takes_the_base() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS)], capture_output=True, text=True, timeout=150, check=True
    )
    kinds = [body["kind"] for body in yaml.safe_load_all(built.stdout)]
    assert sorted(kinds) == [
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Deployment", "Namespace", "ServiceAccount",
    ]  # fmt: skip


def test_the_example_is_a_job() -> None:
    body = yaml.safe_load((MANIFESTS / "example.yaml").read_text())
    body["metadata"] |= {"namespace": "default", "uid": "1"}
    job = ElasticJob.of(body)
    check(objects.worker_pod(job, 0))
    check(objects.launcher_job(job))
    options = env_of(objects.launcher_job(job)["spec"]["template"]["spec"])["ELASTIC_DRIVER_OPTIONS"]
    assert "--min-slots 2 --max-slots 8 --accept-agents" in options


def test_a_job_with_parameter_servers_starts_at_its_own_minimum() -> None:
    """Bounds of pods are bounds of slots, and servers take some of those."""
    body = yaml.safe_load((MANIFESTS / "example.yaml").read_text())
    body["metadata"] |= {"namespace": "default", "uid": "1"}
    body["spec"] |= {"slotsPerWorker": 1, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 4}}
    spec = objects.launcher_job(ElasticJob.of(body))["spec"]["template"]["spec"]
    options = shlex.split(env_of(spec)["ELASTIC_DRIVER_OPTIONS"])
    # What a pod has mounted is not here.
    options = [word for word in options if not word.startswith(("/", "--operator-token", "--join-token"))]

    def settings(*words: str) -> Settings:
        return settings_from(parse((*options, *words, "python", "train.py")), {})

    with_server = settings("--parameter-servers", "1", "-np", "1")
    assert (with_server.min_num_proc, with_server.max_num_proc) == (1, 3)
    without = settings("-np", "3")
    assert (without.min_num_proc, without.max_num_proc) == (2, 4)
    told = settings("-np", "3", "--min-np", "1", "--max-np", "3")
    assert (told.min_num_proc, told.max_num_proc) == (1, 3)


def test_a_job_with_a_journal_in_etcd_gets_another_launcher_whatever_became_of_the_first() -> None:
    plain, body = objects.launcher_job(job_of()), objects.launcher_job(job_of(journal=JOURNAL))
    check(body)
    assert plain["spec"]["podReplacementPolicy"] == "Failed"
    assert body["spec"]["podReplacementPolicy"] == "TerminatingOrFailed"
    spec = body["spec"]["template"]["spec"]
    options = options_of(body)
    assert (options["journal"], options["journal_key"]) == (f"{JOURNAL}/{UID}", "/etc/elastic-driver/journal-key")
    # Its pod is made while that of the one before it ends: the job has to be there yet.
    assert options["standby_driver"]
    assert options["hands_over"]
    assert keys_of(spec) == ["join-token", "operator-token", "journal-key"]
    assert keys_of(objects.worker_pod(job_of(journal=JOURNAL), 0)["spec"]) == ["join-token"]
    assert keys_of(plain["spec"]["template"]["spec"]) == ["join-token", "operator-token"]


def test_an_elastic_job_that_is_made_again_has_a_journal_of_its_own() -> None:
    """It has a new key, too, and what the one before it has left in etcd nobody can read any more."""
    first, second = resource(journal=JOURNAL), resource(journal=JOURNAL)
    second["metadata"]["uid"] = "66666666-2222-3333-4444-555555555555"
    urls = [options_of(objects.launcher_job(ElasticJob.of(body)))["journal"] for body in (first, second)]
    uids = [body["metadata"]["uid"] for body in (first, second)]
    assert urls == [f"{JOURNAL}/{uid}" for uid in uids]
    assert [EtcdPlace.parse(url, {}).prefix for url in urls] == [f"/jobs/digits/{uid}" for uid in uids]


NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"key": NOT_READY, "operator": "Exists"}, {UNREACHABLE}),
        ({"key": NOT_READY, "operator": "Exists", "effect": "NoExecute"}, {UNREACHABLE}),
        ({"operator": "Exists"}, set()),
        ({"operator": "Exists", "effect": "NoExecute"}, set()),
        # They say nothing of the taints that end a pod.
        ({"operator": "Exists", "effect": "NoSchedule"}, {NOT_READY, UNREACHABLE}),
        ({"key": NOT_READY, "operator": "Exists", "effect": "PreferNoSchedule"}, {NOT_READY, UNREACHABLE}),
    ],
)
def test_a_launcher_with_a_journal_leaves_a_lost_node_soon(given: Object, added: set[str]) -> None:
    body = resource(journal=JOURNAL)
    template = body["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    template["tolerations"] = [given]
    made = objects.launcher_job(ElasticJob.of(body))
    check(made)
    first, *more = made["spec"]["template"]["spec"]["tolerations"]
    assert first == given
    own = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    assert sorted(more, key=lambda each: each["key"]) == [{"key": key, **own} for key in sorted(added)]
    assert template["tolerations"] == [given]


def test_a_launcher_without_a_journal_tolerates_what_its_template_says() -> None:
    assert "tolerations" not in objects.launcher_job(job_of())["spec"]["template"]["spec"]


def keys_of(spec: Object) -> list[str]:
    """Of the Secret with the tokens, those that a pod has."""
    [volume] = [each for each in spec["volumes"] if each["name"] == "elastic-driver-tokens"]
    return [item["key"] for item in volume["secret"]["items"]]


def options_of(launcher: Object) -> dict[str, Any]:
    """What elasticrun is told in the launcher's pod."""
    words = shlex.split(env_of(launcher["spec"]["template"]["spec"])["ELASTIC_DRIVER_OPTIONS"])
    return parse((*words, "-np", "2", "python", "train.py"))


def env_of(spec: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in spec["containers"][0]["env"]}


def test_the_schema_knows_the_fields_that_are_read() -> None:
    crd = yaml.safe_load((MANIFESTS / "crd.yaml").read_text())
    [version] = crd["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert set(fields) == {
        "transport", "slotsPerWorker", "elasticPolicy", "drainTimeoutSeconds", "rendezvousPort", "sshAuthMountPath",
        "journal", "launcherCreationPolicy", "mpiImplementation", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs",
    }  # fmt: skip
    # With its defaults a job is as without them.
    defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    assert ElasticJob.of(resource(**{**defaults, "transport": "join"})) == ElasticJob.of(resource())
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    cluster = Cluster(resource())
    cluster.settle()
    cluster.says()
    cluster.look()
    assert set(cluster.status) <= set(status)


@pytest.mark.parametrize(
    ("journal", "is_one"),
    [
        (JOURNAL, True),
        ("etcd:///jobs/digits", True),  # its launcher has ETCDCTL_ENDPOINTS
        ("etcd://etcd-0.etcd/jobs/me@work", True),
        ("etcd://etcd-0.etcd:2379", False),
        ("etcd://jobs:secret@etcd-0.etcd:2379/jobs/digits", False),
        ("etcd://jobs@etcd-0.etcd:2379/jobs/digits", False),
        ("/var/jobs/digits", False),
    ],
)
def test_the_schema_takes_the_journals_that_are_taken(journal: str, is_one: bool) -> None:
    [version] = yaml.safe_load((MANIFESTS / "crd.yaml").read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["journal"]
    assert (re.search(schema["pattern"], journal) is not None) == is_one
    if is_one:
        assert job_of(journal=journal).journal == journal
        return
    with pytest.raises(SpecError, match=r"spec\.journal"):
        job_of(journal=journal)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_get_no_more_than_they_need(transport: str) -> None:
    """Who is in a worker's pod could end the job with the operators' key."""
    pod = objects.worker_pod(job_of(transport), 0)
    mounted = [volume["secret"] for volume in pod["spec"].get("volumes", ()) if "secret" in volume]
    keys = [item["key"] for secret in mounted for item in secret["items"]]
    assert objects.OPERATOR_TOKEN not in keys
    assert "serviceAccountName" not in pod["spec"]
    assert not any("TOKEN" in name for name in env_of(pod["spec"]))


def test_the_template_stays_as_it_was_and_wins() -> None:
    body = resource()
    template = body["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    container = template["spec"]["containers"][0]
    container |= {"command": ["mine"], "env": [{"name": "K_MPI_JOB_ROLE", "value": "mine"}]}
    container["lifecycle"] = {"preStop": {"exec": {"command": ["true"]}}}
    template["metadata"] = {"labels": {"team": "vision"}, "annotations": {"a": "b"}}
    before = yaml.safe_dump(body)
    pod = objects.worker_pod(ElasticJob.of(body), 3)
    assert yaml.safe_dump(body) == before
    made = pod["spec"]["containers"][0]
    assert (made["command"], env_of(pod["spec"])["K_MPI_JOB_ROLE"]) == (["mine"], "mine")
    assert made["lifecycle"] == container["lifecycle"]
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["annotations"]["a"] == "b"


def test_users_that_are_not_root_can_read_what_is_mounted() -> None:
    body = resource()
    body["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["securityContext"] = {"runAsUser": 1000}
    assert objects.worker_pod(ElasticJob.of(body), 0)["spec"]["securityContext"]["fsGroup"] == 1000


def modes_in(pod: dict[str, Any]) -> set[int]:
    return {volume["secret"]["defaultMode"] for volume in pod["spec"]["volumes"] if "secret" in volume}


@pytest.mark.parametrize("transport", ["join", "ssh"])
def test_images_with_a_user_of_their_own_can_read_it_too(transport: str) -> None:
    """Secret files are root's: without a group of the pod's, mode 0440 is for root alone."""
    body = resource(transport=transport, sshAuthMountPath="/home/mpiuser/.ssh")
    spec = body["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert modes_in(objects.worker_pod(ElasticJob.of(body), 0)) == {0o444}
    spec["containers"][0]["securityContext"] = {"runAsUser": 1000}
    pod = objects.worker_pod(ElasticJob.of(body), 0)
    assert modes_in(pod) == {0o444}
    assert "fsGroup" not in pod["spec"]["securityContext"], "it would change the owners on other volumes"
    assert modes_in(objects.launcher_job(ElasticJob.of(body))["spec"]["template"]) == {0o444}
    spec["securityContext"] = {"fsGroup": 7}
    assert modes_in(objects.worker_pod(ElasticJob.of(body), 0)) == {0o440}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nulls_in_a_template_are_nothing(transport: str) -> None:
    """As a template engine leaves them where a value is empty; the API server drops them in pods, and not here."""
    body, plain = resource(transport=transport), resource(transport=transport)
    for role in ("Launcher", "Worker"):
        template = body["spec"]["mpiReplicaSpecs"][role]["template"]
        nothing = dict.fromkeys(("securityContext", "dnsConfig", "volumes", "terminationGracePeriodSeconds"))
        template["metadata"] = dict.fromkeys(("labels", "annotations"))
        template["spec"] |= nothing
        template["spec"]["containers"][0] |= dict.fromkeys(("env", "volumeMounts", "lifecycle", "command", "args"))
        plain["spec"]["mpiReplicaSpecs"][role]["template"]["metadata"] = {}
    for made in (objects.launcher_job, lambda job: objects.worker_pod(job, 0)):
        assert made(ElasticJob.of(body)) == made(ElasticJob.of(plain))


def test_kubexec_hands_on_words_as_a_shell_would(tmp_path: Path) -> None:
    kubectl, agent = tmp_path / "kubectl", tmp_path / "kubexec.sh"
    kubectl.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    agent.write_text(objects.config(job_of("exec"), [])["data"]["kubexec.sh"])
    for file in (kubectl, agent):
        file.chmod(0o755)
    words = [str(agent), "digits-worker-1.digits.training.svc", "echo", "'a b'", "c"]
    said = subprocess.run(
        words, env={"PATH": f"{tmp_path}:/bin"}, capture_output=True, text=True, timeout=150, check=True
    )
    assert said.stdout.splitlines() == ["exec", "-i", "digits-worker-1", "--", "/bin/sh", "-c", "echo 'a b' c"]


def test_the_discovery_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "discover_hosts.sh"
    script.write_text(objects.config(job_of(slotsPerWorker=4), ["digits-worker-0"])["data"]["discover_hosts.sh"])
    script.chmod(0o755)
    said = subprocess.run([str(script)], capture_output=True, text=True, timeout=150, check=True).stdout
    assert said == "digits-worker-0.digits.training.svc:4\n"
