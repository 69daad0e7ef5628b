"""The exchange, byte for byte, and everything that somebody between the two ends, or at one of them, can do to it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import inspect
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous import authentication
from elastic_driver.rendezvous.authentication import (
    MAC_BYTES,
    MAGIC,
    NO_CERTIFICATE,
    NONCE_BYTES,
    Challenge,
    Proof,
    RefusedAuthenticationError,
    Request,
    opening,
    read_refusal,
    read_request,
    refusal,
)

pytestmark = pytest.mark.unit

KEY, CERTIFICATE = bytes(range(32)), hashlib.sha256(b"a certificate").digest()
CLIENT, DRIVER = b"y" * NONCE_BYTES, b"d" * NONCE_BYTES
NAME = "agent 2f"
PROOF = Proof(NAME, KEY, CERTIFICATE, CLIENT)

_SECRET = st.binary(min_size=32, max_size=32)
_NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=512)


def asked(sent: bytes, *, has_nonce: bool = True) -> Request:
    request = read_request(sent, has_nonce=has_nonce)
    assert request is not None
    return request


def challenge(
    sent: bytes = PROOF.request, *, key: bytes = KEY, certificate: bytes = CERTIFICATE, nonce: bytes = DRIVER
) -> Challenge:
    return Challenge(asked(sent), key, certificate, nonce)


def is_let_in(sent: bytes, proof: Proof, driver: bytes = CERTIFICATE) -> bool:
    """Whether both ends accept each other when the driver gets these bytes for the client's first message."""
    try:
        asks = challenge(sent, certificate=driver)
        return asks.accepts(proof.response(asks.message))
    except RendezvousProtocolError:
        return False


# --- the bytes -----------------------------------------------------------------------------------------------------


def test_fixed_vectors() -> None:
    assert PROOF.request == b"\x00ED\x01\x00\x08agent 2f" + CLIENT
    asks = challenge()
    assert asks.message == b"\x00" + DRIVER + bytes.fromhex(
        "3bec281f3de776a8ac8a15fa6a50824ae3009b32edd597fdb66dfa54fbbbfe73"
    )
    assert PROOF.response(asks.message) == bytes.fromhex(
        "fa936bcfefb421bc86b550c993b96d27292a36aa90545155385c61aad1cb486f"
    )
    assert refusal("nö") == b"\x01\x00\x03n\xc3\xb6"
    assert opening("worker a[0]#0") == b"\x00ED\x01\x00\x0dworker a[0]#0"


def test_they_are_what_the_standard_library_makes_of_the_documented_bytes() -> None:
    """Once more, with nothing of the module."""
    covered = CERTIFICATE + CLIENT + DRIVER + b"agent 2f"
    asks = challenge()
    driver = hmac.new(KEY, b"elastic_driver 1 driver\0" + covered, hashlib.sha256).digest()
    assert asks.message == b"\0" + DRIVER + driver
    client = hmac.new(KEY, b"elastic_driver 1 client\0" + covered, hashlib.sha256).digest()
    assert PROOF.response(asks.message) == client
    assert asks.accepts(client)
    assert bytes(32) == NO_CERTIFICATE


@given(_NAMES, _SECRET, _SECRET, _SECRET, _SECRET, st.binary(max_size=40))
def test_two_that_hold_the_same_key_accept_each_other(
    name: str, key: bytes, certificate: bytes, client: bytes, driver: bytes, behind: bytes
) -> None:
    proof = Proof(name, key, certificate, client)
    request = asked(proof.request + behind)
    assert request == Request(name, client, len(proof.request))
    asks = Challenge(request, key, certificate, driver)
    assert asks.accepts(proof.response(bytearray(asks.message)))
    assert asked(opening(name) + behind, has_nonce=False) == Request(name, b"", len(opening(name)))


# --- cuts and changes ------------------------------------------------------------------------------------------------


@given(_NAMES, st.booleans())
def test_of_each_beginning_of_a_request_something_is_missing(name: str, has_nonce: bool) -> None:
    whole = opening(name) + CLIENT * has_nonce
    for size in range(len(whole)):
        assert read_request(bytearray(whole[:size]), has_nonce=has_nonce) is None
    assert read_request(bytearray(whole), has_nonce=has_nonce) is not None


@pytest.mark.parametrize("answer", [challenge().message, refusal(""), refusal("no"), refusal("é" * 150)])
def test_of_each_beginning_of_an_answer_no_more_is_read_than_is_missing(answer: bytes) -> None:
    for size in range(len(answer)):
        missing = PROOF.missing(bytearray(answer[:size]))
        assert 1 <= missing <= len(answer) - size
        with pytest.raises(RendezvousProtocolError) as caught:
            PROOF.response(answer[:size])
        assert not isinstance(caught.value, RefusedAuthenticationError)
    assert PROOF.missing(answer) == 0
    with pytest.raises(RendezvousProtocolError):
        PROOF.missing(answer + b"x")
    with pytest.raises(RendezvousProtocolError):
        PROOF.response(answer + b"x")


@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_no_changed_byte_of_any_message_is_accepted(bits: int) -> None:
    def changed(message: bytes) -> list[bytes]:
        return [
            message[:place] + bytes([message[place] ^ bits]) + message[place + 1 :] for place in range(len(message))
        ]

    assert is_let_in(PROOF.request, PROOF)
    for sent in changed(PROOF.request):
        try:
            request = read_request(sent)
        except RendezvousProtocolError:
            continue
        # A longer name is awaited in vain, for nothing more is sent before the driver has answered.
        assert request is None or not is_let_in(sent, PROOF)
    asks = challenge()
    for answer in changed(asks.message):
        with pytest.raises(RendezvousProtocolError):
            PROOF.response(answer)
    response = PROOF.response(asks.message)
    assert not any(map(asks.accepts, changed(response)))


@given(st.binary(min_size=1, max_size=MAC_BYTES))
def test_a_response_of_another_length_is_not_accepted(more: bytes) -> None:
    asks = challenge()
    whole = PROOF.response(asks.message)
    for response in (more, whole + more, more + whole, *(whole[:size] for size in range(MAC_BYTES))):
        assert not asks.accepts(response)


# --- somebody between them, or at one end ----------------------------------------------------------------------------


def test_a_relay_with_two_certificates_has_nothing_accepted() -> None:
    """It ends TLS on both sides, and passes on what it likes."""
    own = hashlib.sha256(b"the relay's certificate").digest()
    victim = Proof(NAME, KEY, own, CLIENT)  # which was shown the relay's
    asks = challenge(victim.request)
    with pytest.raises(RendezvousProtocolError, match="did not prove"):
        victim.response(asks.message)
    # And could the client be had to respond, that would be over the wrong certificate.
    there = challenge(victim.request, certificate=own).message
    assert not asks.accepts(victim.response(there))


def test_what_was_said_once_is_of_no_use_on_another_connection() -> None:
    before = challenge()
    response = PROOF.response(before.message)
    # To the driver, by somebody who has recorded a client.
    again = challenge(nonce=b"e" * NONCE_BYTES)
    assert not again.accepts(response)
    # To a client, by somebody who has recorded the driver.
    with pytest.raises(RendezvousProtocolError):
        replace(PROOF, nonce=b"f" * NONCE_BYTES).response(before.message)


def test_a_mac_sent_back_to_its_maker_proves_nothing() -> None:
    asks = challenge()
    mac = asks.message[-MAC_BYTES:]
    assert not asks.accepts(mac)
    # The client's own, with the driver's nonce, or with both nonces the client's own.
    for nonce in (DRIVER, CLIENT):
        there = Challenge(asked(PROOF.request), KEY, CERTIFICATE, nonce)
        with pytest.raises(RendezvousProtocolError):
            PROOF.response(b"\0" + nonce + PROOF.response(there.message))


def test_who_waits_for_the_driver_s_proof_gives_none_before() -> None:
    """Whoever has the driver's address after it gets a name and a nonce."""
    assert KEY not in PROOF.request
    for answer in (b"", b"\0" * 65, b"\0" + DRIVER + bytes(MAC_BYTES), CLIENT, PROOF.request):
        with pytest.raises(RendezvousProtocolError):
            PROOF.response(answer)


@given(st.sampled_from(["name", "key", "certificate"]), _SECRET, _NAMES)
def test_name_key_and_certificate_are_each_covered(what: str, other: bytes, name: str) -> None:
    changed = replace(PROOF, **{what: name if what == "name" else other})
    asks = challenge()
    if changed == PROOF:
        return
    with pytest.raises(RendezvousProtocolError):
        changed.response(asks.message)
    own = Challenge(asked(changed.request), changed.key, changed.certificate, DRIVER)
    assert not asks.accepts(changed.response(own.message))
    assert not own.accepts(PROOF.response(asks.message))


@given(st.integers(0, 32), st.sampled_from(["key", "certificate", "nonce"]))
def test_nothing_can_be_moved_between_the_parts_that_are_covered(size: int, what: str) -> None:
    """Nothing stands between them, so that each has to have its length. To HMAC no key is one of zeros."""
    part = bytes(size) if size < 32 else bytes(33)
    with pytest.raises(ValueError, match="32 bytes"):
        challenge(**{what: part})
    if what != "nonce":
        proof = replace(PROOF, **{what: part})
        with pytest.raises(ValueError, match="32 bytes"):
            proof.response(challenge().message)
    with pytest.raises(ValueError, match="32 bytes"):  # of a unix socket: there is nothing to prove, nor a nonce
        Challenge(asked(opening(NAME), has_nonce=False), KEY, CERTIFICATE, DRIVER)


def test_time_does_not_tell_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return True

    monkeypatch.setattr(authentication.hmac, "compare_digest", compare)
    asks = challenge()
    assert asks.accepts(b"x" * MAC_BYTES)
    PROOF.response(b"\0" + DRIVER + b"y" * MAC_BYTES)
    assert [one[:1] for one, _ in compared] == [b"x", b"y"]


def test_keys_are_not_printed() -> None:
    asks = challenge()
    assert repr(KEY) not in repr(PROOF)
    assert KEY.hex() not in repr(PROOF)
    assert not hasattr(asks, "__dict__")


def test_the_module_knows_no_socket_clock_or_random_source() -> None:
    imported = {
        line.split()[1]
        for line in inspect.getsource(authentication).splitlines()
        if line.startswith(("import", "from"))
    }
    assert imported == {"__future__", "hmac", "dataclasses", "elastic_driver.errors"}


# --- rubbish ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=700), st.booleans())
def test_rubbish_is_no_request(data: bytes, has_nonce: bool) -> None:
    for sent in (data, MAGIC + data):
        try:
            request = read_request(sent, has_nonce=has_nonce)
        except RendezvousProtocolError:
            continue
        if request is not None:
            assert sent[: request.size] == opening(request.name) + request.nonce
            assert len(request.nonce) == NONCE_BYTES * has_nonce
        else:
            assert len(sent) < len(MAGIC) + 2 + 512 + NONCE_BYTES
            assert MAGIC.startswith(sent[:4])


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01",
        b"\x80",
        b"\x00E ",
        b"\x00\x01\x00\x00\x21\x12\xa4\x42",
    ],
    ids=["one byte", "HTTP", "HTTP/2", "TLS", "SSL 2", "nearly", "STUN"],
)
def test_what_begins_otherwise_is_refused_at_its_first_bytes(sent: bytes) -> None:
    with pytest.raises(RendezvousProtocolError, match=r"does not start like one$"):
        read_request(sent)


def test_another_version_is_named() -> None:
    with pytest.raises(RendezvousProtocolError, match="of another version"):
        read_request(MAGIC[:3] + b"\x02")


@pytest.mark.parametrize("size", [0, 513, 0xFFFF])
def test_a_name_of_that_length_is_refused_before_it_is_awaited(size: int) -> None:
    with pytest.raises(RendezvousProtocolError, match=f"not {size}"):
        read_request(MAGIC + size.to_bytes(2, "big"))


def test_names_have_1_to_512_characters() -> None:
    for size in (1, 512):
        assert asked(opening("n" * size) + CLIENT).name == "n" * size
    for size in (0, 513):
        with pytest.raises(ValueError, match="1 to 512"):
            opening("n" * size)


@pytest.mark.parametrize("name", ["agent é", "agent \n", "agent \x1b[2J", "\x00", "agent \x7f", "\x80"])
def test_names_are_printable_ascii(name: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        opening(name)
    encoded = name.encode("latin-1")
    with pytest.raises(RendezvousProtocolError, match="printable ASCII"):
        read_request(MAGIC + len(encoded).to_bytes(2, "big") + encoded + CLIENT)


@given(st.binary(max_size=400))
def test_rubbish_is_no_proof(answer: bytes) -> None:
    for each in (answer, b"\0" + answer, b"\1" + answer):
        with pytest.raises(RendezvousProtocolError):
            PROOF.response(each)
        with contextlib.suppress(RendezvousProtocolError):
            assert 0 <= PROOF.missing(each) <= 303


# --- refusals --------------------------------------------------------------------------------------------------------


def told(answer: bytes) -> str:
    with pytest.raises(RefusedAuthenticationError) as caught:
        PROOF.response(answer)
    return str(caught.value)


@given(st.text(max_size=400))
@example("é" * 150)
@example("é" * 151)
@example("a" + "é" * 150)
@example("no\ud800")
def test_a_refusal_arrives_whole_or_cut_between_characters(text: str) -> None:
    answer = refusal(text)
    assert len(answer) <= 303
    assert PROOF.missing(answer) == 0
    sent = answer[3:].decode()  # never in the middle of one
    whole = text.encode(errors="replace").decode()
    assert whole.startswith(sent)
    assert sent == whole or len(whole[: len(sent) + 1].encode()) > 300
    assert told(answer) == "".join(each if each.isprintable() else "?" for each in sent)


def test_a_refusal_cannot_write_on_the_terminal() -> None:
    said = told(refusal("a\x1b[2J\r\nb\x00\x7f\x9b‮\ud800 é"))
    assert said == "a?[2J??b????? é"
    assert said.isprintable()


@pytest.mark.parametrize(
    ("cut", "shown"),
    [(b"\xc3", "�"), (b"ok \xe2\x82", "ok �"), (b"\xff\xfe", "��"), (b"\xed\xa0\x80", "���")],
)
def test_a_refusal_that_is_not_utf_8_is_shown_as_far_as_it_can_be(cut: bytes, shown: str) -> None:
    assert told(b"\1" + len(cut).to_bytes(2, "big") + cut) == shown


def test_a_refusal_is_told_from_what_else_may_come() -> None:
    assert read_refusal(refusal("full")) == "full"
    assert read_refusal(refusal("full\n")) == "full?"
    assert {read_refusal(each) for each in (b"", b"\1", b"HTTP/1.1 200 OK\r\n", challenge().message)} == {""}


@pytest.mark.parametrize("length", [301, 0xFFFF])
def test_a_refusal_that_would_be_too_long_is_none(length: int) -> None:
    assert PROOF.missing(b"\1" + length.to_bytes(2, "big")[:1]) == 1
    with pytest.raises(RendezvousProtocolError) as caught:
        PROOF.missing(b"\1" + length.to_bytes(2, "big"))
    assert not isinstance(caught.value, RefusedAuthenticationError)
