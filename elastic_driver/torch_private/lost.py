"""What this torch costs: for whoever asks before a job does, ``elasticrun --check-build``.

Owns the list of all features. Importing it imports torch, and looking for all changes most of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_driver.torch_private import agents, groups, tensors
from elastic_driver.torch_private.features import Feature


def features() -> Iterator[Feature]:
    """All that need private parts of this torch. Many builds have no NCCL, and miss nothing by that."""
    for module in (tensors, groups, agents):
        for each in vars(module).values():
            if isinstance(each, Feature) and (each is not groups.NCCL or groups.has_nccl()):
                yield each


def lost() -> list[str]:
    """A line for each feature whose parts are gone: what the user loses, and what is gone."""
    return [each.told() for each in features() if not each.is_there]
