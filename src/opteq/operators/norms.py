"""Certified upper bounds of the spectral norms of matrices and convolutions.

**Zero padding is no obstacle.** A zero-padded convolution embeds a picture in the infinite grid, convolves there, and
restricts the result; embedding and restriction have norm 1. So its norm, on a picture of any size, is at most

    sup over theta of |K^(theta)|,      K^(theta) = sum over taps t of K[:, :, t] e^(-i t.theta),

and approaches it as pictures grow. Strides and dropped borders only restrict more, circular padding samples ``K^`` at
some frequencies, dilation only renames them: the same supremum serves all.

**From a grid to the supremum.** For fixed unit vectors, ``u* K^(theta) v`` is, along one axis with ``k`` taps, a
trigonometric polynomial of degree ``d = (k - 1) / 2`` after a change of phase, real where it is largest. By M. Riesz's
inequality it cannot fall faster from its maximum than ``cos(d theta)``, and ``N`` equispaced points leave no gap beyond
``pi / N``. Hence supremum <= grid maximum / cos(pi d / N), once per axis. A real kernel has ``|K^(-theta)| = |K^(theta)|``:
half of the grid is enough.

**At each frequency** the norm is bounded from the Gram matrix on the smaller side (see :mod:`opteq.operators.gram`). The
sweep over frequencies runs without gradient; the bound at the frequency that attains the maximum is then computed again with
gradient, so the derivative is that of the computed number, for the price of one frequency.

How far above the true supremum the numbers lie (smaller side up to 256 channels):

    ========================  ===========  ==============  =================
    use                       grid factor  matrix, worst   total, typical
    ========================  ===========  ==============  =================
    training (``fine=False``)       4.0 %           1.5 %              4.1 %
    ``norm()`` (``fine=True``)      0.3 %           0.1 %              0.3 %
    one tap, and matrices             none          0.1 %             0.05 %
    ========================  ===========  ==============  =================

including a slack of 0.05 % in float32, which covers rounding even where TensorFloat-32 products are allowed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opteq.operators.base import Operator
from opteq.operators.gram import eigenvalue_bound, gram_form


class _Effort(NamedTuple):
    """How hard to work: grid points per degree and axis, and squarings at each of them."""

    points: int
    squarings: int


# Doubling the points of the training grid would cost four times as much and gain 3 % of norm. The other figures follow
# from the table above: they are the smallest that keep norm() within 0.5 % up to 512 channels.
_TRAINING = _Effort(points=16, squarings=4)
_FINE = _Effort(points=60, squarings=7)
_MATRIX_SQUARINGS = 7

# Numbers held per matrix of the sweep: about a processor's cache, or plenty of parallel work for a GPU in modest memory.
_CHUNK = {"cpu": 2**19}
_CHUNK_ELSEWHERE = 2**25


def kernel_norm(kernel: Tensor, groups: int = 1, fine: bool = False) -> Tensor:
    """An upper bound of the norm of a convolution for every picture size, stride, dilation and zero padding.

    Args:
        kernel: ``(m, c / groups, k1, k2)``, as :func:`torch.nn.functional.conv2d` takes it; a matrix is ``(m, c, 1, 1)``.
        groups: number of channel groups; the norm is the largest over groups.
        fine: spend more to come within 0.5 % of the supremum.

    Returns:
        A scalar in float32 (float64 for a float64 kernel), differentiable with respect to ``kernel``.

    >>> kernel_norm(torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64), fine=True).item()  # doctest: +ELLIPSIS
    1.00...
    """
    unit, magnitude = normalised(kernel)
    return unit_norm(unit, groups, fine) * magnitude


def bounding_factor(bound: float, unit: Tensor, *magnitudes: Tensor) -> Tensor:
    """``min(1, bound / s)`` for the kernel ``unit`` times the ``magnitudes``, exactly 1 where ``s <= bound``.

    Magnitudes stay apart from the kernel so that nothing overflows however large the weights are.
    """
    room = torch.full_like(magnitudes[0], bound)
    for magnitude in magnitudes:
        room = room / magnitude
    limits = torch.finfo(room.dtype)
    room = room.clamp_max(limits.max / 2)
    return room / torch.maximum(unit_norm(unit), room).clamp_min(limits.tiny)


def normalised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` in computing precision, divided by its largest magnitude, and that magnitude.

    The magnitude carries no gradient: norms are homogeneous, so derivatives come out right for any constant divisor.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    magnitude = weight.detach().abs().amax().clamp_min(torch.finfo(weight.dtype).tiny ** 0.75)
    return weight / magnitude, magnitude


def unit_norm(kernel: Tensor, groups: int = 1, fine: bool = False) -> Tensor:
    """:func:`kernel_norm` for a kernel in computing precision whose entries are of order one."""
    with _full_precision(kernel.device.type):
        outputs, inputs, *size = kernel.shape
        taps = kernel.reshape(groups, outputs // groups, inputs, -1)
        if outputs // groups > inputs:
            taps = taps.mT if taps.ndim == 3 else taps.transpose(1, 2)
        taps = taps.movedim(-1, 0)
        if taps.shape[0] == 1:
            squared = eigenvalue_bound(torch.bmm(taps[0], taps[0].mT), _MATRIX_SQUARINGS, symmetric=True).amax()
            gap = 1.0
        else:
            effort = _FINE if fine else _TRAINING
            points = [max(1, math.ceil(effort.points * (k - 1) / 2)) for k in size]
            gap = math.prod(1 / math.cos(math.pi * (k - 1) / 2 / n) for k, n in zip(size, points, strict=True))
            table = _frequencies(size[0], size[1], points[0], points[1], kernel.dtype, kernel.device)
            squared = _largest_on_grid(taps, table, effort.squarings)
        slack = 2**-11 if kernel.dtype == torch.float32 else 1e-9
        return squared.sqrt() * (gap * (1 + slack))


def _largest_on_grid(taps: Tensor, table: Tensor, squarings: int) -> Tensor:
    """The largest squared norm over groups and frequencies, from ``(taps, groups, n, m)`` and :func:`_frequencies`."""
    groups, n, m = taps.shape[1:]
    with torch.no_grad():
        step = max(1, _CHUNK.get(taps.device.type, _CHUNK_ELSEWHERE) // (groups * n * m))
        values = torch.cat([_squared_norms(taps, part, squarings) for part in table.split(step, dim=1)])
        where = values.argmax().reshape(1)
    frequency, group = where // groups, where % groups
    return _squared_norms(taps.index_select(1, group), table.index_select(1, frequency), squarings).squeeze(0)


def _squared_norms(taps: Tensor, table: Tensor, squarings: int) -> Tensor:
    symbols = torch.tensordot(table, taps, dims=1).flatten(1, 2)
    return eigenvalue_bound(gram_form(*symbols), squarings)


@lru_cache(maxsize=128)
def _frequencies(k1: int, k2: int, n1: int, n2: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Coefficients ``(4, frequencies, k1 * k2)`` that turn taps into cosine and sine parts, their difference and sum.

    Of two frequencies that mirror each other one is kept.
    """
    # An inference tensor could not take part in training later, and this one outlives the call.
    with torch.inference_mode(False):
        first, second = torch.meshgrid(torch.arange(n1), torch.arange(n2), indexing="ij")
        kept = first * n2 + second <= (-first % n1) * n2 + (-second % n2)
        angle1 = (2 * math.pi / n1) * first[kept].double().outer(torch.arange(k1).double())
        angle2 = (2 * math.pi / n2) * second[kept].double().outer(torch.arange(k2).double())
        angle = (angle1[:, :, None] + angle2[:, None, :]).flatten(1)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([cos, sin, cos - sin, cos + sin]).to(device=device, dtype=dtype)


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


@torch.no_grad()
def module_norm(module: nn.Module) -> Tensor | None:
    """An upper bound of the norm of the linear part of ``module``, or None where none is known.

    Known are :class:`Operator`, ``nn.Linear``, ``nn.Conv2d`` (any stride, dilation and groups; zero padding, or circular
    padding that does not enlarge the picture), ``nn.Identity`` and ``nn.Sequential`` of these. Biases do not count: this is
    what Lipschitz certificates multiply by.

    >>> module_norm(nn.Sequential(nn.Identity(), nn.Identity()))
    tensor(1.)
    >>> module_norm(nn.ReLU()) is None
    True
    """
    if isinstance(module, Operator):
        return module.norm()
    if isinstance(module, nn.Identity):
        return torch.ones(())
    # A subclass may compute something else in its forward; one that inherits it (a parametrised layer, say) does not.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return kernel_norm(module.weight[:, :, None, None], fine=True)
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
