"""Settings: values checked against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.settings import Settings
from elastic_driver.words import Sizing

pytestmark = [pytest.mark.unit]


PODS = {"discovery": "kubernetes", "pod_selector": "app=train", "hosts": None}


def make(**values: Any) -> Settings:
    given = {"command": ("true",), "num_proc": 2, "min_num_proc": 2, "hosts": (Host("localhost", 4),), **values}
    return Settings(**given)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_proc": 0}, "-np 0 is below 1"),
        ({"num_parameter_servers": -1}, "--parameter-servers -1 is below 0"),
        ({"num_parameter_servers": 10**6, "hosts": None, "discovery_script": "x"}, "is above 65536"),
        ({"num_parameter_servers": 3}, "-np 2 and --parameter-servers 3 are above the 4 slots of the hosts given"),
        ({"restart_chief": True}, "--restart-chief has no effect: give --parameter-servers, too"),
        (
            {"num_parameter_servers": 1, "on_change": "restart"},
            "--on-change restart applies to workers that run the script",
        ),
        (
            {"num_parameter_servers": 1, "num_proc_multiple": 2},
            "--np-multiple cannot be combined with --parameter-servers",
        ),
        ({"num_parameter_servers": 1, "sizing": Sizing.NPROC}, "--parameter-servers excludes torchrun's flags"),
        (
            {"num_parameter_servers": 1, "num_standby": 1, "max_num_proc": 2},
            "--standby cannot be combined with --parameter-servers: servers have nothing to boot",
        ),
        (
            {"num_parameter_servers": 1, "durable_dir": Path("/x")},
            "--durable-dir cannot be combined with --parameter-servers: the chief saves its own checkpoints",
        ),
        ({"num_proc": -3}, "-np -3 is below 1"),
        ({"num_proc": 10**20}, "is above 65536"),
        ({"min_num_proc": 0}, "--min-np 0 is below 1"),
        ({"min_num_proc": 3}, "--min-np 3 is above -np 2"),
        ({"max_num_proc": 1}, "--max-np 1 is below -np 2"),
        ({"num_proc_multiple": 0}, "--np-multiple 0 is below 1"),
        ({"ranks_per_host_multiple": -2}, "--ranks-per-host-multiple -2 is below 1"),
        ({"ranks_per_host_multiple": 5000}, "--ranks-per-host-multiple 5000 is above 4096"),
        ({"num_proc_multiple": 4}, "-np 2 is not a multiple of 4 (--np-multiple 4): use 4"),
        (
            {"num_proc": 7, "num_proc_multiple": 4, "ranks_per_host_multiple": 6},
            "-np 7 is not a multiple of 12 (--np-multiple 4, --ranks-per-host-multiple 6): use 12",
        ),
        (
            {"num_proc": 4, "min_num_proc": 3, "num_proc_multiple": 2},
            "--min-np 3 is not a multiple of 2 (--np-multiple 2): use 2 or 4",
        ),
        (
            {"max_num_proc": 5, "ranks_per_host_multiple": 2},
            "--max-np 5 is not a multiple of 2 (--ranks-per-host-multiple 2): use 4 or 6",
        ),
        (
            {"ranks_per_host_multiple": 2, "hosts": (Host("a", 1), Host("b", 1, ("spot",)))},
            "-np 2 is above the 0 slots that --ranks-per-host-multiple 2 leaves of the hosts given (a:1, b:1 spot)",
        ),
        ({"protect": ("a b",)}, "--protect 'a b' is not the name of a host"),
        ({"protect": ("a:2",)}, "--protect 'a:2' is not the name of a host"),
        ({"slots_per_host": 0}, "--slots-per-host 0 is below 1"),
        ({"slots_per_host": 5000}, "--slots-per-host 5000 is above 4096"),
        ({"reset_limit": -1}, "--reset-limit -1 is below 0"),
        ({"elastic_timeout_s": 0.0}, "--elastic-timeout 0 is not a number of seconds above 0"),
        ({"elastic_timeout_s": 1e12}, "--elastic-timeout 1e+12 is above the maximum of 1e+09 seconds"),
        ({"grace_s": 1e10}, "--grace-time 1e+10 is above the maximum of 1e+09 seconds"),
        ({"start_timeout_s": float("nan")}, "--start-timeout nan"),
        ({"discovery_interval_s": -1.0}, "--discovery-interval -1"),
        ({"discovery_timeout_s": float("inf")}, "--discovery-timeout inf"),
        ({"gloo_timeout_s": 0.0}, "--gloo-timeout-seconds 0"),
        ({"grace_s": -1.0}, "--grace-time -1"),
        ({"grace_s": float("nan")}, "--grace-time nan"),
        ({"rendezvous_port": 65536}, "--rendezvous-port 65536 is not a port"),
        ({"rendezvous_port": -1}, "--rendezvous-port -1 is not a port"),
        ({"ssh_port": 0}, "--ssh-port 0 is not a port"),
        ({"log_level": "LOUD"}, "--log-level LOUD is not one of TRACE"),
        ({"cooldown_range_s": (20.0, 10.0)}, "--blacklist-cooldown-range 20 10 is not a range"),
        ({"cooldown_range_s": (0.5, 10.0)}, "within 1 to 3600 s"),
        ({"cooldown_range_s": (1.0, 3601.0)}, "within 1 to 3600 s"),
        ({"cooldown_range_s": (float("nan"), 10.0)}, "within 1 to 3600 s"),
        ({"hosts": None}, "no hosts: give -H"),
        ({"hosts": ()}, "no hosts: give -H"),
        ({"hosts": (Host("a", 1),)}, "-np 2 is above the 1 slots of the hosts given (a:1)"),
        ({"protect": ("a", "c"), "hosts": (Host("a", 2),)}, "--protect c is not one of the hosts given (a)"),
        ({"hosts": (Host("a", 5000),)}, "host 'a' would have 5000 slots; the most is 4096"),
        ({"discovery_script": "true"}, "not both"),
        ({"hosts": None, "discovery_script": ""}, "--host-discovery-script is empty"),
        ({"hosts": None, "discovery_script": "  "}, "--host-discovery-script is empty"),
        ({"hosts": None, "discovery_script": "'a"}, "No closing quotation"),
        ({"agent_timeout_s": 1.0}, "--agent-timeout 1 is below 2 s"),
        ({"host_timeout_s": 0.0}, "--host-timeout 0 is below 2 s"),
        ({"host_timeout_s": 1.0}, "--host-timeout 1 is below 2 s: machines acknowledge each other once a second"),
        ({"agent_timeout_s": float("nan")}, "--agent-timeout nan is not a number of seconds"),
        ({"ssh_connect_timeout_s": 0.0}, "--ssh-connect-timeout 0 is not a number of seconds"),
        ({"join_token_file": Path("t")}, "--join-token-file has no effect: give --accept-agents, too"),
        ({"rsh_agent": ("a",), "launcher_command": "b"}, "give either --rsh-agent or --launcher-command, not both"),
        ({"rsh_agent": ()}, "--rsh-agent is empty"),
        ({"rsh_agent": ("",)}, "--rsh-agent is empty"),
        ({"launcher_command": ""}, "--launcher-command is empty"),
        ({"remote_python": ""}, "--remote-python is empty"),
        ({"rsh_agent": ("a",), "ssh_port": 22}, "--ssh-port applies to ssh, which --rsh-agent replaces"),
        (
            {"launcher_command": "a", "ssh_identity_file": "k"},
            "--ssh-identity-file applies to ssh, which --launcher-command replaces",
        ),
        ({"launcher_bootstrap": "command"}, "--launcher-bootstrap has no effect"),
        (
            {"launcher_command": "a", "launcher_bootstrap": "mail"},
            "--launcher-bootstrap mail is not one of stdin, command",
        ),
        ({"progress_rank": "two"}, "--progress-rank two is neither a rank nor all nor none"),
        ({"port_range": (0, 5)}, "--port-range 0-5 is not a range of ports from 1 to 65535"),
        ({"port_range": (9, 5)}, "--port-range 9-5 is not a range of ports"),
        ({"port_range": (9, 65536)}, "--port-range 9-65536 is not a range of ports"),
        ({"network_interfaces": ("eth0", "10.0.0.0/33")}, "--network-interfaces '10.0.0.0/33' is not"),
        ({"network_interfaces": ("10.0.0.256",)}, "--network-interfaces '10.0.0.256' is not"),
        ({"network_interfaces": ("a name that is long",)}, "is not an interface name"),
        ({"command": ()}, "no command to run"),
        ({"launcher": "none"}, "with --launcher none, hosts join by themselves: give --accept-agents, too"),
        ({"launcher": "magic"}, "--launcher magic is not one of auto, none"),
        (
            {"launcher": "none", "accept_agents": True, "launcher_command": "kubectl exec -i {host} --"},
            "--launcher-command has no effect with --launcher none",
        ),
        ({"pod_selector": "app=x"}, "--selector has no effect: give --discovery kubernetes, too"),
        ({"pod_namespace": "n"}, "--namespace has no effect"),
        ({"discovery": "nomad", "hosts": None}, "--discovery nomad is not one of kubernetes"),
        ({"discovery": "kubernetes", "hosts": None}, "--discovery kubernetes needs --selector"),
        ({**PODS, "pod_selector": "app=x; rm"}, "--selector 'app=x; rm' is not a label selector"),
        ({**PODS, "pod_namespace": "A"}, "--namespace 'A' is not the name of a namespace"),
        ({**PODS, "slots_from": "a b"}, "--slots-from 'a b' is not a Kubernetes name"),
        ({**PODS, "rack_from": ""}, "--rack-from '' is not a Kubernetes name"),
        ({**PODS, "pod_names": "uid"}, "--pod-names uid is not one of auto, pod, hostname, dns, ip"),
        ({**PODS, "departure_taints": ("a b",)}, "--departure-taints 'a b' is not the key of a taint"),
        ({**PODS, "hosts": (Host("a", 1),)}, "give either --discovery kubernetes or fixed hosts"),
        ({**PODS, "discovery_script": "true"}, "give either --discovery kubernetes or --host-discovery-script"),
    ],
)
def test_what_cannot_be(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(**values)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"min_num_proc": 1, "max_num_proc": 2},
        {"min_num_proc": 1, "max_num_proc": None},
        {"reset_limit": 0},
        {"grace_s": 0.0},
        {"rendezvous_port": 0},
        {"rendezvous_port": 65535},
        {"cooldown_range_s": (1.0, 3600.0)},
        {"cooldown_range_s": (5.0, 5.0)},
        {"hosts": (), "accept_agents": True},
        {"hosts": None, "discovery_script": "true", "accept_agents": True, "join_token_file": Path("t")},
        {"hosts": (Host("a", 1),), "accept_agents": True},
        {"network_interfaces": ("eth0", "ib0.8001", "10.0.0.1", "10.0.0.7/8", "fd00::/8", "::1")},
        {"port_range": (1, 65535)},
        {"launcher_command": "run {host}", "launcher_bootstrap": "command"},
        PODS,
        {**PODS, "launcher": "none", "accept_agents": True, "departure_taints": ("example.org/repair",)},
        {**PODS, "pod_selector": "app in (a, b),!old,tier!=web", "slots_from": "cpu", "pod_namespace": "team-a"},
        {"launcher": "none", "accept_agents": True, "hosts": (Host("a", 1),)},
    ],
)
def test_what_can_be(values: dict[str, Any]) -> None:
    settings = make(**values)
    for name, value in values.items():
        assert getattr(settings, name) == value


def test_nothing_is_looked_up_on_disk(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    settings = make(command=("no-such-program",), output_filename=absent, durable_dir=absent, event_log=absent / "log")
    assert settings.command == ("no-such-program",)
    assert make(hosts=None, discovery_script="./no/such").discovery_script == "./no/such"
    assert not absent.exists()


def test_how_many_workers_there_may_be_where_hosts_join() -> None:
    assert make().most_workers == 4
    assert make(accept_agents=True).most_workers == 2, "nobody knows; as with a script"
    assert make(accept_agents=True, max_num_proc=9).most_workers == 9


def test_multiples_that_all_limits_obey() -> None:
    made = make(num_proc=4, min_num_proc=4, max_num_proc=8, num_proc_multiple=4, ranks_per_host_multiple=2)
    assert (made.num_proc_multiple, made.ranks_per_host_multiple) == (4, 2)
    # What hosts that are not known yet will leave over is the core's business.
    assert make(hosts=None, discovery_script="true", ranks_per_host_multiple=2).hosts is None
    # A host's odd slot and a spare one do not matter.
    assert make(hosts=(Host("a", 3), Host("b", 1)), ranks_per_host_multiple=2).num_proc == 2


@pytest.mark.parametrize(
    ("values", "opens"),
    [
        ({}, False),
        ({"port_range": (20000, 20010)}, False),
        ({"page_address": "127.0.0.1"}, False),  # that opens its own
        ({"rendezvous_port": 4000}, True),
        ({"rendezvous_address": "::1"}, True),
        ({"accept_agents": True}, True),
        ({"operator_token_file": Path("/key")}, True),
    ],
)
def test_what_has_the_driver_listen_on_tcp_from_its_start(values: dict[str, Any], opens: bool) -> None:
    assert make(**values).opens_port == opens
