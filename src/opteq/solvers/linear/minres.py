"""MINRES: the least residual in a Krylov space, for symmetric systems of any sign."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.solvers.linear.base import LinearSolver, Product, columns, dots, ratio
from opteq.solvers.loop import Process
from opteq.solvers.status import Status
from opteq.states import row_norms


@dataclass(frozen=True, kw_only=True)
class MINRES(LinearSolver):
    """Minimal residuals by a three-term recurrence: for symmetric A, definite or not; its residual never rises."""

    def _process(self, product: Product, rhs: Tensor) -> Process:
        return _MinimalResiduals(product, rhs)


class _MinimalResiduals:
    """Directions ``p`` whose images ``q = A p`` are orthonormal; each takes its share out of the residual.

    Since A is symmetric, ``A q`` need only be made orthogonal to the last two images. The usual form of MINRES rotates
    the Lanczos matrix instead and reads the residual's length off the rotations; rounding parts that number from the
    truth like the square of the condition number. Here the residual itself is updated, with the image of the very
    direction that updates x, so what is reported is what was reached, as in conjugate gradients.
    """

    def __init__(self, product: Product, rhs: Tensor) -> None:
        self.product = product
        nothing = torch.zeros_like(rhs)
        self.point = nothing
        self.residual = rhs
        self.ahead = rhs  # what A is applied to next: the last image, or the residual where the row begins
        self.begins = torch.ones_like(rhs[:, 0] if rhs.shape[1] else rhs.sum(dim=1), dtype=torch.bool)
        self.path_older, self.path_newer = nothing, nothing  # the last two p
        self.image_older, self.image_newer = nothing, nothing  # and their q
        self.size = row_norms(nothing)  # of A, as far as seen
        self.codes: Tensor | None = None

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, row_norms(self.residual)

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        path, image = self.ahead, self.product(self.ahead)
        self.size = torch.maximum(self.size, ratio(row_norms(image), row_norms(path)))
        for older_path, older_image in (
            (self.path_newer, self.image_newer),
            (self.path_older, self.image_older),
        ):
            share = columns(dots(image, older_image), image)
            path, image = path - share * older_path, image - share * older_image
        length = row_norms(image)
        scale = columns(ratio(torch.ones_like(length), length), image)
        path, image = path * scale, image * scale
        share = columns(dots(self.residual, image), image)
        self.point = self.point + share * path
        self.residual = self.residual - share * image
        self.path_older, self.path_newer = self.path_newer, path
        self.image_older, self.image_newer = self.image_newer, image
        self.ahead = image
        remaining = row_norms(self.residual)
        self.codes = torch.where(torch.isfinite(remaining), 0, int(Status.NON_FINITE))
        return self.point, remaining

    def dead_ends(self) -> Tensor | None:
        return self.codes
