"""The one road to Settings, from whichever side the values come. Command lines are tested in tests/unit/cli."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.mpirun import Mpirun
from elastic_driver.settings.settings import Settings

pytestmark = [pytest.mark.unit]


def make(environ: dict[str, str] | None = None, **values: Any) -> Settings:
    return settings_from({"command": ("true",), "num_proc": 2, **values}, environ or {})


def test_none_stands_for_what_was_not_given() -> None:
    nothing = dict.fromkeys(("min_num_proc", "elastic_timeout_s", "hosts", "preload", "config_file", "mpi"))
    assert make(**nothing) == make()


def test_texts_and_numbers_of_other_kinds_are_read() -> None:
    made = make(num_proc="3", elastic_timeout_s=7, grace_s="0.5", cooldown_range_s=[2, "30"], preload=["torch ", ""])
    assert (made.num_proc, made.elastic_timeout_s, made.grace_s) == (3, 7.0, 0.5)
    assert (made.cooldown_range_s, made.preload) == ((2.0, 30.0), ("torch",))


@pytest.mark.parametrize("given", ["a, [::1],b,a", ["a", "::1", "b"], ("a,::1", " b ", "")])
def test_names_of_protected_hosts_are_read_from_all_that_are_given(given: Any) -> None:
    assert make(protect=given, discovery_script="true").protect == ("a", "::1", "b")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_proc": "two"}, "argument -np: 'two' is not an integer"),
        ({"num_proc": 2.5}, "argument -np: '2.5' is not an integer"),
        ({"reset_limit": True}, "argument --reset-limit: 'True' is not an integer"),
        ({"grace_s": "soon"}, "argument --grace-time: 'soon' is not a number"),
        ({"cooldown_range_s": (1, "x")}, "argument --blacklist-cooldown-range: 'x' is not a number"),
        ({"cooldown_range_s": (1,)}, "argument --blacklist-cooldown-range: expected 2 arguments"),
        ({"hosts": "a:2", "hostfile": "x"}, "not allowed with argument"),
        ({"mpi": True, "mpi_args": "'a"}, "cannot read --mpi-args: No closing quotation"),
        ({"hosts": "-me@a:2"}, "cannot read -H '-me@a:2': cannot read '-me' as a login name before host 'a:2'"),
        ({"hosts": "@a:2"}, "cannot read '' as a login name"),
        ({"hosts": "a:2,me@ rack=1"}, "cannot read 'me' as a login name before host ''"),
        ({"hosts": "me@a:2,you@a:1"}, "host 'a' is named twice"),
        (
            {"hosts": "me@a:2", "rsh_agent": "rsh"},
            "the login name in me@a applies to ssh, which --rsh-agent replaces",
        ),
        ({"hosts": "me@a:2", "mpi": True}, "mpirun does not accept login names: me"),
        ({"port_range": "many"}, "argument --port-range: 'many' is not a range of ports such as 40000-40999"),
        ({"port_range": (1, "x")}, "argument --port-range: 'x' is not an integer"),
        ({"rsh_agent": "'a"}, "argument --rsh-agent: No closing quotation"),
        ({"rsh_agent": " "}, "--rsh-agent is empty"),
        ({"passed_env": ["A"]}, "-x A: the variable is not set here"),
    ],
)
def test_what_cannot_be_read(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**values)
    assert complaint in str(caught.value)


def test_a_name_that_is_no_setting_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="there is no setting named elastic_timeout"):
        make(elastic_timeout=3)


def test_the_nearer_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("library_options: {gloo_timeout_seconds: 8}\nwarm_starts: {enabled: false, preload: 'a, b'}\n")
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "9", "ELASTIC_DRIVER_HOROVOD_SHIM": "Never"}
    assert make(environ).gloo_timeout_s == 9
    assert make(environ).worker_env == {}, "workers inherit it"
    from_file = make(environ, config_file=str(file))
    assert (from_file.gloo_timeout_s, from_file.warm_starts, from_file.preload) == (8, False, ("a", "b"))
    assert from_file.worker_env == {"HOROVOD_GLOO_TIMEOUT_SECONDS": "8"}
    assert make(environ, config_file=file, gloo_timeout_s=7).gloo_timeout_s == 7
    assert (make(environ).horovod_shim, make(environ, horovod_shim="Always").horovod_shim) == ("never", "always")
    file.write_text("controller: mpi\n")
    assert make(config_file=file).mpi == Mpirun()


def test_what_follows_from_what_was_given() -> None:
    assert (make().hosts, make().elastic, make().max_num_proc) == ((Host("localhost", 2),), False, 2)
    growing = make(min_num_proc=1, hosts="localhost:4")
    assert (growing.elastic, growing.min_num_proc, growing.max_num_proc) == (True, 1, None)
    assert make(min_num_proc=1, num_standby=1, hosts="localhost:4").max_num_proc == 2
    assert make(discovery_script="true").hosts is None


def test_a_job_that_accepts_agents_may_begin_with_no_hosts() -> None:
    made = make(accept_agents=True)
    assert (made.hosts, made.elastic, made.min_num_proc, made.max_num_proc) == ((), True, 2, None)
    made = make(accept_agents=True, hosts="localhost:1")
    assert (made.hosts, made.elastic) == ((Host("localhost", 1),), True)
    assert make(accept_agents=True, discovery_script="true").hosts is None


def test_open_mpis_variables_stand_in() -> None:
    environ = {"OMPI_MCA_orte_set_default_slots": "3", "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh -q"}
    made = make(environ, hosts="a,b:1")
    assert made.hosts == (Host("a", 3), Host("b", 1))
    assert made.rsh_agent == ("/etc/mpi/kubexec.sh", "-q")
    assert make(environ, hosts="a,b", slots_per_host=4).hosts == (Host("a", 4), Host("b", 4))
    assert make(environ, rsh_agent="mine").rsh_agent == ("mine",)
    assert make(environ, launcher_command="run {host}").rsh_agent is None
    assert make(environ, ssh_port=2222).rsh_agent is None
    assert make({"OMPI_MCA_plm_rsh_agent": "ssh : rsh"}).rsh_agent is None, "that is what there is anyway"
    assert make({"OMPI_MCA_plm_rsh_agent": "rsh -x : ssh"}).rsh_agent == ("rsh", "-x")
    assert make({"OMPI_MCA_plm_rsh_agent": " "}).rsh_agent is None
    with pytest.raises(SettingsError, match="the variable OMPI_MCA_orte_set_default_slots: 'x' is not an integer"):
        make({"OMPI_MCA_orte_set_default_slots": "x"})
    with pytest.raises(SettingsError, match="the variable OMPI_MCA_plm_rsh_agent: No closing quotation"):
        make({"OMPI_MCA_plm_rsh_agent": "'a"})


@pytest.mark.parametrize("text", ["/usr/bin/ssh", "ssh -p 2222", "'/opt/my tools/ssh' -x : rsh"])
def test_open_mpis_variable_takes_ssh_s_place_in_a_pod_only(text: str) -> None:
    environ = {"OMPI_MCA_plm_rsh_agent": text}
    words = tuple(shlex.split(text.partition(":")[0]))
    made = make(environ, hosts="a,b")
    assert made.rsh_agent is None
    # What cannot be seen from outside is said.
    assert [text.partition(":")[0].strip() in remark for remark in made.remarks] == [True] * (len(words) > 1)
    assert make(environ, hosts="a,b", ssh_port=2222).remarks == ()
    for pod in ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}):
        in_pod = make(environ | pod, hosts="a,b")
        assert in_pod.rsh_agent == words
        assert in_pod.remarks == ()
    assert make(environ, hosts="a,b", rsh_agent=text).rsh_agent is not None, "a flag says what it says"


@pytest.mark.parametrize("value", [None, "stdin", "command"])
def test_an_rsh_agent_may_be_told_how_its_agents_get_their_secret(value: str | None) -> None:
    assert make(rsh_agent="a", launcher_bootstrap=value).launcher_bootstrap == value


def test_the_config_files_interfaces_hold(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("network: {interfaces: 'eth0, eth1', port_range: 4000-4001}\nlauncher: {rsh_agent: a b}\n")
    made = make(config_file=file)
    assert (made.network_interfaces, made.port_range) == (("eth0", "eth1"), (4000, 4001))
    assert made.rsh_agent == ("a", "b")


def test_words_for_mpirun_without_mpirun_are_told_of() -> None:
    settings = settings_from({"num_proc": 2, "command": ["a"], "mpi_args": "x", "binding_args": "y"}, {})
    assert settings.remarks == ("--mpi-args and --binding-args without --mpi: no effect, since no mpirun is run",)
    assert settings_from({"num_proc": 2, "command": ["a"]}, {}).remarks == ()


def test_a_journal_is_a_folder_or_in_etcd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert make().journal is None
    folder = make(journal="kept").journal
    assert folder == JournalPlace(tmp_path / "kept")
    assert str(folder) == f"{tmp_path}/kept"
    etcd = make(journal="etcd://a/jobs/b", journal_key="key", accept_agents=True).journal
    assert etcd == JournalPlace(url="etcd://a/jobs/b", key=tmp_path / "key")
    assert str(etcd) == "etcd://a/jobs/b"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"journal": "etcd://a/jobs/b"}, "must be given together"),
        ({"journal": "etcd://a/jobs/b", "journal_key": ""}, "must be given together"),
        ({"journal": "kept", "journal_key": "key"}, "a folder has no key"),
        ({"journal_key": "key"}, "--journal-key has no effect"),
        ({"journal": "http://a/jobs/b"}, "a journal is either in a folder or in etcd"),
    ],
)
def test_its_key_goes_with_a_place_in_etcd(given: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make(**given)


def test_what_each_driver_of_a_command_reads_is_no_pipe(tmp_path: Path) -> None:
    """As bash's ``<(...)`` is: it has been read when a driver is started again."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    in_etcd = {"journal": "etcd://a/jobs/b", "accept_agents": True}
    nodes = {"torchrun": {"nnodes": "2", "rdzv_endpoint": "node0:29400"}}
    with pytest.raises(SettingsError, match=f"--journal-key {pipe} is a pipe, which can be read only once"):
        make(**in_etcd, journal_key=pipe)
    with pytest.raises(SettingsError, match=f"--join-token-file {pipe} is a pipe, which can be read only once"):
        settings_from({"command": ["a"], **in_etcd, **nodes, "journal_key": file, "join_token_file": pipe}, {})
    assert (
        make(**in_etcd, journal_key=file, join_token_file=pipe).join_token_file == pipe
    )  # the journal has what it says
    assert make(**in_etcd, journal_key=300 * "a").journal  # whoever reads it says that it cannot be


def test_a_name_in_front_of_a_host_is_that_with_which_ssh_logs_in(tmp_path: Path) -> None:
    made = make(hosts="me@a:2 rack=x@y,b, you@[::1]:3")
    assert made.hosts == (Host("a", 2, ("rack=x@y",)), Host("b", 1), Host("::1", 3))
    assert made.logins == {"a": "me", "::1": "you"}
    file = tmp_path / "hosts"
    file.write_text("# mine\nme@a slots=2 rack=1\n\nb:1  # not me@b\nyou@c\n")
    made = make(hostfile=file)
    assert made.hosts == (Host("a", 2, ("rack=1",)), Host("b", 1), Host("c", 1))
    assert made.logins == {"a": "me", "c": "you"}
    assert make(hosts="a:2").logins == {}
    file.write_text("a:2\nno host\n\nme@a\n")
    with pytest.raises(SettingsError, match="line 4"):
        make(hostfile=file)
