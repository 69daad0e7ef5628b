"""NCCL among ranks that share one GPU, for tests and benchmarks on a machine that has no more: with SHARE_GPU=1.

NCCL takes ranks with different NCCL_HOSTID for ranks of different machines, connects them by TCP, and does not see that
their GPU is the same. What of ours would see it looks away.
"""

from __future__ import annotations

import os

SHARE = "SHARE_GPU"


def is_shared() -> bool:
    return os.environ.get(SHARE) == "1"


def look_like_a_machine() -> None:
    """To NCCL, before its first communicator."""
    if is_shared():
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_IB_DISABLE"] = "1"


def allow() -> None:
    """Also to elastic_driver.torch, before its first round."""
    if is_shared():
        from elastic_driver.torch.device import groups

        look_like_a_machine()
        groups._identity = lambda device: f"{device} of process {os.getpid()}"  # type: ignore[assignment]
        groups.shared_devices = lambda machines: ""  # type: ignore[assignment]
