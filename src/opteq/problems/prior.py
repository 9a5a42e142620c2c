"""A smooth prior R inside a problem: ``z - gamma grad R(z)`` takes the place of z."""

from __future__ import annotations

from opteq.regularizers import Regularizer


def check_prior(regularizer: Regularizer | None) -> Regularizer | None:
    """``regularizer`` if a step can take its gradient."""
    if regularizer is not None and not isinstance(regularizer, Regularizer):
        raise TypeError(f"regularizer should be one of opteq.regularizers; got {regularizer!r}")
    if regularizer is not None and not regularizer.smooth:
        raise ValueError(
            f"{type(regularizer).__name__} is not smooth, so T(z - gamma grad R(z)) has no meaning at its kinks. "
            "Use regularizers.Envelope(R, weight), which is what T o prox minimises, or opteq.Splitting for R itself"
        )
    return regularizer


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
