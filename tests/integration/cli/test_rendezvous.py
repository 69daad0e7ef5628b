"""``elasticrun rendezvous``: who may come, what it says, and what rubbish does to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from elastic_driver.cli.main import main
from elastic_driver.errors import RendezvousError, RendezvousProtocolError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role, member
from elastic_driver.rendezvous.node_messages import Member, NodeReply, NodeRequest, Saying, Standing, Terms
from elastic_driver.rendezvous.store_messages import StoreOp, StoreReply, StoreRequest
from tests.support.processes.rendezvous_process import PATIENCE_S, a_rendezvous

pytestmark = pytest.mark.integration

TOKEN = "a token of more than sixteen characters"
JOIN = NodeRequest(Saying.JOIN, "j", Member("n", "host", "127.0.0.1", 1), Terms(1, 1), wait_s=30.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--port"),
        ("--port x", "--port"),
        ("--port 70000", "is not within 0 to 65535"),
        ("--port 0 --host 0.0.0.0", "needs a token: give --token-file FILE"),
        ("--port 0 --host ::", "needs a token"),
        ("--port 0 --token-file short", "it has 5 characters; at least 16 are required"),
        ("--port 0 --token-file no/such/folder", "cannot write a token"),
        ("--port 0 --host 192.0.2.1 --token-file token", "cannot listen on 192.0.2.1"),
    ],
)
def test_bad_usage(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    Path("token").write_text(TOKEN)
    assert main(["rendezvous", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_it_asks_for_the_token_that_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    with a_rendezvous("--host", "0.0.0.0", "--token-file", str(file)) as rendezvous:
        friend = RendezvousClient(rendezvous.url, member(TOKEN), patience_s=PATIENCE_S)
        assert friend.jobs() == {}
        operator = Credential(Identity(Role.OPERATOR), JobKey(TOKEN.encode()).of(Identity(Role.OPERATOR)))
        joiner = Credential(Identity(Role.JOINER), bytes(32))
        for stranger, why in (
            (member(""), "it requires a token, and none was given"),
            (member(f"{TOKEN}."), "its token is not the one that was given"),
            (operator, "the driver there rejected the connection: unknown operator; does it belong"),
            (
                joiner,
                "the driver there rejected the connection: hosts cannot join here: this is not a job that was started ",
            ),
        ):
            client = RendezvousClient(rendezvous.url, stranger, patience_s=PATIENCE_S, stranger_s=0.0)
            with pytest.raises(RendezvousError, match=f"cannot contact the driver at 127.0.0.1 port .*: {why}"):
                client.say_node(JOIN.to_json())
            client.close()
        assert friend.jobs() == {}, "no stranger was heard"
        assert requests.get(f"http://{rendezvous.endpoint}/healthz", timeout=PATIENCE_S).text == "ok\n", (
            "probes have no token"
        )
        friend.close()


def test_rubbish_does_nothing_to_it() -> None:
    with (
        a_rendezvous() as rendezvous,
        contextlib.closing(RendezvousClient(rendezvous.url, member(""), patience_s=PATIENCE_S)) as client,
    ):
        for body in (b"", b"\0" * 100, b"[]", b"{}", b'{"saying": []}', b"[" * 100_000, JOIN.to_json()[:-1]):
            with pytest.raises(RendezvousProtocolError, match="cannot read"):
                client.say_node(body)
            with pytest.raises(RendezvousProtocolError, match="cannot read"):
                client.ask_store(body)
        for digits in (400, 4300):
            body = JOIN.to_json().replace(b'"wait_s":30.0', b'"wait_s":' + b"9" * digits)
            with pytest.raises(RendezvousProtocolError, match="cannot read"):
                client.say_node(body)
        with pytest.raises(RendezvousProtocolError, match="no such path"):
            client.status()
        standing = Standing.FORMING
        # A service that has just been started forms nothing for as long as a node may be silent, and this one sends no
        # beats: on a busy machine it may count as lost first.
        while standing is Standing.FORMING:
            answer = client.say_node(JOIN.to_json(), wait_s=30.0)
            assert answer is not None
            reply = NodeReply.from_json(answer)
            standing = reply.standing
        assert standing is Standing.PLACED
        assert reply.formed is not None
        assert [placed.name for placed in reply.formed.members] == ["host"]
        assert list(client.jobs()) == ["j"]
        stored = client.ask_store(StoreRequest(StoreOp.ADD, "", (b"n", b"1"), client=1, number=1).to_bytes())
        assert stored is not None
        assert StoreReply.from_bytes(stored).parts == (b"1",)


def test_it_has_no_torch_in_it() -> None:
    modules = "elastic_driver.cli.rendezvous, elastic_driver.service.service, elastic_driver.torchelastic.plugin"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0
