"""A State as one JSON document, and back: for a driver that dies and comes back, and for a report that can be replayed.

Owns the form of the document. Pure: it is given the time and does no I/O; who keeps the document, and where, is not
known here.

What is in it. Everything in :class:`State`, field by field, under the fields' own names, and nothing that is derived.
The policy too: deadlines were set by it, a round's size lies within it, and a document that says it can be explained
and replayed alone. A driver that comes back with other settings sees the difference and decides what to do about it.
Not in it is what only the driver knows (processes, open requests, secrets): the state names its workers, and whoever
reads it has to find out which of them still live and to feed the end of the others as events.

Times. A clock of one process means nothing to another, so a moment is written relative to the moment of writing, and
read relative to that of reading: deadlines run on as if no time had passed. A reader that knows how long it was away,
and wants that to count, reads at a time so much earlier.

Reading is strict. A document of another version, a key that is missing or unknown, a value of another type or a state
that must not be is refused as a whole, and the message says where. Whoever changes a field of a class in the state
changes the document: a test keeps the form of each version, and VERSION grows with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from elastic_driver.core.invariants import check_invariants
from elastic_driver.core.moments import Moment
from elastic_driver.core.roster import Roster
from elastic_driver.core.state import State
from elastic_driver.errors import ElasticError, SettingsError
from elastic_driver.hosts import WorkerId

VERSION = 13

_KEYS = frozenset(("version", "state"))
_PLAIN = (bool, int, str)


class DocumentError(ElasticError, ValueError):
    """A document is none that this version writes, or its state is one that must not be."""


def write(state: State, now: float) -> dict[str, object]:
    """The state as a document: dicts with text keys, lists, text, finite numbers, booleans and None.

    Args:
        state: the job.
        now: the present, seconds of the clock that the state's times are of.
    """
    return {"version": VERSION, "state": _form_of(State).write(state, now)}


def read(document: object, now: float) -> State:
    """The state that a document tells of, with its times on the reader's clock.

    Args:
        document: as :func:`write` gave it, before or after a way through JSON.
        now: the present, seconds of the reader's clock.

    Raises:
        DocumentError: see there.
    """
    if not isinstance(document, dict) or "version" not in document:
        raise DocumentError("cannot read the state of a job: this is no document with a version")
    version = document["version"]
    if type(version) is not int or version < 1:
        raise DocumentError(f"cannot read the state of a job: version {version!r} is no number of a version")
    if version > VERSION:
        raise DocumentError(
            f"cannot read the state of a job: the document is of version {version}, from a newer elastic_driver; this "
            f"one reads version {VERSION}"
        )
    if version < VERSION:
        raise DocumentError(f"cannot read the state of a job: version {version}; this elastic_driver reads {VERSION}")
    _check_keys(document, _KEYS, "the document")
    state = _form_of(State).read(document["state"], now, "state")
    assert isinstance(state, State)
    try:
        check_invariants(state)
    except AssertionError as error:
        raise DocumentError(f"cannot read the state of a job: {error}") from error
    return state


def describe() -> str:
    """The form of the document: each class in it with its fields and their types, for the test that keeps it."""
    lines: list[str] = []
    met: list[Any] = [State]
    for hint in met:
        lines.append(f"{hint.__name__}:")
        for name, member in _members(hint).items():
            lines.append(f"  {name}: {_named(member, met)}")
    return "\n".join(lines) + "\n"


# --- forms of values ----------------------------------------------------------------------------------------------


class _Form:
    """How values of one type are written and read.

    Args:
        write: takes the value and the present.
        read: takes what was written, the present, and where it stands in the document.
    """

    __slots__ = ("read", "write")

    def __init__(self, write: Callable[[Any, float], object], read: Callable[[object, float, str], Any]) -> None:
        self.write = write
        self.read = read


@cache
def _form_of(hint: Any) -> _Form:
    """The form of a type. Raises TypeError for one that no document can hold."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == Moment:
        return _Form(lambda value, now: value - now, lambda data, now, at: _number(data, at) + now)
    if origin in (UnionType, Union) and len(args) == 2 and NoneType in args:
        return _optional(_form_of(args[0] if args[1] is NoneType else args[1]))
    if origin is tuple:
        return _sequence(_form_of(args[0])) if args[1:] == (...,) else _row([_form_of(arg) for arg in args])
    if origin is frozenset:
        items = _sequence(_form_of(args[0]))
        # In an order of its own: a set has none that lasts.
        return _Form(
            lambda value, now: sorted(items.write(value, now), key=repr),  # type: ignore[call-overload]
            lambda data, now, at: _without_repetition(frozenset(items.read(data, now, at)), data, at),
        )
    if origin is Roster:
        items = _sequence(_form_of(args[0]))
        return _Form(
            items.write, lambda data, now, at: _without_repetition(Roster(items.read(data, now, at)), data, at)
        )
    if hint is WorkerId:
        return _Form(lambda value, _: value.key, _read_worker)
    if hint is float:
        return _Form(lambda value, _: value, lambda data, _, at: _number(data, at))
    if hint in _PLAIN:
        return _Form(lambda value, _: value, lambda data, _, at: _plain(data, hint, at))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Form(lambda value, _: value.value, lambda data, _, at: _member_of(data, hint, at))
    if _members(hint):
        return _record(hint)
    raise TypeError(f"no document can hold a {hint}")


def _members(hint: Any) -> dict[str, Any]:
    """The fields of a class and their types; empty for other types. What is derived is in no document."""
    if is_dataclass(hint):
        names = [field.name for field in fields(hint) if field.compare]
    else:
        names = list(getattr(hint, "_fields", ()))
    hints = get_type_hints(hint, include_extras=True) if names else {}
    return {name: hints[name] for name in names}


def _record(hint: Any) -> _Form:
    forms = {name: _form_of(member) for name, member in _members(hint).items()}
    names = frozenset(forms)

    def write_it(value: Any, now: float) -> object:
        return {name: form.write(getattr(value, name), now) for name, form in forms.items()}

    def read_it(data: object, now: float, at: str) -> Any:
        if not isinstance(data, dict):
            raise _refusal(at, "an object", data)
        _check_keys(data, names, at)
        return hint(**{name: form.read(data[name], now, f"{at}.{name}") for name, form in forms.items()})

    return _Form(write_it, read_it)


def _optional(form: _Form) -> _Form:
    return _Form(
        lambda value, now: None if value is None else form.write(value, now),
        lambda data, now, at: None if data is None else form.read(data, now, at),
    )


def _sequence(form: _Form) -> _Form:
    def read_it(data: object, now: float, at: str) -> tuple[Any, ...]:
        return tuple(form.read(item, now, f"{at}[{index}]") for index, item in enumerate(_list(data, at)))

    return _Form(lambda value, now: [form.write(item, now) for item in value], read_it)


def _row(forms: list[_Form]) -> _Form:
    def read_it(data: object, now: float, at: str) -> tuple[Any, ...]:
        items = _list(data, at)
        if len(items) != len(forms):
            raise _refusal(at, f"{len(forms)} items", data)
        return tuple(
            form.read(item, now, f"{at}[{index}]") for index, (form, item) in enumerate(zip(forms, items, strict=True))
        )

    return _Form(
        lambda value, now: [form.write(item, now) for form, item in zip(forms, value, strict=True)],
        read_it,
    )


def _check_keys(data: dict[Any, Any], names: frozenset[str], at: str) -> None:
    for word, keys in (("lacks", names - data.keys()), ("has the unknown", data.keys() - names)):
        if keys:
            raise DocumentError(f"cannot read the state of a job: {at} {word} {', '.join(sorted(map(repr, keys)))}")


def _list(data: object, at: str) -> list[Any]:
    if not isinstance(data, list):
        raise _refusal(at, "a list", data)
    return data


def _plain(data: object, kind: type, at: str) -> object:
    # True is an integer to Python, and none to a reader of a document.
    if type(data) is not kind:
        raise _refusal(at, f"of type {kind.__name__}", data)
    return data


def _number(data: object, at: str) -> float:
    # An integer that no float holds is none that isfinite() looks at.
    if type(data) not in (int, float) or not abs(data) < math.inf:  # type: ignore[arg-type]
        raise _refusal(at, "a finite number", data)
    return data  # type: ignore[return-value]


def _member_of(data: object, kind: type[StrEnum], at: str) -> StrEnum:
    values = [member.value for member in kind]
    if type(data) is not str or data not in values:
        raise _refusal(at, f"one of {', '.join(values)}", data)
    return kind(data)


def _read_worker(data: object, _: float, at: str) -> WorkerId:
    try:
        worker = WorkerId.parse(data) if isinstance(data, str) else None
    except SettingsError:
        worker = None
    if worker is None or worker.key != data:
        raise _refusal(at, "a worker, host[slot]#attempt", data)
    return worker


def _without_repetition(value: Any, data: object, at: str) -> Any:
    if len(value) != len(_list(data, at)):
        raise _refusal(at, "a list without repetitions", data)
    return value


def _refusal(at: str, wanted: str, data: object) -> DocumentError:
    shown = repr(data)
    return DocumentError(
        f"cannot read the state of a job: {at} is not {wanted}: {shown if len(shown) <= 80 else shown[:80] + '…'}"
    )


def _named(hint: Any, met: list[Any]) -> str:
    """A type in words; classes that it names are added to those that are met."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == Moment:
        return "moment"
    if origin in (UnionType, Union):
        return " | ".join(_named(arg, met) for arg in args)
    if origin is not None:
        inside = ", ".join("..." if arg is ... else _named(arg, met) for arg in args)
        return f"{origin.__name__}[{inside}]"
    if hint is NoneType:
        return "None"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "/".join(member.value for member in hint)
    if hint is not WorkerId and _members(hint) and hint not in met:
        met.append(hint)
    return str(hint.__name__)
