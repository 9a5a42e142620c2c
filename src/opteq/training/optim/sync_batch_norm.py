"""Batch normalisation over the pictures of all processes, so that their number changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _SumOverProcesses(torch.autograd.Function):
    """The sum of everyone's tensor. Each process's part counts once in everyone's sum, so gradients are summed too."""

    @staticmethod
    def forward(_: Any, own: Tensor) -> Tensor:
        total = own.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        return total


class SharedBatchNorm2d(nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` whose mean and variance are those of the batch over all processes.

    torch has one of its own for GPUs alone (:class:`torch.nn.SyncBatchNorm`); this one is for CPUs. Sums travel
    with their gradients, so what the pictures of one process do to the statistics of the others is differentiated too.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised; in evaluation, by the running averages as always."""
        if not self.training:
            return super().forward(x)
        count = torch.full((1,), x.numel() / x.shape[1], dtype=torch.float32)
        torch.distributed.all_reduce(count)
        mean = _sum(x.float().sum(dim=(0, 2, 3))) / count
        centred = x.float() - mean[:, None, None]
        # A second journey for the squares: from sums of squares alone, a small variance would drown in rounding.
        variance = _sum(centred.square().sum(dim=(0, 2, 3))) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        result = centred * torch.rsqrt(variance + self.eps)[:, None, None]
        if self.affine:
            result = result * self.weight[:, None, None] + self.bias[:, None, None]
        return result.to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def _sum(own: Tensor) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(own)  # type: ignore[no-untyped-call]
    return total


def share_normalisation(model: nn.Module, device: torch.device) -> None:
    """Make every batch normalisation of ``model`` see the whole batch. Names and values of its weights stay."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SharedBatchNorm2d
