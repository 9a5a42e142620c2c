"""Law 11: on a GPU no step waits for the host. And what works on a CPU gives the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import opteq
from all_cases import CASES
from cases import Case, by_name
from opteq.solvers import Solver
from opteq.states import blocks
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
