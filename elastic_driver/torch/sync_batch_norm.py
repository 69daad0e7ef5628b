"""Batch normalization over all ranks' batches together."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from elastic_driver.torch.optimizer.buckets import spec_of
from elastic_driver.torch_private.tensors import BATCH_NORM, BatchNorm
from elastic_driver.worker.engine.collectives import Sum
from elastic_driver.worker.engine.protocol import Kind, Operation
from elastic_driver.worker.rounds.process_sets import Members, ProcessSet, global_process_set, members_of


class SyncBatchNorm(BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' batches, which may differ in size.

    For inputs of shape (N, C, ...). In eval mode, and with one rank, it is torch's BatchNorm. The gradients of weight
    and bias are this rank's share, like those of other parameters; DistributedOptimizer reduces them.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: of the running statistics; None for their plain average over the batches.
        affine: whether it has weight and bias.
        track_running_stats: whether to keep running statistics, and use them in eval mode.
        process_set: the participants.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
        track_running_stats: bool = True,  # noqa: FBT001, FBT002 - Horovod's signature
        process_set: ProcessSet = global_process_set,
    ) -> None:
        BATCH_NORM.check()
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input. Where statistics are shared, blocks until the other ranks reach the same layer.

        Raises:
            HorovodInternalError: a peer is gone.
            ValueError: an input of fewer than 2 dimensions or another number of channels; or one value per channel in
                all batches together.
        """
        self._check_input_dim(input)
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got an input of {input.size(1)})")
        if not self.training and self.track_running_stats:
            return super().forward(input)
        members = members_of(self.process_set)
        if members.size == 1:
            return super().forward(input)
        apply: Any = _Normalize.apply
        output, mean, variance, count = apply(input, self.weight, self.bias, self.eps, members)
        if self.training and self.track_running_stats:
            self._track(mean, variance, int(count))
        return cast(torch.Tensor, output)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), weight)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        members: Members,
    ) -> Any:
        channels = input.size(1)
        values = _wide(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // channels
        # Of each rank: the count, and for each channel the mean and the sum of squared distances from it. Sums of
        # squares alone would lose the variance of channels whose mean is far from 0.
        vector = np.zeros(1 + 2 * channels, np.float64)
        if count:
            variance, mean = torch.var_mean(values, dim=dims, correction=0)
            vector[0], vector[1 : 1 + channels] = count, mean.double().cpu().numpy()
            vector[1 + channels :] = variance.double().cpu().numpy() * count
        table = _allgather(members, vector)
        counts, means, squares = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
        total = float(counts.sum())
        if total <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)} here and "
                "nothing on other ranks"
            )
        all_mean = (means * counts).sum(0) / total
        all_variance = (squares + counts * (means - all_mean) ** 2).sum(0) / total
        device, dtype = input.device, values.dtype
        shape = (1, channels, *[1] * (input.dim() - 2))
        center = torch.from_numpy(all_mean).to(device, dtype)
        scale = torch.from_numpy(1.0 / np.sqrt(all_variance + eps)).to(device, dtype)
        output = values - center.view(shape)
        output *= (scale if weight is None else scale * weight.to(dtype)).view(shape)
        if bias is not None:
            output += bias.to(dtype).view(shape)
        ctx.save_for_backward(input, weight, center, scale)
        ctx.members, ctx.total, ctx.dims, ctx.shape = members, total, dims, shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        spread = torch.from_numpy(all_variance).to(device)
        ctx.mark_non_differentiable(center, spread)
        return output.to(input.dtype), center, spread, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        input, weight, center, scale = ctx.saved_tensors
        grad_output = _wide(grads[0])
        centered = _wide(input) - center.view(ctx.shape)
        sums = torch.stack([grad_output.sum(ctx.dims), (grad_output * centered).sum(ctx.dims)]).double().cpu()
        grad_bias, grad_scaled = sums.to(input.device, scale.dtype)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Each output depends on all ranks' inputs, through the two statistics.
            work = sums.clone()
            operation = Operation(
                Kind.ALLREDUCE,
                (spec_of(work),),
                "SyncBatchNorm.backward",
                Sum,
                process_set=ctx.members.number,
                keep=work,
                own=True,
            )
            ctx.members.context.engine.submit(operation).result()
            mean_grad, mean_scaled = (work / ctx.total).to(input.device, scale.dtype)
            centered *= (-scale * scale * mean_scaled).view(ctx.shape)
            centered += grad_output
            centered -= mean_grad.view(ctx.shape)
            centered *= (scale if weight is None else scale * weight.to(scale.dtype)).view(ctx.shape)
            grad_input = centered.to(input.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (grad_scaled * scale).to(weight.dtype)
        return grad_input, grad_weight, grad_bias.to(ctx.bias_dtype) if ctx.bias_dtype else None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that is wide enough for statistics."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _allgather(members: Members, vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ranks' vectors, (ranks, len(vector)) float64."""
    data = torch.from_numpy(vector).view(1, -1)
    specs = (spec_of(data),)
    operation = Operation(
        Kind.ALLGATHER, specs, "SyncBatchNorm.forward", process_set=members.number, keep=data, own=True
    )
    result = members.context.engine.submit(operation).result()
    table: npt.NDArray[np.float64] = result.arrays[0].view(np.float64).reshape(members.size, -1)
    return table
