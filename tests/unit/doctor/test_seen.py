"""What the events of a checkup's job say of its hosts."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.doctor.seen import Link, Seen

pytestmark = pytest.mark.unit


def seen(*records: dict[str, Any]) -> Seen:
    return Seen().take_all(records)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": 0.0, **fields}


READY = event("host_ready", host="node1", address="10.0.0.1", joined=0)
REFUSED = event("host_unready", host="node1", reason="connection refused", permanent=False)


def test_a_host_is_unready_until_it_has_an_agent() -> None:
    assert seen(REFUSED).why_not("node1") == "connection refused"
    later = seen(REFUSED, READY)
    assert later.why_not("node1") == ""
    assert later.addresses == {"node1": "10.0.0.1"}
    assert later.why_not("node2") == ""


def test_what_the_network_check_says() -> None:
    links = [{"hosts": ["node1", "node2"], "rtt_ms": 0.2, "mbit_s": 900.0}]
    checked = event("network_checked", admitted=["node1"], barred={"node3": "it cannot reach"}, links=links, slow=["s"])
    found = seen(READY, checked, checked)
    assert found.links == {("node1", "node2"): Link(("node1", "node2"), 0.2, 900.0)}
    assert found.slow == ["s"]
    assert found.why_not("node3") == "it cannot reach"
    again = event("network_checked", admitted=["node3"], barred={}, links=[], slow=[])
    assert seen(checked, again).why_not("node3") == ""


def test_how_a_worker_has_ended() -> None:
    killed = event("worker_exited", worker="node1[0]#0", returncode=-9, expected=False)
    assert seen(killed).why_not("node1") == "its worker ended by signal 9"
    assert seen({**killed, "expected": True}).why_not("node1") == ""
    assert seen({**killed, "returncode": 0}).why_not("node1") == ""
    how, alike = "exited with code 1", ["node2[0]#0"]
    first = event("first_failure", worker="node1[0]#0", how=how, last_lines=["a", "No module b\n"], alike=alike)
    for host in ("node1", "node2"):
        assert seen(killed, first).why_not(host) == "its worker exited with code 1: No module b"
    hung = event("worker_hung", worker="node1[0]#0", reason="silent for 10 s")
    assert seen(hung, killed, first).why_not("node1") == "its worker hangs: silent for 10 s"
    lost = event("host_lost", host="node1", reason="its agent disconnected")
    assert seen(hung, lost).why_not("node1") == "its agent disconnected"


def formed(*hosts: str) -> dict[str, Any]:
    members = [{"rank": rank, "worker": f"{host}[0]#0", "pid": 1} for rank, host in enumerate(hosts)]
    return event("round_formed", size=len(hosts), members=members, cause="start")


def test_a_host_that_is_back_in_a_round_is_in_order() -> None:
    """What it was away for is remembered."""
    lost = event("host_lost", host="node1", reason="its agent was not heard for 5 s")
    killed = event("worker_exited", worker="node1[0]#0", returncode=-9, expected=False)
    hung = event("worker_hung", worker="node1[0]#0", reason="silent for 30 s")
    for reason, *records in (
        ("its agent was not heard for 5 s", lost),
        ("its agent was not heard for 5 s", lost, killed),
        ("its worker ended by signal 9", killed),
        ("its worker hangs: silent for 30 s", hung),
    ):
        away = seen(READY, formed("node1"), *records)
        assert away.why_not("node1") == reason
        back = away.take_all([READY, formed("node1")])
        assert (back.why_not("node1"), back.interrupted) == ("", {"node1": reason})


def test_a_host_that_is_back_is_waited_for_unless_its_worker_has_failed() -> None:
    lost = event("host_lost", host="node1", reason="its agent was not heard for 5 s")
    killed = event("worker_exited", worker="node1[0]#0", returncode=-9, expected=False)
    assert seen(READY, lost, killed, READY).why_not("node1") == ""
    assert seen(READY, killed, READY).why_not("node1") == "its worker ended by signal 9"


def test_flags_that_the_user_did_not_give_are_not_named() -> None:
    """The script of this job, and its limits, are the doctor's."""
    message = (
        "no worker called hvd.init() within 8 s (--start-timeout); missing: worker node1[0]. Does the script call it?"
    )
    assert seen(event("job_ended", message=message)).message == (
        "no worker was ready within 8 s; missing: worker node1[0]"
    )
    how = "did not call hvd.init() within 8 s (--start-timeout)"
    first = event("first_failure", worker="node1[0]#0", how=how, last_lines=[], alike=[])
    assert seen(first).why_not("node1") == "its worker was not ready within 8 s"
    hung = event("worker_hung", worker="node1[0]#0", reason="silent for 30 s (--heartbeat-timeout)")
    assert seen(hung).why_not("node1") == "its worker hangs: silent for 30 s"


def test_who_is_in_the_round() -> None:
    members = [{"rank": 0, "worker": "node1[0]#0", "pid": 1}, {"rank": 1, "worker": "node2[0]#0", "pid": 2}]
    cause = "host node3 lost (worker node3[0] could not be started: there is no such command)"
    formed = event("round_formed", size=2, members=members, cause=cause)
    ended = event("job_ended", exit_code=0, message="all workers ended with 0")
    found = seen(formed, event("of a later version"), ended)
    assert (found.round_size, found.members, found.message) == (2, {"node1", "node2"}, "all workers ended with 0")
    assert (found.why_not("node3"), found.why_not("node1")) == (cause, "")
