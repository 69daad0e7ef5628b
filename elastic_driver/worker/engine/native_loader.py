"""Loads the native extension, or explains why it is unavailable.

PyTorch contains its own Gloo, whose symbols have the same names. Python loads extensions with RTLD_LOCAL, so the two
never meet, unless PyTorch's symbols (or libgloo) are in the process's global scope. Only then is ours bound to its own
library first (RTLD_DEEPBIND), which conflicts with some preloaded memory allocators.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[2]
# Left by setup.py in the package if it has not built the extension.
_NOTE = "native_missing.txt"
# An extension built by setup.py with the stable ABI is for this Python and later ones. Earlier ones would load it all
# the same.
_STABLE_SINCE = (3, 12)
_STABLE = ".abi3.so"
# A symbol of every Gloo: the constructor of gloo::Context.
_GLOO_SYMBOL = "_ZN4gloo7ContextC1Eiii"

_loaded: ModuleType | None = None
_reason = ""


class NativeUnavailableError(ImportError):
    """The extension was not built, or cannot be loaded here. The message says why."""


def load() -> ModuleType:
    """Return the module ``elastic_driver._native``.

    Raises:
        NativeUnavailableError: it is unavailable; later calls raise the same.
    """
    global _loaded, _reason
    if _loaded is not None:
        return _loaded
    if not _reason:
        try:
            _loaded = _load()
        except ImportError as error:
            _reason = (
                f"the native extension cannot be loaded: {error}"
                if _is_built()
                else f"the native extension was not built{_why_not_built()}"
            )
        else:
            return _loaded
    raise NativeUnavailableError(_reason)


def _load() -> ModuleType:
    _check_abi()
    flags = os.RTLD_NOW | os.RTLD_LOCAL
    if _gloo_is_global():
        flags |= os.RTLD_DEEPBIND
    former = sys.getdlopenflags()
    sys.setdlopenflags(flags)
    try:
        return importlib.import_module("elastic_driver._native")
    finally:
        sys.setdlopenflags(former)


def _check_abi() -> None:
    """Raise ImportError if the only extension is for later Pythons: in a checkout that one of them built."""
    if sys.version_info[:2] >= _STABLE_SINCE:
        return
    spec = importlib.util.find_spec("elastic_driver._native")
    if spec is not None and spec.origin is not None and spec.origin.endswith(_STABLE):
        since, this = (".".join(map(str, version)) for version in (_STABLE_SINCE, sys.version_info[:2]))
        raise ImportError(
            f"{spec.origin} is for Python {since} and later, but this is Python {this}; install the package with "
            "this Python"
        )


def _gloo_is_global() -> bool:
    try:
        ctypes.CDLL(None)[_GLOO_SYMBOL]
    except AttributeError:
        return False
    return True


def _is_built() -> bool:
    return any(_PACKAGE.glob("_native.*.so"))


def _why_not_built() -> str:
    """Return what was missing when this package was installed, after a colon; "" if that was not recorded."""
    try:
        return f": {(_PACKAGE / _NOTE).read_text(encoding='utf-8').strip()}, when the package was installed"
    except OSError:
        return ""
