"""The choice of a round's engine: the backends that can be loaded here, and the time limits.

Owns no state. Heavy modules are imported only once chosen.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.errors import HorovodInternalError, SettingsError
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY
from elastic_driver.rendezvous.messages import RoundAssignment
from elastic_driver.words import Backend
from elastic_driver.worker.engine.collectives import Collectives, Group, Meeting, SoloCollectives
from elastic_driver.worker.engine.plain import Make, PlainEngine
from elastic_driver.worker.engine.protocol import Engine
from elastic_driver.worker.engine.seal import Seal
from elastic_driver.worker.settings import DEFAULTS, WorkerSettings, worker_settings

_log = logging.getLogger("elastic_driver.worker")


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits, in seconds."""

    build_s: float = DEFAULTS.build_timeout_s
    collective_s: float = DEFAULTS.collective_timeout_s

    @classmethod
    def of(cls, settings: WorkerSettings) -> Limits:
        """Return the limits in a worker's settings."""
        return cls(settings.build_timeout_s, settings.collective_timeout_s)


class ConnectableEngine(Engine, Protocol):
    """An engine that is not connected to its peers yet."""

    def connect(self, exchange: Meeting, *, timeout_s: float) -> None:
        """Connect to the peers. Blocks until all are connected or the time limit has passed. Raises
        HorovodInternalError.
        """


def make_engine(assignment: RoundAssignment, address: str, limits: Limits, seal: Seal) -> ConnectableEngine:
    """Make the engine for a round, not yet connected.

    Raises:
        HorovodInternalError: the backend that the driver chose cannot be loaded here.
        SettingsError: the environment lacks the ranks' key, or has an unusable value.
    """
    slot = assignment.slot
    if slot.size > 1 and not seal.key:
        raise SettingsError(
            f"cannot join a round of {slot.size} workers: {ENV_RANKS_KEY} is not set, although elasticrun sets it"
        )
    try:
        if slot.size > 1 and assignment.backend is Backend.NATIVE:
            from elastic_driver.worker.engine.native import NativeEngine

            return NativeEngine(slot.rank, slot.size, address, timeout_s=limits.collective_s, seal=seal)
        make = _torch_collectives(address) if slot.size > 1 else _solo
    except ImportError as error:
        raise HorovodInternalError(f"cannot load the {assignment.backend} backend: {error}") from error
    return PlainEngine(
        make,
        rank=slot.rank,
        size=slot.size,
        round_id=assignment.round_id,
        build_s=limits.build_s,
        collective_s=limits.collective_s,
    )


def _solo(group: Group) -> Collectives:
    return SoloCollectives()


def _torch_collectives(address: str) -> Make:
    from elastic_driver.worker.engine.torch_collectives import TorchCollectives

    return lambda group: TorchCollectives(group, address)


def usable_backends() -> tuple[Backend, ...]:
    """Return the backends that this process can use, best first."""
    backends = []
    try:
        from elastic_driver.worker.engine import native_loader

        native_loader.load()
        backends.append(Backend.NATIVE)
    except ImportError as error:
        _log.debug("cannot use the native backend: %s", error)
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        backends.append(Backend.TORCH)
    forced = worker_settings().backend
    if forced is not None:
        backends = [backend for backend in backends if backend == forced]
    if Backend.TORCH in backends and worker_settings().port_range is not None:
        # PyTorch's Gloo lets the system choose its port.
        backends.remove(Backend.TORCH)
        if not backends:
            _log.warning("elastic_driver: cannot honor --port-range without the native extension")
    return tuple(backends)
