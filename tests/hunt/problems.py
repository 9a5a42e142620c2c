"""Solutions that are none, wrong statuses, samples that disturb their mates."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import opteq
from hunt import families, feedback, monotone, own
from hunt.drawing import Draw, drawn_batch, require
from hunt.oracle import State, Weights, eigenvalues, flat, jacobian, polished, residual, unflat
from hunt.parts import DrawnProblem
from opteq.solvers import Solver, Status
from opteq.states import blocks, map_state

FAMILIES = [
    families.opteq_layer, families.opteq_layer, families.deep_layers, families.branches, families.branches,
    families.kernel_branches, families.similarity, own.bowl, own.pair, own.least, own.robust, own.wells,
    own.restoration, own.written_opteq, own.masked, feedback.inhibition, feedback.inhibited, feedback.free_map,
    monotone.monotone,
]  # fmt: skip
_BENT = 1e-3
"""The change of a Jacobian's entries over a push that is short enough."""
DTYPES = [torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]


def drawn_solver(draw: Draw, dtype: torch.dtype, default: bool) -> Solver | None:
    """Any solver, with a tolerance that the dtype allows for, or none at all; None leaves it to the layer."""
    least = {torch.float64: -11.0, torch.float32: -5.5}.get(dtype, -2.0)
    tol, steps = draw.power(least, -1.5), draw.one_of([100, 100, 400])
    kind = draw.one_of(["picard", "anderson", "anderson", "broyden", "fista", "default" if default else "fixed"])
    if kind == "fixed":
        return opteq.Picard(tol=0, max_steps=draw.whole(1, 20))
    if kind == "anderson":
        return opteq.Anderson(tol=tol, max_steps=steps, memory=draw.whole(1, 8))
    made = {"picard": opteq.Picard, "broyden": opteq.Broyden, "fista": opteq.FISTA}
    return made[kind](tol=tol, max_steps=steps) if kind in made else None


def hunt(draw: Draw) -> str:
    """One solve, checked sample by sample."""
    drawn = draw.one_of(FAMILIES)(draw)
    dtype = draw.one_of(DTYPES)
    drawn.problem.to(draw.device, dtype)
    batch = drawn_batch(draw, drawn.shape, dtype)
    # The default solver of an objective takes up to 10,000 steps: only where it promises to converge.
    weights, _ = drawn.weights()
    amplification = drawn.equations.amplification(weights)
    default = drawn.stretch is not None and amplification is not None and torch.finfo(dtype).eps < 1e-6
    solver = drawn_solver(draw, dtype, default)
    layer = opteq.Equilibrium(drawn.problem, solver, on_failure="ignore")
    start, where = _drawn_start(draw, drawn, batch.x)
    about = f"{drawn.name} | {batch.about} | {layer.solver} | start {where}"
    before = batch.x.clone()
    with warnings.catch_warnings(), torch.set_grad_enabled(draw.chance(0.5)):
        warnings.simplefilter("ignore")
        for _ in range(draw.calls):
            solution = layer.solve(batch.x, start)
    require(torch.equal(batch.x.nan_to_num(7), before.nan_to_num(7)), f"the input was written to: {about}")
    state, features = (
        tuple(part.detach().double().cpu() for part in blocks(found)) for found in (solution.state, solution.features)
    )
    with torch.no_grad():
        stretch = drawn.stretched(batch.x)
        tol = max(solution.report.tol, float(torch.finfo(dtype).eps))
        solved = Solved(
            drawn, weights, amplification, batch.x.double().cpu(), state, features, solution.status, tol, dtype,
            stretch, about,
        )  # fmt: skip
        solved.check_not_finite([index for index, bad in enumerate(batch.bad) if bad])
        rows = [index for index, bad in enumerate(batch.bad) if not bad and solved.in_range[index]]
        if layer.solver.tol == 0:
            solved.check_fixed_steps(rows, layer.solver.max_steps, solution.steps.tolist())
        else:
            solved.check(rows, layer.solver.max_steps, solver is None, far=start is not None)
            if draw.chance(0.05) and solver is not None and not isinstance(drawn.problem, opteq.Objective):
                solved.check_vmap(rows, layer, batch.x)
    return drawn.family


def _drawn_start(draw: Draw, drawn: DrawnProblem, x: Tensor) -> tuple[Any, str]:
    """Mostly that of the problem (None); or near it, far out where activations and kernels are flat, or constant."""
    if draw.chance(0.8):
        return None, "its own"
    scale = draw.one_of([1e-6, 1.0, 1e3, 1e6])
    first = flat(drawn.equations.zero(len(x)))
    rows = scale * (draw.normal(*first.shape) if draw.chance(0.5) else torch.ones_like(first))
    return drawn.placed(unflat(rows, drawn.equations.shapes), x, draw.device), f"{scale:g}"


@dataclass(frozen=True)
class Solved:
    """A batch after its solve; samples are named by their rows.

    Attributes:
        drawn, weights: the problem.
        amplification: from a residual to the distance from the only equilibrium, where that is known.
        x, y, z: input, state and features.
        tol: the relative residual that CONVERGED promises: the one asked for, or the rounding of the dtype.
        stretch: factor from the library's residual to that of the equations, per sample.
    """

    drawn: DrawnProblem
    weights: Weights
    amplification: float | None
    x: Tensor
    y: State
    z: State
    status: Sequence[Status]
    tol: float
    dtype: torch.dtype
    stretch: list[float]
    about: str

    @functools.cached_property
    def size(self) -> list[float]:
        """Of what the input's share is made of."""
        found: list[float] = self.drawn.equations.size(self.weights, self.x).tolist()
        return found

    @functools.cached_property
    def in_range(self) -> list[bool]:
        """Whether the dtype can hold that."""
        limits = torch.finfo(self.dtype)
        least, most = float(limits.tiny) / float(limits.eps), float(limits.max) / 100
        return [size < most and not 0 < size < least for size in self.size]

    def require(self, fact: bool, row: int, message: str) -> None:
        require(fact, f"sample {row}, {self.status[row].name}: {message}: {self.about}" if not fact else "")

    def check_not_finite(self, rows: list[int]) -> None:
        """A sample that is not finite is lost, unless the activation makes something finite of it."""
        equations = self.drawn.equations
        for row in rows:
            first = flat(equations.step(self.weights, self.x[row : row + 1], equations.zero(1)))
            lost = self.status[row] is Status.NON_FINITE
            if bool(first.isnan().any()) and "polynomial" not in self.drawn.name:
                self.require(lost, row, "a sample with NaN")
            if not lost:
                self._require_finite([row])

    def check_fixed_steps(self, rows: list[int], asked: int, taken: list[int]) -> None:
        """Of ``tol=0``: exactly the steps asked for, unless one of them is not finite."""
        ends = (Status.FIXED_STEPS, Status.NON_FINITE)
        for row in rows:
            self.require(self.status[row] in ends, row, "an end of tol=0")
            if self.status[row] is Status.FIXED_STEPS:
                self.require(taken[row] == asked, row, f"{taken[row]} steps taken, {asked} asked for")
                self._require_finite([row])

    def check_vmap(self, rows: list[int], layer: opteq.Equilibrium, x: Tensor) -> None:
        """Samples under ``vmap``, against the same ones together: both within the tolerance where they converge."""
        if self.amplification is None or not rows:
            return

        def alone(one: Tensor) -> Any:
            return map_state(lambda part: part[0], layer(one[None]))

        found = flat([part.detach().double().cpu() for part in blocks(torch.func.vmap(alone)(x[rows]))])
        expected = flat(self.z)[rows]
        size = expected.norm(dim=1) + flat(self.y)[rows].norm(dim=1)
        off = (found - expected).norm(dim=1)
        for index, row in enumerate(rows):
            # Residuals are relative to a state of at least this size.
            measured = max(float(size[index]), getattr(layer.solver, "floor", 0.0))
            allowed = 8 * self.amplification * self.tol * measured * self.stretch[row]
            allowed += 64 * float(torch.finfo(self.dtype).eps) * self.size[row] * self.amplification
            if self.status[row] is Status.CONVERGED:
                self.require(
                    float(off[index]) <= allowed, row, f"under vmap off by {off[index]:.3g} of {size[index]:.3g}"
                )

    def check(self, rows: list[int], steps: int, default: bool, far: bool) -> None:
        """What CONVERGED promises, and that there is no other end where plain steps would get there.

        From a start that is ``far``, they may take longer than expected.

        CONVERGED: ``|T(y) - y| <= tol |T(y)|``, in the arithmetic of the dtype. In float64 that may be more, by the
        rounding of what T is made of: some units in the last place of the terms of the input's share and of the state.
        """
        equations, w = self.drawn.equations, self.weights
        eps, accurate = float(torch.finfo(self.dtype).eps), torch.finfo(self.dtype).eps < 1e-6
        gap, image = (found.tolist() for found in residual(equations, w, self.x, self.y))
        norms, entries = flat(self.y).norm(dim=1).tolist(), math.sqrt(flat(self.y).shape[1])
        # The least numbers of float16 are 6e-8 apart, however small they are.
        spacing = float(torch.finfo(self.dtype).smallest_normal) * eps
        noise = [
            16 * (eps * (size + norm + 1e-300) + spacing) * entries * stretch
            for size, norm, stretch in zip(self.size, norms, self.stretch, strict=True)
        ]
        rate = equations.contraction(w)
        # Plain steps alone would get there: rate^steps < tol, with room for the first.
        easy = rate is not None and rate <= 0.9 and steps * math.log(max(rate, 1e-9)) < 2 * math.log(self.tol) - 5
        for row in rows:
            if self.status[row] is Status.CONVERGED or not accurate:
                continue
            if default:
                # Law 12: strongly convex objectives converge with default options, up to a condition number of 1e4.
                self.require(self.amplification is None, row, "a strongly convex objective")
            elif easy and not far and self.tol * max(image[row], 1e-12) > 20 * noise[row]:
                self.require(False, row, f"plain steps contract by {rate:.3g}")
        rows = [row for row in rows if self.status[row] is Status.CONVERGED]
        if not rows:
            return
        self._require_finite(rows)
        # A tenth more: the library's own |T(y)| is that of its own rounded map.
        allowed = {
            row: 1.1 * self.tol * max(image[row], norms[row], 1e-12) * self.stretch[row] + noise[row] for row in rows
        }
        for row in rows:
            self.require(gap[row] <= allowed[row], row, f"|T(y) - y| = {gap[row]:.3g}, {allowed[row]:.3g} allowed")
        local = None
        if self.amplification is not None or (self.drawn.minimises and accurate):
            local = jacobian(equations, w, self.x[rows], self._state(rows))
        if self.amplification is not None:
            self._check_distance(rows, [self.amplification * allowed[row] for row in rows], local)
        if self.drawn.minimises and accurate:
            self._check_minimum(rows, local)
        expected = flat(equations.features(w, self.x[rows], self._state(rows)))
        off, size = (flat(self.z)[rows] - expected).norm(dim=1).tolist(), expected.norm(dim=1).tolist()
        for index, row in enumerate(rows):
            # Features are those of the last step, the state may be one step ahead.
            slack = 2 * self.tol * size[index] * (self.amplification or 50) + 4 * noise[row]
            self.require(off[index] <= slack, row, f"features are off by {off[index]:.3g}, {slack:.3g} allowed")

    def _state(self, rows: list[int]) -> State:
        return tuple(part[rows] for part in self.y)

    def _require_finite(self, rows: list[int]) -> None:
        for name, part in (("state", self.y), ("features", self.z)):
            for row, fine in zip(rows, flat(part)[rows].isfinite().all(dim=1).tolist(), strict=True):
                self.require(fine, row, f"{name} not finite")

    def _check_distance(self, rows: list[int], allowed: list[float], local: Tensor) -> None:
        """Against the only equilibrium, by Newton's method, or by plain steps where kinks make that cycle."""
        equations, w, x, y = self.drawn.equations, self.weights, self.x[rows], self._state(rows)
        exact, found = polished(equations, w, x, y, local)
        if not bool(found.all()) and equations.contraction(w) is not None:
            left = (~found).nonzero()[:, 0]
            image = tuple(part[left] for part in y)
            for _ in range(3000):
                before, image = flat(image), equations.step(w, x[left], image)
                if bool(((flat(image) - before).norm(dim=1) <= 1e-15 * before.norm(dim=1)).all()):
                    break
            for part, more in zip(exact, image, strict=True):
                part[left] = more
            found[left] = True
        size = flat(exact).norm(dim=1).tolist()
        distance = (flat(y) - flat(exact)).norm(dim=1).tolist()
        for index, row in enumerate(rows):
            slack = allowed[index] + 1e-12 * size[index]
            fine = not found[index] or distance[index] <= slack
            self.require(fine, row, f"{distance[index]:.3g} from the equilibrium, {slack:.3g} allowed")

    def _check_minimum(self, rows: list[int], local: Tensor) -> None:
        """No clearly negative curvature: eigenvalues of the step's Jacobian above 1, by a dense eigensolver.

        The library looks with 30 Lanczos steps, which miss a twentieth of the spectrum once in 10^4 cases at worst.
        """
        inside = flat(self.drawn.equations.inside(self.weights, self.x[rows], self._state(rows)))
        smooth = torch.ones(len(rows), dtype=torch.bool)
        for kink in self.drawn.equations.kinks:
            smooth &= (inside - kink).abs().amin(dim=1) >= 1e-6 * (1 + abs(kink))
        found = eigenvalues(local)
        spread = (1 - found).amax(dim=1).clamp_min(1)
        fine = ~smooth | (found.amax(dim=1) <= 1 + 0.05 * spread)
        for index, row in enumerate(rows):
            self.require(bool(fine[index]), row, "a saddle or a maximum")
            if not smooth[index]:
                self.require(self._holds(row), row, "small pushes carry it away: a saddle on a kink, or a maximum")

    def _holds(self, row: int, pushes: int = 32, steps: int = 200) -> bool:
        """Whether short steps from beside a state stay together with those from the state itself.

        For a unit at a kink there is no Hessian. Steps as short as these descend on the objective. Where the curvature
        is negative by a twentieth of its range, distances along it grow by a twentieth in each. A state that is known
        to a loose tolerance moves on towards the minimum by itself, which says nothing about curvature: distances are
        measured from where it is then.
        """
        equations, w = self.drawn.equations, self.weights
        y = flat(self._state([row]))
        generator = torch.Generator().manual_seed(row)
        directions = torch.nn.functional.normalize(torch.randn(pushes, y.shape[1], generator=generator, dtype=y.dtype))
        x = self.x[row : row + 1].expand(pushes, *self.x.shape[1:])

        def pushed_by(size: float) -> Tensor:
            return flat(equations.step(w, x, unflat(y + size * directions, equations.shapes)))  # into the domain

        def slopes_at(rows: Tensor) -> Tensor:
            return jacobian(equations, w, x, unflat(rows, equations.shapes))

        # The curvature of a cubic changes within a short way: pushes are shorter than that.
        size = 1e-5 * max(float(y.norm()), self.size[row], 1e-30)
        while True:
            pushed = pushed_by(size)
            slopes = slopes_at(pushed)
            if float((slopes - slopes_at(pushed_by(size / 2))).abs().max()) <= _BENT:
                break
            size /= 10
            if size <= 1e-12 * float(y.norm()) or size < 1e-60:
                return True  # rounding is all that is left
        before = (pushed - y).norm(dim=1).clamp_min(size)
        length = 1 / (1 + float(torch.linalg.matrix_norm(slopes, 2).max()))
        rows, inputs = torch.cat([pushed, y]), torch.cat([x, x[:1]])
        for _ in range(steps):
            rows = torch.lerp(rows, flat(equations.step(w, inputs, unflat(rows, equations.shapes))), length)
        return bool(((rows[:-1] - rows[-1]).norm(dim=1) <= 20 * before).all())
