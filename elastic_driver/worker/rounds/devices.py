"""The device lanes of this process: what runs operations on the memory of devices, one lane for each framework.

A framework's lane is registered once, when its part of the package is imported. Owns the register. Knows nothing of
devices: what a lane says of them is told to the other members as it is when a round is entered.
"""

from __future__ import annotations

from typing import Any, Protocol

from elastic_driver.worker.rounds.context import Context


class DeviceLane(Protocol):
    """What a round needs to know of a device lane. Its operations are the business of the framework's adapter."""

    def describe(self) -> Any:
        """What the other members must know to choose the same way, as JSON. Touches no device.

        Raises:
            SettingsError: the environment asks for what there is not.
        """

    def quiesce(self, limit_s: float) -> bool:
        """Blocks until nothing runs on the devices any more, but for ``limit_s`` at most; whether it is so.

        All operations were aborted, or are done, as far as this process knows.
        """

    def prepare_join(self, context: Context) -> None:
        """Sees to it that this process takes part in the others' operations on devices while it has joined."""


_lanes: dict[str, DeviceLane] = {}


def register(name: str, lane: DeviceLane) -> None:
    """Has a lane take part in rounds from the next one on.

    Raises:
        ValueError: there is another of this name.
    """
    if _lanes.setdefault(name, lane) is not lane:
        raise ValueError(f"cannot register a device lane {name!r}: there is another of this name")


def describe() -> dict[str, Any]:
    """What each lane says of its devices, by its name."""
    return {name: lane.describe() for name, lane in _lanes.items()}


def quiesce(limit_s: float) -> bool:
    """Blocks until nothing runs on any device any more, but for ``limit_s`` at most each; whether it is so."""
    return all(lane.quiesce(limit_s) for lane in _lanes.values())


def prepare_join(context: Context) -> None:
    """Has all lanes prepare for ``hvd.join``."""
    for lane in _lanes.values():
        lane.prepare_join(context)
