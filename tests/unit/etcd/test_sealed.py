"""What of a job is sealed in etcd."""

from __future__ import annotations

import pytest

from elastic_driver.etcd.sealed import OVERHEAD, Secret, UnsealError

pytestmark = pytest.mark.unit

SECRET, PLACE = "a secret of a job", "/jobs/a"


@pytest.mark.parametrize("data", [b"", b"a", bytes(1000)])
def test_whoever_has_the_secret_reads_it(data: bytes) -> None:
    sealed = Secret(SECRET, PLACE).seal("1").seal(data, "/jobs/a/1")
    assert len(sealed) == len(data) + OVERHEAD
    assert Secret(SECRET, PLACE).seal("1").unseal(sealed, "/jobs/a/1") == data


def test_the_same_is_sealed_otherwise_each_time() -> None:
    seal = Secret(SECRET, PLACE).seal("1")
    assert len({seal.seal(b"data", "name") for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("secret", "place", "part", "name"),
    [
        ("another secret", PLACE, "1", "name"),
        (SECRET, "/jobs/b", "1", "name"),
        (SECRET, PLACE, "2", "name"),
        (SECRET, PLACE, "1", "another name"),
    ],
)
def test_it_is_read_where_it_was_sealed_and_nowhere_else(secret: str, place: str, part: str, name: str) -> None:
    sealed = Secret(SECRET, PLACE).seal("1").seal(b"data", "name")
    with pytest.raises(UnsealError):
        Secret(secret, place).seal(part).unseal(sealed, name)


def test_what_was_changed_or_cut_is_not_read() -> None:
    seal = Secret(SECRET, PLACE).seal("1")
    sealed = seal.seal(b"data", "name")
    for at in range(len(sealed)):
        with pytest.raises(UnsealError):
            seal.unseal(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], "name")
        with pytest.raises(UnsealError):
            seal.unseal(sealed[:at], "name")


def test_a_name_tells_secrets_apart() -> None:
    names = {Secret(secret, place).name for secret in (SECRET, "another") for place in (PLACE, "/jobs/b")}
    assert len(names) == 4
    assert Secret(SECRET, PLACE).name in names
