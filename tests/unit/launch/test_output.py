"""How a stream of bytes becomes lines."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.lines import MAX_LINE, LineReader
from elastic_driver.launch.local.output import BarPace, WorkerOutput
from elastic_driver.launch.words import Stream
from tests.support.fakes.fleet_fakes import Sink

pytestmark = pytest.mark.unit


def lines_of(*chunks: bytes, max_line: int = MAX_LINE) -> list[bytes]:
    reader = LineReader(max_line)
    lines = [line for chunk in chunks for line in reader.feed(chunk, 0.0)]
    return lines + reader.flush()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"one\ntwo\n", [b"one", b"two"]),
        (b"one\n\ntwo\n", [b"one", b"", b"two"]),
        (b"one\r\ntwo\r\n\r\n", [b"one", b"two", b""]),
        (b"10%\r20%\r30%\n", [b"30%"]),
        (b"\r10%\r20%\n", [b"20%"]),
        (b"unfinished", [b"unfinished"]),
        (b"last\r", [b"last"]),
        (b"\x00\xff\n", [b"\x00\xff"]),
    ],
)
def test_lines(data: bytes, lines: list[bytes]) -> None:
    assert lines_of(data) == lines


def test_a_line_is_there_as_soon_as_it_ends() -> None:
    reader = LineReader()
    assert reader.feed(b"on", 0.0) == []
    assert reader.unended == [b"on"]
    assert reader.feed(b"e\ntw", 0.0) == [b"one"]
    assert reader.feed(b"o\r\n", 0.0) == [b"two"]
    assert (reader.flush(), reader.state, reader.due) == ([], b"", None)


def test_crlf_in_two_reads_is_one_end() -> None:
    assert lines_of(b"one\r", b"\ntwo\r", b"\n\r", b"\n") == [b"one", b"two", b""]


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
    reader = LineReader()
    for _ in range(100):
        reader.feed(b"x" * 40000, 0.0)
        assert len(reader.unended[0]) <= MAX_LINE


# --- bars ----------------------------------------------------------------------------------------------------------


def test_of_a_line_that_is_redrawn_the_newest_state_is_known_and_the_last_one_is_a_line() -> None:
    reader = LineReader()
    for percent in range(5):
        assert reader.feed(b"\r%3d%%" % percent, 0.0) == []
        assert reader.state == b"%3d%%" % percent
    assert reader.due is None
    # Whether it is the last one is not clear before something else comes, or nothing for a moment.
    assert reader.feed(b"\n", 1.0) == []
    assert (reader.state, reader.due) == (b"  4%", 1.25)
    assert (reader.look(1.2), reader.look(1.25)) == ([], [b"  4%"])
    assert (reader.state, reader.due) == (b"", None)
    assert reader.feed(b"ordinary\n", 1.3) == [b"ordinary"]


def test_an_ordinary_line_waits_for_no_bar_and_stands_behind_it() -> None:
    reader = LineReader()
    assert reader.feed(b"before\n\r50%\r100%\nafter\nopen", 0.0) == [b"before", b"100%", b"after"]
    assert reader.unended == [b"open"]


def test_a_carriage_return_behind_a_state_shows_it() -> None:
    reader = LineReader()
    assert reader.feed(b"10%\r", 0.0) == []
    assert reader.state == b"10%"
    reader.feed(b"20%\r", 0.0)
    assert reader.state == b"20%"


def test_a_bar_that_is_wiped_is_no_line() -> None:
    reader = LineReader()
    assert reader.feed(b"\r 50%|##  |\r           \r", 0.0) == []
    assert reader.state == b""
    assert reader.feed(b"a message\n", 0.0) == [b"a message"]
    assert reader.feed(b"\r 60%|##  |", 0.0) == []
    assert reader.state == b" 60%|##  |"


@pytest.mark.parametrize("head", [b"", b"[rank0]: "])
def test_a_traceback_behind_a_bar_begins_on_a_line_of_its_own(head: bytes) -> None:
    text = head + b"Traceback (most recent call last):"
    lines = lines_of(b"\r 50%|##  |", text + b"\n", b"  File\n")
    assert lines == [b" 50%|##  |", text, b"  File"]


UP = b"\x1b[A"


def test_nested_bars_of_tqdm_are_redrawn_in_their_rows() -> None:
    reader = LineReader()
    reader.feed(b"\router", 0.0)
    for step in range(3):  # as it writes them: each move, and each text, by itself
        for piece in (b"\n", b"\rinner %d" % step, UP):
            assert reader.feed(piece, 0.0) == []
        assert reader.state == b"inner %d" % step
        assert reader.feed(b"\router %d" % step, 0.0) == []
        assert reader.state == b"outer %d" % step
    # Wiped, a message, and drawn again.
    wiped = [b"\r       \r", b"\n", b"\r       \r", UP]
    drawn = [b"\router 3", b"\n", b"\rinner 3", UP]
    lines = [line for piece in (*wiped, b"message", b"\n", *drawn) for line in reader.feed(piece, 0.0)]
    assert lines == [b"message"]
    # The inner one leaves nothing, the outer one its last state.
    end = [b"\n", b"\r       \r", UP, b"\router 4", b"\n", b"done\n"]
    assert [line for piece in end for line in reader.feed(piece, 0.0)] == [b"outer 4", b"done"]


def test_frames_of_rich_are_redrawn() -> None:
    reader = LineReader()
    back = b"\r\x1b[2K\x1b[1A\x1b[2K"
    assert reader.feed(b"\x1b[?25lone 0\ntwo 0", 0.0) == [b"\x1b[?25lone 0"]
    for step in range(1, 3):
        assert reader.feed(back + b"one %d\n\x1b[32mtwo %d\x1b[0m" % (step, step), 0.0) == []
        assert reader.state == b"\x1b[32mtwo %d\x1b[0m" % step
    assert reader.feed(back + b"said\none 3\ntwo 3", 0.0) == [b"said"]
    assert reader.feed(back + b"one 4\ntwo 4\n", 0.0) == [b"one 4"]
    assert reader.feed(b"\x1b[?25hend\n", 0.0) == [b"two 4", b"\x1b[?25hend"]


def test_a_state_steers_no_terminal() -> None:
    reader = LineReader()
    reader.feed(b"\r\x1b[31m5\x1b[?25l0%\x07\x1b]0;title\x07 \x1b[?25h\x1b[K\n", 0.0)
    assert reader.state == b"\x1b[31m50%"


# --- what is no bar --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"Loading model ...\x1b[60G[ OK ]",
        b"Loading model ...\r\x1b[60G[ OK ]",
        b"a\x1b[20Gb\x1b[40Gc",
        b"partial text\x1b[Hmore",
        b"\x1b[2J\x1b[1;1Hcleared",
        b"\x1b[01;31m\x1b[Kmatch\x1b[m\x1b[K rest",
        b"text\x1b[2Kmore",
        b"a\x1b[999Bb",
        b"a\x1b[Bb",
        b"1\x1b[5C2\r3",
        b"\x1b7saved\r\x1b8",
        b"\x1bPq#0\x1b\\picture\rmore",
        b"a lone \x1b",
    ],
)
@pytest.mark.parametrize("before", [b"", b"\r50%\n"])
def test_a_line_that_may_be_no_bar_is_passed_on_as_it_is_and_at_once(line: bytes, before: bytes) -> None:
    ended = [b"50%"] if before else []
    assert LineReader().feed(before + line + b"\n", 0.0) == [*ended, line]
    bytewise = LineReader()
    assert [got for byte in before + line + b"\n" for got in bytewise.feed(bytes([byte]), 0.0)] == [*ended, line]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"precious\x1b[64Atop\n", [b"precious", b"top"]),
        (b"precious\x1b[65A\rtop\n", [b"precious\x1b[65A\rtop"]),
        (b"hello\x1b[2A\nworld\n", [b"hello", b"world"]),
        (b"\rbar\nprecious\x1b[A\rbar 2\nmore\n", [b"bar", b"precious", b"bar 2", b"more"]),
        (b"\rbar\n\rbar 2\x1b[Aprecious\x1b[Bmore\n", [b"barprecious", b"bar 2more"]),
        (b"\r1\n\r2\x1b[A\x1b[5Cx\n", [b"2", b"1\x1b[5Cx"]),
    ],
)
def test_where_the_cursor_goes_up_nothing_is_lost_that_no_bar_has_drawn(data: bytes, lines: list[bytes]) -> None:
    assert lines_of(data) == lines


@pytest.mark.parametrize(
    "inert",
    [b"\x1b]0;title\x07", b"\x1b]9;4;1;50\x07\r", b"\x1b]8;;\x1b\\", b"\x07", b"\x1b[?25h", b"\x1b[m", b"\x1b(B"],
)
def test_what_changes_no_text_wipes_no_bar(inert: bytes) -> None:
    reader = LineReader()
    reader.feed(b"\r50%\r" + inert, 0.0)
    assert reader.state == b"50%"
    reader.feed(b"\r60%\r" + inert + b"\n", 0.0)
    (line,) = reader.flush()
    assert line.replace(b"\x1b[m", b"") == b"60%"


def test_a_color_that_ends_behind_a_carriage_return_ends() -> None:
    assert lines_of(b"\x1b[32mfoo\r\x1b[0m\n") == [b"\x1b[32mfoo\x1b[0m"]


def test_a_color_before_a_row_is_erased_is_the_texts_behind_it() -> None:
    assert lines_of(b"\r10%\r\x1b[32m\x1b[K20%\x1b[m\n") == [b"\x1b[32m20%\x1b[m"]


def test_rows_that_rich_keeps_end_when_the_cursor_is_shown() -> None:
    reader = LineReader()
    back = b"\r\x1b[2K\x1b[1A\x1b[2K"
    assert reader.feed(b"one 0\ntwo 0" + back + b"one 1\ntwo 1\n", 0.0) == [b"one 0", b"one 1"]
    assert reader.due == 1.0
    assert reader.feed(b"\x1b[?25h", 0.1) == [b"two 1"]
    assert (reader.due, reader.unended) == (None, [b"\x1b[?25h"])


def test_a_line_printed_over_the_one_above_waits_a_second_at_most() -> None:
    reader = LineReader()
    for step in range(3):
        assert reader.feed(b"\x1b[F\x1b[Kstep %d\n" % step, float(step)) == []
        assert reader.due == step + 1.0
    assert reader.look(3.0) == [b"step 2"]


def test_what_waits_is_among_the_lines_that_would_end() -> None:
    reader = LineReader()
    reader.feed(b"\r50%\n\r\x1b[KError: no such file\n", 0.0)
    assert reader.unended == [b"50%", b"Error: no such file"]
    reader.feed(b"\r60%Traceback (most recent call last):", 0.0)
    assert reader.unended[-2:] == [b"60%", b"Traceback (most recent call last):"]
    assert reader.flush() == [b"50%", b"Error: no such file", b"60%", b"Traceback (most recent call last):"]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_rows_that_only_grow_keep_memory_bounded() -> None:
    reader = LineReader()
    lines = [line for step in range(1000) for line in reader.feed(b"\r%d\n" % step, 0.0)]
    assert len(lines) > 900
    assert lines + reader.flush() == [b"%d" % step for step in range(1000)]


@pytest.mark.parametrize("unit", [b"\x1b[64A", b"\x1b[64A\n", b"\x1b[64A\x1b[64B", b"\x1b[F\x1b[Kx", b"\x1b[A\rx"])
def test_a_cursor_that_only_moves_keeps_memory_bounded(unit: bytes) -> None:
    reader = LineReader()
    for _ in range(20):
        reader.feed(unit * 100, 0.0)
        assert len(reader._rows) <= 130


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (b"\r", b"\x1b[31m"),
        (b"x\r", b"\x1b[31m\r"),
        (b"\r", b"\x07"),
        (b"x\r", b"\x1b]0;title\x07"),
        (b"\r", b"\x1b[K"),
        (b"\rx", b"\x1b[K"),
        (b"\r", b"\x1b["),
        (b"\r", b"\x1b]0;"),
        (b"\r\x1b]0;", b"x"),
        (b"\r\x1b[", b"1"),
    ],
)
def test_sequences_that_only_grow_keep_memory_bounded(begin: bytes, unit: bytes) -> None:
    reader = LineReader()
    reader.feed(begin, 0.0)
    for _ in range(20):
        reader.feed(unit * 8000, 0.0)
        held = sum(len(row.whole) for row in reader._rows) + len(reader._rest) + len(reader._cut)
        assert held <= MAX_LINE + 2000


# --- how often a bar is passed on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_bar_is_passed_on_some_times_a_second_and_as_a_line_now_and_then(is_watched: bool) -> None:
    pace, news = BarPace(), []
    for tick in range(1001):
        taken = pace.take(b"%d" % tick, tick / 40, is_watched=is_watched)
        news += [(tick / 40, taken[1])] if taken else []
    lines = [at for at, is_line in news if is_line]
    assert lines == [10.0, 20.0]
    assert len(news) == (101 if is_watched else 2)
    assert pace.due(b"1000", is_watched=is_watched) == 30.0
    # It has gone: that is said once, if anything was.
    assert pace.take(b"", 26.0, is_watched=is_watched) is None
    assert pace.due(b"", is_watched=is_watched) == 26.5
    assert pace.take(b"", 26.5, is_watched=is_watched) == (b"", False)
    assert pace.take(b"", 27.0, is_watched=is_watched) is None
    assert pace.due(b"", is_watched=is_watched) == math.inf


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_bar_that_is_wiped_for_a_message_now_and_then_stays_and_is_a_line_as_often(is_watched: bool) -> None:
    pace, news = BarPace(), []
    for tick in range(1001):
        state = b"" if tick % 50 in (0, 1, 2) else b"%d" % tick
        taken = pace.take(state, tick / 40, is_watched=is_watched)
        news += [(tick / 40, *taken)] if taken else []
    assert all(state for _, state, _ in news)
    assert [at for at, _, is_line in news if is_line] == [10.075, 20.075]


def test_who_looks_no_more_sees_the_bar_go() -> None:
    pace = BarPace()
    assert pace.take(b"1", 0.0, is_watched=True) == (b"1", False)
    assert pace.due(b"2", is_watched=False) == 0.25
    assert pace.take(b"2", 0.25, is_watched=False) == (b"", False)
    assert pace.take(b"3", 1.0, is_watched=False) is None
    assert pace.due(b"3", is_watched=False) == 10.0
    assert pace.take(b"4", 10.0, is_watched=False) == (b"4", True)
    assert pace.take(b"5", 11.0, is_watched=False) is None
    assert pace.take(b"5", 12.0, is_watched=True) == (b"5", False)


class Worker:
    """The output of one, on a loop whose time is a number."""

    def __init__(self, *, is_watched: Callable[[str], bool] = lambda label: True) -> None:
        self.now = 0.0
        self.label = "0"
        self.sink = Sink()
        # Nothing sleeps: each round of the loop has something to do.
        asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
        pipes: dict[Stream, tuple[int, int]] = {"stdout": os.pipe(), "stderr": os.pipe()}
        self._ends = {stream: ends[1] for stream, ends in pipes.items()}
        self.output = WorkerOutput(
            {stream: ends[0] for stream, ends in pipes.items()},
            WorkerId("a", 0, 0),
            self.sink,
            label=lambda: self.label,
            prefix_timestamp=False,
            warn=pytest.fail,
            is_watched=is_watched,
        )

    def writes(self, data: bytes, stream: Stream = "stderr") -> None:
        os.write(self._ends[stream], data)
        self.output.read_available()

    async def passes(self, seconds: float) -> None:
        """So much time, in small steps; what is due in between happens."""
        for _ in range(round(seconds * 16)):
            self.now += 1 / 16
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def closes(self) -> None:
        for descriptor in self._ends.values():
            os.close(descriptor)
        self.output.close()

    @property
    def bars(self) -> list[str]:
        """The states that it was told of since this was asked last; those that are lines with a star."""
        given = [("*" if bar.is_line else "") + bar.data.decode().rstrip() for _, bar in self.sink.bars]
        self.sink.bars.clear()
        return given


def test_a_workers_bar_is_passed_on_at_its_pace_and_beside_its_lines() -> None:
    async def play() -> None:
        worker = Worker()
        for percent in range(4):
            worker.writes(b"\r%d%%" % percent)
        assert worker.bars == ["[0]<stderr>:0%"]
        await worker.passes(0.25)
        assert worker.bars == ["[0]<stderr>:3%"]
        worker.writes(b"said\n", "stdout")
        assert worker.sink.written[-1][1:] == ("stdout", b"[0]<stdout>:said\n")
        worker.writes(b"\r4%\n")
        await worker.passes(0.5)
        assert worker.sink.written[-1][1:] == ("stderr", b"[0]<stderr>:4%\n")
        assert worker.bars == []
        await worker.passes(0.5)
        assert worker.bars == [""]
        worker.closes()
        assert worker.bars == []

    asyncio.run(play())


def test_a_bar_that_tqdm_wipes_for_messages_is_drawn_all_the_while_and_is_a_line_each_10_s() -> None:
    async def play() -> None:
        worker = Worker(is_watched=lambda label: False)
        for step in range(6):
            worker.writes(b"\r     \r")
            await worker.passes(0.0625)
            worker.writes(b"said\n")
            await worker.passes(0.0625)
            worker.writes(b"\r%d%%" % step)
            await worker.passes(4.875)
        assert worker.bars == ["*[0]<stderr>:2%", "*[0]<stderr>:4%"]
        worker.closes()

    asyncio.run(play())


def test_each_stream_has_its_own_bar() -> None:
    async def play() -> None:
        worker = Worker()
        worker.writes(b"\r1%", "stderr")
        worker.writes(b"\r2%", "stdout")
        await worker.passes(1.0)
        worker.writes(b"\r  \r", "stdout")
        worker.sink.bars.clear()
        await worker.passes(1.0)
        assert [(bar.stream, bar.data) for _, bar in worker.sink.bars] == [("stdout", b"")]
        worker.closes()
        assert [(bar.stream, bar.data) for _, bar in worker.sink.bars[1:]] == [("stderr", b"")]

    asyncio.run(play())


def test_a_bar_that_stands_still_has_its_workers_new_rank() -> None:
    async def play() -> None:
        worker = Worker(is_watched=lambda label: label != "5")
        worker.writes(b"\r1%")
        for label in ("3", "5", "5", "0"):
            worker.label = label
            worker.output.relabel()
        await worker.passes(0.25)
        assert worker.bars == ["[0]<stderr>:1%", "[3]<stderr>:1%", "", "[0]<stderr>:1%"]
        worker.closes()
        assert worker.bars == [""]

    asyncio.run(play())


def test_the_bar_of_a_worker_that_nobody_looks_at_any_more_goes() -> None:
    async def play() -> None:
        worker = Worker(is_watched=lambda label: label == "0")
        worker.writes(b"\r1%")
        worker.label = "5"
        await worker.passes(1.0)
        worker.writes(b"\r2%")
        await worker.passes(1.0)
        assert worker.bars == ["[0]<stderr>:1%", ""]
        worker.closes()

    asyncio.run(play())


_PIECES = [
    *(b"a", b"bc", b" ", "é".encode(), "😀".encode(), b"\x80", b"\x07", b"\x1b"),
    *(b"\x1b[1m", b"\x1b[?25h", b"\x1b]0;t\x07", b"\x1b]8;;\x1b\\", b"\x1b(B"),
    *(
        b"\x1b[K",
        b"\x1b[2K",
        b"\x1b[J",
        b"\x1b[2J",
        b"\x1b[5C",
        b"\x1b[20G",
        b"\x1b[H",
        b"\x1b[3;1f",
        b"\x1b[B",
        b"\x1b[E",
    ),
]
_MOVES = [b"\r", UP, b"\x1b[2F", b"\x1b[G"]


@pytest.mark.property
@given(
    data=st.lists(st.sampled_from([*_PIECES, *_MOVES, *[b"\r", UP, b"\n"] * 4]), max_size=60),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    max_line=st.sampled_from([8, 64]),
)
def test_the_division_into_reads_makes_no_difference(data: list[bytes], cuts: list[int], max_line: int) -> None:
    whole = b"".join(data)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    chunks = [whole[start:end] for start, end in itertools.pairwise(places)]
    expected = lines_of(whole, max_line=max_line)
    assert lines_of(*chunks, max_line=max_line) == expected
    assert all(len(line) <= max_line for line in expected)


@pytest.mark.property
@given(
    lines=st.lists(st.lists(st.sampled_from(_PIECES), max_size=12).map(b"".join), max_size=8),
    bar=st.sampled_from([b"", b"\r50%\n", b"\router\n\rinner" + UP + b"\router 2\n\n"]),
    data=st.data(),
)
def test_lines_without_carriage_returns_and_moves_up_come_through_byte_for_byte(
    lines: list[bytes], bar: bytes, data: st.DataObject
) -> None:
    whole = bar + b"".join(line + b"\n" for line in lines)
    cut = data.draw(st.integers(0, len(whole)))
    reader = LineReader()
    passed = reader.feed(whole[:cut], 0.0) + reader.feed(whole[cut:], 0.0)
    if not bar:
        assert passed == lines
    elif any(lines):
        assert (passed + reader.flush())[-len(lines) :] == lines
