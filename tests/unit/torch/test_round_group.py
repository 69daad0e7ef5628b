"""The process group of a round: what carries it, and its end, with stand-ins for NCCL."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_driver.torch.device import groups as device_groups
from elastic_driver.torch.distributed import group as round_groups
from elastic_driver.torch.distributed.group import RoundGroup, backend_of, name_interface
from elastic_driver.worker.engine import native_loader

pytestmark = pytest.mark.unit


def member(why: str = "", machine: str = "box", visible: tuple[str, ...] = ("0",)) -> dict[str, Any]:
    return {"torch": {"mode": "auto", "why": why, "machine": machine, "visible": list(visible)}}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([member(), member(machine="other")], "cpu:gloo,cuda:nccl"),
        ([member(visible=("0", "1")), member(visible=("0", "1"))], "cpu:gloo,cuda:nccl"),
        ([member(), member()], "gloo"),  # two ranks on one GPU
        ([member(), member("it sees no GPU", machine="other")], "gloo"),
        ([member(), {}], "gloo"),
        ([], "gloo"),
    ],
)
def test_nccl_only_where_each_rank_has_a_gpu(devices: list[Any], expected: str) -> None:
    context: Any = SimpleNamespace(devices=devices)
    assert backend_of(context) == expected


class Nccl:
    """A backend whose abort may hang."""

    def __init__(self) -> None:
        self.aborted, self.may_end = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        self.may_end.wait(150)


class Group:
    """torch's, with a backend for CUDA or without."""

    def __init__(self, backend: Nccl | None) -> None:
        self._backend = backend

    def _get_backend(self, device: Any) -> Nccl:
        if self._backend is None:
            raise RuntimeError("no backend for this device")
        return self._backend


def group_with(monkeypatch: pytest.MonkeyPatch, *groups: Group) -> RoundGroup:
    """The round's group is the first, and the default; the others are subgroups."""
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    context: Any = SimpleNamespace()
    made = RoundGroup(context, 0)
    made._group, made._is_default = groups[0], True
    return made


def test_the_end_of_a_round_aborts_nccl_and_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Nccl(), Nccl()
    made = group_with(monkeypatch, Group(first), Group(None), Group(second))
    made.abort("a peer is gone")
    made.abort("again")
    assert first.aborted.wait(150)
    assert second.aborted.wait(150)
    assert len(made._aborts) == 2
    destroyed: list[Any] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    first.may_end.set()
    second.may_end.set()
    made.close()
    assert destroyed == [None], "as the default group, with its subgroups"
    made.free()


def test_nccl_that_does_not_end_is_no_way_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Nccl()
    made = group_with(monkeypatch, Group(backend))
    parked: list[bool] = []
    loaded = SimpleNamespace(park_threads_at_exit=lambda: parked.append(True))
    monkeypatch.setattr(native_loader, "load", lambda: loaded)
    monkeypatch.setattr(device_groups, "_CLOSE_S", 0.05)
    with pytest.raises(RuntimeError, match="NCCL's communicators of the last round do not end"):
        made.close()
    assert parked
    backend.may_end.set()
    made._aborts[0].join(150)
    made.free()


def test_a_group_that_the_program_destroyed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group_with(monkeypatch, Group(None))
    made._group = Group(None)  # not torch's any more

    def destroy(group: Any) -> None:
        raise AssertionError("it is not there")

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    made.close()
    assert not made.is_cut()
    made.free()


def test_gloo_listens_where_the_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["lo 127.0.0.1/8", "eth0 10.0.0.2/24", "eth0 fe80::1%eth0/64", "eth1 10.1.0.2/24"]
    monkeypatch.setattr(round_groups, "host_addresses", lambda: addresses)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # at the end it is put back as it was, whatever that was
    for address, interface in (("10.1.0.2", "eth1"), ("fe80::1%eth0", "eth0"), ("127.0.0.1", "lo")):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        name_interface(address)
        assert round_groups.os.environ["GLOO_SOCKET_IFNAME"] == interface
    name_interface("10.0.0.2")
    assert round_groups.os.environ["GLOO_SOCKET_IFNAME"] == "lo", "what is set stays"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    name_interface("10.9.9.9")
    assert "GLOO_SOCKET_IFNAME" not in round_groups.os.environ
