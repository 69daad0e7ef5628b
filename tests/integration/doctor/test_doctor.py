"""elasticrun doctor, with real agents and workers on this machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.cli.main import main
from elastic_driver.doctor import checkup
from tests.support.processes.jobs import capture_elasticrun
from tests.support.processes.subcommands import elasticrun

pytestmark = pytest.mark.integration


@pytest.fixture
def rsh_agent(tmp_path: Path) -> str:
    """Starts agents here, as if on other hosts; on some of these hosts in vain."""
    program = tmp_path / "rsh"
    program.write_text(
        """#!/bin/sh
        host=$1; shift
        case $host in
        refused) echo "connection refused" >&2; exit 255 ;;
        silent) exec sleep 1000 ;;
        *) exec sh -c "$*" ;;
        esac
        """
    )
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def small_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers, in place of PyTorch, which takes seconds to import, and is asked for its versions only."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "torch.py").write_text(
        "from types import SimpleNamespace\n__version__, version = '2', SimpleNamespace(cuda='')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_what_there_is_on_each_host_and_between_them(rsh_agent: str, tmp_path: Path) -> None:
    """A host that cannot be reached is a line, and costs the others nothing. The command is not run."""
    words = ["--rsh-agent", rsh_agent, "-np", "9", "-H", "localhost:4,node1:5,refused", "--event-log", "x/y"]
    words += ["--durable-dir", str(tmp_path / "commits"), sys.executable, "train.py", "--json"]
    ran = capture_elasticrun("doctor", "--json", "--timeout", "300", *words)
    assert ran.stderr == ""
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    stops = [each for each in found["problems"] if each["level"] == "stops"]
    assert [each["hosts"] for each in stops] == [["refused"]]
    assert "connection refused" in stops[0]["what"]
    assert found["hosts"]["refused"] is None
    for host in ("localhost", "node1"):
        facts: dict[str, Any] = found["hosts"][host]
        assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
        assert facts["meeting"]["size"] == 2
        assert facts["meeting"]["correct"] is True
        assert abs(facts["clock_s"]) <= facts["clock_error_s"], "it is the same clock"
        assert [disk["role"] for disk in facts["disks"]] == ["tmp", "--durable-dir"]
    [link] = found["network"]
    assert link["hosts"] == ["localhost", "node1"]
    assert link["mbit_s"] > 0
    assert not (tmp_path / "commits").exists(), "nothing is changed"
    assert str(tmp_path) not in ran.stdout.replace(stops[0]["what"], "")


@pytest.mark.usefixtures("small_torch")
def test_a_silent_host_and_a_short_time_blame_no_other(rsh_agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has an agent is given the time that a worker takes to start."""
    monkeypatch.setattr(checkup, "_LEAST_START_S", 300.0)
    for seconds in ("2", "10", "60"):  # until it is enough for an agent of this machine, however busy that is
        ran = elasticrun("doctor", "--timeout", seconds, "--json", "--rsh-agent", rsh_agent, "-H", "localhost,silent")
        assert ran.returncode == 1
        found = json.loads(ran.stdout)
        stops = {each["what"]: each["hosts"] for each in found["problems"] if each["level"] == "stops"}
        assert [*stops] == [f"no answer within {seconds} s"]
        if stops == {f"no answer within {seconds} s": ["silent"]}:
            break
    assert [*stops.values()] == [["silent"]]
    assert found["hosts"]["localhost"]["meeting"]["size"] == 1


def test_silent_hosts_alone_are_not_waited_for_any_longer(rsh_agent: str) -> None:
    ran = elasticrun("doctor", "--timeout", "1", "--json", "--rsh-agent", rsh_agent, "-H", "silent")
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert [each["what"] for each in found["problems"]] == ["no answer within 1 s"]
    assert found["ended"] == "given up: no other host left to wait for"


@pytest.mark.usefixtures("small_torch")
def test_the_report_for_people_fits_a_terminal() -> None:
    ran = capture_elasticrun("doctor", "--timeout", "300")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("elasticrun doctor ")
    assert " 1 host, " in lines[0]
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("allreduce over 1 host: right, ")


def test_ctrl_c_leaves_nothing(rsh_agent: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic_driver", "doctor", "--timeout", "300", "--rsh-agent", rsh_agent]
    mark, script = tmp_path / "runs", tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho $$ > {mark}\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    os.mkfifo(mark)
    with subprocess.Popen(
        [*command, "-H", "localhost,silent", str(script), "x.py"], stderr=subprocess.PIPE, text=True
    ) as process:
        worker = int(mark.read_text())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in said
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_has_what_is_different_from_a_job(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", flag])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in ("-H HOST", "--hostfile", "--host-discovery-script", "--json", "--timeout S", "Exit codes"):
        assert word in shown
    assert "--min-np" not in shown


def test_flags_that_a_cluster_gives_to_each_job_count() -> None:
    ran = elasticrun("doctor", ELASTIC_DRIVER_OPTIONS="--launcher none --accept-agents")
    assert ran.returncode == 2
    assert "name them by -H" in ran.stderr


def test_an_error_of_our_own_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        os.write(2, f"{os.path.expanduser('~')}/x.py: internal error: ZeroDivisionError\n".encode())
        return 70

    monkeypatch.setattr(checkup, "run_job", fails)
    ran = elasticrun("doctor")
    assert ran.returncode == 70
    assert "~/x.py: internal error: ZeroDivisionError" in ran.stderr
    assert "no answer within 60 s" in ran.stdout


def test_a_report_that_cannot_be_written_is_no_verdict(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(checkup, "run_job", lambda *_, **__: 0)
    # Beside pytest's own stream, which has to stay.
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["doctor"]) == 70
        full.flush()
    assert capfd.readouterr().err == "elasticrun: error: cannot write to standard output: No space left on device\n"


def test_the_limit_holds_when_nobody_can_say_whether_hosts_come() -> None:
    """The question fails once, and is not asked again."""
    asked = []

    def fails() -> bool:
        asked.append(1)
        raise ValueError("a line of the event log is cut")

    with checkup._time_limit(1.2, fails) as timer:
        timer._thread.join()
    assert (timer.is_over, len(asked)) == (True, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--launcher none --accept-agents", "name them by -H"),
        ("--timeout 0", "--timeout 0 is not a number of seconds"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--host-discovery-script false", "discovery script"),
    ],
)
def test_what_is_refused(words: str, said: str) -> None:
    ran = elasticrun("doctor", *words.split())
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
