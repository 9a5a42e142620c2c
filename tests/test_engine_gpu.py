"""Captured solves and backward passes against the plain path, on a GPU."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import opteq
import written
from opteq import operators as op
from opteq.states import blocks
from test_engine import Written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("full_float32"),
]


class Mixed(nn.Module):
    """``f(z, x)`` whose Jacobian has no symmetry: GMRES solves its backward system."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * self.norm(self.conv(z).tanh() + x)


def made(kind: str) -> tuple[opteq.problems.Problem, Tensor]:
    torch.manual_seed(0)

    def W() -> op.Conv2d:
        return op.Conv2d(3, 5, 3, bound=0.9)

    def U() -> nn.Conv2d:
        return nn.Conv2d(2, 5, 3, padding=1)

    problems = {
        "opteq": lambda: opteq.OptEq(W(), U()),
        "tanh": lambda: opteq.OptEq(W(), U(), activation="tanh"),
        "mopteq": lambda: opteq.MOptEq([opteq.Branch(W(), U(), s) for s in (1, 2)], diversity=0.05, smoothing=1.0),
        "popteq": lambda: opteq.POptEq([opteq.Branch(W(), U(), s) for s in (1, 2)], fuse="conv"),
        "geq": lambda: opteq.GEQ(op.Conv2d(5, 8, 3, bound=0.9), nn.Conv2d(2, 8, 3, padding=1),
                                 kernel=opteq.kernels.Gaussian(patch=2, split=8, hidden=8)),
        "deep": lambda: opteq.DeepOptEq([(W(), U()), (W(), U())], alpha=0.8),
        "written": Written,
        "fixed point": lambda: opteq.FixedPoint(Mixed()),
    }  # fmt: skip
    x = torch.randn(4, 2, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    return problems[kind]().to("cuda", memory_format=torch.channels_last), x.requires_grad_()


def flat(tensors: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten() for part in blocks(tensors)])


def called(layer: opteq.Equilibrium, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features, and the gradients of a function of them by input and weights."""
    z = flat(layer(x))
    weights = torch.linspace(0, 1, len(z), device=z.device)
    return z.detach(), flat(torch.autograd.grad((z * weights).sum(), [x, *layer.parameters()]))


def near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(bool((a - b).norm() < 1e-5 * b.norm()) for a, b in zip(found, expected, strict=True))


KINDS = ["opteq", "tanh", "mopteq", "popteq", "geq", "deep", "written", "fixed point"]


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_agree_and_see_new_weights(kind: str) -> None:
    problem, x = made(kind)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=100))
    with opteq.engine.off():
        expected = called(layer, x)
    for _ in range(4):  # plain, captured, replayed
        assert near(called(layer, x), expected)
    report = opteq.engine.report(layer, x)
    assert "forward: captured CUDA graph" in report
    assert "backward: captured CUDA graph" in report
    assert "functions" not in report
    with torch.no_grad():
        for weight in problem.parameters():
            weight.mul_(1.02)
    with opteq.engine.off():
        moved = called(layer, x)
    assert not near(moved, expected)
    assert near(called(layer, x), moved)
    assert near(called(copy.deepcopy(layer), x), moved)
    with torch.no_grad():
        for _ in range(3):
            assert (flat(layer(x)) - moved[0]).norm() < 1e-5 * moved[0].norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_functions_are_traced_where_there_are_many_channels(low: bool, compiled: bool) -> None:
    """Transposed convolutions become others there, also while a capture is watched."""
    torch.manual_seed(0)
    problem = written.Written(op.Conv2d(16, 16, 3, bound=0.9), nn.Conv2d(16, 16, 3, padding=1)).cuda()
    x = torch.randn(4, 16, 8, 8, device="cuda", requires_grad=True)
    layer = opteq.Equilibrium(problem, compile=compiled)
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        assert opteq.engine.report(layer, x) == "forward: captured CUDA graph\nbackward: captured CUDA graph"


class Rough(opteq.Objective):
    """``1/2 |y - x|^2 + 10 |differences of y|^2``: some 200 steps forward, and 70 backward."""

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        rough = (y[:, 1:] - y[:, :-1]).square().sum(1)
        return {"data": 0.5 * (y - x).square().sum(1), "rough": 10 * rough}


@pytest.mark.parametrize("most", [400, 40])
def test_an_objective_with_default_steps_is_captured(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps are allowed than a graph holds; where they are needed, the plain path goes on."""
    from opteq.engine.cuda_graphs import backend

    monkeypatch.setattr(backend, "_MOST_STEPS", most)
    torch.manual_seed(0)
    layer = opteq.Equilibrium(Rough(), opteq.FISTA(measure="error", tol=1e-7, max_steps=10_000))
    x, cotangent = torch.randn(2, 4, 400, dtype=torch.float64, device="cuda")
    x.requires_grad_()
    eye = torch.eye(400, dtype=torch.float64, device="cuda")
    differences = eye[1:] - eye[:-1]
    exact = torch.linalg.inv(eye + 20 * differences.T @ differences)
    for _ in range(3):
        solution = layer.solve(x)
        assert bool(solution.converged.all())
        assert 100 < int(solution.steps.max()) < 400
        assert (solution.features - x @ exact).norm() < 1e-5 * (x @ exact).norm()
        assert len(solution.report.trace) == int(solution.steps.max()) + 1
        (found,) = torch.autograd.grad(solution.features, x, cotangent)
        assert solution.backward is not None
        assert 40 < int(solution.backward.steps.max()) < 400
        assert (found - cotangent @ exact).norm() < 1e-8 * found.norm()
    # The backward system of the report is another one, of fewer steps.
    expected = "captured CUDA graph" if most == 400 else "plain path: 40 steps are captured, and samples needed more"
    assert f"forward: {expected}" in opteq.engine.report(layer, x)


def test_a_number_of_a_users_module_is_seen() -> None:
    problem, x = made("written")
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=100))
    for _ in range(3):
        layer(x)
    problem.strength = 0.3
    with opteq.engine.off():
        expected = called(layer, x)
    for _ in range(3):
        assert near(called(layer, x), expected)


def test_the_reason_for_the_plain_path_is_told() -> None:
    class Noisy(Written):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return super().smooth(y, x) + 0 * torch.rand(len(y), device=y.device)

    _, x = made("written")
    layer = opteq.Equilibrium(Noisy().to("cuda"), on_failure="ignore")
    assert "draws random numbers" in opteq.engine.report(layer, x)


@pytest.mark.parametrize("kind", ["opteq", "mopteq", "written"])
def test_threads_on_one_stream_do_not_mix(kind: str) -> None:
    """Layers of the same form share graphs and buffers; weights, bounds and inputs of each thread are its own."""
    layers, inputs = [], []
    for number in range(3):
        problem, x = made(kind)
        with torch.no_grad():
            for weight in problem.parameters():
                weight.mul_(1.2 + 0.3 * number)  # off the kink of min(1, bound / norm)
        layers.append(opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=100)))
        inputs.append((x.detach() + number).requires_grad_())
    with opteq.engine.off():
        expected = [called(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    for layer, x, wanted in zip(layers, inputs, expected, strict=True):
        for _ in range(3):
            assert near(called(layer, x), wanted)
    assert "forward: captured CUDA graph" in opteq.engine.report(layers[0], inputs[0])
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(50):
            if not near(called(layers[number], inputs[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads take turns within a call
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


def test_forgetting_drops_the_graphs_of_bounds() -> None:
    from opteq.engine.cuda_graphs import bounds

    problem, x = made("opteq")
    problem(x)
    assert bounds._graphs
    opteq.engine.forget()
    assert not bounds._graphs


class Drawn(Written):
    """Its features draw random numbers, and take statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout2d(0.5), nn.BatchNorm2d(3)

    def features(self, y: Tensor) -> Tensor:
        return self.norm(self.drop(self.W.adjoint(y)))


def test_features_with_side_effects_are_those_of_the_plain_path() -> None:
    """A replay would draw the same numbers at every call, and teach its own copies of the statistics."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 8, 8, device="cuda", requires_grad=True)
    made = opteq.Equilibrium(Drawn().cuda(), opteq.Anderson(tol=1e-6, max_steps=100))

    def run() -> tuple[list[Tensor], Tensor]:
        layer, found = copy.deepcopy(made), []
        torch.manual_seed(1)
        for _ in range(4):
            found.append(torch.cat(called(layer, x)))
        return found, flat(tuple(layer.buffers()))

    with opteq.engine.off():
        expected = run()
    found = run()
    for one, other in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()
    assert "draws random numbers" in opteq.engine.report(made, x)
    assert "forward: captured CUDA graph" in opteq.engine.report(made.eval(), x)


@pytest.mark.parametrize("kind", ["popteq", "mopteq"])
def test_parametrised_weights_keep_their_own_bounds_in_evaluation(kind: str) -> None:
    problem, x = made(kind)
    with torch.no_grad():
        for size, branch in zip((2.0, 7.0), problem.branches, strict=True):
            branch.W.weight.mul_(size)
            parametrize.register_parametrization(branch.W, "weight", Scaled())
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6, max_steps=100))
        with opteq.engine.off():
            expected = flat(layer(x))
        for _ in range(4):
            assert (flat(layer(x)) - expected).norm() < 1e-5 * expected.norm()


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 1.0 * weight


def test_precision_may_be_chosen_by_the_newer_flags() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the older flags alone")
    problem, x = made("opteq")
    layer, before = opteq.Equilibrium(problem), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch refuses to read the older flags then
        assert "forward: captured CUDA graph" in opteq.engine.report(layer, x)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_integers_among_features_stay_integers() -> None:
    class Labelled(Written):
        def features(self, y: Tensor) -> tuple[Tensor, Tensor]:
            return y, y.flatten(1).argmax(1)

    x = torch.randn(4, 2, 8, 8, device="cuda")
    layer = opteq.Equilibrium(Labelled().cuda())
    assert [[part.dtype for part in layer(x)] for _ in range(3)] == 3 * [[torch.float32, torch.int64]]


def test_a_capture_needs_little_more_memory_than_the_plain_path() -> None:
    problem = opteq.OptEq(op.Conv2d(16, 16, 3, bound=0.9), nn.Conv2d(16, 16, 3, padding=1)).cuda()
    layer, x = opteq.Equilibrium(problem), torch.randn(64, 16, 64, 64, device="cuda")
    peaks = []
    for _ in range(3):  # plain, captured, replayed
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.25 * peaks[0]
    assert peaks[2] < 0.8 * peaks[0]
