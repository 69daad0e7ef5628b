"""``FSDPState``: the state of a training whose model is sharded by ``fully_shard``, so that no rank has all of it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.hosts import SlotInfo
from elastic_driver.torch.distributed.group import process_group
from elastic_driver.torch.distributed.rehearsal import rehearse
from elastic_driver.torch.distributed.sharded_state import ShardedState
from elastic_driver.torch.distributed.shards import Box, Owned, Sharded, box_of, put_back, taken_out
from elastic_driver.torch.snapshot import optimizer_tree, set_optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Made = torch.nn.Module | tuple[Any, ...]
"""A model; or a model and its optimizer; or these and a dict of further objects with a state, by name."""


class FSDPState(ShardedState):
    """State of a training with FSDP2: ``FSDPState(make, epoch=0, batch=0)``.

    ``make(mesh)`` builds the model and shards it with ``fully_shard(…, mesh=mesh)``, and its optimizer; it is called in
    each round, with a mesh of all ranks, and its results are ``state.model`` and ``state.optimizer`` in that round.
    Then the weights and the optimizer's state are restored. It may return further objects with a state (such as a
    scheduler) by name, in a dict.

    Args:
        make: returns the model; or the model and the optimizer; or these and a dict.
        load: ``load(state)``, called on all ranks if pieces are lost and no copy is left, to read a checkpoint (for
            instance with torch.distributed.checkpoint) into the model, the optimizer and the attributes. Without it
            that is an error, which ends the job.
        copies: whether each rank's pieces are copied to the next host.
        rehearse: whether a process that joins others calls ``make`` once in advance, with a mesh whose collectives do
            nothing, so that they do not wait for one-time work. That result is discarded.
        device_type: of the mesh; by default "cuda" if the process group has NCCL, else "cpu".
        **kwargs: plain attributes and their initial values.
    """

    def __init__(
        self,
        make: Callable[[DeviceMesh], Made],
        *,
        load: Callable[[FSDPState], None] | None = None,
        copies: bool = True,
        device_type: str | None = None,
        rehearse: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(load=load, copies=copies, **kwargs)
        self._make, self._device_type, self._rehearse = make, device_type, rehearse

    def _prepare(self, planned: SlotInfo) -> None:
        """Rehearse the first build, before joining ranks that train."""
        if self._rehearse:
            rehearse(self._make, planned, self._device_type or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _make_model(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # late: importing it takes long

        self.model = self.optimizer = None
        self._others.clear()
        gc.collect()  # a sharded model references itself, and the process group of its round
        group = process_group()
        device_type = self._device_type or ("cuda" if _has_nccl(group) else "cpu")
        self._pinned = device_type == "cuda"
        made = self._make(DeviceMesh.from_group(group, device_type))
        everything = made if isinstance(made, tuple) else (made,)
        self.model = everything[0]
        self.optimizer = everything[1] if len(everything) > 1 else None
        for name, other in (everything[2] if len(everything) > 2 else {}).items():
            self._others[name] = other
            setattr(self, name, other)

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            tree["optimizer"] = optimizer_tree(self.optimizer)
        tree["others"] = {name: other.state_dict() for name, other in self._others.items()}
        return tree

    def _boxes(self) -> Callable[[Sharded], Box]:
        """Return the function that gives this rank's place in a tensor."""
        mesh_of = self._meshes()
        return lambda sharded: box_of(sharded.shape, mesh_of(sharded), sharded.placements)

    def _meshes(self) -> Callable[[Sharded], DeviceMesh]:
        """Return the function that gives the current mesh of a tensor of another round."""
        meshes = [
            tensor.device_mesh for tensor in taken_out(self.model.state_dict())[1] if not isinstance(tensor, Owned)
        ]

        def mesh_of(sharded: Sharded) -> DeviceMesh:
            alike = [mesh for mesh in meshes if mesh.ndim == len(sharded.placements)]
            if not alike:
                raise UnsupportedOperationError(
                    f"cannot restore a tensor that was sharded over {len(sharded.placements)} mesh dimensions: "
                    "the model that make() built in this round has no such mesh; make() must shard the model the "
                    "same way in each round"
                )
            return next((mesh for mesh in alike if mesh.mesh_dim_names == sharded.mesh_dims), alike[0])

        return mesh_of

    def _set(self, tree: Any, piece: Callable[[Sharded], torch.Tensor]) -> None:
        """Set model, optimizer and others from a tree and this rank's pieces."""
        from torch.distributed.tensor import DTensor  # late: importing it takes long

        mesh_of = self._meshes()
        device = next((param.device for param in self.model.parameters()), torch.device("cpu"))

        def tensor_of(sharded: Sharded) -> DTensor:
            return DTensor.from_local(
                piece(sharded).to(device),
                mesh_of(sharded),
                sharded.placements,
                run_check=False,
                shape=torch.Size(sharded.shape),
                stride=_stride(sharded.shape),
            )

        whole = put_back(tree, tensor_of)
        self.model.load_state_dict(whole["model"])
        if self.optimizer is not None:
            set_optimizer(self.optimizer, whole["optimizer"])
        for name, other in self._others.items():
            other.load_state_dict(copy.deepcopy(whole["others"][name]))


def _has_nccl(group: Any) -> bool:
    return "nccl" in str(torch.distributed.get_backend_config(group))


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
