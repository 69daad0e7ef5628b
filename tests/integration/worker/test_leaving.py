"""SIGTERM and SIGUSR1 to a worker, while the driver takes its time to answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.integration

# The driver's answers come through a pipe, in the order of the questions; the training repeats what it reads.
PROGRAM = """
import os, signal, sys
from elastic_driver.worker.rounds import leaving

def ask(name):
    print("asked", name, flush=True)
    answer = os.read(int(sys.argv[1]), 1)
    if answer == b"e":
        raise ValueError("a bug")
    return answer == b"y"

leaving.install(ask)
leaving.install(ask)
print("ready", flush=True)
for line in sys.stdin:
    print("trains", line.strip(), flush=True)
"""


class Worker:
    """The program, and both ends of its talk."""

    def __init__(self) -> None:
        read, self._answers = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(read,),
        )
        os.close(read)
        assert self.hears() == "ready"

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answer(self, letter: str) -> None:
        os.write(self._answers, letter.encode())

    def trains(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write("on\n")
        self.process.stdin.flush()
        return self.hears() == "trains on"

    def close(self) -> None:
        os.close(self._answers)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


def test_the_training_goes_on_until_there_is_an_answer(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGTERM)
    assert worker.hears() == "asked SIGTERM"
    assert worker.trains()
    worker.process.send_signal(signal.SIGUSR1)  # asked when the one before is answered
    assert worker.trains()
    worker.answer("y")
    assert worker.hears() == "asked SIGUSR1"
    worker.answer("y")
    assert worker.trains()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.hears() == "asked SIGTERM"
    assert worker.trains()
    worker.answer("n")
    assert worker.process.wait() == -signal.SIGTERM, "it is to end at once"


def test_who_is_not_to_stay_ends_by_its_signal(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGUSR1)
    assert worker.hears() == "asked SIGUSR1"
    worker.answer("n")
    assert worker.process.wait() == -signal.SIGUSR1


def test_a_question_that_fails_ends_it(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGTERM)
    assert worker.hears() == "asked SIGTERM"
    worker.answer("e")
    assert worker.process.wait() == -signal.SIGTERM
    assert "cannot ask the driver" in worker.process.communicate()[1]


# The signal that is to wake the main thread comes when it has looked for signals and is about to sleep.
LOST = """
import signal, sys, time
from elastic_driver.worker.rounds import leaving

sent = []

def lose_the_first(thread, number, kill=signal.pthread_kill):
    sent.append(number)
    if len(sent) > 1:
        kill(thread, number)

signal.pthread_kill = lose_the_first
leaving.install(lambda name: False)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_lost_signal_keeps_nobody() -> None:
    with subprocess.Popen([sys.executable, "-c", LOST], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait() == -signal.SIGTERM
