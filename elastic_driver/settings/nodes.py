"""A job as torchrun has it: one command a node, all with the same endpoint, of which one becomes the driver.

Owns the values. Who reads them from a command line is :mod:`elastic_driver.cli`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Nodes:
    """What one node of such a job was told.

    Attributes:
        least: fewest nodes that the job runs with (--nnodes MIN:MAX).
        most: most nodes; others wait as spares.
        nproc_per_node: workers on this node.
        endpoint: ``host:port``, or ``host`` for the default port, where the nodes meet (--rdzv-endpoint, or
            --master-addr and --master-port); "" for a job of this node alone.
        run_id: the job's name (--rdzv-id).
        node_rank: this node's place among them; None where that is found by itself.
        local_addr: under which the others reach this node; "" to find it.
        role: of the workers.
        conf: what --rdzv-conf says, by torchrun's names; seconds, which may be fractions.
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
