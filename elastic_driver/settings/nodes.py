"""A job in torchrun's style: one command per node, all with the same endpoint; one of them becomes the driver.

Owns the values. :mod:`elastic_driver.cli` parses them from a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Nodes:
    """The parameters of one node of such a job.

    Attributes:
        least: fewest nodes that the job runs with (--nnodes MIN:MAX).
        most: most nodes; others wait as spares.
        nproc_per_node: workers on this node.
        endpoint: where the nodes meet: ``host:port``, or ``host`` for the default port (--rdzv-endpoint, or
            --master-addr and --master-port); "" for a job of this node alone.
        run_id: the job's name (--rdzv-id).
        node_rank: this node's place among them; None to find it.
        local_addr: this node's address for the others; "" to find it.
        role: of the workers.
        conf: the content of --rdzv-conf, by torchrun's names; times are seconds, possibly fractional.
    """

    least: int = 1
    most: int = 1
    nproc_per_node: int = 1
    endpoint: str = ""
    run_id: str = ""
    node_rank: int | None = None
    local_addr: str = ""
    role: str = "default"
    conf: Mapping[str, str] = field(default_factory=dict)
