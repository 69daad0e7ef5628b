"""``horovod.common.util``: the part that scripts use."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from elastic_driver.compat.common_exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from elastic_driver.worker.api import builds

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

_Answer = TypeVar("_Answer")

# Caches a function's results. Other projects' tests decorate their own functions with it.
_cache = functools.cache


def _asked_verbosely(asked: Callable[[], _Answer]) -> Callable[..., _Answer]:
    """Add the ``verbose`` flag of ``horovod.common.util``, with which Horovod logs why it cannot load a library."""

    @functools.wraps(asked)
    def built(verbose: bool = False) -> _Answer:  # noqa: FBT001, FBT002 - Horovod's signature
        return asked()

    # Otherwise inspect would show the signature of the wrapped function.
    del built.__wrapped__
    return built


ccl_built = _asked_verbosely(builds.ccl_built)
ddl_built = _asked_verbosely(builds.ddl_built)
gloo_built = _asked_verbosely(builds.gloo_built)
mpi_built = _asked_verbosely(builds.mpi_built)
nccl_built = _asked_verbosely(builds.nccl_built)


def get_ext_suffix() -> str:
    """Return the suffix of extension modules' file names."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path that the extension of a package would have.

    Args:
        pkg_path: the package's ``__init__.py``.
        *args: folders under the package's, and the extension's name without its suffix.
    """
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: FBT001, FBT002 - Horovod's
    """Return whether a framework is supported: only "torch", if PyTorch is installed."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: Any) -> None:
    """Check that an extension is available.

    Raises:
        ImportError: it is not ``horovod.torch``, or PyTorch is not installed.
    """
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(
            f"cannot use {ext_name}: elastic_driver's stand-in for Horovod does not have it", name=ext_name
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: this project is not built with a framework's version."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return a function of ``(op, average)`` that resolves both to an operation; ValueError if both are given.

    Args:
        reduce_ops: an object with ``Average`` and ``Sum``.
    """

    def resolve(op: Any, average: bool | None) -> Any:  # noqa: FBT001 - Horovod's signature
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        return reduce_ops.Sum if average is False else reduce_ops.Average

    return resolve


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: FBT001, FBT002 - Horovod's
    """Return whether PyTorch finds a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables during a ``with``; those given as None are left unchanged."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether this number of ranks is a power of two, as Adasum needs."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741 - Horovod's
    """Split a list into ``n`` pieces whose lengths differ by at most one, with the longer ones first."""
    size, longer = divmod(len(l), n)
    ends = [size * part + min(part, longer) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Return whether ``iter`` accepts the object."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: Any, target: Any) -> bool:
    """Return whether a version is at least the target version.

    Args:
        ver: a version; its local part ("+cpu") is ignored, and a release candidate is before its release.
        target: ``major.minor.patch``.

    Raises:
        ValueError: one of them is not a version, or the target does not have that form.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"This function only accepts string arguments, not {ver!r} and {target!r}")
    if len(target.split(".")) != 3:
        raise ValueError(f"We only accept target versions of the form major.minor.patch, not {target!r}")
    return _version_key(ver) >= _version_key(target)


def _version_key(text: str) -> tuple[list[int], bool]:
    match = re.fullmatch(r"v?(\d+(?:\.\d+)*)(.*)", text.strip().partition("+")[0])
    if match is None:
        raise ValueError(f"cannot read {text!r} as a version")
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:  # 2.0 is 2.0.0
        numbers.pop()
    return numbers, not re.match(r"[.-]?(a|b|c|rc|alpha|beta|pre|dev)", match[2])
