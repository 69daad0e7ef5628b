"""What a worker of the doctor says of its machine."""

from __future__ import annotations

import pytest

from elastic_driver.doctor import worker
from elastic_driver.doctor.facts import Disk, HostFacts

pytestmark = pytest.mark.unit


class _Client:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[HostFacts] = []

    def post_facts(self, body: bytes) -> None:
        self.posted.append(HostFacts.from_json(body))


def test_a_home_is_left_out_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's machine has others."""
    monkeypatch.setenv("HOME", "/home/bob")
    client = _Client()
    facts = HostFacts(
        package="1", python="3", torch_error="OSError: /home/bob/lib.so", disks=(Disk("tmp", error="/home/bob/tmp"),)
    )
    worker._say(facts, client)  # type: ignore[arg-type]
    [posted] = client.posted
    assert (posted.torch_error, posted.disks[0].error) == ("OSError: ~/lib.so", "~/tmp")
