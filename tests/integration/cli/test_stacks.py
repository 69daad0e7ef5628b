"""elasticrun stacks, with a driver that answers what a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.cli.main import main
from elastic_driver.rendezvous.job_files import Posting
from elastic_driver.rendezvous.routes import OPERATOR, Route, RouteRequest
from tests.support.fakes.rendezvous_service import serving

pytestmark = [pytest.mark.integration]

TEXT = 'Current thread 0x0000000000000001 (most recent call first):\n  File "/a/b\x1b[2Jc.py", line 3 in step\n'
ANSWER: dict[str, Any] = {
    "stacks": [
        {"worker": "a[0]#0", "rank": 0, "host": "a", "pid": 7, "state": "S", "text": TEXT, "reason": "", "steps": 3},
        {"worker": "b[0]#0", "rank": 1, "host": "b", "pid": 8, "state": "T", "text": "", "reason": "it is stopped"},
    ],
    "waiting": [{"name": "allreduce 'w\x1b]0;x\x07'", "since_s": 12.0, "missing": [1]}],
}


@pytest.fixture
def asked(runtime: Path) -> Iterator[list[RouteRequest]]:
    requests: list[RouteRequest] = []

    def answer(request: RouteRequest) -> tuple[int, bytes]:
        requests.append(request)
        return 200, json.dumps(ANSWER).encode()

    with serving(routes=[Route("GET", "stacks", OPERATOR, answer)]) as service:
        posting = Posting.post("1f", service.socket(), ["python", "train.py"])
        assert posting is not None
        yield requests
        posting.remove()


def test_who_waits_for_whom_then_the_odd_ones(asked: list[RouteRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "allreduce 'w ]0;x ' has waited 12 s for rank 1 (host b)",
        "",
        "rank 0 (host a, pid 7, 3 steps):",
        "    /a/b [2Jc.py:3 in step",
        "",
        "rank 1 (host b, pid 8, stopped by a signal): it is stopped",
    ]
    assert len(asked) == 1


def test_one_rank_all_threads_and_json(asked: list[RouteRequest], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", "1", "--rank", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "rank 0 (host a, pid 7, 3 steps):",
        "  main thread:",
        "    /a/b [2Jc.py:3 in step",
    ]
    assert main(["stacks", "--all"]) == 0
    assert "rank 1 (host b, pid 8, stopped by a signal): it is stopped" in capsys.readouterr().out
    assert main(["stacks", "--json", "--rank", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {**ANSWER, "stacks": ANSWER["stacks"][1:]}
    assert main(["stacks", "--rank", "9"]) == 2
    assert "elasticrun: error: job 1f has no rank 9 now" in capsys.readouterr().err


def test_a_driver_that_cannot_be_asked_is_one_line(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as service:
        posting = Posting.post("1f", service.socket(), ["true"])
        assert posting is not None
        assert main(["stacks"]) == 2  # an elasticrun without this route
        posting.remove()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("elasticrun: error: job 1f: the driver rejected the request (404): ")
