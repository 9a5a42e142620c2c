"""A user's objective on a CPU: traced gradients and products give what the plain path gives, and are never stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import opteq
from cases import Jumps, Smoother, TwoParts
from opteq import operators as op
from opteq.engine import log
from opteq.engine.settings import settings
from opteq.engine.trace import Traced

aten = torch.ops.aten
WEIGHT = 0.1
OFFSET = torch.ones(4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Objectives are traced at their first call."""
    monkeypatch.setattr(settings, "calls_before_tracing", 0)
    opteq.engine.forget()
    yield
    opteq.engine.forget()


def weight() -> float:
    return WEIGHT


class Convolved(opteq.HiddenProblem):
    """OptEq on images, as a user would write it."""

    penalty = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(4, 6, 3, padding=1)

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.U(x).detach())

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.5 * self.W.adjoint(y).square().flatten(1).sum(1) - (self.U(x) * y).flatten(1).sum(1)

    def features(self, y: Tensor) -> Tensor:
        return self.W.adjoint(y)


class Weighted(opteq.HiddenProblem):
    """Its numbers are an attribute, one of its class, and one that a function reads from this module."""

    penalty = "relu"
    of_class = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.own = 0.1

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return (self.own + self.of_class + weight()) * y.square().sum(1) - (x * y).sum(1)


class With(opteq.HiddenProblem):
    """A quadratic, and something more."""

    penalty = "relu"

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.more = more

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.1 * y.square().sum(1) - (x * y).sum(1) + self.more(y)


def both_ways(layer: opteq.Equilibrium, x: Tensor, channels_last: bool = False) -> list[Tensor]:
    """Features, and the gradients of input and weights for a cotangent in either layout."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    z = layer(x)
    parts = z if isinstance(z, tuple) else (z,)
    generator = torch.Generator().manual_seed(1)
    arriving = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in parts]
    if channels_last:
        arriving = [part.to(memory_format=torch.channels_last) for part in arriving]
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad(parts, wanted, arriving, allow_unused=True, materialize_grads=True)
    return [part.detach() for part in (*parts, *found)]


def check(layer: opteq.Equilibrium, x: Tensor, channels_last: bool = False, traced: bool = True) -> None:
    """Both paths give the same; the engine took the graphs, if it should."""
    log.clear()
    found = both_ways(layer, x, channels_last)
    for direction in ("forward", "backward"):
        assert log.latest(direction).startswith("traced" if traced else "plain"), log.latest(direction)
    with opteq.engine.off():
        expected = both_ways(layer, x, channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", [Smoother, TwoParts, Jumps, lambda: Jumps("soft_threshold"), Weighted])
def test_traced_objectives_give_what_the_plain_path_gives(kind: Callable[[], opteq.problems.Problem]) -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(kind().double())
    check(layer, torch.randn(3, 4, dtype=torch.float64))
    check(layer, torch.randn(3, 4, dtype=torch.float64))
    check(layer, torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("state_last", [False, True])
@pytest.mark.parametrize("cotangent_last", [False, True])
def test_state_and_cotangent_may_differ_in_layout(state_last: bool, cotangent_last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if state_last else torch.contiguous_format
    layer = opteq.Equilibrium(Convolved().double().to(memory_format=form))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64).to(memory_format=form)
    check(layer, x, cotangent_last)
    check(layer, x, not cotangent_last)
    begin = torch.rand(2, 6, 5, 5, dtype=torch.float64)  # a start in another layout
    with opteq.engine.off():
        expected = layer(x, begin)
    torch.testing.assert_close(layer(x, begin), expected, rtol=1e-8, atol=1e-9)


def test_autocast_has_graphs_of_its_own() -> None:
    torch.manual_seed(0)
    layer, x = opteq.Equilibrium(Convolved()), torch.randn(2, 4, 5, 5)
    full = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
        with opteq.engine.off():
            torch.testing.assert_close(low, layer(x))
    assert low.dtype != full.dtype or not torch.equal(low, full)
    torch.testing.assert_close(layer(x), full, rtol=0, atol=0)


def test_graphs_see_new_weights_and_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    images = opteq.Equilibrium(Convolved().double())
    check(images, x)
    with torch.no_grad():
        images.problem.U.weight.mul_(0.5)
        images.problem.W.weight.data = 0.3 * images.problem.W.weight.data
    check(images, x)
    x = x[:, :, 0, 0]
    layer = opteq.Equilibrium(Weighted())
    check(layer, x)
    before = layer(x)
    layer.problem.own = 0.2
    check(layer, x)
    monkeypatch.setattr(Weighted, "of_class", 0.3)
    check(layer, x)
    monkeypatch.setitem(globals(), "WEIGHT", 0.4)
    check(layer, x)
    torch.testing.assert_close(layer(x), before * 1.6 / (2 * 0.9 + 1), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda y: 1e-3 * (y if float(y.detach().sum()) > 0 else -y).sum(1), "could not be traced"),
        (lambda y: 1e-9 * (torch.rand_like(y) * y).sum(1), "random numbers"),
        (lambda y: (OFFSET * y).sum(1), "neither a parameter, a buffer nor an input"),
        (lambda y: y.clone().add_(1).sum(1), "writes to a tensor"),
    ],
)
def test_what_a_graph_would_not_repeat_runs_plainly(more: Callable[[Tensor], Tensor], why: str) -> None:
    layer = opteq.Equilibrium(With(more))
    x = torch.rand(2, 4, dtype=torch.float64) + 0.5
    found = both_ways(layer, x)  # the reason is found out on the way
    with opteq.engine.off():
        torch.testing.assert_close(both_ways(layer, x), found, rtol=1e-6, atol=1e-8)
    assert why in opteq.engine.report(layer, x)
    check(layer, x, traced=False)


def test_a_number_that_is_made_a_tensor_inside_is_traced() -> None:
    check(opteq.Equilibrium(With(lambda y: (torch.tensor(0.2) * y).sum(1))), torch.rand(2, 4, dtype=torch.float64))


def test_the_first_calls_and_what_is_not_written_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "calls_before_tracing", 1)
    layer, x = opteq.Equilibrium(Weighted()), torch.rand(2, 4)
    layer(x)
    assert "first 1 calls" in log.latest("forward")
    layer(x)
    assert log.latest("forward").startswith("traced")
    built_in = opteq.Equilibrium(opteq.OptEq(op.Dense(3, 4, bound=0.9)))
    assert "only objectives that a user has written" in opteq.engine.report(built_in, x)


def test_signs_of_a_traced_gradient_meet_and_go() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 4), torch.randn(3, 4)

    def step(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
        weight, offset = fixed
        image = -torch.mm(-torch.mm(varying[0], weight), weight.t())
        return [-(-offset + -image), -(2 * image), image]

    traced, y = Traced(step, [a, b], [b], compile_functions=False), torch.randn(3, 4)
    torch.testing.assert_close(traced.bind([a, b])([y]), step([a, b], [y]), rtol=0, atol=0)
    targets = [node.target for node in traced.each.graph.nodes if node.op == "call_function"]
    assert aten.neg.default not in targets
    assert targets.count(aten.mul.Scalar) <= 1  # twice the image
