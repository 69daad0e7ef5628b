"""The chief's link to its driver, and the server program, where something is not as it should be."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest

from elastic_driver import task_server
from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError, SettingsError
from elastic_driver.rendezvous.messages import Server, Servers, ServersRequest, ServingReport
from elastic_driver.tensorflow.driver_link import DriverLink

pytestmark = pytest.mark.unit

CHIEF = {"ELASTIC_DRIVER_CHIEF": "1", "ELASTIC_DRIVER_RENDEZVOUS": "unix:/nowhere/driver.sock"}


def test_no_chief_has_no_link() -> None:
    assert DriverLink.from_environment({"ELASTIC_DRIVER_RENDEZVOUS": "unix:/nowhere"}) is None


@pytest.mark.parametrize("wrong", [{"ELASTIC_DRIVER_CHIEF": "x"}, {"ELASTIC_DRIVER_RENDEZVOUS": ""}])
def test_rubbish_in_its_environment_is_said(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="cannot contact the driver"):
        DriverLink.from_environment({**CHIEF, **wrong})


def test_a_wait_is_ended_by_close_though_no_driver_answers() -> None:
    link = DriverLink.from_environment(CHIEF)
    assert link is not None
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            link.wait(0)
        except RendezvousClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    link.close()
    thread.join(150)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_messages_come_back_as_they_were() -> None:
    servers = Servers(3, ("a:1",), (Server("b:1"), Server("b:2", 2.5, leaving=True), Server("b:3", None, leaving=True)))
    assert Servers.from_json(servers.to_json()) == servers
    request = ServersRequest(3, ("b:1",))
    assert ServersRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Servers, b'{"version": 1, "parameter_servers": [1], "workers": []}'),
        (Servers, b'{"version": 1, "parameter_servers": [], "workers": [["a:1", null]]}'),
        (Servers, b'{"version": 1, "parameter_servers": [], "workers": [["a:1", -1, true]]}'),
        (ServersRequest, b'{"version": 1, "left": "a:1"}'),
        (ServersRequest, b"[]"),
        (ServingReport, b'{"worker": "a[0]#0", "port": 0}'),
        (ServingReport, b'{"worker": "a[0]#0", "port": 65536}'),
        (ServingReport, b'{"worker": "nobody", "port": 1}'),
    ],
)
def test_rubbish_is_no_message(kind: type[Servers | ServersRequest | ServingReport], body: bytes) -> None:
    with pytest.raises(RendezvousProtocolError):
        kind.from_json(body)


def test_the_server_program_says_that_it_is_not_for_people() -> None:
    command = [sys.executable, "-m", "elastic_driver.task_server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert "is started by elasticrun --parameter-servers" in done.stderr
    assert "Traceback" not in done.stderr


def _of_a_quiet_process(end: str) -> subprocess.CompletedProcess[str]:
    program = f"""
import os
from elastic_driver import task_server
with task_server._quietly():
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n"
        b"I0000 00:00:1795397958.648909    3891 port.cc:153] oneDNN custom operations are on.\\n"
        b"F0000 00:00:1795397958.837309    3891 cpu_feature_guard.cc:1] no AVX here\\n")
    {end}
os.write(2, b"I0000 00:00:1 later\\n")
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)


def test_a_server_keeps_tensorflows_noise_at_its_loading_and_nothing_else_from_stderr() -> None:
    done = _of_a_quiet_process("pass")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["F0000", "I0000"]
    assert lines[1].endswith("later")


def test_what_a_server_dies_of_while_it_loads_is_passed_on() -> None:
    done = _of_a_quiet_process("os.abort()")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.endswith("no AVX here\n")
    assert "oneDNN" not in done.stderr


def test_a_port_of_the_range_that_is_taken_is_not_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        assert port not in task_server._candidates((port, port + 3))
    assert next(task_server._candidates((port, port + 3))) == port
    assert list(task_server._candidates(None)) == [0]


def test_a_range_of_ports_that_cannot_be_read() -> None:
    assert task_server._ports({"ELASTIC_DRIVER_PORT_RANGE": "5-7"}) == (5, 7)
    with pytest.raises(SettingsError, match="it must be two ports, LOW-HIGH"):
        task_server._ports({"ELASTIC_DRIVER_PORT_RANGE": "many"})


def test_a_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_server, "_ANSWERS_S", 0.2)
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        with pytest.raises(SettingsError, match="does not answer"):
            task_server._wait_until_it_answers(held.getsockname()[1])
