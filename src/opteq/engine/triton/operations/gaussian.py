"""The Gaussian kernel of projected patches, in one pass over memory on a GPU; torch takes five or more."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.engine.triton.launch import may_launch, may_load
from opteq.states import working_dtype

_WARPS = 4
# Entries a program, and the longest rows that fit: a row is one piece of a program.
_TILE, _LONGEST = 4096, 1024


def weigh(q: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor] | None:
    """``e_i = exp(-gamma |q_i|^2)`` over the last dimension and ``e_i q_i``; None where torch should compute them."""
    if not _supports(q):
        return None
    weights = torch.empty(q.shape[:-1], dtype=working_dtype(q.dtype), device=q.device)
    weighed = torch.empty_like(q)
    return (weights, weighed) if _launched("weigh", q, gamma, (q,), (weights, weighed)) else None


def weigh_derivative(q: Tensor, a: Tensor, gamma: float | Tensor, weights: Tensor) -> Tensor | None:
    """``e_i (2 gamma <q_i, a_i> q_i - a_i)``, the derivative of ``-e_i q_i`` along ``a_i``; None as above."""
    if not _supports(q, a) or a.dtype != q.dtype or not weights.is_contiguous():
        return None
    bent = torch.empty_like(a)
    return bent if _launched("weigh_derivative", q, gamma, (q, a), (weights, bent)) else None


def _supports(*rows: Tensor) -> bool:
    return (
        not torch.is_grad_enabled()
        and may_launch(*rows)
        and all(each.ndim > 1 and each.shape[-1] <= _LONGEST and each.is_contiguous() for each in rows)
    )


def _launched(
    name: str, q: Tensor, gamma: float | Tensor, read: tuple[Tensor, ...], rest: tuple[Tensor, Tensor]
) -> bool:
    size = q.shape[-1]
    rows = q.numel() // size
    sharp = _one_per_sample(gamma, q)
    if sharp is None:
        return False
    if not may_load(q, name, q.device, q.dtype, sharp.dtype, size):
        return False
    import triton.language as tl

    from opteq.engine.triton.operations import gaussian_kernels as kernels

    kernel = kernels.weigh if name == "weigh" else kernels.weigh_derivative
    width = 1 << (size - 1).bit_length()
    tall = max(1, _TILE // width)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # kernels run on the current device
        kernel[(-(-rows // tall),)](
            *read, sharp, *rest, rows, rows // sharp.numel(), D=size, ROWS=tall, WIDTH=width,
            WIDE=tl.float64 if working_dtype(q.dtype) == torch.float64 else tl.float32, num_warps=_WARPS,
        )  # fmt: skip
    return True


def _one_per_sample(gamma: float | Tensor, q: Tensor) -> Tensor | None:
    """Gamma as a tensor with one number, or one per sample; None where it has another form."""
    if not isinstance(gamma, Tensor):
        return torch.full((1,), gamma, dtype=working_dtype(q.dtype), device=q.device)
    if gamma.numel() == 1:
        return gamma.reshape(1)
    return gamma.reshape(-1) if gamma.shape == (len(q), *[1] * (gamma.ndim - 1)) and gamma.is_contiguous() else None
