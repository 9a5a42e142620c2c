"""Guarantees that do not hold."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

import opteq
import opteq.analysis
from hunt import oracle
from hunt.drawing import Draw, require
from hunt.oracle import Equations, by_rows, eigenvalues, flat, jacobian, polished, unflat
from hunt.parts import DrawnProblem
from hunt.problems import FAMILIES
from opteq import operators as op
from opteq.problems.certificate import FIELDS
from opteq.states import blocks

_ROUNDING = 1e-7


def hunt(draw: Draw) -> str:
    """Every claim of a certificate, against what random states and inputs show."""
    drawn = draw.one_of(FAMILIES)(draw)
    drawn.problem.to(draw.device)
    if draw.chance(0.15):
        return _hunt_broken(draw, drawn)
    if drawn.minimises and draw.chance(0.3):
        return _hunt_local(draw, drawn)
    certificate = drawn.problem.certificate()
    about = f"{drawn.name}\n{certificate}"
    for name in FIELDS:
        value = getattr(certificate, name)
        require(value is None or math.isfinite(value), f"{name} = {value}: {about}")
        require(bool(certificate.reasons.get(name)), f"{name} has no reason: {about}")
    require(not (certificate.unique and not certificate.exists), f"unique, but not known to exist: {about}")
    _check_norms(drawn, about)
    x = draw.power(-3, 2) * draw.normal(1, *drawn.shape)
    if certificate.contraction is not None:
        _check_contraction(draw, drawn, x, certificate.contraction, about)
    if certificate.unique or certificate.lipschitz is not None:
        _check_equilibrium(draw, drawn, x, certificate, about)
    return drawn.family


def _hunt_broken(draw: Draw, drawn: DrawnProblem) -> str:
    """Of weights that are not finite nothing is known."""
    weights = list(drawn.problem.parameters())
    draw.one_of(weights).data.view(-1)[0] = draw.one_of([math.nan, math.inf])
    certificate = drawn.problem.certificate()
    known = [name for name in FIELDS if getattr(certificate, name) is not None]
    require(not known, f"{known} of weights that are not finite: {drawn.name}\n{certificate}")
    return "broken"


def _hunt_local(draw: Draw, drawn: DrawnProblem) -> str:
    """A certificate at equilibria, against the eigenvalues of dense Jacobians there."""
    x = draw.power(-3, 2) * draw.normal(draw.whole(1, 3), *drawn.shape)
    given = x.to(draw.device)
    layer = opteq.Equilibrium(drawn.problem, opteq.Anderson(tol=1e-13, max_steps=1000), on_failure="ignore")
    equations: Equations | None = drawn.equations
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if drawn.stretch is not None:  # it is about the step of the library's length
            equations = equations.stepping(drawn.problem(given).length.double().cpu()) if equations else None
        solution = layer.solve(given)
        # So that the bounds, which hold with a probability, hold in every case.
        found = opteq.analysis.local_certificate(layer, given, failure=1e-9)
    if equations is None or not bool(solution.converged.all()):
        return "unsolved"
    w, _ = drawn.weights()
    y, there = polished(drawn.equations, w, x, tuple(part.double().cpu() for part in blocks(solution.state)))
    inside = flat(drawn.equations.inside(w, x, y))
    close = [
        ((inside - kink).abs().amin(dim=1) <= 1e-6 * (abs(kink) + inside.abs().amax(dim=1)))
        for kink in drawn.equations.kinks
    ]
    if not bool(there.all()) or any(bool(one.any()) for one in close):
        return "at a kink"
    values = eigenvalues(jacobian(equations, w, x, y))
    lower, upper = (end.double().cpu() for end in found.eigenvalues)
    for row in range(len(x)):
        about = f"sample {row}: {found}: {drawn.name}"
        least, most = float(values[row].min()), float(values[row].max())
        slack = 1e-6 * (1 + values[row].abs().max())
        require(lower[row] <= least + slack and most <= upper[row] + slack, f"eigenvalues {least} to {most}: {about}")
        require(not bool(found.strict_minimum[row]) or most < 1 + slack, f"eigenvalue {most} of a minimum: {about}")
        require(max(abs(least), abs(most)) <= float(found.contraction[row]) + slack, f"rate {least}, {most}: {about}")
        if bool(found.strict_minimum[row]):
            one = tuple(part[row : row + 1] for part in y)
            slope, claim = _input_slope(drawn, x[row : row + 1], one), float(found.lipschitz[row])
            require(slope <= claim * (1 + 1e-5) + 1e-9, f"features move by {slope}: {about}")
            if found.radius is not None:
                _check_radius(draw, drawn, x[row : row + 1], one, float(found.radius[row]), about)
    return "local"


def _check_radius(draw: Draw, drawn: DrawnProblem, x: Tensor, y: tuple[Tensor, ...], radius: float, about: str) -> None:
    """No unit crosses a kink while the input moves by less: it is where a straight line leads."""
    w, _ = drawn.weights()
    equations = drawn.equations
    move = draw.normal(*x.shape)
    move *= 0.99 * min(radius, 1e6) / float(move.norm())
    local = jacobian(equations, w, x, y)
    system = torch.eye(local.shape[-1], dtype=local.dtype) - local
    shift = by_rows(lambda inputs, rows: flat(equations.step(w, inputs, unflat(rows, equations.shapes))), x, flat(y))
    straight = flat(y) + (torch.linalg.solve(system, shift) @ move.flatten()[:, None])[:, :, 0]
    image = flat(equations.step(w, x + move, unflat(straight, equations.shapes)))
    off, size = float((image - straight).norm()), float(straight.norm() + move.norm())
    require(off <= 1e-8 * size, f"within {radius} no affine function, by {off} of {size}: {about}")


def _check_norms(drawn: DrawnProblem, about: str) -> None:
    for module in drawn.problem.modules():
        if isinstance(module, op.Dense | op.Conv2d):
            weight = module.prepare().weight.detach().double().cpu()
            size = (6, 5) if weight.ndim == 4 else ()
            true, said = oracle.norm(weight, size), float(module.norm())
            require(true <= said * (1 + _ROUNDING), f"|W| = {true}, norm() = {said}: {about}")
            require(module.bound is None or true <= module.bound * (1 + _ROUNDING), f"|W| = {true} > bound: {about}")


def _check_contraction(draw: Draw, drawn: DrawnProblem, x: Tensor, claim: float, about: str) -> None:
    """Against pairs of random states, and the norm of the dense Jacobian."""
    w, _ = drawn.weights()
    equations: Equations | None = drawn.equations
    inputs = x.expand(3, *x.shape[1:])
    if drawn.stretch is not None:  # the claim is about a step of the library's length
        equations = drawn.equations.stepping(drawn.problem(inputs.to(draw.device)).length.detach().double().cpu())
    if equations is None:
        return
    entries = flat(equations.zero(1)).shape[1]
    first = torch.cat([draw.power(-2, 2) * draw.normal(1, entries) for _ in range(3)])
    second = first + torch.cat([draw.power(-3, 2) * draw.normal(1, entries) for _ in range(3)])
    images = [flat(equations.step(w, inputs, unflat(rows, equations.shapes))) for rows in (first, second)]
    rate = float(((images[0] - images[1]).norm(dim=1) / (first - second).norm(dim=1)).max())
    require(rate <= claim * (1 + _ROUNDING) + _ROUNDING, f"a step stretches by {rate}: {about}")
    local = jacobian(equations, w, inputs, unflat(first, equations.shapes))
    size = float(torch.linalg.matrix_norm(local, 2).max())
    require(size <= claim * (1 + _ROUNDING) + _ROUNDING, f"a step's derivative is {size}: {about}")


def _check_equilibrium(draw: Draw, drawn: DrawnProblem, x: Tensor, certificate: opteq.Certificate, about: str) -> None:
    equations = drawn.equations
    w, _ = drawn.weights()
    layer = opteq.Equilibrium(drawn.problem, opteq.Anderson(tol=1e-12, max_steps=1000), on_failure="ignore")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = []
        for scale in (0.0, draw.power(-1, 2)):
            start = unflat(scale * draw.normal(1, flat(equations.zero(1)).shape[1]), equations.shapes)
            solution = layer.solve(x.to(draw.device), drawn.placed(start, x, draw.device))
            state = tuple(part.double().cpu() for part in blocks(solution.state))
            if bool(solution.converged.all()):
                exact, there = polished(equations, w, x, state)
                found += [exact] if bool(there) else []
    if len(found) == 2 and certificate.unique:
        distance = float((flat(found[0]) - flat(found[1])).norm())
        size = float(flat(found[0]).norm())
        require(distance <= 1e-6 * size + 1e-9, f"two equilibria, {distance} apart: {about}")
    if found and certificate.lipschitz is not None:
        slope = _input_slope(drawn, x, found[0])
        require(slope <= certificate.lipschitz * (1 + 1e-6) + 1e-9, f"features move by {slope}: {about}")


def _input_slope(drawn: DrawnProblem, x: Tensor, y: tuple[Tensor, ...]) -> float:
    """The norm of the derivative of the features by the input, at an equilibrium, by dense linear algebra."""
    equations = drawn.equations
    w, _ = drawn.weights()

    def step(inputs: Tensor, rows: Tensor) -> Tensor:
        return flat(equations.step(w, inputs, unflat(rows, equations.shapes)))

    def read(inputs: Tensor, rows: Tensor) -> Tensor:
        return flat(equations.features(w, inputs, unflat(rows, equations.shapes)))

    rows = flat(y)
    system = torch.eye(rows.shape[1], dtype=torch.float64) - jacobian(equations, w, x, y)
    moved = torch.linalg.solve(system, by_rows(step, x, rows))
    by_state = by_rows(lambda state, inputs: read(inputs, state), rows, x)
    return float(torch.linalg.matrix_norm(by_state @ moved + by_rows(read, x, rows), 2))
