"""Steps combined by Adasum: each rank steps with its own gradients, and the parameter changes are combined.

Adasum weighs the ranks' vectors by the angles between them, tensor by tensor; so each parameter is a separate tensor
here, and a step is one grouped operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_driver.torch.optimizer.buckets import Parameter, dense_strides, spec_of
from elastic_driver.torch.optimizer.compression import Compressor
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind, Operation
from elastic_driver.worker.rounds.context import Context


@torch.no_grad()
def adasum_step(
    context: Context,
    params: Sequence[Parameter],
    step: Callable[[], Any],
    compression: Compressor | type[Compressor],
    name: str,
) -> Any:
    """Step locally, then combine the ranks' parameter changes. Blocks until done.

    Args:
        context: the round.
        params: parameters that the step may change; the same on all ranks.
        step: the step with this rank's gradients.
        compression: how the changes are sent.
        name: of the operation.

    Returns:
        The result of ``step``.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    params = [param for param in params if param.numel() > 0]
    before = [param.detach().clone(memory_format=torch.preserve_format) for param in params]
    with torch.enable_grad():
        result = step()
    if not params:
        return result
    works, contexts = [], []
    for param, start in zip(params, before, strict=True):
        compressed, compression_context = compression.compress(param.detach() - start)
        work = compressed.to("cpu")
        works.append(work if _is_flat(work) else work.contiguous())
        contexts.append(compression_context)
    specs = tuple(spec_of(work) for work in works)
    context.engine.submit(Operation(Kind.ALLREDUCE, specs, name, ReduceOp.ADASUM, keep=works, own=True)).result()

    @torch.no_grad()
    def combine() -> None:
        for param, start, work, compression_context in zip(params, before, works, contexts, strict=True):
            delta = compression.decompress(work.to(param.device), compression_context)
            param.copy_(start.add_(delta.to(param.dtype)))

    context.writing.write(combine)
    return result


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.stride() == dense_strides(tensor)
