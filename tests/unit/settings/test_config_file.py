"""The YAML file of --config-file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_driver.cli.flags import build_parser
from elastic_driver.errors import SettingsError
from elastic_driver.settings import config_file
from elastic_driver.settings.config_file import read_config_file

pytestmark = [pytest.mark.unit]

WHOLE = """
controller: gloo
params: {fusion_threshold_mb: 8, cycle_time_ms: 2, cache_capacity: 7, hierarchical_allreduce: true,
         hierarchical_allgather: false, torus_allreduce: true}
autotune: {enabled: true, log_file: a.log, warmup_samples: 1, steps_per_sample: 2, bayes_opt_max_samples: 3,
           gaussian_process_noise: 0.5}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 4, shutdown_time_seconds: 5}
library_options: {mpi_threads_disable: true, num_nccl_streams: 6, thread_affinity: 7, gloo_timeout_seconds: 8}
placement: {np_multiple: 2, ranks_per_host_multiple: 1, protect: "a, b"}
warm_starts: {enabled: false, preload: "torch,numpy"}
agents: {accept: true, join_token_file: t, timeout_seconds: 9, spot_notices: aws, tls: true}
discovery:
  {kind: kubernetes, selector: app=train, namespace: n, pod_names: dns, slots_from: cpu, rack_from: zone,
   departure_taints: "a,b"}
launcher: {kind: auto, rsh_agent: rsh -x, command: run, bootstrap: command, remote_python: /p}
ssh: {port: 22, identity_file: k, connect_timeout_seconds: 3}
network: {interfaces: "eth0,10.0.0.0/8", port_range: 4000-4999, check: true}
logging: {level: debug, with_timestamp: true}
"""


def read(tmp_path: Path, text: str | bytes) -> dict[str, object]:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config_file(path)


def test_every_key_stands_for_a_flag(tmp_path: Path) -> None:
    values = read(tmp_path, WHOLE)
    assert values == {
        "mpi": False,
        "fusion_threshold_mb": 8,
        "cycle_time_ms": 2,
        "cache_capacity": 7,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": False,
        "torus_allreduce": True,
        "autotune": True,
        "autotune_log_file": "a.log",
        "autotune_warmup_samples": 1,
        "autotune_steps_per_sample": 2,
        "autotune_bayes_opt_max_samples": 3,
        "autotune_gaussian_process_noise": 0.5,
        "timeline_filename": "t.json",
        "timeline_mark_cycles": True,
        "stall_check": False,
        "stall_check_warning_time_seconds": 4,
        "stall_check_shutdown_time_seconds": 5,
        "mpi_threads_disable": True,
        "num_nccl_streams": 6,
        "thread_affinity": 7,
        "gloo_timeout_s": 8,
        "num_proc_multiple": 2,
        "ranks_per_host_multiple": 1,
        "protect": "a, b",
        "warm_starts": False,
        "preload": "torch,numpy",
        "accept_agents": True,
        "join_token_file": "t",
        "agent_timeout_s": 9,
        "spot_notices": "aws",
        "tls": True,
        "discovery": "kubernetes",
        "pod_selector": "app=train",
        "pod_namespace": "n",
        "pod_names": "dns",
        "slots_from": "cpu",
        "rack_from": "zone",
        "departure_taints": "a,b",
        "launcher": "auto",
        "rsh_agent": "rsh -x",
        "launcher_command": "run",
        "launcher_bootstrap": "command",
        "remote_python": "/p",
        "ssh_port": 22,
        "ssh_identity_file": "k",
        "ssh_connect_timeout_s": 3,
        "network_interfaces": "eth0,10.0.0.0/8",
        "port_range": "4000-4999",
        "check_network": True,
        "log_level": "debug",
        "log_with_timestamp": True,
    }
    flags = {action.dest for action in build_parser()._actions}
    assert values.keys() <= flags, "a key that no flag has would be read and forgotten"


@pytest.mark.parametrize("text", ["", "# nothing\n", "params:\n", "---\n...\n", "params: {}\n"])
def test_nothing_is_no_error(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == {}


def test_what_is_like_nothing_here_is_remarked_and_the_rest_taken(tmp_path: Path) -> None:
    """As in a file for Horovod, which ignores what it does not know."""
    text = "controller: GLOO\nelastic: {min_np: 2}\nlogging: {hide_timestamp: true, level: INFO}\nparams: {1: 1}\n"
    values = read(tmp_path, text)
    remarks = values.pop("remarks")
    assert values == {"mpi": False, "log_level": "INFO"}
    assert isinstance(remarks, tuple)
    for remark, complaint in zip(
        remarks,
        (
            "unknown section 'elastic', which has no effect; known: controller, params, ",
            "logging.hide_timestamp of the config file",
            "unknown key in section 'params': 1, which has no effect; known: fusion_threshold_mb, ",
        ),
        strict=True,
    ):
        assert complaint in remark
        assert "config.yaml" in remark


def test_horovods_own_file_is_taken(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.config.getoption("--horovod-source")
    if source is None:
        pytest.skip("no source of Horovod: give --horovod-source DIR")
    values = read(tmp_path, (source / "test/single/data/config.test.yaml").read_text())
    assert (values["fusion_threshold_mb"], values["gloo_timeout_s"], values["log_level"]) == (32, 60, "INFO")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("paramz: {}", "unknown section 'paramz'; did you mean 'params'?"),
        ("params: {fusion_treshold_mb: 1}", "did you mean 'fusion_threshold_mb'?"),
        ("params: 3", "section 'params' is not a mapping"),
        ("params: [a]", "section 'params' is not a mapping"),
        ("- params", "its top level is not a mapping"),
        ("params", "its top level is not a mapping"),
        ("params: {fusion_threshold_mb: '8'}", "params.fusion_threshold_mb"),
        ("params: {fusion_threshold_mb: 1.5}", "1.5 is not an integer"),
        ("params: {cache_capacity: true}", "True is not an integer"),
        ("params: {cycle_time_ms: true}", "True is not a number"),
        ("params: {torus_allreduce: 1}", "1 is not true or false"),
        ("timeline: {filename: 3}", "3 is not a text"),
        ("params: {cycle_time_ms: }", "None is not a number"),
        ("controller: nccl", "cannot use controller 'nccl'"),
        ("controller: [gloo]", "cannot use controller"),
        ("params: {", "it is not YAML"),
        ("\tparams: {}", "it is not YAML"),
        ("params: !!python/object:os.system {}", "it is not YAML"),
        ("params: 2020-13-45", "it is not YAML (month must be in 1..12)"),
        ("? [a]\n: 1", "it is not YAML"),
        (b"\xff\xfe\xfd", "it is not YAML"),
        (b"params: \x00", "it is not YAML"),
        ("[" * 1000, "it is not YAML"),
        ("params: {}\nparams: {}", "has 'params' twice (again on line 2)"),
        ("params:\n  cache_capacity: 1\n  cache_capacity: 2", "has 'cache_capacity' twice (again on line 3)"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text)
    assert complaint in str(caught.value)
    assert "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_config_file(tmp_path / "absent.yaml")
    with pytest.raises(SettingsError, match="Is a directory"):
        read_config_file(tmp_path)


def test_the_docs_list_each_key_with_its_flag() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/config-file.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([\w ]+) \| (.*) \|$", page, re.MULTILINE)
    kinds = {int: "integer", float: "number", bool: "true or false", str: "text"}
    keys = [(section, key, *value) for section, keys in config_file._KEYS.items() for key, value in keys.items()]
    assert [row[:3] for row in rows] == [(section, key, kinds[kind]) for section, key, _, kind in keys]
    values = {option: action.dest for action in build_parser()._actions for option in action.option_strings}
    for (_, _, _, flags), (section, key, name, _) in zip(rows, keys, strict=True):
        assert {values[flag] for flag in re.findall(r"`(-[\w-]+)`", flags)} == {name}, (section, key)
