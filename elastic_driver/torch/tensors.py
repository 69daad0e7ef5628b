"""The adapter of PyTorch's tensors: how the engine reads their memory, and how results become tensors.

CPU tensors are used in place, contiguous ones without a copy. Tensors on other devices go through the CPU, unless the
device lane accepts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from elastic_driver.torch.device.lane import TorchLane, torch_lane
from elastic_driver.torch.device.math import flat_bytes
from elastic_driver.worker.engine.collectives import Bytes
from elastic_driver.worker.engine.protocol import WIRE_DTYPES, TensorSpec

# By dtype: PyTorch formats a dtype's text on each access.
_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype).removeprefix("torch.")
    return name


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a contiguous CPU tensor, as bytes, without a copy."""
    return cast(Bytes, flat_bytes(tensor).numpy()) if tensor.numel() else np.empty(0, np.uint8)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory can be used in place, else a contiguous copy on the CPU."""
    if tensor.is_sparse:
        raise TypeError("cannot use a sparse tensor in a collective: call to_dense() first, or sparse_allreduce_async")
    # A conjugate or negative tensor may be a flag on memory with other values.
    return tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a result can be written into its memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class TorchAdapter:
    """The Adapter of PyTorch. A value on the host is a contiguous CPU tensor without gradients."""

    lane: TorchLane = torch_lane

    def group(self, results: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the results as a tuple."""
        return tuple(results)

    def tensors(self, given: Sequence[Any], verb: str) -> Sequence[torch.Tensor]:
        """Raise TypeError for anything but tensors."""
        for tensor in given:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"cannot {verb} a {type(tensor).__name__}: expected tensors")
        return given

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        """Do nothing: all tensors are writable."""

    def dtype(self, tensor: torch.Tensor) -> str:
        """Return the dtype's name."""
        return dtype_name(tensor.dtype)

    def rows(self, tensor: torch.Tensor) -> int:
        """Return the extent of the first dimension; -1 for a scalar."""
        return tensor.shape[0] if tensor.dim() else -1

    def sent(self, tensor: torch.Tensor, verb: str) -> torch.Tensor:
        """Return the unchanged values on the host."""
        return _on_cpu(tensor)

    def reduced(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return the values on the host, in this dtype."""
        host = _on_cpu(tensor)
        return host if dtype_name(host.dtype) == dtype else host.to(getattr(torch, dtype))

    def result_for(self, host: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        """Return the output's memory if it fits, else new memory."""
        if output is not None and output.dtype == host.dtype and _is_plain(output):
            return output.detach()
        return torch.empty_like(host)

    def spec(self, host: torch.Tensor, result: torch.Tensor | None = None) -> TensorSpec:
        """Describe the tensor's memory, and its result's, to the engine."""
        nbytes, shape, name = host.numel() * host.element_size(), tuple(host.shape), dtype_name(host.dtype)
        if name not in WIRE_DTYPES:
            shape, name = (*shape, host.element_size()), "uint8"
        if not nbytes:
            return TensorSpec(0, 0, name, shape)
        return TensorSpec(host.data_ptr(), nbytes, name, shape, 0 if result is None else result.data_ptr())

    def rebuilt(self, data: npt.NDArray[np.uint8], rows: int, host: torch.Tensor) -> torch.Tensor:
        """Turn the engine's bytes into a tensor."""
        shape = (rows, *host.shape[1:])
        if data.nbytes == 0:
            return torch.empty(shape, dtype=host.dtype, device="cpu")
        return torch.from_numpy(data).view(host.dtype).reshape(shape)

    def delivered(
        self, results: list[torch.Tensor], tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Move results to the caller's device and dtype, or copy them into the outputs."""
        if outputs is None:
            return [
                result.to(device=tensor.device, dtype=tensor.dtype)
                for result, tensor in zip(results, tensors, strict=True)
            ]
        with torch.no_grad():
            for result, output in zip(results, outputs, strict=True):
                if output.data_ptr() != result.data_ptr() or output.device != result.device:
                    output.copy_(result)
        return list(outputs)

    def split_counts(self, splits: Any) -> Any:
        """Return the splits, as a numpy array if they are a tensor."""
        return splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits

    def row_counts(self, received: Sequence[int], splits: Any) -> torch.Tensor:
        """Return the rows from each member, like a tensor of splits in dtype and device; else int32."""
        if isinstance(splits, torch.Tensor):
            return torch.tensor(received, dtype=splits.dtype, device=splits.device)
        return torch.tensor(received, dtype=torch.int32, device="cpu")
