"""Operations on device memory: agreed on by the native engine, run by torch's process groups on a thread here.

The engine negotiates these operations like all others and issues them in one order on all members. Process groups are
made over the round's rendezvous, one for each process set at its first operation, and freed with the round (groups.py).

An operation's handle is done when the device has finished it: so if the round ends meanwhile, that is an error and
never a result.

ELASTIC_DRIVER_DEVICE_LANE selects the tensors that use this lane:
    auto (the default): CUDA tensors, where every rank has NCCL and a GPU of its own; else they are copied through the
        CPU, by the engine.
    cuda: CUDA tensors; if they cannot, that is an error.
    off: none.
    cpu: CPU tensors, over Gloo; for tests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from elastic_driver.errors import DeviceLaneError, HorovodInternalError
from elastic_driver.system.threads import name_this_thread
from elastic_driver.torch.device import groups as device_groups
from elastic_driver.torch.device.groups import Peers
from elastic_driver.torch.device.math import Instruction, absent, carry_out
from elastic_driver.torch_private.groups import has_nccl
from elastic_driver.worker.api.handles import begin
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.native import NativeEngine, NativeHandle, Turn
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, Kind, Operation, Result, TensorSpec
from elastic_driver.worker.engine.reductions import carried_dtype, engine_op
from elastic_driver.worker.rounds import devices
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.process_sets import Members
from elastic_driver.worker.settings import ENV_LANE, worker_settings

_log = logging.getLogger("elastic_driver.worker")

_NAME = "torch"  # the name of this lane among the device lanes
_IDLE_S = 1.0
# Between checks whether the device has finished: at first about the duration of a small collective.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 20e-6, 1e-3


class Choice(NamedTuple):
    """Which tensors use this lane in a round.

    Attributes:
        kind: "cuda", "cpu", or "" for none.
        why: why CUDA tensors do not although they might; "" if they do, or are not meant to.
    """

    kind: str
    why: str = ""


_resolved: weakref.WeakKeyDictionary[Context, Choice] = weakref.WeakKeyDictionary()


def mode() -> str:
    """Return the mode set in the environment. Raises SettingsError if it is invalid."""
    return worker_settings().device_lane


def describe() -> dict[str, Any]:
    """Return the facts from which all members make the same choice. Touches no device."""
    chosen = mode()
    if chosen == "cpu":
        return {"mode": chosen, "why": f"{ENV_LANE}=cpu", "machine": os.uname().nodename, "visible": []}
    count = torch.cuda.device_count()
    why = device_groups.given_up()
    if not has_nccl():
        why = "its torch was built without NCCL"
    elif not count:
        why = "it sees no GPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in visible.split(",") if name.strip()] or [str(number) for number in range(count)]
    return {"mode": chosen, "why": why, "machine": os.uname().nodename, "visible": named[:count]}


def _descriptions(context: Context) -> list[dict[str, Any] | None]:
    """Return each member's device facts, by rank; None for one that does not use elastic_driver.torch."""
    return [devices.get(_NAME) for devices in context.devices]


def _choice_in(context: Context) -> Choice:
    """Return the choice of a round, which is the same on all ranks: it depends only on exchanged facts."""
    choice = _resolved.get(context)
    if choice is None:
        choice = _resolved[context] = _resolve(context)
    return choice


def _resolve(context: Context) -> Choice:
    descriptions = _descriptions(context)
    silent = None in descriptions
    modes = {description["mode"] for description in descriptions if description is not None}
    if not descriptions or "off" in modes:
        return Choice("")
    if modes == {"cpu"}:
        return Choice("" if silent else "cpu")
    why = ""
    if silent:
        why = nccl_refusal(context)
    elif not isinstance(context.engine, NativeEngine):
        why = "the native engine is not in use"
    elif "cpu" in modes:
        why = f"{ENV_LANE} differs between the ranks"
    else:
        why = nccl_refusal(context)
    return Choice("", why) if why else Choice("cuda")


def nccl_refusal(context: Context) -> str:
    """Return why the members of a round cannot use NCCL, each with its own GPU; "" if they can.

    The same on all ranks.
    """
    descriptions = _descriptions(context)
    described = [description for description in descriptions if description is not None]
    if len(described) < len(descriptions) or not described:
        silent = descriptions.index(None) if descriptions else 0
        return f"rank {silent} does not use elastic_driver.torch"
    why = next((f"rank {rank}: {member['why']}" for rank, member in enumerate(described) if member["why"]), "")
    return why or device_groups.shared_devices([(member["machine"], member["visible"]) for member in described])


def _strict(context: Context) -> bool:
    return any(member is not None and member["mode"] == "cuda" for member in _descriptions(context))


def _for_cpu(context: Context) -> bool:
    descriptions = _descriptions(context)
    return bool(descriptions) and descriptions[0] is not None and descriptions[0]["mode"] == "cpu"


@dataclass(slots=True)
class _Job:
    """An operation that this process has submitted, and its outcome.

    Attributes:
        sources: the tensors.
        ready: events of the streams that make them.
        in_place: whether results are written to the sources.
        results: once done.
        received: rows from each member, of an alltoall.
        failure: raised instead of a result: the round continues, or ends for another reason than a peer's.
    """

    sources: list[torch.Tensor]
    ready: list[Any]
    in_place: bool = False
    results: list[torch.Tensor] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    failure: Exception | None = None


class DeviceHandle:
    """The Handle of an operation on a device."""

    def __init__(self, handle: NativeHandle, job: _Job) -> None:
        self._handle, self._job = handle, job

    def done(self) -> bool:
        """Return whether the operation is done."""
        return self._handle.done()

    def result(self) -> Result:
        """Block until it is done, and return its result. Also raises DeviceLaneError for lack of NCCL, and
        out-of-memory errors.
        """
        try:
            result = self._handle.result()
        except HorovodInternalError:
            if self._job.failure is not None:
                raise self._job.failure from None
            raise
        if self._job.failure is not None:
            raise self._job.failure
        return result


class DeviceRunner:
    """The thread that runs one round's operations on devices."""

    def __init__(self, engine: NativeEngine, context: Context) -> None:
        self._engine = engine
        self._context = context
        self._rank = context.slot.rank
        self._kind = _choice_in(context).kind
        self._strict = _strict(context)
        self._lock = threading.Lock()  # guards the following attributes
        self._peers: dict[int, Peers] = {}
        self._removed_sets: set[int] = set()
        self._aborted = ""
        self._home: torch.device | None = None  # device of this process's last operation
        self._refused: dict[int, DeviceLaneError] = {}  # used only by the thread
        self._streams: dict[torch.device, Any] = {}  # used only by the thread
        self._thread = threading.Thread(target=self._run, name="elastic-device", daemon=True)

    def start(self) -> None:
        """Start running the engine's turns."""
        if self._kind == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._home = torch.device("cuda", torch.cuda.current_device())
        self._thread.start()

    def submit(self, operation: Operation, job: _Job) -> DeviceHandle:
        """Submit an operation; its turn may come before this returns."""
        with self._lock:
            if self._aborted:
                raise HorovodInternalError(f"cannot continue: {self._aborted}")
            self._home = job.sources[0].device
        # The engine returns the job with its turn.
        return DeviceHandle(self._engine.submit(replace(operation, keep=job)), job)

    def forget(self, number: int) -> None:
        """Forget a removed process set; all of its operations have been issued."""
        with self._lock:
            self._removed_sets.add(number)

    def abort(self, reason: str) -> None:
        """End blocked calls, and the thread. Never blocks long."""
        with self._lock:
            self._aborted = self._aborted or reason or "aborted"
            peers = list(self._peers.values())
        for group in peers:
            group.abort()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after abort()."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        name_this_thread()
        try:
            while not self._aborted:
                turn = self._engine.next_turn(_IDLE_S)
                if turn is not None:
                    self._take(turn)
                else:
                    self._free()
        except HorovodInternalError as error:
            self.abort(str(error))  # the round is over; peers that wait in a collective notice closed connections
        except Exception as error:  # the others' operations would no longer run
            _log.exception("round %d: the device thread failed", self._context.assignment.round_id)
            self.abort(str(error))
            self._context.abort(f"the thread that runs operations on devices failed: {error}")
        finally:
            with self._lock:
                self._aborted = self._aborted or "the round is over"
                peers, self._peers = list(self._peers.values()), {}
            for group in peers:
                with contextlib.suppress(Exception):
                    group.close()

    def _free(self) -> None:
        with self._lock:
            peers = [self._peers.pop(number) for number in self._removed_sets if number in self._peers]
            self._removed_sets.clear()
        for group in peers:
            group.close()

    def _take(self, turn: Turn) -> None:
        job: _Job | None = turn.keep
        error = ""
        try:
            with torch.no_grad():
                self._carry_out(turn, job)
        except DeviceLaneError as refusal:  # the same on all members: no reason to end the round
            if job is not None:
                job.failure = refusal
        except (
            MemoryError,
            torch.OutOfMemoryError,
        ) as failure:  # a fault of the program: another round would not fix it
            error = str(failure) or "out of memory"
            if job is not None:
                job.failure = failure
        except BaseException as failure:  # whatever fails, neither peers nor waiters must wait for this rank
            error = self._aborted or f"an operation on a device failed: {failure}"
        error = error or self._aborted
        self._engine.conclude(turn, error)
        if error:
            self._context.abort(error)

    def _carry_out(self, turn: Turn, job: _Job | None) -> None:
        peers = self._peers_of(turn.process_set, job.sources[0].device if job is not None else self._device())
        device = peers.device
        with contextlib.ExitStack() as stack:
            stream = None
            if device.type == "cuda":
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            if job is None:
                sources = [absent(dtype, shape, device, turn.reduce_op) for dtype, shape in turn.tensors]
            else:
                sources = self._fetch(job, device, stream)
            # Gloo gets copies: an aborted collective may end much later, or never.
            may_overwrite = peers.is_fast and (job is None or job.in_place or sources is not job.sources)
            factors = (turn.prescale if job is not None else 1.0, turn.postscale)
            instruction = Instruction(turn.kind, turn.reduce_op, turn.root, factors, may_overwrite=may_overwrite)

            def reduce() -> list[torch.Tensor]:
                return [
                    carry_out(peers, instruction, source, place, len(turn.tensors), turn.sizes)
                    for place, source in enumerate(sources)
                ]

            results = self._context.writing.write(reduce) if may_overwrite else reduce()
            if job is not None:
                results = [result.to(source.device) for result, source in zip(results, job.sources, strict=True)]
                if job.in_place:
                    self._context.writing.write(functools.partial(_copy_all, job.sources, results))
            if stream is not None:
                self._await(stream)
        peers.settle()
        if job is not None:
            job.results = results
            if turn.kind is Kind.ALLTOALL:
                job.received = [turn.sizes[member * peers.size + peers.index] for member in range(peers.size)]

    def _fetch(self, job: _Job, device: torch.device, stream: Any) -> list[torch.Tensor]:
        """Return the sources on the device of the process set's group: one device per process."""
        if job.sources[0].device == device:
            for event in job.ready:
                stream.wait_event(event)
            return job.sources
        for event in job.ready:
            event.synchronize()
        return [source.to(device) for source in job.sources]

    def _await(self, stream: Any) -> None:
        """Block until the device has finished, without the device's own wait, which cannot be interrupted."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        pause_s = _FIRST_PAUSE_S
        while not event.query():  # type: ignore[no-untyped-call]
            if self._aborted:
                raise HorovodInternalError(self._aborted)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_PAUSE_S)

    def _device(self) -> torch.device:
        """Return the device for operations that this process has not submitted."""
        with self._lock:
            home = self._home
        if home is None and self._kind == "cuda":
            home = torch.device("cuda", self._context.slot.local_rank % torch.cuda.device_count())
        return home or torch.device(self._kind)

    def _peers_of(self, number: int, device: torch.device) -> Peers:
        if number in self._refused:
            raise self._refused[number]
        with self._lock:
            peers = self._peers.get(number)
        if peers is not None:
            return peers
        ranks = self._engine.members(number)
        peers = Peers(
            self._engine.links(),
            number,
            ranks,
            ranks.index(self._rank),
            device,
            strict=self._strict,
            # The others wait this long for the verdict of a member whose group times out, and a bit longer.
            probe_s=self._context.limits.build_s / 2,
        )
        with self._lock:
            self._peers[number] = peers
            aborted = self._aborted
        if aborted:
            peers.abort()
        try:
            peers.connect()
        except DeviceLaneError as refusal:
            self._refused[number] = refusal
            raise
        return peers


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


_making = threading.Lock()


def _runner_of(engine: NativeEngine, context: Context) -> DeviceRunner:
    with _making:
        if engine.device_runner is None:
            runner = DeviceRunner(engine, context)
            try:
                runner.start()  # before it can be joined
                engine.attach(runner)
            except BaseException:  # perhaps a signal handler's: the next caller makes another
                if engine.device_runner is not runner:
                    runner.abort("its creation was interrupted")
                raise
        made: DeviceRunner = engine.device_runner
    return made


def _await_devices() -> None:
    for device in range(torch.cuda.device_count()):
        with contextlib.suppress(RuntimeError):  # a failed operation is no longer in flight
            torch.cuda.synchronize(device)


def _events(tensors: Sequence[torch.Tensor]) -> list[Any]:
    if not tensors[0].is_cuda:
        return []
    return [torch.cuda.current_stream(tensors[0].device).record_event()]


def _spec(tensor: torch.Tensor) -> TensorSpec:
    nbytes = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr() if nbytes else 0
    return TensorSpec(address, nbytes, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), address)


class TorchLane:
    """The device lane of PyTorch's tensors: the DeviceLane of rounds, and the OperationLane of the adapter."""

    def describe(self) -> dict[str, Any]:
        """Return the facts from which all members make the same choice."""
        return describe()

    def quiesce(self, limit_s: float) -> bool:
        """Block until nothing runs on the devices, but for ``limit_s`` at most; return whether that is so."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True
        # The device's own wait cannot be interrupted, so a thread waits: a kernel that never ends blocks it forever.
        waits = threading.Thread(target=_await_devices, name="elastic-device-wait", daemon=True)
        waits.start()
        waits.join(limit_s)
        return not waits.is_alive()

    def prepare_join(self, context: Context) -> None:
        """Start the round's runner, which serves the others' operations."""
        if context.slot.size > 1 and _choice_in(context).kind and isinstance(context.engine, NativeEngine):
            _runner_of(context.engine, context)

    def takes(self, members: Members, tensors: Sequence[Any]) -> bool:
        """Return whether the lane runs an operation on these tensors."""
        if not tensors or not isinstance(tensors[0], torch.Tensor):
            return False
        kind = tensors[0].device.type
        context = members.context
        if kind not in ("cuda", "cpu") or (kind == "cpu" and not _for_cpu(context)):
            return False
        if any(
            not isinstance(tensor, torch.Tensor) or tensor.is_sparse or tensor.device.type != kind for tensor in tensors
        ):
            return False
        if members.size == 1 and context.slot.size == 1:
            return False
        chosen, why = _choice_in(context)
        if chosen != kind and kind == "cuda" and why:
            if _strict(context):
                raise DeviceLaneError(f"cannot run operations on CUDA tensors with NCCL, as {ENV_LANE} requests: {why}")
            if context.slot.rank == 0:
                device_groups.say_once(f"CUDA tensors go through the CPU: {why}")
        return chosen == kind and isinstance(context.engine, NativeEngine)

    def begin(
        self,
        members: Members,
        kind: Kind,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        finish: Callable[[list[torch.Tensor], list[int]], Any],
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        factors: tuple[float, float] = (1.0, 1.0),
        splits: tuple[tuple[int, ...], ...] = (),
    ) -> int:
        """Start an operation."""
        engine = members.context.engine
        assert isinstance(engine, NativeEngine)
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        # A conjugate or negative tensor may be a flag on memory with other values.
        sources = [tensor.detach().contiguous().resolve_conj().resolve_neg() for tensor in tensors]
        reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        if reduces:
            sources = [
                source.to(getattr(torch, carried_dtype(dtype, op)))
                for source, dtype in zip(sources, names, strict=True)
            ]
            op = engine_op(names, op)
        sources = [
            source
            if str(source.dtype).removeprefix("torch.") in WIRE_DTYPES
            else source.unsqueeze(-1).view(torch.uint8)
            for source in sources
        ]
        devices = {source.device for source in sources}
        if len(devices) > 1:
            raise ValueError(f"cannot group tensors of several devices: {', '.join(sorted(map(str, devices)))}")
        job = _Job(sources, _events(sources))
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
        runner = _runner_of(engine, members.context)

        @torch.no_grad()
        def deliver(_: Result) -> Any:
            results = []
            for result, tensor in zip(job.results, tensors, strict=True):
                if result.is_cuda:
                    result.record_stream(torch.cuda.current_stream(result.device))
                if reduces:
                    results.append(result.to(tensor.dtype))
                else:
                    results.append(result if result.dtype == tensor.dtype else result.view(tensor.dtype).squeeze(-1))
            return finish(results, job.received)

        return begin(members, operation, finish=deliver, submit=lambda submitted: runner.submit(submitted, job))

    def submit(self, members: Members, operation: Operation, tensors: Sequence[torch.Tensor]) -> DeviceHandle:
        """Submit an operation (with ``device=1``) on tensors that ``takes`` has accepted, in place.

        Raises:
            HorovodInternalError: the round is broken or over.
            DuplicateNameError: an operation of this name is in flight.
        """
        engine = members.context.engine
        assert isinstance(engine, NativeEngine)
        job = _Job(list(tensors), _events(tensors), in_place=True)
        return _runner_of(engine, members.context).submit(operation, job)


torch_lane = TorchLane()
devices.register(_NAME, torch_lane)
