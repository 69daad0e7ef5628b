"""Which tensors go on devices, the store of NCCL's groups, and how these are made."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.torch.device import groups as device_groups
from elastic_driver.torch.device import lane as device
from elastic_driver.torch.device.groups import Store, shared_devices
from elastic_driver.torch_private.groups import NCCL
from elastic_driver.worker import settings as worker_settings_module
from elastic_driver.worker.engine.native import NativeEngine


class Exchange:
    """The rendezvous for threads: each scope gives all values to all when all are there."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, bytes]] = {}
        self.count = count

    def __call__(self, scope: str, *, key: int, count: int, value: bytes) -> list[bytes]:
        assert count == self.count
        with self._changed:
            given = self._values.setdefault(scope, {})
            assert key not in given
            given[key] = value
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(given) == count, 150)
            return [given[each] for each in range(count)]


def test_store_gives_ids_to_all_through_torch() -> None:
    exchange = Exchange(3)
    stores = [Store("scope", index, 3, exchange) for index in range(3)]
    found: dict[int, list[bytes]] = {}

    def use(index: int) -> None:
        store: Any = stores[index].clone()
        if index < 2:  # as with several roots: each sets one before it gets any
            store.set(f"UniqueNCCLID:{index}", f"id {index}".encode())
        found[index] = store.multi_get(["UniqueNCCLID:0", "UniqueNCCLID:1"])

    threads = [threading.Thread(target=use, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert list(found.values()) == [[b"id 0", b"id 1"]] * 3
    through = c10d.PrefixStore("pg", stores[0])  # the C++ side, which has it cloned
    through.set("exception_dump", "mine")
    assert through.get("exception_dump") == b"mine"
    assert through.check(["exception_dump"])
    assert not through.check(["other"])
    assert through.add("count", 2) == 2
    assert through.add("count", 3) == 5
    assert through.delete_key("count")
    assert not stores[1].check(["pg/exception_dump"])


def test_groups_are_made_without_a_change_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made in a thread, and setenv would pull the environment from under other threads' getenv."""
    seen: dict[str, Any] = {}

    class Nccl:
        class Options:
            _timeout: Any = None

        def __init__(self, store: Store, index: int, size: int, options: Any) -> None:
            seen.update(store=store, index=index, size=size, timeout=options._timeout.total_seconds())

        def abort(self) -> None: ...

    def change(*words: object) -> None:
        raise AssertionError(f"the environment was changed: {words}")

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(NCCL, "_found", None)
    store = Store("scope", 1, 2, Exchange(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "putenv", change)
        patch.setattr(os, "unsetenv", change)
        assert isinstance(device_groups.fast_groups["cuda"](store, 1, 2, 30.0), Nccl)
    assert (seen["store"], seen["index"], seen["size"], seen["timeout"]) == (store, 1, 2, 30.0)


def test_workers_start_with_what_leaves_the_process_alone() -> None:
    job = JobAddress("http://127.0.0.1:1", JobKey.new(), "job")
    slot = SlotInfo(0, 1, 0, 1, 0, 1)
    dialect = OurDialect({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, exported={})
    env = dialect.environment(WorkerStart(WorkerId("localhost", 0, 0), slot, ("localhost",), 0, 1), job=job)
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert env["TORCH_NCCL_ENABLE_MONITORING"] == "0"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([("a", ["0", "1"]), ("a", ["0", "1"])], ""),
        ([("a", ["0"]), ("a", ["1"]), ("b", ["0"])], ""),
        ([("a", ["0"]), ("a", ["0"])], "the 2 ranks of a see 1 device"),
        ([("a", ["0"]), *[("b", ["0", "1"])] * 3], "the 3 ranks of b see 2 devices"),
    ],
)
def test_ranks_that_must_share(told: list[tuple[str, list[str]]], text: str) -> None:
    assert shared_devices(told) == text


def entry(mode: str = "auto", why: str = "", machine: str = "a", visible: tuple[str, ...] = ("0", "1")) -> Any:
    return {"mode": mode, "why": why, "machine": machine, "visible": list(visible)}


def native() -> Any:
    return NativeEngine.__new__(NativeEngine)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ("", "")),
        ([entry(), entry()], ("cuda", "")),
        ([entry("cuda"), entry("cuda")], ("cuda", "")),
        ([entry(), {"mode": "off"}], ("", "")),
        ([{"mode": "off"}, {"mode": "off"}], ("", "")),
        ([{"mode": "cpu"}, {"mode": "cpu"}], ("cpu", "")),
        ([entry(), {"mode": "cpu"}], ("", "ELASTIC_DRIVER_DEVICE_LANE differs between the ranks")),
        ([entry(), None], ("", "rank 1 does not use elastic_driver.torch")),
        ([entry(), entry(why="it sees no GPU")], ("", "rank 1: it sees no GPU")),
        ([entry(), entry(), entry()], ("", "the 3 ranks of a see 2 devices")),
    ],
)
def test_all_ranks_choose_the_same_way(told: list[Any], expected: tuple[str, str]) -> None:
    context: Any = SimpleNamespace(devices=[{"torch": own} if own else {} for own in told], engine=native())
    assert device._resolve(context) == expected


def test_without_the_native_engine_tensors_are_copied() -> None:
    context: Any = SimpleNamespace(devices=[{"torch": entry()}] * 2, engine=object())
    assert device._resolve(context) == ("", "the native engine is not in use")


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_settings_module, "_settings", None)
    for value, mode in (("", "auto"), ("off", "off"), ("cuda", "cuda"), ("cpu", "cpu")):
        monkeypatch.setenv("ELASTIC_DRIVER_DEVICE_LANE", value)
        worker_settings_module.read_worker_settings()
        assert device.mode() == mode
        assert device.describe()["mode"] == mode
    monkeypatch.setenv("ELASTIC_DRIVER_DEVICE_LANE", "gpu")
    with pytest.raises(SettingsError, match="it must be one of auto, cuda, off, cpu"):
        worker_settings_module.read_worker_settings()
