"""torchrun's handler, without its agents: what torch's agent is told, and what becomes of waits that nobody can end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.utils import store as store_util

from elastic_driver.errors import SettingsError
from elastic_driver.rendezvous.node_messages import Outcome
from elastic_driver.torchelastic.handler import ElasticHandler, HandlerSettings
from elastic_driver.torchelastic.plugin import get_handler
from tests.support.processes.rendezvous_process import PATIENCE_S, RendezvousProcess, a_rendezvous

pytestmark = pytest.mark.integration


@pytest.fixture
def rendezvous() -> Iterator[RendezvousProcess]:
    with a_rendezvous() as running:
        yield running


def parameters(rendezvous: RendezvousProcess, nnodes: str = "1:2", **conf: Any) -> RendezvousParameters:
    least, _, most = nnodes.partition(":")
    conf.setdefault("last_call_timeout", "3")  # for the second to come, however busy the machine is
    return RendezvousParameters("elastic", rendezvous.endpoint, "job", int(least), int(most or least), **conf)


def a_handler(rendezvous: RendezvousProcess, nnodes: str = "1:2", **conf: Any) -> ElasticHandler:
    handler = get_handler()(parameters(rendezvous, nnodes, **conf))
    assert isinstance(handler, ElasticHandler)
    return handler


class Joining:
    """A handler that asks for its place in a thread."""

    def __init__(self, handler: ElasticHandler) -> None:
        self.handler = handler
        self.result: RendezvousInfo | BaseException | None = None
        self._thread = threading.Thread(target=self._join)
        self._thread.start()

    def _join(self) -> None:
        try:
            self.result = self.handler.next_rendezvous()
        except BaseException as error:
            self.result = error

    def wait(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.result


def together(*handlers: ElasticHandler) -> list[RendezvousInfo]:
    return [joining.wait() for joining in [Joining(handler) for handler in handlers]]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_places_and_the_store_that_workers_meet_at(rendezvous: RendezvousProcess) -> None:
    one, other = a_handler(rendezvous), a_handler(rendezvous)
    infos = together(one, other)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    assert len({(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}) == 1
    place = infos[0].bootstrap_store_info
    first = TCPStore(place.master_addr, place.master_port, is_master=False, wait_for_workers=False)
    first.set("k", "v")
    assert one.use_agent_store
    assert (one.get_backend(), one.get_run_id(), one.is_closed()) == ("elastic", "job", False)
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
    infos[0].store.set("k", "generation 1")
    # Once more: another store at another port, with none of the keys.
    infos = together(one, other)
    assert infos[0].bootstrap_store_info.master_port != place.master_port
    assert not infos[0].store.check(["k"])
    one.shutdown()
    other.shutdown()
    rendezvous.until("it has ended")


def test_a_loss_is_told(rendezvous: RendezvousProcess) -> None:
    one, other = a_handler(rendezvous), a_handler(rendezvous)
    together(one, other)
    other._ended.set()  # it beats no more, as one that is stopped
    other._beats.close()
    until(one.num_nodes_waiting)
    (info,) = together(one)
    assert (info.rank, info.world_size) == (0, 1)
    assert one.num_nodes_waiting() == 0
    one.shutdown()
    other.shutdown()


def test_a_loss_is_told_to_one_whose_heartbeat_was_on_its_way_when_it_was_placed(rendezvous: RendezvousProcess) -> None:
    """The answer to what it said before it had a place is no answer to what it says with one."""
    one, other = a_handler(rendezvous), a_handler(rendezvous)
    lost = threading.Event()
    say = one._beats.say_node

    def say_late(request: bytes, *, wait_s: float) -> bytes | None:
        if not json.loads(request)["number"]:
            assert lost.wait(PATIENCE_S)
        return say(request, wait_s=wait_s)

    one._beats.say_node = say_late  # type: ignore[method-assign]
    together(one, other)
    other._leave(Outcome.FAILED)
    rendezvous.until("vm failed")
    lost.set()
    until(one.num_nodes_waiting)
    one.shutdown()


def test_a_loss_while_ranks_are_agreed_on_ends_nobody(rendezvous: RendezvousProcess) -> None:
    """torch's agent would wait for 300 s, and end with an error."""
    one, other = a_handler(rendezvous), a_handler(rendezvous)
    infos = together(one, other)
    here, gone = (one, other) if infos[0].rank == 0 else (other, one)
    store = min(infos, key=lambda info: info.rank).store
    role = {"role": "default", "rank": 0, "local_world_size": 2}
    store.set("torchelastic/role_info/0", json.dumps(role))
    gone._ended.set()
    gone._beats.close()
    got = store.multi_get(["torchelastic/role_info/0", "torchelastic/role_info/1"])
    assert [json.loads(each)["rank"] for each in got] == [0, 1]
    base, size, *_ = json.loads(store.get("torchelastic/assigned_ranks/1"))
    assert size > base + 2, "workers that were started with this never meet"
    with pytest.raises(DistStoreError):
        store.get("another")
    assert here.num_nodes_waiting() == 1
    here.shutdown()
    gone.shutdown()


def test_the_exit_barrier_waits_for_no_generation_that_is_broken(rendezvous: RendezvousProcess) -> None:
    one, other = a_handler(rendezvous), a_handler(rendezvous)
    infos = together(one, other)
    again = Joining(other)  # its workers have failed while this one's have finished
    with pytest.raises(DistStoreError):
        store_util.barrier(infos[0].store, 2, "torchelastic/agent/terminal_state", barrier_timeout=300)
    one.shutdown()
    assert again.wait().world_size == 1
    other.shutdown()


def test_one_node_alone_stops_when_it_cannot_know(rendezvous: RendezvousProcess) -> None:
    """Others may have gone on without it. Of two, none could train alone: they go on, and hear of it later."""
    alone = a_handler(rendezvous, "1:2", heartbeat="1")
    together(alone)
    os.kill(rendezvous.process.pid, signal.SIGSTOP)
    try:
        until(alone.num_nodes_waiting)
    finally:
        os.kill(rendezvous.process.pid, signal.SIGCONT)
    (info,) = together(alone)
    assert info.world_size == 1
    alone.shutdown()


def test_two_go_on_while_the_service_is_away(rendezvous: RendezvousProcess) -> None:
    one, other = a_handler(rendezvous, heartbeat="1"), a_handler(rendezvous, heartbeat="1")
    together(one, other)
    rendezvous.kill()
    until(lambda: one._is_stale() and other._is_stale())
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
    rendezvous.start_again()
    rendezvous.until("generation 1 runs on 2 nodes")
    until(lambda: not one._is_stale() and not other._is_stale())
    assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
    one.shutdown()
    other.shutdown()


def start_again(rendezvous: RendezvousProcess) -> None:
    rendezvous.kill()
    rendezvous.start_again()


def test_the_service_is_started_again_while_ranks_are_agreed_on(rendezvous: RendezvousProcess) -> None:
    """What it was told before, it is told again, also by an agent that asks for nothing more."""
    handlers = a_handler(rendezvous), a_handler(rendezvous)
    first, second = (info.store for info in sorted(together(*handlers), key=lambda info: info.rank))
    first.set("torchelastic/role_info/0", "of 0")
    second.set("torchelastic/role_info/1", "of 1")
    start_again(rendezvous)
    assert first.multi_get(["torchelastic/role_info/0", "torchelastic/role_info/1"]) == [b"of 0", b"of 1"]
    first.multi_set(["torchelastic/assigned_ranks/0", "torchelastic/assigned_ranks/1"], ["0", "1"])
    start_again(rendezvous)
    assert second.get("torchelastic/assigned_ranks/1") == b"1"
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    for handler in handlers:
        handler.shutdown()


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "has-said-that-it-came"])
def test_the_service_is_started_again_while_agents_wait_for_each_other_at_the_end(
    rendezvous: RendezvousProcess, *, waits: bool
) -> None:
    """torch's agent would end before the others, or wait for them for 300 s."""
    handlers = a_handler(rendezvous), a_handler(rendezvous)
    one, other = (info.store for info in together(*handlers))
    name = "torchelastic/agent/terminal_state"
    barriers = [threading.Thread(target=store_util.barrier, args=(each, 2, name)) for each in (one, other)]
    if waits:
        barriers[0].start()
        until(lambda: other.check([f"{name}/num_members"]))
    else:
        one.add(f"{name}/num_members", 1)
    start_again(rendezvous)
    barriers[1].start()
    for barrier in barriers[0 if waits else 1 :]:
        barrier.join(PATIENCE_S)
        assert not barrier.is_alive()
    assert one.check([f"{name}/last_member"])
    for handler in handlers:
        handler.shutdown()


def test_a_store_whose_handler_has_left_asks_nobody(rendezvous: RendezvousProcess) -> None:
    handler = a_handler(rendezvous)
    (info,) = together(handler)
    handler.shutdown()
    with pytest.raises(DistNetworkError):
        info.store.get("k")


def test_refused(rendezvous: RendezvousProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_handler(rendezvous, "1:2")
    together(one)
    stranger = a_handler(rendezvous, "1:3")
    with pytest.raises(RendezvousStateError, match="different settings"):
        stranger.next_rendezvous()
    one.shutdown()
    nobody = ElasticHandler(
        HandlerSettings.of(RendezvousParameters("elastic", "127.0.0.1:9", "j", 1, 1, patience="0.1"))
    )
    with pytest.raises(RendezvousConnectionError, match=r"port 9 for 0.1 s: nothing listens there .*rendezvous\)$"):
        nobody.next_rendezvous()


def test_a_token_that_is_missing_is_told_with_where_it_is_given(tmp_path: Path) -> None:
    with a_rendezvous("--token-file", str(tmp_path / "token")) as rendezvous:
        settings = HandlerSettings.of(RendezvousParameters("elastic", rendezvous.url, "j", 1, 1))
        with pytest.raises(
            RendezvousConnectionError,
            match=r": it requires a token, and none was given .*; specify its file with --rdzv-conf token_file=FILE",
        ):
            ElasticHandler(settings).next_rendezvous()


@pytest.mark.parametrize(
    ("endpoint", "conf", "said"),
    [
        ("", {}, "give --rdzv-endpoint HOST:PORT"),
        ("host:port", {}, "expected HOST:PORT"),
        ("host:1", {"lst_call_timeout": "1"}, "did you mean last_call_timeout"),
        ("host:1", {"last_call_timeout": "soon"}, "expected seconds"),
        ("host:1", {"grow": "maybe"}, "now or restart"),
    ],
)
def test_what_cannot_be_used(endpoint: str, conf: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        HandlerSettings.of(RendezvousParameters("elastic", endpoint, "j", 1, 1, **conf))


def test_what_torchs_own_rendezvous_knows_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE", "/token")
    settings = HandlerSettings.of(
        RendezvousParameters(
            "elastic", "host", "j", 1, 4, keep_alive_interval=1, read_timeout=60, last_call_timeout=0.5
        )
    )
    assert settings.endpoint == "https://host:29400"
    assert (settings.terms.last_call_s, settings.terms.lost_s, settings.token_file) == (0.5, 3.0, "/token")
