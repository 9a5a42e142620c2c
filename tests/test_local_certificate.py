"""Certificates at the point, against dense eigenvalues, dense Jacobians and the equilibria of moved inputs."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import opteq
from opteq import models
from opteq import operators as op
from opteq.analysis import LocalCertificate, local_certificate
from opteq.states import blocks
from opteq.training.certified import CertifiedShare
from opteq.training.devices import make_accelerator
from oracles import dense_jacobian

EXACT = opteq.Anderson(tol=1e-12, max_steps=2000)


def ring(size: float, activation: str = "relu", count: int = 3, **options: object) -> opteq.MOptEq:
    torch.manual_seed(1)
    branches = [opteq.Branch(op.Dense(4, 5 + i), nn.Linear(3, 5 + i)) for i in range(count)]
    for branch in branches:
        branch.W.weight.data.mul_(size / branch.W.norm())
    return opteq.MOptEq(branches, activation=activation, **options).double()


def cases() -> dict[str, opteq.problems.Problem]:
    torch.manual_seed(0)
    conv = op.Conv2d(2, 3, 3)
    conv.weight.data.mul_(1.2)
    single = opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Linear(3, 6), "hardtanh")
    wide = opteq.Inhibition(op.Dense(4, 6), nn.Linear(3, 6), m=0.2)
    wide.A.weight.data.mul_(3)
    return {
        "contracting": ring(0.8),
        "beyond": ring(1.3, "tanh"),
        "diverse": ring(0.9, "softplus", diversity=0.1, smoothing=0.5),
        "hardtanh": single.double(),
        "inhibition": wide.double(),
        "geq": opteq.GEQ(op.Dense(6, 4, bound=1.3), nn.Linear(3, 4), opteq.kernels.Gaussian(0.3)).double(),
        "parallel": opteq.POptEq([opteq.Branch(op.Dense(2, 3, bound=0.9), nn.Linear(3, 3)) for _ in range(2)]).double(),
    }


def solved(problem: opteq.problems.Problem, batch: int = 2) -> tuple[opteq.Equilibrium, torch.Tensor, LocalCertificate]:
    x = torch.randn(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = opteq.Equilibrium(problem, EXACT)
    return layer, x, local_certificate(layer, x)


@functools.cache
def solved_case(name: str) -> tuple[opteq.Equilibrium, torch.Tensor, LocalCertificate]:
    return solved(cases()[name])


def flat(state: opteq.states.State) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in blocks(state)], dim=1)


@pytest.mark.parametrize("name", list(cases()))
def test_inference_mode_changes_nothing(name: str) -> None:
    """Derivatives are zero there, so that everything was certified: a Lipschitz constant of 0, a radius without end."""
    layer, x, expected = solved_case(name)
    state = layer.solve(x).state
    with torch.inference_mode():
        inside = local_certificate(layer, x.clone(), start=opteq.states.map_state(torch.clone, state))
    torch.testing.assert_close(inside.lipschitz, expected.lipschitz, rtol=1e-6, atol=0)
    torch.testing.assert_close(inside.contraction, expected.contraction, rtol=1e-6, atol=0)
    assert (inside.radius is None) == (expected.radius is None)
    if expected.radius is not None:
        torch.testing.assert_close(inside.radius, expected.radius, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", list(cases()))
def test_bounds_hold_for_dense_eigenvalues_and_jacobians(name: str) -> None:
    layer, x, found = solved_case(name)
    problem = layer.problem
    assert found.probability == pytest.approx(0.999)
    for sample in range(len(x)):
        one = x[sample : sample + 1]
        state = layer.solve(one).state
        values = torch.linalg.eigvals(dense_jacobian(problem(one).step, state, vectorize=True)).real
        lower, upper = (end[sample] for end in found.eigenvalues)
        assert float(upper) == pytest.approx(max(0.0, float(values.max())), abs=1e-6)
        assert float(lower) == pytest.approx(min(0.0, float(values.min())), abs=1e-6)
        assert bool(found.strict_minimum[sample]) == (float(values.max()) < 1)
        jacobian = torch.autograd.functional.jacobian(lambda v: flat(layer(v))[0], one)[:, 0]
        assert float(torch.linalg.matrix_norm(jacobian.detach(), 2)) <= float(found.lipschitz[sample]) * (1 + 1e-6)
        assert float(found.contraction[sample]) == pytest.approx(float(values.abs().max()), abs=1e-6)


@pytest.mark.parametrize("name", ["contracting", "hardtanh", "inhibition"])
def test_within_the_radius_the_equilibrium_is_affine(name: str) -> None:
    layer, x, found = solved(cases()[name], batch=6)
    assert found.radius is not None
    assert bool((found.radius > 0).all())
    direction = nn.functional.normalize(torch.randn_like(x))
    here = flat(layer(x)).detach()
    moved = [flat(layer(x + share * found.radius[:, None] * direction)).detach() - here for share in (0.49, 0.98)]
    torch.testing.assert_close(2 * moved[0], moved[1], rtol=1e-5, atol=1e-10)


def test_a_radius_in_float32_is_not_above_that_in_float64() -> None:
    """Far from 0, a pre-activation beside its kink is known no better than to the rounding of its terms."""
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(20, 40, bound=0.9), nn.Linear(5, 40))
    x = torch.randn(300, 5) * 3 + 50 * torch.randn(300, 1)
    solver = opteq.Anderson(tol=3e-7, max_steps=300)
    found = local_certificate(opteq.Equilibrium(problem, solver, on_failure="ignore"), x)
    exact = local_certificate(opteq.Equilibrium(problem.double(), EXACT), x.double())
    assert found.radius is not None
    assert int((found.radius > 0).sum()) > 270
    assert bool((found.radius.double() <= exact.radius).all())


def test_what_is_not_piecewise_linear_has_no_radius() -> None:
    assert solved(cases()["beyond"])[2].radius is None
    assert solved(cases()["geq"])[2].radius is None


class Steep(opteq.penalties.ElementwisePenalty):
    """``3 t`` above 0 and ``t / 2`` below."""

    name, bounded, lipschitz, kinks = "steep", False, 3.0, (0.0,)

    def prox(self, t: torch.Tensor) -> torch.Tensor:
        return torch.where(t > 0, 3 * t, t / 2)

    def derivative(self, t: torch.Tensor) -> torch.Tensor:
        return torch.where(t > 0, 3.0, 0.5).to(t)

    def _antiderivative(self, t: torch.Tensor) -> torch.Tensor:
        return t * self.prox(t) / 2

    def _value(self, y: torch.Tensor) -> torch.Tensor:
        return torch.where(y > 0, -1 / 3, 0.5) * y.square()


@pytest.mark.parametrize("size", [0.5, 0.56])
def test_the_radius_ends_at_the_kink_where_slopes_are_above_1(size: float) -> None:
    """``y = 3 (size^2 y + x)`` is 0 where x is, so that x itself is how far the nearest kink is."""
    problem = opteq.OptEq(op.Dense(1, 1), activation=Steep()).double()
    problem.W.weight.data.fill_(size)
    x = torch.tensor([[1.0], [0.3]], dtype=torch.float64)
    found = local_certificate(opteq.Equilibrium(problem, EXACT), x)
    assert bool(found.strict_minimum.all())
    torch.testing.assert_close(found.radius, x[:, 0], rtol=1e-6, atol=0)


def test_kinks_that_a_subclass_inherits_say_nothing_of_its_own_activation() -> None:
    class Bent(opteq.penalties.ReLU):
        def prox(self, t: torch.Tensor) -> torch.Tensor:
            return torch.relu(t) - torch.relu(t - 1) / 2

        def derivative(self, t: torch.Tensor) -> torch.Tensor:
            return (t > 0).to(t) - (t > 1).to(t) / 2

    class Told(Bent):
        kinks = (0.0, 1.0)

    radii = []
    for activation in (Bent(), Told()):
        problem = opteq.OptEq(op.Dense(1, 1), activation=activation).double()
        problem.W.weight.data.fill_(0.5)
        layer = opteq.Equilibrium(problem, EXACT)
        radii.append(local_certificate(layer, torch.tensor([[0.7]], dtype=torch.float64)).radius)
    assert radii[0] is None
    assert float(radii[1]) == pytest.approx(0.05)  # a = x + a / 4 is 1 at x = 0.75


@pytest.mark.parametrize("kind", ["relu", "group", "own", "container"])
def test_an_injection_that_is_not_affine_leaves_no_radius(kind: str) -> None:
    """Its kinks may be nearer than those of sigma, and between them the equilibrium is not affine."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    class Container(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs()

    torch.manual_seed(0)
    rest = {"relu": [nn.Linear(3, 9), nn.ReLU()], "group": [nn.Linear(3, 9), nn.GroupNorm(3, 9)], "own": [Own(3, 9)]}
    rest["container"] = [Container(nn.Linear(3, 9))]
    problem = opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Sequential(*rest[kind], nn.Linear(9, 6))).double()
    assert solved(problem)[2].radius is None
    two = [opteq.Branch(op.Dense(4, 6, bound=0.9), problem.U) for _ in range(2)]
    assert solved(opteq.MOptEq(two).double())[2].radius is None


def test_running_statistics_are_affine_and_those_of_a_batch_are_refused() -> None:
    torch.manual_seed(0)
    U = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    layer = opteq.Equilibrium(opteq.OptEq(op.Dense(4, 6, bound=0.9), U).double(), EXACT)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"batch statistics tie them: use eval\(\)"):
        local_certificate(layer, x)
    found = local_certificate(layer.eval(), x)
    assert found.radius is not None
    assert bool((found.radius > 0).all())


def test_states_far_from_an_equilibrium_have_no_certificate() -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Linear(3, 6)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for solver in (opteq.Picard(tol=1e-9, max_steps=2), opteq.Picard(tol=0, max_steps=2)):
        found = local_certificate(opteq.Equilibrium(problem, solver, on_failure="ignore"), x)
        assert not bool(found.strict_minimum.any())
        assert bool(found.lipschitz.isinf().all())
        assert found.radius is not None
        assert float(found.radius.max()) == 0
    fixed = opteq.Equilibrium(problem, opteq.Picard(tol=0, max_steps=200))
    assert bool(local_certificate(fixed, x).strict_minimum.all())


def test_a_saddle_has_no_certificate() -> None:
    problem = opteq.OptEq(op.Dense(1, 1), activation="tanh").double()
    problem.W.weight.data.fill_(2.0)
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=0, max_steps=1), on_failure="ignore")
    found = local_certificate(layer, torch.zeros(1, 1, dtype=torch.float64))  # stays at 0, a maximum
    assert not bool(found.strict_minimum)
    assert math.isinf(float(found.lipschitz))
    minimum = local_certificate(opteq.Equilibrium(problem, EXACT), torch.full((1, 1), 0.1, dtype=torch.float64))
    assert bool(minimum.strict_minimum)


def test_a_unit_at_its_kink_is_not_certified() -> None:
    problem = opteq.OptEq(op.Dense(1, 2), activation="relu").double()
    problem.W.weight.data.copy_(torch.tensor([[0.5], [0.0]]))
    found = local_certificate(opteq.Equilibrium(problem, EXACT), torch.tensor([[1.0, 0.0], [1.0, 0.5]]).double())
    assert found.strict_minimum.tolist() == [False, True]


def test_bounds_hold_where_lanczos_sees_little() -> None:
    """With a tenth of the steps that would be exact, upper bounds stay above the truth."""
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(30, 60, bound=0.95), nn.Linear(3, 60)).double()
    layer, x = opteq.Equilibrium(problem, EXACT), torch.randn(2, 3, dtype=torch.float64)
    found = local_certificate(layer, x, steps=15)
    for sample in range(2):
        one = x[sample : sample + 1]
        values = torch.linalg.eigvals(dense_jacobian(problem(one).step, layer.solve(one).state, vectorize=True)).real
        assert float(found.eigenvalues[1][sample]) >= float(values.max())
        jacobian = torch.autograd.functional.jacobian(lambda v: layer(v)[0], one)[:, 0]
        assert float(torch.linalg.matrix_norm(jacobian.detach(), 2)) <= float(found.lipschitz[sample])


@pytest.mark.parametrize("where", ["injection", "features"])
def test_no_derivative_is_bounded_at_a_kink_of_the_input_or_of_the_features(where: str) -> None:
    """Autograd's derivative is 0 there, and that to the right is not."""

    class Rectified(opteq.HiddenProblem):
        penalty = "tanh"

        def smooth(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return -((torch.relu(x) if where == "injection" else x) * y).sum(1)

        def features(self, y: torch.Tensor) -> torch.Tensor:
            return torch.relu(y) if where == "features" else y

    layer = opteq.Equilibrium(Rectified(), EXACT)
    x = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    slope = (layer(x + 1e-6) - layer(x))[:, 0] / 1e-6
    found = local_certificate(layer, x)
    assert bool((slope <= found.lipschitz * (1 + 1e-5)).all())
    assert found.lipschitz.isinf().tolist() == [True, False]


@pytest.mark.parametrize(
    ("option", "message"),
    [({"steps": 0}, "steps should be at least 1"), ({"failure": 2.0}, "failure should lie in"),
     ({"failure": float("nan")}, "failure should be a positive finite number")],
)  # fmt: skip
def test_wrong_options_are_refused(option: dict[str, Any], message: str) -> None:
    layer = opteq.Equilibrium(opteq.OptEq(op.Dense(3, 4, bound=0.8), nn.Linear(3, 4)))
    with pytest.raises(ValueError, match=message):
        local_certificate(layer, torch.randn(2, 3), **option)


def test_problems_without_symmetry_are_refused() -> None:
    deep = opteq.DeepOptEq([(op.Dense(3, 4, bound=0.8), nn.Linear(3, 4)) for _ in range(2)])
    with pytest.raises(ValueError, match="no symmetric form"):
        local_certificate(opteq.Equilibrium(deep), torch.randn(2, 3))
    with pytest.raises(ValueError, match="smoothing above 0"):
        local_certificate(opteq.Equilibrium(ring(0.5, diversity=0.01), EXACT), torch.randn(2, 3).double())


@pytest.mark.parametrize(("options", "share"), [({"bound": 0.9}, 1.0), ({"bound": None}, 1.0), ({"max_steps": 1}, 0.0)])
def test_the_share_of_certified_samples(options: dict[str, object], share: float) -> None:
    torch.manual_seed(0)
    small = {"channels": 3, "hidden": [4, 4], "scales": [1, 2], "diversity": 0.0}
    model = models.create("mopteq-193k", **small, tol=1e-5, on_failure="ignore", **options).eval()
    if options == {"bound": None}:
        for branch in model.equilibrium.problem.branch_list():
            branch.W.weight.data.mul_(1.8)
        assert model.equilibrium.problem.certificate().unique is None
    seen: list[object] = []
    model.equilibrium.register_observer(lambda hidden, state: seen.append(state))  # a user's own
    counted = CertifiedShare(model, torch.device("cpu"))
    with counted.counting(), torch.no_grad():
        model(torch.randn(5, 3, 8, 8))
        model(torch.randn(3, 3, 8, 8))
    assert counted.share(make_accelerator("cpu", "no", False, None)) == share
    assert counted.counts[1] == 8
    model(torch.randn(1, 3, 8, 8))
    assert len(seen) == 3
    assert not counted.states


def test_the_share_is_unknown_without_symmetry_and_without_a_unique_equilibrium() -> None:
    model = models.create("opteq-162k", channels=3, hidden=[4, 4], injected=[1], bound=None, on_failure="ignore").eval()
    for W in (module for module in model.modules() if isinstance(module, op.Conv2d)):
        W.weight.data.mul_(2)
    counted = CertifiedShare(model, torch.device("cpu"))
    with counted.counting(), torch.no_grad():
        model(torch.randn(2, 3, 8, 8))
    assert counted.share(make_accelerator("cpu", "no", False, None)) is None


def test_no_derivative_is_bounded_where_gamma_is_chosen_by_the_input() -> None:
    """Derivatives hold gamma constant, but the features move with it: here 4.5 times as far as autograd sees."""
    torch.manual_seed(3)
    W, U = op.Conv2d(4, 8, 3, bound=1.0), nn.Conv2d(2, 8, 3, padding=1)
    x = 0.5 * torch.randn(1, 2, 4, 4, dtype=torch.float64)
    for gamma in ("auto", 0.1):
        kernel = opteq.kernels.Gaussian(gamma, patch=2, split=4, hidden=3)
        layer = opteq.Equilibrium(opteq.GEQ(W, U, kernel).double(), EXACT)
        found = local_certificate(layer, x)
        moves = 1e-6 * torch.eye(x.numel(), dtype=torch.float64).view(-1, *x.shape[1:])
        with torch.no_grad():
            columns = (layer(x + moves) - layer(x - moves)).flatten(1) / 2e-6
        assert found.strict_minimum.all()
        assert found.lipschitz.isinf().all() == (gamma == "auto")
        assert found.lipschitz >= torch.linalg.matrix_norm(columns, 2) * (1 - 1e-5)
