"""A registration costs no more than its size says, whatever is built of the same parts in it."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.launch.agent.horovod.notification import parse_registration

pytestmark = pytest.mark.unit

KEY = bytes(range(32))


def said(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value, 5))


def hashes_for_ever() -> bytes:
    tuples = b"".join(b"0" + b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    return b"\x80\x02}(" + b")q\x00" + tuples + b"Nu."


def lists_for_ever() -> bytes:
    ends = b"](X\x07\0\0\x001.2.3.4K\x05\x86q\x01" + b"h\x01" * 8000 + b"eq\x00"
    again = b"".join(b"M" + number.to_bytes(2, "little") + b"h\x00" for number in range(1, 6000))
    return b"\x80\x02}(K\x00" + ends + again + b"uC\x20" + KEY + b"\x86."


@pytest.mark.parametrize(
    "data",
    [
        hashes_for_ever(),
        lists_for_ever(),
    ],
)
def test_a_small_one_costs_little(data: bytes) -> None:
    """It is refused before anything is built of it, which would take forever."""
    with pytest.raises(RendezvousProtocolError, match="it reuses its parts too often"):
        parse_registration(base64.b64encode(data))


def test_a_part_may_be_there_twice() -> None:
    end = ("127.0.0.1", 5000)
    assert parse_registration(said(({"lo": [end], "lo:1": [end]}, KEY))).addresses == (end,)
