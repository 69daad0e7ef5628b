"""How busy the GPUs of this host are, where NVIDIA's library and the optional package ``nvidia-ml-py`` are there.

Owns a thread that asks: a driver of GPUs that hangs holds up nobody. Whatever goes wrong there, nothing is known: what
was seen before does not stay, and is asked again.
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
# For so many looks the last one holds; so many later one that has failed is tried again.
_HOLDS = 5
_NOTHING = GpuLook(0, None, 0)


def _library() -> Any:
    return importlib.import_module("pynvml")


class GpuWatch:
    """Looks at them every few seconds. Used on the event loop only.

    Args:
        seen: told of each look, on the event loop.
        load: gives NVIDIA's library, or raises whatever it likes; called in the thread.
        visible: CUDA_VISIBLE_DEVICES of this process; None where it is not set: then all are looked at.
        look_s: from one look to the next.
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
        """Looks from now on. Harmless when repeated."""
        if self._thread is None:
            # Woken and ended by the event. A daemon: a call that never returns must not keep this process.
            arguments = (asyncio.get_running_loop(),)
            self._thread = threading.Thread(target=self._run, args=arguments, name="elastic-gpus", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                self._thread.start()

    def close(self) -> None:
        """Looks no more. Does not wait for a look that is under way."""
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(Exception):  # no package, no library, no GPU, or one that is lost
                self._ask(loop)
            # Where it has never gone well there is nothing to be seen.
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
    """The numbers of the GPUs that CUDA_VISIBLE_DEVICES shows. As CUDA does, what follows an entry that is none is not.

    Args:
        text: of that variable; None where it is not set.
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
        with contextlib.suppress(library.NVMLError):  # one that shares the processor's, or is lost, does not tell
            memory += int(library.nvmlDeviceGetMemoryInfo(gpu).used)
        with contextlib.suppress(library.NVMLError):  # nor one that is divided (MIG)
            busy.append(min(1.0, library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100))
    return GpuLook(len(gpus), sum(busy) / len(busy) if busy else None, memory)
