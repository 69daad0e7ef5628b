"""The few-line helpers of Horovod that scripts and the tests of others import, by Horovod's names."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from elastic_driver import compat
from elastic_driver.compat.common_util import env

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _horovod() -> Iterator[None]:
    assert compat.install(mode="always")
    yield
    compat.uninstall()


def horovod(module: str) -> Any:
    return importlib.import_module(f"horovod.{module}")


def test_in_thread() -> None:
    threads = horovod("runner.util.threads")
    called: list[tuple[int, ...]] = []
    thread = threads.in_thread(lambda *args: called.append(args), (1, 2), name="some")
    assert (thread.name, thread.daemon) == ("some", True)
    thread.join(150)
    assert called == [(1, 2)]
    threads.in_thread(lambda: 1 / 0, silent=True).join(150)
    with pytest.raises(ValueError, match="args must be a tuple"):
        threads.in_thread(print, [1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_is_told_unless_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    threads = horovod("runner.util.threads")
    threads.in_thread(lambda: 1 / 0, silent=True).join(150)
    assert told == []
    threads.in_thread(lambda: 1 / 0).join(150)
    assert told == [ZeroDivisionError]


def test_on_event() -> None:
    on_event = horovod("runner.util.threads").on_event
    called: list[str] = []
    event, stop = threading.Event(), threading.Event()
    waiting = [
        on_event(event, called.append, ("alone",)),
        on_event(event, called.append, ("with a stop",), stop=stop, check_stop_interval_s=0.01, daemon=False),
    ]
    assert called == []
    event.set()
    for thread in waiting:
        thread.join(150)
        assert not thread.is_alive()
    assert sorted(called) == ["alone", "with a stop"]
    stopped = on_event(threading.Event(), called.append, ("no",), stop=stop, check_stop_interval_s=0.01)
    stop.set()
    stopped.join(150)
    on_event(event, called.append, ("no",), stop=stop).join(150)
    assert len(called) == 2
    for arguments in ({"event": None}, {"args": ["x"]}, {"daemon": False}):
        with pytest.raises(ValueError, match=r"Event must not|must be a tuple|Stop event must"):
            on_event(**({"event": event, "func": print} | arguments))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_functions_in_several_threads() -> None:
    execute = horovod("runner.util.threads").execute_function_multithreaded
    assert execute(pow, [[2, 3], [3, 2], [5, 1]]) == {0: 8, 1: 9, 2: 5}
    assert execute(pow, [[n, 2] for n in range(50)], max_concurrent_executions=3)[49] == 2401
    assert execute(pow, []) == {}
    both = threading.Barrier(3)
    assert execute(both.wait, [[], []], block_until_all_done=False) is None
    both.wait(150)
    with pytest.raises(RuntimeError, match="did not complete"):
        execute(divmod, [[1, 1], [1, 0]])


def test_the_cache_decorator_and_versions() -> None:
    util = horovod("common.util")
    calls: list[Any] = []

    @util._cache
    def double(number: int, *, sign: int = 1) -> int:
        calls.append((number, sign))
        return 2 * number * sign

    assert [double(1), double(1), double(1, sign=-1), double(2)] == [2, 2, -2, 4]
    assert calls == [(1, 1), (1, -1), (2, 1)]
    newer = util.is_version_greater_equal_than
    for version, target, wanted in [
        ("2.13.0", "2.2.0", True),
        ("2.2", "2.2.0", True),
        ("2.2.0+cpu", "2.2.0", True),
        ("2.2.0rc1", "2.2.0", False),
        ("2.2.0.post1", "2.2.0", True),
        ("1.9.9", "1.10.0", False),
    ]:
        assert newer(version, target) is wanted, version
    for wrong in ((2, "2.0.0"), ("2.0.0", "2.0"), ("new", "2.0.0")):
        with pytest.raises(ValueError, match=r"version|string"):
            newer(*wrong)
    path = util.get_extension_full_path("/x/horovod/torch/__init__.py", "mpi_lib")
    assert path == f"/x/horovod/torch/mpi_lib{util.get_ext_suffix()}"
    assert "torch" in util.EXTENSIONS


def test_hosts_and_their_processes(tmp_path: Path) -> None:
    """Tables of Horovod's documentation: ranks run host by host, and cross ranks over the hosts that have the place."""
    hosts = horovod("runner.common.util.hosts")
    assert hosts.parse_hosts_and_slots("a:2, b.c-d:10") == (["a", "b.c-d"], {"a": 2, "b.c-d": 10})
    for wrong in ("a", "a:b", "a:1,", "a b:1"):
        with pytest.raises(ValueError, match="Invalid host input"):
            hosts.parse_hosts_and_slots(wrong)
    (tmp_path / "hosts").write_text("10.0.0.1 slots=2\n\nb slots=1\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "10.0.0.1:2,b:1"

    def table(text: str, low: int, high: int | None = None) -> list[tuple[Any, ...]]:
        placed = hosts.get_host_assignments(hosts.parse_hosts(text), low, high)
        assert [one.rank for one in placed] == list(range(len(placed)))
        return [
            (one.hostname, one.size, one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in placed
        ]

    assert table("a:1,b:2", 3) == [("a", 3, 0, 1, 0, 2), ("b", 3, 0, 2, 1, 2), ("b", 3, 1, 2, 0, 1)]
    assert table("a:2,b:2", 1, 2) == [("a", 2, 0, 2, 0, 1), ("a", 2, 1, 2, 0, 1)]
    with pytest.raises(ValueError, match=r"more processes \(5\) than there are available slots \(4\)"):
        table("a:2,b:2", 5)
    first = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:2"), 4)[3]
    assert first == hosts.SlotInfo("b", rank=3, local_rank=1, cross_rank=1, size=4, local_size=2, cross_size=2)
    assert first.to_response_string() == "3,4,1,2,1,2"
    assert hosts.INVALID_SLOT_INFO.to_response_string() == "-1,-1,-1,-1,-1,-1"


def test_a_host_has_one_hash_for_all_its_processes() -> None:
    module = horovod("runner.common.util.host_hash")
    plain = module.host_hash()
    assert plain == module.host_hash() == module.host_hash(salt="")
    assert plain != module.host_hash(salt="x") == module.host_hash("x") != module.host_hash("y")
    assert plain.startswith(os.uname().nodename.split(".")[0] + "-")
    assert module._hash("x") != module._hash("y")


def test_secrets() -> None:
    secret = horovod("runner.common.util.secret")
    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH
    digest = secret.compute_digest(key, b"text")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"text", digest)
    assert not secret.check_digest(key, b"Text", digest)
    assert not secret.check_digest(secret.make_secret_key(), b"text", digest)


def test_time_limits() -> None:
    timeout = horovod("runner.common.util.timeout")
    long = timeout.Timeout(1000, "not reached")
    assert 900 < long.remaining() <= 1000
    assert not long.timed_out()
    long.check_time_out_for("anything")
    over = timeout.Timeout(-1, "Timed out waiting for {activity}.")
    assert (over.remaining(), over.timed_out()) == (0, True)
    with pytest.raises(timeout.TimeoutException, match=r"waiting for hosts\. Timeout after -1 seconds") as caught:
        over.check_time_out_for("hosts")
    assert caught.value.message == str(caught.value)


def test_settings_code_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = horovod("runner.common.util.settings").Settings("a:1", num_proc=2, verbose=1, nics={"lo"})
    assert (settings.hosts, settings.num_proc, settings.nics, settings.elastic) == ("a:1", 2, {"lo"}, False)
    with pytest.raises(TypeError):
        horovod("runner.common.util.settings").Settings(nope=1)
    codec = horovod("runner.common.util.codec")
    assert codec.loads_base64(codec.dumps_base64({"a": 1})) == {"a": 1}
    assert isinstance(codec.dumps_base64(lambda: 1, to_ascii=False), bytes)
    environment = horovod("runner.common.util.env")
    exported = [
        name for name in ("PATH", "OLDPWD", "BASH_FUNC_x", "_HOROVOD_SECRET_KEY") if environment.is_exportable(name)
    ]
    assert exported == ["PATH"]
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMPI_MCA_plm_rsh_agent"):
        monkeypatch.delenv(name, raising=False)
    assert environment.get_env_rank_and_size() == (0, 1)
    assert not environment.is_kubeflow_mpi()
    with env(HOROVOD_RANK="3"):
        with pytest.raises(RuntimeError, match="only one of HOROVOD_RANK and HOROVOD_SIZE"):
            environment.get_env_rank_and_size()
        with env(HOROVOD_SIZE="4"):
            assert environment.get_env_rank_and_size() == (3, 4)


def test_what_a_command_says(capfd: pytest.CaptureFixture[str]) -> None:
    execute = horovod("runner.common.util.tiny_shell_exec").execute
    assert execute("echo out; echo err >&2; exit 3") == ("out\nerr\n", 3)
    assert execute("echo $X", env={"X": "7"}) == ("7\n", 0)
    assert execute("echo \0") is None
    assert "cannot run" in capfd.readouterr().err


def test_modules_go_to_other_processes_by_name() -> None:
    """As real modules do with cloudpickle: a function that names the global ``hvd`` can be sent."""
    util = horovod("common.util")
    assert pickle.loads(pickle.dumps(util)) is copy.deepcopy(util) is util

    def counts() -> object:
        return util.split_list([1, 2], 2)

    assert cloudpickle.loads(cloudpickle.dumps(counts))() == [[1], [2]]
    # In a process that has not imported it, and has made no hook.
    pickled = cloudpickle.dumps(counts)
    compat.uninstall()
    assert cloudpickle.loads(pickled)() == [[1], [2]]


def test_modules_have_files() -> None:
    for module in ("common.util", "runner.util", "runner.elastic.driver"):
        assert Path(horovod(module).__file__).is_file(), module
    assert horovod("runner.common").__file__.endswith("shim/horovod/__init__.py")


def test_packages_have_their_modules() -> None:
    import horovod.runner.common.util as util
    import horovod.runner.util

    assert util.secret.SECRET_LENGTH == 32
    assert horovod.runner.util.threads.in_thread
    with pytest.raises(ModuleNotFoundError, match="no such module"):
        importlib.import_module("horovod.runner.mpi_run")
