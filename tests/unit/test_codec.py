"""The codec: what is written is read again; all else is refused, and the error says where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest

from elastic_driver.codec import (
    MOMENT,
    OMITTABLE,
    ROW,
    CodecError,
    Count,
    Cut,
    OsText,
    Rounded,
    Seconds,
    Within,
    decode,
    describe,
    encode,
    from_data,
    to_data,
)
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend

pytestmark = pytest.mark.unit


class Pair(NamedTuple):
    key: str
    number: int


@dataclass(frozen=True, slots=True)
class Left:
    why: str


@dataclass(frozen=True, slots=True)
class Right:
    why: str
    count: Count = 0


@dataclass(frozen=True, slots=True)
class Row:
    worker: WorkerId
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Sample:
    flag: bool
    number: int
    seconds: Seconds
    side: Left | Right
    maybe: int | None
    rows: dict[str, Annotated[Row, ROW]]
    range_s: tuple[float, float]
    backends: frozenset[Backend]
    port: Annotated[int, Within(1, 65535)] = 1
    text: Annotated[str, Cut(3)] = ""
    file: OsText = ""
    age_s: Annotated[float, Rounded(2)] = 0.0
    until: Annotated[float, MOMENT] = 0.0
    few: Annotated[tuple[int, ...], Within(0, 2)] = ()
    extra: Annotated[Seconds | None, OMITTABLE] = None
    derived: int = field(default=7, compare=False)

    def __post_init__(self) -> None:
        if self.port == 13:
            raise ValueError("13 brings bad luck")


A = WorkerId("node-1.example", 0, 2)
SAMPLE = Sample(
    flag=True,
    number=-3,
    seconds=1.5,
    side=Right("it is", 2),
    maybe=None,
    rows={"a": Row(A, (Pair("k", 1), Pair("l", 2)))},
    range_s=(0.5, 2.0),
    backends=frozenset((Backend.TORCH, Backend.NATIVE)),
    file="/tmp/\udcff",
)


def test_what_is_written_is_read_again() -> None:
    assert decode(Sample, encode(Sample, SAMPLE)) == SAMPLE


def test_how_it_is_written() -> None:
    assert encode(Sample, SAMPLE).decode() == (
        '{"flag":true,"number":-3,"seconds":1.5,"side":{"is":"Right","why":"it is","count":2},"maybe":null,'
        '"rows":{"a":["node-1.example[0]#2",[{"key":"k","number":1},{"key":"l","number":2}]]},"range_s":[0.5,2.0],'
        '"backends":["native","torch"],"port":1,"text":"","file":"/tmp/\\udcff","age_s":0.0,"until":0.0,"few":[],'
        '"extra":null}'
    )


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("flag", 1, ".flag is not of type bool: 1"),
        ("flag", ..., ".flag is missing"),
        ("more", 1, " has the unknown 'more'"),
        ("derived", 7, " has the unknown 'derived'"),
        ("number", True, ".number is not of type int: True"),
        ("number", 1.0, ".number is not of type int: 1.0"),
        ("number", 1 << 63, ".number is not within -9223372036854775807 and 9223372036854775807"),
        ("number", -(10**4000), ".number is not within -9223372036854775807 and 9223372036854775807"),
        ("seconds", -0.5, ".seconds is not within 0"),
        ("seconds", "1", ".seconds is not a finite number: '1'"),
        ("seconds", True, ".seconds is not a finite number: True"),
        ("seconds", float("nan"), ".seconds is not a finite number: nan"),
        ("seconds", float("inf"), ".seconds is not a finite number: inf"),
        ("seconds", 2**53, ".seconds is not a finite number: 9007"),
        ("side", None, ".side is of the unknown kind None"),
        ("side.is", "Middle", ".side is of the unknown kind 'Middle'"),
        ("side.is", ["Left"], ".side is of the unknown kind list of 1"),
        ("side.is", "Left", ".side has the unknown 'count'"),
        ("side.count", -1, ".side.count is not within 0"),
        ("side.why", None, ".side.why is not of type str: None"),
        ("maybe", "", ".maybe is not of type int: ''"),
        ("rows", [], ".rows is not an object: list of 0"),
        ("rows.a", {}, ".rows['a'] is not an array of 2: dict of 0"),
        ("rows.a", [1, 2, 3], ".rows['a'] is not an array of 2: list of 3"),
        ("rows.a.0", "a[0]", ".rows['a'].worker is not a worker, host[slot]#attempt: 'a[0]'"),
        ("rows.a.0", "a[0]#00", ".rows['a'].worker is not a worker"),
        ("rows.a.0", "a[٣]#0", ".rows['a'].worker is not a worker"),
        ("rows.a.0", f"a[{'9' * 5000}]#0", ".rows['a'].worker is not a worker"),
        ("rows.a.0", 7, ".rows['a'].worker is not a worker"),
        ("rows.a.1.1.number", None, ".rows['a'].pairs[1].number is not of type int: None"),
        ("range_s", [1.0], ".range_s is not an array of 2: list of 1"),
        ("range_s.1", "", ".range_s[1] is not a finite number"),
        ("backends", {}, ".backends is not an array: dict of 0"),
        ("backends.0", "mpi", ".backends[0] is not one of native, torch, horovod: 'mpi'"),
        ("backends.1", 1, ".backends[1] is not one of"),
        ("backends.1", "native", ".backends has an item twice"),
        ("port", 0, ".port is not within 1 and 65535: 0"),
        ("port", 65536, ".port is not within 1 and 65535: 65536"),
        ("port", True, ".port is not of type int: True"),
        ("port", 13, " cannot be: 13 brings bad luck"),
        ("few", [1, 2, 3], ".few has not 0 to 2 items: list of 3"),
        ("extra", -1.0, ".extra is not within 0"),
        ("file", 1, ".file is not of type str: 1"),
    ],
)
def test_what_is_refused(path: str, value: Any, why: str) -> None:
    data = to_data(Sample, SAMPLE)
    inner: Any = data
    *way, last = path.split(".")
    for key in way:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    with pytest.raises(CodecError) as refused:
        from_data(Sample, data)
    assert str(refused.value).startswith(f"Sample{why}")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        '{"why": "x"}'.encode("utf-16"),
        b'{"why": "\xff"}',
        b'{"why": "x"} {}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"why": ' + b"9" * 5000 + b"}",
        b'{"why": NaN}',
    ],
)
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        decode(Left, body)


def test_what_is_shown_of_a_value_is_bounded() -> None:
    with pytest.raises(CodecError, match=r"^Left.why is not of type str: 1{80}…$"):
        from_data(Left, {"why": int("1" * 1000)})
    with pytest.raises(CodecError, match=r"^Left has the unknown 'x{79}…$"):
        from_data(Left, {"why": "", "x" * 10_000: 1})


def test_a_key_that_is_there_twice_counts_as_it_stands_last() -> None:
    assert decode(Left, b'{"why":"x","why":"y"}') == Left("y")


def test_what_may_be_missing_has_its_default() -> None:
    data = to_data(Sample, SAMPLE)
    del data["extra"]
    assert from_data(Sample, data) == SAMPLE


def test_an_integer_is_a_float() -> None:
    read = from_data(float, 3)
    assert (read, type(read)) == (3.0, float)


def test_texts_can_be_written_to_a_log_unless_they_stand_for_bytes() -> None:
    half = {"a\ud800": "\ud800\u20ac"}
    assert from_data(dict[str, str], half) == {"a?": "?\u20ac"}
    assert from_data(dict[OsText, OsText], half) == half
    assert from_data(Annotated[str, Cut(3)], "\ud800xyz") == "?xy"


def test_a_number_is_rounded_when_it_is_written() -> None:
    assert to_data(Annotated[float, Rounded(2)], 1.23456) == 1.23


def test_a_moment_is_relative_to_the_clock_of_who_writes_and_reads() -> None:
    moment = Annotated[float, MOMENT]
    written = to_data(tuple[moment, ...], (12.0, 9.0), 10.0)
    assert written == [2.0, -1.0]
    assert from_data(tuple[moment, ...], written, 1000.0) == (1002.0, 999.0)
    with pytest.raises(CodecError):
        from_data(moment, None, 1000.0)


def test_paths_and_mappings() -> None:
    kind = Mapping[int, Path]
    value = {3: Path("/tmp/\udcff"), -10: Path("a/b")}
    assert to_data(kind, value) == {"3": "/tmp/\udcff", "-10": "a/b"}
    assert decode(kind, encode(kind, value)) == value
    for key in ("03", "x", "", "9" * 5000):
        with pytest.raises(CodecError, match="is not an integer"):
            from_data(kind, {key: "a"})


def test_a_type_that_has_no_form() -> None:
    with pytest.raises(TypeError, match="cannot write a"):
        to_data(object, 1)


def test_a_form_in_words() -> None:
    assert describe(Row, Left | None) == (
        "Row:\n  worker: WorkerId\n  pairs: tuple[Pair, ...]\nLeft:\n  why: str\nPair:\n  key: str\n  number: int\n"
    )
