"""The certificate of OptEq, with or without a smooth prior R on its features."""

from __future__ import annotations

from torch import nn

from opteq.common.validate import check_positive
from opteq.operators import Operator
from opteq.penalties import Penalty
from opteq.problems.base import check_unhooked, known_norm
from opteq.problems.certificate import Certificate, existence
from opteq.regularizers import Regularizer


def certify(
    W: Operator,
    U: nn.Module | None,
    penalty: Penalty,
    mu: float,
    regularizer: Regularizer | None,
    gamma: float,
) -> Certificate:
    """Theorem 1, with existence put right: strict convexity alone does not give a minimiser.

    With a regulariser: a step takes ``z - gamma grad R(z)``, which stretches distances by some factor, and
    ``<dz, d(z - gamma grad R)>`` is at most ``|dz|^2`` times another one, which is 1 for every convex R. The first
    bounds the step. The second is enough for uniqueness and the Lipschitz constant: sigma is the gradient of a
    convex function, so ``<dy, dt> >= |dy|^2 / L`` for the states y and pre-activations t of two equilibria.
    """
    norm, slope = float(check_unhooked(W, "W").norm()), penalty.lipschitz
    factor = slope * norm**2 / mu
    stretch, pull = prior_factors(regularizer, gamma)
    contraction = None if stretch is None else factor * stretch
    exists, unique, reasons = _existence(factor, contraction, penalty, regularizer)
    if contraction is None:
        reasons["contraction"] = f"the gradient of {type(regularizer).__name__} has no known Lipschitz constant"
    else:
        reasons["contraction"] = f"L |W|^2 / mu with |W| <= {norm:.4g} and L = {slope:.4g}, the activation's slope"
        if regularizer is not None:
            reasons["contraction"] += f", times |I - gamma hess R| <= {stretch:.4g}"
    carried, missing = known_norm(U)
    lipschitz = None
    if pull is None:
        reasons["lipschitz"] = reasons["contraction"]
    elif factor * pull >= 1:
        reasons["lipschitz"] = f"needs L |W|^2 / mu below {1 / pull:.4g}; it is bounded by {factor:.4g}"
    elif carried is None:
        reasons["lipschitz"] = missing
    else:
        lipschitz = carried * slope * norm / mu / (1 - factor * pull)
        share = "" if pull == 1 else f"{pull:.4g} "
        reasons["lipschitz"] = (
            f"|U| L |W| / mu / (1 - {share}L |W|^2 / mu), since sigma is a convex function's gradient"
        )
    return Certificate(exists, unique, contraction, lipschitz, reasons)


def _existence(
    factor: float, contraction: float | None, penalty: Penalty, R: Regularizer | None
) -> tuple[bool | None, bool | None, dict[str, str]]:
    banach = contraction is not None and contraction < 1
    if R is not None and R.convex and factor < 1 and not banach:
        why = "phi is strongly convex where L |W|^2 < mu, so phi + gamma R has exactly one minimiser"
        return True, True, {"exists": why, "unique": why}
    if R is None or R.gradient_lipschitz is not None or not penalty.bounded:
        return existence(contraction, penalty.bounded)
    # Decorrelation, for one, has a gradient that jumps where a feature vanishes: Brouwer needs it continuous.
    return existence(contraction, False, f"the gradient of {type(R).__name__} is not known to be continuous")


def check_prior(regularizer: Regularizer | None, gamma: float) -> tuple[Regularizer | None, float]:
    """``regularizer`` if a step can take its gradient, and its weight."""
    if check_positive("gamma", gamma) != 1 and regularizer is None:
        raise ValueError(f"gamma is the weight of a regularizer, and there is none; got {gamma=}")
    if regularizer is not None and not isinstance(regularizer, Regularizer):
        raise TypeError(f"regularizer should be one of opteq.regularizers; got {regularizer!r}")
    if regularizer is not None and not regularizer.smooth:
        raise ValueError(
            f"{type(regularizer).__name__} is not smooth, so T(z - gamma grad R(z)) has no meaning at its kinks. "
            "Use regularizers.Envelope(R, weight), which is what T o prox minimises, or opteq.Splitting for R itself"
        )
    return regularizer, float(gamma)


def prior_factors(regularizer: Regularizer | None, gamma: float) -> tuple[float | None, float | None]:
    """Bounds of ``|dv| / |dz|`` and of ``<dz, dv> / |dz|^2`` for ``v = z - gamma grad R(z)``; None is unknown."""
    if regularizer is None:
        return 1.0, 1.0
    curvature, convex = regularizer.gradient_lipschitz, regularizer.convex
    if curvature is None:
        return None, 1.0 if convex else None
    weight = gamma * curvature
    # I - gamma hess R lies in [1 - weight, 1] for convex R, in [1 - weight, 1 + weight] otherwise.
    return (max(1.0, abs(1 - weight)), 1.0) if convex else (1 + weight, 1 + weight)
