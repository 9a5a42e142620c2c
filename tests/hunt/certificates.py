"""Guarantees that do not hold."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

import opteq
from hunt import oracle
from hunt.drawing import Draw, require
from hunt.oracle import Equations, by_rows, flat, jacobian, polished, unflat
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
