"""Adapters: numpy's and PyTorch's fulfil one contract, and a third framework needs no more than one."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import elastic_driver as hvd
from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.worker.api.adapter import Adapter
from elastic_driver.worker.api.arrays import NumpyAdapter
from elastic_driver.worker.api.collectives import Collectives
from elastic_driver.worker.engine.collectives import Bytes
from elastic_driver.worker.engine.protocol import TensorSpec, region

torch = pytest.importorskip("torch")

from elastic_driver.torch.tensors import TorchAdapter  # noqa: E402

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("job_of_one")]


class ListAdapter:
    """A framework whose tensors are arrays of the standard library: of one dimension, of doubles or 64-bit integers."""

    lane: None = None
    _NAMES = {"d": "float64", "q": "int64"}  # noqa: RUF012

    def group(self, results: list[array.array[Any]]) -> list[array.array[Any]]:
        return results

    def tensors(self, given: Sequence[Any], verb: str) -> Sequence[array.array[Any]]:
        for tensor in given:
            if not isinstance(tensor, array.array):
                raise TypeError(f"cannot {verb} a {type(tensor).__name__}: it takes arrays")
        return given

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        self.tensors(tensors, verb)

    def dtype(self, tensor: array.array[Any]) -> str:
        return self._NAMES[tensor.typecode]

    def rows(self, tensor: array.array[Any]) -> int:
        return len(tensor)

    def sent(self, tensor: array.array[Any], verb: str) -> array.array[Any]:
        return tensor

    def reduced(self, tensor: array.array[Any], dtype: str) -> array.array[Any]:
        return tensor

    def result_for(self, host: array.array[Any], output: array.array[Any] | None) -> array.array[Any]:
        return output if output is not None else host[:]

    def spec(self, host: array.array[Any], result: array.array[Any] | None = None) -> TensorSpec:
        address, count = host.buffer_info()
        target = 0 if result is None else result.buffer_info()[0]
        return TensorSpec(address, count * host.itemsize, self.dtype(host), (count,), target)

    def rebuilt(self, data: Bytes, rows: int, host: array.array[Any]) -> array.array[Any]:
        return array.array(host.typecode, data.tobytes())

    def delivered(
        self,
        results: list[array.array[Any]],
        tensors: Sequence[array.array[Any]],
        outputs: Sequence[array.array[Any]] | None,
    ) -> list[array.array[Any]]:
        return results

    def split_counts(self, splits: Any) -> Any:
        return splits

    def row_counts(self, received: Sequence[int], splits: Any) -> array.array[Any]:
        return array.array("q", received)


def test_a_third_framework_is_one_more_adapter() -> None:
    lists: Collectives[array.array[float], array.array[float], list[array.array[float]]]
    lists = Collectives(ListAdapter())
    values = array.array("d", [1.0, 2.0, 3.0])
    assert lists.allreduce(values, prescale_factor=2.0, op=hvd.Sum).tolist() == [2.0, 4.0, 6.0]
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert lists.allreduce_(values, postscale_factor=0.5) is values
    assert values.tolist() == [0.5, 1.0, 1.5]
    assert [one.tolist() for one in lists.grouped_allgather([values, values])] == [[0.5, 1.0, 1.5]] * 2
    assert lists.broadcast(values, 0).tolist() == [0.5, 1.0, 1.5]
    assert lists.reducescatter(array.array("q", [3, 4])).tolist() == [3, 4]
    received, rows = lists.alltoall(values, splits=[3])
    assert (received.tolist(), rows.tolist()) == ([0.5, 1.0, 1.5], [3])
    with pytest.raises(TypeError, match="cannot broadcast a list"):
        lists.broadcast([1.0], 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the job has ranks 0 to 0"):
        lists.broadcast(values, 1)


class Framework:
    """A framework's adapter, with how a test makes a tensor and looks into one."""

    def __init__(self, adapter: Adapter[Any], make: Any) -> None:
        self.adapter, self.make = adapter, make


@pytest.fixture(params=["numpy", "torch", "lists"])
def framework(request: pytest.FixtureRequest) -> Framework:
    if request.param == "numpy":
        return Framework(NumpyAdapter(), lambda values: np.array(values, np.float64))
    if request.param == "torch":
        return Framework(TorchAdapter(), lambda values: torch.tensor(values, dtype=torch.float64))
    return Framework(ListAdapter(), lambda values: array.array("d", values))


def read(spec: TensorSpec) -> list[float]:
    values: list[float] = region(spec.address, spec.nbytes).view(spec.dtype).tolist()
    return values


def test_what_is_sent_is_what_the_tensor_holds(framework: Framework) -> None:
    adapter, tensor = framework.adapter, framework.make([1.0, -2.0, 0.5])
    assert (adapter.dtype(tensor), adapter.rows(tensor)) == ("float64", 3)
    for host in (adapter.sent(tensor, "allgather"), adapter.reduced(tensor, "float64")):
        spec = adapter.spec(host)
        assert (spec.dtype, spec.shape, spec.nbytes, spec.output) == ("float64", (3,), 24, 0)
        assert read(spec) == [1.0, -2.0, 0.5]


def test_a_result_is_new_unless_an_output_is_given(framework: Framework) -> None:
    adapter, tensor = framework.adapter, framework.make([1.0, 2.0])
    host = adapter.reduced(tensor, "float64")
    own, new = adapter.spec(host, adapter.result_for(host, tensor)), adapter.spec(host, adapter.result_for(host, None))
    assert own.output == own.address
    assert new.output not in (0, new.address)


def test_results_come_back_as_the_tensors_were_or_into_the_outputs(framework: Framework) -> None:
    adapter, tensor = framework.adapter, framework.make([1.0, 2.0])
    host = adapter.sent(tensor, "allgather")
    data = np.array([1.0, 2.0, 3.0]).view(np.uint8)
    (new,) = adapter.delivered([adapter.rebuilt(data, 3, host)], [tensor], None)
    assert type(new) is type(tensor)
    assert new.tolist() == [1.0, 2.0, 3.0]
    result = adapter.result_for(adapter.reduced(tensor, "float64"), tensor)
    assert adapter.delivered([result], [tensor], [tensor])[0] is tensor
    assert [value.tolist() for value in adapter.group([new, new])] == [[1.0, 2.0, 3.0]] * 2


def test_rows_are_counted_as_the_splits_were_given(framework: Framework) -> None:
    adapter = framework.adapter
    assert list(adapter.split_counts([1, 2])) == [1, 2]
    assert adapter.row_counts((2, 1), [1, 2]).tolist() == [2, 1]
    splits = torch.tensor([1, 2], dtype=torch.int64)
    assert TorchAdapter().row_counts((2, 1), splits).dtype == torch.int64


@pytest.mark.parametrize("adapter", [NumpyAdapter(), TorchAdapter()])
def test_a_dtype_that_engines_do_not_carry_goes_as_bytes(adapter: Any) -> None:
    tensor = np.arange(6, dtype=np.uint32).reshape(2, 3)
    given = tensor if isinstance(adapter, NumpyAdapter) else torch.from_numpy(tensor)
    spec = adapter.spec(adapter.sent(given, "allgather"))
    assert (spec.dtype, spec.shape, spec.nbytes) == ("uint8", (2, 3, 4), 24)
    assert region(spec.address, spec.nbytes).view(np.uint32).tolist() == list(range(6))


def test_numpy_arrays_of_any_layout_and_order() -> None:
    swapped = np.arange(6, dtype=">f4").reshape(2, 3).T
    for result in (hvd.allreduce(swapped), hvd.allgather(swapped), hvd.broadcast(swapped, 0)):
        assert np.array_equal(result, swapped)
    strided = np.zeros((4, 4), np.float32)[:, ::2]
    strided[...] = 3
    assert hvd.allreduce_(strided) is strided
    assert (strided == 3).all()
    named = np.array(["ab", "c"])
    assert hvd.allgather(named).tolist() == ["ab", "c"]
    assert hvd.broadcast_(named, 0) is named


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hvd.allgather(np.float32(1)), UnsupportedOperationError, "cannot allgather a scalar"),
        (lambda: hvd.alltoall(np.float32(1)), UnsupportedOperationError, "cannot alltoall a scalar"),
        (lambda: hvd.reducescatter(np.float32(1)), UnsupportedOperationError, "cannot reducescatter a scalar"),
        (lambda: hvd.allgather(np.array([None])), TypeError, "cannot allgather an array of objects"),
        (lambda: hvd.allreduce(np.array([None])), TypeError, "cannot reduce values of dtype object"),
        (lambda: hvd.allreduce_([1.0]), TypeError, "cannot allreduce in place: expected a writable numpy array"),
        (lambda: hvd.broadcast_((1.0,), 0), TypeError, "cannot broadcast in place"),
        (lambda: hvd.allreduce(np.ones(1), average=True, op=hvd.Sum), ValueError, "cannot use both average and op"),
        (lambda: hvd.alltoall(np.ones(3), splits=[2]), ValueError, "cannot alltoall 3 rows with splits"),
        (lambda: hvd.alltoall(np.ones(3), splits=[1.5]), ValueError, "they must be a list of integers"),
        (lambda: hvd.reducescatter(np.ones(3), op=hvd.Adasum), UnsupportedOperationError, "cannot reducescatter with"),
    ],
)
def test_errors_say_what_cannot_be_done(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
