"""The engine without a GPU: taking problems apart, tracing a user's functions, and what it refuses to capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

import opteq
from opteq import operators as op
from opteq.common.override import plain
from opteq.engine.cuda_graphs import backend
from opteq.engine.cuda_graphs.adjoint import AdjointByGraph, attach_adjoint
from opteq.engine.cuda_graphs.capture import capture_lock
from opteq.engine.cuda_graphs.conditional_solve import StepCountPredictor, check_places, stage_lengths
from opteq.engine.cuda_graphs.operations import CaptureCheck, FastOperations
from opteq.engine.flatten import flatten
from opteq.engine.inductor import call_compiled
from opteq.engine.settings import settings
from opteq.engine.trace import Traced
from opteq.engine.traced import traces_of, with_traced_functions
from opteq.engine.values_read import NotFlattenableError
from opteq.problems.hidden import BoundMap
from opteq.solvers import fista
from opteq.solvers.loop import Rule, iterate
from opteq.states import blocks


class Written(opteq.HiddenProblem):
    """OptEq as a user would write it."""

    penalty = "relu"

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.W = op.Conv2d(3, 5, 3, bound=0.9)
        self.U = nn.Conv2d(2, 5, 3, padding=1)
        self.strength = 0.5
        self.extra = (lambda y: (y * bias).flatten(1).sum(1)) if bias is not None else None

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 5, *x.shape[2:])

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        value = -self.strength * self.W.adjoint(y).square().flatten(1).sum(1) - (self.U(x) * y).flatten(1).sum(1)
        return value if self.extra is None else value + self.extra(y)

    def features(self, y: Tensor) -> Tensor:
        return self.W.adjoint(y)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 2, 6, 6, generator=torch.Generator().manual_seed(batch)).double()


def problems() -> dict[str, tuple[opteq.problems.Problem, Tensor]]:
    torch.manual_seed(0)

    def branch(scale: int = 1) -> opteq.Branch:
        return opteq.Branch(op.Conv2d(3, 5, 3, bound=0.9), nn.Conv2d(2, 5, 3, padding=1), scale)

    made = {
        "written": Written(),
        "opteq": opteq.OptEq(op.Conv2d(3, 5, 3, bound=0.9), nn.Conv2d(2, 5, 3, padding=1)),
        "mopteq": opteq.MOptEq([branch(1), branch(2)], diversity=0.1, smoothing=1.0),
        "popteq": opteq.POptEq([branch(), branch()], fuse="conv"),
        "deep": opteq.DeepOptEq([branch(), branch()], alpha=0.7),
        "geq": opteq.GEQ(op.Conv2d(5, 3, 3, bound=0.9), nn.Conv2d(2, 3, 3, padding=1)),
    }
    return {name: (problem.double(), images()) for name, problem in made.items()}


@pytest.mark.parametrize("name", list(problems()))
def test_a_problem_is_put_together_again_with_other_tensors(name: str) -> None:
    problem, x = problems()[name]
    one, other = problem(x), problem(images(2) * 2 - 1)
    flat, others = flatten(one), flatten(other)
    assert flat.structure == others.structure
    assert hash(flat.structure) == hash(others.structure)
    rebuilt: BoundMap = flat.with_tensors(others.tensors)
    for found, expected in zip(blocks(rebuilt.step(other.start())), blocks(other.step(other.start())), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_no_tensor_is_part_of_the_structure() -> None:
    problem = Written().double()
    before = flatten(problem(images())).structure
    problem.strength = 0.4
    assert flatten(problem(images())).structure != before
    problem.strength = 0.5
    assert flatten(problem(images())).structure == before
    problem.eval()
    assert flatten(problem(images())).structure != before


def test_tensors_in_the_cells_of_a_function_are_tensors_of_the_problem() -> None:
    one, other = torch.randn(5, 6, 6).double(), torch.randn(5, 6, 6).double()
    problem = Written(one).double()
    flat = flatten(problem(images()))
    place = next(i for i, tensor in enumerate(flat.originals) if tensor is one)
    swapped = list(flat.tensors)
    swapped[place] = other
    y = torch.rand(2, 5, 6, 6).double()
    difference = flat.with_tensors(swapped).smooth(y) - problem(images()).smooth(y)  # type: ignore[attr-defined]
    torch.testing.assert_close(difference, (y * (other - one)).flatten(1).sum(1))


def test_a_problem_that_holds_a_file_says_why_it_is_not_taken_apart(tmp_path) -> None:
    problem = Written()
    with (tmp_path / "log").open("w") as file:
        problem.log = file
        with pytest.raises(NotFlattenableError, match=r"^Written can't be taken apart: cannot pickle '_io"):
            flatten(problem(images().float()))


def test_traced_functions_compute_the_same_without_what_is_unused() -> None:
    problem = Written().double()
    hidden = problem(images())
    flat, y = flatten(hidden), torch.rand(2, 5, 6, 6).double()
    with torch.no_grad():
        step = Traced(
            lambda fixed, v: [flat.with_tensors(fixed).step(v[0])], flat.tensors, [y], compile_functions=False
        )
        torch.testing.assert_close(step.bind(flat.tensors)([y])[0], hidden.step(y), rtol=0, atol=1e-12)
        fixed = [*flat.tensors, y]

        def product(given: list[Tensor], v: list[Tensor]) -> list[Tensor]:
            return [flat.with_tensors(given[:-1]).linearise(given[-1]).scaled(v[0])]

        found = Traced(product, fixed, [y], compile_functions=False).bind(fixed)([y + 1])[0]
        torch.testing.assert_close(found, hidden.linearise(y).scaled(y + 1), rtol=0, atol=1e-12)
    operations = [node.target for node in step.each.graph.nodes if node.op == "call_function"]
    assert operations.count(torch.ops.aten.convolution.default) == 2  # W' y and W: neither U x nor a third one
    assert torch.ops.aten.sum.dim_IntList not in operations  # the value of the objective is not asked for


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_tracing_in_float32_of_16_bit_products_changes_nothing(low: torch.dtype) -> None:
    y = torch.rand(3, 7).to(low)

    def function(fixed: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        return [torch.func.grad(lambda u: (u.float().square() * 0.3).sum())(v[0]) + fixed[0]]

    traced = Traced(function, [y], [y], compile_functions=False)
    found = traced.bind([y])([y + 1])[0]
    assert found.dtype == low
    torch.testing.assert_close(found, function([y], [y + 1])[0], rtol=0, atol=0)


def test_fast_operations_agree_with_torch() -> None:
    u, weight = torch.randn(2, 5, 6, 7), torch.randn(5, 3, 3, 5)
    with torch.no_grad():
        plain = torch.conv_transpose2d(u, weight, padding=(1, 2))
        with FastOperations():
            fast = torch.conv_transpose2d(u, weight, padding=(1, 2))
    torch.testing.assert_close(fast, plain)


def test_random_numbers_are_not_captured() -> None:
    with pytest.raises(RuntimeError, match="draws random numbers"), CaptureCheck([]):
        torch.rand(2)


class Mixed(nn.Module):
    """``f(z, x)`` whose Jacobian has no symmetry."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * self.conv(z).tanh() + x


class Kept(Written):
    """It writes to a tensor that does not depend on the state, which must not be written to once in every step."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        mean = torch.zeros_like(x[:, 0, 0, 0]).add_(y.flatten(1).mean(1))
        return super().smooth(y, x) + 0.5 * mean.square()


class Normalised(Written):
    """Torch's forward mode through a norm can't be differentiated; its second derivative writes to its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([6, 6])

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return super().smooth(y, x) + 0.1 * nn.functional.silu(self.norm(y)).flatten(1).mean(1)


class Reweighted(Written):
    """Weights without a gradient that depend on the state, as in iteratively reweighted least squares."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = 0.1 / (1 + (y * self.U.bias[:, None, None]).square())
        return super().smooth(y, x) + (weights * (y - self.U(x)).square()).flatten(1).sum(1)


class Viewed(Written):
    """It views a state of vectors as images; the weights of a convolution that is flipped have another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Conv2d(10, 9, 3, padding=1)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        images = y.view(len(y), 10, 3, 6)
        return super().smooth(y, x) + 0.01 * self.more(images).square().flatten(1).sum(1)


class Looked(Written):
    """Numbers from a table, by integers that are computed."""

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        table = self.W.weight.flatten()[:4]
        rows = (x[:, :1] > 0).long() * 2 - -(x[:, :1] > 0.1).long()
        return super().smooth(y, x) + 0.1 * (table[rows] * y).flatten(1).sum(1)


class Padded(Written):
    """A transposed convolution whose output padding is not below its stride."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ConvTranspose2d(5, 3, 3, dilation=2, output_padding=1)

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return super().smooth(y, x) + 0.01 * self.more(y).square().flatten(1).sum(1)


@pytest.mark.parametrize(
    "kind", [Written, Kept, Normalised, Reweighted, Viewed, Looked, Padded, "fixed point", "opteq"]
)
@pytest.mark.usefixtures("traced_at_once")
def test_what_is_captured_solves_and_differentiates_as_the_plain_path(kind: Any) -> None:
    """All of a captured solve but the capture, which needs a GPU: graphs of steps, products and gradients."""
    torch.manual_seed(0)
    made: dict[Any, Callable[[], Any]] = {
        "fixed point": lambda: opteq.FixedPoint(Mixed()),
        "opteq": lambda: opteq.OptEq(op.Conv2d(3, 5, 3, bound=0.9), nn.Conv2d(2, 5, 3, padding=1)),
    }
    problem = (made.get(kind) or kind)().double()
    x = torch.randn(2, 2, 6, 6, dtype=torch.double).requires_grad_()
    hidden, solver = problem(x), opteq.Anderson(tol=1e-12)
    flat = flatten(hidden)
    with torch.no_grad():
        for check in (CaptureCheck(flat.tensors), nullcontext()):  # the first solve is the one that is watched
            with check:
                traced = with_traced_functions(flat, traces_of(flat))
                solve = backend._ForwardSolve(traced, solver, None, False)
                iterate(solve.iteration)
        tensors = solve.tensors(solve.iteration.finish())
    assert traces_of(flat).reason is None
    assert (solve.formulation.task.project is None) == (kind in (Written, "opteq"))  # others have no bottleneck
    state = tree_unflatten(tensors[:-4], solve.facts[0])[0]  # type: ignore[index]
    linear = opteq.Implicit(tol=1e-12)._linear(hidden, state)
    adjoint = AdjointByGraph(flat, state, linear, False, False, 400)
    reached, features = attach_adjoint(adjoint, backend.distinct_features(hidden, state), lambda report: None)
    z = flat_state(reached if features is None else features)
    found = z.detach(), torch.autograd.grad(z.sin().sum(), [x, *problem.parameters()])
    with opteq.engine.off():
        z = opteq.Equilibrium(problem, solver, opteq.Implicit(tol=1e-12))(x)
        expected = flat_state(z).detach(), torch.autograd.grad(z.sin().sum(), [x, *problem.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    z = opteq.Equilibrium(problem, solver, opteq.Implicit(tol=1e-12))(x)  # as a CPU does it
    found = flat_state(z).detach(), torch.autograd.grad(z.sin().sum(), [x, *problem.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def flat_state(tensors: Any) -> Tensor:
    return torch.cat([part.flatten() for part in blocks(tensors)])


def test_stages_and_predictions() -> None:
    assert sum(stage_lengths(Rule(1e-4, 300))) == 300
    assert len(stage_lengths(Rule(1e-4, 300))) < 60
    assert check_places(2, 2) == [2]
    predictor = StepCountPredictor()
    for steps in (5, 7, 7):
        predictor.observe(steps)
    assert predictor.steps == 5
    predictor.observe(6)
    assert predictor.steps == 7


def test_off_and_report_on_a_cpu() -> None:
    layer = opteq.Equilibrium(Written().double())
    assert "traced gradient and curvature" in opteq.engine.report(layer, images())
    unrolled = opteq.Equilibrium(Written().double(), gradient=opteq.Unrolled(2))
    assert "backward: plain path: this gradient does not use the engine" in opteq.engine.report(unrolled, images())
    with opteq.engine.off():
        assert "the engine is off" in opteq.engine.report(layer, images())
    with pytest.raises(TypeError, match=r"takes an opteq.Equilibrium and its input; got Sequential"):
        opteq.engine.report(nn.Sequential(layer), images())


class Busy(opteq.Objective):
    """Normalises, draws, counts, and keeps a tensor with its tape and something that can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(4), nn.Dropout(), []
        self.lock = threading.Lock()

    def start(self, x: Tensor) -> Tensor:
        self.centre = self.drop(self.norm(x))
        self.seen.append(len(x))
        return torch.zeros_like(x)

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y - self.centre).square().sum(1), "rough": 3 * (y[:, 1:] - y[:, :-1]).square().sum(1)}


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_report_leaves_the_layer_as_it_is(on_failure: str) -> None:
    problem = Busy()
    layer = opteq.Equilibrium(problem, opteq.FISTA(max_steps=1), on_failure="ignore")
    x, watched = torch.randn(5, 4, requires_grad=True), []
    layer.register_observer(lambda hidden, state: watched.append(1))
    layer(x)  # the centre has a tape now
    layer.on_failure = on_failure
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    kept, random, last = dict(vars(problem)), torch.get_rng_state(), layer.last
    assert "forward: plain path: Busy can't be taken apart: cannot pickle" in opteq.engine.report(layer, x)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(vars(problem)[name] is value for name, value in kept.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (problem.seen, len(watched), layer.last is last, layer.on_failure) == ([5], 1, True, on_failure)
    assert x.grad is None
    assert problem.norm.weight.grad is None


def test_compiled_steps_of_a_solver_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Inductor makes of a graph is torch's; that the graph and its arguments are right is ours.
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, _, options: graph)
    torch.manual_seed(0)
    wide, narrow = torch.rand(3, 4, 9), torch.rand(8, 4, dtype=torch.float64)
    for merit in (None, torch.rand(4)):
        at = fista.Point(*wide, *narrow)
        arguments = (torch.ones(4), at)
        proposal, step = fista.propose(*arguments)
        torch.testing.assert_close(call_compiled(plain(fista.propose), *arguments), (proposal, step))
        image = proposal + torch.randn(4, 9)
        more = (proposal, image, None if merit is None else merit - 0.1, step, at, 1e-7, 1e-8)
        found, expected = call_compiled(plain(fista.accept), *more), fista.accept(*more)
        torch.testing.assert_close(found[1], expected[1])
        assert isinstance(found[0], fista.Point)
        torch.testing.assert_close(tuple(found[0]), tuple(expected[0]))


class InBackward(torch.autograd.Function):
    """Notes whether its backward pass may use graphs."""

    @staticmethod
    def forward(ctx, x: Tensor, noted: list[bool]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        with capture_lock() as mine:
            ctx.noted.append(mine)
        return gradient, None


def test_threads_use_graphs_one_after_the_other_and_backward_passes_do_not_wait() -> None:
    x = torch.ones(1, requires_grad=True)
    order: list[str] = []
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with capture_lock() as mine:
            assert mine
            began.set()
            go_on.wait(10)
            order.append("first")

    def wait() -> None:
        with capture_lock() as mine:
            assert mine
            order.append("second")

    first, second = threading.Thread(target=hold), threading.Thread(target=wait)
    first.start()
    assert began.wait(10)
    second.start()
    noted: list[bool] = []
    InBackward.apply(x, noted).sum().backward()
    assert noted == [False]
    assert order == []
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert order == ["first", "second"]
    InBackward.apply(x, noted).sum().backward()
    assert noted == [False, True]


def test_off_holds_until_the_last_thread_leaves_it() -> None:
    """Threads that leave in the order in which they came: the first must not switch the engine on for the second."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with opteq.engine.off():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with opteq.engine.off():
        thread.start()
        assert inside.wait(10)
    assert settings.offs
    leave.set()
    thread.join()
    assert not settings.offs
