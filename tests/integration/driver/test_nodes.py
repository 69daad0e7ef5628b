"""Jobs of nodes on one machine: several commands with the same endpoint, of which the first to have the port drives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.network.ports import free_port
from tests.support.paths import ROOT
from tests.support.processes.nodes import WORKER, NodesJob

pytestmark = pytest.mark.integration


def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def test_one_of_those_that_start_at_once_drives_and_one_more_is_a_spare(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=endpoint(), least=2, most=2) as job:
        nodes = {name: job.start(name) for name in ("a", "b", "c")}
        lines = job.wait_for("two workers", lambda: job.living() if len(job.living()) == 2 else [])
        first, second = sorted(lines, key=lambda line: line["RANK"])
        names = {first["NODE"], second["NODE"]}
        assert {line["WORLD_SIZE"] for line in lines} == {"2"}
        assert [line["GROUP_RANK"] for line in (first, second)] == ["0", "1"]
        assert all(line["TORCHELASTIC_RUN_ID"] == "a job" for line in lines)
        drivers = [node for node in nodes.values() if "this node runs the driver" in node.err]
        assert [driver.name for driver in drivers] == [first["NODE"]]
        (spare,) = nodes.keys() - names
        job.wait_for("the spare has joined", lambda: "this host has joined job" in nodes[spare].err)
        # One that is killed takes its workers along, and the spare takes its place.
        nodes[second["NODE"]].signal(signal.SIGKILL)
        job.wait_for_world(first["NODE"], spare)
        assert second["pid"] not in [line["pid"] for line in job.living()]
        # Each shows what its own workers write; the driver shows all.
        job.wait_for("the spare shows its own", lambda: f"of 2 on {spare}" in nodes[spare].out)
        assert f"of 2 on {first['NODE']}" not in nodes[spare].out
        job.wait_for("the driver shows all", lambda: f"of 2 on {spare}" in drivers[0].out)
        job.end(0)
        assert drivers[0].wait() == 0
        assert nodes[spare].wait() == 0
        assert "the job has succeeded: all workers of round" in nodes[spare].err
        # The port of the job before is in nobody's way.
        job.begin_again()
        again = [job.start(name) for name in ("d", "e")]
        job.wait_for_world("d", "e")
        job.end(0)
        assert [node.wait() for node in again] == [0, 0]


def test_a_late_node_is_taken_in_and_leaves_by_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "of-the-late"
    folder.mkdir()
    given = {"reset_limit": 0}
    with NodesJob(tmp_path, endpoint=endpoint(), least=1, most=2) as job:
        driver = job.start(
            "a", given=given, env={"OMP_NUM_THREADS": "3", "ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}
        )
        assert job.wait_for_world("a")[0]["OMP_NUM_THREADS"] == "3"
        env = {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "7", "RANK": "12", "MASTER_ADDR": "of-another-job"}
        late = job.start(
            "b", given=given, env=env | {"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}, cwd=folder
        )
        world = job.wait_for_world("a", "b")
        # A worker has its own node's variables and folder, and nothing of the secret.
        assert [world[rank]["NODE"] for rank in (0, 1)] == ["a", "b"]
        assert (world[0]["OMP_NUM_THREADS"], world[1]["OMP_NUM_THREADS"]) == ("3", "5")
        assert "CUDA_VISIBLE_DEVICES" not in world[0]
        assert world[1]["CUDA_VISIBLE_DEVICES"] == "7"
        assert (world[0]["cwd"], world[1]["cwd"]) == (str(tmp_path), str(folder))
        assert world[1].get("MASTER_ADDR") != "of-another-job"
        assert not any("ELASTIC_DRIVER_JOIN_TOKEN" in line for line in world.values())
        late.signal(signal.SIGTERM)
        assert late.wait() == 128 + signal.SIGTERM
        job.wait_for_world("a")
        # It may come again. A job that fails ends all nodes, and says why.
        again = job.start("c", given=given, env={"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"})
        job.wait_for_world("a", "c")
        job.end(3)
        assert again.wait() == 1
        assert driver.wait() in (1, 4)
        assert "the job has failed: " in again.err


def test_a_late_node_stops_nobody_before_it_has_imported(tmp_path: Path) -> None:
    """What it imports is held up by the test; as long as that takes the others train on."""
    folder, begun, go = tmp_path / "lib", tmp_path / "begun", tmp_path / "go"
    folder.mkdir()
    (folder / "slow.py").write_text(
        "import os, time\n"
        "if os.environ['NODE'] == 'b':\n"
        f"    open({str(begun)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    given, env = {"preload": ["slow"]}, {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    with NodesJob(tmp_path, endpoint=endpoint(), least=1, most=2) as job:
        driver = job.start("a", given=given, env=env)
        alone = job.wait_for_world("a")[0]
        late = job.start("b", given=given, env=env)
        job.wait_for("the import", begun.exists)
        assert [line["pid"] for line in job.living()] == [alone["pid"]]
        go.touch()
        assert job.wait_for_world("a", "b")[0]["pid"] != alone["pid"]
        assert len(job.lines()) == 3, "the round has ended once"
        job.end(0)
        assert (driver.wait(), late.wait()) == (0, 0)


def test_when_the_driver_is_killed_a_node_of_its_machine_takes_over(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=endpoint(), least=1, most=2) as job:
        driver = job.start("a")
        job.wait_for_world("a")
        other = job.start("b")
        job.wait_for_world("a", "b")
        driver.signal(signal.SIGKILL)
        job.wait_for_world("b")
        assert "its workers on this node were stopped" in other.err
        assert "this node runs the driver" in other.err
        job.end(0)
        assert other.wait() == 0


def test_nodes_that_were_started_otherwise_are_refused(tmp_path: Path) -> None:
    token, other_token = tmp_path / "token", tmp_path / "other"
    for file, text in ((token, "one token of this test"), (other_token, "quite another token")):
        file.write_text(f"{text}\n")
        file.chmod(0o600)
    with_token = {"join_token_file": str(token)}
    with NodesJob(tmp_path, endpoint=endpoint(), least=2, most=3) as job:
        driver = job.start("a", given=with_token)
        job.wait_for("a driver", lambda: "this node runs the driver" in driver.err)
        wrong = [
            job.start("command", given=with_token, command=[*WORKER, "--lr", "0.1"]),
            job.start("id", given=with_token, run_id="another job"),
            job.start("nnodes", given=with_token, most=4),
            job.start("token", given={"join_token_file": str(other_token)}),
        ]
        assert [node.wait() for node in wrong] == [2] * 4
        command, run_id, nnodes, strange = (node.err for node in wrong)
        assert "has the command " in command
        assert "node_worker.py --lr 0.1, and the job " in command
        assert "has --rdzv-id another job, and the job a job" in run_id
        assert "has --nnodes 2:4, and the job 2:3" in nnodes
        assert "check that all nodes have the same join token" in strange
        assert all(text.count("\n") == 1 for text in (command, run_id, nnodes, strange))
        refused = "rejected a node: all nodes must be started with the same options: node "
        job.wait_for("the driver says so, too", lambda: driver.err.count(refused) == 3)
        # All that has cost the job nothing.
        right = job.start("b", given=with_token)
        job.wait_for_world("a", "b")
        job.end(0)
        assert (driver.wait(), right.wait()) == (0, 0)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"], ids=("none", "404"))
def test_a_stranger_at_the_endpoint(tmp_path: Path, answer: bytes) -> None:
    """It listens there and says nothing, or what no driver says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                taken.append(sock)
                if answer:
                    sock.recv(4096)
                    sock.sendall(answer)

        thread = threading.Thread(target=serve, name="stranger")
        thread.start()
        port = server.getsockname()[1]
        try:
            with NodesJob(tmp_path, endpoint=f"127.0.0.1:{port}", least=2, most=2) as job:
                env = {"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}
                conf = {"join_timeout": "150" if answer else "3"}
                node = job.start("a", env=env, node_rank=1, conf=conf)
                assert node.wait() == (2 if answer else 1), node.err
                assert (
                    "it is another program, or another version of elastic_driver; check that the port is the job's"
                    if answer
                    else "stops waiting for the driver"
                ) in node.err
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(150)
            for sock in taken:
                sock.close()


def test_an_endpoint_that_nobody_answers_at(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=endpoint(), least=2, most=2) as job:
        env = {"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}
        node = job.start("a", env=env, node_rank=1, conf={"join_timeout": "5"})
        # A name that nobody has: it may be that of a pod which is not there yet.
        nameless = job.start("b", env=env, endpoint="no-such-host.invalid:29400", conf={"join_timeout": "5"})
        assert (node.wait(), nameless.wait()) == (1, 1)
        assert ": nothing listens there (connection refused); waiting for up to" in node.err
        assert "(connection refused); this node stops waiting for the driver at " in node.err
        assert "the name no-such-host.invalid does not resolve yet" in nameless.err


def test_a_node_shows_its_own_workers_as_its_flags_say_and_leaves_by_their_signals(tmp_path: Path) -> None:
    flags = {"log_line_prefix_template": "<${role_name} ${rank} ${local_rank}> ", "signals_to_handle": "SIGQUIT"}
    given = {"torchrun": {**flags, "local_ranks_filter": "1"}}
    with NodesJob(tmp_path, endpoint=endpoint(), least=1, most=2, nproc_per_node=2, role="trainer") as job:
        driver = job.start("a")
        job.wait_for_world("a")
        late = job.start("b", given=given)
        job.wait_for_world("a", "b")
        job.wait_for("what it shows", lambda: "<trainer 3 1> I am rank 3 of 4 on b" in late.out)
        assert "I am rank 2" not in late.out
        job.wait_for("the driver shows all", lambda: all(f"I am rank {rank} of 4" in driver.out for rank in range(4)))
        driver.signal(signal.SIGUSR1)
        job.wait_for("passed on to other hosts, too", lambda: "rank 3 was sent SIGUSR1" in late.out)
        late.signal(signal.SIGUSR1)
        job.wait_for("a node passes it on to its own", lambda: late.out.count("rank 3 was sent SIGUSR1") == 2)
        job.wait_for("the driver to its own", lambda: "rank 0 was sent SIGUSR1" in driver.out)
        assert driver.out.count("rank 0 was sent SIGUSR1") == 1
        late.signal(signal.SIGQUIT)
        assert late.wait() == 128 + signal.SIGQUIT
        assert "rank 3 was sent SIGQUIT" in late.out
        assert "SIGQUIT: leaving the job" in late.err
        job.wait_for_world("a")
        job.end(0)
        assert driver.wait() == 0


def test_nodes_of_unequal_size_whose_script_fails_at_its_start(tmp_path: Path) -> None:
    """As users start them. Nobody has asked for another try, so there is none; who counts nodes is told what counts."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    words = [sys.executable, "-m", "elastic_driver.cli.main", "--nnodes", "2", "--rdzv-endpoint", endpoint()]
    said: dict[int, str] = {}
    nodes = [
        subprocess.Popen(
            [*words, "--node-rank", str(rank), "--nproc-per-node", str(1 + rank), str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank, node in enumerate(nodes):
            said[rank] = node.communicate(timeout=150)[1]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [1, 1], said
    assert "the training failed 2 times in a row, the same error each time" in said[0]
    assert ", within the first 60 s of the training; --max-restarts N would allow retries" in said[0]
    assert "has --nproc-per-node 2, but the driver has 1: --nnodes is converted to workers" in said[0]
    assert "round 3" not in said[0]


def test_a_signal_ends_a_node_that_waits(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=endpoint(), least=2, most=2) as job:
        env = {"ELASTIC_DRIVER_JOIN_TOKEN": "a token of the test's own"}
        node = job.start("a", env=env, node_rank=1)
        job.wait_for("it waits", lambda: "waiting for up to " in node.err)
        node.signal(signal.SIGTERM)
        assert node.wait() == 128 + signal.SIGTERM
        driver = job.start("b", env=env)
        job.wait_for("a driver", lambda: "this node runs the driver" in driver.err)
        driver.signal(signal.SIGINT)
        assert driver.wait() == 128 + signal.SIGINT


def test_a_command_that_is_not_there_is_told_by_the_driver(tmp_path: Path) -> None:
    with NodesJob(tmp_path, endpoint=endpoint(), least=1, most=1) as job:
        node = job.start("a", command=[sys.executable + "-none"])
        assert node.wait() == 2
        assert "there is no such file" in node.err
