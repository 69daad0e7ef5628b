"""A worker's notification service: where it listens, according to the worker, and the notification of changed hosts.

Owns the form of both. They are pickles: messages from a worker are read by an unpickler that loads no class, and those
to it are a pickle of one of Horovod's classes, written by hand. Its answers are not unpickled at all: their seal is
enough.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import io
import ipaddress
import itertools
import pickle
import pickletools
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastic_driver.errors import RendezvousError, RendezvousProtocolError, in_words

_SEAL_BYTES = 32
_LENGTH = struct.Struct("i")
_MOST_BYTES = 64 << 10
_MOST_ADDRESSES = 64
_KEY_BYTES = range(16, 65)
# Everything needed by a pickle of texts, numbers, bytes and tuples, lists and dicts of them. None of these allocates
# more than the size of the pickle, so a small one stays small: PUT and LONG_BINPUT would, as the memo is an array.
_OPCODES = frozenset(
    re.split(
        " ",
        "PROTO FRAME STOP MARK POP MEMOIZE BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT "
        "BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES "
        "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS",
    )
)

# How often the parts of a pickle may be reused. A value built from one part many times takes as long to hash and to
# walk through as if each were a part of its own: with 30 kB of it, unbearably long.
_REUSES, _MOST_REUSES = frozenset({"GET", "BINGET", "LONG_BINGET"}), 16


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a worker receives notifications.

    Attributes:
        addresses: IPv4 addresses and ports.
        key: seals the notifications, and its answers.
    """

    addresses: tuple[tuple[str, int], ...]
    key: bytes = field(repr=False)


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def parse_registration(body: bytes) -> Registration:
    """Parse a worker's registration of its notification service.

    Raises:
        RendezvousProtocolError: it is anything else.
    """
    if len(body) > _MOST_BYTES:
        raise RendezvousProtocolError(
            f"cannot read the worker's notification address: {len(body)} bytes; at most {_MOST_BYTES} are allowed"
        )
    try:
        data = base64.b64decode(body, validate=True)
        names = [opcode.name for opcode, _, _ in pickletools.genops(data)]
        strange = set(names) - _OPCODES
        if strange:
            raise pickle.UnpicklingError(f"it has the opcodes {', '.join(sorted(strange))}")
        if sum(name in _REUSES for name in names) > _MOST_REUSES:
            raise pickle.UnpicklingError("it reuses its parts too often")
        said = _NoClasses(io.BytesIO(data)).load()
        by_interface, key = said
        ends = (end for ends in by_interface.values() for end in ends)
        addresses = tuple(_address(end) for end in itertools.islice(ends, _MOST_ADDRESSES + 1))
    except (
        pickle.UnpicklingError,
        binascii.Error,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        EOFError,
        RecursionError,
        OverflowError,
    ) as error:
        raise RendezvousProtocolError(f"cannot read the worker's notification address: {error}") from None
    if not isinstance(key, bytes) or len(key) not in _KEY_BYTES or not 0 < len(addresses) <= _MOST_ADDRESSES:
        raise RendezvousProtocolError(
            "cannot read the worker's notification address: its key or its list of addresses is invalid"
        )
    return Registration(tuple(dict.fromkeys(addresses)), key)


def _address(end: Any) -> tuple[str, int]:
    host, port = end
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError("an address must be a string and a port number")
    return str(ipaddress.IPv4Address(host)), port


async def notify(registration: Registration, *, timestamp: float, res: int, own: Iterable[str], limit_s: float) -> None:
    """Notify a worker that hosts have changed.

    Args:
        registration: where it listens.
        timestamp: of the change; a known one is ignored.
        res: what has changed, as numbered by Horovod's HostUpdateResult.
        own: the addresses of this machine. A worker cannot make its agent connect to others.
        limit_s: for everything, seconds.

    Raises:
        RendezvousError: no service there has acknowledged it.
        TimeoutError: not in time.
    """
    body = _pickled("horovod.runner.elastic.worker", "HostsUpdatedRequest", timestamp=timestamp, res=res)
    here = frozenset(own)
    errors = []
    async with asyncio.timeout(limit_s):
        for host, port in registration.addresses:
            if host not in here:
                continue
            try:
                await _ask(host, port, registration.key, body)
            except (OSError, EOFError, RendezvousProtocolError) as error:
                errors.append(f"{host}:{port}: {in_words(error)}")
            else:
                return
    raise RendezvousError(
        f"cannot notify the worker: {'; '.join(errors) or 'none of its addresses is on this machine'}"
    )


async def _ask(host: str, port: int, key: bytes, body: bytes) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(hmac.digest(key, body, hashlib.sha256) + _LENGTH.pack(len(body)) + body)
        await writer.drain()
        head = await reader.readexactly(_SEAL_BYTES + _LENGTH.size)
        (length,) = _LENGTH.unpack_from(head, _SEAL_BYTES)
        if not 0 <= length <= _MOST_BYTES:
            raise RendezvousProtocolError(f"the length of its answer is invalid: {length} bytes")
        answer = await reader.readexactly(length)
        if not hmac.compare_digest(hmac.digest(key, answer, hashlib.sha256), head[:_SEAL_BYTES]):
            raise RendezvousProtocolError("the answer is not signed with the worker's key")
    finally:
        writer.close()


def _pickled(module: str, name: str, **fields: float) -> bytes:
    """Return a pickle of an object, given its class by name and its attributes (protocol 2)."""
    attributes = pickle.dumps(fields, 2)[2:-1]
    made = f"c{module}\n{name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return pickle.PROTO + b"\x02" + made + attributes + pickle.BUILD + pickle.STOP
