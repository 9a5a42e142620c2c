"""Linear maps with exact adjoints and, on request, a spectral norm that never exceeds a bound.

An :class:`Operator` is a module with parameters. ``operator.prepare()`` computes its (bounded) weights once and returns
a :class:`LinearMap` that a solver applies many times:

>>> import torch
>>> from opteq import operators as op
>>> W = op.Conv2d(3, 8, kernel_size=3, bound=0.95)
>>> A = W.prepare()
>>> A.adjoint(A(torch.randn(2, 3, 16, 16))).shape
torch.Size([2, 3, 16, 16])
>>> bool(W.norm() <= 0.95)
True
"""

from opteq.operators.base import LinearMap, Operator, use_prepared
from opteq.operators.chain import ConvChain
from opteq.operators.conv import Conv2d, SeparableConv2d
from opteq.operators.dense import Dense
from opteq.operators.imaging import Blur, Downsample, Mask, gaussian_kernel
from opteq.operators.patches import Patches
from opteq.operators.resample import resample
from opteq.operators.spectral.norms import kernel_norm, module_norm
from opteq.operators.stack import Identity, Stack

__all__ = [
    "Blur", "Conv2d", "ConvChain", "Dense", "Downsample", "Identity", "LinearMap", "Mask",
    "Operator", "Patches", "SeparableConv2d", "Stack", "gaussian_kernel", "kernel_norm", "module_norm", "resample",
    "use_prepared",
]  # fmt: skip
