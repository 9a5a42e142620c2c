"""Attention maps of GEQ: the weight of every patch at the equilibrium, as an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.equilibrium import Equilibrium
from opteq.kernels.gaussian import GaussianSimilarity
from opteq.problems.branches.parallel import BoundParallel
from opteq.problems.geq import BoundGEQ
from opteq.problems.hidden import BoundMap
from opteq.states import State, blocks, like, single


def patch_weights(hidden: BoundMap, state: State) -> tuple[Tensor, ...]:
    """The weights ``e_i = exp(-gamma |q_i|^2)`` at ``state``, in [0, 1]: a tensor for every GEQ in ``hidden``.

    Each has the shape ``(B, channel groups, rows, columns)`` in which its patches lie.

    Args:
        hidden: GEQ with a Gaussian kernel, or a :class:`~opteq.Parallel` with some among its parts,
            its input bound: ``problem(x)``.
        state: ``layer.solve(x).state``.
    """
    if isinstance(hidden, BoundGEQ) and isinstance(hidden.similarity, GaussianSimilarity):
        return (hidden.similarity.weights(single(state)),)
    if not isinstance(hidden, BoundParallel):
        return ()
    tensors = list(blocks(state))
    weights: list[Tensor] = []
    for part in hidden.parts:
        start = part.start()
        own = tuple(tensors.pop(0) for _ in blocks(start))
        weights.extend(patch_weights(part, like(start, own)))
    return tuple(weights)


@torch.no_grad()
def attention_map(layer: Equilibrium, x: State, size: tuple[int, int] | None = None) -> Tensor:
    """The weights at the equilibrium of ``x`` as images ``(B, height, width)``, averaged over groups and branches.

    A patch that the state matches has weight 1, one that is ignored has weight 0. Every pixel has the weight of its
    patch; the maps of branches with a smaller input are upsampled.

    Args:
        layer: an :class:`~opteq.equilibrium.Equilibrium` of GEQ with a Gaussian kernel, or of several in parallel.
        x: images ``(B, C, height, width)``, or a tuple with those of every branch.
        size: height and width of the maps; those of ``x`` by default, of the largest where there are several.

    >>> import torch, opteq
    >>> from opteq.kernels import Gaussian
    >>> from opteq.problems.geq import GEQ
    >>> W = opteq.operators.Conv2d(4, 8, kernel_size=3, bound=0.9)
    >>> problem = GEQ(W, torch.nn.Conv2d(3, 8, 3, padding=1), Gaussian(patch=2, split=4))
    >>> attention_map(opteq.Equilibrium(problem), torch.randn(2, 3, 6, 6)).shape
    torch.Size([2, 6, 6])
    """
    images = blocks(x)
    for given in images:
        if given.ndim != 4:
            raise ValueError(
                f"an attention map needs images (batch, channels, height, width); got {tuple(given.shape)}"
            )
    weights = patch_weights(layer.problem(x), layer.solve(x).state)
    if not weights:
        raise TypeError(f"only GEQ with a Gaussian kernel has patch weights; got {type(layer.problem).__name__}")
    size = size or max((given.shape[2], given.shape[3]) for given in images)
    maps = [F.interpolate(one.mean(dim=1, keepdim=True), size=size, mode="nearest-exact") for one in weights]
    return torch.stack(maps).mean(dim=0).squeeze(1)
