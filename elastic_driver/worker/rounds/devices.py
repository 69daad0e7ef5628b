"""The device lanes of this process: each runs the operations on one framework's device memory.

A framework registers its lane once, when its part of the package is imported. Owns the register. Knows nothing of
devices: a lane's facts are shared unread with the other members when a round is entered.
"""

from __future__ import annotations

from typing import Any, Protocol

from elastic_driver.worker.rounds.context import Context


class DeviceLane(Protocol):
    """The part of a device lane that a round uses. The framework's adapter owns its operations."""

    def describe(self) -> Any:
        """Return the facts from which all members make the same choice, as JSON. Touches no device.

        Raises:
            SettingsError: the environment asks for something unavailable.
        """

    def quiesce(self, limit_s: float) -> bool:
        """Block until nothing runs on the devices any more, but for ``limit_s`` at most; return whether that is so.

        As far as this process knows, all operations were aborted, or are done.
        """

    def prepare_join(self, context: Context) -> None:
        """Prepare to take part in the others' device operations after this process has joined."""


_lanes: dict[str, DeviceLane] = {}


def register(name: str, lane: DeviceLane) -> None:
    """Register a lane, which takes part from the next round on.

    Raises:
        ValueError: another lane has this name.
    """
    if _lanes.setdefault(name, lane) is not lane:
        raise ValueError(f"cannot register a device lane {name!r}: there is another of this name")


def describe() -> dict[str, Any]:
    """Return each lane's facts about its devices, by its name."""
    return {name: lane.describe() for name, lane in _lanes.items()}


def quiesce(limit_s: float) -> bool:
    """Block until nothing runs on any device, but for ``limit_s`` at most each; return whether that is so."""
    return all(lane.quiesce(limit_s) for lane in _lanes.values())


def prepare_join(context: Context) -> None:
    """Prepare all lanes for ``hvd.join``."""
    for lane in _lanes.values():
        lane.prepare_join(context)
