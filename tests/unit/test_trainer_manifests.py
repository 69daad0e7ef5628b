"""The manifests for Kubeflow Trainer and JobSet: pods as Kubernetes has them, and commands as elasticrun reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elastic_driver.cli.flags import parse
from elastic_driver.cli.join import read
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import Settings

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
MANIFESTS = sorted((*(FOLDER / "trainer").glob("*.yaml"), *(FOLDER / "jobset").glob("*.yaml"), FOLDER / "token.yaml"))
TOKEN = "a token of the test's own"
VERSIONS = ("1.31.0", kubernetes_validate.latest_version())

# What the CRDs of Kubeflow Trainer's releases have where these manifests say something (manifests/base/crds). None: all
# that is below is known to be right, or is checked elsewhere.
_JOB_SET = {"network": {"publishNotReadyAddresses": None}, "replicatedJobs": {"name": None, "template": None}}
_RUNTIME = {"numNodes": None, "torch": {}, "mpi": None}
TRAINER_FIELDS: dict[str, dict[str, Any]] = {
    "2.0": {"mlPolicy": _RUNTIME | {"torch": {"elasticPolicy": None, "numProcPerNode": None}}},
    "2.1": {"mlPolicy": _RUNTIME | {"torch": {"elasticPolicy": None, "numProcPerNode": None}}},
    "2.2": {"mlPolicy": _RUNTIME | {"flux": None, "jax": None, "xgboost": None}},
    "2.3": {"mlPolicy": _RUNTIME | {"flux": None, "jax": None, "xgboost": None, "torch": {"envInjection": None}}},
}
_TRAINER = ("args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode")
_TRAIN_JOB = ("initializer", "managedBy", "suspend")
TRAIN_JOB_FIELDS: dict[str, tuple[str, ...]] = {
    "2.0": (*_TRAIN_JOB, "annotations", "labels", "podSpecOverrides"),
    "2.1": (*_TRAIN_JOB, "annotations", "labels", "podTemplateOverrides"),
    "2.2": (*_TRAIN_JOB, "activeDeadlineSeconds", "runtimePatches"),
    "2.3": (*_TRAIN_JOB, "activeDeadlineSeconds", "runtimePatches"),
}


def strangers(value: Any, known: Mapping[str, Any] | None, at: str) -> list[str]:
    """The fields that are not known, by their paths."""
    if known is None:
        return []
    if isinstance(value, list):
        return [path for each in value for path in strangers(each, known, at)]
    found = [f"{at}.{name}" for name in value if name not in known]
    return found + [
        path for name in sorted(value.keys() & known) for path in strangers(value[name], known[name], f"{at}.{name}")
    ]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def jobs_of(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The Jobs that are made of it: their names, and their specs."""
    spec = document["spec"]
    for replicated in spec.get("replicatedJobs", spec.get("template", {}).get("spec", {}).get("replicatedJobs", ())):
        yield replicated["name"], replicated["template"]["spec"]


def container_of(path: Path, job: str) -> dict[str, Any]:
    [document] = documents(path)
    [found] = [spec for name, spec in jobs_of(document) if name == job]
    [container] = found["template"]["spec"]["containers"]
    return dict(container)


def read_trainjob(environ: Mapping[str, str]) -> Settings:
    """The settings of a pod of the TrainJob, as elasticrun reads its command with Trainer's environment."""
    [job] = documents(FOLDER / "trainer/trainjob.yaml")
    command = job["spec"]["trainer"]["command"]
    assert command[0] == "elasticrun"
    return settings_from(parse(command[1:]), environ)


def test_there_are_some() -> None:
    assert [path.name for path in MANIFESTS] == ["jobset.yaml", "token.yaml", "runtime.yaml", "trainjob.yaml"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_what_kubernetes_knows_of_is_valid(path: Path, version: str) -> None:
    for document in documents(path):
        if document["apiVersion"] == "v1":
            kubernetes_validate.validate(document, version, strict=True)
            continue
        for name, spec in jobs_of(document):
            container = spec["template"]["spec"]["containers"][0]
            container.setdefault("command", ["elasticrun"])  # a TrainJob's own
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
            kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("version", TRAINER_FIELDS)
def test_each_release_of_trainer_knows_all_fields(version: str) -> None:
    """What a CRD does not know, kubectl apply refuses."""
    [runtime], [job] = documents(FOLDER / "trainer/runtime.yaml"), documents(FOLDER / "trainer/trainjob.yaml")
    template = {"template": {"metadata": None, "spec": _JOB_SET}, "podGroupPolicy": None}
    assert strangers(runtime["spec"], TRAINER_FIELDS[version] | template, "spec") == []
    fields: dict[str, Any] = dict.fromkeys(TRAIN_JOB_FIELDS[version])
    fields |= {"trainer": dict.fromkeys(_TRAINER), "runtimeRef": dict.fromkeys(("apiGroup", "kind", "name"))}
    assert strangers(job["spec"], fields, "spec") == []
    # An integer since 2.2; before, a text was taken, too.
    assert isinstance(job["spec"]["trainer"]["numProcPerNode"], int)


def test_each_pod_has_the_token_and_knows_how_long_it_lives_on() -> None:
    for path in (FOLDER / "trainer/runtime.yaml", FOLDER / "jobset/jobset.yaml"):
        [document] = documents(path)
        for name, spec in jobs_of(document):
            pod = spec["template"]["spec"]
            [container] = pod["containers"]
            [volume] = pod["volumes"]
            [secret] = documents(FOLDER / "token.yaml")
            assert volume["secret"]["secretName"] == secret["metadata"]["name"]
            assert list(secret["stringData"]) == ["token"]
            [mount] = container["volumeMounts"]
            assert (mount["name"], mount["mountPath"]) == (volume["name"], "/etc/elastic-driver")
            told = {each["name"]: each.get("value") for each in container.get("env", ())}
            words = container.get("command", [])
            grace_s = float(pod["terminationGracePeriodSeconds"])
            if "join" in words:
                assert float(words[words.index("--grace") + 1]) == grace_s
            elif "elasticrun" in words:
                assert float(words[words.index("--grace-time") + 1]) < grace_s, name
            else:
                assert float(told["ELASTIC_DRIVER_GRACE"] or 0) == grace_s


def test_the_command_of_a_trainjob() -> None:
    environ = {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    }
    settings = read_trainjob(environ)
    assert settings.nodes is not None
    assert (settings.nodes.least, settings.nodes.most, settings.nodes.node_rank) == (2, 3, 1)
    assert settings.nodes.endpoint == "train-node-0-0.train:29500"
    [job], [runtime] = documents(FOLDER / "trainer/trainjob.yaml"), documents(FOLDER / "trainer/runtime.yaml")
    [(_, node)] = jobs_of(runtime)
    assert settings.grace_s < node["template"]["spec"]["terminationGracePeriodSeconds"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    reserved = {name for name in environ if name.startswith("PET_")}
    told = {each["name"] for each in container_of(FOLDER / "trainer/runtime.yaml", "node")["env"]}
    assert not reserved & told, "Trainer's webhook refuses these"


def test_the_commands_of_a_jobset(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    path = FOLDER / "jobset/jobset.yaml"

    def words_of(job: str) -> list[str]:
        words = [
            str(token) if word == "/etc/elastic-driver/token" else word for word in container_of(path, job)["command"]
        ]
        return [word.replace("$(POD_NAME)", "elastic-worker-0-1-x7k2p") for word in words]

    program, *words = words_of("driver")
    assert program == "elasticrun"
    settings = settings_from(parse(words), {})
    assert (settings.num_proc, settings.min_num_proc, settings.max_num_proc) == (2, 1, 4)
    assert settings.accept_agents
    program, subcommand, *words = words_of("worker")
    assert (program, subcommand) == ("elasticrun", "join")
    bootstrap = read(words, dict(os.environ))
    [document] = documents(path)
    subdomain = document["spec"]["network"]["subdomain"]
    name = document["metadata"]["name"]
    assert bootstrap.urls == (f"https://{name}-driver-0-0.{subdomain}:{settings.rendezvous_port}",)
    assert (bootstrap.host, bootstrap.slots, bootstrap.leave_code) == ("elastic-worker-0-1-x7k2p", 1, 143)
    [port] = container_of(path, "driver")["ports"]
    assert port["containerPort"] == settings.rendezvous_port
