"""Requests to etcd's JSON gateway and its answers, as bytes of JSON.

Owns the formats. Pure. 64-bit numbers are strings there, and 0, empty strings and false are omitted from answers. An
invalid format is a ValueError.

Differences between versions: an error is ``{"error": TEXT, "code": N}`` up to 3.5, and ``{"message": TEXT, "code": N}``
from 3.6 on. That of a keep-alive, which is a stream, is nested in an ``error``; its code is ``grpc_code`` up to 3.5.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# As in the gateway, in JSON's own types.
Body = dict[str, Any]
_MOST = (1 << 63) - 1
_CLUSTER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key, and its value.

    Attributes:
        key: its name.
        value: bytes; empty if only keys were asked for.
        create_revision: distinguishes it from a key of that name which is deleted and created again.
        mod_revision: changes with each write.
        lease: the one to which it is attached; 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Some keys, in their order.

    Attributes:
        found: the keys.
        more: whether there are more after them.
        revision: of the cluster when it answered.
    """

    found: tuple[KeyValue, ...]
    more: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Created:
    """A comparison: the key has this create_revision; 0: it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Modified:
    """A comparison: the key has this mod_revision; 0: it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a value; ``lease``: the one to which it is attached, 0 for none."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key, or all from ``key`` to before ``end``."""

    key: str
    end: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a key, or all from ``key`` to before ``end``."""

    key: str
    end: str = ""


Compare = Created | Modified
Operation = Put | Get | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a transaction.

    Attributes:
        succeeded: whether all comparisons held.
        found: the keys that each operation has read; empty for other operations.
        revision: of the cluster when it answered.
    """

    succeeded: bool
    found: tuple[tuple[KeyValue, ...], ...]
    revision: int


def end_of(prefix: str) -> str:
    """Return the first key after all that begin with this prefix."""
    return f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"


def range_request(start: str, end: str, *, limit: int = 0, keys_only: bool = False, revision: int = 0) -> Body:
    """Return a request for a range; see :meth:`EtcdClient.range <elastic_driver.etcd.client.EtcdClient.range>`."""
    return {
        **_keys(start, end),
        **({"limit": str(limit)} if limit else {}),
        **({"keys_only": True} if keys_only else {}),
        **({"revision": str(revision)} if revision else {}),
    }


def txn_request(compares: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> Body:
    """Return a request for a transaction."""
    return {
        "compare": [_compare(compare) for compare in compares],
        "success": [_operation(each) for each in success],
        "failure": [_operation(each) for each in failure],
    }


def parse(data: bytes) -> Body:
    """Parse an answer as JSON."""
    try:
        answer: object = json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _object(answer)


def refusal_in(answer: Body) -> tuple[str, int] | None:
    """Return etcd's error message and gRPC's code; None if it reports no error."""
    inner = answer.get("error")
    if isinstance(inner, dict):
        answer = inner
    elif "code" not in answer:
        return None
    words = answer.get("message") or answer.get("error")
    code = answer.get("code", answer.get("grpc_code"))
    if not isinstance(words, str) or type(code) is not int:
        raise ValueError("it is an error without a message or a code")
    return words, code


def page(answer: Body) -> Page:
    """Parse the answer to a range."""
    found = tuple(_key_value(kv) for kv in _list(answer, "kvs"))
    return Page(found, _flag(answer, "more"), revision_of(answer))


def outcome(answer: Body) -> Outcome:
    """Parse the answer to a transaction."""
    found = []
    for response in _list(answer, "responses"):
        read = _object(_object(response).get("response_range", {}))
        found.append(tuple(_key_value(kv) for kv in _list(read, "kvs")))
    return Outcome(_flag(answer, "succeeded"), tuple(found), revision_of(answer))


def granted(answer: Body) -> tuple[int, int]:
    """Parse the answer to a grant."""
    lease, ttl_s = _number(answer, "ID"), _number(answer, "TTL")
    if not lease or not ttl_s:
        raise ValueError("it contains no lease")
    return lease, ttl_s


def kept_alive(answer: Body) -> int:
    """Parse the answer to a keep-alive."""
    result = _object(answer["result"])
    revision_of(result)
    return _number(result, "TTL")


def token(answer: Body) -> str:
    """Parse the answer to an authentication."""
    text = answer.get("token")
    if not isinstance(text, str) or not text.isascii() or not text.isprintable():
        raise ValueError("it contains no token")
    return text


def revision_of(answer: Body) -> int:
    """Return the revision of the cluster when it answered. An answer without it is not etcd's."""
    return _number(_object(answer["header"]), "revision")


def cluster_of(answer: Body) -> str:
    """Return the id of the cluster that has answered, a 64-bit number as a string; "" if it is omitted."""
    result = answer.get("result", answer)  # of a keep-alive, which is a stream
    header = result.get("header") if isinstance(result, dict) else None
    number = header.get("cluster_id") if isinstance(header, dict) else None
    return number if isinstance(number, str) and _CLUSTER.fullmatch(number) else ""


def _keys(start: str, end: str) -> Body:
    return {"key": _base64(start.encode()), **({"range_end": _base64(end.encode())} if end else {})}


def _compare(compare: Compare) -> Body:
    target, name = ("CREATE", "create_revision") if isinstance(compare, Created) else ("MOD", "mod_revision")
    return {**_keys(compare.key, ""), "result": "EQUAL", "target": target, name: str(compare.revision)}


def _operation(operation: Operation) -> Body:
    match operation:
        case Put(key, value, lease):
            with_lease = {"lease": str(lease)} if lease else {}
            return {"request_put": {**_keys(key, ""), "value": _base64(value), **with_lease}}
        case Get(start, end):
            return {"request_range": _keys(start, end)}
        case Delete(start, end):
            return {"request_delete_range": _keys(start, end)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _key_value(data: object) -> KeyValue:
    found = _object(data)
    return KeyValue(
        _bytes(found, "key").decode(),
        _bytes(found, "value"),
        _number(found, "create_revision"),
        _number(found, "mod_revision"),
        _number(found, "lease"),
    )


def _object(data: object) -> Body:
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    return data


def _list(answer: Body, name: str) -> list[object]:
    items = answer.get(name, [])
    if not isinstance(items, list):
        raise ValueError(f"its {name} is not a list")
    return items


def _flag(answer: Body, name: str) -> bool:
    flag = answer.get(name, False)
    if not isinstance(flag, bool):
        raise ValueError(f"its {name} is not a boolean")
    return flag


def _number(answer: Body, name: str) -> int:
    text = answer.get(name, "0")
    number = int(text) if isinstance(text, str) and len(text) < 20 else -1
    if not 0 <= number <= _MOST:
        raise ValueError(f"its {name} is not a number")
    return number


def _bytes(answer: Body, name: str) -> bytes:
    text = answer.get(name, "")
    if not isinstance(text, str):
        raise ValueError(f"its {name} is not a string")
    return base64.b64decode(text, validate=True)
