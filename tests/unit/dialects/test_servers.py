"""What servers and their chief find in their environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.ours import inheritable
from elastic_driver.dialects.servers import ServerDialect, missing_script, server_command
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role
from elastic_driver.words import OnChange

pytestmark = pytest.mark.unit

JOB = JobAddress("http://127.0.0.1:1", JobKey(b"k" * 32), "job", "owner")
WORKER = WorkerId("a", 1, 2)


def start(parameter_server: int | None = None) -> WorkerStart:
    return WorkerStart(WORKER, SlotInfo(3, 4, 0, 1, 3, 4), (), 0, 2, parameter_server=parameter_server)


def test_a_server_is_told_what_it_is_and_nothing_of_an_outer_job() -> None:
    outer = {"TF_CONFIG": "{}", "ELASTIC_DRIVER_CHIEF": "1", "ELASTIC_DRIVER_TASK": "ps 7", "HOME": "/h"}
    dialect = ServerDialect(inheritable(outer), exported={"ELASTIC_DRIVER_PORT_RANGE": "1-2"})
    env = dialect.environment(start(), job=JOB)
    assert (env["ELASTIC_DRIVER_TASK"], env["ELASTIC_DRIVER_PORT_RANGE"], env["HOME"]) == ("worker 3", "1-2", "/h")
    assert env.keys().isdisjoint(("TF_CONFIG", "ELASTIC_DRIVER_CHIEF", "RANK", "MASTER_PORT"))
    assert Credential.of_worker(env) == Credential(Identity(Role.WORKER, WORKER))
    assert dialect.environment(start(0), job=JOB)["ELASTIC_DRIVER_TASK"] == "ps 0"
    assert dialect.on_change is OnChange.NO_ROUNDS


def test_the_chief_finds_the_cluster_and_the_way_to_the_driver() -> None:
    dialect = ServerDialect({"GRPC_FAIL_FAST": "mine"}, exported={})
    env = dialect.environment_of_chief(3, "c:1", ("a:1",), ("b:1", "b:2"), job=JOB)
    assert json.loads(env["TF_CONFIG"]) == {
        "cluster": {"chief": ["c:1"], "ps": ["a:1"], "worker": ["b:1", "b:2"]},
        "task": {"type": "chief", "index": 0},
    }
    assert Credential.of_chief(env) == Credential(Identity(Role.CHIEF, number="3"))
    assert env["GRPC_FAIL_FAST"] == "mine"
    assert "ELASTIC_DRIVER_WORKER" not in env


def test_servers_run_with_the_interpreter_of_the_script() -> None:
    module = ("-m", "elastic_driver.task_server")
    assert server_command(("/env/bin/python3.12", "train.py")) == ("/env/bin/python3.12", *module)
    assert server_command(("python", "-u", "train.py")) == ("python", *module)
    assert server_command(("./train.sh",)) == (sys.executable, *module)


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    assert missing_script(("python", "-u", "nosuch.py", "x.py"), tmp_path) == "nosuch.py"
    for words in ("python there.py nosuch.py", f"python {tmp_path}/there.py", "./nosuch.py", "python -m nosuch.py"):
        assert missing_script(words.split(), tmp_path) == ""
    for words in ("python", "", "python -W ignore nosuch.py", "python -c nosuch.py", "bash nosuch.py"):
        assert missing_script(words.split(), tmp_path) == "", "it cannot be known"
