"""The client of etcd, before one in this process: what it understands, and what it makes of rubbish."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_driver.etcd.client import EtcdClient, EtcdRefusedError, EtcdUnreachableError
from elastic_driver.etcd.messages import Put
from elastic_driver.etcd.place import EtcdPlace
from tests.support.fakes.etcd_contract import EtcdContract
from tests.support.fakes.fake_etcd import FakeEtcd, Instead, Refusal, fake_etcd, nobody

pytestmark = pytest.mark.unit


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    with fake_etcd() as fake:
        yield fake


@pytest.fixture
def client(etcd: FakeEtcd) -> Iterator[EtcdClient]:
    with EtcdClient(etcd.place()) as client:
        yield client


class TestTheFake(EtcdContract):
    """It does what the real one does, as far as it is asked."""


def test_the_next_server_is_asked_and_stays_the_first(etcd: FakeEtcd) -> None:
    place = etcd.place()
    with EtcdClient(replace(place, endpoints=(nobody(), etcd.endpoint))) as client:
        assert client.get("/k") is None
        assert client.get("/k") is None
    assert etcd.asked == ["/v3/kv/range"] * 2


def test_nobody_answers() -> None:
    first, second = nobody(), nobody()
    with fake_etcd() as fake:
        place = replace(fake.place(), endpoints=(first, second))
    refused = "nothing listens there (connection refused)"
    with EtcdClient(place) as client, pytest.raises(EtcdUnreachableError) as caught:
        client.get("/k")
    assert str(caught.value) == f"cannot reach etcd: {first}: {refused}; {second}: {refused}"


def test_a_name_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every name that is none can be told from the others before."""

    def look_up(*unused: object) -> None:
        "a..b".encode("idna")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    client = EtcdClient(EtcdPlace(("http://etcd.example:1",), "/jobs/a"))
    with pytest.raises(EtcdUnreachableError, match=r": etcd\.example is not a valid host name$"):
        client.get("/jobs/a/k")


def test_a_silent_server_has_its_part_of_the_time(etcd: FakeEtcd) -> None:
    go_on = threading.Event()
    try:
        with fake_etcd() as silent:
            silent.instead.append(Instead(until=go_on))
            place = replace(etcd.place(), endpoints=(silent.endpoint, etcd.endpoint))
            with EtcdClient(place, timeout_s=4.0) as client:
                assert client.get("/k") is None
            etcd.instead.append(Instead(until=go_on))
            with EtcdClient(etcd.place(), timeout_s=2.0) as client:
                with pytest.raises(EtcdUnreachableError, match=r": timed out$"):
                    client.get("/k")
                assert client.get("/k") is None  # on another connection
            go_on.set()
    finally:
        go_on.set()


def test_a_connection_that_was_closed_meanwhile_is_made_again(etcd: FakeEtcd, client: EtcdClient) -> None:
    assert client.get("/k") is None
    etcd.instead.append(Instead())
    assert client.get("/k") is None
    # A new one that is closed at once is no answer, though what it asked for may be done.
    client.close()
    etcd.instead.append(Instead(carried_out=True))
    with pytest.raises(EtcdUnreachableError):
        client.txn([], [Put("/k", b"1")])
    assert etcd.held() == {"/k": b"1"}


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is not JSON"),
        (b"<html>", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not JSON"),
        (b"{}", "'header'"),
        (b'{"header":[]}', "it is not an object"),
        (b'{"header":{"revision":5}}', "its revision is not a number"),
        (b'{"header":{"revision":"-1"}}', "its revision is not a number"),
        (b'{"header":{"revision":"99999999999999999999"}}', "its revision is not a number"),
        (b'{"header":{"revision":"1"},"kvs":{}}', "its kvs is not a list"),
        (b'{"header":{"revision":"1"},"kvs":[7]}', "it is not an object"),
        (b'{"header":{"revision":"1"},"kvs":[{"key":7}]}', "its key is not a string"),
        (b'{"header":{"revision":"1"},"kvs":[{"key":"!"}]}', ""),
        (b'{"header":{"revision":"1"},"kvs":[{"key":"/w=="}]}', ""),
        (b'{"header":{"revision":"1"},"more":1}', "its more is not a boolean"),
        (b'{"error":{"message":"x"}}', "it is an error without a message or a code"),
        (b'{"code":"x"}', "it is an error without a message or a code"),
    ],
)
def test_rubbish_is_no_answer(etcd: FakeEtcd, client: EtcdClient, body: bytes, why: str) -> None:
    etcd.instead.append(Instead(OK % (len(body), body)))
    with pytest.raises(EtcdUnreachableError) as caught:
        client.get("/k")
    assert "the server is not etcd 3.4 or later" in str(caught.value)
    assert why in str(caught.value)
    assert client.get("/k") is None


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200,
        b"HTTP/1.1 " + b"2" * 70_000,
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>",
        b"\0" * 10,
    ],
    ids=lambda raw: raw[:30].decode(),
)
def test_what_is_no_http_is_no_answer(etcd: FakeEtcd, client: EtcdClient, raw: bytes) -> None:
    etcd.instead.append(Instead(raw))
    with pytest.raises(EtcdUnreachableError, match=r"^cannot reach etcd: http://127.0.0.1:\d+: ."):
        client.get("/k")
    assert client.get("/k") is None


def test_a_refusal_of_the_gateways_own_is_shown(etcd: FakeEtcd, client: EtcdClient) -> None:
    text = b"CommonName of client sending a request against gateway will be ignored and not used as expected\n"
    etcd.instead.append(Instead(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)))
    with pytest.raises(
        EtcdUnreachableError, match=r": HTTP 400: CommonName of client .* set the user in ETCDCTL_USER$"
    ):
        client.get("/k")


def test_rubbish_for_an_answer_about_a_lease(etcd: FakeEtcd, client: EtcdClient) -> None:
    for body in (b'{"header":{"revision":"1"}}', b'{"result":{}}', b'{"result":7}'):
        etcd.instead += [Instead(OK % (len(body), body))] * 2
        with pytest.raises(EtcdUnreachableError):
            client.grant(5)
        with pytest.raises(EtcdUnreachableError):
            client.keep_alive(5)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"message":"etcdserver: no","code":3,"details":[]}', "etcd rejected the request: etcdserver: no"),  # 3.6
        (b'{"error":{"grpc_code":7,"http_code":403,"message":"etcdserver: permission denied"}}', "needs a role"),  # 3.5
        (b'{"error":{"code":7,"message":"etcdserver: permission denied"}}', "needs a role"),  # 3.6
    ],
)
def test_how_versions_refuse(etcd: FakeEtcd, client: EtcdClient, body: bytes, why: str) -> None:
    etcd.instead.append(Instead(OK % (len(body), body)))
    with pytest.raises(EtcdRefusedError, match=why):
        client.keep_alive(5)


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (
            Refusal(403, 7, "etcdserver: permission denied"),
            "etcd rejected the request: etcdserver: permission denied: the client needs a role with permission "
            "to read and write "
            "all keys under /jobs/a/",
        ),
        (
            Refusal(429, 8, "etcdserver: mvcc: database space exceeded"),
            "etcd rejected the request: etcdserver: mvcc: database space exceeded: free space (etcdctl compact, "
            "etcdctl defrag, "
            "etcdctl alarm disarm), or raise --quota-backend-bytes",
        ),
        (
            Refusal(400, 3, "etcdserver: request is too large"),
            "etcd rejected the request: etcdserver: request is too large",
        ),
    ],
)
def test_a_refusal_says_what_to_do(etcd: FakeEtcd, client: EtcdClient, refusal: Refusal, why: str) -> None:
    etcd.refusal = refusal
    with pytest.raises(EtcdRefusedError) as caught:
        client.txn([], [Put("/k", b"1")])
    assert str(caught.value) == why


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(503, 14, "etcdserver: leader changed"),
        Refusal(503, 14, "etcdserver: no leader"),
        Refusal(504, 4, "context deadline exceeded"),
        Refusal(429, 8, "etcdserver: too many requests"),
    ],
    ids=str,
)
def test_what_another_server_may_answer_is_no_refusal(etcd: FakeEtcd, client: EtcdClient, refusal: Refusal) -> None:
    etcd.refusal = refusal
    with pytest.raises(EtcdUnreachableError, match=str(refusal)):
        client.txn([], [Put("/k", b"1")])


def test_a_user_has_a_token_that_is_renewed(etcd: FakeEtcd) -> None:
    etcd.users["jobs"] = "secret"
    with EtcdClient(etcd.place(user="jobs", password="secret")) as client:
        assert client.get("/k") is None
        assert client.get("/k") is None
        etcd.forget_tokens()
        assert client.get("/k") is None
    asked, authenticate = "/v3/kv/range", "/v3/auth/authenticate"
    assert etcd.asked == [authenticate, asked, asked, asked, authenticate, asked]


def test_a_server_that_hangs_up_instead_of_refusing_a_token(etcd: FakeEtcd) -> None:
    etcd.users["jobs"] = "secret"
    with EtcdClient(etcd.place(user="jobs", password="secret")) as client:
        assert client.get("/k") is None
        etcd.forget_tokens()
        etcd.instead += [Instead()] * 2
        assert client.get("/k") is None
        # It hangs up whoever asks.
        etcd.instead += [Instead(), Instead(), None, Instead(), Instead()]
        with pytest.raises(EtcdUnreachableError):
            client.get("/k")
        assert client.get("/k") is None


def test_a_user_where_etcd_has_none(etcd: FakeEtcd) -> None:
    with EtcdClient(etcd.place(user="jobs", password="secret")) as client:
        assert client.get("/k") is None
        # It has by now.
        etcd.users["jobs"] = "secret"
        assert client.get("/k") is None


def test_a_wrong_user(etcd: FakeEtcd) -> None:
    etcd.users["jobs"] = "secret"
    known = r"the user jobs \(ETCDCTL_USER\) is unknown to etcd"
    wrong = etcd.place(user="jobs", password="wr0ng")
    with EtcdClient(wrong) as client, pytest.raises(EtcdRefusedError, match=known) as caught:
        client.get("/k")
    assert "wr0ng" not in str(caught.value)
    with EtcdClient(etcd.place()) as client, pytest.raises(EtcdRefusedError, match=r"set an etcd user in ETCDCTL_USER"):
        client.get("/k")
