"""The command line: what becomes of flags, config file and environment."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastic_driver import __version__
from elastic_driver.cli import main as command
from elastic_driver.cli.flags import build_parser, parse
from elastic_driver.cli.main import main
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.journal.file import HEADER, frame
from elastic_driver.journal.folder import JOURNAL
from elastic_driver.launch.dial import early
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.settings import FLAGS, Settings
from elastic_driver.words import ExitCode

pytestmark = [pytest.mark.unit]


def settings(*words: str, env: Mapping[str, str] | None = None) -> Settings:
    return settings_from(parse(words), env or {})


def test_defaults() -> None:
    made = settings("-np", "4", "true")
    assert made == Settings(
        command=("true",), num_proc=4, min_num_proc=4, max_num_proc=4, hosts=(Host("localhost", 4),)
    )
    assert (made.elastic_timeout_s, made.start_timeout_s, made.discovery_interval_s) == (600, 300, 1)
    assert (made.reset_limit, made.cooldown_range_s, made.worker_env) == (None, None, {})


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--min-np", "1"], "min_num_proc", 1),
        (["--preload", "torch, my.lib"], "preload", ("torch", "my.lib")),
        (["--no-preload"], "warm_starts", False),
        (["--min-num-proc", "1"], "min_num_proc", 1),
        (["--max-np", "9"], "max_num_proc", 9),
        (["--max-num-proc", "9"], "max_num_proc", 9),
        (["--np-multiple", "2"], "num_proc_multiple", 2),
        (["--ranks-per-host-multiple", "2"], "ranks_per_host_multiple", 2),
        (["--accept-agents", "--protect", "a,b", "--protect", "[::1]"], "protect", ("a", "b", "::1")),
        (["-H", "a:2 rack=r1 spot,b"], "hosts", (Host("a", 2, ("rack=r1", "spot")), Host("b", 1))),
        (["--slots-per-host", "3"], "slots_per_host", 3),
        (["--slots", "3"], "slots_per_host", 3),
        (["--elastic-timeout", "7"], "elastic_timeout_s", 7.0),
        (["--start-timeout", "7.5"], "start_timeout_s", 7.5),
        (["--reset-limit", "0"], "reset_limit", 0),
        (["--blacklist-cooldown-range", "2", "30"], "cooldown_range_s", (2.0, 30.0)),
        (["-H", "localhost:1,127.0.0.1:2,"], "hosts", (Host("localhost", 1), Host("127.0.0.1", 2))),
        (["-H", "localhost,[::1]", "--slots", "5"], "hosts", (Host("localhost", 5), Host("::1", 5))),
        (["--host-discovery-script", "cat x"], "discovery_script", "cat x"),
        (["--discovery-interval", "0.1"], "discovery_interval_s", 0.1),
        (["--discovery-timeout", "3"], "discovery_timeout_s", 3.0),
        (["--rendezvous-port", "4567"], "rendezvous_port", 4567),
        (["-prefix-timestamp"], "prefix_timestamp", True),
        (["--prefix-output-with-timestamp"], "prefix_timestamp", True),
        (["--verbose"], "verbose", True),
        (["--log-level", "debug"], "log_level", "DEBUG"),
        (["--grace-time", "0"], "grace_s", 0.0),
        (["--gloo-timeout-seconds", "9"], "gloo_timeout_s", 9.0),
        (["-p", "2222"], "ssh_port", 2222),
        (["--ssh-port", "2222"], "ssh_port", 2222),
        (["-i", "key"], "ssh_identity_file", "key"),
        (["--network-interfaces", "a, b", "--network-interface", "c"], "network_interfaces", ("c", "a", "b")),
        (["--agent-timeout", "4"], "agent_timeout_s", 4.0),
        (["--accept-agents"], "accept_agents", True),
        (["--accept-agents", "--join-token-file", "/t"], "join_token_file", Path("/t")),
        (["--rsh-agent", "kubexec -q"], "rsh_agent", ("kubexec", "-q")),
        (["--launcher-command", "a {host}", "--launcher-bootstrap", "command"], "launcher_bootstrap", "command"),
        (["--launcher-command", "srun -w {host}"], "launcher_command", "srun -w {host}"),
        (["--launcher-command", "srun"], "launcher_bootstrap", None),
        (["--remote-python", "/p"], "remote_python", "/p"),
        (["--ssh-connect-timeout", "3"], "ssh_connect_timeout_s", 3.0),
        (["--port-range", "4000-4100"], "port_range", (4000, 4100)),
        (["--tls"], "tls", True),
        (["--check-network"], "check_network", True),
        (["--spot-notices", "gcp"], "spot_notices", "gcp"),
        ([], "spot_notices", None),
        ([], "check_network", False),
        (["-x", "A=1", "-x", "B=x y"], "passed_env", {"A": "1", "B": "x y"}),
        (["--disable-cache", "--gloo", "--tcp", "--mpi-args", "x", "--binding-args", "y"], "num_proc", 2),
    ],
)
def test_flags(words: list[str], name: str, value: object) -> None:
    assert getattr(settings("-np", "2", *words, "true"), name) == value


@pytest.mark.parametrize(
    ("words", "elastic", "most"),
    [
        ([], False, 2),
        (["--min-np", "1"], True, None),
        (["--min-np", "1", "--max-np", "3"], True, 3),
        (["--host-discovery-script", "cat x"], True, None),
        (["-H", "localhost:8"], False, 2),
    ],
)
def test_when_a_job_is_elastic(words: list[str], elastic: bool, most: int | None) -> None:
    made = settings("-np", "2", *words, "true")
    assert (made.elastic, made.max_num_proc) == (elastic, most)


def test_everything_from_the_first_word_is_the_command() -> None:
    assert settings("-np", "1", "true", "-np", "5", "--", "-v").command == ("true", "-np", "5", "--", "-v")
    assert settings("-np", "1", "--", "true", "--", "x").command == ("true", "--", "x")


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nlocalhost slots=2 rack=a\n\n127.0.0.1:3 spot # more\n[::1]\n")
    expected = (Host("localhost", 2, ("rack=a",)), Host("127.0.0.1", 3, ("spot",)), Host("::1", 1))
    assert settings("-np", "2", "-hostfile", str(path), "true").hosts == expected
    assert settings("-np", "2", "--hostfile", str(path), "true").hosts == expected


def test_environment_gives_way_to_flags() -> None:
    env = {"HOROVOD_ELASTIC_TIMEOUT": "11", "HOROVOD_START_TIMEOUT": "12", "HOROVOD_GLOO_TIMEOUT_SECONDS": "13"}
    made = settings("-np", "1", "true", env=env)
    assert (made.elastic_timeout_s, made.start_timeout_s, made.gloo_timeout_s) == (11, 12, 13)
    made = settings("-np", "1", "--elastic-timeout", "1", "--start-timeout", "2", "true", env=env)
    assert (made.elastic_timeout_s, made.start_timeout_s) == (1, 2)


def test_config_file_gives_way_to_flags_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "params: {cycle_time_ms: 5, cache_capacity: 6, torus_allreduce: true}\n"
        "logging: {level: debug}\nlibrary_options: {gloo_timeout_seconds: 8}\n"
    )
    file, flags = ["--config-file", str(path)], ["--cycle-time-ms", "1", "--no-torus-allreduce"]
    expected = {
        "HOROVOD_CYCLE_TIME": "1.0",
        "HOROVOD_CACHE_CAPACITY": "6",
        "HOROVOD_TORUS_ALLREDUCE": "0",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "8",
    }
    for words in ([*file, *flags], [*flags, *file]):
        made = settings("-np", "1", *words, "true", env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "13"})
        assert made.worker_env == expected
        assert (made.gloo_timeout_s, made.log_level) == (8, "DEBUG")


def test_flags_that_only_horovods_own_library_heeds_are_known() -> None:
    ours = "--fusion-threshold-mb 3 --tcp --gloo-timeout-seconds 4 --no-autotune --no-torus-allreduce --log-level info"
    assert settings("-np", "1", *ours.split(), "true").of_horovod_alone == ()
    theirs = "--cycle-time-ms 1 --cache-capacity 0 --hierarchical-allreduce --autotune --autotune-log-file x"
    more = "--thread-affinity 3 --num-nccl-streams 2 --log-without-timestamp"
    words = [*theirs.split(), *more.split()]
    told = set(settings("-np", "1", *words, "true").of_horovod_alone)
    assert {word for word in words if word.startswith("--")} - told == {"--autotune-log-file"}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--fusion-threshold-mb 3", {"HOROVOD_FUSION_THRESHOLD": "3145728"}),
        ("--fusion-threshold-mb 0", {"HOROVOD_FUSION_THRESHOLD": "0"}),
        ("--cycle-time-ms 0.5", {"HOROVOD_CYCLE_TIME": "0.5"}),
        ("--cache-capacity 0", {"HOROVOD_CACHE_CAPACITY": "0"}),
        ("--hierarchical-allreduce", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
        ("--no-hierarchical-allgather", {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}),
        ("--torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "1"}),
        ("--no-autotune", {"HOROVOD_AUTOTUNE": "0"}),
        ("--autotune-log-file x", {}),
        (
            "--autotune --autotune-log-file x --autotune-warmup-samples 1 --autotune-steps-per-sample 2 "
            "--autotune-bayes-opt-max-samples 3 --autotune-gaussian-process-noise 0.25",
            {
                "HOROVOD_AUTOTUNE": "1",
                "HOROVOD_AUTOTUNE_LOG": "x",
                "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
                "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
                "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "3",
                "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.25",
            },
        ),
        ("--timeline-mark-cycles", {}),
        (
            "--timeline-filename t --timeline-mark-cycles",
            {"HOROVOD_TIMELINE": "t", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        ("--no-stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        ("--stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
        ("--stall-check-warning-time-seconds 5", {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}),
        ("--stall-check-shutdown-time-seconds 6", {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"}),
        ("--mpi-threads-disable", {"HOROVOD_MPI_THREADS_DISABLE": "1"}),
        ("--no-mpi-threads-disable", {"HOROVOD_MPI_THREADS_DISABLE": "0"}),
        ("--tcp", {"NCCL_IB_DISABLE": "1"}),
        ("--num-nccl-streams 2", {"HOROVOD_NUM_NCCL_STREAMS": "2"}),
        ("--thread-affinity 3", {"HOROVOD_THREAD_AFFINITY": "3"}),
        ("--gloo-timeout-seconds 4", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "4"}),
        ("--log-level warning", {"HOROVOD_LOG_LEVEL": "WARNING"}),
        ("--log-with-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}),
        ("--log-without-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
        ("--no-log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}),
        ("--log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}),
    ],
)
def test_tuning_flags_set_the_workers_variables(words: str, env: dict[str, str]) -> None:
    assert settings("-np", "1", *words.split(), "true").worker_env == env


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("true", "-np is missing"),
        ("-np 1", "no command to run"),
        ("-np 1 --", "no command to run"),
        ("-np 0 true", "-np 0 is below 1"),
        ("-np -2 true", "-np -2 is below 1"),
        ("-np two true", "argument -np/--np/--num-proc: 'two' is not an integer"),
        (
            f"-np {'1' * 5000} true",
            "argument -np/--np/--num-proc: '1111111111111111111111111111111111111111' has too many digits",
        ),
        ("-np", "expected one argument"),
        ("-np 99999 true", "-np 99999 is above 65536"),
        ("-np 5000 true", "host 'localhost' would have 5000 slots"),
        ("-np 2 --no-such-flag true", "unrecognized arguments: --no-such-flag\n"),
        ("-np 2 --stanby 1 true", "unrecognized arguments: --stanby (did you mean --standby?)"),
        ("-np 2 --max-np 2 --standby 1 --on-change restart true", "--standby needs workers that reset in place"),
        ("-np 2 --min_np=1 true", "unrecognized arguments: --min_np=1 (did you mean --min-np?)"),
        ("-np 2 --host true", "ambiguous option: --host"),
        ("-np 2 --mpi --gloo true", "not allowed with argument"),
        ("-np 2 --jsrun true", "cannot use --jsrun"),
        ("-np 2 -H a:1 --hostfile x true", "not allowed with argument"),
        ("-np 2 -H localhost:2 --host-discovery-script ls true", "not both"),
        ("-np 2 -H localhost:0 true", "slots must be at least 1, not 0"),
        (
            "-np 2 -H localhost:2,localhost:3 true",
            "cannot read -H 'localhost:2,localhost:3': host 'localhost' is named",
        ),
        ("-np 2 -H , true", "no hosts"),
        ("-np 2 --join-token-file x true", "--join-token-file has no effect: give --accept-agents, too"),
        ("-np 2 --rsh-agent a --launcher-command b true", "give either --rsh-agent or --launcher-command, not both"),
        ("-np 2 --port-range x true", "'x' is not a range of ports"),
        ("-np 2 --launcher-command a --launcher-bootstrap b true", "invalid choice"),
        ("-np 2 -x NO_SUCH_VARIABLE true", "-x NO_SUCH_VARIABLE: the variable is not set here"),
        ("-np 2 --hostfile /no/such true", "cannot read the hostfile /no/such: No such file or directory"),
        ("-np 2 --hostfile / true", "cannot read the hostfile /: Is a directory"),
        ("-np 2 -prefix-timestamp --log-with-timestamp true", "not allowed with argument"),
        ("-np 2 --log-level loud true", "invalid choice"),
        ("-np 2 --blacklist-cooldown-range 1 true", "--blacklist-cooldown-range: 'true' is not a number"),
        ("-np 2 --blacklist-cooldown-range 9 3 true", "lower bound first"),
        ("-np 2 --cycle-time-ms nan true", "--cycle-time-ms nan is not a number"),
        ("-np 2 --cycle-time-ms inf true", "--cycle-time-ms inf is above the maximum of 1000000000"),
        (
            "-np 2 --fusion-threshold-mb 99999999999 true",
            "--fusion-threshold-mb 99999999999 is above the maximum of 1000000000",
        ),
        ("-np 2 --gloo-timeout-seconds 20000000 true", "--gloo-timeout-seconds 2e+07 is above the maximum of 1e+07"),
        ("-np 2 --cache-capacity -1 true", "--cache-capacity -1 is not a number, 0 or above"),
        ("-np 2 --autotune --autotune-gaussian-process-noise 2 true", "is not within 0 to 1"),
        ("-np 2 --elastic-timeout soon true", "argument --elastic-timeout: 'soon' is not a number"),
        ("-np 2 -H localhost:1000000000 true", "slots must be at most 4096, not 1000000000"),
    ],
)
def test_bad_usage(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("elasticrun: error: ")
    assert err.count("\n") == 1
    assert complaint in err


def test_odd_words_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-np", "1", "--a\n\x1b[2Jb", "true"], ["-np", "1", "-H", "", "true"], ["-np", "1", ""]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "\x1b" not in err


@pytest.mark.parametrize("name", ["HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"])
def test_a_variable_that_is_no_number(name: str) -> None:
    with pytest.raises(SettingsError, match=f"the variable {name} is 'soon', not a number of seconds"):
        settings("-np", "1", "true", env={name: "soon"})
    with pytest.raises(SettingsError, match=f"the variable {name}: -4 is not a number of seconds above 0"):
        settings("-np", "1", "true", env={name: "-4"})


def test_version_help_and_build(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["-v"], ["version"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"elasticrun {__version__}\n")
    for words in (["--check-build"], ["-cb"]):
        assert main(words) == 0
        said = capsys.readouterr().out
    assert "Collectives:" in said
    horovods = said[said.index("\nAvailable Frameworks:\n") :]  # what is looked for in horovodrun's output
    assert [line for line in horovods.splitlines() if line.startswith("Available")] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    assert "\n    [ ] TensorFlow\n" in horovods
    assert horovods.count("\n    [X] Gloo\n") == 2  # of the controllers and the operations


def printed(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that succeeds prints."""
    with contextlib.suppress(SystemExit):  # argparse ends with it
        assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_the_help_fits_two_screens_and_names_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(["--help"], capsys)
    assert text == printed(["-h"], capsys) == printed(["help"], capsys)
    assert text.startswith("usage: elasticrun ")
    assert len(text.splitlines()) <= 80
    for flag in ("-np N", "--host-discovery-script COMMAND", "--nproc-per-node N", "--nnodes N|MIN:MAX"):
        assert f"  {flag}" in text
    everything = printed(["--help-all"], capsys)
    parser = build_parser()
    for topic, group in parser.topics.items():
        assert f"\n  {topic} " in text
        of_topic = printed(["help", topic], capsys)
        for action in group._group_actions:
            shown = action.help != argparse.SUPPRESS
            assert (action.option_strings[0] in of_topic) == shown, action
            assert not shown or action.option_strings[0] in everything


def test_help_on_a_subcommand_and_on_nothing_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["help", "drain"], capsys).startswith("usage: elasticrun drain")
    assert printed(["help", "resume"], capsys).startswith("usage: elasticrun resume")
    assert main(["help", "sailing"]) == 2
    assert "no help on sailing: it is not a subcommand and not one of torchrun, " in capsys.readouterr().err


def test_the_help_tells_every_exit_code() -> None:
    text = " ".join(build_parser().format_help().split()).rpartition("Exit codes:")[2]
    codes = {int(word.strip(",.")) for word in text.split() if word.strip(",.").isdigit()}
    assert codes >= {int(code) for code in ExitCode}, "a code that is not documented"


def test_each_setting_has_the_flag_that_messages_name() -> None:
    known = {flag: action.dest for action in build_parser()._actions for flag in action.option_strings}
    assert {name: known[flag] for name, flag in FLAGS.items()} == {name: name for name in FLAGS}


def test_nothing_is_given_where_nothing_was_said() -> None:
    assert parse(["true"]) == {"command": ("true",), "torchrun": {}}


@pytest.mark.parametrize(
    ("beginning", "starts"),
    [(None, True), (b'[{"is":"Took"}]', False), (b'[{"is":"Closed","epoch":1}]', True)],
)
def test_an_agent_is_begun_early_but_for_a_job_that_has_its_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: bytes | None, starts: bool
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(early, "EarlyAgent", lambda *, with_stdin: begun.append(with_stdin) or begun)
    if beginning is not None:
        (tmp_path / JOURNAL).write_bytes(HEADER + frame(1, b"\0" + beginning))
    assert (command._early_agent(tmp_path) is not None) == starts
    assert begun == [False] * starts
    command._early_agent(None)
    assert begun[starts:] == [True]
