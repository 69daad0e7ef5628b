"""``ZeroState``: a model under DDP, whose optimizer's state ZeroRedundancyOptimizer divides among the ranks.

Each parameter's state belongs to one rank. It is kept and restored like the pieces of a sharded state
(sharded_state.py).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.torch.distributed.data_parallel import distributed_data_parallel, take_apart, wrapper_of
from elastic_driver.torch.distributed.group import process_group
from elastic_driver.torch.distributed.sharded_state import ShardedState
from elastic_driver.torch.distributed.shards import Box, Owned, OwnedBy, Sharded, owned_box, put_back
from elastic_driver.torch.ops import allreduce
from elastic_driver.torch.snapshot import Placeholder, flatten
from elastic_driver.torch.state import ModelHandler
from elastic_driver.torch_private.groups import is_plain_zero
from elastic_driver.worker.api.objects import allgather_object
from elastic_driver.worker.engine.collectives import Max
from elastic_driver.worker.rounds.current import current

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

MadeOptimizer = Any
"""A ZeroRedundancyOptimizer; or one and a dict of further objects with a state, by name."""


class ZeroState(ShardedState):
    """State of a training with DDP and ZeroRedundancyOptimizer: ``ZeroState(model, make, epoch=0, batch=0)``.

    ``make(group)`` makes the optimizer, over the process group of the round; it is called in each round, and its result
    is ``state.optimizer`` in that round: ``lambda group: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
    process_group=group, lr=1e-3)``. Each parameter's state, its momentum, is then given to the rank that now owns the
    parameter. ``state.ddp`` is the model's wrapper in the current round, as in DDPState.

    Args:
        model: a module.
        make: returns the optimizer; or it and a dict of further objects with a state, by name, such as a scheduler.
        ddp: arguments for DistributedDataParallel, except ``process_group``.
        load: as in FSDPState.
        copies: whether each rank's part of the optimizer's state is copied to the next host.
        **kwargs: plain attributes and their initial values.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        make: Callable[[torch.distributed.ProcessGroup], MadeOptimizer],
        *,
        ddp: Mapping[str, Any] | None = None,
        load: Callable[[ZeroState], None] | None = None,
        copies: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(load=load, copies=copies, **kwargs)
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
            take_apart(wrapper)
        self.model = model
        self._make = make
        # The state is already equal on all ranks.
        self._ddp_options = {"init_sync": False, **(ddp or {})}
        self._forms: list[Any] = []  # by rank, the states of its parameters with a Placeholder for each tensor
        self._told = b""  # this rank's form, pickled, at the last exchange

    @property
    def ddp(self) -> DistributedDataParallel:
        """The model, wrapped for the current round. All members make the first call in a round, which blocks."""
        return distributed_data_parallel(self.model, **self._ddp_options)

    def _make_model(self) -> None:
        self.optimizer = None
        self._others.clear()
        former = wrapper_of(self.model)
        if former is not None:
            take_apart(former)
        gc.collect()  # the optimizer holds the process group of its round
        made = self._make(process_group())
        self.optimizer, others = made if isinstance(made, tuple) else (made, {})
        if not is_plain_zero(self.optimizer):
            raise UnsupportedOperationError(
                f"cannot keep the state of {type(self.optimizer).__name__}: make(group) of ZeroState must return "
                "a ZeroRedundancyOptimizer without overlap_with_ddp"
            )
        for name, other in others.items():
            self._others[name] = other
            setattr(self, name, other)
        self._forms, self._told = [], b""
        self._pinned = any(param.is_cuda for param in self.model.parameters())

    def _tree(self) -> dict[str, Any]:
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups()]
        return {
            "model": self.model.state_dict(),
            "optimizer": {"state": self._states(), "groups": groups},
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }

    def _groups(self) -> list[dict[str, Any]]:
        optimizer: ZeroRedundancyOptimizer = self.optimizer
        return optimizer.param_groups

    def _parameters(self) -> list[torch.Tensor]:
        """Return the parameters by number."""
        return [param for group in self._groups() for param in group["params"]]

    def _own_parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parameters whose state is on this rank, by number."""
        mine = {id(param) for group in self.optimizer.optim.param_groups for param in group["params"]}
        return ((number, param) for number, param in enumerate(self._parameters()) if id(param) in mine)

    def _states(self) -> dict[int, Any]:
        """Return the states of all parameters, with an Owned for each tensor. All members call it.

        A rank learns the form of others' states only from them, and they send it again only after a change. An
        optimizer's states keep their form from its first step on, so that a commit sends one integer.
        """
        local = self.optimizer.optim.state
        form, tensors = flatten({number: local[param] for number, param in self._own_parameters() if param in local})
        rank, pickled = current().slot.rank, cloudpickle.dumps(form)
        changed = torch.tensor([pickled != self._told], dtype=torch.int64, device="cpu")
        if int(allreduce(changed, op=Max, name="elastic_driver.changed")[0]):
            self._told = b""  # until all have sent it
            self._forms = allgather_object(form, name="elastic_driver.forms")
            self._told = pickled
        states: dict[int, Any] = {}
        for owner, owned in enumerate(self._forms):
            mine = tensors if owner == rank else None
            states.update({number: _with_owned(state, number, mine) for number, state in owned.items()})
        return dict(sorted(states.items()))

    def _boxes(self) -> Callable[[Sharded], Box]:
        """Return the function that gives this rank's place in a tensor."""
        mine = {number for number, _ in self._own_parameters()}
        return lambda sharded: owned_box(sharded.shape, is_owner=sharded.placements[0].parameter in mine)

    def _set(self, tree: Any, piece: Callable[[Sharded], torch.Tensor]) -> None:
        """Set model, optimizer and others from a tree and this rank's pieces."""
        ModelHandler(self.model).set(tree["model"])
        groups, saved = self._groups(), tree["optimizer"]["groups"]
        if len(groups) != len(saved):
            raise ValueError(
                "cannot set the optimizer's state: its parameter groups differ from those of the saved state"
            )
        for group, options in zip(groups, saved, strict=True):
            group.update(copy.deepcopy(options))
        for param in self._parameters():
            param.grad = None  # of an undone step
        states, local = tree["optimizer"]["state"], self.optimizer.optim.state
        for number, param in self._own_parameters():
            if number in states:
                local[param] = put_back(copy.deepcopy(states[number]), _restorer(piece, param.device))
        for name, other in self._others.items():
            other.load_state_dict(copy.deepcopy(tree["others"][name]))


def _with_owned(state: Any, parameter: int, tensors: list[torch.Tensor] | None) -> Any:
    """Return a parameter's state with an Owned for each Placeholder.

    Args:
        state: its form.
        parameter: its number.
        tensors: this rank's, if it owns the parameter.
    """
    if isinstance(state, Placeholder):
        owner = OwnedBy(parameter, state.shape, on_host=state.device == "cpu")
        return Owned(owner, state.dtype, tensors[state.index] if tensors is not None else None)
    if isinstance(state, Mapping):
        return {name: _with_owned(value, parameter, tensors) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_owned(value, parameter, tensors) for value in state)
    return state


def _restorer(piece: Callable[[Sharded], torch.Tensor], device: torch.device) -> Callable[[Sharded], torch.Tensor]:
    """Return the function that makes a tensor of an optimizer's state from its piece."""

    def restored(sharded: Sharded) -> torch.Tensor:
        owner: OwnedBy = sharded.placements[0]
        return piece(sharded).reshape(owner.shape).clone().to("cpu" if owner.on_host else device)

    return restored
