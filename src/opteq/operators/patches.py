"""A picture cut into patches of pixels and channels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opteq.operators.base import LinearMap, checked_size, wrong_shape


class PatchesMap(LinearMap):
    """The rearrangement for pictures of one shape ``(c, h, w)``: orthogonal, so its adjoint is its inverse."""

    def __init__(self, split: int, patch: int, shape: tuple[int, int, int]) -> None:
        channels, height, width = shape
        if channels % split:
            raise ValueError(f"the {channels} channels of the picture cannot be split into groups of split={split}.")
        if height % patch or width % patch:
            raise ValueError(
                f"the {height} x {width} pixels of the picture cannot be cut into squares of patch={patch}."
            )
        self.split = split
        self.patch = patch
        self.shape = shape
        self.grid = (channels // split, height // patch, width // patch)
        #: Number of patches of a picture, and entries of each.
        self.count = self.grid[0] * self.grid[1] * self.grid[2]
        self.row = split * patch**2

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4 or tuple(v.shape[1:]) != self.shape:
            raise wrong_shape("Patches", f"(batch, {', '.join(map(str, self.shape))})", v)
        groups, rows, columns = self.grid
        cut = v.reshape(len(v), groups, self.split, rows, self.patch, columns, self.patch)
        return cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(len(v), self.count, self.row)

    def adjoint(self, u: Tensor) -> Tensor:
        """Put the patches back together."""
        if u.ndim != 3 or tuple(u.shape[1:]) != (self.count, self.row):
            raise wrong_shape("the adjoint of Patches", f"(batch, {self.count}, {self.row})", u)
        cut = u.reshape(len(u), *self.grid, self.split, self.patch, self.patch)
        return cut.permute(0, 1, 4, 2, 5, 3, 6).reshape(len(u), *self.shape)


class Patches:
    """Cuts pictures into patches: ``(B, c, h, w) -> (B, N, split * patch ** 2)``, ``N = c h w / (split patch ** 2)``.

    A patch holds ``split`` neighbouring channels of a square of ``patch x patch`` pixels, channel first. Patches are
    ordered by channel group, then row, then column. Every number of the picture goes to one place: the map is
    orthogonal, its norm is 1 and its adjoint is its inverse. This is the rearrangement of the patch form of GEQ.

    The adjoint must know the picture's shape, which the patches alone do not tell. So this is not an ``Operator``:
    :meth:`prepare` takes the shape and returns the ``LinearMap``.

    Args:
        split: channels in a patch.
        patch: side of a patch in pixels.

    >>> import torch
    >>> x = torch.randn(2, 16, 4, 6)
    >>> R = Patches(split=8, patch=2).prepare(x.shape)
    >>> R(x).shape, torch.equal(R.adjoint(R(x)), x)
    (torch.Size([2, 12, 32]), True)
    """

    def __init__(self, split: int, patch: int) -> None:
        self.split = checked_size("split", split)
        self.patch = checked_size("patch", patch)

    def prepare(self, shape: Sequence[int]) -> PatchesMap:
        """The map for pictures of ``shape``, whose last three entries are ``(c, h, w)``: ``x.shape`` will do."""
        if len(shape) < 3:
            raise ValueError(f"shape must end with (channels, height, width), got {tuple(shape)}.")
        return PatchesMap(self.split, self.patch, (shape[-3], shape[-2], shape[-1]))

    def __call__(self, v: Tensor) -> Tensor:
        if v.ndim != 4:
            raise wrong_shape("Patches", "(batch, channels, height, width)", v)
        return self.prepare(v.shape)(v)

    def adjoint(self, u: Tensor, shape: Sequence[int]) -> Tensor:
        """The pictures of ``shape`` whose patches are ``u``."""
        return self.prepare(shape).adjoint(u)

    def __repr__(self) -> str:
        return f"Patches(split={self.split}, patch={self.patch})"
