"""What a job takes from the environment of an operator's launcher pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings import assembly
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import Settings

pytestmark = [pytest.mark.unit]

OPEN_MPI = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "2",
}
INTEL = {"I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile", "I_MPI_PERHOST": "3"}
MPICH = {"HYDRA_HOST_FILE": "/etc/mpi/hostfile"}


def make(environ: dict[str, str], **given: Any) -> Settings:
    return settings_from({"command": ("true",), "num_proc": 2, **given}, environ)


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the mounted file."""
    file = tmp_path / "hostfile"
    file.write_text("pi-worker-0.pi.default.svc slots=2\npi-worker-1.pi.default.svc slots=2\n")
    monkeypatch.setattr(assembly, "read_hostfile", lambda path, slots, read=assembly.read_hostfile: read(file, slots))
    return file


@pytest.mark.parametrize("environ", [OPEN_MPI, INTEL, MPICH])
def test_without_hosts_the_mounted_hostfile_is_taken_and_told(environ: dict[str, str], hostfile: Path) -> None:
    made = make(environ, min_num_proc=1)
    assert made.hosts == (Host("pi-worker-0.pi.default.svc", 2), Host("pi-worker-1.pi.default.svc", 2))
    assert made.elastic
    variable = next(name for name in environ if "FILE" in name.upper())
    assert made.remarks == (
        f"using the hosts in /etc/mpi/hostfile ({variable}), since no flag names hosts; with "
        "--host-discovery-script /etc/mpi/discover_hosts.sh the job follows changes of the replicas",
    )


def test_intels_and_mpichs_notation(hostfile: Path) -> None:
    hostfile.write_text("pi-worker-0.pi.default.svc:4\n")
    assert make(MPICH).hosts == (Host("pi-worker-0.pi.default.svc", 4),)


def test_whoever_names_hosts_has_them(hostfile: Path) -> None:
    assert make(OPEN_MPI, hosts="a:2").hosts == (Host("a", 2),)
    assert make(OPEN_MPI, discovery_script="/etc/mpi/discover_hosts.sh").hosts is None
    assert make(OPEN_MPI, discovery="kubernetes", pod_selector="app=train").hosts is None
    assert make(OPEN_MPI, accept_agents=True).hosts == ()
    one_node = settings_from({"command": ("true",), "torchrun": {"nproc_per_node": "2"}}, OPEN_MPI)
    assert one_node.hosts == (Host("localhost", 2),)
    assert one_node.remarks == ()
    elsewhere = {"OMPI_MCA_orte_default_hostfile": "/home/me/hostfile", "I_MPI_PERHOST": "3"}
    made = make(elsewhere)
    assert (made.hosts, made.remarks, made.slots_per_host) == ((Host("localhost", 2),), (), None)


def test_a_hostfile_that_cannot_be_read_ends_it() -> None:
    with pytest.raises(SettingsError, match="cannot read the hostfile /etc/mpi/hostfile: No such file or directory"):
        make(OPEN_MPI)


def test_slots_of_hosts_that_name_none() -> None:
    script = "/etc/mpi/discover_hosts.sh"
    assert make(OPEN_MPI, discovery_script=script).slots_per_host == 2
    assert make(INTEL, discovery_script=script).slots_per_host == 3
    assert make(INTEL, discovery_script=script, slots_per_host=1).slots_per_host == 1
    assert make(MPICH, discovery_script=script).slots_per_host is None
    with pytest.raises(SettingsError, match="the variable I_MPI_PERHOST: 'all' is not an integer"):
        make({**INTEL, "I_MPI_PERHOST": "all"}, discovery_script=script)


def test_hosts_are_put_in_order_in_a_launcher_pod_only() -> None:
    assert make(OPEN_MPI, discovery_script="true").orders_hosts
    assert not make({}, discovery_script="true").orders_hosts
