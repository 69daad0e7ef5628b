"""What is authenticated on a connection, byte for byte: another version of the package has to agree."""

from __future__ import annotations

import hmac
from hashlib import blake2b

import pytest

from elastic_driver.rendezvous import proof
from elastic_driver.rendezvous.proof import Session, digest_of, is_same

pytestmark = pytest.mark.unit

KEY = bytes(range(32))
CLIENT, SERVER = "11" * 16, "22" * 16
SESSION = Session(KEY, "worker a[0]#0", CLIENT, SERVER)
REQUEST = (1, b"POST", b"/v1/watch?wait_s=1", digest_of(b"{}"))


def test_fixed_vectors():
    assert SESSION.greeting == b"c7ea55158940264370bb16f98b3d2e68"
    assert SESSION.of_request(*REQUEST) == b"7c846017fdc27a38b770cfc60161aebd"
    assert SESSION.of_request(2, b"GET", b"/v1/status", b"") == b"77a61a494bafa62a3f20e0fc582ebad4"
    assert SESSION.of_reply(1, 204, b"") == b"1349d36f5298ebaf1ebf55855e947567"
    assert digest_of(b"{}") == b"c09da522dac261c3d2566230bed10d2f3ef13f8e7654576c12e857e07f786098"
    assert digest_of(b"") == b""


def test_they_are_what_the_standard_library_makes_of_the_documented_bytes():
    """Once more, with nothing of the module."""
    both = f"elastic_driver connection\nworker a[0]#0\n{CLIENT}\n{SERVER}".encode()
    key = blake2b(both, key=KEY, digest_size=32).digest()
    message = b"request\n1\nPOST /v1/watch?wait_s=1\n" + blake2b(b"{}", digest_size=32).hexdigest().encode()
    assert SESSION.of_request(*REQUEST) == blake2b(message, key=key, digest_size=16).hexdigest().encode()
    assert (
        SESSION.of_reply(1, 200, b"x\n") == blake2b(b"reply\n1\n200\nx\n", key=key, digest_size=16).hexdigest().encode()
    )


@pytest.mark.parametrize(
    "other",
    [
        (2, *REQUEST[1:]),
        (1, b"PUT", *REQUEST[2:]),
        (1, b"POST", b"/v1/watch?wait_s=2", REQUEST[3]),
        (*REQUEST[:3], digest_of(b"{ }")),
        (*REQUEST[:3], b""),
    ],
    ids=["number", "method", "query", "body", "no body"],
)
def test_all_of_a_request_is_covered(other):
    assert SESSION.of_request(*other) != SESSION.of_request(*REQUEST)


def test_all_of_a_reply_is_covered():
    replies = [(1, 200, b"a"), (2, 200, b"a"), (1, 204, b"a"), (1, 200, b"b"), (1, 200, b"")]
    assert len({SESSION.of_reply(*reply) for reply in replies}) == len(replies)


@pytest.mark.parametrize(
    "other",
    [
        (b"k" * 32, "worker a[0]#0", CLIENT, SERVER),
        (KEY, "worker a[0]#1", CLIENT, SERVER),
        (KEY, "worker a[0]#0", SERVER, SERVER),
        (KEY, "worker a[0]#0", CLIENT, CLIENT),
    ],
    ids=["key", "name", "client's nonce", "server's nonce"],
)
def test_a_proof_means_nothing_on_another_connection(other):
    session = Session(*other)
    assert session.greeting != SESSION.greeting
    assert session.of_request(*REQUEST) != SESSION.of_request(*REQUEST)
    assert session.of_reply(1, 200, b"") != SESSION.of_reply(1, 200, b"")


def test_no_proof_passes_for_one_of_another_kind():
    """The bytes of a request can be chosen so that they look like another's; never like an answer or a greeting."""
    assert SESSION.of_request(1, b"GET", b"/", b"") != SESSION.of_reply(1, 200, b"")
    assert SESSION.greeting not in (SESSION.of_request(1, b"GET", b"/", b""), SESSION.of_reply(1, 200, b""))


def test_proofs_are_compared_in_constant_time():
    assert is_same is proof.is_same is hmac.compare_digest
