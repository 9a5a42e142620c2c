"""POptEq: OptEq in parallel branches, with optional fusion of their features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq import penalties
from opteq.common.validate import check_choice
from opteq.operators import module_norm
from opteq.penalties import Penalty
from opteq.problems.base import Problem
from opteq.problems.branches.branch import Branch, check_branches
from opteq.problems.branches.mopteq_certificate import keeps_size
from opteq.problems.branches.parallel import BoundParallel, SeparableProblem
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.opteq import OptEq
from opteq.states import State


class POptEq(SeparableProblem):
    """OptEq in parallel branches: MOptEq without heritage and diversity, and its baseline.

    Args:
        branches: :class:`Branch` objects.
        activation: name or :class:`~opteq.penalties.Penalty`, the same in all branches.
        fuse: how the branches' features are combined. ``"none"`` returns the tuple. ``"sum"`` adds them at the finest
            size, with the pixels of coarser ones repeated. ``"conv"`` applies a 3x3 convolution without bias to their
            concatenation at that size, which keeps the number of channels.

    >>> import torch, opteq
    >>> branches = [
    ...     opteq.Branch(opteq.operators.Conv2d(4, 6, 3, bound=0.9), torch.nn.Conv2d(3, 6, 3, padding=1), scale)
    ...     for scale in (1, 2)
    ... ]
    >>> opteq.Equilibrium(opteq.POptEq(branches, fuse="sum"))(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    def __init__(self, branches: Sequence[Branch], activation: str | Penalty = "relu", fuse: str = "none") -> None:
        super().__init__()
        self.branches = nn.ModuleList(check_branches(branches))
        self.penalty = penalties.get(activation)
        self.fuse = check_choice("fuse", fuse, ("none", "sum", "conv"))
        self.convolution = _convolution(self.branch_list()) if fuse == "conv" else None

    def branch_list(self) -> list[Branch]:
        """The branches, with their type."""
        return [branch for branch in self.branches if isinstance(branch, Branch)]

    def parts(self) -> list[tuple[Problem, int]]:
        """An OptEq per branch, which shares the branch's maps."""
        return [(OptEq(branch.W, branch.U, self.penalty), branch.scale) for branch in self.branch_list()]

    def bind(self, x: State) -> BoundParallel:
        """Every branch with its own view of ``x``, and the fusion."""
        bound = super().bind(x)
        bound.alike = True
        if self.fuse != "none":
            bound.fusion = self.fusion
        return bound

    def fusion(self, features: tuple[Tensor, ...]) -> Tensor:
        """Combine the features by ``fuse``, at the finest of their sizes."""
        if features[0].ndim == 4:
            height, width = max(z.shape[2] for z in features), max(z.shape[3] for z in features)
            features = tuple(
                z if z.shape[2:] == (height, width) else F.interpolate(z, size=(height, width), mode="nearest")
                for z in features
            )
        if self.convolution is not None:
            joined: Tensor = self.convolution(torch.cat(features, dim=1))
            return joined
        channels = [z.shape[1] for z in features]
        if len(set(channels)) > 1:
            raise ValueError(f'fuse="sum" needs the same number of channels in all branches; got {channels}')
        return torch.stack(features).sum(dim=0)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Guarantees that hold for all branches; repeating pixels ``r`` times in height and width has norm r."""
        certificate = super().certificate()
        if self.fuse == "none" or certificate.lipschitz is None:
            return certificate

        def with_lipschitz(bound: float | None, why: str) -> Certificate:
            return replace(certificate, lipschitz=bound, reasons={**certificate.reasons, "lipschitz": why})

        branches = self.branch_list()
        images = [branch for branch in branches if not hasattr(branch.W, "in_features")]
        if len(images) > 1 and not all(keeps_size(branch.U) for branch in images):
            why = "a U may change the size of images, so that it is not known how often pixels are repeated"
            return with_lipschitz(None, why)
        scales = [branch.scale for branch in branches]
        slopes = [part.certificate().lipschitz or 0.0 for part, _ in self.parts()]
        # Pixels of a branch at scale s are repeated s / (least s) times; where that is no whole number, some of them
        # once more. An image that all see was pooled by s before, with norm 1/s; a tuple with an input each was not.
        repeated = [slope * math.ceil(scale / min(scales)) for slope, scale in zip(slopes, scales, strict=True)]
        pooled = [slope / scale for slope, scale in zip(repeated, scales, strict=True)]
        if self.convolution is None:
            bound = max(sum(pooled), math.hypot(*repeated))
            rule = "the sum of the branches' (for a tuple, sqrt of the sum of squares, each times its scale)"
        else:
            carried = module_norm(self.convolution)
            if carried is None:
                why = "the norm of the convolution is not known: it has hooks, which may change what it gives"
                return with_lipschitz(None, why)
            bound = float(carried) * max(math.hypot(*pooled), *repeated)
            rule = "|conv| sqrt of the sum of squares (for a tuple, the largest times its scale)"
        return with_lipschitz(bound, f"{rule}, at the finest size. {certificate.reasons['lipschitz']}")


def _convolution(branches: list[Branch]) -> nn.Conv2d:
    counts = [getattr(branch.W, "in_channels", None) for branch in branches]
    known = [count for count in counts if isinstance(count, int)]
    if len(known) < len(counts):
        raise ValueError(
            'fuse="conv" needs branches with images as features, whose W says how many channels they have '
            f"(in_channels); got {[type(branch.W).__name__ for branch in branches]}"
        )
    return nn.Conv2d(sum(known), sum(known), kernel_size=3, padding=1, bias=False)
