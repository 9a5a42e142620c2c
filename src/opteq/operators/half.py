"""Largest eigenvalues from above, by products of matrices in half precision: quick, and as safe as in float32.

The iteration is that of :mod:`opteq.operators.gram`, with ``M_0 = A`` and ``M_{t+1} = (1 - c_t M_t)^2``. Every ``M_t``
is rounded to ``M_t + E_t``, which tensor cores then square without further loss: products of halves are exact in
float32, where they are summed. The size of ``E_t`` is measured when it is made. By Weyl's inequality no eigenvalue
moves by more than ``e_t = |E_t|_F``, so that, if ``l_{t+1}`` is a bound for ``M_{t+1}``,

    l_t = (1 + sqrt(l_{t+1})) / c_t + e_t

is one for ``M_t``, whatever the positive numbers ``c_t``. They are chosen as there, and the bound for the last matrix
is mean plus deviation again. What rounding adds to the bound of a norm is below 0.1 % for the Gram matrices of random
kernels with 256 channels; what it adds at one squaring counts half at the squaring before. So these bounds tell almost
all frequencies to be of no interest; :mod:`opteq.operators.fused` computes the others in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rounding may hide a variance of this size, relative to the mean square, in the sums of the last matrix.
_FLOOR = 2.0**-18
# Matrices up to this side cost next to nothing in float32.
_FEW = 32


@dataclass(frozen=True)
class Tiling:
    """How matrices of side ``n`` are cut into tiles for the kernels.

    Attributes:
        n: side of the matrices.
        tile: side of a tile.
    """

    n: int
    tile: int

    @property
    def pairs(self) -> int:
        """Tiles on or above the diagonal."""
        tiles = -(-self.n // self.tile)
        return tiles * (tiles + 1) // 2

    @property
    def padded(self) -> int:
        """A power of two that is no smaller; the same one for most sides, as each is a variant to compile."""
        return max(64, 1 << (self.pairs - 1).bit_length())


@torch.no_grad()
def rounded_bounds(form: Tensor, length: Tensor, squarings: int) -> Tensor:
    """Upper bounds of the largest eigenvalues of positive semidefinite matrices.

    Args:
        form: ``(batch, n, n)``, the matrices in real form, in float32; groups one after the other.
        length: ``(groups,)``, for every group the root of the mean trace of its matrices.
        squarings: number of products.

    Returns:
        ``(batch,)``.
    """
    from opteq.operators import squaring_kernels as kernels

    batch, n, _ = form.shape
    storage, precision = (torch.float16, "ieee") if n > _FEW else (torch.float32, "tf32x3")
    tiling = Tiling(n, 64 if n > 64 else 32)
    each, pairs = batch // len(length), tiling.pairs
    two = [torch.empty(2, batch, n, n, dtype=storage, device=form.device) for _ in range(2)]
    sums = torch.empty(squarings + 1, batch, 3, pairs, dtype=torch.float32, device=form.device)
    bounds = torch.empty(batch, dtype=torch.float32, device=form.device)
    shape: dict[str, Any] = {"REAL": False, "TILE": tiling.tile, "num_warps": 4}
    kernels.begin[(pairs, batch)](form, form, length, *two[0], sums[0], n, each, pairs, PICKED=False, **shape)
    for step in range(squarings):
        kernels.square[(pairs, batch)](
            *two[step % 2], *two[1 - step % 2], sums[step], sums[step + 1], n, pairs, FIRST=step == 0,
            STORE=step + 1 < squarings, PRECISION=precision, PARTS=tiling.padded, K=32, num_stages=3, **shape,
        )  # fmt: skip
    kernels.read[(batch,)](
        sums, length, bounds, n, each, batch, pairs, T=squarings, FLOOR=_FLOOR, PARTS=tiling.padded, num_warps=1
    )
    return bounds
