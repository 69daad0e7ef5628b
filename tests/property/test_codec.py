"""Every type that is sent or kept: any value of it is read as it was written, and any change is seen or refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.codec import (
    MOST_INTEGER,
    CodecError,
    OsText,
    Rounded,
    Within,
    from_data,
    from_text,
    to_data,
    to_text,
)
from elastic_driver.core.events import Command, Event
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent import control
from elastic_driver.rendezvous import agent_messages, messages, node_messages
from elastic_driver.rendezvous.agent_messages import AgentMessage
from elastic_driver.rendezvous.job_files import JobFile
from elastic_driver.worker.launched.meeting import Welcome
from tests.support.extent import examples

pytestmark = pytest.mark.property


def _of(module: types.ModuleType, base: type) -> list[type]:
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base)]
    return [each for each in found if dataclasses.is_dataclass(each)]


KINDS: list[Any] = [
    *_of(agent_messages, AgentMessage),
    *_of(messages, messages.Body),
    *_of(node_messages, messages.Body),
    *(messages.NextRoundReply, agent_messages.Bootstrap, JobFile, Event, Command, control.Order, control.Answer),
]
WORKERS = st.builds(WorkerId, st.sampled_from(["a", "node-1.example", "::1"]), st.integers(0, 9), st.integers(0, 9))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, with their bounds."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    marks = of[1:] if origin is Annotated else ()
    bounds = [mark for mark in marks if isinstance(mark, Within)]
    if origin is Annotated and of[0] in (int, float) and bounds:
        least, most = max(each.least for each in bounds), min(each.most for each in bounds)
        if of[0] is int:
            return st.integers(int(least), int(most))
        if any(isinstance(mark, Rounded) for mark in marks):
            return st.integers(0, 1000).map(lambda number: number / 4)
        return st.floats(least, most)
    if origin is Annotated and hint != OsText:
        sizes = {"min_size": int(bounds[0].least), "max_size": min(int(bounds[0].most), 3)} if bounds else {}
        return _sized(of[0], sizes)
    return _sized(hint, {})


def _sized(hint: Any, sizes: dict[str, int]) -> st.SearchStrategy[Any]:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    sizes = {"max_size": 3, **sizes}
    if hint == OsText:
        return st.text(st.characters(), max_size=5)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if each is type(None) else values(each) for each in of))
    if origin is tuple and of[1:] != (...,):
        return st.tuples(*map(values, of))
    if origin is dict:
        return st.dictionaries(values(of[0]), values(of[1]), max_size=2)
    if origin is frozenset:
        return st.frozensets(values(of[0]), **sizes)
    if origin in (tuple, list):
        return st.lists(values(of[0]), **sizes).map(origin)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    if hint is WorkerId:
        return WORKERS
    if hint in SIMPLE:
        return SIMPLE[hint](sizes)
    return _records(hint)


SIMPLE: dict[Any, Any] = {
    bool: lambda _: st.booleans(),
    int: lambda _: st.integers(-MOST_INTEGER, MOST_INTEGER),
    float: lambda _: st.floats(allow_nan=False, allow_infinity=False),
    str: lambda sizes: st.text(st.characters(exclude_categories=["Cs"]), **sizes),
    bytes: lambda _: st.binary(max_size=5),
}


@st.composite
def _records(draw: st.DrawFn, kind: Any) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {each.name: draw(values(hints[each.name])) for each in dataclasses.fields(kind)}
    try:
        return kind(**fields)
    except ValueError:  # of its own checks
        return draw(st.nothing())


ALL = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), values(kind)))


@given(ALL)
@settings(max_examples=examples(400), deadline=None)
def test_each_value_is_read_as_it_was_written(drawn: tuple[Any, Any]) -> None:
    kind, value = drawn
    data = to_data(kind, value)
    blob = {"blob": data.pop("blob")} if "blob" in data else {}
    assert from_data(kind, from_text(to_text(data).encode()) | blob) == value


_OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10) | st.just(10**400),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    st.sampled_from(["a[0]#0", [], {}, [[]], {"is": "WorkerReady"}]),
)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    return [(data, key) for key in keys] + [place for key in keys for place in _places(data[key])]


@given(ALL, st.data(), _OTHERS, st.sampled_from(["change", "remove", "add"]))
@settings(max_examples=examples(400), deadline=None)
def test_each_change_is_seen_or_refused(drawn: tuple[Any, Any], draw: st.DataObject, other: object, how: str) -> None:
    kind, value = drawn
    data = to_data(kind, value)
    places = _places(data)
    if not places:
        return
    container, key = draw.draw(st.sampled_from(places))
    if how == "change":
        container[key] = other
    elif how == "remove":
        del container[key]
    elif isinstance(container, dict):
        container["more"] = other
    try:
        read = from_data(kind, data)
    except CodecError:
        return
    written = to_data(kind, read)
    if "within_s" in written and "within_s" not in data:  # OMITTABLE
        del written["within_s"]
    assert _in_order(written) == _in_order(data)


def _in_order(data: Any) -> Any:
    """Without the order of what may be a set."""
    if isinstance(data, dict):
        return {key: _in_order(each) for key, each in data.items()}
    return sorted(map(_in_order, data), key=repr) if isinstance(data, list) else data


def test_the_welcome_of_a_local_job() -> None:
    welcome = Welcome("unix:/x", "00" * 32, 4)
    assert from_data(Welcome, to_data(Welcome, welcome)) == welcome
    for secret in ("00", "zz" * 32):
        with pytest.raises(CodecError, match="Welcome cannot be"):
            from_data(Welcome, {**to_data(Welcome, welcome), "secret": secret})
