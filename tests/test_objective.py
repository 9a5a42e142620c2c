"""Objectives that a user writes: the answer is the minimiser, whatever the scale; terms keep their names."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq import penalties
from opteq.solvers import Status
from oracles import SHARP, assert_slopes, cp


class Quadratic(opteq.Objective):
    """``1/2 y'H y - <x, y>``, a matrix per sample."""

    def __init__(self, H: Tensor, penalty: object = None, curvature: object = None) -> None:
        super().__init__()
        self.H = H
        self.penalty = penalty
        self.curvature = curvature

    def terms(self, y, x):
        return {"bending": 0.5 * torch.einsum("bi,bij,bj->b", y, self.H, y), "pull": -(x * y).sum(1)}


class FieldOfExperts(opteq.Objective):
    """A convolution whose responses should be small."""

    def __init__(self, penalty: object = None) -> None:
        super().__init__()
        self.filters = op.Conv2d(1, 3, 3, bound=1.0)
        self.strength = nn.Parameter(torch.tensor(0.7))
        self.penalty = penalty

    def terms(self, y, x):
        prior = (torch.sqrt(1 + 9 * self.filters(y).square()) - 1).flatten(1).sum(1)
        return {"data": 0.5 * (y - x).square().flatten(1).sum(1), "prior": self.strength * prior}


def random_problems(count: int, n: int, seed: int, dtype=torch.float64):
    """Matrices with curvature 1e-3 to 1e3 and conditioning 1 to 1e4, and right sides that give states of any length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    frames = torch.linalg.qr(torch.randn(count, n, n, generator=generator, dtype=torch.float64))[0]
    conditioning, size = 10 ** (4 * draw(count, 1)), 10 ** (6 * draw(count, 1) - 3)
    spread = draw(count, n)
    spread[:, 0], spread[:, -1] = 0, 1
    values = torch.where(draw(count, 1) < 0.5, conditioning**-spread, 1 - spread * (1 - 1 / conditioning)) * size
    H = torch.einsum("bij,bj,bkj->bik", frames, values, frames)
    x = torch.randn(count, n, generator=generator, dtype=torch.float64) * 10 ** (4 * draw(count, 1) - 2)
    return H.to(dtype), x.to(dtype), conditioning[:, 0]


@pytest.mark.parametrize("n", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 30, 60))])
def test_every_strongly_convex_problem_converges_by_default(n):
    H, x, _ = random_problems(80, n, seed=n)
    layer = opteq.Equilibrium(Quadratic(H), on_failure="raise")
    with torch.no_grad():
        solution = layer.solve(x)
    exact = torch.linalg.solve(H, x)
    error = (solution.state - exact).norm(dim=1) / exact.norm(dim=1)
    assert solution.converged.all()
    assert error.max() < 1e-2
    assert error.median() < 2e-4


def test_every_strongly_convex_problem_converges_in_float32():
    H, x, conditioning = random_problems(80, 20, seed=5, dtype=torch.float32)
    with torch.no_grad():
        solution = opteq.Equilibrium(Quadratic(H), on_failure="raise").solve(x)
    exact = torch.linalg.solve(H.double(), x.double())
    error = (solution.state - exact).norm(dim=1) / exact.norm(dim=1)
    # Rounding alone moves the answer by its relative size times the condition number.
    assert (error < 1e-3 + 20 * 1.2e-7 * conditioning).all()


class Outlier(opteq.Objective):
    """A stiff part, and one whose slope is small and constant until close to its minimum."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.robust = opteq.potentials.Huber(scale)

    def terms(self, y, x):
        return {"stiff": 0.5 * (y[:, 0] - x[:, 0]).square(), "robust": self.robust(y[:, 1] - x[:, 1])}


class Linear(opteq.Objective):
    penalty = "hardtanh"

    def terms(self, y, x):
        return {"slope": (x * y).sum(1)}


# Thousands of steps; float32 is the harder one, as such a slope is near to its rounding.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_a_small_constant_slope_is_followed_to_its_end(dtype):
    x = torch.tensor([[10.0, 3.0], [2.0, -1.0], [0.0, 3.0]], dtype=dtype)
    solution = opteq.Equilibrium(Outlier(1e-4).to(dtype), on_failure="raise").solve(x)
    torch.testing.assert_close(solution.state, x, rtol=0, atol=1e-3)
    slopes = torch.tensor([[3.0, -1e-4], [3.0, -1e-5]], dtype=dtype)
    solution = opteq.Equilibrium(Linear(), on_failure="raise").solve(slopes)
    torch.testing.assert_close(solution.state, -slopes.sign())


class Bent(opteq.Objective):
    """Strongly convex and not quadratic: curvature at the start says little about curvature elsewhere."""

    def __init__(self, H: Tensor, steep: float) -> None:
        super().__init__()
        self.H, self.steep = H, steep

    def terms(self, y, x):
        walls = _walls(self.steep, y).sum(1)
        return {"quadratic": 0.5 * torch.einsum("bi,bij,bj->b", y, self.H, y) - (x * y).sum(1), "walls": walls}


# Both solvers measure curvature alike, so that one length of wall each will do.
@pytest.mark.parametrize(("solver", "steep"), [(None, 30.0), (opteq.Anderson(tol=1e-8, max_steps=3000), 1.0)])
def test_curvature_that_grows_away_from_the_start_is_found(solver, steep):
    H, x, _ = random_problems(40, 5, seed=1)
    H = H / torch.linalg.matrix_norm(H, 2)[:, None, None]
    x = 10 * x / x.norm(dim=1, keepdim=True)
    problem = Bent(H, steep)
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x)
    y = solution.state.clone()
    for _ in range(20):  # Newton's method from there moves by the error
        right, left = torch.sigmoid(steep * (y - 1)), torch.sigmoid(steep * (-y - 1))
        gradient = torch.einsum("bij,bj->bi", H, y) - x + steep * (right - left)
        bend = steep**2 * (right * (1 - right) + left * (1 - left))
        y = y - torch.linalg.solve(H + torch.diag_embed(bend), gradient)
    assert solution.converged.all()
    assert ((y - solution.state).norm(dim=1) < 2e-2 * y.norm(dim=1)).all()


def _walls(steep, y):
    zero = torch.zeros_like(y)
    return torch.logaddexp(steep * (y - 1), zero) + torch.logaddexp(steep * (-y - 1), zero)


# One with a closed form and one whose prox is found by bisection; tests/test_scaled_penalties.py has them all.
# Whether the curvature is measured does not depend on the penalty.
@pytest.mark.parametrize(("penalty", "curvature"), [(penalties.SoftThreshold(0.3), 5.0), ("tanh", None)])
def test_penalties_give_the_constrained_minimiser(penalty, curvature):
    H, x, _ = random_problems(20, 6, seed=3)
    scale = torch.linalg.matrix_norm(H, 2)
    H = H / scale[:, None, None] + 0.01 * torch.eye(6, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    with torch.no_grad():
        solution = opteq.Equilibrium(Quadratic(H, penalty, curvature), on_failure="raise").solve(x)
        # The prox of the penalty itself, with another step length, leaves the minimiser where it is.
        moved = Quadratic(H, penalty, 2.5)(x).step(solution.state) - solution.state
    assert solution.converged.all()
    assert (moved.norm(dim=1) < 1e-4 * solution.state.norm(dim=1).clamp_min(1e-3)).all()


def test_the_non_negative_minimiser_is_that_of_a_quadratic_programme():
    H, x, _ = random_problems(5, 6, seed=4)
    H = H / torch.linalg.matrix_norm(H, 2)[:, None, None] + 0.05 * torch.eye(6, dtype=torch.float64)
    solution = opteq.Equilibrium(Quadratic(H, "relu"), opteq.FISTA(tol=1e-9, max_steps=5000)).solve(x)
    for k in range(5):
        y = cp.Variable(6)
        energy = 0.5 * cp.quad_form(y, cp.psd_wrap(H[k].numpy())) - x[k].numpy() @ y
        cp.Problem(cp.Minimize(energy), [y >= 0]).solve(**SHARP)
        assert torch.allclose(solution.state[k], torch.from_numpy(y.value), atol=1e-4 * float(x[k].norm()) + 1e-6)


def test_a_step_is_the_prox_of_minus_the_gradient_of_smooth():
    torch.manual_seed(0)
    for penalty in (None, "relu", "tanh"):
        hidden = FieldOfExperts(penalty).double()(torch.randn(3, 1, 5, 5).double())
        y = torch.rand(3, 1, 5, 5).double()
        slope = torch.func.grad(lambda y, hidden=hidden: hidden.smooth(y).sum())(y)
        step = -slope if penalty is None else hidden.penalty.prox(-slope)
        assert torch.allclose(step, hidden.step(y), atol=1e-12)
        image, merit = hidden.step_and_merit(y)
        assert torch.allclose(image, hidden.step(y))
        assert torch.allclose(merit, hidden.objective(y))


@pytest.mark.parametrize("penalty", [None, pytest.param("softplus", marks=pytest.mark.slow), "relu"])
def test_gradients_are_those_of_finite_differences(penalty):
    torch.manual_seed(1)
    problem = FieldOfExperts(penalty).double()
    problem.filters.weight.data.mul_(1.3)
    layer = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-12, max_steps=5000))

    def features(x, strength, weight):
        return torch.func.functional_call(layer, {"problem.strength": strength, "problem.filters.weight": weight}, (x,))

    x = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    # The bound's own search is reproducible to some 1e-10 only.
    assert_slopes(features, [x, problem.strength, problem.filters.weight], near=1e-4)


def test_answer_and_gradient_do_not_depend_on_the_step_length():
    H, x, _ = random_problems(4, 5, seed=9)
    H = H / torch.linalg.matrix_norm(H, 2)[:, None, None] + 0.1 * torch.eye(5, dtype=torch.float64)
    found = []
    for curvature in (torch.tensor([1.1, 2.0, 3.0, 4.0]), lambda x: x.new_tensor(1.5)):
        given = x.clone().requires_grad_()
        layer = opteq.Equilibrium(Quadratic(H, None, curvature), opteq.FISTA(tol=1e-12, max_steps=20000))
        layer(given).square().sum().backward()
        found.append(given.grad)
    exact = torch.linalg.solve(H, 2 * torch.linalg.solve(H, x))
    for gradient in found:
        assert torch.allclose(gradient, exact, rtol=1e-6, atol=1e-8 * float(exact.abs().max()))


def test_terms_keep_their_names_and_sum_to_the_objective():
    problem = FieldOfExperts("relu")
    hidden = problem(torch.rand(2, 1, 5, 5))
    y = torch.rand(2, 1, 5, 5)
    terms = hidden.terms(y)
    assert list(terms) == ["data", "prior", "penalty"]
    assert torch.allclose(sum(terms.values()), hidden.objective(y))


class Named(opteq.HiddenProblem):
    penalty = "relu"

    def smooth(self, y, x):
        return {"rough": 0.1 * (y[:, 1:] - y[:, :-1]).square().sum(1), "likeness": -(x * y).sum(1)}


def test_smooth_of_a_hidden_problem_may_be_a_dict():
    x = torch.randn(3, 4)
    hidden = Named()(x)
    assert list(hidden.terms(hidden.start())) == ["penalty", "quadratic", "rough", "likeness"]
    assert opteq.Equilibrium(Named()).solve(x).converged.all()


def test_maxima_and_saddles_are_not_called_converged():
    class Hill(opteq.HiddenProblem):
        penalty = "identity"

        def smooth(self, y, x):
            return -2 * (y - x).square().sum(1)

    class DoubleWell(opteq.Objective):
        def terms(self, y, x):
            return {"well": (y.square() - 1).square().sum(1) + 0 * x.sum(1)}

    top = torch.zeros(2, 3)
    for problem in (Hill(), DoubleWell()):
        for solver in (None, opteq.Anderson(), opteq.FISTA()):
            with pytest.warns(opteq.ConvergenceWarning, match="negative curvature"):
                solution = opteq.Equilibrium(problem, solver).solve(top, start=top)
            assert set(solution.status) == {Status.NOT_A_MINIMUM}
            assert not solution.converged.any()
    bottom = opteq.Equilibrium(DoubleWell()).solve(top, start=torch.full((2, 3), 0.1))
    assert bottom.converged.all()
    assert torch.allclose(bottom.state, torch.ones(2, 3), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maxima_are_not_called_converged_in_16_bits(dtype):
    class DoubleWell(opteq.Objective):
        def terms(self, y, x):
            return {"well": (y.square() - 1).square().sum(1) + 0 * x.sum(1)}

    top_and_bottom = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=dtype)
    solution = opteq.Equilibrium(DoubleWell(), on_failure="ignore").solve(top_and_bottom, start=top_and_bottom)
    assert solution.status == (Status.NOT_A_MINIMUM, Status.CONVERGED)


def test_negative_curvature_is_reported_by_the_backward_pass():
    class Well(opteq.Objective):
        def __init__(self):
            super().__init__()
            self.height = nn.Parameter(torch.tensor(1.0))

        def terms(self, y, x):
            return {"well": self.height * (y.square() - 1).square().sum(1) - 0.1 * (x * y).sum(1)}

    layer = opteq.Equilibrium(Well())
    x = torch.zeros(1, 3, requires_grad=True)
    out = layer(x)
    with pytest.warns(opteq.ConvergenceWarning, match="NOT_A_MINIMUM"):
        out.sum().backward()
    assert layer.last[1].report.status == (Status.NOT_A_MINIMUM,)


def test_traces_are_finite_and_end_at_the_answer():
    H, x, _ = random_problems(5, 4, seed=8)
    H = H / torch.linalg.matrix_norm(H, 2)[:, None, None] + 0.1 * torch.eye(4, dtype=torch.float64)
    for solver in (None, opteq.Anderson(), opteq.Picard(max_steps=20), opteq.Broyden()):
        layer = opteq.Equilibrium(Quadratic(H, "relu"), solver, on_failure="ignore")
        assert layer.solve(x).objective_trace is None
        solution = layer.solve(x, trace_objective=True)
        assert list(solution.term_traces) == ["bending", "pull", "penalty"]
        trace = solution.objective_trace
        assert torch.isfinite(trace).all()
        assert trace.shape == (int(solution.steps.max()) + 1, 5)
        least = layer.problem(x).objective(solution.state)
        assert torch.allclose(trace[-1], least, atol=1e-6 * float(least.abs().max()))


def test_a_trace_follows_the_points_that_were_taken(monkeypatch):
    from opteq.solvers.fista import AcceleratedIteration

    H = torch.diag(torch.logspace(0, 2, 5, dtype=torch.float64))[None]
    x = random_problems(1, 5, seed=3)[1]
    layer = opteq.Equilibrium(Quadratic(H))
    hidden, taken, advance = layer.problem(x), [], AcceleratedIteration.advance

    def watched(self, active):
        found = advance(self, active)
        taken.append(hidden.objective(self.at.point))
        return found

    monkeypatch.setattr(AcceleratedIteration, "advance", watched)
    trace = layer.solve(x, trace_objective=True).objective_trace
    steps = len(trace) - 1
    assert len(taken) == 2 * steps  # the trace is a solve of its own
    torch.testing.assert_close(trace[1:-1], torch.stack(taken[-steps:-1]))


def test_plots_are_drawn():
    pytest.importorskip("matplotlib").use("agg")
    import opteq.plot

    H, x = torch.diag(torch.tensor([1.0, 2.0, 3.0])).expand(3, 3, 3), torch.randn(3, 3)
    layer = opteq.Equilibrium(Quadratic(H))
    assert len(opteq.plot.convergence(layer.solve(x, trace_objective=True)).axes) == 2
    assert len(opteq.plot.convergence(layer.solve(x), sample=1).axes) == 1


def test_a_layer_warns_again_when_it_gets_clearly_worse():
    def matrices(*sizes):
        return torch.tensor(sizes)[:, None, None] * torch.eye(3)

    x = torch.ones(4, 3)
    problem = Quadratic(matrices(1.0, 1.0, 1.0, 0.1), curvature=1.0)
    layer = opteq.Equilibrium(problem, opteq.Picard(max_steps=10, tol=1e-6))
    with pytest.warns(opteq.ConvergenceWarning, match=r"1 of 4 samples[\s\S]*FISTA"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)  # the same again
    problem.H = matrices(1.0, 0.1, 0.1, 0.1)
    with pytest.warns(opteq.ConvergenceWarning, match=r"3 of 4 samples[\s\S]*clearly worse"):
        layer(x)


def test_bound_objectives_are_plain_data():
    problem = FieldOfExperts("relu")
    x = torch.rand(2, 1, 5, 5)
    with torch.no_grad():
        hidden = problem(x)
        again = pickle.loads(pickle.dumps(hidden))
        y = torch.rand(2, 1, 5, 5)
        assert torch.equal(again.step(y), hidden.step(y))
    layer = opteq.Equilibrium(problem)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_batch_equals_its_samples():
    torch.manual_seed(0)
    problem, x = FieldOfExperts("relu").double(), torch.randn(3, 1, 5, 5).double()
    layer = opteq.Equilibrium(problem)
    together = layer(x)
    alone = torch.cat([layer(x[k : k + 1]) for k in range(3)])
    assert torch.allclose(together, alone, atol=1e-10)


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
def test_low_precision_works(dtype, close):
    torch.manual_seed(0)
    x = torch.rand(2, 1, 6, 6)
    layer = opteq.Equilibrium(FieldOfExperts().eval(), opteq.FISTA(tol=1e-6, max_steps=500))
    exact = layer(x)
    assert isinstance(opteq.Equilibrium(layer.problem).solver, opteq.FISTA)
    for solver in (None, opteq.Anderson()):
        low = opteq.Equilibrium(copy.deepcopy(layer.problem).to(dtype), solver)
        assert (low(x.to(dtype)).float() - exact).abs().max() < close


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_curvature_that_grows_is_corrected_in_16_bits(dtype):
    """The step length fits the start, where the curvature is a seventh: too long steps cycled up to the step limit."""

    class Well(opteq.Objective):
        def terms(self, y, x):
            well = 0.25 * (y.square() - 1).square().flatten(1).sum(1)
            return {"well": well, "data": 0.25 * (y - x).square().flatten(1).sum(1)}

    torch.manual_seed(0)
    x = (1.5 * torch.randn(8, 3)).to(dtype)
    exact = opteq.Equilibrium(Well(), opteq.FISTA(tol=1e-9, measure="error", max_steps=500)).solve(x.double()).state
    solution = opteq.Equilibrium(Well()).solve(x)
    assert solution.converged.all()
    assert solution.steps.max() < 50
    assert (solution.state - exact).norm(dim=1).max() < 12 * torch.finfo(dtype).eps * exact.norm(dim=1).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_length_of_another_magnitude_is_no_convergence_in_16_bits(dtype):
    """Where the curvature is 1e4 times that of the start, a residual of 1 looks like rounding of the state."""

    class Quartic(opteq.Objective):
        def start(self, x):
            return torch.full_like(x, 0.01)

        def terms(self, y, x):
            return {"quartic": 0.25 * y.square().square().sum(1), "input": -(x * y).sum(1)}

    torch.manual_seed(3)
    x = (1.5 * torch.randn(16, 30)).to(dtype)
    solution = opteq.Equilibrium(Quartic(), opteq.FISTA(measure="error", max_steps=100), on_failure="ignore").solve(x)
    exact = x.double().sign() * x.double().abs().pow(1 / 3)
    error = (solution.state - exact).norm(dim=1) / exact.norm(dim=1)
    assert error[solution.converged].max() < 0.15


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "empty dict"),
        (torch.zeros(2), "dict from names"),
        ({"a": torch.zeros(2, 3)}, r"'a' should be one value per sample.*\(2, 3\)"),
        ({"a": 1.0}, "got float"),
    ],
)
def test_wrong_terms_are_named(returned, message):
    class Wrong(opteq.Objective):
        curvature = 1.0

        def terms(self, y, x):
            return returned

    with pytest.raises((TypeError, ValueError), match=message):
        opteq.Equilibrium(Wrong())(torch.zeros(2, 3))


@pytest.mark.parametrize("curvature", [0, -1.0, "big", torch.ones(3)])
def test_wrong_curvature_is_named(curvature):
    H, x, _ = random_problems(2, 3, seed=0)
    with pytest.raises(ValueError, match=r"Quadratic\.curvature should be"):
        Quadratic(H, curvature=curvature)(x)


def test_wrong_penalties_are_named():
    H, x, _ = random_problems(2, 3, seed=0)
    with pytest.raises(TypeError, match="every entry alone"):
        Quadratic(H, penalties.LinearActivation(3).double())(x)
    with pytest.raises(ValueError, match="convex"):
        Quadratic(H, penalties.ELU(alpha=2.0))(x)


@pytest.mark.parametrize("learned", [False, True])
def test_potentials_work_inside_a_users_terms(learned):
    class Jumps(opteq.Objective):
        def __init__(self):
            super().__init__()
            self.potential = opteq.potentials.Huber(scale=0.2, learned=learned)

        def terms(self, y, x):
            jumps = self.potential(y[:, 1:] - y[:, :-1]).sum(1)
            return {"data": 0.5 * (y - x).square().sum(1), "jumps": jumps}

    layer = opteq.Equilibrium(Jumps(), on_failure="raise")
    x = torch.randn(4, 12, requires_grad=True)
    for _ in range(2):
        layer(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_checkpoints_and_vmap_go_around_an_objective():
    torch.manual_seed(0)
    problem = FieldOfExperts("relu")  # without a penalty there is less to go around
    layer = opteq.Equilibrium(problem.double(), opteq.FISTA(tol=1e-10, max_steps=70))
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    found = layer(x)
    expected = torch.autograd.grad(found.square().sum(), [x, *problem.parameters()])
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again.square().sum(), [x, *problem.parameters()]), expected, strict=True):
        torch.testing.assert_close(one, other)
    mapped = torch.func.vmap(lambda image: layer.solve(image[None]).state[0])(x.detach())
    torch.testing.assert_close(mapped, found.detach(), rtol=1e-8, atol=1e-8)


def test_a_solve_under_vmap_ends_when_all_samples_have_finished():
    class Counted(opteq.Objective):
        calls = 0

        def terms(self, y, x):
            self.calls += 1
            return {"data": 0.5 * (y - x).square().sum(1), "rough": 0.3 * (y[:, 1:] - y[:, :-1]).square().sum(1)}

    problem = Counted()
    layer = opteq.Equilibrium(problem, on_failure="raise")
    x = torch.randn(3, 4)
    expected = layer.solve(x)
    slopes = torch.autograd.functional.jacobian(lambda x: layer(x).square().sum(), x)
    problem.calls = 0
    features, steps = torch.func.vmap(
        lambda one: (lambda found: (found.features[0], found.steps[0]))(layer.solve(one[None]))
    )(x)
    torch.testing.assert_close(features, expected.features)
    assert steps.tolist() == expected.steps.tolist()
    found = torch.func.vmap(torch.func.grad(lambda one: layer(one[None]).square().sum()))(x)
    torch.testing.assert_close(found, slopes, rtol=1e-4, atol=1e-4)
    assert problem.calls < 200  # of 10,000 steps


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_checkpoint_saves_the_same_the_second_time(calls):
    """Whichever path its first pass has seen: the very first call, the plain path, or graphs."""
    torch.manual_seed(0)
    solver = opteq.FISTA(tol=1e-10, max_steps=10)  # any steps will do
    layer = opteq.Equilibrium(FieldOfExperts("relu").double(), solver, on_failure="ignore")
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        for _ in range(calls):
            layer(x)
    outputs = [torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) for _ in range(2)]
    found = torch.autograd.grad(torch.stack(outputs).square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(2 * layer(x).square().sum(), x))


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(opteq.Objective):
    """Nothing can be set on it."""

    strength: float

    def __post_init__(self):
        nn.Module.__init__(self)

    def terms(self, y, x):
        return {"data": 0.5 * self.strength * (y - x).square().sum(1)}


class Lazy(opteq.HiddenProblem):
    """Made ready by its first call that succeeds."""

    penalty = "tanh"
    ready = False

    def __init__(self):
        super().__init__()
        self.linear = nn.LazyLinear(4)

    def smooth(self, y, x):
        if not self.ready:
            raise RuntimeError("not ready")
        return 0.1 * self.linear(y).square().sum(1) - (y * x).sum(1)


class Running(opteq.HiddenProblem):
    """Keeps a mean, anew in every evaluation."""

    penalty = "tanh"

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def smooth(self, y, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return 0.6 * y.square().sum(1) - (y * (x - self.mean)).sum(1)


def test_what_functions_keep_is_made_outside_of_derivatives():
    x = torch.randn(2, 3)
    torch.testing.assert_close(opteq.Equilibrium(Frozen(2.0))(x), x, rtol=1e-3, atol=1e-3)
    layer = opteq.Equilibrium(Lazy())
    with pytest.raises(RuntimeError, match="not ready"):
        layer(x)
    layer.problem.ready = True
    assert layer(x).shape == (2, 3)
    with pytest.raises(ValueError, match=r"Running\.smooth\(y, x\) gives another value for the same state each time"):
        opteq.Equilibrium(Running()).solve(x)


def test_an_objective_without_a_lower_bound_ends_soon():
    class Falling(opteq.Objective):
        def terms(self, y, x):
            return {"concave": -2 * (y - x).square().sum(1)}

    solution = opteq.Equilibrium(Falling(), on_failure="ignore").solve(torch.ones(2, 3))
    assert set(solution.status) == {opteq.Status.NON_FINITE}
    assert int(solution.steps.max()) < 200
    assert "lower bound" in solution.status[0].message


class Barrier(opteq.Objective):
    """Its minimiser is ``0.1 / x``; it is infinite where y is not positive, and its gradient is not."""

    def start(self, x):
        return torch.ones_like(x)

    def terms(self, y, x):
        return {"linear": (x * y).sum(1), "barrier": -0.1 * y.log().sum(1)}


@pytest.mark.parametrize("solver", [None, opteq.Anderson(max_steps=2000)])
def test_solvers_stay_inside_the_domain_of_a_barrier(solver):
    x = 0.05 + 3 * torch.rand(40, 7, generator=torch.Generator().manual_seed(1))
    solution = opteq.Equilibrium(Barrier(), solver).solve(x)
    assert solution.converged.all()
    assert ((solution.state - 0.1 / x).norm(dim=1) <= 1e-3 * (0.1 / x).norm(dim=1)).all()


def test_an_answer_outside_of_the_domain_is_no_minimum():
    x = 0.05 + 3 * torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    solution = opteq.Equilibrium(Barrier(), opteq.Broyden(max_steps=300), on_failure="ignore").solve(x)
    wrong = solution.state.le(0).any(dim=1)
    assert wrong.any()
    assert not solution.converged[wrong].any()


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(None, marks=pytest.mark.slow),  # 4,000 steps
        opteq.FISTA(tol=1e-2),
        opteq.Anderson(),
        opteq.Picard(tol=1e-2, max_steps=500),
    ],
)
def test_an_objective_that_falls_without_end_is_not_called_converged(solver):
    class Linear(opteq.Objective):
        def terms(self, y, x):
            return {"linear": (x * y).sum(1)}

    solution = opteq.Equilibrium(Linear(), solver, on_failure="ignore").solve(torch.tensor([[1.0, -2.0], [0.3, 0.4]]))
    assert set(solution.status) == {Status.NOT_A_MINIMUM}


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow), 10_000])
@pytest.mark.parametrize("least", [-2e-4, 1e-3])
def test_weak_negative_curvature_is_found(n, least):
    class Saddle(opteq.Objective):
        def terms(self, y, x):
            weights = torch.linspace(0, 1, n)
            weights[0] = least
            return {"quadratic": 0.5 * (weights * y.square()).sum(1), "quartic": y[:, 0] ** 4}

    status = opteq.Equilibrium(Saddle(), on_failure="ignore").solve(torch.zeros(1, n)).status
    assert status == (Status.CONVERGED if least > 0 else Status.NOT_A_MINIMUM,)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda x: {"y": x}, "got dict"),
        (lambda x: [x], "got list"),
        (lambda x: x[:1], r"shape \(3, ...\).*got shape \(1, 4\)"),
        (lambda x: x[0], r"got shape \(4,\)"),
    ],
)
@pytest.mark.parametrize("method", ["start", "features"])
@pytest.mark.parametrize("kind", ["Objective", "HiddenProblem"])
def test_wrong_starts_and_features_are_named(returned, got, method, kind):
    def zero(self, y, x):
        return {"square": y.square().flatten(1).sum(1)}

    written = {method: lambda self, z: returned(z), "terms": zero, "smooth": zero, "penalty": "identity"}
    problem = type("Mine", (getattr(opteq, kind),), written)()
    with pytest.raises(ValueError, match=rf"Mine.{method}\(.\) should be a tensor .*{got}"):
        opteq.Equilibrium(problem)(torch.zeros(3, 4))


@pytest.mark.parametrize("curvature", [-3.0, 0.0, float("nan")])
def test_a_tensor_of_wrong_curvature_is_found_at_once(curvature):
    problem = Quadratic(torch.eye(4)[None].double())
    problem.curvature = torch.tensor(curvature)
    solution = opteq.Equilibrium(problem, on_failure="ignore").solve(torch.ones(1, 4).double())
    assert solution.status == (Status.NON_FINITE,)
    assert solution.steps.item() == 0


def test_states_without_entries_are_solved():
    class Empty(opteq.Objective):
        penalty = "relu"

        def terms(self, y, x):
            return {"data": (y - x).square().sum(1)}

    assert opteq.Equilibrium(Empty()).solve(torch.zeros(3, 0)).converged.all()


class Written(opteq.Objective):
    """Any second term beside the data, with modules of its own."""

    def __init__(self, more, *parts: nn.Module) -> None:
        super().__init__()
        self.more, self.parts, self.calls = more, nn.ModuleList(parts), 0

    def terms(self, y, x):
        self.calls += 1
        data = 0.5 * (y - x).square().flatten(1).sum(1)
        return {"data": data, "more": self.more(y, *self.parts).square().flatten(1).sum(1)}


ATTENTION = {"d_model": 4, "nhead": 2, "dim_feedforward": 8}


@pytest.mark.parametrize(
    "problem",
    [
        Written(lambda y: y - y.mean(0)),
        Written(lambda y: y.roll(2, 0) * y),
        Written(lambda y: y / y.max()),
        Written(lambda y: y.cumsum(0)),
        Written(lambda y, mix: mix(y), nn.TransformerEncoderLayer(**ATTENTION)),
    ],
)
def test_terms_that_mix_samples_are_refused(problem):
    """A sum over samples has other derivatives then, and samples stop one by one."""
    x = torch.randn(4, 3, 4)
    problem(x[:1])  # there is nothing to mix
    with pytest.raises(ValueError, match=r"Written.terms\(y, x\) mixes the samples of a batch: more of one sample"):
        opteq.Equilibrium(problem)(x)


def plain_attention(y, mix):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return mix(y)


def test_attention_that_can_not_be_differentiated_twice_says_what_to_do():
    attention = nn.TransformerEncoderLayer(**ATTENTION, dropout=0.0, batch_first=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice: .* attention inside of `with torch.nn.attention"):
        opteq.Equilibrium(Written(lambda y, mix: mix(y), attention))(torch.randn(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        Written(lambda y, net: net(y), nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8))),
        Written(plain_attention, nn.TransformerEncoderLayer(**ATTENTION, dropout=0.0, batch_first=True)),
        Written(lambda y, norm: norm(y), nn.BatchNorm1d(3)).eval(),
        Written(lambda y: (y + torch.randn(1, generator=torch.Generator().manual_seed(0)).to(y)).square()),
        Written(lambda y: torch.fft.rfft2(y.float()).abs()),
    ],
)
def test_terms_of_a_sample_alone_pass(problem, dtype):
    problem.to(dtype)(torch.randn(5, 3, 4).to(dtype))


def test_samples_are_looked_at_once_and_no_random_numbers_are_drawn():
    problem = Written(lambda y: y + 0 * nn.functional.dropout(y))
    problem.curvature = 1.0
    x, before = torch.randn(3, 4), torch.get_rng_state()
    counts = []
    for _ in range(3):
        problem(x)
        counts.append(problem.calls)
    assert counts == [5, 5, 5]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch", [1, 3])
def test_terms_that_draw_random_numbers_are_refused(batch):
    """Their solves ended at random states, and small ones were called converged."""
    problem = Written(lambda y, net: net(y), nn.Sequential(nn.Linear(200, 200), nn.Dropout(0.1)))
    layer = opteq.Equilibrium(problem, opteq.FISTA(max_steps=3), on_failure="ignore")
    x = torch.randn(batch, 200)
    with pytest.raises(ValueError, match=r"Written.terms\(y, x\) gives another .* \(more\).* dropout of parts.0.1,"):
        layer(x)
    assert layer.eval()(x).shape == x.shape
    drop = opteq.Equilibrium(opteq.FixedPoint(lambda z, x: nn.functional.dropout(0.5 * z + x, 0.1)))
    with pytest.raises(ValueError, match=r"FixedPoint.f\(z, x\) gives another .* belongs in start\(x\), which"):
        drop(x)


def test_the_first_call_may_be_inside_of_torch_func():
    x, layers = torch.randn(3, 4), [opteq.Equilibrium(Written(lambda y: 2 * y)) for _ in range(2)]
    found = torch.func.vmap(torch.func.grad(lambda one: layers[0](one[None]).square().sum()))(x)
    torch.testing.assert_close(found, torch.func.grad(lambda x: layers[1](x).square().sum())(x))


@pytest.mark.parametrize("why", ["detach", "data", "no_grad"])
def test_terms_without_a_gradient_are_refused(why):
    class Cut(opteq.Objective):
        def terms(self, y, x):
            with torch.set_grad_enabled(why != "no_grad"):
                y = {"detach": y.detach(), "data": y.data}.get(why, y)
                return {"data": 0.5 * (y - x).square().sum(1)}

    with pytest.raises(ValueError, match=r"Cut.terms\(y, x\) has no gradient by y: it should depend on y, without"):
        opteq.Equilibrium(Cut())(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"Cut.terms\(y, x\) has no gradient by y"):
        opteq.Equilibrium(Cut())(torch.ones(1, 3))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("how", ["detach", "numpy", "weighted", "count"])
def test_a_term_that_changes_with_the_state_and_has_no_gradient_is_refused(how: str, batch: int) -> None:
    """The steps would not see it, but the objective that they are judged by would."""

    class Half(opteq.Objective):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            held = y.detach()
            parts = {
                "detach": lambda: held.square().sum(1),
                "numpy": lambda: torch.as_tensor(held.numpy() ** 2 @ [1.0, 2.0, 3.0], dtype=y.dtype),
                "weighted": lambda: self.weight * held.square().sum(1),
                "count": lambda: (y > 0).sum(1).to(y.dtype),
                "of the weights": lambda: self.weight.square().expand(len(y)),
                "of x": lambda: x.square().sum(1),
            }
            part = parts[how if self.training else "of the weights"]() + parts["of x"]()
            return {"data": 0.5 * (y - x).square().sum(1), "size": part, "of x": parts["of x"]()}

    layer = opteq.Equilibrium(Half())
    with pytest.raises(ValueError, match=r"Half.terms\(y, x\): 'size' changes with y and has no gradient by y"):
        layer(torch.ones(batch, 3))
    assert layer.eval().solve(torch.ones(batch, 3)).converged.all()


@pytest.mark.parametrize("batch", [1, 2])
def test_terms_may_be_whole_numbers(batch: int) -> None:
    """Found by a review: the check for gradients asked for the rounding of int64."""

    class Counted(opteq.Objective):
        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            counted = y if self.training else x
            return {"data": 0.5 * (y - x).square().sum(1), "count": (counted > 0).sum(1), "any": x[:, 0] > 0}

    layer = opteq.Equilibrium(Counted())
    with pytest.raises(ValueError, match=r"'count' changes with y and has no gradient by y"):
        layer(torch.ones(batch, 3))
    torch.testing.assert_close(layer.eval()(torch.ones(batch, 3)), torch.ones(batch, 3))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2, dtype=torch.int64)),
            r"x\[1\] should be floating point; got torch.int64.*x\[1\].float",
        ),
        ((torch.ones(2, 3), torch.ones(4, 3)), r"should have one batch size; got \[2, 4\]"),
        ((torch.ones(2, 3), None), r"x\[1\] should be a tensor with the batch first; got NoneType"),
        ([torch.ones(2, 3)], "the input should be a tensor with the batch first, or a tuple of them; got list"),
        ((), "the input should be a tensor with the batch first, or a tuple of them; got tuple$"),
    ],
)
def test_a_wrong_part_of_the_input_is_named(x, message):
    problem = Written(lambda y: y)
    with pytest.raises(TypeError, match="takes_tuples = True" if isinstance(x, tuple) and x else "the input"):
        problem(x)
    type(problem).takes_tuples = True
    try:
        with pytest.raises((TypeError, ValueError), match=message):
            problem(x)
    finally:
        del type(problem).takes_tuples


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_state_is_floating_point(dtype):
    class Wrong(opteq.Objective):
        def start(self, x):
            return torch.zeros(x.shape, dtype=dtype)

        def terms(self, y, x):
            return {"data": (y - x).abs().square().sum(1)}

    advice = "view_as_real" if dtype.is_complex else ""
    with pytest.raises(TypeError, match=rf"Wrong.start\(x\) should be floating point; got {dtype}.*{advice}"):
        opteq.Equilibrium(Wrong())(torch.ones(2, 3))


def test_terms_are_real():
    class Spectrum(opteq.Objective):
        def terms(self, y, x):
            return {"data": 0.5 * (y - x).square().sum(1), "spectrum": torch.fft.fft(y).square().sum(1)}

    with pytest.raises(TypeError, match=r"terms\(y, x\): 'spectrum' should be real; got torch.complex64"):
        opteq.Equilibrium(Spectrum())(torch.ones(2, 3))


class LearnedRidge(nn.Module, penalties.ElementwisePenalty):
    name, lipschitz, bounded = "ridge", 1.0, False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def prox(self, t):
        return t / (1 + self.weight)

    def derivative(self, t):
        return (1 / (1 + self.weight)).expand_as(t)

    def _antiderivative(self, t):
        return self.prox(t) * t / 2

    def _value(self, y):
        return self.weight * y.square() / 2


def test_a_penalty_with_parameters_is_a_part_of_its_problem():
    problem = Written(lambda y: 0 * y)
    problem.penalty = LearnedRidge()
    layer = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-7, measure="error", max_steps=1000)).double()
    layer(torch.full((2, 3), 1.5, dtype=torch.float64)).sum().backward()
    assert layer.problem.penalty.weight.grad.item() == pytest.approx(-6 * 1.5 / 1.5**2, rel=1e-4)

    class Shared(Written):
        penalty = LearnedRidge()

    with pytest.raises(TypeError, match=r"Shared.penalty has parameters, .* set self.penalty in __init__"):
        Shared(lambda y: y)(torch.ones(2, 3))


class Single(opteq.Objective):
    def terms(self, y, x):
        return {"data": 0.5 * (y - x).square()}


class SingleHidden(opteq.HiddenProblem):
    penalty = "relu"

    def smooth(self, y, x):
        return 0.2 * y.square() - x * y


@pytest.mark.parametrize(("problem", "factor"), [(Single(), 1.0), (SingleHidden(), 1 / 1.4)])
def test_a_state_may_be_one_number_per_sample(problem, factor):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    solution = opteq.Equilibrium(problem, on_failure="raise").solve(x)
    torch.testing.assert_close(solution.features, factor * x, rtol=1e-3, atol=1e-3)
    solution.features.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), factor))
    assert opteq.analysis.local_certificate(opteq.Equilibrium(problem), x.detach()).strict_minimum.all()


def test_an_objective_has_shapes_on_the_meta_device():
    layer = opteq.Equilibrium(FieldOfExperts("relu")).to("meta")
    assert layer(torch.empty(2, 1, 5, 5, device="meta")).shape == (2, 1, 5, 5)


class NormalisedInput(opteq.Objective):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm, self.inside = nn.BatchNorm1d(3), inside

    def start(self, x):
        self.centre = None if self.inside else self.norm(x)
        return torch.zeros_like(x)

    def terms(self, y, x):
        return {"data": 0.5 * (y - (self.norm(x) if self.inside else self.centre)).square().sum(1)}


def test_batch_normalisation_of_the_input_belongs_in_start():
    """Inside of derivatives torch.func refuses to change its running statistics."""
    x = torch.randn(5, 3)
    message = r"changes a tensor that it keeps.*in start\(x\).*Batch normalisation \(norm\) is in training mode: use a"
    with pytest.raises(ValueError, match=message):
        opteq.Equilibrium(NormalisedInput(True))(x)
    opteq.Equilibrium(NormalisedInput(True).eval())(x)
    problem = NormalisedInput(False)
    torch.testing.assert_close(
        opteq.Equilibrium(problem)(x), (x - x.mean(0)) / x.std(0, correction=0), rtol=1e-3, atol=1e-3
    )
    assert problem.norm.num_batches_tracked == 1
