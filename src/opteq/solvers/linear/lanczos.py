"""Lanczos steps for symmetric operators, for all samples of a batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.solvers.linear.base import RowProduct
from opteq.states import Autocast, Layout, State, row_norms, widest_dtype


@torch.no_grad()
def largest_magnitude(product: RowProduct, like: Tensor, steps: int = 8) -> Tensor:
    """An estimate of the largest magnitude of an eigenvalue, one per row, from a few Lanczos steps.

    It exceeds the true value by at most 1 %. Nothing here waits for a device: the eigenvalue of the small tridiagonal
    matrix comes from the trace of a high power of it.
    """
    power, mark = tridiagonal(*Lanczos(like).run(product, max(1, min(steps, like.shape[1]))))
    scale = power.new_zeros(power.shape[0])
    exponent = 1.0
    for _ in range(8):  # to the power of 256; the trace is at most k times the largest eigenvalue of that
        size = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(power.dtype).tiny)
        scale = scale + size.log() / exponent
        power = power / size[:, None, None]
        power = power @ power
        exponent *= 2
    trace = power.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(power.dtype).tiny)
    return (scale + trace.log() / exponent).exp() + mark


def largest_curvature(product: Callable[[State], State], at: State) -> Tensor:
    """:func:`largest_magnitude` of a map of states that are shaped like ``at``; 1 in rows where it is not finite."""
    layout = Layout.of(at)
    found = largest_magnitude(lambda rows: layout.pack(product(layout.unpack(rows))), layout.pack(at))
    return torch.where(torch.isfinite(found), found, 1.0)


def tridiagonal(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices ``(R, k, k)``, zero where not finite, which LAPACK refuses for all; and NaN there, 0 elsewhere."""
    small = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    sound = torch.isfinite(small).all(dim=2).all(dim=1)
    return torch.where(sound[:, None, None], small, 0.0), torch.where(sound, 0.0, torch.nan)


class Lanczos:
    """Lanczos steps from one random start, the same for all rows; more may follow.

    Args:
        like: a tensor ``(R, N)`` that gives shape, dtype and device.
        kept: how many vectors are kept in ``basis`` ``(R, kept, N)`` and orthogonal; all steps, or none of them.
    """

    def __init__(self, like: Tensor, kept: int = 0) -> None:
        first = random_start(like)
        norm = torch.linalg.vector_norm(first).clamp_min(torch.finfo(first.dtype).tiny)
        self.current = (first / norm).expand_as(like)
        self.before = torch.zeros_like(self.current)
        self.basis = like.new_zeros(like.shape[0], kept, like.shape[1])
        wide = widest_dtype(like)
        self.scale = torch.zeros(like.shape[0], dtype=wide, device=like.device)
        self.diagonal: list[Tensor] = []
        self.beside = [torch.ones_like(self.scale)]  # beside[k] lies above diagonal[k]

    def run(self, product: RowProduct, steps: int) -> tuple[Tensor, Tensor]:
        """Diagonal ``(R, k)`` and off-diagonal ``(R, k - 1)`` in float64 after k ``steps`` in all."""
        for step in range(len(self.diagonal), steps):
            size, current = self.beside[-1], self.current
            image = product(current)
            quotient = (image * current).sum(dim=1, dtype=size.dtype)
            rest = image - quotient.to(image.dtype)[:, None] * current - size.to(image.dtype)[:, None] * self.before
            if self.basis.shape[1]:
                self.basis[:, step] = current
                with Autocast.current(rest.device).off():
                    for _ in range(2):
                        shares = (self.basis[:, : step + 1] @ rest[:, :, None])[:, :, 0]
                        rest = rest - (shares[:, None] @ self.basis[:, : step + 1])[:, 0]
            # An invariant subspace has been found: what follows is filled with a value from inside the spectrum.
            ended = size == 0
            self.diagonal.append(torch.where(ended, self.diagonal[0], quotient) if step else quotient)
            size = row_norms(rest).to(size.dtype)
            self.scale = torch.maximum(self.scale, torch.maximum(quotient.abs(), size))
            ended = ended | (size <= 32 * torch.finfo(current.dtype).eps * self.scale)
            self.beside.append(torch.where(ended, 0.0, size))
            self.before = current
            self.current = torch.where(ended[:, None], 0.0, rest / size.masked_fill(ended, 1.0).to(rest.dtype)[:, None])
        return torch.stack(self.diagonal, dim=1), torch.stack(self.beside, dim=1)[:, 1:-1]


def random_start(like: Tensor) -> Tensor:
    """Normal numbers ``(N,)``, always the same: also inside of torch.func, whose vmap refuses to draw any."""
    with torch._C._DisableFuncTorch():
        generator = torch.Generator(device=like.device).manual_seed(0)
        return torch.randn(like.shape[1], generator=generator, device=like.device, dtype=like.dtype)
