"""Law 11: on a GPU no step waits for the host. And what works on a CPU gives the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import opteq
from all_cases import CASES
from cases import Case, by_name
from opteq.gradients import Gradient
from opteq.solvers import Solver
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import Finish
from opteq.states import Layout, State, blocks
from oracles import difference, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
NEVER = 10_000
KINDS = {"picard": opteq.Picard, "anderson": opteq.Anderson, "broyden": opteq.Broyden}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "case", by_name("opteq-relu opteq-conv opteq-separable deep written written-tuple"), ids=lambda case: case.name
)
def test_no_step_waits_for_the_host(case: Case, kind: type[Solver]) -> None:
    dtype = torch.float32
    problem = case.problem(dtype).cuda()
    solver = kind(tol=1e-5, max_steps=12, check_every=NEVER)
    linear = opteq.GMRES if case.name == "deep" else opteq.MINRES
    gradient = opteq.Implicit(linear=linear(max_steps=12, check_every=NEVER))
    layer = opteq.Equilibrium(problem, solver, gradient, on_failure="ignore")
    x = case.input(dtype=dtype).cuda().requires_grad_()
    for _ in range(2):  # libraries set themselves up, and bounds are captured, on first use
        sum(part.square().sum() for part in blocks(layer(x))).backward()
    with no_waiting():
        sum(part.square().sum() for part in blocks(layer(x))).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_gpu_gives_what_a_cpu_gives(case: Case, kind: type[Solver]) -> None:
    found = []
    for device in ("cpu", "cuda"):
        problem = case.problem().to(device)
        layer = opteq.Equilibrium(problem, kind(tol=1e-10, max_steps=1000), on_failure="raise")
        x = case.input().to(device).requires_grad_()
        features = layer(x)
        slopes = gradients(tuple(part.cpu() for part in blocks(features)), [x, *problem.parameters()])
        found.append([part.detach().cpu() for part in (*blocks(features), *slopes)])
    assert difference(found[1], found[0]) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep written"), ids=lambda case: case.name)
def test_autocast_on_a_gpu(case: Case, kind: type[Solver], dtype: torch.dtype) -> None:
    problem = case.problem(torch.float32).cuda()
    x = case.input(dtype=torch.float32).cuda().requires_grad_()
    layer = opteq.Equilibrium(problem, kind(tol=1e-5, max_steps=100), on_failure="raise")
    inputs = [x, *problem.parameters()]
    expected = gradients(tuple(part.cpu() for part in blocks(layer(x))), inputs)
    with torch.autocast("cuda", dtype=dtype):
        features = tuple(part.float().cpu() for part in blocks(layer(x)))
    found = gradients(features, inputs)
    assert difference([g.cpu() for g in found], [g.cpu() for g in expected]) < 0.15


def test_peak_memory_does_not_grow_with_the_steps() -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(opteq.operators.Conv2d(8, 16, 3, bound=0.99), torch.nn.Conv2d(8, 16, 3, padding=1)).cuda()
    x = torch.randn(8, 8, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    peaks = []
    for steps in (10, 10, 60):  # the first run warms up
        gradient = opteq.Implicit(linear=opteq.CG(tol=1e-30, max_steps=steps))
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-30, max_steps=steps), gradient, on_failure="ignore")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x).square().mean().backward()
        problem.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] <= 1.02 * peaks[1]


def warm_then_without_waiting(run: Callable[[], object]) -> None:
    for _ in range(2):
        run()
    with no_waiting():
        run()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_step_of_a_raw_solve_waits(kind: type[Solver], dtype: torch.dtype) -> None:
    """With all that a problem can add: a merit, a projection, a damping a sample, several tensors, a coupled batch."""
    start = (torch.zeros(3, 5, dtype=dtype, device="cuda"), torch.zeros(3, 2, 4, 4, dtype=dtype, device="cuda"))
    damping = torch.tensor([0.5, 0.7, 1.0], device="cuda")

    def step(y: State) -> State:
        return tuple(0.5 * part.cos() for part in blocks(y))

    def merit(y: State) -> tuple[State, torch.Tensor]:
        return step(y), sum(part.float().flatten(1).square().sum(1) for part in blocks(y))

    solver = kind(tol=1e-5, max_steps=15, check_every=NEVER)
    for coupled in (False, True):
        warm_then_without_waiting(
            lambda coupled=coupled: solver.solve(
                step,
                start,
                step_and_merit=merit,
                project=lambda y: tuple(part.clamp(min=0) for part in blocks(y)),
                damping=damping,
                coupled=coupled,
            )
        )


@pytest.mark.parametrize("kind", [opteq.CG, opteq.MINRES, opteq.GMRES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_no_step_of_a_linear_solve_waits(kind: type[LinearSolver], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    factor = torch.randn(3, 12, 12, dtype=torch.float64)
    matrices = torch.eye(12) + factor @ factor.mT / 12
    rhs = torch.randn(3, 12, dtype=torch.float64)
    options = {"restart": 5} if kind is opteq.GMRES else {}
    solver = kind(tol=1e-5, max_steps=30, check_every=NEVER, **options)

    def solve(device: str) -> Finish:
        there = matrices.to(device, dtype)
        return solver.solve(lambda v: (there @ v[:, :, None])[:, :, 0], rhs.to(device, dtype))

    on_device, sides = matrices.to("cuda", dtype), rhs.to("cuda", dtype)
    warm_then_without_waiting(lambda: solver.solve(lambda v: (on_device @ v[:, :, None])[:, :, 0], sides))
    expected, found = solve("cpu"), solve("cuda")
    assert found.codes.tolist() == expected.codes.tolist() == [0, 0, 0]
    torch.testing.assert_close(found.point.cpu(), expected.point, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "gradient", [opteq.Phantom(), opteq.OneStep(), opteq.Shine(), opteq.Unrolled(steps=8)], ids=str
)
def test_no_gradient_waits(gradient: Gradient) -> None:
    (case,) = by_name("opteq-conv")
    solver = opteq.Broyden(tol=1e-5, max_steps=12, check_every=NEVER)
    layer = opteq.Equilibrium(case.problem(torch.float32).cuda(), solver, gradient, on_failure="ignore")
    x = case.input(dtype=torch.float32).cuda().requires_grad_()
    warm_then_without_waiting(lambda: layer(x).square().sum().backward())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep"), ids=lambda case: case.name)
def test_half_precision_on_a_gpu(case: Case, kind: type[Solver], dtype: torch.dtype) -> None:
    exact = opteq.Equilibrium(case.problem(), opteq.Anderson(tol=1e-10, max_steps=200))(case.input()).detach()
    problem = case.problem(dtype).cuda()
    x = case.input(dtype=dtype).cuda().requires_grad_()
    layer = opteq.Equilibrium(problem, kind(tol=1e-5, max_steps=100), on_failure="raise")
    features = layer(x)
    assert features.dtype == dtype
    assert difference([features.detach().double().cpu()], [exact]) < 0.08
    features.float().square().sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.usefixtures("full_float32")  # layouts take different kernels
def test_channels_last_on_a_gpu(kind: type[Solver]) -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(opteq.operators.Conv2d(4, 8, 3, bound=0.9), torch.nn.Conv2d(4, 8, 3, padding=1)).cuda()
    layer = opteq.Equilibrium(problem, kind(tol=1e-6, max_steps=200), on_failure="raise")
    x = torch.randn(2, 4, 9, 7, device="cuda")
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        own = x.clone(memory_format=layout).requires_grad_()
        solution = layer.to(memory_format=layout).solve(own)
        solution.features.square().sum().backward()
        assert own.grad is not None
        found.append([solution.state.detach(), solution.features.detach(), own.grad])
    assert found[1][0].is_contiguous(memory_format=torch.channels_last)
    matrix = Layout.of(found[1][0]).pack(found[1][0])
    assert matrix.data_ptr() == found[1][0].data_ptr()  # nothing was copied
    assert difference(found[1], found[0]) < 1e-4
