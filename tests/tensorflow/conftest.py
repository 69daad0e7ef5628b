"""Tests with TensorFlow's servers. Each runs in a process of its own, forked from pytest's, which has imported it.

TensorFlow's runtime is one for a process, and takes part in one cluster. An import takes seconds, a fork does not; the
runtime of the process that is forked is never used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.processes.tensorflow_servers import Servers

_HERE = importlib.util.find_spec("tensorflow") is not None


class _Skipped(pytest.Module):
    def collect(self) -> Any:
        pytest.skip("there is no TensorFlow: scripts/install-tensorflow installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if _HERE else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    """How long a test of random changes takes, in seconds."""
    minutes = request.config.getoption("--tensorflow-soak")
    return 15.0 if minutes is None else 60.0 * minutes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = config.getoption("--tensorflow-soak") or 0.0
    for item in items:
        if "soak_s" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600 + 60 * soak))


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Makes servers, which end with the test."""
    from tests.support.processes.tensorflow_servers import Servers

    with Servers() as made:
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "servers" not in pyfuncitem.fixturenames:
        return None
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _run(pyfuncitem, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            said = file.read()
    except BaseException:
        # The time limit, mostly. With this signal it says where its threads are.
        os.kill(pid, signal.SIGABRT)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if not said:
        pytest.fail(f"the test's process ended with {os.waitstatus_to_exitcode(status)}", pytrace=False)
    skipped, failed = pickle.loads(said)
    if skipped is not None:
        pytest.skip(skipped)
    if failed is not None:
        pytest.fail(failed, pytrace=False)
    return True


def _run(pyfuncitem: pytest.Function, writer: int) -> None:
    skipped = failed = None
    try:
        from tests.support.processes.tensorflow_servers import die_with_parent

        die_with_parent()
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        pyfuncitem.obj(**arguments)
    except pytest.skip.Exception as said:
        skipped = str(said)
    except BaseException:
        with contextlib.suppress(BaseException):
            failed = "it has failed, and cannot be told how"
            failed = str(pyfuncitem.repr_failure(pytest.ExceptionInfo.from_current()))
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, pickle.dumps((skipped, failed and failed[-60_000:])))
        os._exit(0)
