"""``horovod.runner.common.util.settings``: the settings of a launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic_driver.compat.runner.timeout import Timeout

__all__ = ["BaseSettings", "Settings"]


@dataclass(eq=False)
class BaseSettings:
    """The settings of ``horovodrun``, except for the hosts. This project does not use them."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | str | None = None
    start_timeout: Timeout | None = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Iterable[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


class Settings(BaseSettings):
    """The settings of ``horovodrun``, with the hosts.

    Args:
        hosts: ``host:slots,host:slots``.
        **kwargs: the other settings.
    """

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
