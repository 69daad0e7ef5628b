"""``horovod.common.exceptions``."""

from __future__ import annotations

from elastic_driver.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message that a library's version is not the one that Horovod was built with."""
    return f"{name} {version} was built against, but {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """An error for scripts that catch it. Never raised: this project is not built with a framework's version."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
