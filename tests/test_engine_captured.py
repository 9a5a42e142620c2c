"""What only captured solves could get wrong: side effects, settings, and memory that graphs share."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import captured
import opteq
from opteq import operators as op
from opteq.engine.cuda_graphs import backend, bounds, cache
from opteq.engine.cuda_graphs.buffers import BufferSet, SharedBuffers
from opteq.engine.cuda_graphs.output_buffers import OutputBuffers
from opteq.operators.spectral.bound import scale_for
from opteq.states import blocks


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> captured.Replays:
    return captured.replay(monkeypatch)


class Quartic(opteq.HiddenProblem):
    """A problem with a strict minimum, and a module in its features."""

    penalty = "relu"

    def __init__(self, read: nn.Module | None = None, first: nn.Module | None = None) -> None:
        super().__init__()
        self.read, self.first = read or nn.Identity(), first or nn.Identity()

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.first(x))

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.1 * y.square().sum(1).square() - (x * y).sum(1)

    def features(self, y: Tensor) -> Any:
        return self.read(y)


def exact(problem: opteq.problems.Problem, **options: Any) -> opteq.Equilibrium:
    return opteq.Equilibrium(problem.double(), opteq.Anderson(tol=1e-11), opteq.Implicit(tol=1e-11), **options)


def both(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """By the plain path, and by captured solves."""
    with opteq.engine.off():
        expected = run()
    return run(), expected


SIDE_EFFECTS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5)),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "both": lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", SIDE_EFFECTS)
@pytest.mark.usefixtures("replays")
def test_features_draw_once_a_call_and_learn_their_statistics(kind: str, grad: bool) -> None:
    """The backward pass has to find the numbers that were drawn, and running statistics are those of the module."""
    torch.manual_seed(0)
    made, x = exact(Quartic(SIDE_EFFECTS[kind]())), torch.rand(5, 4).double().requires_grad_()

    def run() -> list[Tensor]:
        layer, found = deepcopy(made), []
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad):
            for _ in range(4):
                z = layer(x)
                found.append(z.detach())
                found += torch.autograd.grad(z.square().sum(), [x, *layer.parameters()]) if grad else []
        return [*found, *layer.buffers(), layer.eval()(x).detach()]

    torch.testing.assert_close(*both(run), rtol=1e-8, atol=1e-9)


class Normalised(nn.Module):
    """``f(z, x)`` that takes statistics of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * z.tanh() + self.norm(x)


def test_a_map_that_changes_its_buffers_is_not_captured(replays: captured.Replays) -> None:
    made, x = opteq.FixedPoint(Normalised()).double(), torch.randn(6, 4).double()

    def run() -> list[Tensor]:
        layer = opteq.Equilibrium(deepcopy(made), opteq.Picard(tol=1e-8), opteq.Phantom())
        return [layer(x).detach() for _ in range(4)] + list(layer.buffers())

    torch.testing.assert_close(*both(run))
    assert not replays.replayed


@pytest.mark.parametrize("kind", ["written", "popteq"])
@pytest.mark.usefixtures("replays")
def test_two_calls_come_before_a_backward_pass_where_statistics_are_taken(kind: str) -> None:
    torch.manual_seed(0)
    U = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5))
    branches = [opteq.Branch(op.Conv2d(3, 5, 3, bound=0.9), part) for part in (U, nn.Conv2d(2, 5, 3, padding=1))]
    layer = exact(opteq.POptEq(branches, fuse="conv") if kind == "popteq" else Quartic(first=nn.BatchNorm1d(4)))
    x = torch.rand(*(5, 2, 6, 6) if kind == "popteq" else (5, 4)).double().requires_grad_()

    def run() -> list[Tensor]:
        total = torch.stack([part.square().sum() for k in (1, 2) for part in blocks(layer(k * x))]).sum()
        return [*torch.autograd.grad(total, x)]

    for _ in range(3):
        torch.testing.assert_close(*both(run), rtol=1e-8, atol=1e-9)


class Prior:
    """A regulariser of a user's own, whose weight is an attribute."""

    couples_batch, gradient_lipschitz = False, 1.0

    def __init__(self) -> None:
        self.weight = 1.0

    def gradient(self, z: Tensor) -> Tensor:
        return self.weight * z


def test_a_solver_with_a_regulariser_that_changed_is_another_one(replays: captured.Replays) -> None:
    torch.manual_seed(0)
    prior, problem = Prior(), opteq.OptEq(op.Dense(4, 8, bound=0.9), nn.Linear(3, 8)).double()
    layer = opteq.Equilibrium(problem, opteq.SAM(regularizer=prior, max_steps=20), on_failure="ignore")
    x = torch.randn(5, 3).double()
    with torch.no_grad():
        before = [layer(x) for _ in range(3)][-1]
        assert replays.replayed == 2
        prior.weight = 0.1
        found, expected = both(lambda: [layer(x)])
    assert replays.replayed == 2
    torch.testing.assert_close(found, expected)
    assert (found[0] - before).norm() > 0.01


@pytest.mark.usefixtures("replays")
def test_an_unrolled_network_of_many_steps_is_the_same_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_MOST_STEPS", 4)
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(30, 40, bound=0.99), nn.Linear(3, 40)).double()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-15), opteq.Unrolled(steps=9), on_failure="ignore")
    x = torch.randn(5, 3).double()
    expected = layer(x).detach()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-15)


@pytest.mark.usefixtures("replays")
def test_the_history_of_a_coupled_backward_solve_has_a_column_per_sample() -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(4, 8, bound=0.9), nn.Linear(3, 8), regularizer=opteq.regularizers.HSIC(), gamma=0.1)
    layer = exact(problem, on_failure="ignore")
    x = torch.randn(5, 3).double().requires_grad_()
    for _ in range(3):
        solution = layer.solve(x)
        solution.features.sum().backward()
        assert solution.backward is not None
        assert solution.backward.trace is not None
        assert solution.backward.trace.shape[1] == 5


def test_integers_among_features_stay_integers_where_no_value_may_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return y, y.argmax(1), y > 0.1

    monkeypatch.setattr("opteq.states.may_branch_on_values", lambda tensor: False)  # as on a GPU
    features = exact(Quartic(Both()))(torch.rand(5, 4).double())
    assert [part.dtype for part in features] == [torch.float64, torch.int64, torch.bool]


def test_bounds_of_parametrised_weights_are_those_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such weights are made at every look: one may be given the identity of another that is gone."""

    class Same(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 1.0 * weight

    def branch(size: float) -> opteq.Branch:
        W = op.Conv2d(3, 5, 3, bound=0.9)
        with torch.no_grad():
            W.weight.mul_(size)
        parametrize.register_parametrization(W, "weight", Same())
        return opteq.Branch(W, nn.Conv2d(2, 5, 3, padding=1))

    monkeypatch.setattr(backend, "scales_by_graph", lambda jobs: [scale_for(bound, *own) for bound, own in jobs])
    for kind in (opteq.POptEq, opteq.MOptEq):
        torch.manual_seed(0)
        problem: Any = kind([branch(size) for size in (1.0, 4.0, 7.0)])
        with torch.no_grad():
            expected = [part.W.prepare().weight for part in problem.branches]
            with backend.bounded_weights(problem):  # type: ignore[union-attr]
                found = [part.W.prepare().weight for part in problem.branches]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_bounds_are_captured_whichever_way_precisions_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older flags alone")
    monkeypatch.setattr(bounds, "_Graph", lambda jobs, wanted: object())
    monkeypatch.setattr(bounds, "raw_stream", lambda device: 0)
    monkeypatch.setattr(bounds, "_graphs", bounds._graphs.copy())
    jobs: list[bounds.Job] = [(0.9, (torch.ones(2, 2),))]
    first, before = bounds._graph(jobs, False), matmul.fp32_precision
    try:
        # Torch refuses to read the older flags then. A training in this process may have asked for TF32 before.
        matmul.fp32_precision = "ieee" if before == "tf32" else "tf32"
        assert bounds._graph(jobs, False) is not first
    finally:
        matmul.fp32_precision = before
    assert bounds._graph(jobs, False) is first


def test_the_default_dtype_decides_what_is_captured() -> None:
    before = cache.environment()
    torch.set_default_dtype(torch.float64)
    try:
        assert cache.environment() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.environment() == before


def test_a_graph_that_writes_statistics_forgets_whose_values_were_there() -> None:
    shared, two = SharedBuffers(), torch.zeros(2, dtype=torch.int64)
    outputs = OutputBuffers(BufferSet(shared), [torch.ones(2, 3), two.double(), two, two, torch.zeros(4, 2).double()])
    indices = torch.arange(14)  # of another problem, by chance as many as the statistics
    (buffer,) = BufferSet(shared).filled([indices])
    assert buffer.holds(indices)
    outputs.forget()
    assert not buffer.holds(indices)


def test_hooks_inside_of_a_users_problem_see_every_step(replays: captured.Replays) -> None:
    """A replay would leave them with what an earlier call has given them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.3 * self.inner(z).tanh() + x

    problem, seen = opteq.FixedPoint(Mixed()).double(), {}
    problem.f.inner.register_forward_hook(lambda module, given, found: seen.update(inner=found.detach()))
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10))
    with torch.no_grad():
        for size in range(4):
            x = size * torch.ones(2, 4).double()
            z, last = layer(x), seen["inner"]
            torch.testing.assert_close(last, nn.functional.linear(z, problem.f.inner.weight, problem.f.inner.bias))
    assert not replays.replayed
