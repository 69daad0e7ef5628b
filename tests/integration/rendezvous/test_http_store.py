"""HTTPStore beside TCPStore: what torch asks of a Store, in the same words, of both.

The rendezvous is a process of its own (``elasticrun rendezvous``), shared by the tests of this file.
"""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_driver.errors import RendezvousError, SettingsError
from elastic_driver.rendezvous.store_messages import MOST_VALUE_BYTES, PIECE_BYTES
from elastic_driver.torch import HTTPStore
from tests.support.processes import forked
from tests.support.processes.rendezvous_process import PATIENCE_S, RendezvousProcess, a_rendezvous

pytestmark = pytest.mark.integration

SHORT = timedelta(milliseconds=300)  # what is not there at its end does not come
LONG = timedelta(seconds=PATIENCE_S)


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[RendezvousProcess]:
    with a_rendezvous() as running:
        yield running


@pytest.fixture
def http(rendezvous: RendezvousProcess, request: pytest.FixtureRequest) -> Iterator[HTTPStore]:
    store = HTTPStore(rendezvous.endpoint, scope=request.node.name, timeout=LONG)
    yield store
    store.close()


@pytest.fixture(params=["http", "tcp"])
def store(request: pytest.FixtureRequest) -> Any:
    """One of each kind: what holds for TCPStore holds for ours."""
    if request.param == "http":
        return request.getfixturevalue("http")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


@pytest.fixture(params=["http", "tcp"])
def prefixed(request: pytest.FixtureRequest) -> Any:
    inner = (
        request.getfixturevalue("http")
        if request.param == "http"
        else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    )
    return dist.PrefixStore("outer", dist.PrefixStore("inner", inner)), inner


def later(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# --- as torch's own stores -------------------------------------------------------------------------------------------


def test_set_get_and_what_is_there(store: Any) -> None:
    assert (store.num_keys(), store.list_keys()) == (0, [])
    store.set("text", "héé")
    store.set("bytes", b"\x00\xff")
    store.set("empty", b"")
    store.set("", b"no name")
    assert [store.get(key) for key in ("text", "bytes", "empty", "")] == ["héé".encode(), b"\x00\xff", b"", b"no name"]
    store.set("text", "again")
    assert store.get("text") == b"again"
    assert (store.num_keys(), sorted(store.list_keys())) == (4, ["", "bytes", "empty", "text"])
    assert [store.check(keys) for keys in (["text"], ["text", "no"], [])] == [True, False, True]
    assert [store.delete_key("text"), store.delete_key("text"), store.num_keys()] == [True, False, 3]


def test_add_counts_in_text(store: Any) -> None:
    assert [store.add("n", 1), store.add("n", 5), store.add("n", -10), store.add("n", 0)] == [1, 6, -4, -4]
    assert store.get("n") == b"-4"
    store.set("n", "41")
    assert store.add("n", 1) == 42
    assert store.add("large", 2**62) == 2**62


def test_compare_set(store: Any) -> None:
    assert store.compare_set("k", "expected", "new") == b"expected", "TCPStore's answer for a key that is not there"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_append_and_many_at_once(store: Any) -> None:
    assert store.has_extended_api()
    store.append("k", "po")
    store.append("k", "tato")
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["a", "k", "b"]) == [b"1", b"potato", b"2"]
    assert store.multi_get([]) == []
    with pytest.raises(dist.DistStoreError, match="must be of same size"):
        store.multi_set(["a"], [])


def test_queues(store: Any) -> None:
    assert store.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError, match="queue is empty"):
        store.queue_pop("q", False)
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert (store.queue_len("q"), store.check(["q"]), store.num_keys()) == (2, True, 0)
    assert [store.queue_pop("q"), store.queue_pop("q", False), store.queue_len("q")] == [b"1", b"2", 0]


def test_what_is_not_there_in_time(store: Any) -> None:
    store.set("there", "")
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for wait, missing in (
        (lambda: store.get("no"), "/no"),
        (lambda: store.wait(["there", "no"]), "/there, /no"),
        (lambda: store.wait(["no"], SHORT), "/no"),
        (lambda: store.multi_get(["there", "no"]), "/there, /no"),
        (lambda: store.queue_pop("no"), "/no"),
    ):
        with pytest.raises(dist.DistStoreError, match=f"wait timeout after 300ms, keys: {missing}$"):
            wait()
    with pytest.raises(dist.DistStoreError, match=r"barrier timeout after 300ms, key: b$"):
        store.barrier("b", 2)
    if not isinstance(store, dist.TCPStore):  # which does not always wait for its own answer then
        store.wait(["there"], timedelta(0))


def test_who_waits_is_woken(store: Any) -> None:
    others = [store.clone() for _ in range(4)]
    got: list[Any] = []
    waiting = [
        later(lambda: got.append(others[0].get("a"))),
        later(lambda: got.append(others[1].wait(["a", "b"]))),
        later(lambda: got.append(others[2].multi_get(["b", "a"]))),
        later(lambda: got.append(others[3].queue_pop("q"))),
    ]
    store.set("a", "1")
    store.add("b", 2)
    store.queue_push("q", "3")
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert sorted(got, key=repr) == sorted([b"1", None, [b"2", b"1"], b"3"], key=repr)


def test_a_barrier_of_three(store: Any) -> None:
    for key in ("one", "other"):
        others = [store.clone() for _ in range(2)]
        through: list[int] = []

        def pass_through(other: Any, key: str = key, through: list[int] = through) -> None:
            other.barrier(key, 3)
            through.append(1)

        threads = [later(lambda other=other: pass_through(other)) for other in others]  # type: ignore[misc]
        assert not through
        store.barrier(key, 3, LONG)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(through) == 2


def test_a_clone_shares_keys_and_has_its_own_timeout(store: Any) -> None:
    other = store.clone()
    other.set_timeout(2 * LONG)
    store.set("k", "v")
    assert (other.get("k"), store.timeout, other.timeout) == (b"v", LONG, 2 * LONG)


def test_prefixes(prefixed: Any) -> None:
    store, inner = prefixed
    store.set("k", "v")
    assert (store.get("k"), inner.get("inner/outer/k")) == (b"v", b"v")
    assert store.add("n", 2) == 2
    assert store.compare_set("c", "", "x") == b"x"
    store.append("c", "y")
    store.multi_set(["m"], ["1"])
    store.wait(["k", "n", "c"], LONG)
    assert store.check(["k", "m"])
    assert store.multi_get(["c", "m"]) == [b"xy", b"1"]
    assert store.num_keys() == 4
    assert store.delete_key("k")
    store.barrier("b", 1)
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 300ms, keys: /inner/outer/k$"):
        store.get("k")
    assert isinstance(store.clone(), dist.PrefixStore)


# --- what is ours ----------------------------------------------------------------------------------------------------


def test_scopes(http: HTTPStore, rendezvous: RendezvousProcess) -> None:
    other = HTTPStore(rendezvous.url, scope="another", timeout=LONG)
    http.set("k", "v")
    assert not other.check(["k"])
    http.drop()
    assert http.num_keys() == 0
    other.close()


def test_large_values(http: HTTPStore) -> None:
    value = os.urandom(1 << 20) * 20
    assert len(value) > 2 * PIECE_BYTES
    http.set("large", value)
    http.append("large", b"x")
    assert http.get("large") == value + b"x"
    assert http.multi_get(["large", "large"]) == [value + b"x"] * 2
    with pytest.raises(dist.DistStoreError, match=f"at most {MOST_VALUE_BYTES} are allowed"):
        http.set("too large", bytes(MOST_VALUE_BYTES + 1))
    assert http.num_keys() == 1
    http.drop()


def test_what_is_no_number(http: HTTPStore) -> None:
    http.set("k", "x")
    with pytest.raises(dist.DistStoreError, match="is not a whole number"):
        http.add("k", 1)


def test_threads_share_one(http: HTTPStore) -> None:
    threads = [later(lambda: [http.add("n", 1) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert http.get("n") == b"400"


def test_a_forked_child_is_another_client(http: HTTPStore) -> None:
    http.add("n", 1)
    child = os.fork()
    if not child:
        code = 1
        try:
            http.add("n", 1)
            code = 0
        finally:
            os._exit(code)
    http.add("n", 1)
    assert os.waitpid(child, 0)[1] == 0
    assert http.get("n") == b"3"


def test_closing_ends_those_who_wait(rendezvous: RendezvousProcess) -> None:
    store = HTTPStore(rendezvous.endpoint, scope="closing", timeout=LONG)
    store.set("k", "v")
    raised: list[type[BaseException]] = []

    def wait() -> None:
        try:
            store.get("no")
        except dist.DistNetworkError as error:
            raised.append(type(error))

    thread = later(wait)
    store.close()
    thread.join(PATIENCE_S)
    assert raised == [dist.DistNetworkError]


def test_a_client_that_is_killed_while_it_waits_takes_nothing(
    http: HTTPStore, rendezvous: RendezvousProcess, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    source = f"""
        from elastic_driver.torch import HTTPStore
        store = HTTPStore({rendezvous.endpoint!r}, scope={http._scope!r})
        store.set("waits", "")
        store.queue_pop("q")
    """
    program.write_text(textwrap.dedent(source))
    process = forked.start([str(program)], forked.environment() | {"PYTHONWARNINGS": "ignore"})
    process.stdin.close()
    process.stdout.close()
    http.wait(["waits"])
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    http.queue_push("q", "kept")
    http.set_timeout(LONG)
    assert http.queue_pop("q") == b"kept"


def test_a_service_that_is_away_for_a_moment_and_one_that_was_started_again() -> None:
    with a_rendezvous() as rendezvous:
        store = HTTPStore(rendezvous.endpoint, timeout=LONG)
        new = HTTPStore(rendezvous.endpoint, timeout=LONG)
        store.set("k", "v")
        rendezvous.kill()
        raised: list[str] = []

        def ask() -> None:
            try:
                store.get("k")
            except dist.DistNetworkError as error:
                raised.append(str(error))

        thread = later(ask)
        rendezvous.start_again()
        thread.join(PATIENCE_S)
        assert raised == ["the rendezvous was restarted: the contents of this store are lost"]
        with pytest.raises(dist.DistNetworkError, match="are lost"):
            store.set("k", "v")
        assert new.add("n", 1) == 1, "one that had asked for nothing yet goes on"
        new.close()
        store.close()


def test_a_stranger_and_a_missing_token(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    with a_rendezvous("--token-file", str(token)) as rendezvous:
        assert token.stat().st_mode & 0o777 == 0o600
        rendezvous.until("clients need a token", after=0)
        store = HTTPStore(rendezvous.endpoint, token_file=token, timeout=LONG)
        store.set("k", "v")
        monkeypatch.setenv("ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE", str(token))
        other = HTTPStore(rendezvous.endpoint, timeout=LONG)
        assert other.get("k") == b"v"
        other.close()
        monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS_TOKEN_FILE")
        wrong = tmp_path / "wrong"
        wrong.write_text("another token of some length")
        either = "another rendezvous answers there, or "
        for stranger, why in (
            ({}, f"{either}it requires a token, and none was given"),
            ({"token_file": wrong}, f"{either}its token is not the one from the file {wrong}"),
        ):
            strange = HTTPStore(rendezvous.endpoint, patience_s=1.0, **stranger)
            with pytest.raises(dist.DistNetworkError, match=why):
                strange.set("k", "stranger's")
            strange.close()
        assert store.get("k") == b"v"
        store.close()


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS", raising=False)
    with pytest.raises(SettingsError, match="cannot find a rendezvous"):
        HTTPStore()
    with pytest.raises(RendezvousError, match="as the driver's address"):
        HTTPStore("nonsense")
    nobody = HTTPStore("127.0.0.1:9", patience_s=0.1)
    with pytest.raises(dist.DistNetworkError, match="cannot reach"):
        nobody.set("k", "v")
    nobody.close()


GLOO = """
    import itertools, os, sys
    import torch, torch.distributed as dist
    from elastic_driver.torch import HTTPStore

    # Ranks that connect at once, and ranks that do so lazily.
    size = int(sys.argv[2])
    children = []
    for lazily, rank in itertools.product("01", range(size)):
        pid = os.fork()
        if pid == 0:
            os.environ["TORCH_GLOO_LAZY_INIT"] = lazily
            break
        children.append(pid)
    else:
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))
    for generation in range(3):
        store = HTTPStore(sys.argv[1], scope=f"gloo-{lazily}-{generation}")
        if generation == 2:
            store = dist.PrefixStore("prefix", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ones = torch.ones(4)
        dist.all_reduce(ones)
        assert ones[0] == size, ones
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(ones, group=group)
        objects = [None] * size
        dist.all_gather_object(objects, rank)
        assert objects == list(range(size)), objects
        dist.monitored_barrier()
        dist.destroy_process_group()
    print("trained")
"""


def test_gloo_meets_over_it(rendezvous: RendezvousProcess, tmp_path: Path) -> None:
    """At once, and lazily."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(GLOO))
    env = forked.environment() | {"PYTHONWARNINGS": "ignore"}
    code, output = forked.run([str(program), rendezvous.endpoint, "3"], env)
    assert code == 0, output
    assert output.count("trained") == 6, output
