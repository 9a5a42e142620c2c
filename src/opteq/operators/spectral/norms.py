"""Certified upper bounds of the spectral norms of matrices and convolutions.

**Zero padding is no obstacle.** A zero-padded convolution embeds an image in the infinite grid, convolves there, and
restricts the result; embedding and restriction have norm 1. So its norm, on an image of any size, is at most

    sup over theta of |K^(theta)|,      K^(theta) = sum over taps t of K[:, :, t] e^(-i t.theta),

and approaches it as images grow. Strides and dropped borders only restrict more, circular padding samples ``K^`` at
some frequencies, dilation only renames them: the same supremum serves all. In training it is bounded from the Gram
matrices on the smaller side (:mod:`~opteq.operators.spectral.symbol`, :mod:`~opteq.operators.spectral.gram`); on a CPU
:mod:`~opteq.operators.spectral.branch_and_bound` comes closer, for ``norm()``.

How far above the true supremum the numbers may lie; the second column is the worst that a search found, the third is
for random kernels (both by ``benchmarks/worst_spectra.py``):

    =========================================  =====  ==============  =======
    use                                        grid   matrix (worst)  typical
    =========================================  =====  ==============  =======
    in training, smaller side <= 64 channels   4.0 %           2.4 %    4.0 %
    in training, <= 128                        4.0 %           1.1 %    3.7 %
    in training, wider (512 at most)           7.2 %           1.9 %    7.0 %
    ``norm()``, ``fine=True``                  0.3 %           0.1 %    0.3 %
    matrices and 1 x 1 kernels                  none           0.1 %
    =========================================  =====  ==============  =======

A slack of 0.05 % in float32 is included. It covers rounding, even where TensorFloat-32 products are allowed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from opteq.common.autocast import has_autocast
from opteq.operators.base import Operator, is_hooked
from opteq.operators.spectral.branch_and_bound import close_supremum
from opteq.operators.spectral.gram import eigenvalue_bound
from opteq.operators.spectral.symbol import may_wait, squared_supremum

# Enough to come within 0.1 %; a single matrix is cheap.
_MATRIX_SQUARINGS = 7


def kernel_norm(kernel: Tensor, groups: int = 1, fine: bool = False) -> Tensor:
    """An upper bound of the norm of a convolution for every image size, stride, dilation and zero padding.

    Args:
        kernel: ``(m, c / groups, k1, k2)``, as :func:`torch.nn.functional.conv2d` takes it, or a matrix ``(m, c)``.
        groups: number of channel groups; the norm is the largest over groups.
        fine: spend more to come within 0.5 % of the supremum.

    Returns:
        A scalar in float32 (float64 for a float64 kernel), differentiable with respect to ``kernel``.

    >>> kernel_norm(torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64), fine=True).item()  # doctest: +ELLIPSIS
    1.00...
    """
    if kernel.is_meta:  # a shape without numbers, of which none is the norm: 1 stands for any
        return torch.ones((), dtype=kernel.dtype, device="cpu")
    unit, magnitude = _normalised(kernel)
    return _unit_norm(unit, groups, fine) * magnitude


def bounded(weight: Tensor, bound: float | None, *before: Tensor) -> Tensor:
    """``weight * min(1, bound / s)``: the weight itself, bit for bit, where its norm is within the bound.

    ``s`` is :func:`kernel_norm` of ``weight``, or, with ``before``, of the product of ``weight`` and those factors,
    which broadcast against it (the norm then bounded is that of the product). Differentiable with respect to them all.

    >>> bounded(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), 1.0)[0, 0] <= 1
    tensor(True)
    """
    if bound is None:
        return weight
    known = (known_scales.get() or {}).get(id(weight))
    scale = scale_for(bound, weight, *before) if known is None else known
    return (weight.to(scale.dtype) * scale).to(weight.dtype)


known_scales: ContextVar[dict[int, Tensor] | None] = ContextVar("known_scales", default=None)
"""Scales of :func:`bounded` that were computed already, by the identity of the weight."""


def scale_for(bound: float, weight: Tensor, *before: Tensor) -> Tensor:
    """The factor of :func:`bounded`: ``min(1, bound / s)``, exactly 1 where the norm is within the bound."""
    # Magnitudes are divided out one by one, so that nothing overflows however large the weights are.
    kernel, magnitude = _normalised(weight)
    room = bound / (1 + _rounding(weight.dtype)) / magnitude
    for factor in before:
        unit, magnitude = _normalised(factor)
        kernel, room = kernel * unit, room / magnitude
    limits = torch.finfo(room.dtype)
    room = room.clamp_max(limits.max / 2)
    return room / torch.maximum(_unit_norm(kernel), room).clamp_min(limits.tiny)


@torch.no_grad()
def certified_norm(weight: Tensor, bound: float | None, *before: Tensor) -> Tensor:
    """The norm, from above and within 0.5 %, of a ``weight`` that :func:`bounded` made from the same ``before``."""
    kernel, scale = _normalised(weight)
    for factor in before:
        unit, magnitude = _normalised(factor)
        kernel, scale = kernel * unit, scale * magnitude
    norm = _unit_norm(kernel, fine=True) * scale
    # Both numbers are certified; but rounding to 16 bits after the bound was applied takes its certificate away.
    return norm if bound is None or _rounding(weight.dtype) else norm.clamp_max(bound)


def _rounding(dtype: torch.dtype) -> float:
    """What rounding the bounded weight back to a 16-bit format may add to its norm, relatively."""
    return torch.finfo(dtype).eps / 2 if torch.finfo(dtype).bits < 32 else 0.0


def _normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` in computing precision, divided by its largest magnitude, and that magnitude.

    The magnitude carries no gradient: norms are homogeneous, so derivatives come out right for any constant divisor.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    magnitude = torch.linalg.vector_norm(weight.detach(), math.inf).clamp_min(torch.finfo(weight.dtype).tiny ** 0.75)
    return weight / magnitude, magnitude


def _unit_norm(kernel: Tensor, groups: int = 1, fine: bool = False) -> Tensor:
    """:func:`kernel_norm` for a kernel in computing precision whose entries are of order one."""
    with _full_precision(kernel.device.type):
        outputs, inputs, *size = kernel.shape
        taps = kernel.reshape(groups, outputs // groups, inputs, -1).movedim(-1, 0)
        if outputs // groups > inputs:  # A and A' have the same norm; the Gram matrix is on the smaller side
            taps = taps.mT
        taps = taps.contiguous()
        if taps.shape[0] == 1:
            squared = _squared_norm(taps)
        elif fine and _may_search(taps):
            squared = close_supremum(taps, (size[0], size[1]))
        else:
            squared = squared_supremum(taps, (size[0], size[1]), fine)
        slack = 2**-11 if kernel.dtype == torch.float32 else 1e-9
        return squared.sqrt() * (1 + slack)


def _squared_norm(taps: Tensor) -> Tensor:
    """Of matrices ``(1, groups, n, m)``, the largest squared norm from above."""
    return eigenvalue_bound(torch.bmm(taps[0], taps[0].mT), _MATRIX_SQUARINGS, symmetric=True).amax()


def _may_search(taps: Tensor) -> bool:
    """Whether the fine norm may be searched for, which takes a CPU, no gradient and finite numbers."""
    return may_wait(taps) and not (torch.is_grad_enabled() and taps.requires_grad) and bool(taps.isfinite().all())


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    if has_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


@torch.no_grad()
def module_norm(module: nn.Module) -> Tensor | None:
    """An upper bound of the norm of the linear part of ``module``, or None where none is known.

    Known are :class:`Operator`, ``nn.Linear``, ``nn.Conv2d`` (any stride, dilation and groups; zero padding, or
    circular padding that does not enlarge the image), ``nn.Identity`` and ``nn.Sequential`` of these. Biases do not
    count: a Lipschitz certificate does not see them. A module with forward hooks may give anything.

    >>> module_norm(nn.Sequential(nn.Identity(), nn.Identity()))
    tensor(1.)
    >>> module_norm(nn.ReLU()) is None
    True
    """
    if is_hooked(module):
        return None
    if isinstance(module, Operator):
        return module.norm()
    if isinstance(module, nn.Identity):
        return torch.ones(())
    # A subclass may compute something else in its forward; one that inherits it (a parametrised layer, say) does not.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return kernel_norm(module.weight, fine=True)
    if isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward:
        return kernel_norm(module.weight, module.groups, fine=True) if _only_restricts(module) else None
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        product: Tensor = torch.ones(())
        for part in module:
            factor = module_norm(part)
            if factor is None:
                return None
            product = product * factor
        return product
    return None


def _only_restricts(conv: nn.Conv2d) -> bool:
    """Whether the padding keeps the norm below that of the convolution on the infinite grid."""
    if conv.padding_mode == "zeros" or isinstance(conv.padding, str):
        return conv.padding_mode in ("zeros", "circular")
    # Wrapping further than the kernel reaches would repeat rows of the result.
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return conv.padding_mode == "circular" and all(2 * p <= r for p, r in zip(conv.padding, reach, strict=True))
