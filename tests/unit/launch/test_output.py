"""How a stream of bytes becomes lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.launch.local.output import MAX_LINE, LineSplitter

pytestmark = pytest.mark.unit


def lines_of(*chunks: bytes, max_line: int = MAX_LINE) -> list[bytes]:
    splitter = LineSplitter(max_line)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.flush()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"one\ntwo\n", [b"one", b"two"]),
        (b"one\n\ntwo\n", [b"one", b"", b"two"]),
        (b"one\r\ntwo\r\n\r\n", [b"one", b"two", b""]),
        (b"10%\r20%\r30%\n", [b"10%", b"20%", b"30%"]),
        (b"\r10%\r20%\n", [b"10%", b"20%"]),
        (b"unfinished", [b"unfinished"]),
        (b"last\r", [b"last"]),
        (b"\x00\xff\n", [b"\x00\xff"]),
    ],
)
def test_lines(data: bytes, lines: list[bytes]) -> None:
    assert lines_of(data) == lines


def test_a_line_is_there_as_soon_as_it_ends() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"on") == []
    assert splitter.rest == b"on"
    assert splitter.feed(b"e\rtw") == [b"one"]
    assert splitter.feed(b"o\n") == [b"two"]
    assert splitter.flush() == []


def test_crlf_in_two_reads_is_one_end() -> None:
    assert lines_of(b"one\r", b"\ntwo\r", b"\r\n") == [b"one", b"two", b""]


def test_a_character_in_two_reads_stays_whole() -> None:
    text = "é€😀\n".encode()
    for cut in range(len(text)):
        assert lines_of(text[:cut], text[cut:]) == [text[:-1]]


def test_a_long_line_comes_in_pieces_that_keep_characters_whole() -> None:
    text = "😀" * 7
    pieces = lines_of(text.encode(), max_line=10)
    assert [piece.decode() for piece in pieces] == ["😀😀", "😀😀", "😀😀", "😀"]


def test_a_line_of_the_longest_length_is_not_cut() -> None:
    assert lines_of(b"x" * MAX_LINE + b"\nnext\n") == [b"x" * MAX_LINE, b"next"]
    assert lines_of(b"x" * (MAX_LINE + 1) + b"\n") == [b"x" * MAX_LINE, b"x"]


def test_endless_line_keeps_memory_bounded() -> None:
    splitter = LineSplitter()
    for _ in range(100):
        splitter.feed(b"x" * 40000)
        assert len(splitter.rest) <= MAX_LINE


@pytest.mark.property
@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r", "é".encode(), "😀".encode(), b"\x80", b"bc"]), max_size=60),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_the_division_into_reads_makes_no_difference(data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(data)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    chunks = [whole[start:end] for start, end in itertools.pairwise(places)]
    expected = lines_of(whole, max_line=8)
    assert lines_of(*chunks, max_line=8) == expected
    assert all(len(line) <= 8 for line in expected)
    # Nothing but line ends is lost.
    assert b"".join(expected) == whole.replace(b"\n", b"").replace(b"\r", b"")
