"""The features that this torch lacks, reported before a job by ``elasticrun --check-build``.

Owns the list of all features. Importing it imports torch, and checking all features most of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_driver.torch_private import agents, groups, tensors
from elastic_driver.torch_private.features import Feature


def features() -> Iterator[Feature]:
    """Yield all features that need private parts of this torch. Many builds have no NCCL, and need none."""
    for module in (tensors, groups, agents):
        for value in vars(module).values():
            if isinstance(value, Feature) and (value is not groups.NCCL or groups.has_nccl()):
                yield value


def lost() -> list[str]:
    """Return a line for each feature whose parts are gone: what the user loses, and what is gone."""
    return [feature.told() for feature in features() if not feature.is_there]
