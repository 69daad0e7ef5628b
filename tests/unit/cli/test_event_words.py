"""Events as people read them in what a journal has kept."""

from __future__ import annotations

from typing import get_args

import pytest

from elastic_driver.cli.event_words import in_words
from elastic_driver.core.events import (
    ChiefExited,
    DiscoveryFailed,
    DrainRequested,
    DriverFailed,
    Event,
    HostHeard,
    HostLost,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    HostsUnusable,
    StopRequested,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReady,
    WorkerReleased,
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.words import Backend, ReadyCause

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 1, 0)
NATIVE = (Backend.NATIVE,)

WORDS: list[tuple[Event, str]] = [
    (HostsDiscovered((Host("a", 2), Host("b", 1))), "hosts: a:2, b:1"),
    (
        HostsDiscovered(
            (), (Departure("a", "its pod is deleted", 30.0),), frozenset("b"), answered=False, preparing=frozenset("c")
        ),
        "hosts: none; a is going away in 30 s: its pod is deleted; not up: b; importing: c; discovery still fails",
    ),
    (
        HostsDiscovered(tuple(Host(f"n{each}", 1) for each in range(8))),
        "hosts: n0:1, n1:1, n2:1, n3:1, n4:1, n5:1 and 2 more",
    ),
    (DiscoveryFailed("it exited with 1"), "host discovery failed: it exited with 1"),
    (HostsUnusable("a: no Python"), "no usable host: a: no Python"),
    (WorkerStarted(A), "worker a[0] has started"),
    (WorkerReady(A, 0, 0, ReadyCause.START, "", NATIVE), "worker a[0] is ready for its first round"),
    (
        WorkerReady(A, 3, 7, ReadyCause.INTERNAL_ERROR, "b[1] closed the connection", NATIVE),
        "worker a[0] is ready for the round after round 3: a collective failed (b[1] closed the connection)",
    ),
    (WorkerRunning(A, 3, 7), "worker a[0] trains in round 3, from commit 7"),
    (WorkerDying(A, 1, "exited with code 1", 0.5), "worker a[0] is about to exit: exited with code 1"),
    (
        WorkerExited(A, 1, "exited with code 1", 0.5, "ValueError: no\x1b[2J"),
        "worker a[0] exited with code 1 (ValueError: no [2J)",
    ),
    (WorkerExiting(A), "worker a[0] has finished its script"),
    (WorkerHung(A, "no heartbeat for 60.0 s", silent=True), "worker a[0] hangs: no heartbeat for 60.0 s"),
    (WorkerSpared(A), "worker a[0] had finished its script, so the command that wraps it was not killed"),
    (WorkerServing(A, "a:1234"), "worker a[0] serves at a:1234"),
    (WorkerReleased(A), "the chief has released worker a[0]"),
    (ChiefExited(2, 0, "exited with code 0"), "chief 2 exited with code 0"),
    (
        HostLost("a", "it did not respond for 5.0 s", (A,), 0.5),
        "host a is lost, and worker a[0] with it: it did not respond for 5.0 s",
    ),
    (HostLost("a", "", (), 0.5), "host a is lost"),
    (HostSilent("a", 5.04), "host a did not respond for 5.0 s"),
    (HostHeard("a"), "host a responds again"),
    (HostsReported((HostHeard("a"), HostHeard("b"))), "host a responds again; host b responds again"),
    (
        WorkersReported((WorkerExiting(A), WorkerExiting(B))),
        "worker a[0] has finished its script; worker b[1] has finished its script",
    ),
    (
        WorkersReported(tuple(WorkerStarted(WorkerId("a", slot, 0)) for slot in range(8))),
        "; ".join([*(f"worker a[{slot}] has started" for slot in range(6)), "and 2 more"]),
    ),
    (
        WorkerNotStarted(A, "no such file", 0.5, bad_command=True),
        "worker a[0] could not be started: no such file",
    ),
    (DrainRequested("a", None, "elasticrun drain"), "host a is to be drained: elasticrun drain"),
    (
        DrainRequested("a", 1, "a notice", within_s=30.0),
        "slot 1 of host a is to be drained, 30 s left: a notice",
    ),
    (DrainRequested("a", None, "elasticrun drain", undo=True), "host a may be used again: elasticrun drain"),
    (StopRequested(15, "SIGTERM"), "the job has been asked to end: SIGTERM"),
    (DriverFailed("KeyError: 1"), "internal error of the driver: KeyError: 1"),
    (TimerExpired(), "a time limit or a pause has expired"),
]


@pytest.mark.parametrize(("event", "words"), WORDS)
def test_each_event_has_words(event: Event, words: str) -> None:
    assert in_words(event) == words


def test_none_is_left_out() -> None:
    assert {type(event) for event, _ in WORDS} == set(get_args(Event))
