"""Certified upper bounds of the spectral norms of matrices and convolutions.

**Zero padding is no obstacle.** A zero-padded convolution embeds an image in the infinite grid, convolves there, and
restricts the result; embedding and restriction have norm 1. So its norm, on an image of any size, is at most

    sup over theta of |K^(theta)|,      K^(theta) = sum over taps t of K[:, :, t] e^(-i t.theta),

and approaches it as images grow. Strides and dropped borders only restrict more, circular padding samples ``K^`` at
some frequencies, dilation only renames them: the same supremum serves all. In training it is bounded from the Gram
matrices on the smaller side (:mod:`~opteq.operators.spectral.bound`); on a CPU
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

import torch
from torch import Tensor, nn

from opteq.operators.base import Operator, is_observer_hook
from opteq.operators.spectral.bound import low_precision_rounding, normalise, squared_supremum, unit_norm
from opteq.operators.spectral.branch_and_bound import close_supremum


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
    if kernel.ndim not in (2, 4) or kernel.is_complex():
        raise ValueError(f"kernel should be (m, c / groups, k1, k2) or (m, c), and real; got {tuple(kernel.shape)}")
    if kernel.is_meta:  # a shape without numbers, of which none is the norm: 1 stands for any
        return torch.ones((), dtype=kernel.dtype, device="cpu")
    unit, magnitude = normalise(kernel)
    return unit_norm(unit, groups, _fine_supremum if fine else None) * magnitude


@torch.no_grad()
def certified_norm(weight: Tensor, bound: float | None, *before: Tensor) -> Tensor:
    """The norm, from above and within 0.5 %, of a ``weight`` that :func:`bounded` made from the same ``before``."""
    kernel, scale = normalise(weight, *before)
    norm = unit_norm(kernel, supremum=_fine_supremum) * scale
    # Both numbers are certified; but rounding to 16 bits after the bound was applied takes its certificate away.
    return norm if bound is None or low_precision_rounding(weight.dtype) else norm.clamp_max(bound)


def _fine_supremum(taps: Tensor, size: tuple[int, int]) -> Tensor:
    """Within 0.5 %: by a search, which takes a CPU, no gradient and finite numbers; else by a sweep."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not taps.is_cpu or traced or (torch.is_grad_enabled() and taps.requires_grad) or not bool(taps.isfinite().all()):
        return squared_supremum(taps, size, fine=True)
    return close_supremum(taps, size)


@torch.no_grad()
def module_norm(module: nn.Module) -> Tensor | None:
    """An upper bound of the norm of the linear part of ``module``, or None where none is known.

    Supported are :class:`Operator`, ``nn.Linear``, ``nn.Conv2d`` (any stride, dilation and groups; zero padding, or
    circular padding that does not enlarge the image), ``nn.Identity`` and ``nn.Sequential`` of these. Biases do not
    count, since they do not change Lipschitz constants. A module with forward hooks has no known norm.

    >>> module_norm(nn.Sequential(nn.Identity(), nn.Identity()))
    tensor(1.)
    >>> module_norm(nn.ReLU()) is None
    True
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if not all(map(is_observer_hook, hooks)) or "forward" in vars(module):
        return None
    # A subclass may compute something else in its forward; one that inherits it (a parametrised layer, say) does not.
    if isinstance(module, Operator):
        forward, norm = (
            next(kind for kind in type(module).__mro__ if name in vars(kind)) for name in ("forward", "norm")
        )
        return module.norm() if issubclass(norm, forward) else None  # a class that has both knows what it does
    if isinstance(module, nn.Identity) and type(module).forward is nn.Identity.forward:
        return torch.ones(())
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
    """Whether it is a convolution whose padding keeps the norm below that of the same one on the infinite grid."""
    if type(conv)._conv_forward is not nn.Conv2d._conv_forward:
        return False
    if conv.padding_mode == "zeros" or isinstance(conv.padding, str):
        return conv.padding_mode in ("zeros", "circular")
    # Wrapping further than the kernel reaches would repeat rows of the result.
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return conv.padding_mode == "circular" and all(2 * p <= r for p, r in zip(conv.padding, reach, strict=True))
