"""``horovod.common.elastic``: the states, and ``run_fn``."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_driver.compat.elastic.worker import HostUpdateResult
from elastic_driver.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic_driver.worker.rounds.current import current_round
from elastic_driver.worker.run import run
from elastic_driver.worker.state import ObjectState, State

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "reset",
    "run_fn",
]


class WorkerNotificationManager:
    """Notifies listeners of host updates, for scripts that check for them without a commit.

    A listener's ``on_hosts_updated(timestamp, update_res)`` is called in another thread when the members have to leave
    the round at their next commit. States need not be registered: they check by themselves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._listeners: list[Any] = []
        self._told = False

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Do nothing; for Horovod's interface."""

    def register_listener(self, listener: Any) -> None:
        """Add a listener."""
        with self._lock:
            self._listeners.append(listener)
            if not self._told:
                self._told = True
                current_round().leave_listeners.append(self._tell)

    def remove_listener(self, listener: Any) -> None:
        """Remove a listener. Raises ValueError if it is not registered."""
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _tell(self) -> None:
        # The kind of the change is unknown here.
        self.handle_hosts_updated(time.time(), HostUpdateResult.mixed)


notification_manager = WorkerNotificationManager()


def reset() -> None:
    """Do nothing; Horovod's scripts pass it to :func:`run_fn` to join the next round, which ``run`` does here."""


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Make ``func(state, ...)`` elastic.

    Args:
        func: the training function.
        reset: called when this process has joined another round, before the state's ``on_reset``. Unlike in Horovod, it
            must not shut down and initialize again: this has already happened.
    """
    elastic = run(func)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state_reset = state.on_reset

        def on_reset() -> None:
            reset()
            state_reset()

        # On the instance, where run looks for it; removed afterwards, so that several functions can use the state.
        vars(state)["on_reset"] = on_reset
        try:
            return elastic(state, *args, **kwargs)
        finally:
            vars(state).pop("on_reset", None)

    return wrapper
