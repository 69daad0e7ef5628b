"""States: what training must not lose, and how it is saved, restored, and synced to all ranks.

Owns the count of commits and the agreement to leave a round. The PyTorch state is in elastic_driver.torch.state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_driver.errors import DurableError, HostsUpdatedInterrupt
from elastic_driver.hosts import SlotInfo
from elastic_driver.worker.api.objects import broadcast_object
from elastic_driver.worker.durable.commits import durable
from elastic_driver.worker.engine.byte_collectives import PREFIX, array_spec
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind, Operation
from elastic_driver.worker.rounds import vitals
from elastic_driver.worker.rounds.current import current_round


class _HostUpdates:
    """The object whose ``empty()`` Horovod's elastic scripts poll for host updates."""

    def empty(self) -> bool:
        """Return whether this process knows of no change that requires it to leave at its next commit."""
        current = current_round()
        return not (current.initialized and current.context.hosts_updated)


class State:
    """Base of all states. A subclass implements save, restore and sync; and reset, if it needs to.

    Names that are not Horovod's begin with an underscore: all others belong to the training's attributes.

    Args:
        bcast_object: for Horovod's interface.
        get_rank: for Horovod's interface.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        # Commits of this state at its restore point; the same on all ranks after a sync. The next round resumes from
        # the state of the rank with the most.
        self._commits = 0
        self._saving_as: int | None = None  # commits of the restore point being made
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages = _HostUpdates()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register functions to call after each reset, with the new rank and size, before the state is synced.

        Typical use: adapt the learning rate to the new size.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state and run the callbacks. Called by ``elastic.run`` in the new round."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def _prepare(self, planned: SlotInfo) -> None:
        """Prepare before joining ranks that already train: they would wait for any slow first use after that.

        Args:
            planned: this process's most likely place among them.
        """

    def on_hosts_updated(self, timestamp: float = 0.0, update_res: int = 0) -> None:
        """Do nothing; for Horovod's interface. The watch thread keeps the driver's notice as a level, so nothing is
        queued.
        """

    def commit(self) -> None:
        """Save the state, then check for host updates.

        Raises:
            HostsUpdatedInterrupt: hosts joined or left; on all ranks at the same commit.
            ForkedProcessError: this process was forked from the worker that has the state.
            HorovodInternalError: a peer is gone. The state is saved nevertheless.
            DurableError: the job has durable commits, and cannot store a value of the state.
        """
        current_round().refuse_if_forked()
        self._save_as(self._commits + 1)
        vitals.note_commit(self._commits)
        on_disk = durable()
        current = current_round()
        if current.joined is not None:
            current.joined.note_restore_point()
        if on_disk is not None and current.initialized:
            on_disk.offer(self, rank=current.context.slot.rank)
        self.check_host_updates()

    def _save_as(self, commits: int) -> None:
        """Make the restore point, with this number of commits. If interrupted, the former one and its number stay."""
        self._saving_as = commits
        try:
            self.save()
        finally:
            self._saving_as = None
        self._commits = commits  # in case the user's own save() has not set it

    def check_host_updates(self) -> None:
        """Leave the round if the driver asks for it. All ranks must call this at the same step.

        Blocks for one allreduce of one integer (none in a job of one process).

        Raises:
            HostsUpdatedInterrupt: hosts joined or left; on all ranks.
            HorovodInternalError: a peer is gone.
        """
        current = current_round()
        current.refuse_if_forked()
        if not current.initialized:
            return
        context = current.context
        context.check()
        flag = np.array([int(context.hosts_updated)], np.int64)
        if context.slot.size > 1:
            spec = array_spec(flag, flag)
            context.run(Operation(Kind.ALLREDUCE, (spec,), PREFIX + "commit", ReduceOp.MAX, keep=flag, own=True))
        if flag[0]:
            raise HostsUpdatedInterrupt(reason=context.update_reason)

    def save(self) -> None:
        """Copy the state to host memory as the new restore point."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the restore point, bit for bit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make rank 0's state the state and restore point of all ranks. Does not count a commit."""
        raise NotImplementedError

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """Return the restore point, by attribute, for durable commits.

        Args:
            lend: whether another thread will read it: later saves then leave it unchanged, until the next is lent.
        """
        raise DurableError(
            f"cannot write a {type(self).__name__} to disk: it has no _durable_values and _load_durable; use "
            "ObjectState or TorchState, or omit --durable-dir"
        )

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Set the state and the restore point to what ``_durable_values`` was at that commit."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks and size. Called in the new round, before sync."""


# Names that a training's attributes cannot have, besides those with a leading underscore.
_RESERVED = frozenset(name for name in dir(State) if not name.startswith("_"))


def check_attributes(names: Iterable[str]) -> None:
    """Raise ValueError if a state cannot have attributes of these names."""
    taken = sorted(name for name in names if name in _RESERVED or name.startswith("_"))
    if taken:
        raise ValueError(f"cannot keep attributes named {', '.join(taken)}: a state reserves these names")


class ObjectState(State):
    """A state of plain Python attributes: ``ObjectState(epoch=0, batch=0)``, then ``state.epoch``.

    Values are copied with ``copy.deepcopy`` and sent with cloudpickle.

    Args:
        bcast_object: sends an object from rank 0 (Horovod's parameter); this package's by default.
        get_rank: for Horovod's interface.
        **kwargs: the attributes and their initial values.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_attributes(kwargs)
        self._bcast_object = bcast_object or broadcast_object
        self._names = list(kwargs)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(self._values())

    if TYPE_CHECKING:  # the attributes are the caller's own

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _take(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Copy the attributes as the new restore point."""
        point = self._copied()
        if self._saving_as is not None:
            point["_commits"] = self._saving_as
        # One call into C, so that a signal handler cannot raise in between: values, tensors and number of the restore
        # point always belong to one commit.
        self.__dict__.update(point)

    def _copied(self) -> dict[str, Any]:
        """Return a copy of the state, by the names of the attributes that hold the restore point."""
        return {"_saved": copy.deepcopy(self._values())}

    def restore(self) -> None:
        """Restore the attributes from the restore point."""
        self._take(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Send rank 0's attributes to all ranks. Blocks for two broadcasts."""
        commits, values = self._bcast_object((self._commits, self._values()))
        self._take(values)
        self._save_as(commits)

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """Return the saved values, which are never changed, only replaced."""
        return self._saved

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Set the attributes and the restore point from a commit on disk."""
        check_names(values, self._names)
        self._take(values)
        self._save_as(commits)


def check_names(values: dict[str, Any], names: list[str]) -> None:
    """Raise DurableError unless a commit on disk has exactly these attributes."""
    missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
    if missing or unknown:
        raise DurableError(
            f"its attributes differ from the state's (not in the file: {', '.join(missing) or 'none'}; not in the "
            f"state: {', '.join(unknown) or 'none'}); empty the folder to start over"
        )
