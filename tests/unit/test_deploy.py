"""The files in deploy/: what Kubernetes knows is valid there, what operators add is called as they call it, and the
commands are ours.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elastic_driver.cli.flags import parse
from elastic_driver.settings.assembly import settings_from

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MPI_JOBS = [FOLDER / "mpi-operator" / name for name in ("mpijob.yaml", "mpijob-v1.yaml")]
KUBERNETES = "1.31"
# Of mpi-operator 0.8.2 (v2beta1) and 0.3.0 (v1): what an MPIJob may have.
SPEC = {
    "kubeflow.org/v2beta1": {
        "slotsPerWorker",
        "runLauncherAsWorker",
        "runPolicy",
        "mpiReplicaSpecs",
        "sshAuthMountPath",
        "launcherCreationPolicy",
        "mpiImplementation",
    },
    "kubeflow.org/v1": {
        "slotsPerWorker",
        "backoffLimit",
        "activeDeadlineSeconds",
        "cleanPodPolicy",
        "mpiReplicaSpecs",
        "mainContainer",
        "runPolicy",
    },
}
RUN_POLICY = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
    "suspend",
    "managedBy",
}
REPLICA = {"replicas", "restartPolicy", "template"}

pytestmark = pytest.mark.unit


def check_pod(template: dict[str, Any]) -> dict[str, Any]:
    """Raises when Kubernetes would not take this as a pod. Returns its only container."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template.get("metadata", {})}}
    kubernetes_validate.validate({**pod, "spec": template["spec"]}, KUBERNETES, strict=True)
    (container,) = template["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("path", MPI_JOBS, ids=lambda path: path.name)
def test_mpi_jobs(path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    spec = job["spec"]
    assert job["kind"] == "MPIJob"
    assert spec.keys() <= SPEC[job["apiVersion"]]
    assert spec.get("runPolicy", {}).keys() <= RUN_POLICY
    replicas = spec["mpiReplicaSpecs"]
    assert replicas.keys() == {"Launcher", "Worker"}
    assert all(each.keys() <= REPLICA for each in replicas.values())

    launcher = check_pod(replicas["Launcher"]["template"])
    assert launcher["command"] == ["elasticrun"]
    settings = settings_from(
        parse(launcher["args"]), {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"} | slots_of(job)
    )
    assert settings.command == ("python", "train.py")
    assert settings.num_proc <= replicas["Worker"]["replicas"] * spec["slotsPerWorker"]

    worker = check_pod(replicas["Worker"]["template"])
    *leave, within_s = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert leave == ["elasticrun", "leave", "--within"]
    assert 0 < int(within_s) < replicas["Worker"]["template"]["spec"]["terminationGracePeriodSeconds"]
    if job["apiVersion"] == "kubeflow.org/v2beta1":
        home = str(Path(spec["sshAuthMountPath"]).parent)
        assert worker["command"][-1] == f"{home}/.sshd_config"


def slots_of(job: dict[str, Any]) -> dict[str, str]:
    """What v2 tells the launcher of slots; v1's script names them."""
    if job["apiVersion"] == "kubeflow.org/v1":
        return {}
    return {"OMPI_MCA_orte_set_default_slots": str(job["spec"]["slotsPerWorker"])}


def test_what_is_wrong_is_seen() -> None:
    template = {"spec": {"containers": [{"name": "x", "imag": "y"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(template)


def test_the_dockerfile_and_the_jobs_agree() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    jobs = "".join(path.read_text() for path in MPI_JOBS)
    user = re.search(r"useradd .*--uid (\d+) (\w+)", text)
    assert user is not None
    assert f"runAsUser: {user[1]}" in jobs
    assert f"HostKey /home/{user[2]}/.ssh/id_rsa" in text
    assert set(re.findall(r"image: (\S+)", jobs)) == set(re.findall(r"docker build .* -t (\S+) ", text))


def test_an_image_runs_as_a_user_by_number() -> None:
    """runAsNonRoot is refused where an image names its user: the kubelet does not look into its passwd."""
    for path in sorted(FOLDER.rglob("Dockerfile*")):
        users = re.findall(r"^USER (\S+)", path.read_text(), re.M)
        assert users, path
        assert all(user.isdecimal() and int(user) for user in users), path


def test_what_git_ignores_goes_into_no_image() -> None:
    """A virtual environment with CUDA is gigabytes. dist/ is what an image copies."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line != "/dist/"}
    left_out = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()]
    assert [each for each in sorted(ignored) if not any(fnmatch(each, line) for line in left_out)] == []
    # Docker looks in folders below only where a pattern says so.
    anywhere = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("/")}
    assert sorted(f"**/{each}" for each in anywhere if f"**/{each}" not in (ROOT / ".dockerignore").read_text()) == []
