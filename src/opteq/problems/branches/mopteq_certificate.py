"""The certificate of MOptEq."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from opteq.couplings import Coupling
from opteq.operators import Conv2d, Identity, SeparableConv2d
from opteq.penalties import Penalty
from opteq.problems.base import check_unhooked, is_hooked
from opteq.problems.branches.branch import Branch, injection_norm
from opteq.problems.certificate import Certificate, existence, unknown


def certify(penalty: Penalty, coupling: Coupling, branches: Sequence[Branch], channels: int | None) -> Certificate:
    """Strong convexity from ``k = L zeta^2 rho (1 + lambda (C - 1)) < 1``, with zeta the largest norm of a W.

    The objective is the largest of many quadratic ones, one for each choice of signs in D (smoothed: of numbers
    between -1 and 1), and ``1/L - zeta^2 rho (1 + lambda (C - 1))`` bounds the curvature of each from below. The
    paper's "lambda below 1/C" is not enough for zeta near 1: it asks for ``zeta^2 < C / (2C - 1)``. rho is 1 for
    branches of one size; between scales, resampling makes it smaller (see :func:`opteq.couplings.ring_norm`).
    ``channels`` is C, or None where it is not known.
    """
    zeta = float(np.max([float(check_unhooked(branch.W, "W of a branch").norm()) for branch in branches]))  # NaN stays
    if channels is None and coupling.diversity:
        return unknown("the operators do not say how many channels there are")
    sizes = _relative_sizes(branches)
    factor = penalty.lipschitz * zeta**2 * coupling.curvature_bound(channels or 1, sizes)
    damped = sizes is not None and len(set(sizes)) > 1
    rule = "(1 + lambda (C - 1))"
    if damped:
        rule = f"rho {rule}" if coupling.heritage else "(1 + rho lambda (C - 1))"
    shown = f"k = L zeta^2 {rule} = {factor:.4g}"
    contraction = None
    if coupling.diversity and channels != 1:
        exists, unique, reasons = _with_diversity(penalty, coupling, factor, shown)
    else:
        exists, unique, reasons = existence(factor, penalty.bounded)
        contraction = factor
        what = "L zeta^2 rho, rho for resampling" if damped and coupling.heritage else "L zeta^2"
        reasons["contraction"] = f"{what}, with L = {penalty.lipschitz:.4g} and zeta = {zeta:.4g}"
    lipschitz, reasons["lipschitz"] = _lipschitz(penalty, branches, factor, zeta, shown)
    return Certificate(exists, unique, contraction, lipschitz, reasons)


def _relative_sizes(branches: Sequence[Branch]) -> list[int] | None:
    """Heights of the features, in some unit, from the scales; None where something between may change sizes."""
    if not all(isinstance(branch.W, Conv2d) and keeps_size(branch.U) for branch in branches):
        return None
    whole = math.lcm(*(branch.scale for branch in branches))
    return [whole // branch.scale for branch in branches]


_SIZE_KEEPERS = (nn.BatchNorm2d, nn.GroupNorm, nn.Identity, Conv2d, SeparableConv2d, Identity)


def keeps_size(U: nn.Module | None) -> bool:
    """Whether images leave ``U`` as large as they entered, as far as its type tells."""
    if U is not None and is_hooked(U):
        return False
    if isinstance(U, nn.Sequential):
        return all(keeps_size(part) for part in U)
    if isinstance(U, nn.Conv2d):
        padding = U.padding
        sides = zip(U.kernel_size, U.dilation, strict=True)
        kept = padding == "same" or padding == tuple(d * (k - 1) / 2 for k, d in sides)
        return kept and set(U.stride) == {1}
    return U is None or isinstance(U, _SIZE_KEEPERS)


def _with_diversity(
    penalty: Penalty, coupling: Coupling, factor: float, shown: str
) -> tuple[bool | None, bool | None, dict[str, str]]:
    if coupling.smoothing:
        rate = "a step's slope grows with lambda |channel|^2 / tau, which no bound on the weights limits"
        sense = "it is the only fixed point of a step"
    else:
        rate = (
            f"a step is discontinuous where a product of channels is zero; between jumps its slope is at most {shown}"
        )
        sense = (
            "it is the only equilibrium in the set-valued sense, where the sign of a product that is zero may be any "
            "number of [-1, 1]; a step, which takes 0, may have no fixed point"
        )
    if factor < 1:
        why = f"{shown} < 1, so the objective is strongly convex and has exactly one minimiser: {sense}"
        return True, True, {"exists": why, "unique": why, "contraction": rate}
    no = f"{shown} is not below 1, so the objective need not be convex"
    if not penalty.bounded:
        return None, None, {"exists": f"{no}, and the activation is unbounded", "unique": no, "contraction": rate}
    kind = "an equilibrium" if coupling.smoothing else "an equilibrium in the set-valued sense"
    why = f"the activation is bounded, so the objective has a minimiser, which is {kind}"
    return True, None, {"exists": why, "unique": no, "contraction": rate}


def _lipschitz(
    penalty: Penalty, branches: Sequence[Branch], factor: float, zeta: float, shown: str
) -> tuple[float | None, str]:
    """How fast the minimiser of a strongly convex function moves with its linear term, carried by W and U."""
    if factor >= 1:
        return None, f"needs {shown} below 1"
    carried, missing = injection_norm(branches)
    if carried is None:
        return None, missing
    why = (
        "zeta |U| L / (1 - k) for the minimiser without perturbations, |U|^2 = sum of |U_i|^2 / scale_i^2 or, for a "
        f"tuple with an input for each branch, the largest |U_i|^2, whichever is larger; {shown}"
    )
    return zeta * carried * penalty.lipschitz / (1 - factor), why
