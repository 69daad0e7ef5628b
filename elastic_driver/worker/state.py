"""What training must not lose: states that can be saved, restored, and made equal on all ranks.

Owns the counting of commits and the agreement to leave a round. The PyTorch state is in elastic_driver.torch.state.
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
    """What Horovod's elastic scripts ask for ``empty()`` while they wait for a change of hosts to be noticed."""

    def empty(self) -> bool:
        """Whether this process knows of no change for which it is to leave at its next commit."""
        current = current_round()
        return not (current.initialized and current.context.hosts_updated)


class State:
    """Base of all states. A subclass gives save, restore and sync; reset too where it needs one.

    All names that are not Horovod's begin with an underscore: the others are the attributes' of the training.

    Args:
        bcast_object: for Horovod's interface.
        get_rank: for Horovod's interface.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        # Of this state so far, as of the restore point; the same on all ranks after a sync. The rank with the most is
        # the one whose state the next round goes on from.
        self._commits = 0
        self._saving_as: int | None = None  # commits of the restore point that is being made
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages = _HostUpdates()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Has functions called after each reset, when ranks and size are the new ones, before the state is synced.

        Usual work there: the learning rate for the new size.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by ``elastic.run`` in the new round."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def _prepare(self, planned: SlotInfo) -> None:
        """Called before this process joins others that train, and would wait for whatever it does first after that.

        Args:
            planned: its place among them, most likely.
        """

    def on_hosts_updated(self, timestamp: float = 0.0, update_res: int = 0) -> None:
        """For Horovod's interface. The driver's notice is a level that the watch thread keeps, so nothing is queued."""

    def commit(self) -> None:
        """Saves the state, then looks for host updates.

        Raises:
            HostsUpdatedInterrupt: hosts came or went; on all ranks at the same commit.
            ForkedProcessError: this process was forked from the worker that has the state.
            HorovodInternalError: a peer is gone. The state is saved nevertheless.
            DurableError: the job has durable commits, and a value of the state is of no kind that they hold.
        """
        current_round().refuse_if_forked()
        self._save_as(self._commits + 1)
        vitals.note_commit(self._commits)
        on_disc = durable()
        current = current_round()
        if current.joined is not None:
            current.joined.note_restore_point()
        if on_disc is not None and current.initialized:
            on_disc.offer(self, rank=current.context.slot.rank)
        self.check_host_updates()

    def _save_as(self, commits: int) -> None:
        """Makes the restore point, of so many commits. What ends it early leaves the former one, and its number."""
        self._saving_as = commits
        try:
            self.save()
        finally:
            self._saving_as = None
        self._commits = commits  # where a save of the user's own has not

    def check_host_updates(self) -> None:
        """Leaves the round when the driver asked for it. All ranks must call it at the same step.

        Blocks for one allreduce of one integer (none in a job of one process).

        Raises:
            HostsUpdatedInterrupt: hosts came or went; on all ranks.
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
        """Copies the state to host memory: the new restore point."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the restore point, bit for bit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state that of rank 0, on all ranks, and that the restore point. Counts no commit."""
        raise NotImplementedError

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """The restore point, by attribute, for durable commits.

        Args:
            lend: whether another thread will read it: then later saves leave it as it is, until the next is lent.
        """
        raise DurableError(
            f"cannot write a {type(self).__name__} to disc: it has no _durable_values and _load_durable; use "
            "ObjectState or TorchState, or leave --durable-dir away"
        )

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """Makes the state, and the restore point, what ``_durable_values`` was at that commit."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to other ranks and another size. Called in the new round, before sync."""


# What no attribute of a training can be called, besides names with an underscore first.
_RESERVED = frozenset(name for name in dir(State) if not name.startswith("_"))


def check_attributes(names: Iterable[str]) -> None:
    """Raises ValueError when a state cannot have attributes of these names."""
    taken = sorted(name for name in names if name in _RESERVED or name.startswith("_"))
    if taken:
        raise ValueError(f"cannot keep attributes named {', '.join(taken)}: a state has these names itself")


class ObjectState(State):
    """A state of plain Python attributes: ``ObjectState(epoch=0, batch=0)``, then ``state.epoch``.

    Values are copied with ``copy.deepcopy`` and sent with cloudpickle.

    Args:
        bcast_object: what sends an object from rank 0 (Horovod's parameter); by default this package's.
        get_rank: for Horovod's interface.
        **kwargs: the attributes and their first values.
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
        """See State."""
        point = self._copied()
        if self._saving_as is not None:
            point["_commits"] = self._saving_as
        # One call into C, so that a signal's handler cannot raise between two of them: the values, the tensors and the
        # number of the restore point are those of one commit.
        self.__dict__.update(point)

    def _copied(self) -> dict[str, Any]:
        """A copy of the state, by the names of the attributes that hold the restore point."""
        return {"_saved": copy.deepcopy(self._values())}

    def restore(self) -> None:
        """See State."""
        self._take(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """See State. Blocks for two broadcasts."""
        commits, values = self._bcast_object((self._commits, self._values()))
        self._take(values)
        self._save_as(commits)

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """See State. The saved values are never changed, only replaced."""
        return self._saved

    def _load_durable(self, values: dict[str, Any], commits: int) -> None:
        """See State."""
        check_names(values, self._names)
        self._take(values)
        self._save_as(commits)


def check_names(values: dict[str, Any], names: list[str]) -> None:
    """Raises DurableError unless a commit on disc has just these attributes."""
    missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
    if missing or unknown:
        raise DurableError(
            f"its attributes are not the state's (not in the file: {', '.join(missing) or 'none'}; "
            f"not in the state: {', '.join(unknown) or 'none'}); empty the folder to begin anew"
        )
