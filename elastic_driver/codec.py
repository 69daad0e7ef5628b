"""Typed values as JSON, and back: the codec for everything that is sent to another process or kept in a file.

Owns the rules by which a type determines the format of its values. Pure; knows none of the types.

    | type                            | written as                                                                 |
    |---------------------------------|----------------------------------------------------------------------------|
    | dataclass, NamedTuple           | object: all fields by their names                                          |
    | dataclass, Annotated with ROW   | array: all fields in their order, for what is sent often                   |
    | union of dataclasses            | object: as above, and ``is``, the name of the class                        |
    | tuple[X, ...], list, frozenset,
      any other collection            | array                                                                      |
    | tuple[X, Y]                     | array of that length                                                       |
    | dict[K, X], Mapping[K, X]       | object; K is a string, or an integer, which is written as a string         |
    | WorkerId, StrEnum               | its key, its value                                                         |
    | X | None                        | as X, or null                                                              |
    | bool, int, float, str           | itself                                                                     |
    | Path                            | its text                                                                   |
    | bytes                           | not in JSON: the caller has to remove it before encoding                   |

A dataclass's fields that are excluded from comparisons are derived, and are not written.

Reading is strict: a field that is missing or unknown, a value of another type or out of bounds, or a value that the
class itself rejects with a ValueError, is an error that says where. ``True`` is not an integer, an integer is a float
(below 2**53), a float is finite, and an integer has at most 64 bits. Lone surrogates, which JSON may contain but no log
can, become "?"; an OsText keeps them, since there they represent bytes of a file name or variable.

Annotated narrows a type: with :class:`Within`, :class:`Cut`, :class:`Rounded`, or one of the marks below.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from elastic_driver.errors import ElasticError
from elastic_driver.hosts import WorkerId

T = TypeVar("T")

MOST_INTEGER = (1 << 63) - 1
# Beyond this, not every integer is a float.
_WHOLE = 1 << 53
_SHOWN = 80
# No field can have this name: it is a keyword of Python.
_KIND = "is"


class CodecError(ElasticError, ValueError):
    """Data does not fit the type as which it is read."""


@dataclass(frozen=True, slots=True)
class Within:
    """In ``Annotated``: bounds of a number, or of the length of a string or collection. Both are inclusive."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Cut:
    """In ``Annotated[str, ...]``: a longer string is cut to this length, not rejected."""

    length: int


@dataclass(frozen=True, slots=True)
class Rounded:
    """In ``Annotated[float, ...]``: written with this many decimal places."""

    digits: int


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str

    def __str__(self) -> str:
        return self.name


ROW = _Mark("row")
MOMENT = _Mark("moment")
"""In ``Annotated[float, ...]``: a point in time, written relative to the writer's ``origin``, and read relative to the
reader's."""
OMITTABLE = _Mark("may be missing")
"""In ``Annotated``, for a field with a default: it may be omitted. For interfaces that people write by hand."""
_RAW = _Mark("as it is")

OsText = Annotated[str, _RAW]
"""A string of the operating system's: a path, an argument, a variable. May represent bytes that are not UTF-8."""
Count = Annotated[int, Within(0, MOST_INTEGER)]
Seconds = Annotated[float, Within(0, sys.float_info.max)]
"""A duration: finite, and not negative."""


def encode(kind: Any, value: object) -> bytes:
    """Encode a value as UTF-8 JSON, in one line of ASCII."""
    return to_text(to_data(kind, value)).encode()


def decode(kind: type[T], body: bytes) -> T:
    """Decode a value; the inverse of :func:`encode`.

    Raises:
        CodecError: the body is not JSON, or not of this type.
    """
    value: T = from_data(kind, from_text(body))
    return value


def to_data(kind: Any, value: object, origin: float = 0.0) -> Any:
    """Convert a value to JSON's types. ``origin``: that of points in time, see MOMENT."""
    write = _form_of(kind).write
    return value if write is None else write(value, origin)


def from_data(kind: Any, data: object, origin: float = 0.0, *, name: str = "") -> Any:
    """Convert JSON's types to a value; the inverse of :func:`to_data`.

    Args:
        kind: the type to read.
        data: parsed JSON.
        origin: of points in time, see MOMENT.
        name: of the value, for the error; by default the name of its type.

    Raises:
        CodecError: the data is not of this type.
    """
    try:
        return _form_of(kind).read(data, origin)
    except _UnfitError as error:
        where = name or getattr(kind, "__name__", "value")
        raise CodecError(f"{where}{''.join(reversed(error.path))} {error.why}") from None


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def to_text(data: object) -> str:
    """Format JSON in one line of ASCII."""
    return _ENCODER.encode(data)


def from_text(body: bytes) -> Any:
    """Parse JSON. The last one of duplicate keys wins.

    Raises:
        CodecError: it is not UTF-8, or not JSON, or too deeply nested.
    """
    try:
        return json.loads(str(body, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON ({error})") from None


def describe(*kinds: Any) -> str:
    """Describe the format of these types: each class in them with its fields. For a test that pins it."""
    lines: list[str] = []
    met: list[Any] = []
    for kind in kinds:
        _named(kind, met)
    for kind in met:
        lines.append(f"{kind.__name__}:")
        for name, hint in _members(kind).items():
            lines.append(f"  {name}: {_named(hint, met)}")
    return "\n".join(lines) + "\n"


# --- forms of types -----------------------------------------------------------------------------------------------


class _UnfitError(Exception):
    def __init__(self, why: str, *data: object) -> None:
        super().__init__(why)
        self.why = ": ".join((why, *map(_shown, data)))
        self.path: list[str] = []  # innermost first


def _shown(data: object) -> str:
    if isinstance(data, list | dict | bytes):
        return f"{type(data).__name__} of {len(data)}"
    shown = repr(data[: _SHOWN + 1] if isinstance(data, str) else data)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


class _Form(NamedTuple):
    """The functions that write values of one type (None: unchanged) and read them; both also take the origin."""

    write: Callable[[Any, float], Any] | None
    read: Callable[[Any, float], Any]


@cache
def _form_of(hint: Any) -> _Form:
    """Return the form of a type. Raises TypeError for an unsupported one."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _narrowed(args[0], args[1:])
    if origin in (UnionType, Union):
        return _union(tuple(arg for arg in args if arg is not NoneType), is_optional=NoneType in args)
    if origin is tuple and args[1:] != (...,):
        places = [f"[{index}]" for index in range(len(args))]
        return _fixed_array([_form_of(arg) for arg in args], tuple, lambda *items: items, places)
    if origin in (dict, Mapping):
        return _object(_INTEGER_KEY if args[0] is int else _form_of(args[0]), _form_of(args[1]))
    if isinstance(origin, type) and issubclass(origin, Iterable) and issubclass(origin, Sized):
        return _array(origin, _form_of(args[0]))
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _choice({member.value: member for member in hint})
    if _is_record(hint):
        return _record(hint)
    raise TypeError(f"cannot write a {hint}")


def _narrowed(hint: Any, marks: tuple[Any, ...]) -> _Form:
    form = _form_of(hint)
    for mark in marks:
        form = _marked(hint, form, mark)
    return form


def _marked(hint: Any, form: _Form, mark: Any) -> _Form:
    match mark:
        case Within():
            return _bounded(hint, form, mark)
        case Cut(length):
            return _Form(None, lambda data, origin: _read_str(data, origin)[:length])
        case Rounded(digits):
            return _Form(lambda value, _: round(value, digits), form.read)
        case _:
            pass
    if mark is ROW:
        return _row(hint)
    if mark is MOMENT:
        return _Form(lambda value, origin: value - origin, lambda data, origin: _read_float(data, origin) + origin)
    return _TEXT if mark is _RAW else form


def _bounded(hint: Any, form: _Form, bounds: Within) -> _Form:
    read, least, most = form.read, bounds.least, bounds.most

    # Most values are integers and floats: save a call for each.
    def read_int(data: Any, origin: float) -> Any:
        if type(data) is int and least <= data <= most:
            return data
        raise _UnfitError(f"is not within {least} and {most}", read(data, origin))

    def read_float(data: Any, origin: float) -> Any:
        if type(data) is float and least <= data <= most:
            return data
        value = read(data, origin)
        if least <= value <= most:
            return value
        raise _UnfitError(f"is not within {least:g} and {most:g}", value)

    def read_sized(data: Any, origin: float) -> Any:
        value = read(data, origin)
        if least <= len(value) <= most:
            return value
        raise _UnfitError(f"has not {least:g} to {most:g} items", data)

    return _Form(form.write, {int: read_int, float: read_float}.get(hint, read_sized))


def _union(kinds: tuple[Any, ...], *, is_optional: bool) -> _Form:
    form = _form_of(kinds[0]) if len(kinds) == 1 else _tagged({kind.__name__: kind for kind in kinds})
    if not is_optional:
        return form
    write, read = form
    return _Form(
        write and (lambda value, origin: None if value is None else write(value, origin)),
        lambda data, origin: None if data is None else read(data, origin),
    )


def _tagged(kinds: dict[str, Any]) -> _Form:
    forms: dict[str, _Form] = {}

    def form_of(name: str) -> _Form:
        # Built on first use: few members of a large union ever occur.
        form = forms.get(name)
        if form is None:
            form = forms[name] = _record(kinds[name])
        return form

    def write(value: Any, origin: float) -> Any:
        name = type(value).__name__
        return {_KIND: name, **form_of(name).write(value, origin)}  # type: ignore[misc]

    def read(data: Any, origin: float) -> Any:
        name = data.get(_KIND) if type(data) is dict else None
        if type(name) is not str or name not in kinds:
            raise _UnfitError(f"is of the unknown kind {_shown(name)}")
        return form_of(name).read({key: data[key] for key in data if key != _KIND}, origin)

    return _Form(write, read)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields"))


def _members(hint: Any) -> dict[str, Any]:
    """Return the fields of a class and their types; none if it is not a record."""
    if not _is_record(hint):
        return {}
    names = [attribute.name for attribute in fields(hint) if attribute.compare] if is_dataclass(hint) else hint._fields
    hints = get_type_hints(hint, include_extras=True)
    return {name: hints[name] for name in names}


def _record(hint: Any) -> _Form:
    hints = _members(hint)
    members = [(name, *_form_of(member)) for name, member in hints.items()]
    omittable = {name for name, member in hints.items() if OMITTABLE in getattr(member, "__metadata__", ())}

    def write_it(value: Any, origin: float) -> Any:
        data = {}
        for name, write, _ in members:
            item = getattr(value, name)
            data[name] = item if write is None else write(item, origin)
        return data

    def read_it(data: Any, origin: float) -> Any:
        if type(data) is not dict:
            raise _UnfitError("is not an object", data)
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, _, read in members:
                if name in data:
                    values[name] = read(data[name], origin)
                elif name not in omittable:
                    raise _UnfitError("is missing")
        except _UnfitError as error:
            error.path.append(f".{name}")
            raise
        if len(values) != len(data):
            raise _UnfitError(f"has the unknown {', '.join(_shown(name) for name in data if name not in values)}")
        try:
            return hint(**values)
        except ValueError as error:  # from its own checks
            raise _UnfitError(f"cannot be: {error}") from None

    return _Form(write_it, read_it)


def _row(hint: Any) -> _Form:
    members = _members(hint)
    forms = [_form_of(member) for member in members.values()]
    return _fixed_array(forms, attrgetter(*members), hint, [f".{name}" for name in members])


def _array(make: Any, form: _Form) -> _Form:
    write, read = form

    def write_it(value: Any, origin: float) -> Any:
        items = list(value) if write is None else [write(item, origin) for item in value]
        # A set has no stable order.
        return sorted(items, key=repr) if make is frozenset else items

    def read_it(data: Any, origin: float) -> Any:
        if type(data) is not list:
            raise _UnfitError("is not an array", data)
        items: list[Any] = []
        try:
            for item in data:
                items.append(read(item, origin))
        except _UnfitError as error:
            error.path.append(f"[{len(items)}]")
            raise
        made = make(items)
        if len(made) != len(items):
            raise _UnfitError("has an item twice")
        return made

    return _Form(write_it, read_it)


def _fixed_array(forms: list[_Form], items_of: Any, make: Any, places: list[str]) -> _Form:
    """Build the form of an array of fixed length.

    Args:
        forms: of the items.
        items_of: returns a value's items.
        make: builds a value from its items.
        places: the items' names in errors.
    """
    writes, reads = [form.write for form in forms], [form.read for form in forms]

    def write_it(value: Any, origin: float) -> Any:
        items = []
        for item, write in zip(items_of(value), writes, strict=True):
            items.append(item if write is None else write(item, origin))
        return items

    def read_it(data: Any, origin: float) -> Any:
        if type(data) is not list or len(data) != len(reads):
            raise _UnfitError(f"is not an array of {len(reads)}", data)
        items: list[Any] = []
        try:
            for item, read in zip(data, reads, strict=True):
                items.append(read(item, origin))
        except _UnfitError as error:
            error.path.append(places[len(items)])
            raise
        return make(*items)

    return _Form(write_it, read_it)


def _object(keys: _Form, values: _Form) -> _Form:
    write_key, read_key = keys
    write, read = values

    def write_it(value: Any, origin: float) -> Any:
        return {
            key if write_key is None else write_key(key, origin): item if write is None else write(item, origin)
            for key, item in value.items()
        }

    def read_it(data: Any, origin: float) -> Any:
        if type(data) is not dict:
            raise _UnfitError("is not an object", data)
        items = {}
        key = ""
        try:
            for key, item in data.items():
                items[read_key(key, origin)] = read(item, origin)
        except _UnfitError as error:
            error.path.append(f"[{_shown(key)}]")
            raise
        return items

    return _Form(write_it, read_it)


def _choice(members: dict[str, StrEnum]) -> _Form:
    def read(data: Any, _: float) -> Any:
        member = members.get(data) if type(data) is str else None
        if member is None:
            raise _UnfitError(f"is not one of {', '.join(members)}", data)
        return member

    return _Form(lambda value, _: value.value, read)


def _exactly(kind: type) -> _Form:
    def read(data: Any, _: float) -> Any:
        # True is an integer in Python, but not in JSON.
        if type(data) is not kind:
            raise _UnfitError(f"is not of type {kind.__name__}", data)
        return data

    return _Form(None, read)


def _read_float(data: Any, _: float) -> float:
    if type(data) is float and math.isfinite(data):
        return data
    if type(data) is int and -_WHOLE < data < _WHOLE:
        return float(data)
    raise _UnfitError("is not a finite number", data)


def _read_str(data: Any, origin: float) -> str:
    if type(data) is str and data.isascii():
        return data
    text: str = _TEXT.read(data, origin)
    return text.encode("utf-8", "replace").decode()


def _read_key(data: Any, _: float) -> int:
    with contextlib.suppress(ValueError):  # also for thousands of digits
        number = int(data)
        if str(number) == data:
            return number
    raise _UnfitError("is not an integer", data)


def _read_worker(data: Any, _: float) -> WorkerId:
    try:
        worker = WorkerId.parse(data) if type(data) is str else None
    except ValueError:  # SettingsError is one; int() raises one for thousands of digits
        worker = None
    if worker is None or worker.key != data:
        raise _UnfitError("is not a worker, host[slot]#attempt", data)
    return worker


_TEXT = _exactly(str)
_INTEGER_KEY = _Form(lambda value, _: str(value), _read_key)
_SIMPLE: dict[Any, _Form] = {
    bool: _exactly(bool),
    int: _bounded(int, _exactly(int), Within(-MOST_INTEGER, MOST_INTEGER)),
    float: _Form(None, _read_float),
    str: _Form(None, _read_str),
    bytes: _exactly(bytes),
    Path: _Form(lambda value, _: str(value), lambda data, origin: Path(_TEXT.read(data, origin))),
    WorkerId: _Form(lambda value, _: value.key, _read_worker),
}


def _named(hint: Any, met: list[Any]) -> str:
    """Describe a type; add the classes that it names to ``met``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join((_named(args[0], met), *(f"({mark})" for mark in args[1:])))
    if origin in (UnionType, Union):
        return " | ".join(_named(arg, met) for arg in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if arg is ... else _named(arg, met) for arg in args)}]"
    if hint is NoneType:
        return "None"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "/".join(member.value for member in hint)
    if hint not in _SIMPLE and hint not in met:
        met.append(hint)
    return str(hint.__name__)
