"""torch's process groups that run operations on devices, and the members' agreement on which to use.

Each process set has a fast group (NCCL, for CUDA) if all its members have shown that they can use it: they made it, and
a small sum over it was right, within a time limit. If any could not, all of them use Gloo, on copies in host memory.
The members exchange these facts over the round's rendezvous, and not by collectives, so that ranks that have joined
take part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from elastic_driver.errors import DeviceLaneError, HorovodInternalError
from elastic_driver.torch_private.groups import c10d, is_communicator_id, nccl_group
from elastic_driver.worker.engine import native_loader
from elastic_driver.worker.engine.collectives import Exchange, Group, ReduceOp
from elastic_driver.worker.engine.torch_collectives import TorchCollectives

_log = logging.getLogger("elastic_driver.worker")

_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVERAGE: c10d.ReduceOp.SUM,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
}
_PROBE_ELEMENTS = 8
_CLOSE_S = 2.0

_stuck: list[Any] = []  # groups whose abort has not ended; their destructors would block
_warnings: set[str] = set()
_given_up = ""


class Store(c10d.Store):
    """The Store of one fast group, over the round's rendezvous: one member sets a key, the others get it.

    Only communicators' ids are sent. All other keys that a process group sets stay in this process.
    """

    def __init__(self, scope: str, index: int, count: int, exchange: Exchange) -> None:
        super().__init__()
        self._scope, self._index, self._count, self._exchange = scope, index, count, exchange
        self._lock = threading.Lock()  # guards _values
        self._values: dict[str, bytes] = {}

    def clone(self) -> Store:
        """Return this store, which is thread-safe."""
        return self

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Store a value; an id is sent in a thread, as several members may set one each before they get any."""
        with self._lock:
            self._values[key] = bytes(value)
        if is_communicator_id(key):
            threading.Thread(target=self._send, args=(key,), name="elastic-device-id", daemon=True).start()

    def _send(self, key: str) -> None:
        # If this fails the round is over, which the others learn in another way.
        with contextlib.suppress(Exception):
            self._exchange(f"{self._scope}.{key}", key=self._index, count=self._count, value=self._values[key])

    def get(self, key: str) -> bytes:
        """Return a value. Blocks until the member that sets it has done so."""
        with self._lock:
            value = self._values.get(key)
        if value is None:
            if not is_communicator_id(key):
                raise KeyError(key)
            values = self._exchange(f"{self._scope}.{key}", key=self._index, count=self._count, value=b"")
            value = next((given for given in values if given), b"")
            with self._lock:
                self._values[key] = value
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are already known here."""
        with self._lock:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        for key in keys:
            self.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter of this process."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
        return total

    def deleteKey(self, key: str) -> bool:
        """Delete a value of this process; named as the C++ side expects."""
        with self._lock:
            return self._values.pop(key, None) is not None


class FastGroupFactory(Protocol):
    """Makes a fast group; may block."""

    def __call__(self, store: Store, index: int, size: int, timeout_s: float) -> Any:
        """Return one of torch's backends, or an object with its methods. Raises any Exception."""


def _make_nccl(store: Store, index: int, size: int, timeout_s: float) -> Any:
    # The driver has set the environment variables that it reads (dialects/ours.py): here, in a thread, setenv would
    # move the environment while other threads call getenv.
    return nccl_group(store, index, size, timeout_s)


fast_groups: dict[str, FastGroupFactory] = {"cuda": _make_nccl}
"""The makers of fast groups, by device type. Only tests have one for CPU tensors."""


def given_up() -> str:
    """Return why the members of an earlier round could not use a fast group although they should have; "" otherwise."""
    return _given_up


def say_once(text: str) -> None:
    """Log a warning, once in this process."""
    if text not in _warnings:
        _warnings.add(text)
        _log.warning("elastic_driver: %s", text)


def _identity(device: torch.device) -> str:
    """Return an id of the physical device."""
    if device.type != "cuda":
        return f"{device.type} of process {os.getpid()}"
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{os.uname().nodename}:{device.index}")


def abort_in_thread(backend: Any) -> threading.Thread:
    """Start aborting a fast group. That may never end, in which case its destructor would block: so it is kept
    alive.
    """
    _stuck.append(backend)

    def end() -> None:
        with contextlib.suppress(Exception):
            backend.abort()
        _stuck.remove(backend)

    thread = threading.Thread(target=end, name="elastic-device-abort", daemon=True)
    thread.start()
    return thread


def has_ended(abort: threading.Thread) -> bool:
    """Return whether an abort has ended, after a short wait."""
    abort.join(_CLOSE_S)
    if abort.is_alive():
        native_loader.load().park_threads_at_exit()
    return not abort.is_alive()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The outcome of making a fast group on one member.

    Attributes:
        why: why it cannot be used; "" if it can.
        late: whether it timed out, which may be because another member's failed.
    """

    why: str = ""
    late: bool = False


class _Probe:
    """Makes a fast group and a sum over it, in a thread that may never return."""

    def __init__(
        self, make: FastGroupFactory, store: Store, index: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._make, self._store, self._index, self._size = make, store, index, size
        self._device, self._timeout_s = device, timeout_s
        self.group: Any = None
        self.failure = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-device-probe", daemon=True)

    def run(self, limit_s: float, stopped: threading.Event) -> _Verdict:
        """Return whether it can be used, after ``limit_s`` at the latest, or when ``stopped``."""
        self._thread.start()
        waited_s = 0.0
        while not self._over.wait(0.05) and not stopped.is_set():
            waited_s += 0.05
            if waited_s >= limit_s:
                native_loader.load().park_threads_at_exit()  # the thread may return at any time, or never
                return _Verdict(f"its first allreduce did not finish within {limit_s:g} s", late=True)
        return _Verdict(self.failure or ("the round is over" if stopped.is_set() else ""))

    def _run(self) -> None:
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if self._device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self._device))
                self.group = self._make(self._store, self._index, self._size, self._timeout_s)
                total = self._size * (self._size + 1) / 2
                data = torch.full((_PROBE_ELEMENTS,), self._index + 1.0, device=self._device)
                work = self.group.allreduce([data], c10d.AllreduceOptions())
                work.wait(timedelta(seconds=self._timeout_s))
                sums = data.tolist()
                if sums != [total] * _PROBE_ELEMENTS:
                    self.failure = f"its first allreduce returned {sums[0]:g} instead of {total:g}"
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self.failure = f"it failed: {first}"
        finally:
            self._over.set()


class Peers:
    """The process group of one process set. One thread uses it; any may abort it.

    Args:
        links: the exchange of the round, this process's address, and a collective's time limit.
        number: number of the process set.
        ranks: its global ranks.
        index: this process's index among them.
        device: of the tensors.
        strict: whether the lack of a fast group is an error.
        probe_s: how long a fast group may take to show that it works.
    """

    def __init__(
        self,
        links: tuple[Exchange, str, float],
        number: int,
        ranks: Sequence[int],
        index: int,
        device: torch.device,
        *,
        strict: bool,
        probe_s: float,
    ) -> None:
        self._exchange, self._address, self._timeout_s = links
        self.ranks, self.index, self.size, self.device = list(ranks), index, len(ranks), device
        self._strict, self._probe_s = strict, probe_s
        self._name = f"device.{number}"
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._gloo: TorchCollectives | None = None
        self._fast: Any = None
        self._store: Store | None = None  # torch holds only its C++ half, which is useless without this one
        self._group: Any = None
        self._works: list[Any] = []
        self._ending: threading.Thread | None = None

    @property
    def is_fast(self) -> bool:
        """Whether its operations run on the device itself, once connected."""
        return self._gloo is None

    def connect(self) -> None:
        """Agree with the other members on a group, and make it.

        Raises:
            DeviceLaneError: there is no fast group, and strict; the same on all members.
            HorovodInternalError: a peer is gone, or the round is over.
            RendezvousError: likewise.
        """
        make = fast_groups.get(self.device.type)
        if make is not None:
            refusal = self._refusal(make)
            if not refusal:
                return
            if self._strict:
                raise DeviceLaneError(f"cannot use {_fast_name(self.device)}, which was requested: {refusal}")
            if self.index == 0:
                say_once(f"{_fast_name(self.device)} is not used: {refusal}; tensors go through the CPU")
        gloo = TorchCollectives(Group(self._name, tuple(self.ranks), self.index), self._address)
        with self._lock:
            self._gloo = gloo
        if self._stopped.is_set():
            gloo.abort("the round is over")
        gloo.connect(self._exchange, timeout_s=self._timeout_s)
        self._group = gloo.process_group

    def _refusal(self, make: FastGroupFactory) -> str:
        """Return why the members do not use the fast group; the same on all of them."""
        global _given_up
        places: dict[str, int] = {}
        for rank, device in zip(self.ranks, self._share("who", _identity(self.device)), strict=True):
            if device in places:
                return f"ranks {places[device]} and {rank} share a device ({device})"
            places[device] = rank
        self._store = Store(f"{self._name}.store", self.index, self.size, self._exchange)
        probe = _Probe(make, self._store, self.index, self.size, self.device, self._timeout_s)
        verdict = probe.run(self._probe_s, self._stopped)
        with self._lock:
            self._fast = probe.group
        if self._stopped.is_set():
            raise HorovodInternalError("cannot continue: the round is over")
        verdicts = self._share("verdict", [verdict.why, verdict.late])
        failures = [
            (late, f"rank {rank}: {why}") for rank, (why, late) in zip(self.ranks, verdicts, strict=True) if why
        ]
        if failures:
            _given_up = min(failures)[1]  # a late one has often waited for one that failed
            self._drop_fast()
            return _given_up
        self._group = probe.group
        return ""

    def _share(self, scope: str, value: Any) -> list[Any]:
        """Return each member's value for this scope, by rank. Blocks until all have shared theirs."""
        encoded = json.dumps(value).encode()
        values = self._exchange(f"{self._name}.{scope}", key=self.index, count=self.size, value=encoded)
        return [json.loads(text) for text in values]

    def abort(self) -> None:
        """End blocked calls. Never blocks."""
        self._stopped.set()
        with self._lock:
            gloo = self._gloo
        if gloo is not None:
            gloo.abort("the round is over")
        self._drop_fast()

    def _drop_fast(self) -> None:
        """Abort the fast group, in a thread: aborting a communicator while it is being made may block."""
        with self._lock:
            fast, self._fast = self._fast, None
            if fast is not None:
                self._ending = abort_in_thread(fast)

    def close(self) -> None:
        """Free the group; all members are done with it, or it was aborted."""
        self._works.clear()
        self._drop_fast()
        if self._ending is not None:
            has_ended(self._ending)
        with self._lock:
            gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.close()
        self._group = None

    def settle(self) -> None:
        """After the device has finished, raise the failure of any operation since the last call."""
        works, self._works = self._works, []
        for work in works:
            work.wait(timedelta(seconds=self._timeout_s))

    def _wait(self, work: Any) -> None:
        # On a device this makes its current stream wait, not this thread; settle() reports failures.
        work.wait()
        if self._gloo is None:
            self._works.append(work)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._gloo is not None else tensor

    def _limited(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self._timeout_s)
        return options

    def allreduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Reduce in place."""
        options = self._limited(c10d.AllreduceOptions())
        options.reduceOp = _OPS[op]
        work = self._here(flat)
        self._wait(self._group.allreduce([work], options))
        if work is not flat:
            flat.copy_(work)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Broadcast bytes in place, from a global rank."""
        options = self._limited(c10d.BroadcastOptions())
        options.rootRank, options.rootTensor = self.ranks.index(root), 0
        work = self._here(data)
        self._wait(self._group.broadcast([work], options))
        if work is not data:
            data.copy_(work)

    def allgather(self, data: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Gather the bytes of all members; shorter ones are sent padded."""
        most = max(counts)
        if most == 0:
            return [data[:0] for _ in counts]
        padded = data.new_zeros(most)
        padded[: data.numel()] = data
        work = self._here(padded)
        parts = [torch.empty_like(work) for _ in counts]
        self._wait(self._group.allgather([parts], [work], self._limited(c10d.AllgatherOptions())))
        return [part[:count].to(data.device) for part, count in zip(parts, counts, strict=True)]

    def alltoall(self, data: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Exchange bytes with each member."""
        work = self._here(data)
        output = work.new_empty(sum(received))
        self._wait(self._group.alltoall_base(output, work, received, sent, self._limited(c10d.AllToAllOptions())))
        return output.to(data.device)


def _fast_name(device: torch.device) -> str:
    return "NCCL" if device.type == "cuda" else f"the fast group for {device.type} tensors"


def shared_devices(machines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the conflict if ranks outnumber their machine's devices; else "". By rank: machine, visible devices."""
    ranks: dict[str, list[int]] = {}
    devices: dict[str, set[str]] = {}
    for rank, (machine, visible) in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
        devices.setdefault(machine, set()).update(visible)
    for machine, members in ranks.items():
        if len(members) > len(devices[machine]):
            count = len(devices[machine])
            return f"the {len(members)} ranks of {machine} see {count} device{'s' if count != 1 else ''}"
    return ""
