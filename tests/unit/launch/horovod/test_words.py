"""The words of Horovod's older protocol (elastic_driver/dialects/horovod.py)."""

from __future__ import annotations

import pytest

from elastic_driver.dialects.horovod import (
    check_protocol,
    ends_init,
    place_variables,
    placed,
    planned,
    scope_and_key,
)
from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.hosts import SlotInfo

pytestmark = pytest.mark.unit
SLOT = SlotInfo(3, 8, 1, 2, 1, 4)


def test_a_place() -> None:
    assert placed(SLOT) == b"3,8,1,2,1,4"
    assert place_variables(SLOT) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "4",
    }
    assert planned(place_variables(SLOT)) == SLOT


@pytest.mark.parametrize("change", [{"HOROVOD_SIZE": "many"}, {"HOROVOD_CROSS_SIZE": ""}])
def test_no_place(change: dict[str, str]) -> None:
    assert planned(place_variables(SLOT) | change) is None
    assert planned({}) is None


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        (b"/global/rank_3", ("global", "rank_3")),
        (b"/rank_and_size/host-1.example:0", ("rank_and_size", "host-1.example:0")),
        ("/local_h\u00f6st/0".encode("latin-1"), ("local_h\u00f6st", "0")),
    ],
)
def test_paths(url: bytes, parts: tuple[str, str]) -> None:
    assert scope_and_key(url) == parts


@pytest.mark.parametrize("url", [b"", b"/", b"*", b"/a", b"/a/", b"//a", b"/a/b/c", b"a/b", b"x/a/b", b"http://h/a/b"])
def test_no_paths(url: bytes) -> None:
    with pytest.raises(RendezvousProtocolError):
        scope_and_key(url)


def test_the_last_context() -> None:
    assert ends_init("global") is False
    assert ends_init("local_cross_host") is False
    assert ends_init("global_process_set_hash_1f") is False
    assert ends_init("cross_1") is None
    assert ends_init("cross_1_process_set_hash_1f") is True


def test_modes() -> None:
    assert check_protocol("AUTO", "--horovod-protocol") == "auto"
    with pytest.raises(SettingsError, match="--horovod-protocol 'never' is not one of auto, on, off"):
        check_protocol("never", "--horovod-protocol")
