"""torchrun's notations for output: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from elastic_driver.settings.logs import Logs, Streams, read_filters, read_ranks, read_streams

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("0", [0, 0, 0]),
        ("1", [1, 1, 1]),
        (" 2 ", [2, 2, 2]),
        ("3", [3, 3, 3]),
        ("0:3,1:2", [3, 2, 0]),
        ("2:1", [0, 0, 1]),
        ("0:0", [0, 0, 0]),
    ],
)
def test_streams(text: str, bits: list[int]) -> None:
    streams = read_streams(text)
    assert [streams.of(rank) for rank in range(3)] == bits
    assert bool(streams) == any(bits)


def test_a_rank_may_have_more_digits_than_under_torchrun() -> None:
    assert read_streams("12:3").of(12) == 3


@pytest.mark.parametrize("text", ["", "4", "-1", "x", "0:4", "0:", ":3", "0=3", "0:3;1:3", "0:3,", "3,0:1", "00000:1"])
def test_streams_that_are_rubbish(text: str) -> None:
    with pytest.raises(ValueError, match="is neither 0"):
        read_streams(text)


def test_a_rank_twice() -> None:
    with pytest.raises(ValueError, match="names local rank 1 twice"):
        read_streams("1:3,0:1,1:2")


def test_ranks() -> None:
    assert read_ranks("0, 2,11") == {0, 2, 11}
    for text in ("", "0,", "a", "-1", "0 1"):
        with pytest.raises(ValueError, match="is not a list of local ranks"):
            read_ranks(text)


def test_filters() -> None:
    assert read_filters("apple,orange") == ("apple", "orange")
    assert read_filters("a,,b,c") == ("a,b", "c")
    assert read_filters("loss = ,step") == ("loss = ", "step")
    assert read_filters("") == ()


def test_what_needs_files() -> None:
    assert not Logs().keeps_files
    assert not Logs(prefix="", shown=frozenset((0,))).keeps_files
    assert Logs(redirects=Streams(1)).keeps_files
    assert Logs(tee=Streams(by_rank={1: 2})).keeps_files
    assert Logs(stderr_filters=("x",)).keeps_files
