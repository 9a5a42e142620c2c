"""The status of a solve, per sample, with a message that says what to try."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How the solve of one sample ended.

    >>> Status.CONVERGED.message
    'the relative residual is within the tolerance'
    """

    CONVERGED = 0
    MAX_STEPS = 1
    NON_FINITE = 2
    INDEFINITE = 3
    CYCLING = 4
    APPROXIMATE = 5
    SINGULAR = 6
    FIXED_STEPS = 7
    NOT_A_MINIMUM = 8

    @property
    def message(self) -> str:
        """What happened, and what to try."""
        return _MESSAGES[self]


SUCCESSES = (Status.CONVERGED, Status.APPROXIMATE, Status.FIXED_STEPS)
"""How a solve ends that did not fail."""

_MESSAGES = {
    Status.CONVERGED: "the relative residual is within the tolerance",
    Status.MAX_STEPS: (
        "the step limit came before the tolerance. Raise max_steps or tol; if the residual does not fall at all, "
        "the map may not contract: use a damping below 1 or opteq.FISTA(), declare the curvature of an Objective, "
        "write its terms with kinks (abs) as its penalty, give operators a smaller bound, or read problem.certificate()"
    ),
    Status.NON_FINITE: (
        "an iterate overflowed or was NaN, so the best finite one is kept, or NaN where there is none. Check that the "
        "inputs are finite, that the objective and its gradient are finite at the start (start=), and that it has a "
        "lower bound; give the operators a bound, or use opteq.FISTA(), a damping below 1 or a larger curvature"
    ),
    Status.INDEFINITE: (
        "conjugate gradients met a direction of negative curvature: the system is not positive definite, "
        "so the state is not a strict minimiser. Use Implicit(linear=MINRES()), or give the operators a bound"
    ),
    Status.CYCLING: (
        "the iterates jump for ever between points where the map is discontinuous, so there may be no fixed point, "
        "however small the residual. Smooth the map (MOptEq(smoothing=...)); problem(x).inclusion_residual(state) "
        "tells how far the state is from an equilibrium with set-valued signs"
    ),
    Status.SINGULAR: (
        "the linear system has no solution that rounding lets through: the equilibrium is not isolated, or nearly so. "
        "The nearest answer of moderate length is used; give the operators a smaller bound, or the objective a ridge"
    ),
    Status.FIXED_STEPS: "tol=0 asked for exactly max_steps steps; they were taken, and the residual is what they left",
    Status.NOT_A_MINIMUM: (
        "the objective has a direction of negative curvature here, or keeps falling along one: this is a maximum, a "
        "saddle, or a point on the way along a flat direction, to a minimum or without end. Use "
        "opteq.FISTA(measure='error') or a smaller tol, begin elsewhere (start=), make the objective convex, or bound "
        "the weight of its concave terms"
    ),
    Status.APPROXIMATE: "no linear system was solved: this gradient is approximate by construction",
}
