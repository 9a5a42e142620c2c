"""Solutions that are none, wrong statuses, samples that disturb their mates."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

import opteq
from hunt import families, own
from hunt.drawing import Draw, drawn_batch, require
from hunt.oracle import State, Weights, flat, jacobian, polished, residual
from hunt.parts import DrawnProblem
from opteq.solvers import Solver, Status
from opteq.states import blocks

FAMILIES = [
    families.opteq_layer, families.opteq_layer, families.deep_layers, families.branches, families.branches,
    families.similarity, own.bowl, own.pair, own.least, own.robust, own.wells, own.restoration,
]  # fmt: skip
DTYPES = [torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]
_STEPS = 400


def drawn_solver(draw: Draw, dtype: torch.dtype, default: bool) -> Solver | None:
    """Any solver, with a tolerance that the dtype allows for, or none at all; None leaves it to the layer."""
    least = {torch.float64: -11.0, torch.float32: -5.5}.get(dtype, -2.0)
    tol = draw.power(least, -1.5)
    kind = draw.one_of(["picard", "anderson", "anderson", "broyden", "fista", "default" if default else "fixed"])
    if kind == "fixed":
        return opteq.Picard(tol=0, max_steps=draw.whole(1, 20))
    if kind == "anderson":
        return opteq.Anderson(tol=tol, max_steps=_STEPS, memory=draw.whole(1, 8))
    made = {"picard": opteq.Picard, "broyden": opteq.Broyden, "fista": opteq.FISTA}
    return made[kind](tol=tol, max_steps=_STEPS) if kind in made else None


def hunt(draw: Draw) -> str:
    """One solve, checked sample by sample."""
    drawn = draw.one_of(FAMILIES)(draw)
    dtype = draw.one_of(DTYPES)
    drawn.problem.to(draw.device, dtype)
    batch = drawn_batch(draw, drawn.shape, dtype)
    # The default solver of an objective takes up to 10,000 steps: only where it promises to converge.
    default = drawn.stretch is not None and drawn.equations.amplification(drawn.weights()[0]) is not None
    solver = drawn_solver(draw, dtype, default)
    layer = opteq.Equilibrium(drawn.problem, solver, on_failure="ignore")
    about = f"{drawn.name} | {batch.about} | {layer.solver}"
    before = batch.x.clone()
    with warnings.catch_warnings(), torch.set_grad_enabled(draw.chance(0.5)):
        warnings.simplefilter("ignore")
        for _ in range(draw.calls):
            solution = layer.solve(batch.x)
    require(torch.equal(batch.x.nan_to_num(7), before.nan_to_num(7)), f"the input was written to: {about}")
    weights, _ = drawn.weights()
    x = batch.x.double().cpu()
    state, features = (
        tuple(part.detach().double().cpu() for part in blocks(found)) for found in (solution.state, solution.features)
    )
    with torch.no_grad():
        stretch = drawn.stretched(batch.x)
    for index, status in enumerate(solution.status):
        one = slice(index, index + 1)
        sample = Sample(
            drawn, weights, x[one], tuple(part[one] for part in state), tuple(part[one] for part in features), status,
            max(solution.report.tol, float(torch.finfo(dtype).eps)), dtype, stretch[index], f"sample {index}: {about}",
        )  # fmt: skip
        if batch.bad[index]:
            sample.check_not_finite()
        elif layer.solver.tol == 0:
            sample.check_fixed_steps(layer.solver.max_steps, int(solution.steps[index]))
        else:
            sample.check(default=solver is None)
    return drawn.family


@dataclass(frozen=True)
class Sample:
    """One sample of a solve.

    Attributes:
        drawn, weights: the problem.
        x, y, z: input, state and features.
        tol: the relative residual that CONVERGED promises: the one asked for, or the rounding of the dtype.
        stretch: factor from the library's residual to that of the equations.
    """

    drawn: DrawnProblem
    weights: Weights
    x: Tensor
    y: State
    z: State
    status: Status
    tol: float
    dtype: torch.dtype
    stretch: float
    about: str

    def check_not_finite(self) -> None:
        """A sample that is not finite is lost, unless the activation makes something finite of it."""
        equations = self.drawn.equations
        first = flat(equations.step(self.weights, self.x, equations.zero(1)))
        if bool(first.isnan().any()) and "polynomial" not in self.drawn.name:
            require(self.status is Status.NON_FINITE, f"a sample with NaN ended as {self.status.name}: {self.about}")
        if self.status is Status.NON_FINITE:
            return
        self._require_finite()

    def check_fixed_steps(self, asked: int, taken: int) -> None:
        """Of ``tol=0``: exactly the steps asked for, unless one of them is not finite."""
        if not self._in_range():
            return
        fine = self.status in (Status.FIXED_STEPS, Status.NON_FINITE, Status.CYCLING, Status.CONVERGED)
        require(fine, f"tol=0 ended as {self.status.name}: {self.about}")
        if self.status is Status.FIXED_STEPS:
            require(taken == asked, f"{taken} steps taken, {asked} asked for: {self.about}")
            self._require_finite()

    def check(self, default: bool) -> None:
        """What CONVERGED promises, and that there is no other end where plain steps would get there.

        CONVERGED: ``|T(y) - y| <= tol |T(y)|``, in the arithmetic of the dtype. In float64 that may be more, by the
        rounding of what T is made of: some units in the last place of the terms of the input's share and of the state.
        """
        drawn, equations, w, x, y = self.drawn, self.drawn.equations, self.weights, self.x, self.y
        if not self._in_range():
            return
        eps = float(torch.finfo(self.dtype).eps)
        gap, image = residual(equations, w, x, y)
        entries = math.sqrt(flat(y).shape[1])
        noise = 16 * eps * (float(equations.size(w, x)) + float(flat(y).norm()) + 1e-300) * entries * self.stretch
        rate, amplification = equations.contraction(w), equations.amplification(w)
        if self.status is Status.CONVERGED:
            self._require_finite()
            # A tenth more: the library's own |T(y)| is that of its own rounded map.
            allowed = 1.1 * self.tol * max(image, float(flat(y).norm()), 1e-12) * self.stretch + noise
            require(gap <= allowed, f"CONVERGED with |T(y) - y| = {gap:.3g}, {allowed:.3g} allowed: {self.about}")
            if amplification is not None:
                self._check_distance(amplification * allowed)
            if drawn.minimises and eps < 1e-6:
                self._check_minimum()
            expected = flat(equations.features(w, x, y))
            off = float((flat(self.z) - expected).norm())
            # Features are those of the last step, the state may be one step ahead.
            slack = 2 * self.tol * float(expected.norm()) * (amplification or 50) + 4 * noise
            require(off <= slack, f"features are off by {off:.3g}, {slack:.3g} allowed: {self.about}")
        elif default and eps < 1e-6:
            # Law 12: strongly convex objectives converge with default options, up to a condition number of 1e4.
            require(amplification is None, f"{self.status.name} of a strongly convex objective: {self.about}")
        elif rate is not None and rate <= 0.9 and eps < 1e-6 and self.tol * max(image, 1e-12) > 20 * noise:
            # Plain steps alone would get there: rate^steps < tol, with room for the first.
            enough = _STEPS * math.log(max(rate, 1e-9)) < 2 * math.log(self.tol) - 5
            require(not enough, f"{self.status.name} where plain steps contract by {rate:.3g}: {self.about}")

    def _in_range(self) -> bool:
        """Whether the dtype can hold what the input's share is made of."""
        limits, size = torch.finfo(self.dtype), float(self.drawn.equations.size(self.weights, self.x))
        return size < float(limits.max) / 100 and not 0 < size < float(limits.tiny) / float(limits.eps)

    def _require_finite(self) -> None:
        for name, part in (("state", self.y), ("features", self.z)):
            require(bool(flat(part).isfinite().all()), f"{self.status.name}, but {name} not finite: {self.about}")

    def _check_distance(self, allowed: float) -> None:
        """Against the only equilibrium, by Newton's method, or by plain steps where kinks make that cycle."""
        equations, w, x = self.drawn.equations, self.weights, self.x
        exact = polished(equations, w, x, self.y)
        if exact is None and equations.contraction(w) is not None:
            exact = self.y
            for _ in range(3000):
                image = equations.step(w, x, exact)
                gap, exact = float((flat(image) - flat(exact)).norm()), image
                if gap <= 1e-15 * float(flat(exact).norm()):
                    break
        if exact is None:
            return
        distance = float((flat(self.y) - flat(exact)).norm())
        slack = allowed + 1e-12 * float(flat(exact).norm())
        require(distance <= slack, f"{distance:.3g} from the equilibrium, {slack:.3g} allowed: {self.about}")

    def _check_minimum(self) -> None:
        """No clearly negative curvature: eigenvalues of the step's Jacobian above 1, by a dense eigensolver.

        The library looks with 30 Lanczos steps, which miss a twentieth of the spectrum once in 10^4 cases at worst.
        Where a unit is exactly at a kink there is no Hessian, and nothing is checked.
        """
        inside = flat(self.drawn.equations.inside(self.weights, self.x, self.y))
        if any(float((inside - kink).abs().min()) < 1e-6 * (1 + abs(kink)) for kink in self.drawn.equations.kinks):
            return
        found = torch.linalg.eigvals(jacobian(self.drawn.equations, self.weights, self.x, self.y)).real
        spread = max(1.0, float((1 - found).max()))
        require(float(found.max()) <= 1 + 0.05 * spread, f"CONVERGED at a saddle or a maximum: {self.about}")
