"""An image cut into patches of pixels and channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq.common.validate import check_whole
from opteq.operators.base import LinearMap, Operator, wrong_shape
from opteq.states import is_channels_last


class PatchesMap(LinearMap):
    """The rearrangement: orthogonal, so its adjoint is its inverse."""

    def __init__(self, split: int, patch: int) -> None:
        self.split = split
        self.patch = patch
        # Whether the last image was channels last: convolutions want one back that is, too.
        self._channels_last = False

    def grid(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """How the patches of an image of this shape, ``(..., c, h, w)``, lie: channel groups, rows and columns."""
        if len(shape) < 3:
            raise ValueError(f"shape should end with (channels, height, width); got {tuple(shape)}")
        channels, height, width = shape[-3:]
        if channels % self.split:
            raise ValueError(f"the {channels} channels of the image cannot be split into groups of split={self.split}")
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"the {height} x {width} pixels of the image cannot be cut into squares of patch={self.patch}"
            )
        return channels // self.split, height // self.patch, width // self.patch

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4:
            raise wrong_shape("Patches", "(batch, channels, height, width)", v)
        groups, rows, columns = self.grid(v.shape)
        self._channels_last = is_channels_last(v)
        cut = v.reshape(v.shape[0], groups, self.split, rows, self.patch, columns, self.patch)
        return cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(v.shape[0], groups, rows, columns, self.split * self.patch**2)

    def adjoint(self, u: Tensor) -> Tensor:
        size = self.split * self.patch**2
        if u.ndim != 5 or u.shape[-1] != size:
            raise wrong_shape("the adjoint of Patches", f"(batch, groups, rows, columns, {size})", u)
        batch, groups, rows, columns, _ = u.shape
        cut = u.reshape(batch, groups, rows, columns, self.split, self.patch, self.patch)
        if self._channels_last:
            pixels = cut.permute(0, 2, 5, 3, 6, 1, 4)
            return pixels.reshape(batch, rows * self.patch, columns * self.patch, groups * self.split).movedim(-1, 1)
        return cut.permute(0, 1, 4, 2, 5, 3, 6).reshape(
            batch, groups * self.split, rows * self.patch, columns * self.patch
        )


class Patches(Operator):
    """Cuts images into patches, ``(B, c, h, w) -> (B, c / split, h / patch, w / patch, split * patch ** 2)``.

    A patch holds ``split`` neighbouring channels of a square of ``patch x patch`` pixels, channel first. Patches keep
    their positions in the image, by channel group, row and column, from which the adjoint recovers its shape;
    ``flatten(1, 3)`` makes a list of them. The map only rearranges entries: it is orthogonal, its norm is 1 and its
    adjoint is its inverse. This is the rearrangement of the patch form of GEQ.

    Args:
        split: channels in a patch.
        patch: side of a patch in pixels.

    >>> R, x = Patches(split=8, patch=2), torch.randn(2, 16, 4, 6)
    >>> R(x).shape, torch.equal(R.adjoint(R(x)), x)
    (torch.Size([2, 2, 2, 3, 32]), True)
    """

    def __init__(self, split: int, patch: int) -> None:
        super().__init__()
        self.split = check_whole("split", split)
        self.patch = check_whole("patch", patch)

    def prepare(self) -> PatchesMap:
        return PatchesMap(self.split, self.patch)

    def norm(self) -> Tensor:
        return torch.ones(())

    def extra_repr(self) -> str:
        return f"split={self.split}, patch={self.patch}"
