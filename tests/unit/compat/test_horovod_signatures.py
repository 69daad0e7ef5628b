"""Each name of Horovod's modules that there are here can be called as Horovod's can.

``horovod_signatures.txt`` holds the facts: names, parameters and defaults of the release that is followed, as
``scripts/horovod-signatures`` reads them from Horovod's source. ``--horovod-source DIR`` compares it with a source.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_driver import compat
from elastic_driver.compat.finder import _MODULES

pytestmark = pytest.mark.unit
TABLE = Path(__file__).with_name("horovod_signatures.txt")
GENERATOR = Path(__file__).parents[3] / "scripts/horovod-signatures"

# What there is not, as docs/horovod.md says: a whole class has no methods either.
MISSING = {
    *("horovod.common.basics MPI", "horovod.common.process_sets MPI"),  # stands for mpi4py where that is not installed
    "horovod.runner.common.util.host_hash NAMESPACE_PATH",
    "horovod.runner.elastic.discovery DiscoveredHosts.update",  # hosts at one time never change
    *("horovod.runner.elastic.discovery HostManager.get_host_event", "horovod.runner.elastic.discovery HostState"),
    *("horovod.runner.elastic.driver ElasticDriver.get_worker_client", "horovod.runner.elastic.driver ResultsRecorder"),
    *("horovod.runner.elastic.driver WorkerNotificationClient", "horovod.runner.elastic.driver WorkerStateRegistry"),
    *(
        f"horovod.runner.elastic.worker {name}"
        for name in (
            *("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
            *("HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK", "HostsUpdatedRequest", "PUT_WORKER_ADDRESSES"),
            *("WorkerNotificationClient", "WorkerNotificationService", "put_data_into_kvstore"),
        )
    ),
    *(
        f"horovod.torch.elastic.state {name}"
        for name in (
            *("ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler"),
            *("get_handler_registry", "set_handler_registry"),
        )
    ),
    # Functions of autograd, which nobody calls by name.
    *(
        f"horovod.torch.mpi_ops Horovod{name}"
        for name in (
            *("Allgather", "Allreduce", "Alltoall", "Broadcast", "GroupedAllgather", "GroupedAllreduce"),
            *("GroupedReducescatter", "Reducescatter"),
        )
    ),
    *("horovod.torch.mpi_ops handle_average_backwards_compatibility", "horovod.torch.mpi_ops mpi_lib"),
}
MISSING_MODULES = {
    "horovod.runner." + name
    for name in (
        *("common.service", "common.service.compute_service", "common.service.driver_service"),
        *("common.service.task_service", "common.util.config_parser", "common.util.network"),
        *("common.util.safe_shell_exec", "driver", "driver.driver_service", "elastic.constants"),
        *("elastic.registration", "elastic.rendezvous", "elastic.settings", "gloo_run", "http", "http.http_client"),
        *("http.http_server", "js_run", "launch", "mpi_run", "run_task", "task", "task.task_service", "task_fn"),
        *("util.cache", "util.lsf", "util.network", "util.remote", "util.streams"),
    )
}


@pytest.fixture(autouse=True)
def _horovod() -> Iterator[None]:
    assert compat.install(mode="always")
    yield
    compat.uninstall()


def modules() -> list[str]:
    return [line.split()[1] for line in TABLE.read_text().splitlines() if line.startswith("module ")]


def entries(module: str) -> list[str]:
    start = f"{module} "
    return [line.removeprefix(start) for line in TABLE.read_text().splitlines() if line.startswith(start)]


def found(module: str, path: str) -> Any:
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def parameters(text: str, *, is_method: bool) -> list[inspect.Parameter]:
    made: dict[str, Any] = {}
    exec(f"def function({text}): pass", made)
    all_of_them = list(inspect.signature(made["function"]).parameters.values())
    return all_of_them[1:] if is_method else all_of_them


def differences(theirs: list[inspect.Parameter], ours: list[inspect.Parameter]) -> Iterator[str]:
    """What of a call that Horovod takes would be another one here."""
    by_name = {parameter.name: parameter for parameter in ours}
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in ours)
    for index, parameter in enumerate(theirs):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # Horovod's own hands them on
        same = by_name.get(parameter.name)
        if same is None:
            yield f"there is no {parameter.name}"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and ours.index(same) != index and not takes_more:
            yield f"{parameter.name} is not number {index + 1}"
        elif parameter.default is not parameter.empty:
            if same.default is same.empty:
                yield f"{parameter.name} must be given"
            elif parameter.default is not ... and same.default != parameter.default:
                yield f"{parameter.name} is {same.default!r}, not {parameter.default!r}, when it is not given"
    names = {parameter.name for parameter in theirs}
    any_name = any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in theirs)
    for parameter in ours:
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if required and parameter.name not in names and not any_name:
            yield f"{parameter.name} must be given, too"


@pytest.mark.parametrize("module", [name for name in modules() if name not in MISSING_MODULES])
def test_a_modules_names_can_be_called_as_horovods(module: str) -> None:
    if module.startswith("horovod.torch"):
        pytest.importorskip("torch")
    wrong = []
    for entry in entries(module):
        path = entry.partition("(")[0].split()[0]
        if {f"{module} {path}", f"{module} {path.partition('.')[0]}"} & MISSING:
            continue
        try:
            ours = found(module, path)
        except AttributeError as error:
            wrong.append(str(error))
            continue
        if "(" not in entry:
            continue
        inside, _, kind = entry.removeprefix(path)[1:].rpartition(")")
        is_method = "." in path and kind != " staticmethod"
        taken = list(inspect.signature(ours).parameters.values())
        if taken and is_method and taken[0].name == "self":
            taken = taken[1:]
        wrong += [f"{module}.{path}: {why}" for why in differences(parameters(inside, is_method=is_method), taken)]
    assert wrong == []


def test_what_is_said_to_be_missing_is_missing() -> None:
    assert set(modules()) - set(_MODULES) == MISSING_MODULES
    pytest.importorskip("torch")
    for name in MISSING:
        module, path = name.split()
        assert any(entry.startswith(path) for entry in entries(module)), name
        with pytest.raises(AttributeError):
            found(module, path)


def test_the_table_is_what_horovods_source_says(request: pytest.FixtureRequest) -> None:
    source = request.config.getoption("--horovod-source")
    if source is None:
        pytest.skip("no source of Horovod: give --horovod-source DIR")
    command = [sys.executable, str(GENERATOR), "--horovod-source", str(source)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == TABLE.read_text()
