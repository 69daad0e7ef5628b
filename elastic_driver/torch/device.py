"""Operations on device memory: agreed on by the native engine, run by a process group of torch's on a thread here.

The engine negotiates these operations like all others and hands them out in one order on all members. Process groups
are made over the round's rendezvous, one for each process set at its first operation, and go with the round. Where
torch has NCCL and the tensors are on CUDA it is ProcessGroupNCCL, else ProcessGroupGloo.

An operation is done, for its handle, when the device has finished it: so that a round that ends meanwhile is an error
there and never a result.

ELASTIC_DRIVER_DEVICE_LANE=cuda sends CUDA tensors this way; without it they are copied through the CPU, until this has
been run on GPUs. ELASTIC_DRIVER_DEVICE_LANE=cpu, for tests, sends CPU tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from elastic_driver.errors import HorovodInternalError
from elastic_driver.worker.collectives import Exchange, Group, ReduceOp
from elastic_driver.worker.engine import WIRE_DTYPES, Kind, Operation, Result, TensorSpec
from elastic_driver.worker.handles import begin
from elastic_driver.worker.native_engine import NativeEngine, NativeHandle
from elastic_driver.worker.process_sets import Members
from elastic_driver.worker.reductions import carried_dtype, engine_op
from elastic_driver.worker.torch_backend import TorchCollectives

_IDLE_S = 1.0
_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVERAGE: c10d.ReduceOp.SUM,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
}
_HALVES = (torch.float16, torch.bfloat16)


def takes(members: Members, tensors: Sequence[Any]) -> bool:
    """Whether an operation on these tensors goes this way."""
    if not tensors or not isinstance(members.context.engine, NativeEngine):
        return False
    device = os.environ.get("ELASTIC_DRIVER_DEVICE_LANE", "")
    return all(isinstance(each, torch.Tensor) and not each.is_sparse and each.device.type == device for each in tensors)


def prepare_join(members: Members) -> None:
    """Sees to it that this process takes part in the others' operations on devices while it has joined."""
    engine = members.context.engine
    if isinstance(engine, NativeEngine) and os.environ.get("ELASTIC_DRIVER_DEVICE_LANE", "") in ("cpu", "cuda"):
        _lane_of(engine, members)


@dataclass(slots=True)
class _Job:
    sources: list[torch.Tensor]
    ready: list[Any]  # events of the producers' streams
    handle: NativeHandle | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    received: list[int] = field(default_factory=list)  # rows from each member, of an alltoall


class _NcclStore(c10d.Store):
    """NCCL's Store of one group: the first member sets an id, once, that all others get."""

    def __init__(self, scope: str, index: int, count: int, exchange: Exchange) -> None:
        super().__init__()
        self._scope, self._index, self._count, self._exchange = scope, index, count, exchange
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Gives the value to all members."""
        self._values[key] = self._share(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Blocks until the member that sets it has done so."""
        if key not in self._values:
            self._values[key] = self._share(key, b"")
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all are known here already."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Blocks until all are set."""
        for key in keys:
            self.get(key)

    def _share(self, key: str, value: bytes) -> bytes:
        values = self._exchange(f"{self._scope}.{key}", key=self._index, count=self._count, value=value)
        return next((each for each in values if each), b"")


class _Peers:
    """The process group of one process set."""

    def __init__(self, engine: NativeEngine, number: int, ranks: Sequence[int], index: int, *, nccl: bool) -> None:
        exchange, address, self._timeout_s = engine.links()
        self.size, self.index, self.ranks, self.nccl = len(ranks), index, list(ranks), nccl
        self._gloo: TorchCollectives | None = None
        name = f"device.{number}"
        if nccl:
            store = _NcclStore(f"contexts.{name}", index, self.size, exchange)
            options: Any = c10d.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            self._group: Any = c10d.ProcessGroupNCCL(store, index, self.size, options)
        else:
            self._gloo = TorchCollectives([Group(name, tuple(ranks), index)], address)
            self._group = None
        self._name, self._exchange = name, exchange

    def connect(self) -> None:
        """Connects to the peers. Apart from the constructor, so that abort() can reach it meanwhile."""
        if self._gloo is not None:
            self._gloo.connect(self._exchange, timeout_s=self._timeout_s)
            self._group = self._gloo.process_group(self._name)

    def abort(self, reason: str) -> None:
        """Ends what is blocked."""
        if self._gloo is not None:
            self._gloo.abort(reason)
        else:
            self._group.abort()

    def close(self) -> None:
        """Frees the group."""
        if self._gloo is not None:
            self._gloo.close()
        else:
            self._group.abort()
        self._group = None

    def allreduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        options.timeout = timedelta(seconds=self._timeout_s)
        self._group.allreduce([flat], options).wait()

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(root), 0
        options.timeout = timedelta(seconds=self._timeout_s)
        self._group.broadcast([data], options).wait()

    def allgather(self, data: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Bytes of all members; shorter ones travel padded."""
        most = max(counts)
        if most == 0:
            return [data[:0] for _ in counts]
        mine = data.new_zeros(most)
        mine[: data.numel()] = data
        parts = [torch.empty_like(mine) for _ in counts]
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=self._timeout_s)
        self._group.allgather([parts], [mine], options).wait()
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def alltoall(self, data: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        output = data.new_empty(sum(received))
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=self._timeout_s)
        self._group.alltoall_base(output, data, received, sent, options).wait()
        return output


class Lane:
    """The thread that runs one round's operations on devices."""

    def __init__(self, engine: NativeEngine, members: Members) -> None:
        self._engine = engine
        self._context = members.context
        self._rank = members.context.slot.rank
        self._lock = threading.Lock()  # guards what follows
        self._jobs: dict[int, _Job] = {}
        self._sets: dict[int, tuple[Sequence[int], int]] = {0: (range(members.context.slot.size), self._rank)}
        self._peers: dict[int, _Peers] = {}
        self._aborted = ""
        self._streams: dict[torch.device, Any] = {}
        self._thread = threading.Thread(target=self._run, name="elastic-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, members: Members, operation: Operation, job: _Job) -> NativeHandle:
        """Submits an operation; its turn may come before this returns."""
        with self._lock:
            self._sets[members.number] = (members.ranks, members.index)
            for number in [each for each, old in self._jobs.items() if old.handle is not None and old.handle.done()]:
                del self._jobs[number]  # failed before their turn
            handle = self._engine.submit(operation)
            job.handle = handle
            self._jobs[handle.number] = job
        return handle

    def abort(self, reason: str) -> None:
        """Ends what is blocked, and the thread. Never blocks long."""
        with self._lock:
            self._aborted = self._aborted or reason
            peers = list(self._peers.values())
        for each in peers:
            each.abort(reason)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread after abort()."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._aborted:
                turn = self._engine.next_turn(_IDLE_S)
                if turn is not None:
                    self._take(turn)
        except HorovodInternalError as error:
            self.abort(str(error))  # the round is over; peers that wait in a collective see it by the closed links
        finally:
            with self._lock:
                peers, self._peers = list(self._peers.values()), {}
                self._jobs.clear()
            for each in peers:
                each.close()

    def _take(self, turn: tuple[Any, ...]) -> None:
        number, native_turn = turn[0], turn[1]
        with self._lock:
            job = self._jobs.pop(number, None) if number else None
        error = ""
        try:
            with torch.no_grad():
                self._carry_out(turn, job)
        except Exception as failure:  # whatever it is, the peers must not wait for this rank
            error = self._aborted or f"an operation on a device failed: {failure}"
        error = error or self._aborted
        self._engine.conclude(native_turn, error)
        if error:
            self._context.abort(error)

    def _carry_out(self, turn: tuple[Any, ...], job: _Job | None) -> None:
        _, _, kind, reduction, root, before, after, number, plans, sizes = turn
        sources = job.sources if job is not None else [self._absent(Kind(kind), *plan) for plan in plans]
        device = sources[0].device
        with contextlib.ExitStack() as stack:
            stream = None
            if device.type == "cuda":
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
                for event in job.ready if job is not None else ():
                    stream.wait_event(event)
            peers = self._peers_of(number, device)
            results = [
                self._one(peers, Kind(kind), source, ReduceOp(reduction), root, (before, after), place, plans, sizes)
                for place, source in enumerate(sources)
            ]
            if stream is not None:
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                event.synchronize()
        if job is not None:
            job.results = results
            if kind == Kind.ALLTOALL:
                job.received = [int(sizes[member * peers.size + peers.index]) for member in range(peers.size)]

    def _absent(self, kind: Kind, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        device = "cuda" if os.environ.get("ELASTIC_DRIVER_DEVICE_LANE", "") != "cpu" else "cpu"
        rows = (0, *shape[1:]) if kind is Kind.ALLGATHER else shape
        return torch.zeros(rows, dtype=getattr(torch, dtype), device=device)

    def _peers_of(self, number: int, device: torch.device) -> _Peers:
        with self._lock:
            peers = self._peers.get(number)
            ranks, index = self._sets[number]
        if peers is None:
            nccl = device.type == "cuda" and hasattr(c10d, "ProcessGroupNCCL")
            peers = _Peers(self._engine, number, ranks, index, nccl=nccl)
            with self._lock:
                self._peers[number] = peers
                aborted = self._aborted
            if aborted:
                peers.abort(aborted)
            peers.connect()
        return peers

    def _one(
        self,
        peers: _Peers,
        kind: Kind,
        source: torch.Tensor,
        op: ReduceOp,
        root: int,
        factors: tuple[float, float],
        place: int,
        plans: Sequence[Any],
        sizes: Sequence[int],
    ) -> torch.Tensor:
        count, row = len(plans), _row_bytes(source)
        if kind is Kind.ALLREDUCE:
            return _reduced(peers, source, op, factors)
        if kind is Kind.REDUCESCATTER:
            whole = _reduced(peers, source, op, factors)
            each, more = divmod(source.shape[0], peers.size)
            start = peers.index * each + min(peers.index, more)
            return whole[start : start + each + (peers.index < more)].clone()
        if kind is Kind.BROADCAST:
            data = _bytes(source).clone()
            if data.numel():
                peers.broadcast(data, root)
            return data.view(source.dtype).reshape(source.shape)
        if kind is Kind.ALLGATHER:
            rows = [sizes[member * count + place] for member in range(peers.size)]
            joined = torch.cat(peers.allgather(_bytes(source), [each * row for each in rows]))
            return joined.view(source.dtype).reshape(sum(rows), *source.shape[1:])
        table = [
            [sizes[(member * count + place) * peers.size + to] for to in range(peers.size)]
            for member in range(peers.size)
        ]
        received = [table[member][peers.index] for member in range(peers.size)]
        if not any(map(any, table)) or row == 0:
            return source.new_empty((sum(received), *source.shape[1:]))
        sent = [each * row for each in table[peers.index]]
        output = peers.alltoall(_bytes(source), sent, [each * row for each in received])
        return output.view(source.dtype).reshape(sum(received), *source.shape[1:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    elements = 1
    for extent in tensor.shape[1:]:
        elements *= extent
    return elements * tensor.element_size()


def _scale(flat: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return flat
    if flat.dtype.is_floating_point:
        return flat.mul_(factor)
    return flat.double().mul_(factor).trunc_().to(flat.dtype)


def _reduced(peers: _Peers, source: torch.Tensor, op: ReduceOp, factors: tuple[float, float]) -> torch.Tensor:
    # Halves are widened: factors and sums of many ranks lose less, and not every Gloo reduces them.
    work = source.float() if source.dtype in _HALVES else source.clone()
    work = _scale(work.reshape(-1), factors[0])
    if work.numel():
        if op is ReduceOp.ADASUM:
            parts = peers.allgather(_bytes(work), [work.numel() * work.element_size()] * peers.size)
            work = _adasum([part.view(work.dtype) for part in parts])
        else:
            peers.allreduce(work, op)
    if op is ReduceOp.AVERAGE and peers.size > 1:
        work.div_(peers.size, rounding_mode=None if work.dtype.is_floating_point else "trunc")
    return _scale(work, factors[1]).to(source.dtype).reshape(source.shape)


def _adasum(vectors: list[torch.Tensor]) -> torch.Tensor:
    step = 1
    while step < len(vectors):
        for i in range(0, len(vectors) - step, 2 * step):
            a, b = vectors[i], vectors[i + step]
            dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
            one = torch.ones_like(dot)
            of_a = torch.where(aa > 0, 1 - dot / (2 * torch.where(aa > 0, aa, one)), one)
            of_b = torch.where(bb > 0, 1 - dot / (2 * torch.where(bb > 0, bb, one)), one)
            vectors[i] = a * of_a + b * of_b
        step *= 2
    return vectors[0]


_making = threading.Lock()


def _lane_of(engine: NativeEngine, members: Members) -> Lane:
    with _making:
        if engine.lane is None:
            lane = Lane(engine, members)
            engine.attach(lane)
            lane.start()
        made: Lane = engine.lane
    return made


def begin_on_device(
    members: Members,
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    make: Callable[[list[torch.Tensor], list[int]], Any],
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    splits: tuple[tuple[int, ...], ...] = (),
) -> int:
    """Begins an operation on tensors that ``takes`` has chosen; ``make``: of the results, what synchronize returns."""
    engine = members.context.engine
    assert isinstance(engine, NativeEngine)
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    sources = [tensor.detach().contiguous() for tensor in tensors]
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    if reduces:
        sources = [
            source.to(getattr(torch, carried_dtype(own, op))) for source, own in zip(sources, names, strict=True)
        ]
        op = engine_op(names, op)
    sources = [
        source if str(source.dtype).removeprefix("torch.") in WIRE_DTYPES else source.unsqueeze(-1).view(torch.uint8)
        for source in sources
    ]
    devices = {source.device for source in sources}
    if len(devices) > 1:
        raise ValueError(f"cannot group tensors of several devices: {', '.join(sorted(map(str, devices)))}")
    ready = []
    if sources[0].is_cuda:
        ready.append(torch.cuda.current_stream(sources[0].device).record_event())
    job = _Job(sources, ready)
    specs = tuple(_spec(source) for source in sources)
    operation = Operation(
        kind,
        specs,
        name or "",
        op,
        root,
        float(factors[0]),
        float(factors[1]),
        splits,
        members.number,
        device=1,
    )
    lane = _lane_of(engine, members)

    @torch.no_grad()
    def finish(_: Result) -> Any:
        results = []
        for result, tensor in zip(job.results, tensors, strict=True):
            if result.is_cuda:
                result.record_stream(torch.cuda.current_stream(result.device))
            if reduces:
                results.append(result.to(tensor.dtype))
            else:
                results.append(result if result.dtype == tensor.dtype else result.view(tensor.dtype).squeeze(-1))
        return make(results, job.received)

    return begin(members, operation, keep=job, finish=finish, submit=lambda what: lane.submit(members, what, job))


def _spec(tensor: torch.Tensor) -> TensorSpec:
    nbytes = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr() if nbytes else 0
    return TensorSpec(address, nbytes, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), address)
