"""Bad input, as a user types it: one clear line, the documented exit code, no traceback, nothing left running."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_driver.cli.main import main
from tests.support.paths import ROOT
from tests.support.processes.carriers import carriers_of, in_words
from tests.support.processes.jobs import AFRESH, FORKED, FORKING, Job, capture_elasticrun

pytestmark = [pytest.mark.integration]

PYTHON = sys.executable
MARK = "BAD_USAGE_TEST"


@dataclass(frozen=True)
class Ran:
    """What became of one elasticrun."""

    code: int
    out: str
    err: str

    def only_line(self) -> str:
        assert self.err.count("\n") == 1, self.err
        return self.err.rstrip("\n")


def left_running(mark: str) -> list[str]:
    return in_words(carriers_of(MARK, mark.__eq__))


def none_is_left_running(mark: str) -> None:
    """The guard is no child that the driver waits for: it may see the end a moment later."""
    end = time.monotonic() + 150
    while left_running(mark):
        assert time.monotonic() < end, left_running(mark)
        time.sleep(0.02)


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs elasticrun in an empty folder, to its end; whatever it started must have ended with it."""

    def run_it(*words: str, env: dict[str, str] | None = None, elasticrun: tuple[str, ...] = FORKED) -> Ran:
        mark = f"{tmp_path} {time.monotonic_ns()}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **(env or {})}
        done = capture_elasticrun(*words, env=env, elasticrun=elasticrun, cwd=tmp_path)
        ran = Ran(done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in ran.err, ran.err
        assert "\x1b" not in ran.err + ran.out, "control characters on what is no terminal"
        none_is_left_running(mark)
        return ran

    return run_it


def in_shell(folder: Path, *words: str, streams: str) -> Ran:
    """Runs elasticrun with the streams that a shell gives it."""
    command = shlex.join([PYTHON, "-m", "elastic_driver", *words])
    env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: str(folder)}
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {streams}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=150,
        env=env,
    )
    none_is_left_running(str(folder))
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As ``run``, but in this process: for what is refused before a worker is started."""

    def call_it(*words: str, env: dict[str, str] | None = None) -> Ran:
        mark = str(tmp_path)
        monkeypatch.chdir(tmp_path)
        for name, value in {MARK: mark, **(env or {})}.items():
            monkeypatch.setenv(name, value)
        code = main(words)
        out, err = capfd.readouterr()
        assert "\x1b" not in err + out, "control characters on what is no terminal"
        none_is_left_running(mark)
        return Ran(code, out, err)

    return call_it


def test_control_characters_in_what_is_quoted(run: Run) -> None:
    ran = run("-np", "2", "--no-such-\x9b2J\u202eflag", "true")
    assert ran.only_line() == "elasticrun: error: unrecognized arguments: --no-such- 2J flag"


def program(tmp_path: Path, name: str, text: str, mode: int = 0o755) -> str:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(mode)
    return f"./{name}"


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "no command to run: expected, for example, elasticrun -np 2 python train.py (see elasticrun --help)"),
        ("stats", "there is no subcommand stats (did you mean status?), and no such command"),
        ("repot events.jsonl -o job.svg", "there is no subcommand repot (did you mean report?)"),
        ("hlep", "there is no subcommand hlep (did you mean help?), and no such command"),
        ("verison", "there is no subcommand verison (did you mean version?), and no such command"),
        ("run python train.py", "there is no subcommand run: elasticrun -np N COMMAND starts a job"),
        ("run -np 2 python train.py", "there is no subcommand run: elasticrun -np N COMMAND starts a job"),
        ("./stats", "-np is missing"),
        ("-np 2 stats", "cannot find the command 'stats'"),
        ("true", "-np is missing"),
        ("-np 2", "no command to run: add it after the flags"),
        ("-np x true", "-np/--np/--num-proc: 'x' is not an integer"),
        ("-np 2 --elastic-timeout x true", "--elastic-timeout: 'x' is not a number"),
        ("-np 0 true", "-np 0 is below 1"),
        ("-np -1 true", "-np -1 is below 1"),
        ("-np 99999999999 true", "is above 65536"),
        ("-np 2 --min-np 3 true", "--min-np 3 is above -np 2"),
        ("-np 2 --max-np 1 true", "--max-np 1 is below -np 2"),
        ("-np 2 --min-np 3 --max-np 1 true", "--min-np 3 is above -np 2"),
        ("-np 2 --min-np 0 true", "--min-np 0 is below 1"),
        ("-np 2 --slots-per-host 0 true", "--slots-per-host 0 is below 1"),
        ("-np 2 --slots -1 true", "--slots-per-host -1 is below 1"),
        ("-np 2 --elastic-timeout 0 true", "--elastic-timeout 0 is not a number of seconds above 0"),
        ("-np 2 --start-timeout nan true", "--start-timeout nan is not a number of seconds above 0"),
        ("-np 2 --reset-limit -1 true", "--reset-limit -1 is below 0"),
        ("-np 2 --blacklist-cooldown-range 5 1 true", "lower bound first"),
        ("-np 2 --blacklist-cooldown-range 0 9999 true", "is not a range within 1 to 3600 s"),
        ("-np 2 --rendezvous-port 70000 true", "--rendezvous-port 70000 is not a port"),
        ("-np 2 --log-level loud true", "--log-level: invalid choice"),
        ("-np 2 --no-such-flag true", "unrecognized arguments: --no-such-flag"),
        ("-np 2 --mpi --min-np 1 true", "cannot use --min-np with --mpi"),
        ("-np 2 --jsrun true", "cannot use --jsrun"),
        ("-np 2 --gloo-timeout-seconds -1 true", "--gloo-timeout-seconds -1"),
        ("-np 2 --fusion-threshold-mb -1 true", "--fusion-threshold-mb -1 is not a number, 0 or above"),
        ("-np 2 --event-log no/such/folder/x true", "there is no folder no/such/folder"),
        ("-np 2 --event-log . true", "cannot write the event log . (--event-log): Is a directory"),
        ("-np 2 --output-filename /dev/null/x true", "cannot create the folder /dev/null/x (--output-filename)"),
        ("-np 2 no-such-command", "cannot find the command 'no-such-command' on the PATH"),
        ("-np 2 ./no-such-command", "cannot find the command './no-such-command': there is no such file"),
        ("-np 2 .", "cannot find the command '.'"),
        ("-np 2 / x", "cannot run the command '/': it is not a file"),
        # hosts
        ("-np 3 -H localhost:2 true", "-np 3 is above the 2 slots of the hosts given (localhost:2)"),
        ("-np 2 -H localhost:0 true", "slots must be at least 1, not 0"),
        ("-np 2 -H localhost:-1 true", "slots must be at least 1, not -1"),
        ("-np 2 -H localhost:x true", "slots 'x' is not an integer"),
        ("-np 2 -H localhost:1,localhost:1 true", "host 'localhost' is named twice"),
        ("-np 2 --hostfile absent true", "cannot read the hostfile absent: No such file or directory"),
        ("-np 2 --hostfile /dev/urandom true", "cannot read the hostfile /dev/urandom: it is larger than"),
        ("-np 2 --hostfile . true", "cannot read the hostfile .: Is a directory"),
        ("-np 2 -H localhost:2 --hostfile x true", "not allowed with argument"),
        ("-np 2 -H localhost:2 --host-discovery-script ls true", "not both"),
        # the discovery script, before it is run
        ("-np 2 --host-discovery-script ./absent.sh true", "'./absent.sh': there is no such file"),
        ("-np 2 --host-discovery-script ./ true", "discovery script './': it is not a file"),
        # the config file
        (
            "-np 2 --config-file /dev/zero true",
            "cannot read the config file /dev/zero: it is larger than 1048576 bytes",
        ),
        ("-np 2 --config-file absent.yaml true", "cannot read the config file absent.yaml: No such file"),
        # the subcommands
        ("drain", "the following arguments are required: HOST"),
        ("status --driver http://a:1", "--driver and --token-file must be given together"),
    ],
)
def test_bad_flags(called: Run, words: str, complaint: str) -> None:
    ran = called(*words.split())
    assert ran.code == 2, ran.err
    assert ran.only_line().startswith(("elasticrun: error: ", "elasticrun: job failed: "))
    assert complaint in ran.err
    assert ran.out == ""


def test_a_command_named_run_in_the_folder_is_no_slip(called: Run, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    ran = called("run", "-np", "2")
    assert ran.code == 2
    assert "-np is missing" in ran.only_line()


@pytest.mark.parametrize("name", ["HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"])
def test_bad_variables(called: Run, name: str) -> None:
    ran = called("-np", "1", "true", env={name: "soon"})
    assert (ran.code, ran.only_line()) == (
        2,
        f"elasticrun: error: the variable {name} is 'soon', not a number of seconds",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("params: {fusion_treshold_mb: 8}", "unknown key in section 'params': 'fusion_treshold_mb'; did you mean"),
        ("params: {cycle_time_ms: soon}", "'soon' is not a number"),
        ("params: {cycle_time_ms: -1}", "--cycle-time-ms -1 is not a number, 0 or above"),
        ("logging: {level: loud}", "--log-level LOUD is not one of"),
        ("agents: {spot_notices: ibm}", "--spot-notices ibm is not one of aws, gcp, azure"),
        ("controller: smi", "it must be gloo or mpi"),
        ("params: 2020-13-45", "it is not YAML"),
        ("{", "it is not YAML"),
    ],
)
def test_bad_config_files(called: Run, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    ran = called("-np", "1", "--config-file", "c.yaml", "true")
    assert ran.code == 2
    assert ran.only_line().startswith("elasticrun: error: ")
    assert complaint in ran.err


def test_a_port_that_is_in_use_or_not_allowed(called: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = called("-np", "1", "--rendezvous-port", str(port), "true")
    assert ran.code == 2
    assert ran.only_line() == (
        f"elasticrun: error: cannot listen on 127.0.0.1 port {port} for the rendezvous: the port is in use; choose "
        "another with --rendezvous-port, or 0 for any"
    )


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("#!/bin/sh\n", 0o644, "it is not executable; chmod +x it"),
        ("#!/no/such/interpreter\n", 0o755, "the program that its first line (#!) names does not exist"),
        ("echo hello\n", 0o755, "it is neither a program nor a script that begins with #!"),
        ("", 0o755, "it is neither a program nor a script that begins with #!"),
    ],
)
def test_commands_that_cannot_run(called: Run, tmp_path: Path, text: str, mode: int, complaint: str) -> None:
    ran = called("-np", "2", program(tmp_path, "train", text, mode))
    assert ran.code == 2
    assert complaint in ran.only_line()


# --- the discovery script ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("echo '<html>'", "line 1: cannot read '<html>' as a host"),
        ("head -c 100000 /dev/urandom", "./discover.sh"),
        ("yes", "printed more than 1048576 bytes"),
        ("echo host:-1", "slots must be at least 0, not -1"),
        ("echo host:x", "slots 'x' is not an integer"),
        ("echo localhost:1; echo localhost:1", "line 2: host 'localhost' is named twice (first on line 1)"),
        ("no-such-program", "not found"),
    ],
)
def test_bad_discovery_scripts(called: Run, tmp_path: Path, body: str, complaint: str) -> None:
    script = program(tmp_path, "discover.sh", f"#!/bin/sh\n{body}\n")
    ran = called("-np", "2", "--host-discovery-script", script, "true")
    assert ran.code == 2
    assert ran.only_line().startswith("elasticrun: job failed: ")
    assert ran.only_line().endswith(" (exit code 2)")
    assert complaint in ran.err


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("echo no credentials >&2; exit 7", "failed with exit code 7: no credentials"),
        ("exit 1", "its standard error is empty"),
        ("sleep 1000", "did not end within 0.5 s (--discovery-timeout) and was killed"),
        ("sleep 1000 & sleep 1000 & echo localhost:2", "did not close its output (held open by a child process)"),
    ],
)
def test_discovery_scripts_that_fail_at_first(called: Run, tmp_path: Path, body: str, complaint: str) -> None:
    timeout = "0.5" if body == "sleep 1000" else "3" if "sleep" in body else "150"
    later = "test -e ran && { echo localhost:2; exit; }; touch ran"
    script = program(tmp_path, "discover.sh", f"#!/bin/sh\n{later}\n{body}\n")
    ran = called("-np", "2", "--host-discovery-script", script, "--discovery-timeout", timeout, "true")
    assert ran.code == 0, ran.err
    warning = ran.err.splitlines()[0]
    assert warning.startswith("elasticrun: warning: the host discovery script './discover.sh' ")
    assert complaint in warning
    assert warning.endswith("; trying again")


def test_a_discovery_script_that_is_not_executable(called: Run, tmp_path: Path) -> None:
    script = program(tmp_path, "discover.sh", "#!/bin/sh\necho localhost:2\n", 0o644)
    ran = called("-np", "2", "--host-discovery-script", script, "true")
    assert (ran.code, ran.only_line()) == (
        2,
        "elasticrun: error: cannot run the host discovery script './discover.sh': it is not executable; chmod +x it",
    )


def test_too_few_slots_in_time(run: Run) -> None:
    ran = run("-np", "3", "--host-discovery-script", "echo localhost:2", "--elastic-timeout", "1", "true")
    assert ran.code == 3
    assert "waiting for 3 slots (-np), slots: 2 (localhost:2)" in ran.only_line()
    assert "--elastic-timeout" in ran.err


# --- the training script ----------------------------------------------------------------------------------------------


def test_a_script_that_is_no_training(run: Run) -> None:
    ran = run("-np", "2", "--on-change", "in-place", "true")
    assert ran.code == 2
    assert "exited with code 0 before it called hvd.init(); is the command a training script" in ran.only_line()


def test_a_script_that_fails_before_init(run: Run, tmp_path: Path) -> None:
    program(tmp_path, "train.py", "import sys\nprint('no data set', file=sys.stderr)\nsys.exit(3)\n")
    ran = run("-np", "2", "--on-change", "in-place", PYTHON, "train.py")
    assert ran.code == 1
    assert "[0]<stderr>:no data set\n" in ran.err
    assert "exited with code 3" in ran.err
    last = ran.err.splitlines()[-1]
    assert last.startswith("elasticrun: job failed: worker localhost[")
    assert last.endswith("exited with code 3; all workers failed before their first round (exit code 1)")


def test_a_script_for_one_worker_that_several_run_is_told_of(run: Run, tmp_path: Path) -> None:
    program(tmp_path, "train.py", "if False:\n    import torch\n")
    ran = run("-np", "2", PYTHON, "train.py")
    assert ran.code == 0
    assert (
        "warning: train.py does not initialize any distributed training: each of the 2 workers trains its own model"
        in ran.err
    )
    assert "does nothing" not in run("-np", "1", PYTHON, "train.py").err


def test_a_script_that_does_not_exist(run: Run) -> None:
    ran = run("-np", "2", PYTHON, "absent.py")
    assert ran.code == 2
    assert ran.only_line().startswith(
        "elasticrun: error: cannot find the script 'absent.py': there is no such file in "
    )


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        ("help", "usage: elasticrun [flags] command ..."),
        ("help end", "usage: elasticrun end "),
        ("version", "elasticrun "),
    ],
)
def test_what_people_try_first(run: Run, words: str, beginning: str) -> None:
    ran = run(*words.split())
    assert (ran.code, ran.out.startswith(beginning)) == (0, True)


def test_a_script_that_never_calls_init_is_told_by_slots(run: Run) -> None:
    ran = run("-np", "2", "--on-change", "in-place", "--start-timeout", "0.5", "sleep", "1000")
    assert ran.code == 2
    assert ran.only_line() == (
        "elasticrun: job failed: no worker called hvd.init() within 0.5 s (--start-timeout); missing: workers "
        "localhost[0], localhost[1]. Does the script call it? If it only starts slowly, raise --start-timeout "
        "(exit code 2)"
    )


def test_one_slot_that_never_calls_init_is_named(run: Run, tmp_path: Path) -> None:
    program(
        tmp_path,
        "train.py",
        "import os, time\nimport elastic_driver as hvd\n"
        "time.sleep(1000 if os.environ['HOROVOD_RANK'] == '1' else 0)\nhvd.init()\ntime.sleep(1000)\n",
    )
    ran = run("-np", "2", "--start-timeout", "8", "--elastic-timeout", "2", PYTHON, "train.py", elasticrun=FORKING)
    assert ran.code == 3
    assert "stopping worker localhost[1]: it did not call hvd.init() within 8 s (--start-timeout)" in ran.err
    assert ran.err.splitlines()[-1].startswith("elasticrun: job failed: ")
    assert ran.err.splitlines()[-1].endswith(
        "gave up after 2 s (--elastic-timeout); first failure: worker localhost[1] did not call hvd.init() within 8 s "
        "(--start-timeout) (exit code 3)"
    )


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.release), 4])
def test_one_slot_that_ends_before_init_is_told_once_and_named_at_the_end(run: Run, tmp_path: Path, code: int) -> None:
    program(
        tmp_path,
        "train.py",
        "import os, sys, time\nimport elastic_driver as hvd\n"
        "from elastic_driver.rendezvous.client import RendezvousClient\n"
        "from elastic_driver.rendezvous.credentials import Credential\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    credential = Credential.of_worker(os.environ)\n"
        "    driver = RendezvousClient(os.environ['ELASTIC_DRIVER_RENDEZVOUS'], credential)\n"
        "    while not driver.status()['explain'].startswith('waiting for worker 127.0.0.1[0] '):\n"
        "        time.sleep(0.01)\n"
        f"    sys.exit({code})\n"
        "hvd.init()\n",
    )
    flags = ("-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "2", "--elastic-timeout", "1")
    ran = run(*flags, "--blacklist-cooldown-range", "60", "60", PYTHON, "train.py", elasticrun=FORKING)
    assert ran.code == 3
    how = f"worker 127.0.0.1[0] exited with code {code}"
    assert len([line for line in ran.err.splitlines() if line.startswith("elasticrun: warning: ")]) == 1
    assert f"host 127.0.0.1 gets no new workers until its cooldown is over: {how} before its first round" in ran.err
    assert ran.err.splitlines()[-1].endswith(
        f"gave up after 1 s (--elastic-timeout); first failure: {how} (exit code 3)"
    )


def test_a_rank_that_ends_early_with_code_0(run: Run, tmp_path: Path) -> None:
    program(
        tmp_path,
        "train.py",
        "import sys\nimport numpy\nimport elastic_driver as hvd\nhvd.init()\n"
        "if hvd.rank() == 1:\n    sys.exit(0)\n"
        "hvd.elastic.run(lambda state: [hvd.allreduce(numpy.ones(1), name='a') for _ in range(10**9)])("
        "hvd.elastic.ObjectState(step=0))\n",
    )
    ran = run("-np", "2", PYTHON, "train.py", elasticrun=FORKING)
    assert ran.code == 1
    assert "worker localhost[1] exited with code 0" in ran.err.splitlines()[-1]


# --- what the workers are given ---------------------------------------------------------------------------------------


def test_flags_files_and_variables_reach_the_workers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "params: {cycle_time_ms: 5, fusion_threshold_mb: 2, cache_capacity: 9}\nstall_check: {enabled: false}\n"
    )
    env = {
        "HOROVOD_CYCLE_TIME": "77",
        "HOROVOD_CACHE_CAPACITY": "77",
        "HOROVOD_FUSION_THRESHOLD": "77",
        "HOROVOD_NUM_NCCL_STREAMS": "77",
        "HOROVOD_RANK": "77",
        "BASH_FUNC_x%%": "() { :; }",
    }
    flags = ["--cache-capacity", "3", "--config-file", "c.yaml", "--tcp", "--log-level", "warning"]
    ran = run("-np", "2", *flags, "sh", "-c", "env; exit 0", env=env)
    assert ran.code == 0, "it trains nothing, but it tells its environment"
    told = [
        dict(
            line.removeprefix(f"[{rank}]<stdout>:").split("=", 1)
            for line in ran.out.splitlines()
            if line.startswith(f"[{rank}]<stdout>:") and "=" in line
        )
        for rank in (0, 1)
    ]
    seen = max(told, key=len)
    for name, value in {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_FUSION_THRESHOLD": "2097152",
        "HOROVOD_CACHE_CAPACITY": "3",
        "HOROVOD_NUM_NCCL_STREAMS": "77",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "WARNING",
        "NCCL_IB_DISABLE": "1",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_SIZE": "1",
        "PYTHONUNBUFFERED": "1",
    }.items():
        assert seen.get(name) == value, name
    assert seen["HOROVOD_RANK"] in "01"
    assert not [name for name in seen if name.startswith("BASH_FUNC_")]


# --- odd surroundings -------------------------------------------------------------------------------------------------


def test_closed_streams_do_not_mix_with_files(tmp_path: Path) -> None:
    words = ("-np", "1", "--event-log", "events", "sh", "-c", "echo out; echo err >&2")
    ran = in_shell(tmp_path, *words, streams="<&- >&- 2>&-")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert events[0] == "job_started"
    assert events[-1] == "job_ended"


def test_a_reader_that_has_gone_does_not_end_the_job(tmp_path: Path) -> None:
    words = ("-np", "1", "sh", "-c", "yes | head -c 1000000; exit 5")
    ran = in_shell(tmp_path, *words, streams="| head -c 100 >/dev/null")
    assert "cannot write to stdout: its reader has closed it (broken pipe); continuing without it" in ran.err
    assert "worker localhost[0] (rank 0) exited with code 5, within the first 60 s" in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "begin"),
    [
        ("--version", "elasticrun "),
        ("--help", "usage: elasticrun"),
        # It imports torch; unit/cli/test_cli.py asks it where that is imported.
        pytest.param("--check-build", "elastic_", marks=pytest.mark.release),
    ],
)
def test_version_help_and_build(run: Run, flag: str, begin: str) -> None:
    ran = run(flag)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(begin)


def test_the_script_of_the_package_is_the_module(tmp_path: Path) -> None:
    elasticrun = Path(PYTHON).with_name("elasticrun")
    if not elasticrun.exists():
        pytest.skip("the package is not installed next to this Python")
    done = subprocess.run([elasticrun, "-np", "1"], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("elasticrun: error: no command to run")


def test_a_status_line_counts_on_a_terminal_and_is_gone_at_the_end(tmp_path: Path) -> None:
    """Through the real program on a real pseudo-terminal."""
    program(tmp_path, "typescript.sh", "#!/bin/sh\n")
    flags = ["-np", "1", "--on-change", "in-place", "--start-timeout", "3", "--stdin", "none"]
    words = [PYTHON, "-m", "elastic_driver", *flags, "sleep", "1000"]
    done = subprocess.run(
        ["script", "-qefc", shlex.join(words), str(tmp_path / "typescript")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=150,
        check=False,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    shown = done.stdout.decode()
    counted = re.findall(r"\[00:0(\d)\] waiting for worker localhost\[0\] to call hvd.init\(\); (\d) s left", shown)
    assert len(set(counted)) > 1, "a busy machine may miss some"
    assert {int(passed) + int(left) for passed, left in counted} <= {2, 3, 4}
    *_, last = [part for part in shown.split("\x1b[2K") if part.strip()]
    assert last.startswith("elasticrun: job failed: no worker called hvd.init() within 3 s")
    assert last.endswith("(exit code 2)\r\n")


def test_a_host_that_cannot_be_reached_stops_nobody(tmp_path: Path) -> None:
    """It is told once, and the job goes on where it is."""
    with Job(tmp_path, "localhost:2\n", "-np", "2") as job:
        job.wait_for_steps(2)
        job.set_hosts("localhost:2\nno-such-host.invalid:2\n")
        job.wait_for("the warning", lambda: "host no-such-host.invalid is not ready" in job.said())
        at = time.time()
        job.wait_for_steps(2, 10, after=at)
    assert job.process.returncode == 143


# As root there is no limit, and another user may not be able to read this Python: so it is loaded before.
NO_ROOM = """
import os, resource, sys
from elastic_driver.driver import job
from elastic_driver.cli.main import main
os.chdir("/")
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
os.setgid(65534)
os.setuid(65534)
sys.exit(main(["-np", "1", "/bin/true"]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without other processes")
def test_a_machine_without_room_for_a_driver_is_one_clear_line() -> None:
    done = subprocess.run([PYTHON, "-c", NO_ROOM], capture_output=True, text=True, timeout=150)
    assert done.returncode == 2
    assert done.stderr == (
        "elasticrun: error: cannot start the driver: no thread can be started; the limit of processes (ulimit -u) or "
        "of memory (ulimit -v) is reached\n"
    )


# Little more than there is: enough for anything but the stacks of libuv's threads.
LITTLE_ROOM = """
import os, resource
from elastic_driver.system.loops import new_loop
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20), resource.RLIM_INFINITY))
try:
    loop = new_loop()
except RuntimeError as error:
    print(error)
else:
    loop.run_until_complete(loop.getaddrinfo("localhost", 0))
"""


def test_a_loop_whose_threads_find_no_memory_ends_nothing_without_a_word() -> None:
    done = subprocess.run([PYTHON, "-c", LITTLE_ROOM], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout) == (0, "can't start new thread\n"), done.stderr


@pytest.mark.parametrize(
    "kilobytes", [400_000, 600_000, *(pytest.param(size, marks=pytest.mark.release) for size in (500_000, 700_000))]
)
def test_under_a_limit_of_memory_a_job_runs_or_says_why_not(kilobytes: int) -> None:
    # Where only the agent finds too little, the driver tries again for as long as it may wait for hosts.
    command = f"ulimit -v {kilobytes}; exec {PYTHON} -m elastic_driver -np 1 --elastic-timeout 3 true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode >= 0
    assert done.stderr


NO_CERTIFICATE = "cannot create the certificate for other machines: "


@pytest.mark.parametrize("words", ["-np 1 --accept-agents true", "rendezvous --port 0"])
def test_a_certificate_that_cannot_be_made_is_bad_usage(
    called: Run, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    ran = called(*words.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.only_line().startswith(f"elasticrun: error: {NO_CERTIFICATE}import of cryptography halted")


@pytest.fixture
def without_cryptography(tmp_path: Path) -> dict[str, str]:
    """Variables with which it cannot be imported."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "cryptography.py").write_text("raise ImportError('cryptography is broken here')\n")
    return {"PYTHONPATH": f"{hidden}:{ROOT}"}


def test_a_host_that_needs_a_certificate_that_cannot_be_made_is_not_ready(
    run: Run, without_cryptography: dict[str, str]
) -> None:
    flags = ("-np", "1", "-H", "node1:1", "--launcher-command", "false {host}", "--elastic-timeout", "3")
    ran = run(*flags, "true", env=without_cryptography, elasticrun=AFRESH)
    assert ran.code == 3, ran.err
    assert [line for line in ran.err.splitlines() if "retrying" in line] == [
        f"elasticrun: warning: host node1 is not ready: {NO_CERTIFICATE}cryptography is broken here; retrying"
    ]


@pytest.mark.release  # driver/test_where_it_listens.py has a job that does not load it
def test_on_one_machine_there_is_no_need_of_a_certificate(run: Run, without_cryptography: dict[str, str]) -> None:
    assert run("-np", "1", "true", env=without_cryptography, elasticrun=AFRESH).code == 0
