"""torchrun's options and their variables: what each asks for, what wins, and what is refused in which words."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.cli.flags import parse
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.logs import Logs, Streams
from elastic_driver.settings.nodes import Nodes
from elastic_driver.settings.settings import Settings
from elastic_driver.settings.torchrun_options import OPTIONS

pytestmark = [pytest.mark.unit]

PYTHON = (sys.executable, "-u")


def settings(*words: str, env: Mapping[str, str] | None = None) -> Settings:
    return settings_from(parse(words), env or {})


def refusal(*words: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        settings(*words, env=env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- which workers there are ------------------------------------------------------------------------------------------


def test_workers_of_one_node() -> None:
    made = settings("--nproc-per-node", "3", "train.py", "--lr", "1")
    assert (made.num_proc, made.min_num_proc, made.max_num_proc, made.elastic) == (3, 3, 3, False)
    assert made.hosts == (Host("localhost", 3),)
    assert made.nodes == Nodes(nproc_per_node=3)
    assert made.command == (*PYTHON, "train.py", "--lr", "1")
    assert (made.reset_limit, made.grace_s, made.blames_hosts) == (None, 30.0, False)


def test_a_job_without_these_flags_is_what_it_was() -> None:
    made = settings("-np", "2", "train.py")
    assert made.command == ("train.py",)
    assert (made.nodes, made.logs, made.grace_s, made.blames_hosts) == (None, Logs(), 5.0, True)
    assert (made.is_torchruns, made.is_horovods) == (False, True)
    assert (made.horovod_shim, made.horovod_protocol) == ("auto", "auto")
    assert "-np is missing" in refusal("train.py")


def test_no_horovod_unless_it_is_asked_for() -> None:
    made = settings("--nproc-per-node", "3", "train.py")
    assert (made.is_torchruns, made.is_horovods) == (True, False)
    assert (made.horovod_shim, made.horovod_protocol) == ("never", "off")
    asked = settings("--nproc-per-node", "3", "--horovod-shim", "auto", "train.py")
    assert (asked.is_horovods, asked.horovod_shim, asked.horovod_protocol) == (True, "auto", "off")
    assert settings("--standalone", "train.py", env={"ELASTIC_DRIVER_HOROVOD_PROTOCOL": "on"}).horovod_protocol == "on"
    # Horovod's flags with one of torchrun's.
    mixed = settings("-np", "2", "--max-restarts", "1", "train.py")
    assert (mixed.is_torchruns, mixed.is_horovods, mixed.horovod_shim) == (True, True, "auto")


def test_signals_that_end_the_job() -> None:
    handled = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert settings("--standalone", "train.py").more_signals == handled
    assert settings("-np", "1", "train.py").more_signals == ()
    env = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM, SIGUSR2"}
    assert settings("--standalone", "train.py", env=env).more_signals == ("SIGTERM", "SIGUSR2")
    assert settings("--standalone", "--signals-to-handle", "SIGALRM", "x.py", env=env).more_signals == ("SIGALRM",)
    env = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGSTOP"}
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE: 'SIGSTOP' is not one of" in refusal("--standalone", "train.py", env=env)


@pytest.mark.parametrize("words", [["--standalone"], ["--max-restarts", "1"], ["--role", "x"], ["-m"]])
def test_one_worker_where_no_number_is_given(words: list[str]) -> None:
    assert settings(*words, "train.py").num_proc == 1


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_both_spellings(spelling: str) -> None:
    assert settings(spelling, "2", "train.py").num_proc == 2
    assert settings(f"{spelling}=2", "train.py").num_proc == 2


def test_several_nodes() -> None:
    words = [
        "--nnodes",
        "2:4",
        "--nproc-per-node",
        "3",
        "--rdzv-id",
        "job",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "node0:29400",
    ]
    more = [
        "--node-rank",
        "1",
        "--local-addr",
        "10.0.0.2",
        "--role",
        "trainer",
        "--rdzv-conf",
        "last_call_timeout=2,join_timeout=90",
    ]
    made = settings(*words, *more, "train.py")
    assert made.nodes == Nodes(
        least=2,
        most=4,
        nproc_per_node=3,
        endpoint="node0:29400",
        run_id="job",
        node_rank=1,
        local_addr="10.0.0.2",
        role="trainer",
        conf={"last_call_timeout": "2", "join_timeout": "90"},
    )
    assert (made.num_proc, made.min_num_proc, made.max_num_proc) == (6, 6, 12)
    assert made.elastic_timeout_s == 90.0
    assert made.accept_agents


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        ("--master-addr node0", "node0:29500"),
        ("--master-addr node0 --master-port 1234", "node0:1234"),
        ("--master_addr fe80::1 --master_port 1234", "[fe80::1]:1234"),
        ("--rdzv-endpoint [::1]:99", "[::1]:99"),
        ("--rdzv-endpoint node0", "node0"),
        ("--rdzv-endpoint node0:1 --master-addr other", "node0:1"),
    ],
)
def test_endpoints(words: str, endpoint: str) -> None:
    nodes = settings("--nnodes", "2", *words.split(), "train.py").nodes
    assert nodes is not None
    assert nodes.endpoint == endpoint


def test_a_node_alone_meets_nobody() -> None:
    for words in ("--rdzv-endpoint localhost:0", "--standalone --rdzv-endpoint node0:1", "--master-addr node0"):
        nodes = settings(*words.split(), "--nproc-per-node", "2", "train.py").nodes
        assert nodes is not None
        assert nodes.endpoint == ""


def test_a_token_for_any_number_of_nodes() -> None:
    words = ("--nproc-per-node", "2", "--join-token-file", "/token")
    assert settings("--nnodes", "2", "--rdzv-endpoint", "n:1", *words, "train.py").join_token_file == Path("/token")
    assert settings("--nnodes", "1", *words, "train.py").join_token_file is None
    assert settings("--accept-agents", *words, "train.py").join_token_file == Path("/token")
    assert "has no effect" in refusal("-np", "2", "--role", "x", "--join-token-file", "/token", "train.py")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--nproc-per-node x", "--nproc-per-node: 'x' is not a number, auto, cpu, gpu or xpu"),
        ("--nproc-per-node 0", "--nproc-per-node: 0 is below 1"),
        ("--nproc-per-node 99999999", "is above 65536"),
        ("--nnodes 0", "--nnodes: 0 is not within 1 to"),
        ("--nnodes 3:2", "--nnodes: '3:2' has a minimum above its maximum"),
        ("--nnodes 1:2:3", "--nnodes: '1:2:3' is not a number of nodes or MIN:MAX"),
        ("--nnodes 2:", "--nnodes: '' is not an integer"),
        ("--nnodes 2", "--nnodes up to 2 needs --rdzv-endpoint HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint node0:x", "--rdzv-endpoint: 'node0:x' is not of the form HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint node0:0", "--rdzv-endpoint: 0 is not a fixed port"),
        ("--nnodes 2 --master-addr n --master-port 70000", "argument --master-port: '70000' is not a port"),
        ("--nnodes 2 --standalone", "--standalone is for one node"),
        ("--node-rank 1", "--node-rank: 1 is not the rank of one of the 1 nodes"),
        ("--node-rank -1", "--node-rank: -1 is not within 0"),
        ("--rdzv-backend etcd", "--rdzv-backend: 'etcd' is not one of static, c10d, elastic; drop it"),
        ("--rdzv-backend etcd-v2", "'etcd-v2' is not one of"),
        ("--rdzv-conf join_timeout", "--rdzv-conf: 'join_timeout' is not of the form KEY=VALUE"),
        ("--rdzv-conf join_timeout=0", "join_timeout: '0' is not a number of seconds above 0"),
        ("--rdzv-conf jion_timeout=1", "'jion_timeout' is not one of close_timeout,"),
        ("--rdzv-conf store_type=file", "store_type 'file': elasticrun keeps the store itself"),
        ("--rdzv-conf is_host=perhaps", "is_host 'perhaps' is neither true nor false"),
        ("--max-restarts x", "--max-restarts: 'x' is not an integer"),
        ("--max-restarts -1", "--max-restarts: -1 is not within 0"),
        ("--redirects 9", "--redirects: '9' is neither 0"),
        ("-t x", "--tee: 'x' is neither 0"),
        ("--local-ranks-filter a", "--local-ranks-filter: 'a' is not a list of local ranks"),
        ("--logs-specs mine", "--logs-specs: 'mine' is not one of default; drop it: use --log-dir"),
        ("--event-log-handler console", "--event-log-handler: 'console' is not one of null; drop it: --event-log"),
        ("--start-method clone", "--start-method: 'clone' is not one of spawn, fork, forkserver"),
        ("--monitor-interval soon", "--monitor-interval: 'soon' is not a number of seconds"),
        ("--shutdown-timeout -1", "--shutdown-timeout: -1 is not a number of seconds, 0 or above"),
        ("--signals-to-handle SIGTERM,SIGKILL", "--signals-to-handle: 'SIGKILL' is not one of SIGTERM,"),
        ("--numa-binding all", "--numa-binding: 'all' is not one of node, socket, exclusive, core-complex"),
        ("-m --no-python", "--no-python cannot be combined with --module"),
        ("-np 2 --nproc-per-node 2", "give either --nproc-per-node or -np, not both"),
        ("-H a:2 --nnodes 2", "give either --nnodes or -H, not both"),
        ("--host-discovery-script x --rdzv-id y", "give either --rdzv-id or --host-discovery-script, not both"),
    ],
)
def test_what_is_refused(words: str, complaint: str) -> None:
    assert complaint in refusal(*words.split(), "train.py")


def test_restarts_and_grace() -> None:
    made = settings("--max-restarts", "3", "--shutdown-timeout", "7", "train.py")
    assert (made.reset_limit, made.grace_s) == (3, 7.0)
    assert settings("--standalone", "train.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).grace_s == 9.0
    complaint = refusal("--standalone", "train.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"})
    assert complaint == "the variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'x' is not a number of seconds"


def test_elasticruns_own_flags_win() -> None:
    words = [
        "--max-restarts",
        "3",
        "--reset-limit",
        "4",
        "--shutdown-timeout",
        "7",
        "--grace-time",
        "8",
        "--rdzv-conf",
        "timeout=5",
    ]
    made = settings(*words, "--elastic-timeout", "6", "--blacklist-cooldown-range", "1", "2", "train.py")
    assert (made.reset_limit, made.grace_s, made.elastic_timeout_s) == (4, 8.0, 6.0)
    assert made.blames_hosts


def test_beside_np_and_hosts() -> None:
    made = settings("-np", "2", "-H", "a:2,b:2", "--max-restarts", "3", "--role", "x", "-t", "3", "train.py")
    assert (made.num_proc, made.max_num_proc, made.elastic) == (2, 2, False)
    assert (made.nodes, made.reset_limit) == (Nodes(role="x"), 3)
    assert made.logs == Logs(tee=Streams(3))


def test_what_is_without_effect_is_told() -> None:
    made = settings("--rdzv-conf", "read_timeout=3,keep_alive_interval=1,close_timeout=2", "train.py")
    assert [remark.partition(" ")[0] for remark in made.remarks] == ["read_timeout", "keep_alive_interval"]
    assert all("has no effect" in remark for remark in made.remarks)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py -x", (*PYTHON, "train.py", "-x")),
        ("-m my.module -x", (*PYTHON, "-m", "my.module", "-x")),
        ("--no-python ./train.py", ("./train.py",)),
        ("--no-python --run-path train.py", (*PYTHON, "train.py")),
        ("--run-path train a", (*PYTHON, "train", "a")),
        ("python train.py", ("python", "train.py")),
        ("-- train.py -m", (*PYTHON, "train.py", "-m")),
    ],
)
def test_the_command(words: str, command: tuple[str, ...]) -> None:
    assert settings("--standalone", *words.split()).command == command


def test_a_file_that_cannot_be_run_is_a_script(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.touch(0o644)
    assert settings("--standalone", str(path)).command == (*PYTHON, str(path))
    path.chmod(0o755)
    assert settings("--standalone", str(path)).command == (str(path),)


def test_another_python() -> None:
    made = settings("--standalone", "train.py", env={"PYTHON_EXEC": "/opt/python"})
    assert made.command == ("/opt/python", "-u", "train.py")


# --- output -----------------------------------------------------------------------------------------------------------


def test_output() -> None:
    words = [
        "-r",
        "0:1",
        "-t",
        "3",
        "--log-dir",
        "logs",
        "--local-ranks-filter",
        "0,1",
        "--duplicate-stdout-filters",
        "a,b",
    ]
    made = settings("--standalone", *words, "--log-line-prefix-template", "${rank}: ", "train.py").logs
    assert made == Logs(
        folder=Path("logs").absolute(),
        redirects=Streams(by_rank={0: 1}),
        tee=Streams(3),
        shown=frozenset((0, 1)),
        prefix="${rank}: ",
        stdout_filters=("a", "b"),
    )


def test_no_prefix_at_all() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}
    assert settings("--standalone", "--log-line-prefix-template", "", "train.py", env=env).logs.prefix == ""
    assert settings("--standalone", "train.py", env=env).logs.prefix == "[${rank}]"
    assert settings("-np", "1", "train.py", env=env).logs == Logs()


def test_a_log_folder_that_is_none() -> None:
    words = [
        "-r",
        "3",
        "-t",
        "1",
        "--duplicate-stdout-filters",
        "a",
        "--local-ranks-filter",
        "0",
        "--log-dir",
        "/dev/null",
    ]
    assert settings("--standalone", *words, "train.py").logs == Logs(shown=frozenset((0,)))


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_alone() -> None:
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-node-0"}
    made = settings("train.py", env={**env, "PET_MASTER_PORT": "29400"})
    assert made.nodes == Nodes(least=2, most=2, nproc_per_node=4, endpoint="job-node-0:29400", node_rank=0)
    assert made.command == (*PYTHON, "train.py")


def test_flags_win_over_variables() -> None:
    assert settings("--nproc-per-node", "2", "train.py", env={"PET_NPROC_PER_NODE": "4"}).num_proc == 2


def test_variables_of_switches() -> None:
    assert settings("x", env={"PET_STANDALONE": "1", "PET_MODULE": "1"}).command == (*PYTHON, "-m", "x")
    assert settings("--standalone", "x", env={"PET_MODULE": "0"}).command == ("x",)
    assert settings("-np", "1", "x", env={"PET_STANDALONE": ""}).nodes is None
    assert (
        refusal("x", env={"PET_STANDALONE": "yes"})
        == "the variable PET_STANDALONE: 'yes' is neither 1 (on) nor 0 (off)"
    )


def test_where_np_says_it_the_variables_of_places_are_not_read() -> None:
    env = {"PET_NNODES": "rubbish", "PET_NPROC_PER_NODE": "9", "PET_MAX_RESTARTS": "3"}
    made = settings("-np", "2", "true", env=env)
    assert (made.num_proc, made.reset_limit) == (2, 3)
    assert settings("-np", "2", "true", env={"PET_NNODES": "2"}).nodes is None


def test_functions_read_no_variables() -> None:
    given: dict[str, Any] = {"num_proc": 1, "command": ("true",)}
    assert settings_from(given, {"PET_MAX_RESTARTS": "3"}).reset_limit is None


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_each_message_names_the_variable(name: str) -> None:
    option = OPTIONS[name]
    rubbish = {"role": None, "rdzv_id": None, "local_addr": None, "log_dir": None, "log_line_prefix_template": None}
    free = {*rubbish, "duplicate_stdout_filters", "duplicate_stderr_filters"}
    env = {option.variable: "\x00 no ; such,value", "PET_NNODES": "2", "PET_RDZV_ENDPOINT": "n:1"}
    if name in ("nnodes", "rdzv_endpoint"):
        env[option.variable] = ":::"
    if name in ("master_addr", "master_port"):
        del env["PET_RDZV_ENDPOINT"]
        env = {"PET_MASTER_ADDR": "n", **env}
    if name in free:
        settings("true", env=env)
    else:
        assert "PET_" in refusal("true", env=env)
