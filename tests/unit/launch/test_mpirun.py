"""What mpirun is told, by implementation."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.driver.mpirun import environment_of
from elastic_driver.errors import SettingsError
from elastic_driver.launch.mpirun import Call, Flavour, call_of, find_mpirun, flavour_of
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import Settings

pytestmark = pytest.mark.unit


def make(**values: Any) -> Settings:
    return settings_from({"command": ("python", "train.py"), "num_proc": 3, "mpi": True, **values}, {})


def call(flavour: Flavour, environ: dict[str, str] | None = None, *, is_root: bool = False, **values: Any) -> Call:
    return call_of(make(**values), "/bin/mpirun", flavour, environ=environ or {}, names=("A", "PATH"), is_root=is_root)


def words(flavour: Flavour, environ: dict[str, str] | None = None, **values: Any) -> str:
    return " ".join(call(flavour, environ, **values).words)


def test_open_mpi() -> None:
    text = words(Flavour.OPEN_MPI)
    assert text == (
        "/bin/mpirun -np 3 --tag-output -H localhost:3 -bind-to none -map-by slot -x A -x PATH python train.py"
    )
    assert "--allow-run-as-root" in call(Flavour.OPEN_MPI, is_root=True).words
    text = words(
        Flavour.OPEN_MPI,
        hosts="a:2,b:1",
        binding_args="-bind-to socket",
        mpi_args="--mca x 'y z'",
        ssh_port=2222,
        ssh_identity_file="/k y",
        network_interfaces=("eth0", "10.0.0.0/8"),
        output_filename="/logs",
        prefix_timestamp=True,
    )
    assert "-H a:2,b:1 -bind-to socket -mca" in text
    assert "-mca plm_rsh_args -p 2222 -i '/k y' -mca btl" in text
    assert "-mca plm_rsh_agent agent -v" in words(Flavour.OPEN_MPI, rsh_agent="agent -v")
    assert "-mca btl_tcp_if_include eth0,10.0.0.0/8 -mca oob_tcp_if_include eth0,10.0.0.0/8" in text
    assert "--timestamp-output --output-filename /logs" in text
    assert text.endswith("--mca x y z python train.py")
    assert "no_tree_spawn" not in text
    assert "plm_rsh_num_concurrent 64" in words(
        Flavour.OPEN_MPI, hosts=",".join(f"h{number}:1" for number in range(64))
    )


def test_mpich() -> None:
    assert words(Flavour.HYDRA) == (
        "/bin/mpirun -np 3 -prepend-rank -hosts localhost:3 -genvlist A,PATH python train.py"
    )
    made = call(
        Flavour.HYDRA, hosts="a:2,b:1", rsh_agent="/agent", network_interfaces="eth0", binding_args="-bind-to core"
    )
    text = " ".join(made.words)
    assert "-hosts a:2,b:1 -bind-to core -launcher ssh -launcher-exec /agent -iface eth0" in text
    over_ssh = call(Flavour.HYDRA, ssh_port=2222, ssh_identity_file="/k y")
    assert over_ssh.environ == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222 -i '/k y'"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output_filename": "/x"}, "--output-filename"),
        ({"prefix_timestamp": True}, "--prefix-output-with-timestamp"),
        ({"rsh_agent": "agent -v"}, "--rsh-agent"),
    ]
    for asked, flag in cases:
        with pytest.raises(SettingsError, match=f"cannot use {flag} "):
            call(Flavour.HYDRA, **asked)


def test_hosts_of_an_allocation_are_left_to_mpirun() -> None:
    for flavour in Flavour:
        assert "localhost" not in words(flavour, {"SLURM_JOB_ID": "7"})
        assert "localhost:3" in words(flavour, {"SLURM_JOB_ID": "7"}, hosts="localhost:3")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"min_num_proc": 1}, "--min-np"),
        ({"discovery_script": "true"}, "--host-discovery-script"),
        ({"durable_dir": "/x"}, "--durable-dir"),
        ({"accept_agents": True}, "--accept-agents"),
        ({"tls": True}, "--tls"),
        ({"event_log": "/x"}, "--event-log"),
    ],
)
def test_what_needs_a_driver_is_refused(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(SettingsError, match=f"cannot use {flag} with --mpi"):
        make(**values)


def test_torchruns_flags_are_refused() -> None:
    with pytest.raises(SettingsError, match="torchrun's flags with --mpi"):
        make(torchrun={"nproc_per_node": "2"})


def test_the_environment_of_its_ranks() -> None:
    settings = make(
        start_timeout_s=7, timeline_filename="/t", passed_env=["A=1"], network_interfaces="eth0", horovod_shim="always"
    )
    env = environment_of(settings, {"B": "2", "PMI_RANK": "3", "ELASTIC_DRIVER_RENDEZVOUS": "x", "PYTHONPATH": "/p"})
    assert env["PYTHONPATH"].endswith("/compat/shim:/p")
    assert (env["A"], env["B"], env["HOROVOD_TIMELINE"]) == ("1", "2", "/t")
    assert (env["HOROVOD_GLOO_IFACE"], env["HOROVOD_START_TIMEOUT"]) == ("eth0", "7")
    assert not env.keys() & {"PMI_RANK", "ELASTIC_DRIVER_RENDEZVOUS"}
    assert environment_of(make(), {"HOROVOD_GLOO_IFACE": "ib0"})["HOROVOD_GLOO_IFACE"] == "ib0"


@pytest.mark.parametrize(
    ("said", "flavour"),
    [
        ("mpirun.openmpi (OpenRTE) 4.1.4", Flavour.OPEN_MPI),
        ("mpirun (Open MPI) 5.0.3", Flavour.OPEN_MPI),
        ("HYDRA build details:\n    Version: 4.0.2", Flavour.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", Flavour.HYDRA),
    ],
)
def test_which_mpirun_it_is(said: str, flavour: Flavour) -> None:
    assert flavour_of("/bin/mpirun", said) is flavour


def test_no_mpirun_or_a_strange_one() -> None:
    with pytest.raises(SettingsError, match="cannot find mpirun on the PATH"):
        find_mpirun({"PATH": "/no/such"})
    with pytest.raises(SettingsError, match=r"neither Open MPI nor MPICH: mpirun --version prints 'a\?'"):
        flavour_of("/bin/mpirun", "a?\nb")
