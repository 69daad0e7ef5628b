"""The state of a training that is sharded, so that no rank has all of it: the common part of FSDPState and ZeroState.

At each commit each rank keeps its own pieces in host memory, and sends a copy to a rank on the next host while the
training continues. In a new round the model is rebuilt for the current number of ranks, and its pieces are gathered
from their holders. It resumes from the most advanced version that is complete: that of the last commit, or, if its
copies were still being sent, that of the one before.

A version is dropped only once a collective has shown that all members have the copies of a later one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_driver.errors import DurableError, HostsUpdatedInterrupt, ShardsLostError
from elastic_driver.torch.collectives import alltoall_async
from elastic_driver.torch.device.math import flat_bytes
from elastic_driver.torch.distributed.shards import (
    ROW_BYTES,
    Box,
    Inventory,
    Key,
    Leaf,
    Payload,
    Sharded,
    Source,
    choose,
    in_chunks,
    leaf_of,
    next_hosts,
    parts,
    sharded_in,
    taken_out,
)
from elastic_driver.torch.host_memory import copy_to_host
from elastic_driver.torch.snapshot import (
    HostCopies,
    HostCopy,
    broadcast_tree,
    flatten,
)
from elastic_driver.worker.api.handles import synchronize
from elastic_driver.worker.api.objects import allgather_object, broadcast_object
from elastic_driver.worker.durable.commits import durable
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.settings import worker_settings
from elastic_driver.worker.state import ObjectState, State

# Size in bytes up to which whole tensors are assembled from their pieces at once.
_CHUNK_BYTES = 256 << 20
# The driver's words for leaving hosts, in a notice (core/in_place.py).
_LEAVING = re.compile(r"host (\S+) (?:drained|left over|removed or reduced)")


@dataclass
class _Version:
    """The state at one point in time.

    Attributes:
        key: identifies the version.
        whole: the part that is not sharded.
        values: the plain attributes.
        own: this rank's pieces.
        former: this process's rank at that time.
        copies: of others' pieces, by their rank.
    """

    key: Key
    whole: HostCopy
    values: dict[str, Any]
    own: Payload
    former: int
    copies: dict[int, Payload] = field(default_factory=dict)

    @property
    def tree(self) -> Any:
        """The state, with a Sharded for each sharded tensor; its tensors are the restore point's."""
        return self.whole.tree()

    def payloads(self) -> dict[int, Payload]:
        """Return all pieces held here."""
        return {**self.copies, self.former: self.own}


class ShardedState(ObjectState):
    """The common part of FSDPState and ZeroState: pieces of the state, their places, and their distribution.

    Args:
        load: reads a checkpoint if pieces are lost.
        copies: whether each rank's pieces are copied to the next host.
        **kwargs: plain attributes and their initial values.
    """

    model: Any = None
    optimizer: Any = None

    def __init__(self, *, load: Callable[[Any], None] | None, copies: bool, **kwargs: Any) -> None:
        super().__init__(None, None, **kwargs)
        self._load, self._copies = load, copies
        self._others: dict[str, Any] = {}
        self._versions: list[_Version] = []
        self._spare: torch.Tensor | None = None
        self._host_copies = HostCopies()
        self._sending: tuple[_Version, int] | None = None
        self._hosts: list[str] = [""]
        self._number = 0
        self._pinned = False

    # --- for subclasses --------------------------------------------------------------------------------------------

    def _make_model(self) -> None:
        """Make the model for the current round. All members call it."""
        raise NotImplementedError

    def _tree(self) -> dict[str, Any]:
        """Return the state; its tensors are the live ones. All members call it."""
        raise NotImplementedError

    def _boxes(self) -> Callable[[Sharded], Box]:
        """Return the function that gives this rank's place in a tensor, in the current model."""
        raise NotImplementedError

    def _set(self, tree: Any, piece: Callable[[Sharded], torch.Tensor]) -> None:
        """Set the state from a tree and pieces, whose tensors stay the caller's."""
        raise NotImplementedError

    # --- commits ---------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Check for host updates, then keep the state, and start copying it to the next host.

        Raises:
            HostsUpdatedInterrupt: hosts joined or left; on all ranks at the same commit, with the state kept.
            HorovodInternalError: a peer is gone.
            DurableError: the job has durable commits.
        """
        self._settle()
        interrupt = None
        try:
            State.check_host_updates(self)
        except HostsUpdatedInterrupt as error:
            interrupt = error
        # All members have settled before the check: everybody has the copies of the last version.
        self._keep_only_last()
        self._keep(self._commits + 1)
        round_now = current_round()
        if round_now.joined is not None:
            round_now.joined.note_restore_point()
        on_disk = durable()
        if on_disk is not None and round_now.initialized:
            on_disk.offer(self, rank=round_now.context.slot.rank)
        if interrupt is not None:
            self._hand_over(interrupt.reason)
            raise interrupt

    def check_host_updates(self) -> None:
        """Check for host updates, and keep the state before leaving."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            self._settle()
            self._keep()
            self._hand_over(interrupt.reason)
            raise

    def save(self) -> None:
        """Keep the state as a new version. All ranks call it."""
        self._settle()
        self._keep()

    @torch.no_grad()
    def _keep(self, commits: int | None = None) -> None:
        """Make a version, with this number of commits if given, and start sending it.

        If interrupted, the versions and the number of commits are unchanged.
        """
        tree, tensors = taken_out(self._tree())
        payload = Payload.of([leaf_of(tensor) for tensor in tensors], self._spare, pinned=self._pinned)
        self._spare = None
        copy_to_host([payload.piece(index) for index in range(len(tensors))], [each.to_local() for each in tensors])
        whole = self._host_copies.take(tree)
        values = copy.deepcopy(self._values())
        if commits is not None:
            self._commits = commits
        self._add(_Version(self._next_key(), whole, values, payload, current().slot.rank))

    def _next_key(self) -> Key:
        self._number += 1
        return Key(self._commits, current().assignment.round_id, self._number)

    def _add(self, version: _Version) -> None:
        self._versions.append(version)
        if not self._copies or len(self._hosts) == 1:
            return
        rows = version.own.data.view(-1, ROW_BYTES)
        splits = [0] * len(self._hosts)
        splits[next_hosts(self._hosts)[version.former]] = rows.shape[0]
        self._sending = version, alltoall_async(rows, splits, name="elastic_driver.shards")

    def _settle(self) -> None:
        """Block until the copies of the last version have arrived."""
        if self._sending is not None:
            (version, handle), self._sending = self._sending, None
            self._received(version, *synchronize(handle))

    def _received(self, version: _Version, rows: torch.Tensor, counts: torch.Tensor) -> None:
        for sender, part in enumerate(rows.split(counts.tolist())):  # type: ignore[no-untyped-call]
            if part.shape[0]:
                version.copies[sender] = Payload.read(part.reshape(-1))

    def _keep_only_last(self) -> None:
        for former in self._versions[:-1]:
            self._spare = former.own.data
            if former.whole is not self._versions[-1].whole:
                self._host_copies.let_go(former.whole)
        del self._versions[:-1]

    def _hand_over(self, reason: str) -> None:
        """Before members leave, send pieces that only they have to a member that stays."""
        self._settle()
        if len(self._hosts) == 1:
            return
        # Of all: the notice may have reached only one member so far, and any may be that one.
        reasons = allgather_object(reason, name="elastic_driver.reason")
        leaving = {host for text in reasons for host in _LEAVING.findall(text)}
        version, ranks = self._versions[-1], range(len(self._hosts))
        keepers = next_hosts(self._hosts) if self._copies else list(ranks)
        staying = [rank for rank in ranks if self._hosts[rank] not in leaving]
        orphans = [rank for rank in ranks if {self._hosts[rank], self._hosts[keepers[rank]]} <= leaving]
        if not orphans or not staying:
            return
        splits = [0] * len(self._hosts)
        rows = version.own.data.view(-1, ROW_BYTES)
        if version.former in orphans:
            splits[staying[orphans.index(version.former) % len(staying)]] = rows.shape[0]
        sent = rows if version.former in orphans else rows[:0]
        self._received(version, *synchronize(alltoall_async(sent, splits, name="elastic_driver.handed")))

    # --- rounds ----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Forget copies in flight. In the next round the members agree on the version."""
        self._sending = None

    def reset(self) -> None:
        """Enter the new round, unless a sync follows."""
        if not current().assignment.sync:
            self._enter()

    def sync(self) -> None:
        """Enter the new round, with the most advanced complete version instead of rank 0's state."""
        self._enter()

    def _enter(self) -> None:
        """Make the model for the current round and restore the state. Blocks until all members have."""
        self._sending = None
        held: dict[Key, dict[int, tuple[Leaf, ...]]] = {
            version.key: {former: payload.leaves for former, payload in version.payloads().items()}
            for version in self._versions
        }
        told = allgather_object((worker_settings().hostname, held, self._commits), name="elastic_driver.held")
        self._hosts = [host for host, _, _ in told]
        inventories: list[Inventory] = [inventory for _, inventory, _ in told]
        chosen = choose(inventories, [list(inventory) for inventory in inventories])
        most = max(commits for _, _, commits in told)
        self._number = 0
        self._make_model()
        if chosen is not None:
            self._put_back(*chosen, inventories)
            return
        if most and self._load is None:
            raise ShardsLostError(
                f"cannot resume from commit {most}: pieces of the sharded state are lost, and no copy of them is "
                f"left; to read a checkpoint instead, give {type(self).__name__} a load function"
            )
        self._versions.clear()
        self._commits, values = broadcast_object((most, self._saved), name="elastic_driver.values")
        self._take(copy.deepcopy(values))
        if most and self._load is not None:
            self._load(self)
        self._keep()

    @torch.no_grad()
    def _put_back(self, key: Key, sources: Mapping[int, Source], inventories: Sequence[Inventory]) -> None:
        version = next((version for version in self._versions if version.key == key), None)
        teller = next(rank for rank, inventory in enumerate(inventories) if key in inventory)
        skeleton, tensors = flatten(None if version is None else version.tree)
        tree = broadcast_tree(skeleton, tensors, teller)
        values = broadcast_object(None if version is None else version.values, teller, name="elastic_driver.values")
        told_here = version is not None and current().slot.rank == teller
        whole = version.whole if version is not None and told_here else HostCopy(*flatten(tree))
        box_of_mine = self._boxes()
        leaves = [Leaf(one.shape, one.dtype, box_of_mine(one)) for one in sharded_in(tree)]
        payload = Payload.of(leaves, pinned=self._pinned)
        self._gather(version, sources, payload)
        self._set(tree, lambda sharded: payload.piece(sharded.index))
        self._take(copy.deepcopy(values))
        self._commits = key.commits
        # Earlier versions stay until all have the copies of this one.
        self._versions = [former for former in self._versions if former.key <= key][-1:]
        self._add(_Version(self._next_key(), whole, values, payload, current().slot.rank))

    def _gather(self, version: _Version | None, sources: Mapping[int, Source], target: Payload) -> None:
        """Fill the payload with the data from the holders of the pieces."""
        context = current()
        rank, size = context.slot.rank, context.slot.size
        payloads = version.payloads() if version is not None else {}
        wanted = allgather_object(target.leaves, name="elastic_driver.wanted")
        for number, chunk in enumerate(in_chunks(target.leaves, _CHUNK_BYTES)):
            sent: list[torch.Tensor] = []
            splits = []
            for leaves in wanted:
                mine = [
                    flat_bytes(
                        sources[former].leaves[index].box.within(payloads[former].piece(index), part).contiguous()
                    )
                    for former, index, part in parts(sources, leaves, chunk)
                    if sources[former].holder == rank
                ]
                splits.append(_fill(mine))
                sent += mine
            rows = (
                torch.cat(sent).view(-1, ROW_BYTES)
                if sent
                else torch.empty(0, ROW_BYTES, dtype=torch.uint8, device="cpu")
            )
            if size > 1:
                name = f"elastic_driver.pieces.{number}"
                rows, counts = synchronize(alltoall_async(rows, splits, name=name))
                received = [part.reshape(-1) for part in rows.split(counts.tolist())]
            else:
                received = [rows.reshape(-1)]
            at = [0] * size
            for former, index, part in parts(sources, target.leaves, chunk):
                holder, leaf = sources[former].holder, target.leaves[index]
                nbytes = part.numel * leaf.torch_dtype.itemsize
                data = received[holder][at[holder] : at[holder] + nbytes].clone()
                at[holder] += nbytes
                leaf.box.within(target.piece(index), part).copy_(data.view(leaf.torch_dtype).view(part.size))

    def _durable_values(self, *, lend: bool = False) -> dict[str, Any]:
        """Raise DurableError: no rank has the whole state."""
        raise DurableError(
            f"cannot write a {type(self).__name__} to disk: no rank has all of it; omit --durable-dir, write "
            f"checkpoints with torch.distributed.checkpoint, and give {type(self).__name__} a load function that "
            "reads them"
        )


def _fill(pieces: list[torch.Tensor]) -> int:
    """Pad the pieces to whole rows, and return their number."""
    total = sum(piece.numel() for piece in pieces)
    rows = -(-total // ROW_BYTES)
    if rows * ROW_BYTES > total:
        pieces.append(torch.zeros(rows * ROW_BYTES - total, dtype=torch.uint8, device="cpu"))
    return rows
