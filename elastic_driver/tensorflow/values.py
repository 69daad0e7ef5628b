"""Per-worker values: one on each worker, by worker index, added and removed with the workers.

Owns the values, and how to create one on a worker that joins later. :mod:`~elastic_driver.tensorflow.cluster` decides
when to create it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from elastic_driver.tensorflow.private import (
    ByIndex,
    DatasetFromDataset,
    DatasetFromFunction,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
    ResourceClosure,
    concrete,
    dataset_type,
    iterator_type,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to create a value on a worker.

    Attributes:
        function: creates it there.
        args: positional arguments; for a per-worker value, it gets its own worker's.
        kwargs: keyword arguments, likewise.
        closure: the class of its closure: for any value, or for a variable.
        element_type: the type with which functions that take the value are traced; None if it is not known in advance.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    closure: type[ResourceClosure] = ResourceClosure
    element_type: Any = None

    @classmethod
    def of(
        cls,
        function: Any,
        args: Any = None,
        kwargs: Any = None,
        *,
        closure: type[ResourceClosure] = ResourceClosure,
        element_type: Any = None,
    ) -> Recipe:
        """Create a recipe from a function and its arguments. A tf.function is traced now, once for all workers."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        return cls(concrete(function, args, kwargs), args, kwargs, closure, element_type)


class _OfWorkers:
    """The values by index. Iteration yields them in the order of their indices; an unknown index raises KeyError."""

    def __init__(self) -> None:
        self.by_index: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.by_index[index]

    def __iter__(self) -> Iterator[Any]:
        there = dict(self.by_index)  # workers may join and leave meanwhile
        return iter([there[index] for index in sorted(there)])

    def __len__(self) -> int:
        return len(self.by_index)


class ElasticValues(ByIndex, PerWorkerValues):  # type: ignore[misc]
    """Values of a recipe, one on each worker.

    Args:
        recipe: how to create them.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._values = _OfWorkers()

    @property
    def by_index(self) -> Mapping[int, Any]:
        """Index -> ``RemoteValue`` of each worker; the indices of workers that have left are missing."""
        return dict(self._values.by_index)

    @property
    def element_type(self) -> Any:
        """The type with which functions that take a value are traced; None if unknown."""
        recipe = self._recipe
        if recipe.element_type is not None:
            return recipe.element_type
        # The result type of a tf.function is known; for another function, an existing value may have the type.
        closure = next(iter(self._values), None) or recipe.closure(recipe.function, recipe.args, recipe.kwargs)
        return closure._type_spec if isinstance(closure, RemoteValue) else closure._output_type_spec

    @property
    def _type_spec(self) -> Any:
        return tf.TensorSpec([]) if self.element_type is None else self.element_type

    def closure_for(self, index: int) -> ResourceClosure:
        """Return the closure that creates a worker's value, for the first time or again."""
        value = self._values.by_index.get(index)
        if value is not None:
            closure: ResourceClosure = value._closure
            return closure
        recipe = self._recipe
        closure = recipe.closure(recipe.function, recipe.args, recipe.kwargs)
        value = closure.build_output_remote_value()
        if recipe.element_type is not None:
            value._type_spec = recipe.element_type
        self._values.by_index[index] = value
        return closure

    def get(self, index: int) -> Any:
        """Return a worker's value; None without one."""
        return self._values.by_index.get(index)

    def let_go(self, index: int) -> Any:
        """Remove a worker's value, and return it. It is freed when the caller drops it."""
        return self._values.by_index.pop(index, None)


class ElasticIterator(ElasticValues, PerWorkerIterator):  # type: ignore[misc]
    """Per-worker iterators."""


Create = Callable[[Recipe, type[ElasticValues]], ElasticValues]


class _Growing:
    """Creates a dataset's iterators also on workers that join later."""

    _dataset_fn: Any
    _coordinator: Any

    def __iter__(self) -> ElasticIterator:
        if not tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("the iterators of a per-worker dataset must be created outside of tf.functions")
        dataset_fn = self._dataset_fn
        recipe = Recipe.of(
            lambda: iter(dataset_fn()), element_type=iterator_type(self._coordinator.strategy, dataset_fn)
        )
        made: ElasticIterator = self._coordinator._create(recipe, ElasticIterator)
        return made

    def build(self) -> ElasticValues:
        """Create the dataset on each worker, without an iterator."""
        dataset_fn = self._dataset_fn
        recipe = Recipe.of(lambda: dataset_fn(), element_type=dataset_type(dataset_fn))
        made: ElasticValues = self._coordinator._create(recipe, ElasticValues)
        return made


class ElasticDatasetFromFunction(_Growing, DatasetFromFunction):  # type: ignore[misc]
    """A dataset that a function creates on each worker."""


class ElasticDatasetFromDataset(_Growing, DatasetFromDataset):  # type: ignore[misc]
    """A dataset that was created in this process, of which each worker gets a copy."""
