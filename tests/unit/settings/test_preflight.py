"""What is looked at on this machine before a job starts."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.preflight import preflight
from elastic_driver.settings.settings import Settings

pytestmark = [pytest.mark.unit]


def make(**values: Any) -> Settings:
    given = {"command": ("true",), "num_proc": 2, "min_num_proc": 2, "hosts": (Host("localhost", 4),), **values}
    return Settings(**given)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"command": ("no-such-program",)}, "cannot find the command 'no-such-program' on the PATH"),
        ({"command": ("pyhton", "a.py")}, "cannot find the command 'pyhton' on the PATH (did you mean python?)"),
        ({"command": ("",)}, "cannot find the command ''"),
        ({"command": ("./no/such",)}, "there is no such file"),
        ({"command": ("/",)}, "it is not a file"),
        (
            {"command": (sys.executable, "no_such.py")},
            "cannot find the script 'no_such.py': there is no such file in /",
        ),
        (
            {"command": ("python", "-u", "/no/such.py", "x")},
            "cannot find the script '/no/such.py': there is no such file",
        ),
        ({"ssh_identity_file": "/no/such"}, "cannot read the file /no/such (--ssh-identity-file)"),
        ({"rsh_agent": ("/no/such", "-q")}, "cannot find --rsh-agent '/no/such': there is no such file"),
        ({"event_log": Path("/no/such/folder/x")}, "there is no folder /no/such/folder"),
        ({"output_filename": Path("/dev/null/x")}, "cannot create the folder /dev/null/x (--output-filename): "),
        ({"output_filename": Path("/dev/null")}, "cannot create the folder /dev/null (--output-filename): "),
        ({"durable_dir": Path("/dev/null/x")}, "cannot use the folder /dev/null/x (--durable-dir): "),
    ],
)
def test_what_cannot_be_used(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        preflight(make(**values))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({"hosts": (Host("elsewhere", 4),)}, ("python", "/no/such.py")),
        ({"hosts": None, "discovery_script": "echo elsewhere"}, ("python", "/no/such.py")),
        ({}, (sys.executable, "-m", "no.such")),
        ({}, ("true", "/no/such.py")),
    ],
)
def test_a_script_that_may_be_there_where_it_runs_is_not_looked_for(
    values: dict[str, Any], command: tuple[str, ...]
) -> None:
    assert preflight(make(command=command, **values)) == []


def test_what_a_running_job_needs_no_more_is_not_looked_for() -> None:
    settings = make(command=(sys.executable, "/no/such.py"), ssh_identity_file="/no/such")
    with pytest.raises(SettingsError):
        preflight(settings)
    assert preflight(settings, runs_already=True) == []


def test_a_key_may_be_named_as_ssh_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").touch()
    for name in ("~/key", "%d/no-such"):
        assert preflight(make(ssh_identity_file=name)) == []
    with pytest.raises(SettingsError, match=r"~/other \(--ssh-identity-file\)"):
        preflight(make(ssh_identity_file="~/other"))


def test_the_script_that_was_meant_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "trail.txt").touch()
    meant = str(tmp_path / "train.py")
    with pytest.raises(SettingsError, match=rf"there is no such file \(did you mean {re.escape(meant)}\?\)$"):
        preflight(make(command=("python", str(tmp_path / "trian.py"))))
    for other in ("evaluate.py", "no/train.py"):
        with pytest.raises(SettingsError, match=r"there is no such file$"):
            preflight(make(command=("python", str(tmp_path / other))))


def test_a_script_that_the_kubelet_has_not_put_there_yet_is_left_to_its_first_run(tmp_path: Path) -> None:
    script = str(tmp_path / "discover_hosts.sh")
    with pytest.raises(SettingsError, match="there is no such file"):
        preflight(make(hosts=None, discovery_script=script))
    (tmp_path / "..data").symlink_to("..2026")
    assert preflight(make(hosts=None, discovery_script=script)) == []


def test_pods_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make(hosts=None, discovery="kubernetes", pod_selector="app=train")
    assert preflight(settings) == []
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(SettingsError, match=r"needs the package kubernetes_asyncio: pip install 'elastic-driver"):
        preflight(settings)


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
    assert preflight(make(hosts=None, discovery_script=script)) == []


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
            preflight(make(**values))


def test_the_output_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    preflight(make(output_filename=folder))
    assert os.access(folder, os.W_OK)


def test_what_has_no_effect_any_more_is_said() -> None:
    told = "--tls has no effect: connections between machines are always encrypted"
    assert preflight(make(tls=True)) == [told]


def test_folders_that_others_can_write_to_are_said(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("durable", "output", "events")]
    for folder in folders:
        folder.mkdir()
    settings = make(durable_dir=folders[0], output_filename=folders[1], event_log=folders[2] / "log")
    assert preflight(settings) == []
    for folder in folders:
        folder.chmod(0o1777)
    assert preflight(settings) == [
        f"the folder {folders[0]} (--durable-dir): it is writable by all users; anyone who can write to it can change "
        "the commits that the job resumes from"
    ]
    for folder in folders:
        folder.chmod(0o777)
    assert [text.split("(")[1].split(")")[0] for text in preflight(settings)] == [
        "--durable-dir",
        "--output-filename",
        "--event-log",
    ]
    assert preflight(make()) == []


def test_a_join_token_that_others_can_read_is_said(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    settings = make(accept_agents=True, join_token_file=token)
    token.chmod(0o600)
    assert preflight(settings) == []
    token.chmod(0o644)
    assert preflight(settings) == [
        f"the file {token} (--join-token-file): all users can read it; anyone who can read it can join the job: run "
        "chmod 600 on it"
    ]
    token.chmod(0o600)
    key = tmp_path / "key"
    key.touch(0o644)
    in_etcd = JournalPlace(url="etcd://a/jobs/b", key=key)
    (told,) = preflight(make(accept_agents=True, hosts=(Host("a", 4),), journal=in_etcd))
    assert told.startswith(f"the file {key} (--journal-key): all users can read it; ")
