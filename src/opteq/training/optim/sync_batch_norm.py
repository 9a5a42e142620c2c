"""Synchronised batch normalisation, on GPUs and CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce with sum. Its adjoint is an all-reduce of the gradients."""

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


class _Synchronised(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with mean and variance over the batches of all processes, for CPUs.

    :class:`torch.nn.SyncBatchNorm` is for GPUs only. Gradients flow through the sums over processes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised; in evaluation by the running averages."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        dims, channels = [0, *range(2, x.ndim)], (-1, *[1] * (x.ndim - 2))
        count = torch.full((1,), x.numel() / x.shape[1], dtype=torch.float32)
        torch.distributed.all_reduce(count)
        mean = _sum(x.float().sum(dim=dims)) / count
        centred = x.float() - mean.reshape(channels)
        # Two passes: a variance from sums of squares would lose its digits to cancellation.
        variance = _sum(centred.square().sum(dim=dims)) / count
        self._update_running(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        result = centred * torch.rsqrt(variance + self.eps).reshape(channels)
        if self.affine:
            result = result * self.weight.reshape(channels) + self.bias.reshape(channels)
        return result.to(x.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class SyncBatchNorm1d(_Synchronised, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` over all processes."""


class SyncBatchNorm2d(_Synchronised, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` over all processes."""


class SyncBatchNorm3d(_Synchronised, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` over all processes."""


_SYNCHRONISED: dict[type, type] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def _sum(own: Tensor) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(own)  # type: ignore[no-untyped-call]
    return total


def convert_sync_batch_norm(model: nn.Module, device: torch.device) -> None:
    """Synchronise every batch normalisation of ``model``. Names and values of parameters stay."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        module.__class__ = _SYNCHRONISED.get(type(module), type(module))
