"""On a GPU: fused kernels and captured graphs give what the plain path gives, batch after batch, weight after weight.

Every test begins with no captured solve. A solve of a form is run as it is the first time, captured the second, and
replayed from then on; so a fourth call has inputs and weights that no capture has seen.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opteq
from all_cases import CASES
from cases import Case, by_name
from opteq._errors import ConvergenceWarning
from opteq._fast import settings
from opteq.operators import conv
from opteq.problems.base import Problem
from opteq.problems.freezing import freeze
from opteq.solvers import Solver, Status, branching, graphs
from opteq.solvers.capture import Workshop
from opteq.solvers.continued import ContinuedSolve
from opteq.solvers.staged import StagedSolve
from opteq.solvers.stages import Stages
from opteq.states import State, blocks
from oracles import difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]

CALLS = 4
NEAR = {torch.float64: (1e-6, 1e-5), torch.float32: (2e-3, 1e-2)}
"""How near answers and gradients are: two solves to one tolerance end at different points within it."""


@pytest.fixture(autouse=True)
def _nothing_captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The paths may take different kernels of a library: they are compared in full precision.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    graphs.forget()
    yield
    graphs.forget()


@dataclass(frozen=True)
class Pass:
    """What a forward and a backward pass gave."""

    features: list[Tensor]
    state: list[Tensor]
    gradients: list[Tensor]
    steps: list[int]
    codes: list[int]
    backward: list[int]


def loss_of(features: State) -> Tensor:
    """A loss whose gradient has no two equal entries."""
    total = torch.zeros((), device=blocks(features)[0].device)
    for part in blocks(features):
        weights = torch.linspace(-1, 1, part.numel(), device=part.device).reshape(part.shape)
        total = total + (part.float() * weights).sum() + part.float().square().sum() / 2
    return total


def run(layer: opteq.Equilibrium, x: Tensor) -> Pass:
    x = x.clone().requires_grad_()
    solution = layer.solve(x)
    parameters = list(layer.parameters())
    slopes = torch.autograd.grad(loss_of(solution.features), [x, *parameters], allow_unused=True)
    slopes = [torch.zeros_like(p) if g is None else g for g, p in zip(slopes, [x, *parameters], strict=True)]
    assert solution.backward is not None
    return Pass(
        [part.detach().double().cpu() for part in blocks(solution.features)],
        [part.detach().double().cpu() for part in blocks(solution.state)],
        [slope.double().cpu() for slope in slopes],
        solution.steps.tolist(),
        solution.report.codes.tolist(),
        solution.backward.codes.tolist(),
    )


def plainly(layer: opteq.Equilibrium, x: Tensor) -> Pass:
    with opteq.fast_paths(fused=False, graphs=False):
        return run(layer, x)


def same(found: Pass, wanted: Pass, dtype: torch.dtype, near: tuple[float, float] | None = None) -> None:
    answer, slope = near or NEAR[dtype]
    assert found.codes == wanted.codes
    assert found.backward == wanted.backward
    # A row whose residual is near the tolerance may need one step more; in float32 columns are kept in half precision.
    slack = 1 if dtype == torch.float64 else 3
    assert all(abs(a - b) <= slack for a, b in zip(found.steps, wanted.steps, strict=True))
    assert difference(found.features, wanted.features) < answer
    assert difference(found.state, wanted.state) < answer
    assert difference(found.gradients, wanted.gradients) < slope


def shake(problem: Problem, seed: int) -> None:
    """New weights, in place, as an optimiser leaves them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in problem.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_((1 + 0.05 * noise).to(parameter.device, parameter.dtype))


def solver_for(dtype: torch.dtype, kind: type[Solver] = opteq.Anderson) -> Solver:
    return kind(tol=1e-9 if dtype == torch.float64 else 1e-4, max_steps=400)


def captured() -> list[Stages]:
    return [solve for solve in graphs._solves.values() if isinstance(solve, Stages)]


@pytest.fixture(params=[True, False], ids=["forks", "host"])
def ends_found_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Stages]:
    """Captured solves whose end the device finds, where it can, or the host."""
    monkeypatch.setattr(settings, "forks", request.param)
    return ContinuedSolve if request.param and branching.available(torch.device("cuda")) else StagedSolve


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_layer_in_training(case: Case, dtype: torch.dtype) -> None:
    problem = case.problem(dtype).cuda()
    layer = opteq.Equilibrium(problem, solver_for(dtype), on_failure="ignore")
    for call in range(CALLS):
        x = case.input(dtype=dtype, seed=call).cuda()
        found = run(layer, x)
        same(found, plainly(layer, x), dtype)
        shake(problem, call)
    if freeze(problem(x)) is not None:
        assert captured()


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson, opteq.Broyden])
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep opteq-decorrelation"), ids=lambda case: case.name)
def test_every_solver(case: Case, kind: type[Solver]) -> None:
    dtype = torch.float64
    problem = case.problem(dtype).cuda()
    layer = opteq.Equilibrium(problem, solver_for(dtype, kind), on_failure="ignore")
    for call in range(CALLS):
        x = case.input(dtype=dtype, seed=call).cuda()
        same(run(layer, x), plainly(layer, x), dtype)
        shake(problem, call)
    assert captured()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain kernels"])
@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "step by step"])
def test_each_fast_path_alone(fused: bool, captures: bool) -> None:
    (case,) = by_name("opteq-conv")
    problem = case.problem().cuda()
    layer = opteq.Equilibrium(problem, solver_for(torch.float64), on_failure="ignore")
    for call in range(CALLS):
        x = case.input(seed=call).cuda()
        with opteq.fast_paths(fused=fused, graphs=captures):
            found = run(layer, x)
        same(found, plainly(layer, x), torch.float64)
    assert bool(captured()) == captures


def test_a_batch_of_another_size_in_between() -> None:
    (case,) = by_name("opteq-conv")
    dtype = torch.float64
    problem = case.problem(dtype).cuda()
    layer = opteq.Equilibrium(problem, solver_for(dtype), on_failure="ignore")
    for call, size in enumerate([4, 4, 4, 2, 4, 2, 2, 1, 4]):
        x = case.input(batch=size, dtype=dtype, seed=call).cuda()
        same(run(layer, x), plainly(layer, x), dtype)
        shake(problem, call)


def test_two_layers_interleaved() -> None:
    dtype = torch.float64
    first, second = by_name("opteq-relu")[0], by_name("opteq-tanh")[0]
    layers = [
        opteq.Equilibrium(case.problem(dtype).cuda(), solver_for(dtype), on_failure="ignore")
        for case in (first, second, first)  # the third has the form of the first, and other weights
    ]
    shake(layers[2].problem, 9)
    for call in range(CALLS):
        inputs = [first.input(dtype=dtype, seed=10 * call + i).cuda().requires_grad_() for i in range(3)]
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        values = [output.detach().clone() for output in outputs]
        slopes = [
            torch.autograd.grad(loss_of(output), [x, *layer.parameters()])
            for layer, x, output in zip(layers, inputs, outputs, strict=True)
        ]
        for layer, x, output, value, own in zip(layers, inputs, outputs, values, slopes, strict=True):
            assert torch.equal(output.detach(), value)  # no later solve has written to an answer
            wanted = plainly(layer, x.detach())
            assert difference([value.cpu()], wanted.features) < 1e-6
            assert difference([slope.cpu() for slope in own], wanted.gradients) < 1e-5
    assert captured()


@pytest.mark.parametrize("name", ["opteq-relu", "opteq-conv", "deep", "mopteq-four"])
def test_a_settled_solve_is_one_graph(name: str, ends_found_by: type[Stages]) -> None:
    """Once a solve has ended at the same step for a while; a batch that ends elsewhere is served all the same."""
    (case,) = (case for case in CASES if case.name == name)
    dtype = torch.float64
    layer = opteq.Equilibrium(case.problem(dtype).cuda(), solver_for(dtype), on_failure="ignore")
    twin = copy.deepcopy(layer)  # shares graphs and buffers with the other one
    shake(twin.problem, 2)
    usual, other = case.input(dtype=dtype, seed=1).cuda(), case.input(dtype=dtype, seed=2).cuda()
    for _ in range(12):
        run(layer, usual)
    assert all(isinstance(solve, ends_found_by) for solve in captured())
    assert all(len(solve.plans) > 1 if isinstance(solve, ContinuedSolve) else solve.whole for solve in captured())
    for x in (usual, 1e-3 * usual, other, usual, usual):
        same(run(layer, x), plainly(layer, x), dtype)
    for seed in range(10):
        x, z = (case.input(dtype=dtype, seed=s).cuda().requires_grad_() for s in (seed, seed + 100))
        first, second = layer(x), twin(z)
        slopes = [
            torch.autograd.grad(loss_of(found), [given, *own.parameters()], allow_unused=True)
            for found, given, own in ((first, x, layer), (second, z, twin))
        ]
        for found, given, own, slope in ((first, x, layer, slopes[0]), (second, z, twin, slopes[1])):
            wanted = plainly(own, given.detach())
            assert difference([part.detach().cpu() for part in blocks(found)], wanted.features) < 1e-6
            some = [(s.cpu(), w) for s, w in zip(slope, wanted.gradients, strict=True) if s is not None]
            assert difference([s for s, _ in some], [w for _, w in some]) < 1e-5


def test_weights_that_change_between_forward_and_another_layers_backward() -> None:
    """A backward pass uses what its own forward pass saw, though the captured solve has served others since."""
    (case,) = by_name("opteq-relu")
    dtype = torch.float64
    layer = opteq.Equilibrium(case.problem(dtype).cuda(), solver_for(dtype), on_failure="ignore")
    other = copy.deepcopy(layer)
    shake(other.problem, 3)
    for call in range(CALLS):
        x = case.input(dtype=dtype, seed=call).cuda().requires_grad_()
        features = layer(x)
        run(other, case.input(dtype=dtype, seed=50 + call).cuda())
        slopes = torch.autograd.grad(loss_of(features), [x, *layer.parameters()])
        wanted = plainly(layer, x.detach())
        assert difference([slope.cpu() for slope in slopes], wanted.gradients) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep opteq-tanh"), ids=lambda case: case.name)
def test_autocast(case: Case, dtype: torch.dtype) -> None:
    problem = case.problem(torch.float32).cuda()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-4, max_steps=100), on_failure="ignore")
    exact = opteq.Equilibrium(copy.deepcopy(problem).double(), opteq.Anderson(tol=1e-10, max_steps=400))
    for call in range(CALLS):
        x = case.input(dtype=torch.float32, seed=call).cuda()
        with torch.autocast("cuda", dtype=dtype):
            found = run(layer, x)
        wanted = plainly(exact, x.double())
        assert found.codes == [int(Status.CONVERGED)] * len(found.codes)
        assert difference(found.features, wanted.features) < 0.05
        assert difference(found.gradients, wanted.gradients) < 0.15
    # Outside of the region the same layer is another form of solve.
    outside = run(layer, x)
    assert difference(outside.features, wanted.features) < 2e-3


def test_a_start_of_ones_own() -> None:
    (case,) = by_name("opteq-conv")
    dtype = torch.float64
    layer = opteq.Equilibrium(case.problem(dtype).cuda(), solver_for(dtype), on_failure="ignore")
    with torch.no_grad():
        for call in range(CALLS):
            x = case.input(dtype=dtype, seed=call).cuda()
            first = layer.solve(x)
            again = layer.solve(x, start=first.state)
            assert again.steps.max() <= 1
            assert difference([again.features.cpu()], [first.features.cpu()]) < 1e-6


def test_channels_last() -> None:
    torch.manual_seed(0)
    dtype = torch.float32
    problem = opteq.OptEq(opteq.operators.Conv2d(8, 12, 3, bound=0.9), torch.nn.Conv2d(4, 12, 3, padding=1)).cuda()
    problem = problem.to(memory_format=torch.channels_last)
    layer = opteq.Equilibrium(problem, solver_for(dtype), on_failure="ignore")
    for call in range(CALLS):
        x = torch.randn(3, 4, 9, 7, device="cuda").contiguous(memory_format=torch.channels_last)
        solution = layer.solve(x)
        assert solution.state.is_contiguous(memory_format=torch.channels_last)
        same(run(layer, x), plainly(layer, x), dtype)
        shake(problem, call)


def test_failures_are_told_alike() -> None:
    (case,) = by_name("opteq-relu")
    problem = case.problem().cuda()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=3), on_failure="ignore")
    for call in range(CALLS):
        x = case.input(seed=call).cuda()
        x[1] = torch.nan
        with torch.no_grad():
            found = layer.solve(x)
            with opteq.fast_paths(fused=False, graphs=False):
                wanted = layer.solve(x)
        assert found.report.codes.tolist() == wanted.report.codes.tolist()
        assert found.report.codes[1] == int(Status.NON_FINITE)
        assert found.steps.tolist() == wanted.steps.tolist()
        torch.testing.assert_close(found.report.trace, wanted.report.trace, rtol=1e-5, atol=1e-8, equal_nan=True)
        torch.testing.assert_close(found.report.residual, wanted.report.residual, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("ends_found_by")
def test_short_and_long_solves_of_one_form() -> None:
    """A captured solve expects the next batch to take as many steps as the last: it must be wrong at no price."""
    (case,) = by_name("opteq-relu")
    dtype = torch.float64
    problem = case.problem(dtype).cuda()
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-9, max_steps=300), on_failure="ignore")
    for call, size in enumerate([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 30.0, 1.0, 0.0, 1.0]):
        # ReLU units that are all off have their equilibrium after one step.
        x = size * case.input(dtype=dtype, seed=call).cuda()
        with torch.no_grad():
            if size == 0:
                problem.U.bias.fill_(-1.0)
            else:
                problem.U.bias.fill_(0.3)
            found = layer.solve(x)
            with opteq.fast_paths(fused=False, graphs=False):
                wanted = layer.solve(x)
        assert found.steps.tolist() == wanted.steps.tolist()
        assert found.report.codes.tolist() == wanted.report.codes.tolist()
        torch.testing.assert_close(found.state, wanted.state, rtol=1e-8, atol=1e-10)
    assert captured()


def test_precision_set_after_a_capture() -> None:
    """A replay knows nothing of settings, so a solve under other ones is another form."""
    (case,) = by_name("opteq-conv")
    layer = opteq.Equilibrium(case.problem(torch.float32).cuda(), solver_for(torch.float32), on_failure="ignore")
    x = case.input(dtype=torch.float32).cuda()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        before = len(graphs._solves)
        assert before == 1
        torch.backends.cudnn.allow_tf32 = True  # the fixture puts it back
        for _ in range(3):
            layer(x)
        assert len(graphs._solves) == 2 * before
        with opteq.fast_paths(fused=False):
            for _ in range(3):
                layer(x)
        assert len(graphs._solves) == 3 * before


def training_step(layer: opteq.Equilibrium, x: Tensor) -> None:
    layer(x).square().mean().backward()
    layer.zero_grad()


def conv_layer(steps: int) -> opteq.Equilibrium:
    torch.manual_seed(0)
    problem = opteq.OptEq(opteq.operators.Conv2d(8, 16, 3, bound=0.99), torch.nn.Conv2d(8, 16, 3, padding=1)).cuda()
    gradient = opteq.Implicit(linear=opteq.CG(tol=1e-30, max_steps=steps))
    return opteq.Equilibrium(problem, opteq.Anderson(tol=1e-30, max_steps=steps), gradient, on_failure="ignore")


def test_memory_does_not_grow_with_the_steps() -> None:
    x = torch.randn(32, 8, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    allocated, reserved = [], []
    for steps in (20, 20, 80):  # the first one warms up
        graphs.forget()
        gc.collect()
        torch.cuda.empty_cache()
        layer = conv_layer(steps)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(CALLS):
            training_step(layer, x)
        torch.cuda.synchronize()
        assert len(captured()) == 2  # forward and backward
        allocated.append(torch.cuda.max_memory_allocated() - before)
        reserved.append(torch.cuda.max_memory_reserved())
        del layer
    # Histories of residuals grow, a few bytes a step and sample; blocks of memory come in units of 2 MiB and more.
    assert allocated[2] <= 1.03 * allocated[1] + 2**20
    assert reserved[2] <= 1.03 * reserved[1] + 2**23


def test_memory_does_not_grow_with_the_calls() -> None:
    x = torch.randn(32, 8, 32, 32, device="cuda")
    layer = conv_layer(10)
    levels = []
    for call in range(24):
        training_step(layer, x)
        torch.cuda.synchronize()
        if call in (15, 23):  # by then every graph is there that will be
            levels.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert levels[0] == levels[1]


def test_forgetting_gives_memory_back() -> None:
    x = torch.randn(32, 8, 32, 32, device="cuda")
    layer = conv_layer(10)
    for _ in range(CALLS):  # whatever else is kept once it was needed
        training_step(layer, x)
    graphs.forget()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(CALLS):
        training_step(layer, x)
    assert captured()
    held = torch.cuda.memory_reserved()
    assert held > before[1]
    graphs.forget()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not captured()
    assert torch.cuda.memory_allocated() <= before[0] + 2**20
    assert torch.cuda.memory_reserved() < held
    training_step(layer, x)  # and all still works
    training_step(layer, x)
    assert captured()


def test_no_more_solves_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_SOLVES", 3)
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem().cuda(), solver_for(torch.float64), on_failure="ignore")
    with torch.no_grad():
        for size in (1, 2, 3, 4, 5, 1):
            for call in range(3):
                x = case.input(batch=size, seed=call).cuda()
                found = layer(x)
                with opteq.fast_paths(fused=False, graphs=False):
                    wanted = layer(x)
                assert difference([found.cpu()], [wanted.cpu()]) < 1e-6
    assert len(graphs._solves) == 3


def test_a_capture_that_fails_warns_once_and_runs_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise RuntimeError("no capture today\nand a long story why")

    monkeypatch.setattr(Workshop, "record", refuse)
    (case,) = by_name("opteq-conv")
    layer = opteq.Equilibrium(case.problem().cuda(), solver_for(torch.float64), on_failure="ignore")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            for call in range(5):
                x = case.input(seed=call).cuda()
                found = layer(x)
                with opteq.fast_paths(fused=False, graphs=False):
                    wanted = layer(x)
                assert difference([found.cpu()], [wanted.cpu()]) < 1e-6
    messages = [str(w.message) for w in caught if "could not be captured" in str(w.message)]
    assert len(tried) == len(messages) == 1
    assert messages[0].endswith("runs step by step: no capture today")


IN_THE_MIDDLE = """
import sys
import warnings

import torch

sys.path.insert(0, {tests!r})
import opteq
from cases import by_name
from opteq.solvers import graphs

(case,) = by_name("opteq-conv")
problem = case.problem().cuda()
layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-9, max_steps=50), on_failure="ignore")
x = case.input().cuda()
bound = type(problem(x))
step, compact = bound.step, bound.compact_form


def waiting(hidden, y):
    float(y.sum())
    return step(hidden, y)


with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bound.step, bound.compact_form = waiting, lambda hidden: None
    answers = [layer(x) for _ in range(4)]
    again = layer(x[:2].repeat(5, *(1,) * (x.ndim - 1)))  # another form, which fails as well
    assert sum("could not be captured" in str(w.message) for w in caught) == 1
    again = layer(x[:2].repeat(5, *(1,) * (x.ndim - 1)))
    bound.step, bound.compact_form = step, compact
    assert sum("could not be captured" in str(w.message) for w in caught) == 2, [str(w.message) for w in caught]
    torch.randn(3, device="cuda")  # random numbers are as usable as before
    graphs.forget()
    wanted = [layer(x) for _ in range(4)]
assert any(solve is not None for solve in graphs._solves.values())
for found in answers:
    torch.testing.assert_close(found, wanted[0], rtol=1e-6, atol=1e-8)
print("fine")
"""


def test_a_capture_that_fails_in_the_middle(tmp_path: Path) -> None:
    """A map that makes the device wait. What was begun is ended, and the next capture succeeds.

    In a process of its own: a capture that is not ended well would spoil the tests that follow.
    """
    script = tmp_path / "waiting.py"
    script.write_text(IN_THE_MIDDLE.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(opteq.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "fine"


def test_first_as_it_is_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Stages] = []
    original = Stages.__init__

    def noting(self: Stages, *arguments: object, **options: object) -> None:
        made.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(Stages, "__init__", noting)
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem().cuda(), opteq.Anderson(tol=1e-2, max_steps=10), on_failure="ignore")
    counts = []
    with torch.no_grad():
        for call in range(4):
            layer(case.input(seed=call).cuda())
            counts.append(len(made))
    assert counts == [0, 1, 1, 1]


@pytest.mark.usefixtures("ends_found_by")
@pytest.mark.parametrize("most", [6, 9, 40])
@pytest.mark.parametrize("name", ["opteq-relu", "opteq-conv"])
def test_batches_that_take_more_and_fewer_steps_in_turn(name: str, most: int) -> None:
    """An end that was expected too early, too late, for a long time, or at the last step: never a wrong answer."""
    (case,) = by_name(name)
    layer = opteq.Equilibrium(case.problem().cuda(), opteq.Anderson(tol=1e-9, max_steps=most), on_failure="ignore")
    hard, easy = case.input(seed=1).cuda(), torch.zeros_like(case.input()).cuda()
    easy[0] = hard[0] * 1e-3
    for x in [hard] * 3 + [easy] * 6 + [hard] + [easy] * 2 + [hard] * 6 + [easy] * 2:
        found = layer.solve(x)
        with opteq.fast_paths(fused=False, graphs=False):
            wanted = layer.solve(x)
        same(run(layer, x), plainly(layer, x), torch.float64)
        assert found.report.codes.tolist() == wanted.report.codes.tolist()
        trace = found.report.trace
        assert torch.isfinite(trace).all()
        for row, steps in enumerate(found.steps.tolist()):
            assert torch.equal(trace[steps:, row], trace[steps, row].expand(len(trace) - steps))
    assert captured()


@pytest.mark.usefixtures("ends_found_by")
@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson, opteq.Broyden])
@pytest.mark.parametrize("fused", [False, True])
def test_an_answer_that_was_read_out_too_early(kind: type[Solver], fused: bool) -> None:
    """What makes an answer may lie in memory in which steps leave something for the next ones."""
    (case,) = by_name("opteq-conv")
    linear = opteq.GMRES(tol=1e-10)
    layer = opteq.Equilibrium(case.problem().cuda(), kind(tol=1e-9), opteq.Implicit(linear=linear), "ignore")
    hard, easy = case.input(seed=1).cuda(), torch.zeros_like(case.input()).cuda()
    easy[0] = hard[0] * 1e-3
    for trusted in (4, 5, 9):  # solves in a row that end at the same step, and then one that does not
        for x in [easy] * trusted + [hard]:
            with opteq.fast_paths(fused=fused):
                found = run(layer, x)
            same(found, plainly(layer, x), torch.float64)
    assert captured()


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 700, 4096, 9001])
def test_compiled_kernels_on_widths_around_a_piece(width: int, dtype: torch.dtype, kind: type[Solver]) -> None:
    """The compiled kernels, raw: what the interpreter checks on a CPU, by the compiler's own arithmetic."""
    generator = torch.Generator().manual_seed(width)
    slopes = (0.8 * torch.rand(width, generator=generator)).to("cuda", dtype)
    phases = torch.rand(width, generator=generator).to("cuda", dtype)
    start = torch.zeros(5, width, dtype=dtype, device="cuda")

    def step(y: State) -> State:
        return slopes * (blocks(y)[0] + phases).cos()

    solver = kind(tol=1e-6 if dtype == torch.float64 else 1e-3, max_steps=60)
    own = torch.tensor([0.6, 0.7, 0.8, 0.9, 1.0], device="cuda")
    for coupled, damping in ((False, own), (True, own), (False, 1.0), (True, 1.0)):
        with torch.no_grad():
            options = {"damping": damping, "coupled": coupled, "interval": (-0.9, 0.9)}
            project = {"project": lambda y: blocks(y)[0].clamp(-0.9, 0.9)}
            found = solver.solve(step, start, **options, **project, keep_inverse=False)
            with opteq.fast_paths(fused=False):
                wanted = solver.solve(step, start, **options, **project)
        assert found.codes.tolist() == wanted.codes.tolist()
        assert (found.steps - wanted.steps).abs().max() <= (0 if dtype == torch.float64 else 2)
        near = {torch.float64: 1e-9, torch.float32: 3e-3}.get(dtype, 0.05)
        torch.testing.assert_close(blocks(found.state)[0], blocks(wanted.state)[0], rtol=near, atol=near)


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
@pytest.mark.parametrize("damping", [1.0, 0.8])
def test_compiled_kernels_give_the_same_digits_every_time(damping: float, kind: type[Solver]) -> None:
    """Whichever program of a row is the last one adds up all sums, in one order, and after all of them are written."""
    generator = torch.Generator().manual_seed(0)
    widths = (20_000, 3_000)
    slopes = [(0.9 * torch.rand(width, generator=generator)).to("cuda", torch.bfloat16) for width in widths]
    start = tuple(torch.zeros(96, width, dtype=torch.bfloat16, device="cuda") for width in widths)
    ends = torch.linspace(0, 3, 96, device="cuda", dtype=torch.bfloat16)[:, None]  # rows end at different steps

    def step(y: State) -> State:
        return tuple(slope * (part + ends).cos() for slope, part in zip(slopes, blocks(y), strict=True))

    solver = kind(tol=0.01, max_steps=40)
    with torch.no_grad():
        first, *others = (solver.solve(step, start, damping=damping, keep_inverse=False) for _ in range(50))
    for other in others:
        assert torch.equal(other.trace, first.trace)
        assert all(torch.equal(a, b) for a, b in zip(blocks(other.state), blocks(first.state), strict=True))


def easy_and_hard() -> tuple[opteq.Equilibrium, Tensor, Tensor]:
    """A layer that warns, after calls that did not fail, an input that does not make it fail, and one that does."""
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem().cuda(), opteq.Anderson(tol=1e-9, max_steps=4))
    hard = case.input(seed=1).cuda()
    easy = torch.zeros_like(hard)
    with torch.no_grad():
        layer.problem.U.bias.fill_(-1.0)  # units that are all off have their equilibrium after one step
    for _ in range(6):
        layer(easy.requires_grad_()).sum().backward()
    return layer, easy, 1e3 * hard


def test_a_failure_is_told_by_the_backward_pass() -> None:
    layer, _, hard = easy_and_hard()
    assert captured()
    features = layer(hard)
    with pytest.warns(ConvergenceWarning, match="no equilibrium within the tolerance"):
        features.sum().backward()


def test_a_failure_is_told_by_the_next_call_or_at_the_end() -> None:
    layer, easy, hard = easy_and_hard()
    with torch.no_grad():
        layer(easy)
        layer(easy)
        layer(hard)
        torch.cuda.synchronize()
        with pytest.warns(ConvergenceWarning, match="no equilibrium within the tolerance"):
            layer(easy)
    other, easy, hard = easy_and_hard()
    with torch.no_grad():
        for _ in range(3):
            other(easy)
        other(hard)
        with pytest.warns(ConvergenceWarning, match="no equilibrium within the tolerance"):
            del other


def test_an_input_that_is_not_finite_is_refused_late_but_is() -> None:
    layer, easy, hard = easy_and_hard()
    hard[1, 2] = torch.nan
    features = layer(hard)
    with pytest.raises(ValueError, match=r"the input of an earlier call has 1 values .* first at index \(1, 2\)"):
        features.sum().backward()
    layer(easy)  # and goes on


def test_who_wants_to_raise_waits() -> None:
    layer, _, hard = easy_and_hard()
    layer.on_failure = "raise"
    with pytest.raises(opteq.ConvergenceError, match="no equilibrium within the tolerance"):
        layer(hard)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("on_failure", ["ignore", "warn"])
@pytest.mark.parametrize("name", ["opteq-relu", "opteq-conv", "opteq-tanh"])
def test_a_training_step_to_a_tolerance_waits_for_nothing(name: str, on_failure: str) -> None:
    if not branching.available(torch.device("cuda")):
        pytest.skip("no forks in graphs here")
    (case,) = by_name(name)
    problem = case.problem(torch.float32).cuda()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-4), opteq.Implicit(tol=1e-4), on_failure)
    x = case.input(dtype=torch.float32).cuda().requires_grad_()
    for _ in range(10):
        loss_of(layer(x)).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(layer(x)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layer.last is not None
    report, slot = layer.last
    assert report.late
    assert slot.report is not None
    assert report.converged.all()
    assert report.trace.shape == (int(report.steps.max()) + 1, len(x))
    assert slot.report.trace.shape == (int(slot.report.steps.max()) + 1, len(x))
    assert (report.trace[-1] <= report.tol).all()


def test_a_fork_goes_where_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not branching.available(device):
        pytest.skip("no forks in graphs here")
    seen = torch.zeros(4, dtype=torch.int32, device=device)

    def piece(place: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            seen[place] += 1
        return graph

    for count in (1, 127, 128, 129, 1000):
        flags = torch.zeros(count, dtype=torch.int32, device=device)
        graph = branching.BranchingGraph(device)
        graph.start.then(piece(0))
        yes, no = graph.start.fork(flags)
        yes.then(piece(1))
        deeper, _ = yes.fork(flags)
        deeper.then(piece(2))
        no.then(piece(3))
        graph.start.then(piece(0))
        graph.finished()
        for place in (None, 0, count // 2, count - 1):
            seen.zero_()
            flags.zero_()
            if place is not None:
                flags[place] = 7
            graph.replay()
            assert seen.tolist() == ([2, 0, 0, 1] if place is None else [2, 1, 1, 0])
    # What the driver refuses is told, and where nothing works nobody is troubled with it.
    with pytest.raises(branching.GraphRefusedError, match="the CUDA driver refused part of a graph: CUDA_ERROR"):
        branching._check(branching._tools(device).driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    monkeypatch.setattr(branching, "_tools", lambda device: (_ for _ in ()).throw(ImportError))
    branching._works.cache_clear()
    assert not branching.available(device)
    branching._works.cache_clear()


@pytest.mark.usefixtures("ends_found_by")
@pytest.mark.parametrize("name", ["opteq-conv", "mopteq-conv"])
def test_what_is_computed_for_an_answer_is_not_relied_upon_by_later_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight turned around for the first answer, which is captured before the first step and may never be read."""
    seen: list[bool] = []

    def faster(key: object, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Tensor:
        if not settings.keeping:
            seen.append(True)
        return second() if seen else first()

    monkeypatch.setattr(conv, "faster", faster)
    (case,) = (case for case in CASES if case.name == name)
    # Not Anderson's steps, which keep the image of an answer: nothing is computed for its features then.
    layer = opteq.Equilibrium(case.problem().cuda(), solver_for(torch.float64, opteq.Picard), on_failure="ignore")
    for call in range(CALLS):
        torch.full((2**20,), torch.nan, device="cuda")  # in memory that is about to be used again
        x = case.input(seed=call).cuda()
        same(run(layer, x), plainly(layer, x), torch.float64)
    assert seen


LOADS = """
import warnings

import torch

warnings.simplefilter("error")
from triton.compiler.compiler import CompiledKernel

load, late = CompiledKernel._init_handles, []


def noted(kernel):
    if kernel.module is None and torch.cuda.is_current_stream_capturing():
        late.append(kernel.metadata.name)
    return load(kernel)


CompiledKernel._init_handles = noted
from opteq_bench.cases import Precision, Shape, layer_problem, random_images
from opteq_bench.contenders import ours

device = torch.device("cuda")
for size, name in (("32,64,32", "bf16"), ("32,64,32", "tf32"), ("48,48,9", "bf16")):
    shape = Shape.parse(size)
    x = random_images(16, (shape.channels, shape.side, shape.side), device).requires_grad_()
    layer = ours(layer_problem(shape, device), Precision(name, device))
    for _ in range(4):
        layer.step(x)
print(late)
"""


@pytest.mark.timeout(280)
def test_no_kernel_is_loaded_while_a_graph_is_captured(tmp_path: Path) -> None:
    """Also those of steps to which the solve before the capture did not come."""
    # A compiler's cache of this process, or of the user, would hide when a kernel is needed for the first time.
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "[]"
