"""The adapter of PyTorch's tensors: how they become memory that the engine reads, and results become tensors.

CPU tensors are used where they lie, contiguous ones without a copy. Tensors on other devices go through the CPU, unless
the device lane takes them.
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

# By dtype: PyTorch makes the text of a dtype anew each time it is asked for.
_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype).removeprefix("torch.")
    return name


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, as bytes, without a copy."""
    return cast(Bytes, flat_bytes(tensor).numpy()) if tensor.numel() else np.empty(0, np.uint8)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory can be used in place, else a contiguous copy on the CPU."""
    if tensor.is_sparse:
        raise TypeError("cannot use a sparse tensor in a collective: call to_dense() first, or sparse_allreduce_async")
    # A conjugate or a negative may be a flag on memory that says otherwise.
    return tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a result can be written into its memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class TorchAdapter:
    """See Adapter. What is on the host is a contiguous CPU tensor without gradients."""

    lane: TorchLane = torch_lane

    def group(self, results: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See Adapter."""
        return tuple(results)

    def tensors(self, given: Sequence[Any], verb: str) -> Sequence[torch.Tensor]:
        """See Adapter."""
        for tensor in given:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"cannot {verb} a {type(tensor).__name__}: it takes tensors")
        return given

    def check_writable(self, tensors: Sequence[Any], verb: str) -> None:
        """See Adapter. All tensors are."""

    def dtype(self, tensor: torch.Tensor) -> str:
        """See Adapter."""
        return dtype_name(tensor.dtype)

    def rows(self, tensor: torch.Tensor) -> int:
        """See Adapter."""
        return tensor.shape[0] if tensor.dim() else -1

    def sent(self, tensor: torch.Tensor, verb: str) -> torch.Tensor:
        """See Adapter."""
        return _on_cpu(tensor)

    def reduced(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        """See Adapter."""
        host = _on_cpu(tensor)
        return host if dtype_name(host.dtype) == dtype else host.to(getattr(torch, dtype))

    def result_for(self, host: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        """See Adapter."""
        if output is not None and output.dtype == host.dtype and _is_plain(output):
            return output.detach()
        return torch.empty_like(host)

    def spec(self, host: torch.Tensor, result: torch.Tensor | None = None) -> TensorSpec:
        """See Adapter."""
        nbytes, shape, name = host.numel() * host.element_size(), tuple(host.shape), dtype_name(host.dtype)
        if name not in WIRE_DTYPES:
            shape, name = (*shape, host.element_size()), "uint8"
        if not nbytes:
            return TensorSpec(0, 0, name, shape)
        return TensorSpec(host.data_ptr(), nbytes, name, shape, 0 if result is None else result.data_ptr())

    def rebuilt(self, data: npt.NDArray[np.uint8], rows: int, host: torch.Tensor) -> torch.Tensor:
        """See Adapter."""
        shape = (rows, *host.shape[1:])
        if data.nbytes == 0:
            return torch.empty(shape, dtype=host.dtype, device="cpu")
        return torch.from_numpy(data).view(host.dtype).reshape(shape)

    def delivered(
        self, results: list[torch.Tensor], tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """See Adapter."""
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
        """See Adapter."""
        return splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits

    def row_counts(self, received: Sequence[int], splits: Any) -> torch.Tensor:
        """See Adapter. Of the dtype and on the device of a tensor of splits; else int32."""
        if isinstance(splits, torch.Tensor):
            return torch.tensor(received, dtype=splits.dtype, device=splits.device)
        return torch.tensor(received, dtype=torch.int32, device="cpu")
