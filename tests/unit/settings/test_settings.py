"""Settings: values checked against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.settings import Settings

pytestmark = [pytest.mark.unit]


def make(**values: Any) -> Settings:
    given = {"command": ("true",), "num_proc": 2, "min_num_proc": 2, "hosts": (Host("localhost", 4),), **values}
    return Settings(**given)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_proc": 0}, "-np 0 is below 1"),
        ({"num_proc": -3}, "-np -3 is below 1"),
        ({"num_proc": 10**20}, "is above 65536"),
        ({"min_num_proc": 0}, "--min-np 0 is below 1"),
        ({"min_num_proc": 3}, "--min-np 3 is above -np 2"),
        ({"max_num_proc": 1}, "--max-np 1 is below -np 2"),
        ({"slots_per_host": 0}, "--slots-per-host 0 is below 1"),
        ({"slots_per_host": 5000}, "--slots-per-host 5000 is above 4096"),
        ({"reset_limit": -1}, "--reset-limit -1 is below 0"),
        ({"elastic_timeout_s": 0.0}, "--elastic-timeout 0 is not a number of seconds above 0"),
        ({"elastic_timeout_s": 1e12}, "--elastic-timeout 1e+12 is above 1e+09, the most seconds it may be"),
        ({"grace_s": 1e10}, "--grace-time 1e+10 is above 1e+09, the most seconds it may be"),
        ({"start_timeout_s": float("nan")}, "--start-timeout nan"),
        ({"discovery_interval_s": -1.0}, "--discovery-interval -1"),
        ({"discovery_timeout_s": float("inf")}, "--discovery-timeout inf"),
        ({"gloo_timeout_s": 0.0}, "--gloo-timeout-seconds 0"),
        ({"grace_s": -1.0}, "--grace-time -1"),
        ({"grace_s": float("nan")}, "--grace-time nan"),
        ({"rendezvous_port": 65536}, "--rendezvous-port 65536 is not a port"),
        ({"rendezvous_port": -1}, "--rendezvous-port -1 is not a port"),
        ({"ssh_port": 0}, "--ssh-port 0 is not a port"),
        ({"log_level": "LOUD"}, "--log-level LOUD is none of TRACE"),
        ({"cooldown_range_s": (20.0, 10.0)}, "--blacklist-cooldown-range 20 10 is not a range"),
        ({"cooldown_range_s": (0.5, 10.0)}, "within 1 to 3600 s"),
        ({"cooldown_range_s": (1.0, 3601.0)}, "within 1 to 3600 s"),
        ({"cooldown_range_s": (float("nan"), 10.0)}, "within 1 to 3600 s"),
        ({"hosts": None}, "no hosts: give -H"),
        ({"hosts": ()}, "no hosts: give -H"),
        ({"hosts": (Host("a", 1),)}, "-np 2 is above the 1 slots of the hosts given (a:1)"),
        ({"hosts": (Host("a", 5000),)}, "host 'a' would have 5000 slots; the most is 4096"),
        ({"discovery_script": "true"}, "not both"),
        ({"hosts": None, "discovery_script": ""}, "--host-discovery-script is empty"),
        ({"hosts": None, "discovery_script": "  "}, "--host-discovery-script is empty"),
        ({"hosts": None, "discovery_script": "'a"}, "No closing quotation"),
        ({"command": ()}, "no command to run"),
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
    ],
)
def test_what_can_be(values: dict[str, Any]) -> None:
    settings = make(**values)
    for name, value in values.items():
        assert getattr(settings, name) == value


def test_nothing_is_looked_up_on_disc(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    settings = make(command=("no-such-program",), output_filename=absent, durable_dir=absent, event_log=absent / "log")
    assert settings.command == ("no-such-program",)
    assert make(hosts=None, discovery_script="./no/such").discovery_script == "./no/such"
    assert not absent.exists()
