"""How busy this host's GPUs are, if NVIDIA's library and the optional package ``nvidia-ml-py`` are installed.

Owns a thread that asks, so that a hung GPU driver blocks nothing else. After any failure the state is unknown: earlier
values do not stay, and it is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastic_driver.figures import GpuLook

_LOOK_S = 2.0
# The last look is valid for so many looks; a failed look is retried after as many.
_HOLDS = 5
_NOTHING = GpuLook(0, None, 0)


def _library() -> Any:
    return importlib.import_module("pynvml")


class GpuWatch:
    """Looks at the GPUs every few seconds. Used on the event loop only.

    Args:
        seen: called with each look, on the event loop.
        load: returns NVIDIA's library, or raises any exception; called in the thread.
        visible: CUDA_VISIBLE_DEVICES of this process; None if not set: then all GPUs are looked at.
        look_s: from one look to the next, seconds.
    """

    def __init__(
        self,
        seen: Callable[[GpuLook], None],
        *,
        load: Callable[[], Any] = _library,
        visible: str | None = os.environ.get("CUDA_VISIBLE_DEVICES"),
        look_s: float = _LOOK_S,
    ) -> None:
        self._seen = seen
        self._load = load
        self._visible = visible
        self._look_s = look_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_known = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on. Harmless when repeated."""
        if self._thread is None:
            # Woken and ended by the event. A daemon: a call that never returns must not keep this process alive.
            arguments = (asyncio.get_running_loop(),)
            self._thread = threading.Thread(target=self._run, args=arguments, name="elastic-gpus", daemon=True)
            with contextlib.suppress(RuntimeError):  # cannot start a thread
                self._thread.start()

    def close(self) -> None:
        """Stop looking. Does not wait for a look in progress."""
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(Exception):  # no package, no library, no GPU, or a lost one
                self._ask(loop)
            # If it has never succeeded there is nothing to see.
            is_over = not self._is_known or loop.is_closed() or self._over.wait(_HOLDS * self._look_s)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        library = self._load()
        library.nvmlInit()
        gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        gpus = [gpus[index] for index in visible_of(self._visible, [_uuid(library, gpu) for gpu in gpus])]
        while gpus and not self._over.is_set():
            loop.call_soon_threadsafe(self._take, _look(library, gpus))
            self._is_known = True
            self._over.wait(self._look_s)

    def _take(self, look: GpuLook) -> None:
        if self._over.is_set():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_HOLDS * self._look_s, self._seen, _NOTHING)
        self._seen(look)


def visible_of(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES shows. Like CUDA, stop at the first invalid entry.

    Args:
        text: the variable's value; None if not set.
        uuids: of all GPUs.
    """
    if text is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in text.split(","):
        name = entry.strip()
        if name.isdecimal():
            fits = [int(name)] if int(name) < len(uuids) else []
        else:
            fits = [index for index, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(fits) != 1:
            break
        found += [index for index in fits if index not in found]
    return found


def _uuid(library: Any, gpu: Any) -> str:
    uuid = library.nvmlDeviceGetUUID(gpu)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _look(library: Any, gpus: Sequence[Any]) -> GpuLook:
    busy: list[float] = []
    memory = 0
    for gpu in gpus:
        with contextlib.suppress(library.NVMLError):  # fails for a GPU that is lost or shares the processor's memory
            memory += int(library.nvmlDeviceGetMemoryInfo(gpu).used)
        with contextlib.suppress(library.NVMLError):  # fails for a divided GPU, too (MIG)
            busy.append(min(1.0, library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100))
    return GpuLook(len(gpus), sum(busy) / len(busy) if busy else None, memory)
