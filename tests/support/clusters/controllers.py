"""A running controller of ElasticJobs, in a thread of the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_driver.kubernetes.api import Api
from elastic_driver.kubernetes.controller import Controller, run


@contextmanager
def running_controller(make: Callable[[Api], Controller]) -> Iterator[None]:
    """Runs the controller that is made here, with the kubeconfig that KUBECONFIG names."""
    ready, failed = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def serve() -> None:
        try:
            loop.run_until_complete(run(stop=stop, ready=ready.set, make=make))
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="controller")
    thread.start()
    try:
        assert ready.wait(150)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(150)
        assert not thread.is_alive()
        loop.close()
    assert not failed, failed
