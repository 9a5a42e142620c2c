"""Gradients that are wrong, or that hide a value which is not finite."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

import opteq
from hunt.drawing import Draw, drawn_batch, require
from hunt.oracle import Equations, State, Weights, flat, gradients, jacobian, polished, unflat
from hunt.parts import DrawnProblem
from hunt.problems import FAMILIES
from opteq.gradients import Gradient
from opteq.solvers import Status
from opteq.states import blocks

_TOL = {torch.float64: 1e-11, torch.float32: 1e-6}
_STEPS = 150
_FACTOR = 1000
"""The relative error of a gradient is at most this times the tolerance times the condition number of ``I - J``: the
adjoint system is solved to the tolerance, at a state that is known to the tolerance, with activations and kernels whose
curvature is some units."""


def hunt(draw: Draw) -> str:
    """The gradients of one batch by the input and all weights, against a dense solve at the equilibrium."""
    drawn = draw.one_of(FAMILIES)(draw)
    dtype = draw.one_of([torch.float64, torch.float64, torch.float32])
    drawn.problem.to(draw.device, dtype)
    batch = drawn_batch(draw, drawn.shape, dtype, clean=True)
    gradient = _drawn_gradient(draw, dtype, drawn.minimises)
    # The derivative of an extrapolation converges later than its value does: plain steps are unrolled.
    plain = isinstance(gradient, opteq.Unrolled)
    objective = isinstance(drawn.problem, opteq.Objective)
    kind = opteq.Picard if plain else opteq.FISTA if objective and draw.chance(0.7) else opteq.Anderson
    # A tape that ends with the solution is too short for the derivative: all steps are taken.
    solver = kind(tol=0 if plain else _TOL[dtype], max_steps=_STEPS)
    layer = opteq.Equilibrium(drawn.problem, solver, gradient, on_failure="ignore")
    about = f"{drawn.name} | {batch.about} | {kind.__name__} {gradient}"
    x = batch.x.detach().requires_grad_()
    bad = draw.whole(0, len(x) - 1) if draw.chance(0.1) else None
    scale, broken = draw.one_of([1.0, 1.0, 1e-6, 1e6]), draw.one_of([torch.nan, torch.inf])
    arriving: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(draw.calls):
            solution = layer.solve(x)
            features = blocks(solution.features)
            arriving = arriving or [draw.normal(*part.shape) for part in features]
            sent = [(scale * part).to(draw.device, dtype) for part in arriving]
            if bad is not None:
                sent[0][bad].view(-1)[0] = broken
            x.grad = None
            drawn.problem.zero_grad()
            torch.autograd.backward(features, sent)
    # Unrolled steps need no solution, but steps that overflow have gradients of NaN of their own.
    solved = Status.NON_FINITE not in solution.status if plain else bool(solution.converged.all())
    if not solved or solution.backward is None:
        return "unsolved"
    assert x.grad is not None
    if bad is not None:
        return _check_not_finite(drawn, x.grad, bad, plain, about)
    if any(status not in (Status.CONVERGED, Status.APPROXIMATE) for status in solution.backward.status):
        return "unsolved"
    # What is left of a gradient after k plain steps is of the order of k times that power of the rate.
    rate = drawn.equations.contraction(drawn.weights()[0])
    if plain and (dtype != torch.float64 or rate is None or rate > 0.85):
        return "unrolled"
    left = 10 * _STEPS * rate ** (_STEPS - 1) if plain and rate is not None else 0.0
    state = tuple(part.detach().double().cpu() for part in blocks(solution.state))
    check = Check(
        drawn, x.detach().double().cpu(), state, arriving, scale, x.grad.double().cpu(), dtype, draw.device, left, about
    )
    step = drawn.equations
    if isinstance(gradient, opteq.OneStep) and drawn.stretch is not None:  # that of the library has another length
        stepping = step.stepping(drawn.problem(x).length.detach().double().cpu())
        if stepping is None:
            return "one step"
        step = stepping
    return check.by_dense_solve(step if isinstance(gradient, opteq.OneStep) else None)


def _drawn_gradient(draw: Draw, dtype: torch.dtype, symmetric: bool) -> Gradient:
    kind = draw.one_of(["implicit"] * 5 + ["gmres", "minres", "unrolled", "one step"])
    tol = 1e-10 if dtype == torch.float64 else 1e-6
    if kind in ("gmres", "minres"):
        made = opteq.MINRES if kind == "minres" and symmetric else opteq.GMRES
        return opteq.Implicit(linear=made(tol=tol, max_steps=300))
    if kind == "one step":
        return opteq.OneStep()
    return opteq.Unrolled(_STEPS) if kind == "unrolled" else opteq.Implicit(max_steps=300)


def _check_not_finite(drawn: DrawnProblem, found: Tensor, bad: int, on_tape: bool, about: str) -> str:
    """Non-finite in, non-finite out: for the sample or, where no unit of it is alive, for none.

    Steps on a tape are torch's own business: a unit that a ReLU cuts off drops a NaN.
    """
    others = [index for index in range(len(found)) if index != bad]
    require(bool(found[others].isfinite().all()), f"a gradient of NaN spread to other samples: {about}")
    weights = [p.grad for p in drawn.problem.parameters() if p.grad is not None]
    alive = not bool(found[bad].isfinite().all()) or any(not bool(g.isfinite().all()) for g in weights)
    if not alive and not on_tape:  # every unit may be cut off: then nothing of the input or of a weight matters
        dead = bool(drawn.equations.kinks) and not bool(found[bad].any())
        require(dead, f"a gradient of NaN came out finite: {about}")
    return "not finite"


@dataclass(frozen=True)
class Check:
    """The gradient of ``scale <arriving, features>`` by the input, as the library found it (``found``)."""

    drawn: DrawnProblem
    x: Tensor
    state: State
    arriving: list[Tensor]
    scale: float
    found: Tensor
    dtype: torch.dtype
    device: str
    left: float
    about: str

    def by_dense_solve(self, one_step: Equations | None = None) -> str:
        """Against the implicit function theorem; of ``OneStep``, against this step at the equilibrium."""
        drawn, x, equations = self.drawn, self.x, self.drawn.equations
        w, changed = drawn.weights()
        y, found = polished(equations, w, x, self.state)
        if not bool(found.all()) or not self._smooth(w, y):
            return "at a kink"
        local = jacobian(equations, w, x, y)
        system = torch.eye(local.shape[-1], dtype=torch.float64) - local
        tol = _TOL[self.dtype]
        close = _FACTOR * tol * float(torch.linalg.cond(system).max()) + self.left + 10 * self._bend(w, y, system)
        if one_step is not None:
            by_x, by_w = gradients(one_step, w, x, y, self._probe, torch.zeros_like(local))
        else:
            by_x, by_w = gradients(equations, w, x, y, self._probe, local)
        if not close < 0.1:
            return "ill-conditioned"
        # torch's derivative of a saturated activation is accurate to rounding of 1, not of itself.
        size = self.scale * float(torch.stack([a.norm() for a in self.arriving]).norm())
        rounding = 10 * float(torch.finfo(self.dtype).eps) * size
        self._compare(self.found, by_x, close, rounding, "the input")
        # Weights meet the state and the input's share, which are known to the tolerance as a whole, not part by part.
        # The gradients of samples may cancel, too.
        met = torch.stack([x.norm(), flat(self.state).norm(), equations.size(w, x).norm()])
        rounding += 10 * tol * size * float(met.max())
        for name, weight in drawn.problem.named_parameters():
            if name not in changed:
                got = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self._compare(got.double().cpu(), by_w[name], close, rounding, name)
        return drawn.family

    def _bend(self, w: Weights, y: State, system: Tensor) -> float:
        """How much the system changes with the state, as far as that is known, relative to itself.

        The potential of a prior may be much narrower than the state is large. A state that the tolerance lets through
        is off by ``tol |(I - J)^-1| |y|``, and a change of J by E changes the answer by ``|(I - J)^-1| |E|`` of itself.
        E is that along one direction. Along the worst one it may be the root of the number of unknowns larger, about
        10 for the largest problems that are drawn: the caller's factor.
        """
        rows, inverse = flat(y), 1 / torch.linalg.svdvals(system)[:, -1:]
        along = torch.nn.functional.normalize(torch.ones_like(rows))
        with torch.no_grad():
            stretch = rows.new_tensor(self.drawn.stretched(self.x.to(self.device, self.dtype)))[:, None]
        moved = rows + _TOL[self.dtype] * stretch * inverse * rows.norm(dim=1, keepdim=True) * along
        other = jacobian(self.drawn.equations, w, self.x, unflat(moved, self.drawn.equations.shapes))
        change = other - (torch.eye(rows.shape[1], dtype=rows.dtype) - system)
        return float((torch.linalg.matrix_norm(change, 2) * inverse[:, 0]).max())

    def _probe(self, features: State) -> Tensor:
        total = sum((a * b).sum() for a, b in zip(self.arriving, features, strict=True))
        return self.scale * torch.as_tensor(total)

    def _smooth(self, w: Weights, y: State) -> bool:
        """Whether no unit is so close to a kink that rounding may put it on the other side."""
        equations = self.drawn.equations
        inside = flat(equations.inside(w, self.x, y))
        margin = 1e-6 if self.dtype == torch.float64 else 1e-3
        size = inside.abs().amax(dim=1) + equations.size(w, self.x)
        away = [(inside - kink).abs().amin(dim=1) > margin * size.clamp_min(abs(kink)) for kink in equations.kinks]
        return all(bool(far.all()) for far in away)

    def _compare(self, found: Tensor, expected: Tensor, close: float, rounding: float, which: str) -> None:
        size, off = float(expected.norm()), float((found - expected).norm())
        allowed = close * size + rounding
        about = f"the gradient of {which}: {self.about}"
        require(off <= allowed, f"off by {off:.3g} of {size:.3g}, {allowed:.3g} allowed: {about}")
