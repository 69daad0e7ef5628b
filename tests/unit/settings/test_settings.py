"""Settings: values checked against each other."""

from __future__ import annotations

import os
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
        ({"command": ("no-such-program",)}, "cannot find the command 'no-such-program' on the PATH"),
        ({"command": ("",)}, "cannot find the command ''"),
        ({"command": ("./no/such",)}, "there is no such file"),
        ({"command": ("/",)}, "it is not a file"),
        ({"event_log": Path("/no/such/folder/x")}, "there is no folder /no/such/folder"),
        ({"output_filename": Path("/dev/null/x")}, "cannot make the folder /dev/null/x (--output-filename): "),
        ({"output_filename": Path("/dev/null")}, "cannot make the folder /dev/null (--output-filename): "),
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


@pytest.mark.parametrize(
    "script",
    [
        "true",
        "cat hosts.txt | head -2",
        "cd /tmp && ./anything",
        "(./anything)",
        "X=1 ./anything",
        "~/anything",
        "$HOME/anything",
        "if true; then echo localhost; fi",
        "no-such-program",  # the first run tells, in the shell's words
    ],
)
def test_a_discovery_script_is_any_shell_command(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(hosts=None, discovery_script=script).discovery_script == script


def test_programs_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "discover.sh"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"command": ("./train.py",)}, "it is not executable; run it as: python ./train.py"),
        ({"command": ("./discover.sh",)}, "it is not executable; chmod \\+x it"),
        ({"command": ("train.py",)}, "there is a file of this name here: run it as: python train.py"),
        ({"command": ("discover.sh",)}, "write ./discover.sh"),
        ({"hosts": None, "discovery_script": "./discover.sh --all"}, "it is not executable; chmod \\+x it"),
        ({"hosts": None, "discovery_script": "discover.sh"}, "write ./discover.sh"),
        ({"hosts": None, "discovery_script": "./absent.sh"}, "there is no such file"),
        ({"hosts": None, "discovery_script": "./"}, "it is not a file"),
    ]
    for values, complaint in cases:
        with pytest.raises(SettingsError, match=complaint):
            make(**values)


def test_the_output_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make(output_filename=folder)
    assert os.access(folder, os.W_OK)


def test_folders_that_others_can_write_to_are_said(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("durable", "output", "events")]
    for folder in folders:
        folder.mkdir()
    settings = make(durable_dir=folders[0], output_filename=folders[1], event_log=folders[2] / "log")
    assert settings.suspicions() == []
    for folder in folders:
        folder.chmod(0o1777)
    assert settings.suspicions() == [
        f"the folder {folders[0]} (--durable-dir): all users can write to it; who can write to it can change what the "
        "job goes on from"
    ]
    for folder in folders:
        folder.chmod(0o777)
    assert [text.split("(")[1].split(")")[0] for text in settings.suspicions()] == [
        "--durable-dir",
        "--output-filename",
        "--event-log",
    ]
    assert make().suspicions() == []
