"""Steps that are put on their tape in the backward pass give what a tape of the way forward gives.

On a CPU nothing is captured; the replay itself is the same, so it is allowed here by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opteq
from cases import Case, by_name
from opteq.gradients import adjoint, replay
from opteq.gradients.replay import Steps
from opteq.problems.block import Block
from opteq.problems.hidden import Hidden
from opteq.problems.linearisation import SymmetricLinearisation
from opteq.problems.opteq import BoundOptEq
from opteq.states import State, blocks, single
from test_freezing import FREEZABLE

GRADIENTS = {
    "implicit": opteq.Implicit(),
    "gmres": opteq.Implicit(linear=opteq.solvers.linear.GMRES(tol=1e-10, max_steps=100)),
    "phantom": opteq.Phantom(3, 0.7),
    "one step": opteq.OneStep(),
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)


def gradients(case: Case, gradient: opteq.gradients.Gradient) -> tuple[list[Tensor | None], opteq.solution.Report]:
    problem = case.problem()
    x = case.input().requires_grad_()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-11, max_steps=300), gradient, on_failure="ignore")
    solution = layer.solve(x)
    features = blocks(solution.features)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in features]
    total = torch.stack([(w * part).sum() for w, part in zip(weights, features, strict=True)]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert solution.backward is not None
    return [x.grad, *(parameter.grad for parameter in problem.parameters())], solution.backward


# One step is a phantom step without damping, and a general solver differs from others by the problem's structure only.
COMBINATIONS = [
    *((case, name) for case in FREEZABLE for name in ("implicit", "phantom")),
    *((case, name) for case in by_name("opteq-relu deep mopteq-four") for name in ("gmres", "one step")),
]


@pytest.mark.parametrize(("case", "name"), COMBINATIONS, ids=[f"{case.name}-{name}" for case, name in COMBINATIONS])
def test_a_replay_gives_the_gradient_of_a_tape(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, plain = gradients(case, GRADIENTS[name])
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)
    found, report = gradients(case, GRADIENTS[name])
    assert report.method == plain.method
    for own, other in zip(found, wanted, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("replays")
def test_a_phantom_replay_can_be_differentiated_twice() -> None:
    (case,) = by_name("opteq-tanh")
    problem, x = case.problem(), case.input().requires_grad_()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=300), opteq.Phantom(2, 0.9))

    def slope() -> Tensor:
        (first,) = torch.autograd.grad(blocks(layer(x))[0].square().sum(), x, create_graph=True)
        return first.square().sum()

    (found,) = torch.autograd.grad(slope(), x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "usable", lambda inputs: False)
        (wanted,) = torch.autograd.grad(slope(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("replays")
def test_an_implicit_replay_refuses_a_second_derivative() -> None:
    (case,) = by_name("opteq-tanh")
    layer, x = opteq.Equilibrium(case.problem()), case.input().requires_grad_()
    (first,) = torch.autograd.grad(blocks(layer(x))[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated again"):
        first.square().sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("replays")
def test_a_weight_that_changed_in_between_is_noticed() -> None:
    (case,) = by_name("opteq-relu")
    problem, x = case.problem(), case.input()
    hidden = problem(x)
    state = opteq.Anderson().solve(hidden.step, hidden.start()).state
    found = replay.differentiated_steps(hidden, state, Steps(), lambda: None)
    for tensor in hidden.originals:
        with torch.no_grad():
            tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        blocks(found)[0].sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("name", ["implicit", "phantom"])
def test_state_and_features_may_be_changed_in_place(name: str) -> None:
    problem = opteq.OptEq(opteq.operators.Identity(), torch.nn.Linear(3, 4), mu=1.5).double()
    for W in (None, opteq.operators.Dense(3, 4, bound=0.9).double()):
        problem.W = problem.W if W is None else W
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10), GRADIENTS[name])
        x = torch.randn(2, 3, dtype=torch.float64)
        layer.zero_grad()
        (2 * blocks(layer(x))[0]).sum().backward()  # type: ignore[no-untyped-call]
        wanted = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
        layer.zero_grad()
        solution = layer.solve(x)
        blocks(solution.features)[0].mul_(2).sum().backward()  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        torch.testing.assert_close(found, wanted)
        blocks(solution.state)[0].add_(1)


@pytest.mark.parametrize("mu", [1.0, 1.7])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_one_linearisation_serves_the_system_and_the_weights(
    activation: str, mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    W = opteq.operators.Dense(4, 6, bound=0.9)
    problem = opteq.OptEq(W, torch.nn.Linear(3, 6), activation, mu).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=300), opteq.Implicit(tol=1e-12))
    leaves = [x, *problem.parameters()]

    def found() -> tuple[Tensor, ...]:
        return torch.autograd.grad(blocks(layer(x))[0].square().sum(), leaves)

    wanted = found()
    taken: list[object] = []
    own = type(problem(x)).linearise_on_tape

    def noting(hidden: object, state: object, features: object, close: bool) -> object:
        assert close  # to 1e-12
        taken.append(own(hidden, state, features, close))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(type(problem(x)), "linearise_on_tape", noting)
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)
    torch.testing.assert_close(found(), wanted, rtol=1e-8, atol=1e-10)
    assert len(taken) == 1
    assert taken[0] is not None


@pytest.mark.parametrize("activation", ["relu", "elu"])
@pytest.mark.parametrize("mu", [1.0, 1.7])
@pytest.mark.parametrize("looked_at", ["state", "features", "both"])
def test_gradients_of_state_and_features(
    looked_at: str, mu: float, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either, or both, may be what a loss looks at; the system has one right side for them."""
    torch.manual_seed(1)
    problem = opteq.OptEq(opteq.operators.Conv2d(2, 3, 3, bound=0.9), None, activation, mu).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=300), opteq.Implicit(tol=1e-12))

    def found() -> tuple[Tensor, ...]:
        solution = layer.solve(x)
        parts = {"state": single(solution.state), "features": single(solution.features)}
        chosen = [part for name, part in parts.items() if looked_at in (name, "both")]
        return torch.autograd.grad(sum((part.sin().sum() for part in chosen), torch.zeros(())), [x, problem.W.weight])

    with opteq.fast_paths(fused=False):  # the tape that a CPU would take otherwise is yet another one
        wanted = found()
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)
    with opteq.fast_paths(fused=False):
        torch.testing.assert_close(found(), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("replays")
def test_a_system_is_solved_in_the_layout_of_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the gradient of a mean over channels-last pictures has another one."""
    W, U = opteq.operators.Conv2d(3, 5, 3, bound=0.9), torch.nn.Conv2d(3, 5, 3, padding=1)
    problem = opteq.OptEq(W, U).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layouts = []
    own = adjoint.Layout.of

    def noting(state: State, coupled: bool = False) -> adjoint.Layout:
        layouts.append(single(state).is_contiguous(memory_format=torch.channels_last))
        return own(state, coupled)

    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    with opteq.fast_paths(fused=False):
        features = single(opteq.Equilibrium(problem)(x))
    features.retain_grad()
    monkeypatch.setattr(adjoint.Layout, "of", noting)
    features.square().mean().backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert not features.grad.is_contiguous(memory_format=torch.channels_last)
    assert layouts
    assert all(layouts)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("name", ["implicit", "phantom"])
def test_outputs_that_nobody_wants_a_gradient_for(name: str) -> None:
    class Blind(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, z: Tensor, b: Tensor) -> Tensor:
            return 2 * b

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> tuple[None, Tensor]:
            return None, 2 * gradients[0]

    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem(), gradient=GRADIENTS[name])
    b = torch.ones(1, dtype=torch.float64, requires_grad=True)
    Blind.apply(blocks(layer(case.input()))[0], b).sum().backward()  # type: ignore[no-untyped-call]
    assert b.grad is not None
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.usefixtures("replays")
def test_a_gradient_that_is_not_finite_is_seen() -> None:
    (case,) = by_name("opteq-relu")
    layer, x = opteq.Equilibrium(case.problem(), on_failure="ignore"), case.input().requires_grad_()
    features = blocks(layer(x))[0]
    weights = torch.ones_like(features)
    weights[1, 0] = torch.inf
    (weights * features).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert not torch.isfinite(x.grad[1]).all()
    assert torch.isfinite(x.grad[0]).all()


@pytest.mark.parametrize("tol", [0.3, 0.01, 1e-4])
def test_a_system_that_was_solved_loosely_gives_its_tolerance(tol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system for the features has another right side than that for the state: they agree to the tolerance."""
    (case,) = by_name("opteq-tanh")
    wanted, _ = gradients(case, opteq.Implicit(tol=1e-12))
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)
    found, report = gradients(case, opteq.Implicit(tol=tol))
    assert float(report.residual.max()) <= tol
    for own, other in zip(found, wanted, strict=True):
        assert own is not None
        assert other is not None
        assert float((own - other).norm() / other.norm()) < 3 * tol


class Ridged(opteq.OptEq):
    """OptEq with 0.15 |y|^2 more in its objective."""

    def bind(self, x: Tensor) -> BoundOptEq:
        return BoundRidged(self, super().bind(x).block)


class BoundRidged(BoundOptEq):
    def __init__(self, problem: opteq.OptEq, block: Block) -> None:
        super().__init__(problem, block)
        self.contracts = self.has_merit = False

    def preactivation(self, y: State) -> Tensor:
        return super().preactivation(y) - 0.3 * single(y)

    def step(self, y: State) -> State:
        return self.penalty.prox(self.preactivation(y))

    def curvature_at(self, y: State) -> Callable[[State], State]:
        own = super().curvature_at(y)
        return lambda v: single(own(v)) - 0.3 * single(v)

    def linearise(self, y: State) -> SymmetricLinearisation:
        return Hidden.linearise(self, y)


def test_a_problem_made_from_opteq_keeps_its_own_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    problem = Ridged(opteq.operators.Dense(4, 6, bound=0.9), torch.nn.Linear(3, 6), "tanh").double()
    x = torch.randn(5, 3, dtype=torch.float64)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=300), opteq.Implicit(tol=1e-12))

    def found() -> tuple[Tensor, ...]:
        return torch.autograd.grad(blocks(layer(x))[0].square().sum(), list(problem.parameters()))

    wanted = found()
    for module in (replay, adjoint):
        monkeypatch.setattr(module, "usable", lambda inputs: len(inputs) > 0)
    torch.testing.assert_close(found(), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("replays")
def test_nothing_is_attached_where_nothing_wants_a_gradient() -> None:
    (case,) = by_name("opteq-relu")
    problem = case.problem().requires_grad_(False)
    for gradient in GRADIENTS.values():
        solution = opteq.Equilibrium(problem, gradient=gradient).solve(case.input())
        assert not blocks(solution.state)[0].requires_grad
