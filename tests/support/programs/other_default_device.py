"""Another default device for the library alone, so that the usual programs test that it names its devices.

``torch.set_default_device`` would move the programs' own tensors, too. The other device is "meta": what is made there
by mistake has no memory, and fails at its first use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import elastic_driver

OTHER = "TEST_OTHER_DEFAULT_DEVICE"
_PACKAGE = os.path.dirname(os.path.abspath(elastic_driver.__file__)) + os.sep


class _OtherDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._makes = _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code.co_filename
        if func in self._makes and kwargs.get("device") is None and caller.startswith(_PACKAGE):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def begin() -> None:
    """For the rest of the process, in this thread, if its environment asks for it."""
    if os.environ.get(OTHER):
        _OtherDevice().__enter__()
