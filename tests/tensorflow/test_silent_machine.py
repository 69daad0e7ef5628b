"""A worker's machine that loses its network: nothing of the coordinator waits for it for longer than was said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import pytest

from tests.support.network.namespaces import Namespaces

pytestmark = [pytest.mark.tensorflow, pytest.mark.machines]

PORT = 2222
TIMEOUT_S = 4.0
# Far less than the system's own limit, which is a quarter of an hour; and enough for a busy machine.
PATIENCE_S = 60.0

SERVER = f"""
import sys, tensorflow as tf
server = tf.distribute.Server(tf.train.ClusterSpec({{"worker": ["0.0.0.0:{PORT}"]}}), job_name="worker", task_index=0)
print("it serves", flush=True)
server.join()
"""

CHIEF = f"""
import json, sys, time
import tensorflow as tf
from elastic_driver.tensorflow import ElasticClusterCoordinator

ps, near, far = sys.argv[1:]
spec = tf.train.ClusterSpec({{"ps": [ps], "worker": [near, far], "chief": ["0.0.0.0:1"]}})
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc", task_type="chief", task_id=0)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = ElasticClusterCoordinator(strategy, worker_timeout_s={TIMEOUT_S})
with strategy.scope():
    total = tf.Variable(0)

def a_function():
    @tf.function
    def add():
        total.assign_add(1)
        return tf.distribute.coordinator.experimental_get_current_worker_index()
    return add

def tell(**more):
    states = {{worker.index: worker.state.value for worker in coordinator.workers()}}
    print(json.dumps({{"states": states, "total": int(total.numpy()), **more}}), flush=True)

add = a_function()
for line in sys.stdin:
    began = time.monotonic()
    if line == "run\\n":
        for _ in range(50):
            coordinator.schedule(add)
        coordinator.join()
    elif line == "trace\\n":
        # The runtime tells all servers of it, and waits for them with the interpreter's lock held.
        coordinator.schedule(a_function()).fetch()
    tell(took_s=time.monotonic() - began)
"""


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(2) as made:
        yield made


def ask(chief: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert chief.stdin is not None
    assert chief.stdout is not None
    chief.stdin.write(f"{what}\n")
    chief.stdin.flush()
    answer: dict[str, Any] = json.loads(_line(chief.stdout))
    return answer


def _line(stream: IO[str]) -> str:
    line = stream.readline()
    assert line, "it has ended"
    return line


def test_its_closure_goes_to_another_and_new_functions_are_traced(hosts: Namespaces) -> None:
    pytest.importorskip("tensorflow", reason="scripts/install-tensorflow installs it")
    near, far = hosts
    started: list[subprocess.Popen[str]] = []

    def start(host: Any, program: str, *words: str) -> subprocess.Popen[str]:
        process = host.popen(
            [sys.executable, "-c", program, *words],
            env={**host.environment(), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    try:
        other = SERVER.replace(str(PORT), str(PORT + 1))
        servers = [start(near, SERVER), start(near, other), start(far, SERVER)]
        for server in servers:
            assert server.stdout is not None
            _line(server.stdout)
        addresses = f"{near.ipv4}:{PORT}", f"{near.ipv4}:{PORT + 1}", f"{far.ipv4}:{PORT}"
        chief = start(near, CHIEF, *addresses)
        assert ask(chief, "run")["total"] == 50
        for what, least in (("run", 50), ("trace", 1)):
            before = ask(chief, "run")["total"]
            far.cut()
            answer = ask(chief, what)
            assert answer["took_s"] < PATIENCE_S
            assert answer["total"] >= before + least
            assert ask(chief, "run")["states"]["0"] == "running"
            far.heal()
            while ask(chief, "run")["states"]["1"] != "running":
                pass
    finally:
        for process in started:
            process.kill()
            process.communicate()
