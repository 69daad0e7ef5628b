"""Whose connections torch's Gloo has: what members make of each other's ends."""

from __future__ import annotations

import pytest

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.engine.collectives import Group
from elastic_driver.worker.engine.own_sockets import Ends, check_ends

pytestmark = pytest.mark.unit


def world() -> list[list[Ends]]:
    """Ranks 4, 5 and 7; who comes later has dialled who was there."""
    return [
        [("a:1", "b:9"), ("a:1", "c:9")],
        [("b:9", "a:1"), ("b:1", "c:8")],
        [("c:9", "a:1"), ("c:8", "b:1")],
    ]


def check(told: list[list[Ends]], index: int = 0) -> None:
    check_ends(Group("global", (4, 5, 7), index), told)


def test_connections_that_fit_are_taken() -> None:
    for index in range(3):
        check(world(), index)


def test_a_stranger_is_refused() -> None:
    told = world()
    told[0].append(("a:1", "x:6"))
    with pytest.raises(HorovodInternalError, match="x:6 is connected to rank 4 and belongs to no rank of this job"):
        check(told)
    check(told, 1)  # the others learn of it by the closed connections


def test_a_relay_is_refused_at_both_ends() -> None:
    told = world()
    told[0][0], told[1][0] = ("a:1", "x:5"), ("b:9", "x:6")
    for index in (0, 1):
        with pytest.raises(HorovodInternalError, match="belongs to no rank"):
            check(told, index)


def test_a_missing_connection_is_named() -> None:
    told = world()
    del told[0][1]
    with pytest.raises(HorovodInternalError, match="with rank 7"):
        check(told)
