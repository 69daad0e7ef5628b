"""The call in pieces, and outcomes out of pieces: repeated, refused, of several workers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.function import delivery as delivery_module
from elastic_driver.function.delivery import Delivery
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.system import file_writer
from tests.support.fakes import asking

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 1, 2)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "PIECE_BYTES", 4)


def ask(delivery: Delivery, route: str, *path: str, worker: WorkerId = A, body: bytes = b"") -> tuple[int, bytes]:
    method = "GET" if route == "call" else "POST"
    answer = asking.ask(delivery.routes, Identity(Role.WORKER, worker), method, "/".join((route, *path)), body)
    assert isinstance(answer, tuple)
    return answer


def outcomes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("outcome-*"))]


def test_the_call_in_pieces(tmp_path: Path) -> None:
    delivery = Delivery(b"0123456789", tmp_path)
    assert json.loads(ask(delivery, "call")[1]) == {"pieces": 3}
    assert b"".join(ask(delivery, "call", str(number))[1] for number in range(3)) == b"0123456789"
    for wrong in ("3", "-1", "x", "1" * 20, ""):
        with pytest.raises(RendezvousProtocolError):
            ask(delivery, "call", wrong)
    delivery.close()


def test_outcomes_are_whole_or_not_there_and_in_the_order_of_their_first_pieces(tmp_path: Path) -> None:
    delivery = Delivery(b"", tmp_path)
    assert ask(delivery, "outcome", "1", "3", body=b"4567") == (204, b"")
    assert ask(delivery, "outcome", "0", "1", worker=B, body=b"b") == (204, b"")
    ask(delivery, "outcome", "2", "3", body=b"89")
    ask(delivery, "outcome", "0", "3", body=b"0123")
    half = WorkerId("half", 0, 0)
    ask(delivery, "outcome", "0", "2", worker=half, body=b"half")
    delivery.close()
    assert outcomes(tmp_path) == [b"0123456789", b"b"]


def test_one_that_is_posted_twice_is_there_once(tmp_path: Path) -> None:
    delivery = Delivery(b"", tmp_path)
    for _ in range(2):
        assert ask(delivery, "outcome", "0", "2", body=b"0123") == (204, b"")
        assert ask(delivery, "outcome", "1", "2", body=b"4") == (204, b"")
    delivery.close()
    assert outcomes(tmp_path) == [b"01234"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (("0", "2"), b"012"),
        (("0", "2"), b"01234"),
        (("2", "2"), b"0123"),
        (("0", "0"), b""),
        (("0", str(1 << 21)), b"0123"),
        (("-1", "2"), b"0123"),
        (("0", "3"), b"0123"),  # the other pieces were of two
    ],
)
def test_what_is_no_piece_is_refused(tmp_path: Path, path: tuple[str, ...], body: bytes) -> None:
    delivery = Delivery(b"", tmp_path)
    ask(delivery, "outcome", "1", "2", body=b"4")
    with pytest.raises(RendezvousProtocolError):
        ask(delivery, "outcome", *path, body=body)
    ask(delivery, "outcome", "0", "2", body=b"0123")
    delivery.close()
    assert outcomes(tmp_path) == [b"01234"]


def test_a_piece_without_room_is_to_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "ROOM_BYTES", 3)
    delivery = Delivery(b"", tmp_path)
    assert ask(delivery, "outcome", "0", "2", body=b"0123") == (429, b"")
    delivery.close()
    assert outcomes(tmp_path) == []


def test_a_disk_that_fails_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    delivery = Delivery(b"", tmp_path / "gone")
    with caplog.at_level(logging.WARNING):
        ask(delivery, "outcome", "0", "2", body=b"0123")
        ask(delivery, "outcome", "1", "2", body=b"4")
        delivery.close()
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith(f"cannot store the result of worker a[0]: {tmp_path / 'gone'}/")
    assert said.endswith(": No such file or directory")
