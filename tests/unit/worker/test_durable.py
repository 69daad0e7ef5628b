"""Durable commits: the format holds its values bitwise, and no damage goes unnoticed."""

from __future__ import annotations

import collections
import enum
import errno
import io
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from elastic_driver.driver.durable_folder import FolderLock, FoundCommits, newest_commit
from elastic_driver.elastic import ObjectState
from elastic_driver.errors import DurableError, SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.worker.durable import commits as module
from elastic_driver.worker.durable import format as durable_format
from elastic_driver.worker.durable.commits import Durable
from elastic_driver.worker.durable.folder import CommitId, Marks, commit_files, open_folder, prune, write_file
from elastic_driver.worker.durable.restore import View, why_not_anew
from elastic_driver.worker.rounds.current import current_round

torch = pytest.importorskip("torch")

from elastic_driver.torch.elastic import ElasticSampler, TorchState  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_of_one: None) -> Durable:
    made = Durable(tmp_path, every=1, interval_s=None, keep=2, job_id="")
    monkeypatch.setattr(module, "_durable", made)
    monkeypatch.setattr(module, "_read", True)
    return made


def again(folder: Path, state: Any) -> None:
    Durable(folder, every=1, interval_s=None, keep=2, job_id="").enter(state)


VALUES: dict[str, Any] = {
    "plain": [None, True, 3, -(2**200), 0.1, -0.0, float("inf"), "é\ud800", b"\0\xff", 1 - 2j, range(1, 9, 2)],
    "nest": {1: (2, [3]), "a": {4, 5}, (6, 7): frozenset({8}), None: collections.deque([9])},
    "milestones": collections.Counter({3: 2}),
    "ordered": collections.OrderedDict(b=1, a=2),
    "array": np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2],
    "nothing": np.empty((0, 3)),
    "scalar": np.float32(0.1),
    "dtype": torch.bfloat16,
    "tensors": [torch.arange(6).reshape(2, 3).t(), torch.ones(3, dtype=torch.bfloat16) / 3, torch.tensor(True)],
}


def store(folder: Path, values: dict[str, Any], commits: int = 1) -> Path:
    return write_file(folder, CommitId(commits), durable_format.encode(values, commits=commits))


def test_values_come_back_bitwise(tmp_path: Path) -> None:
    facts, values = durable_format.read(store(tmp_path, {**VALUES, "nan": float("nan")}))
    assert facts == {"commits": 1}
    for name in ("plain", "nest", "milestones", "ordered", "dtype", "scalar"):
        assert values[name] == VALUES[name]
        assert type(values[name]) is type(VALUES[name])
    assert str(values["plain"][5]) == "-0.0"
    assert values["nan"] != values["nan"]
    for name in ("array", "nothing"):
        assert values[name].dtype == VALUES[name].dtype
        assert values[name].tobytes() == VALUES[name].tobytes()
        assert values[name].flags.writeable
    for new, old in zip(values["tensors"], VALUES["tensors"], strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new, old)


def round_trip(value: Any) -> Any:
    file = io.BytesIO()
    durable_format.write(durable_format.encode({"x": value}), file)
    return durable_format.decode(bytearray(file.getvalue()), Path("memory"))[1]["x"]


def same(new: Any, old: Any) -> bool:
    """Whether two values are alike in type, dtype, shape and bits."""
    if type(new) is not type(old):
        return False
    if isinstance(old, torch.Tensor):
        raw = [
            torch.stack([tensor.detach().resolve_conj().resolve_neg()]).reshape(-1).view(torch.uint8)
            for tensor in (new, old)
        ]
        return (new.dtype, new.shape, new.requires_grad) == (old.dtype, old.shape, old.requires_grad) and torch.equal(
            *raw
        )
    if isinstance(old, np.ndarray | np.generic):
        return bool((new.dtype, new.shape, new.tobytes()) == (old.dtype, old.shape, old.tobytes()))
    if isinstance(old, dict):
        return same([*new.items()], [*old.items()]) and same(getattr(new, "__dict__", 0), getattr(old, "__dict__", 0))
    if isinstance(old, list | tuple | collections.deque):
        return (
            len(new) == len(old) and all(map(same, new, old)) and getattr(new, "maxlen", 0) == getattr(old, "maxlen", 0)
        )
    if isinstance(old, float | complex):
        return np.array(new).tobytes() == np.array(old).tobytes()
    return bool(new == old)


class Tagged(collections.OrderedDict[str, int]):
    pass


def with_attributes(mapping: Any, **attributes: Any) -> Any:
    vars(mapping).update(attributes)
    return mapping


def field(dtype: str) -> np.ndarray[Any, Any]:
    return np.zeros(3, [("empty", dtype), ("number", "f4")])["empty"]


KEPT: dict[str, Any] = {
    "a limited deque": collections.deque([1, 2], maxlen=3),
    "a deque of nothing": collections.deque(maxlen=0),
    "deques in deques": collections.deque([collections.deque([1], 1)]),
    "an empty str_": np.array(["", "a"])[0],
    "an empty bytes_": np.bytes_(b""),
    "a str_ that ends in zeros": np.str_("a\0\0"),
    "a bytes_ that ends in zeros": np.bytes_(b"a\0\0"),
    "a str_ with a surrogate": np.str_("é\ud800"),
    "strings of no width": field("U0"),
    "bytes of no width": field("S0"),
    "no strings of no width": field("U0")[:0],
    "strings": np.array([["", "é"], ["\0b", "c"]]),
    "bytes": np.array([b"", b"a\0b"]),
    "a huge range": range(0, -(10**5000), -7),
    "a huge key": {10**5000: 1},
    "attributes of a mapping": with_attributes(collections.OrderedDict(a=1), _metadata={"v": 1}, extra=[2]),
    "an attribute alone": with_attributes(collections.Counter("ab"), extra={3}),
    "metadata alone": with_attributes(collections.OrderedDict(), _metadata=collections.OrderedDict(a=1)),
    "floats": [float("nan"), -0.0, 5e-324, float("-inf"), complex(float("nan"), -0.0)],
    "keys": {(1, (2, "x")): 3, None: 4, 2.5: 6, b"x": 7, frozenset({1}): 8, range(3): 9, np.str_(""): 10},
    "times": [np.datetime64("NaT"), np.datetime64("2020-01-01", "25s"), np.array([1, 2], "m8[3D]"), np.timedelta64(3)],
    "wide floats": [np.longdouble(1) / 3, np.array([1, 2], np.clongdouble) / 3],
    "orders of bytes": [np.zeros(3, ">i4"), np.array(5, ">c8"), np.array(["ab"], ">U2")],
    "views": [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.broadcast_to(np.int8(1), (3, 2))],
    "booleans": [np.True_, np.array([True, False])],
    "views of tensors": [torch.tensor([1 + 2j]).conj(), torch.ones(1, 3).expand(4, 3)],
    "one of many": [torch.arange(4.0)[2::2], torch.ones(1, 4)[:, 1:2].t(), torch.tensor([1 + 2j]).conj().imag],
    "zeros without memory": torch._efficientzerotensor((3,)),
    "what gets gradients": torch.ones(2, requires_grad=True),
    "of torch's": [torch.Size([2, 0]), torch.device("cuda:1"), torch.float8_e4m3fn],
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_value_that_is_written_comes_back_as_it_was(name: str) -> None:
    new = round_trip(KEPT[name])
    assert same(new, KEPT[name]), new


@pytest.mark.parametrize(
    "dtype", sorted({str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}.items())
)
def test_tensors_of_every_dtype_come_back_or_are_refused(dtype: tuple[str, torch.dtype]) -> None:
    for shape in ((), (0,), (2, 3)):
        try:
            tensor = torch.empty(shape, dtype=dtype[1])
        except Exception:  # this build cannot make one
            continue
        if tensor.is_quantized:
            with pytest.raises(DurableError, match=r"cannot write state\.x to disk"):
                durable_format.encode({"x": tensor})
        else:
            assert same(round_trip(tensor), tensor)


class Wide(np.float64):
    """A user's own scalars."""


class Level(enum.IntEnum):
    """Numbers with names."""

    LOW = 1


class Pair(NamedTuple):
    """A tuple with names."""

    a: int


REFUSED: dict[str, Callable[[], Any]] = {
    "a subclass of a scalar": lambda: Wide(1),
    "an enum": lambda: Level.LOW,
    "a named tuple": lambda: Pair(1),
    "a defaultdict": lambda: collections.defaultdict(list),
    "a subclass of a mapping": lambda: Tagged(a=1),
    "a memoryview": lambda: memoryview(b"x"),
    "objects": lambda: np.array([1, "a"], object),
    "records": lambda: np.zeros(2, [("a", "i4")]),
    "a record": lambda: np.zeros(2, [("a", "i4")])[0],
    "a masked array": lambda: np.ma.array([1]),
    "a tensor without values": lambda: torch.empty(3, device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_come_back_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(DurableError, match=r"cannot write state\.x to disk: it is a "):
        durable_format.encode({"x": REFUSED[name]()})


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """With a deque without a limit, a mapping with metadata only, a range of plain numbers, and a scalar string."""
    header = (
        b'{"values":{"d":["deque",[1,2]],"o":["ordered",[["a",1]],["dict",[["v",2]]]],"r":["range",[1,9,2]],'
        b'"s":["scalar","<U0","AAAAAA=="],"b":["scalar","|S0","AA=="],"t":["scalar","<U1","YQAAAA=="]}}'
    )
    path = tmp_path / "older"
    with path.open("wb") as file:
        durable_format.write(durable_format.Encoded(header, [], 0), file)
    _, values = durable_format.read(path)
    ordered = with_attributes(collections.OrderedDict(a=1), _metadata={"v": 2})
    wanted = [collections.deque([1, 2]), ordered, range(1, 9, 2), np.str_(""), np.bytes_(b""), np.str_("a")]
    assert same([*values.values()], wanted), values


def test_every_truncation_and_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = store(tmp_path, {"x": np.arange(8), "y": "text"})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DurableError, match="is not a complete commit"):
            durable_format.read(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(DurableError, match="is not a complete commit"):
            durable_format.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DurableError, match="is not a complete commit"):
        durable_format.read(path)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{}", b'{"values":{"x":["array","<f8",[1000],0,8000]}}', b'{"values":{"x":["array","O",[1],0,8]}}',
     b'{"values":{"x":["os.system","ls"]}}', b'{"values":{"x":["torch.dtype","load"]}}', b"[" * 100000],
)  # fmt: skip
def test_a_forged_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "forged"
    with path.open("wb") as file:
        durable_format.write(durable_format.Encoded(header, [], 0), file)
    with pytest.raises(DurableError, match="is not a complete commit"):
        durable_format.read(path)


def test_a_commit_with_a_value_of_no_known_kind_names_the_attribute(on_disk: Durable) -> None:
    state = ObjectState(step=0, things=[1, {"deep": object()}])
    with pytest.raises(DurableError, match=r"state\.things\[1\]\['deep'\].*builtins.object"):
        state.commit()
    assert commit_files(on_disk.folder) == []


def test_object_state_goes_on_from_the_last_commits(on_disk: Durable, capfd: pytest.CaptureFixture[str]) -> None:
    state = ObjectState(step=0, weights=np.zeros(3))
    for step in range(1, 6):
        state.step, state.weights = step, state.weights + 0.1 * step
        state.commit()
        assert on_disk.wait()
    assert [commits for commits, _ in commit_files(on_disk.folder)] == [4, 5]
    fresh = ObjectState(step=0, weights=np.ones(3))
    again(on_disk.folder, fresh)
    assert (fresh.step, fresh._commits, fresh.weights.tobytes()) == (5, 5, state.weights.tobytes())
    newest = commit_files(on_disk.folder)[-1][1]
    newest.write_bytes(newest.read_bytes()[:-1])
    older = ObjectState(step=0, weights=np.ones(3))
    again(on_disk.folder, older)
    assert (older.step, older._commits) == (4, 4)
    assert "trying the previous commit" in capfd.readouterr().err
    with pytest.raises(DurableError, match="not in the state: weights"):
        again(on_disk.folder, ObjectState(step=0))
    for _, path in commit_files(on_disk.folder):
        path.write_bytes(b"")
    with pytest.raises(DurableError, match="none of the 2 commits"):
        again(on_disk.folder, ObjectState(step=0, weights=np.ones(3)))


def test_attributes_called_as_parts_of_the_file(on_disk: Durable) -> None:
    values = {"commits": 41, "values": [1], "state": "s", "job": 2, "step": 3}
    ObjectState(**values).commit()
    assert on_disk.wait()
    fresh = ObjectState(**dict.fromkeys(values, 0))
    again(on_disk.folder, fresh)
    assert {name: getattr(fresh, name) for name in values} == values
    assert fresh._commits == 1


def training(seed: int) -> tuple[TorchState, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    state = TorchState(model, optimizer, scheduler=scheduler, sampler=ElasticSampler(range(100)), step=0, extra=None)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(3, 4) + state.step).square().sum().backward()
        optimizer.step()
        scheduler.step()
        state.sampler.record_batch(0, 3)
        state.step += 1

    return state, step


def test_torch_state_goes_on_bitwise(on_disk: Durable) -> None:
    state, step = training(1)
    for _ in range(3):
        step()
        state.commit()
    on_disk.finish(state, rank=0)
    fresh, fresh_step = training(2)
    again(on_disk.folder, fresh)
    fresh.sync()
    assert (fresh.step, fresh._commits, fresh.sampler.processed_num) == (3, 3, 9)
    for _ in range(3):
        step()
        fresh_step()
    pairs = zip(state.model.state_dict().values(), fresh.model.state_dict().values(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)
    assert str(state.optimizer.state_dict()) == str(fresh.optimizer.state_dict())
    assert str(state.scheduler.state_dict()) == str(fresh.scheduler.state_dict())


def test_a_slow_disk_skips_commits_and_never_mixes_two(on_disk: Durable, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()
    real = module.write_file

    def slow(folder: Path, commit: CommitId, encoded: durable_format.Encoded, **more: Any) -> Path:
        entered.set()
        assert go.wait(150)
        return real(folder, commit, encoded, **more)

    monkeypatch.setattr(module, "write_file", slow)
    state = TorchState(torch.nn.Linear(50, 50), step=0)
    for step in range(1, 8):
        state.step = step
        with torch.no_grad():
            for param in state.model.parameters():
                param.fill_(step)
        state.commit()
        assert entered.wait(150)
    told = on_disk.report()
    assert told is not None
    assert (told.written, told.commits, told.trouble) == (-1, 7, ""), "a moment is no trouble"
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    told = on_disk.report()
    assert told is not None
    assert re.fullmatch(r"commit 1 has been waiting for the disk for \d+ s", told.trouble)
    go.set()
    assert on_disk.wait()
    assert [commits for commits, _ in commit_files(on_disk.folder)] == [1]
    _, values = durable_format.read(commit_files(on_disk.folder)[0][1])
    assert values["step"] == 1
    assert all(bool((tensor == 1).all()) for tensor in values["model"].values())
    on_disk.finish(state, rank=0)
    assert commit_files(on_disk.folder)[-1][0] == 7


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_disk_is_told_once_and_training_goes_on(
    on_disk: Durable, number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    state = ObjectState(step=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for _ in range(3):
            state.commit()
            assert on_disk.wait()
    assert capfd.readouterr().err.count(os.strerror(number)) == 1
    assert not list(on_disk.folder.glob(".commit*")), "no temporary file is left"
    told = on_disk.report()
    assert told is not None
    assert (told.written, told.commits, told.trouble) == (-1, 3, os.strerror(number))
    state.commit()
    assert on_disk.wait()
    assert [commits for commits, _ in commit_files(on_disk.folder)] == [4]
    told = on_disk.report()
    assert told is not None
    assert (told.written, told.commits, told.trouble) == (4, 4, "")


class SmallDisk:
    """A disk with room for so many bytes of commits; what is written beyond fails as on a full one."""

    def __init__(self, folder: Path, room: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.room = folder, room
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "statvfs", self.statvfs)

    def free(self) -> int:
        return self.room - sum(path.stat().st_size for path in self.folder.glob("*commit-*"))

    def fsync(self, descriptor: int) -> None:
        if self.free() < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def statvfs(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=max(0, self.free()), f_frsize=1, f_blocks=self.room)


def test_a_disk_without_room_for_one_more_gets_the_next_commit(
    on_disk: Durable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whose room is just for as many as are kept, or for one less."""
    state = ObjectState(step=0, data=np.zeros(1000))
    state.commit()
    assert on_disk.wait()
    size = commit_files(on_disk.folder)[0][1].stat().st_size
    for room, kept in ((2, 2), (3, 2)):
        SmallDisk(on_disk.folder, room * size + size // 2, monkeypatch)
        for _ in range(4):
            state.commit()
            assert on_disk.wait()
            numbers = [commits for commits, _ in commit_files(on_disk.folder)]
            assert numbers == list(range(state._commits - kept + 1, state._commits + 1))
    assert capfd.readouterr().err == ""


def test_a_full_disk_keeps_its_last_whole_commit(
    on_disk: Durable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = ObjectState(step=0, data=np.zeros(1000))
    for _ in range(3):
        state.commit()
        assert on_disk.wait()
    whole, torn = (path for _, path in commit_files(on_disk.folder))
    size = whole.stat().st_size
    torn.write_bytes(torn.read_bytes()[:-1])
    SmallDisk(on_disk.folder, size + size // 2, monkeypatch)
    state.commit()
    assert on_disk.wait()
    assert [path for _, path in commit_files(on_disk.folder)] == [whole], "neither fits beside the last whole one"
    assert "No space left" in capfd.readouterr().err
    assert durable_format.read(whole)[0]["commits"] == 2


def test_a_torn_file_is_not_counted_among_those_that_are_kept(tmp_path: Path) -> None:
    files = [put(tmp_path, commits, 1, step=commits) for commits in range(1, 5)]
    files[2].write_bytes(b"torn")
    prune(tmp_path, 2, CommitId(4, 1), "mine")
    assert [path for path in files if path.exists()] == files[1:]


def test_who_writes_nothing_tells_nothing(on_disk: Durable) -> None:
    assert on_disk.report() is None, "no commit yet"
    state = ObjectState(step=0)
    on_disk._writes = False
    state.commit()
    assert on_disk.report() is None, "another rank writes into this folder"


def test_due_by_number_and_by_time(tmp_path: Path) -> None:
    counted = Durable(tmp_path, every=5, interval_s=None, keep=1, job_id="")
    assert counted._due(1)
    counted._last_commits = 4
    assert [counted._due(n) for n in (4, 5, 6)] == [False, True, True]
    timed = Durable(tmp_path, every=None, interval_s=1000.0, keep=1, job_id="")
    timed._last_commits, timed._last_at = 4, module.time.monotonic()
    assert not timed._due(500)
    timed._last_at -= 1001
    assert timed._due(5)


def test_a_folder_has_one_job(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lock = FolderLock.take(folder, "one")
    with pytest.raises(SettingsError, match="another job is using it"):
        FolderLock.take(folder, "two")
    lock.release()
    FolderLock.take(folder, "two").release()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="--durable-dir"):
        FolderLock.take(tmp_path / "file", "three")
    stale = Marks(folder, "two")
    stale.open(anew=True)
    assert stale.drivers
    stale.check()
    FolderLock.take(folder, "three").release()
    with pytest.raises(DurableError, match="now belongs to job three"):
        stale.check()


def test_a_driver_that_has_lost_its_job_does_not_keep_the_next_from_the_folder(tmp_path: Path) -> None:
    """Where something else says which of them has the job; one of another job does."""
    stopped = FolderLock.take(tmp_path, "one")
    with pytest.raises(SettingsError, match="another job is using it"):
        FolderLock.take(tmp_path, "one")
    FolderLock.take(tmp_path, "one", shares=True).release()
    with pytest.raises(SettingsError, match="another job is using it"):
        FolderLock.take(tmp_path, "two", shares=True)
    stopped.release()
    held = FolderLock.take(tmp_path, "one", shares=True)
    with pytest.raises(SettingsError, match="another job is using it"):
        FolderLock.take(tmp_path, "one")
    held.release()


def test_the_folder_is_locked_as_soon_as_a_driver_that_has_lost_the_job_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_driver.driver.durable_folder._AGAIN_S", 0.001)
    stopped = FolderLock.take(tmp_path, "one")
    held = FolderLock.take(tmp_path, "one", shares=True)
    thread = held._thread
    assert thread is not None
    stopped.release()
    thread.join()
    with pytest.raises(SettingsError, match="another job is using it"):
        FolderLock.take(tmp_path, "two")
    held.release()
    # Another job was faster, and is over.
    stopped = FolderLock.take(tmp_path, "one")
    held = FolderLock.take(tmp_path, "one", shares=True)
    thread = held._thread
    assert thread is not None
    (tmp_path / "job.lock").write_text("another")
    stopped.release()
    thread.join()
    assert (tmp_path / "job.lock").read_text() == "one"
    held.release()
    FolderLock.take(tmp_path, "two").release()


def test_a_machine_where_another_driver_once_ran_is_written_to(tmp_path: Path) -> None:
    FolderLock.take(tmp_path, "old").release()
    marks, older = Marks(tmp_path, "new"), Marks(tmp_path, "older")
    marks.open(anew=True)
    assert not marks.drivers
    older.begin()
    marks.check()
    assert marks.is_begun()
    with pytest.raises(DurableError, match="now belongs to job new"):
        older.check()


def test_a_folder_that_was_removed_is_made_anew_and_refused_once_another_job_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lock = FolderLock.take(folder, "one")
    marks = Marks(folder, "one")
    known = marks.open(anew=False)
    assert marks.drivers
    shutil.rmtree(folder)
    assert marks.open(anew=False) == known
    assert not folder.exists(), "who only trains on does not touch the disk"
    marks.check()
    assert marks.is_begun()
    assert open_folder(folder) == known, "ranks that know the old folder and newcomers are at one"
    other = FolderLock.take(folder, "two")
    with pytest.raises(DurableError, match="now belongs to job two"):
        marks.check()
    other.release()
    lock.release()


def test_all_who_come_at_once_read_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: open_folder(tmp_path / "new"), range(64)))
    assert len(ids) == 1
    assert ids == {open_folder(tmp_path / "new")}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder.id"]
    assert open_folder(tmp_path / "another") not in ids

    def no_links(*paths: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert open_folder(tmp_path / "third") == open_folder(tmp_path / "third") != ""


def test_what_killed_writers_left_is_removed_and_what_is_being_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()
    real = durable_format.write

    def slow(encoded: durable_format.Encoded, file: Any) -> None:
        entered.set()
        assert go.wait(150)
        real(encoded, file)

    monkeypatch.setattr(durable_format, "write", slow)
    writer = threading.Thread(target=store, args=(tmp_path, {"x": 6}, 6))
    writer.start()
    assert entered.wait(150)
    (being_written,) = tmp_path.glob(".commit*")
    monkeypatch.setattr(durable_format, "write", real)
    killed, just_opened = tmp_path / ".commit-000000000005.state.1.tmp", tmp_path / ".commit-000000000005.state.2.tmp"
    killed.touch()
    for path in (killed, being_written):
        os.utime(path, (1.0, 1.0))
    newest = store(tmp_path, {"x": 7}, commits=7)
    just_opened.touch()
    assert just_opened.stat().st_mtime > newest.stat().st_mtime - 1
    prune(tmp_path, 2, CommitId(7))
    assert sorted(tmp_path.glob(".commit*")) == sorted([being_written, just_opened])
    go.set()
    writer.join(150)
    assert [commits for commits, _ in commit_files(tmp_path)] == [6, 7]


BLANK = View("id", "/folder", "", 0)


@pytest.mark.parametrize(
    ("views", "round_id", "why"),
    [
        ([BLANK, BLANK], 1, ""),
        ([replace(BLANK, begun=True)], 1, ""),
        ([BLANK, replace(BLANK, trouble="Input/output error")], 1, "cannot determine.*Input/output error"),
        ([BLANK, replace(BLANK, trouble="Input/output error", was_member=True)], 2, ""),
        ([BLANK, replace(BLANK, was_member=True, begun=True)], 2, ""),
        ([replace(BLANK, was_member=True, reached=5), BLANK], 6, "all workers that had the training's state are lost"),
        ([replace(BLANK, drivers=True)], 2, ""),
        ([replace(BLANK, drivers=True, begun=True)], 2, "all workers that had the training's state are lost"),
        ([BLANK], 2, "all workers that had.*/folder"),
        ([BLANK, replace(BLANK, folder="local", begun=True)], 2, "all workers that had"),
    ],
)
def test_training_begins_anew_only_when_no_commit_can_have_been_made(
    views: list[View], round_id: int, why: str
) -> None:
    found = why_not_anew(views, round_id)
    assert re.search(why, found) if why else found == ""


def test_a_commit_that_vanishes_before_it_is_read_has_the_folder_looked_at_again(
    on_disk: Durable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"step": 0}
    store(on_disk.folder, {"step": 3}, commits=3)
    real = durable_format.load

    def load(path: Path) -> bytearray:
        if "3.state" in path.name:
            # As the writer before, who still lives, would do.
            store(on_disk.folder, {"step": 4}, commits=4)
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(durable_format, "load", load)
    fresh = ObjectState(**values)
    again(on_disk.folder, fresh)
    assert (fresh.step, fresh._commits) == (4, 4)
    assert "3.state: No such file" in capfd.readouterr().err
    commit_files(on_disk.folder)[-1][1].unlink()
    store(on_disk.folder, {"step": 3}, commits=3)
    monkeypatch.setattr(durable_format, "load", lambda path: path.unlink() or real(path))
    with pytest.raises(DurableError, match=r"none of the 1 commits.*cannot read .*000003\.state: No such file.*empty"):
        again(on_disk.folder, ObjectState(**values))


def test_a_commit_under_another_name_is_not_used(on_disk: Durable) -> None:
    store(on_disk.folder, {"step": 2}, commits=2).rename(on_disk.folder / "commit-000000000009.state")
    store(on_disk.folder, {"step": 1}, commits=1)
    fresh = ObjectState(step=0)
    again(on_disk.folder, fresh)
    assert (fresh.step, fresh._commits) == (1, 1)


def test_what_others_put_into_the_folder_is_neither_followed_nor_cut(tmp_path: Path) -> None:
    """Links under all names there are, also those that a temporary file could be guessed to have."""
    victim, folder = tmp_path / "victim", tmp_path / "commits"
    folder.mkdir()
    victim.write_text("precious")
    for name in ("begun", "commit-000000000003.state", f".commit-000000000003.state.{os.getpid()}.tmp"):
        (folder / name).symlink_to(victim)
    marks = Marks(folder, "mine")
    marks.open(anew=True)
    with pytest.raises(OSError, match="it is a symbolic link"):
        marks.check()
    marks.begin()
    marks.check()
    assert marks.is_begun()
    path = store(folder, {"a": 1}, commits=3)
    assert not path.is_symlink()
    assert durable_format.read(path)[1] == {"a": 1}
    prune(folder, 1, CommitId(3))
    assert victim.read_text() == "precious"
    (folder / "folder.id").unlink()
    (folder / "folder.id").symlink_to(victim)
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_folder(folder)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, put: Callable[[Path], None]) -> None:
    for name in ("commit-000000000002.state", "folder.id", "job.lock", ".commit-000000000001.state.x.tmp"):
        put(tmp_path / name)
    with pytest.raises(OSError, match=r"it is a|Is a directory"):
        durable_format.read(tmp_path / "commit-000000000002.state")
    with pytest.raises(OSError, match=r"it is a|Is a directory"):
        open_folder(tmp_path)
    with pytest.raises(SettingsError, match=r"\(--durable-dir\): job\.lock: (it is a|Is a directory|nobody reads)"):
        FolderLock.take(tmp_path, "mine")
    store(tmp_path, {}, commits=1)
    prune(tmp_path, 1, CommitId(1))


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_is_a_link_is_refused(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "commits"
    folder.mkdir()
    victim.write_text("precious")
    link(folder / "job.lock", victim)
    with pytest.raises(SettingsError, match=r"job\.lock: it is a (symbolic|hard) link"):
        FolderLock.take(folder, "mine")
    assert victim.read_text() == "precious"


def test_a_machine_without_threads_keeps_no_end_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert newest_commit(tmp_path) is None


def test_the_driver_finds_the_newest_commit(tmp_path: Path) -> None:
    assert newest_commit(None) is None
    assert newest_commit(tmp_path / "absent") is None
    for name in ("begun", ".commit-000000000009.state.tmp", "commit-9.state"):
        (tmp_path / name).touch()
    assert newest_commit(tmp_path) is None
    for commits in (3, 12):
        write_file(tmp_path, CommitId(commits), durable_format.encode({}, commits=commits, state="ObjectState", job=""))
    assert newest_commit(tmp_path) == FoundCommits(12)
    write_file(tmp_path, CommitId(13, 4), durable_format.encode({}, commits=13, state="ObjectState", job=""))
    assert newest_commit(tmp_path) == FoundCommits(13)
    # Torn, and changed in one byte: neither can be gone on from.
    torn = put(tmp_path, 14, 5, step=14)
    torn.write_bytes(torn.read_bytes()[:-1])
    assert newest_commit(tmp_path) == FoundCommits(13, (14,))
    changed = put(tmp_path, 15, 5, step=15)
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    assert newest_commit(tmp_path) == FoundCommits(13, (15, 14))
    for path in tmp_path.glob("commit-*.state"):
        if path not in (torn, changed):
            path.unlink()
    assert newest_commit(tmp_path) == FoundCommits(-1, (15, 14))


# --- with the driver's leave -----------------------------------------------------------------------------------------


def put(folder: Path, commits: int, round_id: int, step: int, job: str = "mine") -> Path:
    encoded = durable_format.encode({"step": step}, commits=commits, state="ObjectState", job=job)
    return write_file(folder, CommitId(commits, round_id), encoded)


def permitted(folder: Path, permit: Callable[[CommitId], None]) -> Durable:
    return Durable(folder, every=1, interval_s=None, keep=2, job_id="", permit=permit)


def use(monkeypatch: pytest.MonkeyPatch, made: Durable) -> None:
    monkeypatch.setattr(module, "_durable", made)
    monkeypatch.setattr(module, "_read", True)


def test_a_commit_is_whole_on_disk_before_the_driver_is_asked_and_has_its_name_only_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_of_one: None
) -> None:
    asked: list[tuple[CommitId, list[str]]] = []

    def permit(commit: CommitId) -> None:
        (unnamed,) = tmp_path.glob(".commit*")
        assert durable_format.read(unnamed)[1] == {"step": commit.commits}
        asked.append((commit, [path.name for path in tmp_path.glob("commit*")]))

    made = permitted(tmp_path, permit)
    use(monkeypatch, made)
    state, round_id = ObjectState(step=0), current_round().context.assignment.round_id
    for state.step in (1, 2):
        state.commit()
        assert made.wait()
    first = f"commit-000000000001-{round_id}.state"
    assert asked == [(CommitId(1, round_id), []), (CommitId(2, round_id), [first])]
    fresh = ObjectState(step=0)
    again(tmp_path, fresh)
    assert (fresh.step, fresh._commits) == (2, 2)


def test_a_commit_that_the_driver_refuses_is_dropped_and_that_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_of_one: None, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["it is over", "it is over", ""])

    def permit(commit: CommitId) -> None:
        why = next(answers)
        if why:
            raise DurableError(f"the driver rejected the commit: {why}")

    made = permitted(tmp_path, permit)
    use(monkeypatch, made)
    state = ObjectState(step=0)
    for _ in range(2):
        state.commit()
        assert made.wait()
    assert not list(tmp_path.glob("*commit*"))
    assert capfd.readouterr().err.count("cannot write commit 1 to") == 1
    told = made.report()
    assert told is not None
    assert (told.written, told.commits, told.trouble) == (-1, 2, "the driver rejected the commit: it is over")
    state.commit()
    assert made.wait()
    assert [commits for commits, _ in commit_files(tmp_path)] == [3]


def test_a_driver_that_stands_still_holds_up_the_writer_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_of_one: None
) -> None:
    asks, goes_on = threading.Event(), threading.Event()

    def permit(commit: CommitId) -> None:
        asks.set()
        assert goes_on.wait(150)

    made = permitted(tmp_path, permit)
    use(monkeypatch, made)
    state = ObjectState(step=0)
    state.commit()
    assert asks.wait(150)
    for _ in range(3):
        state.commit()
    assert made.busy
    assert commit_files(tmp_path) == []
    goes_on.set()
    assert made.wait()
    assert [commits for commits, _ in commit_files(tmp_path)] == [1]


def test_a_worker_that_is_cut_off_from_its_driver_puts_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_of_one: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    credential = Credential(Identity(Role.WORKER, WorkerId("a", 0, 0)), b"k" * 32)
    client = RendezvousClient(f"https://127.0.0.1:{port}", credential, patience_s=0.05)
    monkeypatch.setattr(module, "new_client", lambda: client)
    made = permitted(tmp_path, module.CommitPermission())
    use(monkeypatch, made)
    ObjectState(step=0).commit()
    assert made.wait()
    assert not list(tmp_path.glob("*commit*"))
    told = made.report()
    assert told is not None
    assert told.trouble.startswith("cannot reach the driver at 127.0.0.1")


def test_a_past_round_replaces_no_commit_and_is_not_gone_on_from(tmp_path: Path, job_of_one: None) -> None:
    put(tmp_path, 42, 6, step=6)
    put(tmp_path, 42, 5, step=5)  # its writer had the driver's leave, and was stopped until now
    fresh = ObjectState(step=0)
    again(tmp_path, fresh)
    assert (fresh.step, fresh._commits) == (6, 42)
    put(tmp_path, 43, 5, step=5)
    prune(tmp_path, 2, CommitId(43, 5), "mine")
    assert [path.name for _, path in commit_files(tmp_path)] == [
        "commit-000000000042-6.state",
        "commit-000000000043-5.state",
    ]


def test_a_commit_of_this_number_that_an_older_job_has_left_goes(tmp_path: Path, job_of_one: None) -> None:
    older = put(tmp_path, 42, 17, step=17, job="older")
    torn = put(tmp_path, 42, 18, step=18, job="older")
    torn.write_bytes(b"torn")
    ours = put(tmp_path, 42, 1, step=1)
    newer = put(tmp_path, 42, 2, step=2)
    prune(tmp_path, 2, CommitId(42, 1), "mine")
    assert not older.exists()
    assert not torn.exists()
    assert ours.exists()
    assert newer.exists()
    assert durable_format.facts_of(ours) == {"commits": 42, "state": "ObjectState", "job": "mine"}
