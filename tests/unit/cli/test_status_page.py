"""What elasticrun status shows people of the driver's answer."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.cli.status import page

pytestmark = [pytest.mark.unit]


def worker(host: str, slot: int, rank: int | None, **more: Any) -> dict[str, Any]:
    known = {"worker": f"{host}[{slot}]#0", "host": host, "slot": slot, "rank": rank, "round_id": 2, "since_s": 61.0}
    return {**known, "phase": "member", "running": True, "commits": 12, "pid": 4000 + slot, **more}


ANSWER: dict[str, Any] = {
    "job_id": "3f2a",
    "command": ["python", "train.py", "a b"],
    "explain": "round 2 runs with 2 workers",
    "age_s": 7300.0,
    "phase": "running",
    "round_id": 2,
    "commits": 12,
    "resets": 1,
    "hosts": [{"name": "a", "slots": 2}, {"name": "b", "slots": 4, "labels": ["rack=r1", "spot"]}],
    "blacklisted": ["b"],
    "left_out": ["b"],
    "silent": ["b"],
    "drained": ["b"],
    "workers": [
        worker("gone", 0, None, phase="booting", running=False, commits=0, pid=None, since_s=3.0),
        worker("a", 1, 1, running=False),
        worker("a", 0, 0),
    ],
}


def test_a_page() -> None:
    assert page("3f2a", ANSWER) == (
        "job 3f2a, running, 2 h old: python train.py 'a b'\n"
        "round 2 runs with 2 workers\n"
        "round 2, from commit 12, 1 reset\n"
        "\n"
        "HOST  SLOTS  WORKERS\n"
        "a         2        2\n"
        "b         4        0  blacklisted, drained, left out, not responding, rack=r1, spot\n"
        "gone      -        1  not listed\n"
        "\n"
        "RANK  WORKER   PHASE      FOR  COMMIT   PID\n"
        "   0  a[0]     training  61 s      12  4000\n"
        "   1  a[1]     joining   61 s      12  4001\n"
        "   -  gone[0]  booting    3 s       0     -"
    )


def test_slots_that_are_drained_are_no_drained_host() -> None:
    answer = {**ANSWER, "drained": [], "drained_slots": {"a": [1], "b": [0, 2]}}
    lines = page("3f2a", answer).splitlines()
    assert "a         2        2  slot 1 drained" in lines
    assert any(line.startswith("b ") and ", slots 0, 2 drained," in line for line in lines)


def test_a_round_that_is_stalled_does_not_run() -> None:
    answer = {**ANSWER, "stalled": {"since_s": 12.0, "waits_for": ["a[1]#0"]}}
    assert page("3f2a", answer).startswith("job 3f2a, stalled, 2 h old: ")


def test_figures_of_the_training() -> None:
    workers = [worker("a", 0, 0, commits=31), worker("a", 1, 1)]
    more: dict[str, Any] = {"workers": workers, "steps_per_s": 5.188, "steps": 340, "newest_commit": 31}
    more["goodput"] = {"seconds": {}, "share": 0.9333}
    shown = page("3f2a", {**ANSWER, **more, "suspected": [{"worker": "a[1]#0"}]})
    assert "from commit 12, 1 reset\n1 suspected, 5.19 steps/s, commit 31, step 340, goodput 93.3 %\n\n" in shown
    reported = {"loss": 0.312345, "accuracy\x1b[1m": None, **{f"n{index}": 1e9 for index in range(5)}}
    shown = " ".join(page("3f2a", {**ANSWER, **more, "figures": reported}).split())
    assert "goodput 93.3 %, loss 0.3123, accuracy [1m nan, n0 1e+09, n1 1e+09, 3 more figures HOST" in shown
    assert "\x1b" not in shown
    # Of workers that are restarted, and before anything is known of them.
    assert "commit" not in page("3f2a", {**ANSWER, **more, "on_change": "restart"})
    nothing = {"workers": [], "steps_per_s": None, "steps": 0}
    assert "1 reset\n\nHOST" in page("3f2a", {**ANSWER, **nothing})


def test_workers_that_are_restarted_have_steps() -> None:
    workers = [worker("a", 1, 1, running=False, commits=0), worker("a", 0, 0, commits=40)]
    shown = page("3f2a", {**ANSWER, "on_change": "restart", "workers": workers})
    assert "\nround 2, 1 reset\n" in shown
    assert shown.splitlines()[-3:] == [
        "RANK  WORKER  PHASE      FOR  STEP   PID",
        "   0  a[0]    training  61 s    40  4000",
        "   1  a[1]    running   61 s     -  4001",
    ]


def test_no_commits_are_shown_of_workers_that_tell_of_none() -> None:
    workers = [worker("a", 0, 0, commits=0)]
    shown = page("3f2a", {**ANSWER, "commits": 0, "tells_commits": False, "workers": workers})
    assert "\nround 2, 1 reset\n" in shown
    assert shown.splitlines()[-1].split() == ["0", "a[0]", "training", "61", "s", "-", "4000"]


def test_a_rank_is_shown_of_those_in_the_round_only() -> None:
    workers = [worker("a", 0, 0, phase="ready"), worker("b", 0, 0), worker("c", 0, 0, phase="leaving")]
    rows = page("3f2a", {**ANSWER, "workers": workers}).splitlines()[-3:]
    assert [row.split()[:3] for row in rows] == [
        ["0", "b[0]", "training"],
        ["-", "a[0]", "ready"],
        ["-", "c[0]", "leaving"],
    ]


def test_servers_and_their_chief() -> None:
    servers = [
        worker("b", 0, None, parameter_server=None, address=""),
        worker("a", 1, None, parameter_server=None, address="10.0.0.1:5001"),
        worker("a", 0, None, parameter_server=0, address="10.0.0.1:5000"),
    ]
    servers[0] |= {"phase": "booting", "running": False, "pid": None}
    answer = {**ANSWER, "on_change": "no_rounds", "workers": servers, "resets": 2}
    chief = {"number": 3, "phase": "running", "since_s": 200.0}
    shown = page("3f2a", {**answer, "chief": chief})
    assert "\nchief 3 running for 3 min, 2 unplanned restarts\n" in shown
    assert shown.endswith(
        "TASK    WORKER  PHASE     FOR  ADDRESS         PID\n"
        "ps0     a[0]    serving  61 s  10.0.0.1:5000  4000\n"
        "worker  a[1]    serving  61 s  10.0.0.1:5001  4001\n"
        "worker  b[0]    booting  61 s  -                 -"
    )
    assert "\nno chief yet, 2 unplanned restarts\n" in page("3f2a", {**answer, "chief": None})


def test_a_job_without_hosts_yet() -> None:
    nothing = {**ANSWER, "hosts": [], "workers": [], "explain": "waiting for the first hosts"}
    assert page("3f2a", nothing).endswith("waiting for the first hosts\nround 2, from commit 12, 1 reset")


def test_a_driver_of_another_version_tells_less() -> None:
    answer = {key: value for key, value in ANSWER.items() if key not in ("left_out", "silent")}
    assert "b         4        0  blacklisted, drained, rack=r1, spot" in page("3f2a", answer)


def test_long_names_fit_into_eighty_columns() -> None:
    name = "ip-10-0-0-1.a-region-of-the-world.compute.internal." + "x" * 60
    long = {
        **ANSWER,
        "command": ["python", "train.py", *(f"--flag-{number}" for number in range(20))],
        "hosts": [{"name": name, "slots": 8}],
        "drained": [name],
        "workers": [worker(name, 0, 0)],
    }
    assert max(map(len, page("3f2a", long, width=80).split("\n"))) <= 80
    assert name in page("3f2a", long), "but whole where it is not for a terminal"


def test_what_others_have_written_does_not_steer_the_terminal() -> None:
    assert "\x1b" not in page("3f2a", {**ANSWER, "command": ["\x1b[2J"], "explain": "\x1b[2J"})
