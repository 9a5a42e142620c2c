"""Where GEQ looks: the weight of every patch at the equilibrium, as a picture over the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.equilibrium import Equilibrium
from opteq.kernels.gaussian import GaussianSimilarity
from opteq.problems.geq import BoundGEQ
from opteq.problems.hidden import BoundMap
from opteq.states import State, single


def patch_weights(hidden: BoundMap, state: State) -> Tensor:
    """The weights ``e_i = exp(-gamma |q_i|^2)`` at ``state``, ``(B, channel groups, rows, columns)``, in [0, 1].

    Args:
        hidden: a GEQ with a Gaussian kernel and its input bound, ``problem(x)``.
        state: ``layer.solve(x).state``.
    """
    if not isinstance(hidden, BoundGEQ) or not isinstance(hidden.similarity, GaussianSimilarity):
        raise TypeError(f"only GEQ with a Gaussian kernel weighs patches; got {type(hidden).__name__}")
    return hidden.similarity.weights(single(state))


@torch.no_grad()
def attention_map(layer: Equilibrium, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """The weights at the equilibrium of ``x``, averaged over channel groups, as pictures ``(B, height, width)``.

    A patch whose state explains it has weight 1, one that is ignored has weight 0. Every pixel shows the weight of
    the patch that covers it; where the layer sees a smaller picture than ``x``, patches are enlarged with it.

    Args:
        layer: an :class:`~opteq.equilibrium.Equilibrium` of :class:`~opteq.problems.geq.GEQ` with a Gaussian kernel.
        x: pictures ``(B, C, height, width)``.
        size: height and width of the maps; those of ``x`` by default.

    >>> import torch, opteq
    >>> from opteq.kernels import Gaussian
    >>> from opteq.problems.geq import GEQ
    >>> W = opteq.operators.Conv2d(4, 8, kernel_size=3, bound=0.9)
    >>> problem = GEQ(W, torch.nn.Conv2d(3, 8, 3, padding=1), Gaussian(patch=2, split=4))
    >>> attention_map(opteq.Equilibrium(problem), torch.randn(2, 3, 6, 6)).shape
    torch.Size([2, 6, 6])
    """
    if x.ndim != 4:
        raise ValueError(f"an attention map needs pictures (batch, channels, height, width); got {tuple(x.shape)}")
    weights = patch_weights(layer.problem(x), layer.solve(x).state)
    picture = weights.mean(dim=1, keepdim=True)
    return F.interpolate(picture, size=size or (x.shape[2], x.shape[3]), mode="nearest-exact").squeeze(1)
