"""Unchanged Horovod scripts under elasticrun, and who is found by ``import horovod`` when."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from elastic_driver.compat.common_elastic import WorkerNotificationManager
from elastic_driver.dialects.horovod_shim import ALWAYS, AUTO, NEVER, SHIM_FOLDER, with_shim
from elastic_driver.hosts import SlotInfo
from elastic_driver.rendezvous.messages import RoundAssignment
from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import Limits
from elastic_driver.worker.rounds.context import Context
from elastic_driver.worker.rounds.current import current_round
from tests.support.processes import forked
from tests.support.processes.jobs import FORKED, FORKING, run_elasticrun

pytestmark = pytest.mark.integration
SCRIPTS = Path(__file__).parents[2] / "horovod_scripts"


def elasticrun(
    *arguments: str, env: dict[str, str] | None = None, program: tuple[str, ...] = FORKED
) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if name != "ELASTIC_DRIVER_HOROVOD_SHIM"}
    return run_elasticrun(*arguments, env=environ | (env or {}), elasticrun=program)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def real(tmp_path: Path) -> dict[str, str]:
    """An installed Horovod, as far as its import goes."""
    for name, text in {
        "horovod": "__version__ = 'real'",
        "horovod/torch": "import horovod\nkind = horovod.__version__ + '.torch'",
    }.items():
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.release  # what it calls the two below call, too, and torch/test_ops.py
def test_mnist_like() -> None:
    code, said = elasticrun("-np", "2", sys.executable, str(SCRIPTS / "mnist_like.py"), program=FORKING)
    assert code == 0, said
    assert "rank 0 of 2 accuracy" in said
    assert "rank 1 of 2 accuracy" in said


def test_synthetic_benchmark(tmp_path: Path) -> None:
    code, said = elasticrun(
        *("-np", "2", "--timeline-filename", str(tmp_path / "trace.json"), "--timeline-mark-cycles"),
        *("--cycle-time-ms", "3", "--autotune"),
        *(sys.executable, str(SCRIPTS / "synthetic_benchmark.py"), "--fp16-allreduce"),
        program=FORKING,
    )
    assert code == 0, said
    events = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST", "CYCLE_START"} <= events
    assert "Total on 2 workers: done" in said
    assert said.count("Img/sec") == 1
    assert said.count("no effect here: --cycle-time-ms, --autotune (supported only by Horovod's own library)") == 1


def test_elastic_script_survives_a_kill(tmp_path: Path) -> None:
    code, said = elasticrun(
        *("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"),
        *(sys.executable, str(SCRIPTS / "elastic_train.py")),
        env={"KILL_MARK": str(tmp_path / "killed")},
        program=FORKING,
    )
    assert code == 0, said
    assert (tmp_path / "killed").exists()
    # Its own count: 8 + 1 of two ranks in the first epoch, and 2; then of one the 12 + 1 that are left, and 16 + 1.
    assert "rank 0 of 1 epochs 3 resets 1 commits 41" in said


def test_names_are_the_same_objects(tmp_path: Path) -> None:
    code, said = run_alone(
        tmp_path,
        f"import sys; sys.path.append({SHIM_FOLDER!r})\n"
        "import pickle, horovod, elastic_driver.errors as errors\n"
        "import horovod.torch as hvd, elastic_driver.torch as own; hvd.init()\n"
        "import horovod.torch.elastic, horovod.torch.mpi_ops as ops, horovod.common.util as util\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "from horovod.torch.elastic.state import TorchState\n"
        "from horovod.torch import *\n"
        "assert hvd.DistributedOptimizer is own.DistributedOptimizer is DistributedOptimizer\n"
        "assert HorovodInternalError is errors.HorovodInternalError is hvd.HorovodInternalError\n"
        "assert TorchState is own.elastic.TorchState is horovod.torch.elastic.TorchState\n"
        "assert ops.allreduce is own.allreduce and util.gloo_built() and horovod.run\n"
        "assert type(pickle.loads(pickle.dumps(HorovodInternalError('x')))) is HorovodInternalError\n"
        "assert util.split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]\n"
        "from horovod.common.basics import HorovodBasics\n"
        "from horovod.common.process_sets import ProcessSet, global_process_set\n"
        "basics = HorovodBasics('horovod/torch/mpi_ops.py', 'mpi_lib_v2')\n"
        "assert (basics.rank(), basics.size(), basics.gloo_built(), basics.Sum) == (0, 1, True, hvd.Sum)\n"
        "choose = util.get_average_backwards_compatibility_fun(hvd)\n"
        "assert choose(None, None) is choose(None, True) is hvd.Average and choose(None, False) is hvd.Sum\n"
        "assert horovod.__version__ == '0.28.1' and not hasattr(hvd, 'no_such_name')\n",
    )
    assert code == 0, said


def test_listeners_are_told_of_host_updates() -> None:
    """Through the manager that Horovod's elastic scripts import; a listener that fails stops nobody else."""
    told: list[tuple[str, int]] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            told.append((self.name, update_res))
            if self.name == "bad":
                raise OSError("full")

    listeners = [Listener("bad"), Listener("good")]
    managers = [WorkerNotificationManager() for _ in listeners]
    for manager, listener in zip(managers, listeners, strict=True):
        manager.init()
        manager.register_listener(listener)
    assignment = RoundAssignment(1, SlotInfo(0, 1, 0, 1, 0, 1), True, 0, Backend.NATIVE)
    leave_listeners = current_round().leave_listeners
    context = Context(
        assignment,
        worker=None,
        address="127.0.0.1",
        limits=Limits(),
        client=None,
        leave_listeners=leave_listeners,
    )
    try:
        context.on_hosts_updated(leave=False, reason="")
        assert told == []
        context.on_hosts_updated(leave=True, reason="host b added")
        assert told == [("bad", 3), ("good", 3)]
        managers[1].remove_listener(listeners[1])
        context.on_hosts_updated(leave=True, reason="host c added")
        assert told[2:] == [("bad", 3)]
    finally:
        leave_listeners.clear()


def test_missing_modules_say_so() -> None:
    modules = ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.mxnet", "horovod.nope")
    code, said = elasticrun(
        *("-np", "1"),
        *python(
            "import importlib, sys\n"
            f"for name in {modules}:\n"
            "    try:\n"
            "        importlib.import_module(name)\n"
            "    except ModuleNotFoundError as error:\n"
            "        print('missing', name, error)\n"
            "import horovod.tensorflow"
        ),
    )
    assert code != 0
    assert "ModuleNotFoundError: No module named" in said
    for module in modules:
        (line,) = [line for line in said.splitlines() if f"missing {module} " in line]
        assert "No module named" in line
        assert "stand-in for Horovod has no" in line


def test_outside_of_elasticrun_there_is_none(tmp_path: Path) -> None:
    code, said = run_alone(tmp_path, "import elastic_driver.torch\nimport horovod")
    assert code == 1
    assert "No module named 'horovod'" in said


def test_install_and_uninstall(tmp_path: Path) -> None:
    code, said = run_alone(
        tmp_path,
        "import elastic_driver.compat as c\nassert c.install()\nimport horovod.torch as hvd\nhvd.init()\n"
        "assert hvd.size() == 1\nc.uninstall()\ntry:\n import horovod\n"
        "except ImportError: pass\nelse: raise SystemExit(1)",
    )
    assert code == 0, said


def test_functions_that_name_a_global_module_go_to_workers_and_between_them(tmp_path: Path) -> None:
    """With Horovod's arguments in Horovod's order."""
    code, said = run_alone(
        tmp_path,
        "import elastic_driver.compat as c; c.install(mode='always')\n"
        "import elastic_driver as own, horovod, horovod.common.util as hvd\n"
        "def train(items, parts=1):\n"
        "    own.init()\n"
        "    cut = lambda: hvd.split_list(items, parts)\n"
        "    return own.rank(), own.broadcast_object(cut if own.rank() == 1 else None, 1)()\n"
        "if __name__ == '__main__':\n"
        "    got = horovod.run(train, ([1, 2],), {'parts': 2}, 2, None, None, None, None, None, 'localhost:2', None,\n"
        "                      None, 150, network_interfaces=['lo'])\n"
        "    assert got == [(0, [[1], [2]]), (1, [[1], [2]])], got\n",
    )
    assert code == 0, said


def run_alone(folder: Path, text: str) -> tuple[int, str]:
    """Without elasticrun."""
    program = folder / "program.py"
    program.write_text(text)
    return forked.run([str(program)])


@pytest.mark.parametrize(("mode", "version"), [("auto", "real"), ("always", "0.28.1"), ("never", "real")])
def test_installed_horovod_is_hidden_only_when_asked_for(real: dict[str, str], mode: str, version: str) -> None:
    program = python(
        "import horovod, importlib.util; print('found', horovod.__version__, importlib.util.find_spec('horovod.torch'))"
    )
    code, said = elasticrun("-np", "1", "--horovod-shim", mode, *program, env=real)
    assert f"found {version} ModuleSpec(name='horovod.torch'" in said, (code, said)
    assert (f"{real['PYTHONPATH']}/horovod/torch" in said) == (version == "real"), said


def test_installed_horovod_behind_the_folder_wins(real: dict[str, str]) -> None:
    # As in site-packages, which come after PYTHONPATH.
    site = real["PYTHONPATH"]
    program = python(f"import sys; sys.path.append({site!r}); import horovod.torch as t; print('found', t.kind)")
    assert "found real.torch" in elasticrun("-np", "1", *program)[1]


def test_never_means_none() -> None:
    assert (
        "No module named 'horovod'" in elasticrun("-np", "1", "--horovod-shim", "never", *python("import horovod"))[1]
    )


def test_variable_is_the_default_and_rubbish_is_refused() -> None:
    code, said = elasticrun("-np", "1", "true", env={"ELASTIC_DRIVER_HOROVOD_SHIM": "perhaps"})
    assert code == 2
    assert "'perhaps' is not one of auto, always, never" in said


def test_place_on_the_path() -> None:
    assert with_shim(None, AUTO) == SHIM_FOLDER
    assert with_shim("", AUTO) == SHIM_FOLDER
    assert with_shim("a:b", AUTO) == f"a:b:{SHIM_FOLDER}"
    assert with_shim(f"a:{SHIM_FOLDER}", ALWAYS) == f"{SHIM_FOLDER}:a"
    assert with_shim(f"a:{SHIM_FOLDER}", NEVER) == "a"
    assert with_shim(SHIM_FOLDER, NEVER) is None
