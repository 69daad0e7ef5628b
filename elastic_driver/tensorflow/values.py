"""What exists once on each worker: values by worker index, which grow and shrink with the cluster.

Owns the values, and how one is made on a worker that comes later. When that is done is the cluster's business
(:mod:`~elastic_driver.tensorflow.cluster`).
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
    """How a value is made on a worker.

    Attributes:
        function: makes it there.
        args: positional arguments; of what is per worker it gets that of its worker.
        kwargs: the same, by name.
        closure: a function or a variable.
        element_type: what a function is traced with that takes the value; None where none can.
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
        """Of a function as it was given; one that TensorFlow traces is traced now, once for all workers."""
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        return cls(concrete(function, args, kwargs), args, kwargs, closure, element_type)


class _OfWorkers:
    """The values by index. What is asked for by index is there or an error; in a loop they come in order of index."""

    def __init__(self) -> None:
        self.by_index: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.by_index[index]

    def __iter__(self) -> Iterator[Any]:
        there = dict(self.by_index)  # workers come and go meanwhile
        return iter([there[index] for index in sorted(there)])

    def __len__(self) -> int:
        return len(self.by_index)


class ElasticValues(ByIndex, PerWorkerValues):  # type: ignore[misc]
    """Values of a recipe, one on each worker.

    Args:
        recipe: how they are made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._values = _OfWorkers()

    @property
    def by_index(self) -> Mapping[int, Any]:
        """The ``RemoteValue`` of each worker, by its index; there are gaps where workers have gone."""
        return dict(self._values.by_index)

    @property
    def element_type(self) -> Any:
        """What a function is traced with that takes one of them; None when that is not known."""
        recipe = self._recipe
        if recipe.element_type is not None:
            return recipe.element_type
        # What a tf.function returns is known; of what another does, somebody may have told the values.
        closure = next(iter(self._values), None) or recipe.closure(recipe.function, recipe.args, recipe.kwargs)
        return closure._type_spec if isinstance(closure, RemoteValue) else closure._output_type_spec

    @property
    def _type_spec(self) -> Any:
        return tf.TensorSpec([]) if self.element_type is None else self.element_type

    def closure_for(self, index: int) -> ResourceClosure:
        """What makes the worker's value, for the first time or anew."""
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
        """The worker's value; None while it has none."""
        return self._values.by_index.get(index)

    def let_go(self, index: int) -> Any:
        """The worker's value, which is no more among them; it is freed when the caller lets it go, too."""
        return self._values.by_index.pop(index, None)


class ElasticIterator(ElasticValues, PerWorkerIterator):  # type: ignore[misc]
    """Iterators, one on each worker."""


Create = Callable[[Recipe, type[ElasticValues]], ElasticValues]


class _Growing:
    """Has a dataset's iterators made on workers that come later, too."""

    _dataset_fn: Any
    _coordinator: Any

    def __iter__(self) -> ElasticIterator:
        if not tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("the iterators of a per-worker dataset are to be made outside of tf.functions")
        dataset_fn = self._dataset_fn
        recipe = Recipe.of(
            lambda: iter(dataset_fn()), element_type=iterator_type(self._coordinator.strategy, dataset_fn)
        )
        made: ElasticIterator = self._coordinator._create(recipe, ElasticIterator)
        return made

    def build(self) -> ElasticValues:
        """Makes the dataset on each worker, and no iterator."""
        dataset_fn = self._dataset_fn
        recipe = Recipe.of(lambda: dataset_fn(), element_type=dataset_type(dataset_fn))
        made: ElasticValues = self._coordinator._create(recipe, ElasticValues)
        return made


class ElasticDatasetFromFunction(_Growing, DatasetFromFunction):  # type: ignore[misc]
    """A dataset that a function makes on each worker."""


class ElasticDatasetFromDataset(_Growing, DatasetFromDataset):  # type: ignore[misc]
    """A dataset that was made here, of which each worker has its own."""
