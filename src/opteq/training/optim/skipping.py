"""Steps whose gradient is not finite are not taken, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def as_gradient(loss: Tensor) -> Tensor:
    """``loss`` with a gradient of NaN where it is not finite itself: the gradient then tells it to all processes."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The Euclidean norm of all gradients; not finite where one entry is not."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    return nn.utils.get_total_norm(gradients)


def start_momentum(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    """Momentum that begins at zeros.

    Fused SGD would take it from unset memory where its first step is skipped.
    """
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else ():
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def step_unless(failed: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimiser unless ``failed``, a boolean on the device of the weights.

    A fused optimiser reads that on the device and then leaves weights and its own state as they are. Others are not
    called, for which the host waits.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        inner.found_inf = failed.float()  # type: ignore[union-attr]
        optimizer.step()
    elif not bool(failed):
        optimizer.step()


class Buffers:
    """The buffers of a model before a step: statistics of batch normalisation, which a failed step would spoil."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [buffer for buffer in model.buffers() if buffer.dtype == torch.float32 and buffer.numel()]
        self.before = self._concatenated() if self.buffers else None

    def have_non_finite(self) -> Tensor | bool:
        """Whether one of them is not finite now."""
        return False if self.before is None else ~torch.isfinite(self._concatenated()).all()

    def restore_if(self, failed: Tensor) -> None:
        """Write them back where ``failed``; in few kernels, however many there are."""
        if self.before is None:
            return
        chosen = torch.where(failed, self.before, self._concatenated())
        parts = torch.split(chosen, [buffer.numel() for buffer in self.buffers])
        shaped = [part.view_as(buffer) for part, buffer in zip(parts, self.buffers, strict=True)]
        torch._foreach_copy_(self.buffers, shaped)

    def _concatenated(self) -> Tensor:
        return torch.cat([buffer.detach().flatten() for buffer in self.buffers])
