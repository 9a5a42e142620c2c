"""Users' problems solved in the narrowest tensor of their step, on a CPU: the same answers, where that is safe."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
import written
from opteq import operators as op
from opteq.engine import cpu
from opteq.engine.bottleneck import Bottleneck
from opteq.engine.trace import Traced
from opteq.engine.traced import with_traced_functions
from opteq.problems.hidden import Hidden

pytestmark = pytest.mark.usefixtures("traced_at_once")


class Inside(opteq.HiddenProblem):
    """``-1/2 |s * W'y|^2 - <U x, y>``: between ``W'`` and ``W`` lies a diagonal matrix, the identity at first."""

    penalty = "tanh"

    def __init__(self, bound: float | None = 0.9) -> None:
        super().__init__()
        self.W, self.U = op.Dense(3, 6, bound=bound), nn.Linear(4, 6)
        self.register_buffer("s", torch.ones(3))

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 6)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * (self.s * self.W.adjoint(y)).square().sum(1) - (self.U(x) * y).sum(1)


class Plain(Inside):
    """The same without it."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * self.W.adjoint(y).square().sum(1) - (self.U(x) * y).sum(1)


class Turned(Inside):
    """The same with samples side by side in between: the rows there are none of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(0.2 * torch.randn(3, 6))

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * (self.A @ y.T).square().sum(0) - (self.U(x) * y).sum(1)


class Signed(Inside):
    """What lies between ``W'`` and ``W`` is made of integers, whose values may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.ones(3, dtype=torch.long))

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.25 * (self.W.adjoint(y).square() * self.signs).sum(1) - (self.U(x) * y).sum(1)


class Wide(Plain):
    """Its features are more than its state."""

    def __init__(self) -> None:
        super().__init__()
        self.W = op.Dense(8, 6, bound=0.9)


def images() -> opteq.HiddenProblem:
    return written.Written(op.Conv2d(3, 6, 3, bound=0.9), nn.Conv2d(3, 6, 3, padding=1))


def inputs(problem: nn.Module) -> Tensor:
    return torch.randn(2, 3, 5, 5) if isinstance(problem, written.Written) else torch.randn(2, 4)


def traced(problem: opteq.HiddenProblem, x: Tensor) -> Hidden:
    found = cpu._traces_of(problem(x), "forward")
    assert found is not None
    hidden = with_traced_functions(*found)
    assert isinstance(hidden, Hidden)
    return hidden


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (images, True, True),
        (Plain, True, True),
        (lambda: Plain(None), False, True),
        (Inside, False, False),
        (Wide, False, False),
        (Signed, False, False),
    ],
)
def test_where_there_is_a_bottleneck_the_answers_are_the_same(
    make: Callable[[], opteq.HiddenProblem], forward: bool, backward: bool
) -> None:
    torch.manual_seed(0)
    problem = make().double()
    x = inputs(problem).double().requires_grad_()
    hidden = traced(problem, x)
    assert (hidden.compact_form() is not None) == forward
    reduction = hidden.linearise(hidden.start()).reduction  # type: ignore[union-attr]
    assert (reduction is not None) == backward
    assert reduction is None or not reduction.of_features

    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13), opteq.Implicit(tol=1e-13))

    def both() -> list[Tensor]:
        z = layer(x)
        return [z, *torch.autograd.grad(z.sin().sum(), [x, *problem.parameters()])]

    found = both()
    with opteq.engine.off():
        torch.testing.assert_close(found, both(), rtol=1e-9, atol=1e-11)
    if isinstance(problem, Inside):  # a matrix inside that is the identity no more
        problem.s.copy_(torch.tensor([0.3, -0.9, 0.5]))
        found = both()
        with opteq.engine.off():
            torch.testing.assert_close(found, both(), rtol=1e-9, atol=1e-11)


class Scaled(written.Written):
    """Its features are a multiple of what is at the bottleneck."""

    def features(self, y: Tensor) -> Tensor:
        return -3 * self.W.adjoint(y)


@pytest.mark.parametrize("kind", [opteq.OptEq, written.Written, Scaled])
def test_gradients_of_features_and_of_the_state_add_up(kind: type[opteq.Problem]) -> None:
    torch.manual_seed(0)
    problem = kind(op.Conv2d(3, 6, 3, bound=0.9), nn.Conv2d(3, 6, 3, padding=1)).double()
    x = torch.randn(2, 3, 5, 5).double().requires_grad_()
    implicit = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13), opteq.Implicit(tol=1e-13))
    unrolled = opteq.Equilibrium(problem, opteq.Picard(tol=1e-14, max_steps=300), opteq.Unrolled(150))

    for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, -2.0)):
        found = []
        for layer in (implicit, unrolled):
            solution = layer.solve(x)
            parts = (solution.features.sin().sum(), solution.state.square().sum())  # type: ignore[union-attr]
            loss = sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
            found.append(torch.autograd.grad(loss, [x, *problem.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow), 3, 5])
def test_rows_of_the_bottleneck_are_those_of_samples(batch: int) -> None:
    """Also where there are as many samples as features."""
    torch.manual_seed(0)
    problem, x = Turned().double(), torch.randn(batch, 4, dtype=torch.double)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12), opteq.Implicit(tol=1e-12), on_failure="raise")
    weights = [problem.A, problem.U.weight]
    found = torch.autograd.grad(layer(x).sin().sum(), weights)
    assert len(layer.last[1].report.codes) == batch  # type: ignore[index, union-attr]
    with opteq.engine.off():
        torch.testing.assert_close(found, torch.autograd.grad(layer(x).sin().sum(), weights), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [images, Plain])
def test_the_reported_residual_holds_for_the_state(make: Callable[[], opteq.HiddenProblem]) -> None:
    torch.manual_seed(0)
    problem = make().double()
    x = inputs(problem).double()
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-2))
    start = torch.randn_like(layer.solve(x).state)
    for solution in (layer.solve(x), layer.solve(x, start)):
        hidden, y = problem(x), solution.state
        assert isinstance(y, Tensor)
        image = hidden.step(y)
        true = (image - y).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
        assert (solution.steps > 0).all()
        assert (true <= solution.residual * (1 + 1e-9)).all()
        assert (solution.residual <= 1e-2).all()
    good = layer.solve(x, layer.solve(x).state)  # a start that is the answer already
    assert (good.steps <= 1).all()


def test_halves_are_known_by_random_numbers() -> None:
    torch.manual_seed(0)
    A, s, mask, y = torch.randn(3, 7), torch.ones(3), torch.ones(3, dtype=torch.bool), torch.randn(2, 7)

    def bottleneck(function: Callable[..., Tensor], *fixed: Tensor, like: Tensor = y) -> Bottleneck:
        made = Traced(lambda known, v: [function(v[0], *known)], fixed, [like], compile_functions=False)
        return Bottleneck(made, [*fixed, like])

    square = bottleneck(lambda y, A: 0.5 * (y @ A.T @ A) + 1, A)
    assert (square.homogeneous, square.symmetric) == (True, False)  # with the 1 it is not linear
    assert bottleneck(lambda y, A: -0.5 * (y @ A.T @ A), A).symmetric
    assert not bottleneck(
        lambda y, A, s: (y @ A.T * s) @ A, A, s
    ).symmetric  # the identity at hand, and none in general
    assert not bottleneck(lambda y, A, mask: (y @ A.T * mask) @ A, A, mask).symmetric
    assert not bottleneck(lambda y, A: (y - 1) @ A.T @ A, A).homogeneous
    for function, A in (
        (lambda y, A: y @ A.T @ A + y, A),  # y itself goes past it
        (lambda y, A: y @ A.T @ A, torch.randn(9, 7)),  # it gets wider
        (lambda y, A: A, torch.randn(2, 7)),  # y has no effect
        (lambda y, A: (y @ torch.linalg.cholesky(A).T)[:, :3] @ A[:3], torch.eye(7)),  # no random matrix will do
    ):
        made = bottleneck(function, A)
        assert (made.homogeneous, made.symmetric) == (False, False)
    A = torch.randn(3, 7)
    for low in (torch.float16, torch.bfloat16):
        assert bottleneck(lambda y, A: y @ A.T @ A, A.to(low), like=y.to(low)).symmetric
        assert not bottleneck(lambda y, A, s: (y @ A.T * s) @ A, A.to(low), s.to(low), like=y.to(low)).symmetric


def test_no_random_numbers_are_drawn_and_nothing_stays() -> None:
    torch.manual_seed(0)
    problem, x = Plain(), torch.randn(2, 4)
    state = torch.get_rng_state()
    opteq.Equilibrium(problem)(x)
    assert torch.equal(torch.get_rng_state(), state)
    gc.collect()
    gc.disable()
    try:
        hidden = traced(problem, x)
        hidden.linearise(hidden.start())
        gone = weakref.ref(hidden)
        del hidden
        assert gone() is None
    finally:
        gc.enable()


def test_a_certificate_without_values_holds_for_all_weights() -> None:
    problem = Plain(0.7)
    with torch.no_grad():
        problem.W.weight.mul_(0.1)
    assert problem.certificate().contraction == pytest.approx(0.7**2 * (problem.W.norm().item() / 0.7) ** 2)
    assert problem.to("meta").certificate().contraction == pytest.approx(0.7**2)
    assert Plain(None).to("meta").certificate().contraction is None
    assert Plain(None).to("meta").has_concave_smooth()
    blurred = Blurred()
    assert blurred.certificate().contraction == pytest.approx(0.25, rel=1e-2)
    assert blurred.to("meta").certificate().contraction is None  # its kernel is a buffer


class Blurred(opteq.HiddenProblem):
    penalty = "tanh"

    def __init__(self) -> None:
        super().__init__()
        self.A = op.Blur(torch.full((3, 3), 0.5 / 9))

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * self.A(y).square().flatten(1).sum(1) - (x * y).flatten(1).sum(1)


GEOMETRIES = [{"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"groups": 2, "padding": 1}]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"])
def test_gradients_of_traced_convolutions_are_convolutions(name: str, geometry: dict[str, int]) -> None:
    torch.manual_seed(0)
    function, dims = getattr(torch.nn.functional, name), int(name[-2])
    more = {"output_padding": 1} if "transpose" in name and "stride" in geometry else {}
    weight = torch.randn(4, 4 // geometry.get("groups", 1), *[3] * dims, dtype=torch.double)
    y, v = torch.randn(2, 2, 4, *[6] * dims, dtype=torch.double)

    def slope(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
        return [
            torch.func.grad(lambda y: function(y, fixed[0], **geometry, **more).square().square().sum())(varying[0])
        ]

    def curved(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
        return [torch.func.vjp(lambda y: slope(fixed[:1], [y])[0], fixed[1])[1](varying[0])[0]]

    for derivative, fixed, at in ((slope, [weight], y), (curved, [weight, y], v)):
        made = Traced(derivative, fixed, [at], compile_functions=False)
        torch.testing.assert_close(made.bind(fixed)([at]), derivative(fixed, [at]), rtol=1e-12, atol=1e-10)
        targets = [node.target for node in (*made.once.graph.nodes, *made.each.graph.nodes)]
        assert torch.ops.aten.convolution_backward.default not in targets
        assert [node.target for node in made.each.graph.nodes].count(torch.ops.aten.convolution.default) == 2


def test_solvers_on_features_need_features_that_give_the_state() -> None:
    problem, x = images(), torch.randn(2, 3, 5, 5)
    sam = opteq.Equilibrium(problem, opteq.SAM(regularizer=opteq.regularizers.Ridge()), on_failure="ignore")
    with pytest.raises(ValueError, match=r"Written.*whose features do not determine its state"):
        sam(x)
    sam = opteq.Equilibrium(Plain(), sam.solver, on_failure="ignore")
    state = sam.solve(torch.randn(2, 4)).state
    assert sam.solve(torch.randn(2, 4), state).state.shape == state.shape


class Vectors(opteq.HiddenProblem):
    """OptEq of vectors, as a user would write it."""

    penalty = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(0.12 * torch.randn(12, 4))
        self.U, self.scale = nn.Linear(3, 12), nn.Parameter(torch.tensor(0.7))

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 12)

    def coupling(self, h: Tensor) -> Tensor:
        return 0.5 * h.square()

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -self.coupling(y @ self.W).sum(1) - (y * self.U(x)).sum(1)

    def features(self, y: Tensor) -> Any:
        return y @ self.W


class ScaledFeatures(Vectors):
    def features(self, y: Tensor) -> Tensor:
        return self.scale * (y @ self.W)


class ScaledCoupling(Vectors):
    def coupling(self, h: Tensor) -> Tensor:
        return 0.5 * self.scale * h.square()


class DetachedFeatures(Vectors):
    def features(self, y: Tensor) -> Tensor:
        z = y @ self.W
        return 0.1 * z + 0.9 * z.detach()


class ClampedFeatures(Vectors):
    def features(self, y: Tensor) -> Tensor:
        return (y @ self.W).clamp(-0.2, 0.2)


class SeveralFeatures(Vectors):
    def features(self, y: Tensor) -> tuple[Tensor, ...]:
        return y @ self.W, (y @ self.W).float(), y.sum(1)


class FarAway(Vectors):
    """The coupling is another one where random numbers hardly ever are."""

    def coupling(self, h: Tensor) -> Tensor:
        return nn.functional.huber_loss(h, torch.zeros_like(h), reduction="none", delta=20.0)


class HeldNorm(Vectors):
    """Has a part without derivatives, which has them nowhere in the range of random numbers."""

    def coupling(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.W.norm().clamp(max=3.0)
        return 0.5 * norm * h.square()


class HeldSize(Vectors):
    """The same of the input, which is larger than random numbers."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        size = (x.data.abs().amax(1, keepdim=True) / 20).clamp(min=1)
        return -self.coupling(y @ self.W).sum(1) - (y * self.U(x / size)).sum(1)


class Saturated(Vectors):
    """Measurements above 6 do not count."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        counts = torch.where(x < 6, 1.0, 0.0).sum(1, keepdim=True) / 3 + torch.where(x < 6, 1.0, 0.2)
        kept = torch.cat([counts, counts[:, :1]], dim=1)
        return -0.2 * (kept * (y @ self.W).square()).sum(1) - (y * self.U(x)).sum(1)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(HeldSize, 60), (Saturated, 6), (ScaledFeatures, 1), (ScaledCoupling, 1), (DetachedFeatures, 1),
     (ClampedFeatures, 1), (SeveralFeatures, 1), (FarAway, 60), (HeldNorm, 1)],
)  # fmt: skip
def test_what_random_numbers_do_not_show_takes_no_part(kind: type[Vectors], size: float) -> None:
    torch.manual_seed(0)
    problem = kind().double()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=500), opteq.Implicit(tol=1e-12))
    x = (size * torch.randn(5, 3).double()).requires_grad_()

    def gradients() -> list[Tensor]:
        found = layer(x)
        parts = found if isinstance(found, tuple) else (found,)
        loss = torch.stack([part.double().sum() for part in parts]).sum()
        return list(torch.autograd.grad(loss, [x, *problem.parameters()], materialize_grads=True))

    for _ in range(4):
        on = gradients()
    with opteq.engine.off():
        torch.testing.assert_close(on, gradients(), rtol=1e-8, atol=1e-10)


def test_features_run_on_the_users_module_once_a_call() -> None:
    """So their hooks act, and they may have running statistics."""
    problem = Vectors()
    problem.norm = nn.BatchNorm1d(4)
    problem.features = lambda y: problem.norm(y @ problem.W)  # type: ignore[method-assign]
    calls: list[int] = []
    problem.norm.register_forward_hook(lambda *_: calls.append(1))
    layer = opteq.Equilibrium(problem)
    for count in range(1, 4):
        layer(torch.randn(5, 3)).sum().backward()
        assert int(problem.norm.num_batches_tracked) == len(calls) == count
