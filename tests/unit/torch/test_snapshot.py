"""What a TorchState keeps of values of unusual kinds: bit for bit, or one clear error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elastic_driver as hvd

torch = pytest.importorskip("torch")

from elastic_driver.torch.distributed.shards import put_back, taken_out  # noqa: E402
from elastic_driver.torch.elastic import TorchState  # noqa: E402
from elastic_driver.torch.snapshot import flatten, unflatten  # noqa: E402
from elastic_driver.worker.durable import format as durable_format  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def job_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ELASTIC_DRIVER_RENDEZVOUS", raising=False)
    hvd.init()
    yield
    hvd.shutdown()


class Versioned(torch.nn.Module):
    """Of its second version: what it is given without a version it takes for one of the first, and doubles it."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = 1

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_keep_their_versions(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2))
    state = TorchState(model, step=0)
    with torch.no_grad():
        model[0].weight.fill_(3)
    model[0].extra = 7
    state.commit()
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.fill_(5)
        model[0].extra = 8
        state.restore()
        assert (model[0].weight.tolist(), model[0].extra) == ([3.0, 3.0], 7)
    saved = model.state_dict()
    values = state._durable_values()
    assert values["model"]._metadata == saved._metadata
    # On disc, and on its way to another rank.
    path = tmp_path / "commit"
    with path.open("wb") as file:
        durable_format.write(durable_format.encode(values), file)
    again = durable_format.read(path)[1]["model"]
    assert again._metadata == saved._metadata
    skeleton, tensors = flatten(saved)
    sent = unflatten(copy.deepcopy(skeleton), tensors)
    assert sent._metadata == saved._metadata
    assert list(sent) == list(saved)
    assert put_back(taken_out(saved)[0], lambda sharded: sharded)._metadata == saved._metadata
    for tree in (again, sent):
        other = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(2))
        other.load_state_dict(tree)
        assert (other[0].weight.tolist(), other[0].extra) == ([3.0, 3.0], 7)
