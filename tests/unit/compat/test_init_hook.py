"""The hook in a worker with Horovod's own library: before each init() it asks for the worker's place."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.dialects.horovod_shim import SHIM_FOLDER

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
BASICS = """
import os
class HorovodBasics:
    def __init__(self):
        self.on = False
    def init(self, comm=None):
        self.on = True
        print("init", comm, *[os.environ.get("HOROVOD_" + name) for name in ("RANK", "SIZE", "GLOO_IFACE")], flush=True)
    def is_initialized(self):
        return self.on
    def shutdown(self):
        self.on = False
"""
SCRIPT = """
import horovod.common.basics as basics
one = basics.HorovodBasics()
print("wrapped", hasattr(basics.HorovodBasics.init, "__wrapped__"), flush=True)
one.init()
one.init()
one.shutdown()
one.init(comm=[0])
"""


class Agent(http.server.ThreadingHTTPServer):
    """Answers what it is told to, in turn; the last forever."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def __enter__(self) -> Agent:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        agent = self.server
        assert isinstance(agent, Agent)
        agent.asked.append((self.path, self.headers["x-elastic-driver-process"]))
        answer = agent.answers.pop(0) if len(agent.answers) > 1 else agent.answers[0]
        self.send_response(200 if answer else 503)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("X-Elastic-Driver-Interface", "eth7")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *unused: object) -> None:
        pass


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "site" / "horovod" / "common"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "basics.py").write_text(BASICS)
    return package.parents[1]


def run(installed: Path, script: str = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((SHIM_FOLDER, str(installed), str(ROOT)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ELASTIC_DRIVER_", "HOROVOD_"))}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "PYTHONPATH": path, "HOROVOD_HOSTNAME": "a", "HOROVOD_LOCAL_RANK": "1", **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_it_asks_before_each_init_and_takes_what_it_is_told(installed: Path) -> None:
    with Agent(b"2,5,1,2,1,2", b"0,1,0,1,0,1") as agent:
        port = str(agent.server_address[1])
        ran = run(installed, ELASTIC_DRIVER_HOROVOD_PROTOCOL="auto", ELASTIC_DRIVER_HOROVOD_PORT=port)
    # The second one is no init: it is one already.
    assert ran.stdout.splitlines() == [
        "wrapped True",
        "init None 2 5 eth7",
        "init None 2 5 eth7",
        "init [0] 0 1 eth7",
    ]
    assert [path for path, _ in agent.asked] == ["/rank_and_size/a:1", "/rank_and_size/a:1"]
    assert all(len(process.split()) == 2 for _, process in agent.asked)


def test_who_asks_whether_it_is_there_and_imports_it_later_is_wrapped(installed: Path) -> None:
    probe = "import importlib.util, sys\nassert importlib.util.find_spec('horovod.common.basics')\n"
    after = "print('armed', any('Basics' in type(finder).__name__ for finder in sys.meta_path))\n"
    with Agent(b"2,5,1,2,1,2") as agent:
        port = str(agent.server_address[1])
        env = {"ELASTIC_DRIVER_HOROVOD_PROTOCOL": "auto", "ELASTIC_DRIVER_HOROVOD_PORT": port}
        ran = run(installed, probe * 2 + SCRIPT + after, **env)
    assert ran.stdout.splitlines()[:2] == ["wrapped True", "init None 2 5 eth7"], ran.stderr
    assert ran.stdout.splitlines()[-1] == "armed False"


def test_who_has_no_place_exits_with_code_0(installed: Path) -> None:
    with Agent(b"-1,-1,-1,-1,-1,-1") as agent:
        port = str(agent.server_address[1])
        ran = run(installed, ELASTIC_DRIVER_HOROVOD_PROTOCOL="on", ELASTIC_DRIVER_HOROVOD_PORT=port)
    assert (ran.returncode, ran.stdout) == (0, "wrapped True\n")


def test_an_agent_that_is_gone_is_told_of(installed: Path) -> None:
    with Agent(b"") as agent:
        port = str(agent.server_address[1])
        refused = run(installed, ELASTIC_DRIVER_HOROVOD_PROTOCOL="on", ELASTIC_DRIVER_HOROVOD_PORT=port)
    gone = run(installed, ELASTIC_DRIVER_HOROVOD_PROTOCOL="on", ELASTIC_DRIVER_HOROVOD_PORT=port)
    assert "cannot get a rank for this worker" in refused.stderr
    assert "its agent does not answer" in gone.stderr
    assert refused.returncode == gone.returncode == 1


def test_without_a_port_it_asks_nobody(installed: Path) -> None:
    """As in a process that workers are forked from; they have one."""
    ran = run(installed, ELASTIC_DRIVER_HOROVOD_PROTOCOL="auto")
    assert ran.stdout.startswith("wrapped True\ninit None None None None\n")


def test_without_the_protocol_nothing_is_touched(installed: Path) -> None:
    assert run(installed).stdout.startswith("wrapped False\n")
