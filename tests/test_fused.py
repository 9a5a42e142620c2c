"""The fused kernels against the plain path: the same steps, judgements and answers. Triton's interpreter runs them.

It takes tens of milliseconds for a step of a row, so states are small, and most solves stop after a few steps.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import opteq
from all_cases import CASES
from cases import Case
from compiling import names_compiled
from opteq import operators as op
from opteq import penalties
from opteq.engine.settings import settings as paths
from opteq.solvers import Outcome, Solver, Status
from opteq.solvers.linear.base import LinearSolver
from opteq.solvers.loop import Finish, PlainRun, Run, drive
from opteq.states import Layout, State, blocks, like, map_state, single
from oracles import difference, gradients

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: test_fast_paths_gpu.py", allow_module_level=True)

from opteq.engine.triton.image_anderson import FusedImageAnderson

from opteq.engine.triton import kernels, ledger
from opteq.engine.triton.conjugate_gradients import FusedConjugateGradients
from opteq.engine.triton.fixed_point import FusedAnderson, FusedPlain

# Rows overflow here on purpose, and the interpreter computes with numpy, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PIECE = 512
"""Entries a program here: short, so that small states have several pieces and the interpreter has less to do."""


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "interpreted", True)
        patch.setattr(ledger, "BLOCK", PIECE)
        yield


# ---------------------------------------------------------------------------------------------------------- helpers


def both(
    solver: Solver,
    step: Callable[[State], State],
    start: State,
    watch: Callable[[FusedPlain], None] | None = None,
    **options: object,
) -> tuple[Outcome, Outcome]:
    """The outcome of the plain path, and that of the fused one, of which ``watch`` sees every step."""
    with torch.no_grad():
        plain = solver.open(step, start, **options, keep_inverse=True)
        assert isinstance(plain.run, PlainRun)
        fused = solver.open(step, start, **options, keep_inverse=False)
        assert isinstance(fused.run, FusedPlain)
        drive(plain.run)
        fused.run.begin()
        while fused.run.unfinished().any() and fused.run.book.step < solver.max_steps:
            fused.run.advance()
            if watch is not None:
                watch(fused.run)
        return plain.outcome(), fused.outcome()


def residual_of(step: Callable[[State], State], state: State, floor: float, coupled: bool) -> Tensor:
    """The relative residual from its definition, in float64."""
    here = [part.double() for part in blocks(state)]
    there = [part.double() for part in blocks(step(state))]
    rows = 1 if coupled else len(here[0])
    gap = torch.cat([(b - a).reshape(rows, -1) for a, b in zip(here, there, strict=True)], dim=1)
    size = torch.cat([part.reshape(rows, -1) for part in there], dim=1)
    quotient = gap.norm(dim=1) / size.norm(dim=1).clamp(min=floor)
    return quotient.expand(len(here[0]))


def same(
    plain: Outcome,
    fused: Outcome,
    step: Callable[[State], State],
    *,
    exact: bool,
    near: float,
    coupled: bool = False,
    floor: float = 1e-12,
) -> None:
    """Steps, codes, trace and answer agree; and what is reported is true of the state that is returned."""
    assert fused.codes.tolist() == plain.codes.tolist()
    assert fused.tol == plain.tol
    if exact:
        assert fused.steps.tolist() == plain.steps.tolist()
        assert fused.trace.shape == plain.trace.shape
    else:
        assert (fused.steps - plain.steps).abs().max() <= 1
    common = int(torch.minimum(plain.steps, fused.steps).min()) + 1
    torch.testing.assert_close(
        fused.trace[:common].double(), plain.trace[:common].double(), rtol=near, atol=near, equal_nan=True
    )
    for own, other in zip(blocks(fused.state), blocks(plain.state), strict=True):
        assert own.dtype == other.dtype
        assert own.shape == other.shape
        torch.testing.assert_close(own.double(), other.double(), rtol=near, atol=near, equal_nan=True)
    for outcome in (plain, fused):
        # The best so far: no residual on the way was smaller than that of the answer.
        seen = torch.where(torch.isfinite(outcome.trace), outcome.trace, torch.inf).amin(dim=0)
        torch.testing.assert_close(outcome.residual, seen.to(outcome.residual.dtype), rtol=0, atol=0)
        fine = torch.isfinite(outcome.residual)
        true = residual_of(step, outcome.state, floor, coupled)
        torch.testing.assert_close(outcome.residual[fine].double(), true[fine], rtol=1e-4, atol=1e-12)
        assert ((outcome.residual <= outcome.tol) == (outcome.codes == Status.CONVERGED)).all()


def tanh_map(
    shape: tuple[int, ...], dtype: torch.dtype, slope: float = 0.9, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    """``tanh(A y + b)`` for every sample, with ``|A|`` = slope and a b of its own for each."""
    generator = torch.Generator().manual_seed(seed)
    width = math.prod(shape[1:])
    A = torch.randn(width, width, generator=generator, dtype=torch.float64)
    A = (slope * A / torch.linalg.matrix_norm(A, 2)).to(dtype)
    b = torch.randn(shape[0], width, generator=generator, dtype=torch.float64).to(dtype)

    def step(y: Tensor) -> Tensor:
        return (y.reshape(shape[0], width) @ A.mT + b).tanh().reshape(shape)

    return step


def cosine_map(shape: tuple[int, ...], dtype: torch.dtype, slope: float = 0.7) -> Callable[[Tensor], Tensor]:
    """``slope_i cos(y_i + i)``, entry by entry, with slopes between 0 and ``slope``."""
    width = math.prod(shape[1:])
    place = torch.arange(width, dtype=torch.float64)
    slopes, phases = (slope * torch.rand(width, generator=torch.Generator().manual_seed(1))).to(dtype), place.to(dtype)

    def step(y: Tensor) -> Tensor:
        return (slopes * (y.reshape(shape[0], width) + phases % 3).cos()).reshape(shape)

    return step


NEAR = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


# ------------------------------------------------------------------------------------------------- fixed points


@pytest.mark.parametrize("memory", [1, 2, *(pytest.param(m, marks=pytest.mark.slow) for m in (3, 4, 6, 7)), 5, 8])
def test_anderson_with_every_memory(memory: int) -> None:
    shape = (2, 12)
    step = tanh_map(shape, torch.float64, seed=memory)
    # Every kind of damping comes up: none, a number, one a sample, one a sample that is a view of one number.
    damping = [1.0, 0.7, torch.tensor([0.5, 0.8]), torch.tensor(0.6).expand(2)][memory % 4]
    solver = opteq.Anderson(tol=1e-13, max_steps=memory + 2, memory=memory)  # the ring of columns goes round
    plain, fused = both(solver, step, torch.zeros(shape, dtype=torch.float64), damping=damping)
    assert plain.steps.tolist() == [memory + 2] * 2
    same(plain, fused, step, exact=True, near=1e-7)


@pytest.mark.parametrize("damping", [1.0, 0.6, torch.tensor([0.5, 0.8, 1.0])], ids=["none", "number", "samples"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_iteration(dtype: torch.dtype, damping: float | Tensor) -> None:
    shape = (3, 12)
    step = tanh_map(shape, dtype, slope=0.3)
    plain, fused = both(opteq.Picard(tol=1e-3), step, torch.zeros(shape, dtype=dtype), damping=damping)
    same(plain, fused, step, exact=dtype == torch.float64, near=NEAR[dtype])


@pytest.mark.parametrize("history", ["half", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_anderson_in_every_precision(dtype: torch.dtype, history: str) -> None:
    shape = (2, 12)
    step = tanh_map(shape, dtype, slope=0.4)
    solver = opteq.Anderson(tol=1e-4, damping=0.9, history=history)
    plain, fused = both(solver, step, torch.zeros(shape, dtype=dtype))
    same(plain, fused, step, exact=dtype == torch.float64, near=NEAR[dtype])


@pytest.mark.parametrize("tol", [1e-4, 1e-6])
def test_history_is_half_where_the_tolerance_is_not_tight(tol: float) -> None:
    for dtype, expected in ((torch.float32, tol >= 1e-5), (torch.float64, False)):
        with torch.no_grad():
            run = opteq.Anderson(tol=tol).open(torch.cos, torch.zeros(2, 3, dtype=dtype), keep_inverse=False).run
        assert isinstance(run, FusedAnderson)
        assert run.half == expected
        assert run.residuals[0].dtype == run.moves[0].dtype == (torch.float16 if expected else dtype)


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
def test_rows_that_end_at_different_steps(kind: type[Solver]) -> None:
    """Slopes from 0 to 0.95; the first row starts at its fixed point, the last one is out of steps."""
    slopes = torch.tensor([0.5, 0.0, 0.3, 0.8, 0.95], dtype=torch.float64)[:, None]
    turns = torch.linspace(0.2, 1.0, 6, dtype=torch.float64)

    def step(y: Tensor) -> Tensor:
        return slopes * turns * y + (1 - slopes * turns)  # the fixed point is 1

    start = torch.zeros(5, 6, dtype=torch.float64)
    start[0] = 1
    solver = kind(tol=1e-8, max_steps=7)
    if kind is opteq.Picard:  # points of finished rows are not written any more, but their copies are still due
        plain, fused = both(solver, step, start, damping=torch.tensor([0.9, 1.0, 0.8, 0.3, 0.9]))
        same(plain, fused, step, exact=True, near=1e-9)
        assert (fused.state[0] == 1).all()
    plain, fused = both(solver, step, start)
    same(plain, fused, step, exact=True, near=1e-9)
    assert plain.steps[0] == 0
    assert plain.codes[0] == Status.CONVERGED
    assert plain.codes[-1] == Status.MAX_STEPS
    assert len(set(plain.steps.tolist())) >= 3
    assert (fused.state[0] == 1).all()


def blowing_up(y: Tensor) -> Tensor:
    """A row that contracts, one that overflows, one that turns NaN after some steps, one that is NaN at once."""
    calm, growing, leaving, broken = y.unbind(0)
    return torch.stack([0.1 * calm + 1, growing.square() + 3, (0.9 * leaving - 0.2).sqrt(), broken * torch.nan])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
def test_rows_that_overflow_or_turn_nan(kind: type[Solver], dtype: torch.dtype) -> None:
    start = torch.linspace(1.0, 1.5, 5, dtype=dtype).repeat(4, 1)
    plain, fused = both(kind(tol=1e-6, max_steps=14), blowing_up, start)
    for outcome in (plain, fused):
        assert outcome.codes[[0, 3]].tolist() == [Status.CONVERGED, Status.NON_FINITE]
        assert outcome.codes[1] != Status.CONVERGED
        assert torch.isfinite(outcome.state).all()
        assert outcome.steps[3] == 0
        assert outcome.residual[3] == torch.inf
        seen = torch.where(torch.isfinite(outcome.trace), outcome.trace, torch.inf).amin(dim=0)
        assert (outcome.residual == seen).all()
        assert torch.equal(outcome.state[3], start[3])
    torch.testing.assert_close(fused.state[0], plain.state[0], rtol=1e-4, atol=1e-4)
    if dtype == torch.float64:  # in float32 the squares of a row overflow before the row does
        assert fused.codes.tolist() == plain.codes.tolist()
        assert fused.steps.tolist() == plain.steps.tolist()
        torch.testing.assert_close(fused.state, plain.state, rtol=1e-5, atol=1e-5)


def flat_then_steep(y: Tensor) -> Tensor:
    """Nearly constant steps far out, where two of them tell Anderson to jump a hundred times as far, onto a slope."""
    gap = torch.where(y > 1, -1 - 0.01 * (y - 1), torch.where(y > 0, -0.9 * y - 0.1, -0.1 - 8 * y))
    return y + gap


def with_merit(y: Tensor) -> tuple[Tensor, Tensor]:
    return flat_then_steep(y), (y + 1 / 80).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("merit", [None, with_merit], ids=["residual", "merit"])
def test_a_refused_proposal(merit: Callable[..., object] | None, dtype: torch.dtype) -> None:
    start = torch.tensor([[3.0, 4.0, 5.0], [0.2, 0.3, 0.2]], dtype=dtype)
    unit, refused = [torch.zeros(2, dtype=torch.float64)], torch.zeros(2, dtype=torch.bool)

    def watch(run: FusedPlain) -> None:
        late = run.book.flags[kernels.LATE.value] != 0
        # Columns of half precision are measured against the residual of the point that they start from.
        if dtype == torch.float32:
            assert torch.equal(run.book.numbers[kernels.UNIT.value][late], unit[0][late])
        unit[0] = run.book.numbers[kernels.UNIT.value].clone()
        refused.logical_or_(late)

    solver = opteq.Anderson(tol=1e-5, max_steps=6, memory=2, history="half")
    plain, fused = both(solver, flat_then_steep, start, watch, measured=merit)
    same(plain, fused, flat_then_steep, exact=dtype == torch.float64, near=1e-7 if dtype == torch.float64 else 1e-2)
    assert refused.any()


@dataclass(frozen=True)
class Form:
    """A state with its own strides, and a map whose images may have others."""

    start: State
    step: Callable[[State], State]


def strided(
    shape: tuple[int, ...], dtype: torch.dtype, start: str, image: str, slope: float = 0.9, seed: int = 0
) -> Form:
    """A map on pictures; ``start`` and ``image`` name how they lie in memory."""

    def arrange(picture: Tensor, how: str) -> Tensor:
        if how == "last":
            return picture.contiguous(memory_format=torch.channels_last)
        if how == "odd":  # height innermost
            return picture.transpose(2, 3).contiguous().transpose(2, 3)
        if how == "batch":  # samples side by side: no sample is one run of memory
            return picture.movedim(0, -1).contiguous().movedim(-1, 0)
        if how == "gaps":
            return torch.stack([picture, picture], dim=-1)[..., 0]
        return picture.contiguous()

    plain = tanh_map(shape, dtype, slope, seed)
    return Form(arrange(torch.zeros(shape, dtype=dtype), start), lambda y: arrange(plain(y), image))


@pytest.mark.parametrize(
    ("start", "image", "coupled"),
    [
        ("plain", "plain", True),
        ("last", "last", False),
        ("last", "last", True),
        ("plain", "last", False),
        ("last", "odd", False),
        ("odd", "batch", True),
        ("gaps", "gaps", False),
    ],
)
def test_layouts(start: str, image: str, coupled: bool) -> None:
    form = strided((2, 3, 2, 4), torch.float64, start, image)
    for solver in (opteq.Anderson(tol=1e-8, max_steps=5), opteq.Picard(tol=1e-8, max_steps=4)):
        plain, fused = both(solver, form.step, form.start, coupled=coupled, damping=0.9)
        same(plain, fused, form.step, exact=True, near=1e-8, coupled=coupled)


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
def test_a_start_is_left_as_it_was(kind: type[Solver]) -> None:
    start = torch.full((2, 3), 0.25, dtype=torch.float64)
    with torch.no_grad():
        kind(tol=1e-6).solve(torch.cos, start, keep_inverse=False)
    assert (start == 0.25).all()


@pytest.mark.parametrize("coupled", [False, True], ids=["samples", "coupled"])
@pytest.mark.parametrize("dtypes", [(torch.float64,) * 3, (torch.float32, torch.float64, torch.float16)], ids=str)
def test_tuples(dtypes: tuple[torch.dtype, ...], coupled: bool) -> None:
    shapes = [(2, 5), (2,), (2, 3, 2, 2)]
    maps = [cosine_map(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    start = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))

    def step(y: State) -> State:
        parts = tuple(one(part) for one, part in zip(maps, blocks(y), strict=True))
        pull = sum(part.float().reshape(2, -1).mean(1) for part in blocks(y))
        return tuple(part + (0.1 * pull).to(part.dtype).reshape(-1, *[1] * (part.ndim - 1)) for part in parts)

    damping = torch.tensor([0.7, 0.9])
    exact = dtypes[2] == torch.float64
    for solver in (opteq.Anderson(tol=1e-8, max_steps=5), opteq.Picard(tol=1e-8, max_steps=3)):
        plain, fused = both(solver, step, start, coupled=coupled, damping=damping)
        same(plain, fused, step, exact=exact, near=1e-8 if exact else 0.01, coupled=coupled)
        assert isinstance(fused.state, tuple)


@pytest.mark.parametrize("width", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_widths_around_a_piece(width: int) -> None:
    step = cosine_map((2, width), torch.float64)
    plain, fused = both(opteq.Anderson(tol=1e-7, max_steps=4), step, torch.zeros(2, width, dtype=torch.float64))
    same(plain, fused, step, exact=True, near=1e-7)


def test_several_thousand_entries_in_pieces_as_long_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "BLOCK", 4096)
    step = cosine_map((1, 5003), torch.float32)
    solver = opteq.Anderson(tol=1e-4, memory=3, max_steps=5)
    plain, fused = both(solver, step, torch.zeros(1, 5003))
    same(plain, fused, step, exact=False, near=1e-3)


def test_max_steps_and_an_even_number_of_pieces() -> None:
    step = cosine_map((2, 2 * PIECE), torch.float64, slope=0.99)
    for solver in (opteq.Anderson(tol=1e-14, max_steps=3), opteq.Picard(tol=1e-14, max_steps=3)):
        plain, fused = both(solver, step, torch.zeros(2, 2 * PIECE, dtype=torch.float64))
        same(plain, fused, step, exact=True, near=1e-9)
        assert plain.codes.tolist() == [Status.MAX_STEPS] * 2


@pytest.fixture
def poisoned():
    """Memory that is allocated without a value holds NaN, or the largest whole number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("solver", [opteq.Picard(tol=1e-3), opteq.Anderson(tol=1e-3, max_steps=8)], ids=["plain", "a"])
def test_nothing_is_read_before_it_is_written(solver: Solver, dtype: torch.dtype) -> None:
    """Of the rows, one starts at its fixed point, one is not finite there."""
    assert torch.empty(1).isnan().all()
    slopes = torch.tensor([[0.5], [0.0], [torch.nan]], dtype=dtype)
    start = torch.ones(3, 4, dtype=dtype)
    start[0] = 9
    for damping in (1.0, 0.75):
        plain, fused = both(solver, lambda y: slopes * y + (1 - slopes), start, damping=damping)
        same(plain, fused, lambda y: slopes * y + (1 - slopes), exact=dtype == torch.float64, near=NEAR[dtype])


# --------------------------------------------------------------------------------------- states of 16 bits


SHORT = [torch.bfloat16, torch.float16]


def both_short(
    solver: opteq.Anderson,
    step: Callable[[State], State],
    start: State,
    watch: Callable[[FusedPlain], None] | None = None,
    **options: object,
) -> tuple[Outcome, Outcome]:
    """As ``both``, for a solve that keeps images."""

    def watched(run: FusedPlain) -> None:
        assert isinstance(run, FusedImageAnderson)
        if watch is not None:
            watch(run)

    return both(solver, step, start, watched, **options)


def rounded(step: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A map that is computed in float64, and rounded once."""
    return lambda y: step(y.double()).to(dtype)


@pytest.mark.parametrize("memory", [1, 2, *(pytest.param(m, marks=pytest.mark.slow) for m in (3, 4, 6, 7)), 5, 8])
def test_images_with_every_memory(memory: int) -> None:
    """Long enough for residuals and images to go round more than twice."""
    shape, dtype = (2, 24), SHORT[memory % 2]
    step = rounded(tanh_map(shape, torch.float64, slope=0.98, seed=memory), dtype)
    solver = opteq.Anderson(tol=0.02 if dtype == torch.bfloat16 else 1e-3, max_steps=2 * memory + 6, memory=memory)
    plain, fused = both_short(solver, step, torch.zeros(shape, dtype=dtype))
    same(plain, fused, step, exact=False, near=NEAR[dtype])


@pytest.mark.parametrize("history", ["auto", "half", "full"])
def test_images_are_kept_for_undamped_states_of_16_bits(history: str) -> None:
    def kind(dtype: torch.dtype, damping: float | Tensor = 1.0) -> type[Run]:
        with torch.no_grad():
            solver = opteq.Anderson(tol=1e-4, history=history)
            return type(solver.open(torch.cos, torch.zeros(2, 3, dtype=dtype), damping=damping, keep_inverse=False).run)

    for dtype in SHORT:
        assert kind(dtype) is (FusedAnderson if history == "full" else FusedImageAnderson)
        assert kind(dtype, 0.9) is kind(dtype, torch.tensor([1.0, 0.5])) is FusedAnderson
    assert kind(torch.float32) is FusedAnderson


def test_images_follow_the_steps_of_differences() -> None:
    """On a map whose steps are not at the level of rounding, the same points up to that of the residuals' columns."""
    torch.manual_seed(0)
    step = rounded(cosine_map((3, 40), torch.float64, slope=0.95), torch.float16)
    start = torch.zeros(3, 40, dtype=torch.float16)
    with torch.no_grad():
        traces = [
            opteq.Anderson(tol=2e-3, history=history).solve(step, start, keep_inverse=False).trace
            for history in ("half", "full")
        ]
    assert abs(len(traces[0]) - len(traces[1])) <= 1
    common = min(len(traces[0]), len(traces[1]))
    torch.testing.assert_close(traces[0][:common], traces[1][:common], rtol=0.05, atol=5e-4)


@pytest.mark.parametrize(("memory", "dtype"), [(1, torch.bfloat16), (2, torch.float16), (5, torch.bfloat16)])
@pytest.mark.parametrize("merit", [None, with_merit], ids=["residual", "merit"])
def test_images_and_a_refused_proposal(merit: Callable[..., object] | None, memory: int, dtype: torch.dtype) -> None:
    start = torch.tensor([[3.0, 4.0, 5.0], [0.2, 0.3, 0.2]], dtype=dtype)
    refused = torch.zeros(2, dtype=torch.bool)
    learned = torch.zeros(2, dtype=torch.bool)

    def watch(run: FusedPlain) -> None:
        assert isinstance(run, FusedImageAnderson)
        late = run.book.flags[kernels.LATE.value] != 0
        active = run.unfinished() != 0
        # The step after a refusal is plain, and the one after that knows a difference across the gap.
        learned.logical_or_(refused & active & (run.used[:, : run.memory].sum(1) > 0))
        refused.logical_or_(late & active)
        for row in torch.nonzero(late & active).flatten():
            expected = torch.zeros(run.places)
            expected[(run.book.step - 1) % run.places] = 1
            assert run.weights[row, : run.places].tolist() == expected.tolist()
            assert torch.equal(run.ring[(run.book.step + 1) % 3][0][row], run.images[int(expected.argmax())][0][row])

    solver = opteq.Anderson(tol=1e-3, max_steps=7, memory=memory)
    _, fused = both_short(solver, flat_then_steep, start, watch, measured=merit)
    # After a few such jumps a last digit decides where they lead: the steps to compare with are those of differences.
    _, other = both(replace(solver, history="full"), flat_then_steep, start, measured=merit)
    same(other, fused, flat_then_steep, exact=True, near=NEAR[dtype])
    assert refused.any()
    assert learned.any()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_images_of_rows_that_end_at_different_steps(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.0, 0.3, 0.8, 0.95], dtype=torch.float64)[:, None]
    turns = torch.linspace(0.2, 1.0, 6, dtype=torch.float64)
    step = rounded(lambda y: slopes * turns * y + (1 - slopes * turns), dtype)
    start = torch.zeros(5, 6, dtype=dtype)
    start[0] = 1
    solver = opteq.Anderson(tol=0.02, max_steps=9, memory=2)
    _, fused = both_short(solver, step, start)
    _, other = both(replace(solver, history="full"), step, start)
    same(other, fused, step, exact=True, near=NEAR[dtype])
    assert fused.steps[0] == 0
    assert len(set(fused.steps.tolist())) >= 3
    assert (fused.state[0] == 1).all()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_images_of_rows_that_overflow_or_turn_nan(dtype: torch.dtype) -> None:
    start = torch.linspace(1.0, 1.5, 5).to(dtype).repeat(4, 1)
    plain, fused = both_short(opteq.Anderson(tol=1e-2, max_steps=14), blowing_up, start)
    for outcome in (plain, fused):
        assert outcome.codes[[0, 3]].tolist() == [Status.CONVERGED, Status.NON_FINITE]
        assert outcome.codes[1] != Status.CONVERGED
        assert torch.isfinite(outcome.state).all()
        assert outcome.residual[3] == torch.inf
        assert torch.equal(outcome.state[3], start[3])


@pytest.mark.parametrize("coupled", [False, True], ids=["samples", "coupled"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.float16, torch.bfloat16, torch.float16)], ids=str)
def test_images_of_tuples(dtypes: tuple[torch.dtype, ...], coupled: bool) -> None:
    shapes = [(2, 5), (2,), (2, 3, 2, 2)]
    maps = [rounded(cosine_map(s, torch.float64), dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    start = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))

    def step(y: State) -> State:
        return tuple(one(part) for one, part in zip(maps, blocks(y), strict=True))

    plain, fused = both_short(opteq.Anderson(tol=4e-3, memory=3), step, start, coupled=coupled)
    same(plain, fused, step, exact=False, near=0.02, coupled=coupled)


@pytest.mark.parametrize("size", [1e-4, 1e-12, 1e12])
def test_images_of_any_size(size: float) -> None:
    """Residuals are brought to the range of float16, and differences to that of one."""
    inner = tanh_map((2, 12), torch.float64, slope=0.6)
    step = rounded(lambda y: size * inner(y / size), torch.bfloat16)
    plain, fused = both_short(opteq.Anderson(tol=0.02, floor=1e-37), step, torch.zeros(2, 12, dtype=torch.bfloat16))
    assert (fused.codes == Status.CONVERGED).all()
    assert (fused.steps - plain.steps).abs().max() <= 1
    torch.testing.assert_close(fused.state / size, plain.state / size, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_images_whose_differences_are_dependent(dtype: torch.dtype) -> None:
    """All residuals are multiples of one vector: of their differences only the newest may count."""
    direction = torch.linspace(0.5, 1.0, 8, dtype=torch.float64)

    def exact(y: Tensor) -> Tensor:
        along = (y * direction).sum(1, keepdim=True) / direction.square().sum()
        return (0.7 * along.cos() + 0.2 * along) * direction

    step = rounded(exact, dtype)
    most = [0]

    def watch(run: FusedPlain) -> None:
        assert isinstance(run, FusedImageAnderson)
        most[0] = max(most[0], int(run.used[:, : run.memory].sum(1).max()))

    start = torch.stack([direction, 0 * direction]).to(dtype)
    plain, fused = both_short(opteq.Anderson(tol=2e-3, memory=4, max_steps=12), step, start, watch)
    assert most[0] >= 1
    assert (fused.codes == plain.codes).all()
    assert (fused.steps - plain.steps).abs().max() <= 2
    torch.testing.assert_close(fused.state, plain.state, rtol=0.02, atol=0.02)


def test_images_of_a_map_that_hands_back_its_argument() -> None:
    """A row that stays where it is: its image is its point, in the same memory; and one map that does so in part."""
    drift = torch.tensor([[0.5], [0.0]], dtype=torch.bfloat16)
    calls = [0]

    def step(y: Tensor) -> Tensor:
        calls[0] += 1
        return y.mul_(1) if calls[0] % 2 else drift * y + 1

    with torch.no_grad():
        run = opteq.Anderson(tol=1e-6, max_steps=6).open(step, torch.ones(2, 3).bfloat16(), keep_inverse=False).run
    assert isinstance(run, FusedImageAnderson)
    run.begin()
    for _ in range(4):
        run.advance()
        kept = {image[0].data_ptr() for image in run.images}
        assert not kept & {point[0].data_ptr() for point in run.ring}


# ------------------------------------------------------------------------------- what problems add: merit, projection


def pictures(
    activation: str | penalties.Penalty, dtype: torch.dtype, bound: float | None = 0.9
) -> opteq.problems.hidden.BoundMap:
    torch.manual_seed(3)
    problem = opteq.OptEq(op.Conv2d(2, 3, 3, bound=bound), torch.nn.Conv2d(1, 3, 3, padding=1), activation).to(dtype)
    with torch.no_grad():
        return problem(torch.randn(2, 1, 4, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "merit", "ends"),
    [
        (torch.float64, True, True),
        (torch.float64, True, False),
        (torch.float64, False, True),
        (torch.float64, False, False),
        (torch.float32, True, True),
        (torch.bfloat16, True, False),
    ],
)
def test_merit_and_projection(dtype: torch.dtype, merit: bool, ends: bool) -> None:
    hidden = pictures("relu", dtype, bound=0.97)
    plain, fused = both(
        opteq.Anderson(tol=1e-6, max_steps=9),
        hidden.step,
        hidden.start(),
        measured=hidden.measured if merit else None,
        project=hidden.project,
        interval=hidden.interval if ends else None,
    )
    same(plain, fused, hidden.step, exact=dtype == torch.float64, near=max(NEAR[dtype], 1e-7))
    assert (fused.state >= 0).all()


def test_ends_that_float32_cannot_hold() -> None:
    """-0.3 is -0.30000001 there: a state of float64 clamped to that is outside the penalty's domain."""
    penalty = penalties.ELU(alpha=0.3)
    pull = torch.tensor([[-40.0, -0.2, 0.1, -30.0]], dtype=torch.float64)

    def step(y: Tensor) -> Tensor:
        return penalty.prox(0.9 * y.flip(1) + pull)

    seen: list[Tensor] = []

    def watched(y: Tensor) -> Tensor:
        seen.append(y.clone())
        return step(y)

    options = {"project": penalty.project, "interval": penalty.domain}
    plain, fused = both(opteq.Anderson(tol=1e-9), watched, torch.zeros(1, 4, dtype=torch.float64), **options)
    same(plain, fused, step, exact=True, near=1e-9)
    assert all(torch.isfinite(penalty.value(y)).all() for y in seen)
    # The interpreter passes numbers on in float64: what a compiled kernel would be given is looked at itself.
    for dtype, expected in ((torch.float64, None), (torch.float32, penalty.domain)):
        with torch.no_grad():
            start = torch.zeros(1, 4, dtype=dtype)
            run = opteq.Anderson().open(torch.cos, start, **options, keep_inverse=False).run
        assert isinstance(run, FusedAnderson)
        assert run.interval == expected


def test_a_merit_that_is_a_column() -> None:
    hidden = pictures("tanh", torch.float64)
    assert hidden.measured is not None

    def column(y: State) -> tuple[State, Tensor]:
        image, merit = hidden.measured(y)
        return image, torch.stack([merit, torch.full_like(merit, torch.nan)], dim=1)[:, 0]

    plain, fused = both(opteq.Anderson(tol=1e-9, max_steps=5), hidden.step, hidden.start(), measured=column)
    same(plain, fused, hidden.step, exact=True, near=1e-8)


@pytest.mark.parametrize("kind", [opteq.Picard, opteq.Anderson])
def test_a_fixed_point_at_zero_and_a_floor_below_float32(kind: type[Solver]) -> None:
    start = torch.ones(2, 3, dtype=torch.float64)
    start[1] = 0
    plain, fused = both(kind(tol=1e-6, floor=1e-60), lambda y: 0 * y, start)
    assert fused.codes.tolist() == plain.codes.tolist() == [0, 0]
    assert fused.steps.tolist() == plain.steps.tolist() == [1, 0]
    assert (fused.state == 0).all()
    with torch.no_grad():
        run = kind(floor=1e-60).open(torch.cos, start, keep_inverse=False).run
    assert isinstance(run, FusedPlain)
    assert torch.tensor(run.floor, dtype=torch.float32) > 0


def test_a_tolerance_that_float32_cannot_hold() -> None:
    """Whether a row goes on and what its status says are one question, to the last digit of the tolerance."""
    step = tanh_map((1, 6), torch.float64)
    start = torch.zeros(1, 6, dtype=torch.float64)
    whole = opteq.Picard(tol=1e-12, max_steps=6).solve(step, start)
    for lift in (1 - 1e-9, 1.0, 1 + 1e-9):
        solver = opteq.Picard(tol=float(whole.trace[5, 0]) * lift, max_steps=5)
        with torch.no_grad():
            session = solver.open(step, start, keep_inverse=False)
            drive(session.run)
        assert isinstance(session.run, FusedPlain)
        applied = session.run.book.tol
        assert float(torch.tensor(applied, dtype=torch.float32)) == applied <= solver.tol
        assert applied > (1 - 1e-6) * solver.tol
        done = (session.outcome().codes == Status.CONVERGED).tolist()
        assert done == (session.run.unfinished() == 0).tolist()
        assert not done[0] or session.outcome().residual[0] <= solver.tol


# ------------------------------------------------------------------------------------------------ random shapes


@st.composite
def states(draw: st.DrawFn) -> tuple[Form, torch.dtype]:
    batch, channels = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    ways = st.sampled_from(["plain", "last", "odd", "batch", "gaps"])
    dtype = draw(st.sampled_from(DTYPES))
    shape = (batch, channels, height, width)
    return strided(shape, dtype, draw(ways), draw(ways), slope=0.3, seed=draw(st.integers(0, 99))), dtype


@settings(deadline=None, max_examples=10, derandomize=True, phases=[Phase.generate])  # shrinking would take minutes
@given(
    drawn=states(),
    memory=st.integers(0, 8),
    damping=st.sampled_from([1.0, 0.75, None]),
    history=st.sampled_from(["half", "full"]),
    coupled=st.booleans(),
)
def test_random_states(
    drawn: tuple[Form, torch.dtype], memory: int, damping: float | None, history: str, coupled: bool
) -> None:
    form, dtype = drawn
    assert isinstance(form.start, Tensor)
    own = torch.linspace(0.6, 1.0, len(form.start)) if damping is None else damping
    tol = 1e-6 if dtype == torch.float64 else 0.02
    solver: Solver = opteq.Picard(tol=tol)
    if memory:
        solver = opteq.Anderson(tol=tol, memory=memory, history=history)
    plain, fused = both(solver, form.step, form.start, damping=own, coupled=coupled)
    same(plain, fused, form.step, exact=dtype == torch.float64, near=max(NEAR[dtype], 2e-3), coupled=coupled)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=str)
def test_images_of_answers(dtype: torch.dtype, parts: int) -> None:
    """Whichever step an answer is from: the start, the last one, or one that worse ones followed."""
    rows, width = 6, 5
    turns = torch.linalg.qr(torch.randn(rows, width, width, generator=torch.Generator().manual_seed(2)).double())[0]
    slopes = torch.tensor([0.0, 0.5, 1.5, 4.0, 1.1, 0.9], dtype=torch.float64)[:, None]
    shift = random_rhs(rows, width, seed=3)
    shift[5] = torch.nan
    start = torch.zeros(rows, width, dtype=dtype)

    def one(y: Tensor) -> Tensor:
        turned = (turns @ y.double()[:, :, None])[:, :, 0]
        return (slopes * turned * (1 + turned.square()).clamp(max=3) + shift).to(dtype)

    def step(y: State) -> State:
        return one(y) if isinstance(y, Tensor) else tuple(one(part) for part in y)

    form: State = start if parts == 1 else (start, start.clone())
    ends = set()
    for steps in (1, 4):
        solver = opteq.Anderson(tol=1e-3, max_steps=steps, memory=2)
        with torch.no_grad():
            session = solver.open(step, form, keep_inverse=False, keep_image=True)
            assert isinstance(session.run, FusedAnderson)
            drive(session.run)
            finish = session.run.finish()
            assert finish.image is not None
            wanted = blocks(step(like(form, tuple(finish.point))))
        for image, true in zip(finish.image, wanted, strict=True):
            assert image.dtype == dtype
            close = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(image, true.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), rtol=close, atol=close)
        trace = finish.trace[:, :5]
        ends |= {int(row) - len(trace) + 1 for row in trace.argmin(dim=0)}
        ends |= {"start"} if bool((trace.argmin(dim=0) == 0).any()) else set()
    assert {0, "start"} < ends  # others were from before the last step
    with torch.no_grad():
        assert solver.open(step, form, keep_inverse=False).run.finish().image is None


# ---------------------------------------------------------------------------------------------- conjugate gradients


def solve_linear(
    matrices: Tensor,
    rhs: State,
    tol: float = 1e-9,
    max_steps: int = 40,
    coupled: bool = False,
    added: State | None = None,
) -> tuple[tuple[State, Finish], tuple[State, Finish]]:
    """``A v = rhs`` by the plain path and by the fused one; ``matrices`` is A a row, on states packed as rows."""
    solver = opteq.CG(tol=tol, max_steps=max_steps)
    layout = Layout.of(rhs, coupled)

    def product(v: State) -> State:
        rows = layout.pack(v)
        image = layout.unpack(rows - (matrices.to(rows.dtype) @ rows[:, :, None])[:, :, 0])
        # Products of real problems have strides of their own.
        return map_state(lambda new, old: new.contiguous() if old.ndim < 4 else new, image, v)

    found = []
    with torch.no_grad():
        for session in (
            LinearSolver.open_states(solver, product, rhs, layout, 0.0, added),
            solver.open_states(product, rhs, layout, 0.0, added),
        ):
            drive(session.run)
            finish = session.finish()
            found.append((layout.restore(finish.point), finish))
    assert isinstance(solver.open_states(product, rhs, layout, 0.0).run, PlainRun)  # with a tape, the plain path
    with torch.no_grad():
        assert isinstance(solver.open_states(product, rhs, layout, 0.0).run, FusedConjugateGradients)
    return found[0], found[1]


def spectrum(*rows: Tensor, seed: int = 0) -> Tensor:
    """Symmetric matrices with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for values in rows:
        Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
        made.append(Q @ torch.diag(values) @ Q.mT)
    return torch.stack(made)


def same_linear(pair: tuple[tuple[State, Finish], tuple[State, Finish]], near: float, exact: bool = True) -> None:
    (plain_point, plain), (fused_point, fused) = pair
    assert fused.codes.tolist() == plain.codes.tolist()
    if exact:
        assert fused.steps.tolist() == plain.steps.tolist()
        torch.testing.assert_close(fused.trace, plain.trace, rtol=1e-4, atol=near, equal_nan=True)
    else:
        assert (fused.steps - plain.steps).abs().max() <= 1
    torch.testing.assert_close(fused.residual, plain.residual, rtol=1e-3 if exact else 1.0, atol=near)
    for own, other in zip(blocks(fused_point), blocks(plain_point), strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, rtol=near, atol=near, equal_nan=True)


def random_rhs(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_linear_systems_of_every_kind() -> None:
    n = 8
    ramp = torch.linspace(0.2, 1.8, n, dtype=torch.float64)
    matrices = spectrum(
        ramp,
        torch.logspace(-2, 0, n, dtype=torch.float64),
        ramp - 0.7,  # indefinite
        ramp,
        ramp,
        torch.ones(n, dtype=torch.float64),  # one step
    )
    rhs = random_rhs(6, n)
    rhs[3] = 0
    rhs[4, 2] = torch.nan
    pair = solve_linear(matrices, rhs)
    same_linear(pair, near=1e-6)
    (_, plain), (fused_point, _) = pair
    codes = [Status(code) for code in plain.codes.tolist()]
    assert codes[0] == codes[3] == codes[5] == Status.CONVERGED
    assert codes[2] == Status.INDEFINITE
    assert codes[4] == Status.NON_FINITE
    assert plain.steps[[3, 4, 5]].tolist() == [0, 0, 1]
    assert (blocks(fused_point)[0][3] == 0).all()
    exact = torch.linalg.solve(matrices[0], rhs[0])
    torch.testing.assert_close(blocks(fused_point)[0][0], exact, rtol=1e-7, atol=1e-7)


def test_a_singular_system() -> None:
    values = torch.linspace(0.2, 1.8, 8, dtype=torch.float64) * (torch.arange(8) > 0)
    for _, finish in solve_linear(spectrum(values), random_rhs(1, 8)):
        # Rounding decides whether its curvature falls to zero before its answer has grown out of all proportion.
        assert Status(int(finish.codes)) in (Status.SINGULAR, Status.INDEFINITE)


@pytest.mark.parametrize("size", [1e-300, 1e300], ids=["tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_right_sides_of_any_size(size: float, dtype: torch.dtype) -> None:
    size = size if dtype == torch.float64 else size ** (1 / 8)
    values = torch.linspace(0.2, 1.8, 8, dtype=torch.float64)
    rhs = (random_rhs(2, 8) * torch.tensor([[size], [1.0]], dtype=torch.float64)).to(dtype)
    matrices = spectrum(values, values)
    pair = solve_linear(matrices, rhs, tol=1e-9 if dtype == torch.float64 else 1e-5)
    expected = torch.linalg.solve(matrices, rhs.double())
    for point, finish in pair:
        assert (finish.codes == Status.CONVERGED).all()
        error = (blocks(point)[0].double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert error.max() < (1e-7 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("size", [1e-170, 1e160], ids=["tiny", "huge"])
def test_right_sides_of_several_parts_and_any_size(size: float, coupled: bool) -> None:
    rhs = (size * random_rhs(2, 3), size * random_rhs(2, 4))
    values = torch.linspace(0.2, 1.8, 14 if coupled else 7, dtype=torch.float64)
    matrices = spectrum(values) if coupled else spectrum(values, values)
    (plain_point, plain), (fused_point, fused) = solve_linear(matrices, rhs, coupled=coupled)
    assert fused.codes.tolist() == plain.codes.tolist() == [0] * len(plain.codes)
    for own, other in zip(blocks(fused_point), blocks(plain_point), strict=True):
        torch.testing.assert_close(own / size, other / size, rtol=1e-7, atol=1e-7)


def test_a_singular_system_whose_answer_grows() -> None:
    values = torch.linspace(0.2, 1.0, 6, dtype=torch.float64)
    values[0] = 1e-17
    same_linear(solve_linear(spectrum(values), random_rhs(1, 6), tol=1e-12), near=1e-3)


def test_a_system_that_is_small_is_not_singular() -> None:
    """Its answer is long, but not beside its size, which is counted from zero on."""
    pair = solve_linear(torch.full((2, 1, 1), 1e-14, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))
    same_linear(pair, near=1e-9)
    assert pair[0][1].codes.tolist() == [Status.CONVERGED] * 2


def test_a_product_that_is_not_finite() -> None:
    matrices = spectrum(*[torch.linspace(0.5, 1.5, 5, dtype=torch.float64)] * 2)
    matrices[1, 2, 3] = torch.inf
    (plain_point, plain), (fused_point, fused) = solve_linear(matrices, random_rhs(2, 5))
    assert fused.codes.tolist() == plain.codes.tolist() == [Status.CONVERGED, Status.NON_FINITE]
    assert torch.isfinite(blocks(fused_point)[0]).all()
    torch.testing.assert_close(fused_point, plain_point)


def test_badly_conditioned_systems_and_no_more_steps() -> None:
    pair = solve_linear(spectrum(torch.logspace(-6, 0, 9, dtype=torch.float64)), random_rhs(1, 9), max_steps=4)
    same_linear(pair, near=1e-7)
    assert pair[0][1].codes.tolist() == [Status.MAX_STEPS]


@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 5, 8, 11])
def test_the_best_answer_of_a_solve_that_was_cut_off(max_steps: int) -> None:
    """Residuals rise and fall: the best answer is often from before the directions that are kept."""
    matrices, rhs = spectrum(*[torch.logspace(-5, 0, 12, dtype=torch.float64)] * 6), random_rhs(6, 12)
    _, (point, finish) = solve_linear(matrices, rhs, max_steps=max_steps)
    if 2 < max_steps < 10:
        assert (finish.trace.argmin(dim=0) < max_steps - 1).any()
    torch.testing.assert_close(finish.residual, finish.trace.amin(dim=0), rtol=0, atol=0)
    answer = blocks(point)[0]
    residual = (rhs - (matrices @ answer[:, :, None])[:, :, 0]).norm(dim=1) / rhs.norm(dim=1)
    torch.testing.assert_close(residual, finish.residual, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("max_steps", [5, 6, 7, 12, 13, 30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_solves_in_16_bits(dtype: torch.dtype, max_steps: int) -> None:
    """Answers are sums of more directions than are kept, and have the residuals that are told."""
    values = torch.logspace(-1.5, 0, 24, dtype=torch.float64)
    matrices, rhs = spectrum(*[values] * 3), random_rhs(3, 24, dtype=dtype)
    (_, plain), (point, fused) = solve_linear(matrices, rhs, tol=0.01, max_steps=max_steps)
    assert (fused.steps > 6).all() or max_steps <= 6
    answer = blocks(point)[0].double()
    residual = (rhs.double() - (matrices @ answer[:, :, None])[:, :, 0]).norm(dim=1) / rhs.double().norm(dim=1)
    # Products are rounded, and so is the answer.
    eps = torch.finfo(dtype).eps
    slack = eps * answer.norm(dim=1) / rhs.double().norm(dim=1)
    assert ((residual - fused.residual).abs() < 4 * slack).all()
    assert (fused.residual < 2 * plain.residual + slack).all()


@pytest.mark.parametrize("coupled", [False, True], ids=["samples", "coupled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_systems_on_tuples(dtype: torch.dtype, coupled: bool) -> None:
    picture = random_rhs(2, 3, 2, 2, dtype=dtype).contiguous(memory_format=torch.channels_last)
    rhs = (random_rhs(2, dtype=dtype), random_rhs(2, 5, dtype=dtype), picture)
    width = 36 if coupled else 18
    values = torch.linspace(0.8, 1.2, width, dtype=torch.float64)
    matrices = spectrum(*([values] if coupled else [values, values]))
    tol = {torch.float64: 1e-9}.get(dtype, 1e-3)
    pair = solve_linear(matrices, rhs, tol, coupled=coupled)
    exact = dtype == torch.float64
    # What is added may lie in memory in another order.
    added = map_state(lambda part: part.flip(0).contiguous(), rhs)
    with_more = solve_linear(matrices, rhs, tol, coupled=coupled, added=added)
    same_linear(with_more, near={torch.float64: 1e-8, torch.float32: 2e-3}.get(dtype, 0.03), exact=exact)
    for sums, alone, more in zip(blocks(with_more[1][0]), blocks(pair[1][0]), blocks(added), strict=True):
        near = 2 * torch.finfo(dtype).eps * float(alone.abs().max() + more.abs().max())
        torch.testing.assert_close(sums, alone + more, rtol=0, atol=near)  # a sum of both is rounded once
    same_linear(pair, near={torch.float64: 1e-8, torch.float32: 2e-3}.get(dtype, 0.03), exact=exact)


class Halves:
    """A product with matrices for rows that are halves, each times a power of two: what kernels do, by torch."""

    in_use = True

    def __init__(self, matrices: Tensor, form: Tensor) -> None:
        self.matrices = matrices
        self.form = form
        self.gain = torch.linspace(0.5, 7, len(form))
        self.given: list[Tensor] = []

    def __call__(self, halves: Tensor, tops: Tensor) -> Tensor:
        rows = len(self.form)
        assert halves.dtype == torch.float16
        assert halves.shape == self.form.shape
        self.given.append(halves.clone())
        own, behind = tops[:rows], tops[rows:]
        torch.testing.assert_close(behind, own * self.gain, rtol=1e-6, atol=0)
        powers = torch.ldexp(torch.ones(rows), 14 - torch.frexp(own).exponent)
        v = halves.double().flatten(1) / powers[:, None]
        assert not bool((v.abs().amax(dim=1) > own * (1 + 2**-10)).any())  # rounding may have added something
        return (v - (self.matrices @ v[:, :, None])[:, :, 0]).float().reshape(self.form.shape)


def solve_by_halves(
    matrices: Tensor, rhs: Tensor, tol: float = 1e-4, max_steps: int = 40, added: Tensor | None = None
) -> tuple[Tensor, Finish, Halves]:
    """``A v = rhs`` with directions that are kept as halves."""
    solver, layout = opteq.CG(tol=tol, max_steps=max_steps), Layout.of(rhs)
    product = Halves(matrices, rhs)

    def wide(v: State) -> State:
        raise AssertionError("a product in float32")

    with torch.no_grad():
        session = solver.open_states(wide, rhs, layout, 0.0, added, product)
        drive(session.run)
        finish = session.finish()
    point = layout.restore(finish.point)
    assert isinstance(point, Tensor)
    return point, finish, product


@pytest.mark.parametrize("count", [4, 24])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_directions_that_are_kept_as_halves(count: int, added: bool) -> None:
    """Few steps, and more than there are places; right sides from very small to very large, zero and not a number."""
    diagonal = torch.linspace(0.05, 1.5, count, dtype=torch.float64)
    matrices = spectrum(*[diagonal] * 6)
    rhs = random_rhs(6, count, dtype=torch.float32)
    rhs *= torch.tensor([1.0, 1e-12, 1e12, 0.0, torch.nan, 3e4])[:, None]
    beside = random_rhs(6, count, dtype=torch.float32, seed=7) if added else None
    point, finish, product = solve_by_halves(matrices, rhs, added=beside)
    good = torch.tensor([0, 1, 2, 5])
    assert finish.codes.tolist() == [0, 0, 0, 0, int(Status.NON_FINITE), 0]
    assert float(finish.residual[good].max()) <= 1e-4
    if beside is not None:
        small = torch.tensor([0, 3])  # whose answer a sum does not hide, nor is hidden by it
        good = torch.tensor([0, 5])
        point = point - beside
        torch.testing.assert_close(point[small[1]], torch.zeros(count), rtol=0, atol=0)
    true = torch.linalg.solve(matrices[good], rhs[good].double())
    left = (matrices[good] @ point[good].double()[:, :, None])[:, :, 0] - rhs[good]
    # What is reported is true of the answer: a direction is what was multiplied, to the last bit.
    told = finish.residual[good] * rhs[good].double().norm(dim=1)
    assert bool((left.norm(dim=1) <= told + 3e-6 * rhs[good].double().norm(dim=1)).all())
    assert float(((point[good] - true).norm(dim=1) / true.norm(dim=1)).max()) < 3e-3
    assert len(product.given) > (6 if count > 6 else 2)
    assert all(bool(each[torch.tensor([0, 1, 2, 3, 5])].isfinite().all()) for each in product.given)


@pytest.mark.usefixtures("poisoned")
def test_directions_of_halves_read_nothing_before_it_is_written() -> None:
    rhs = random_rhs(3, 9, dtype=torch.float32)
    rhs[1] = 0
    matrices = spectrum(*[torch.linspace(0.1, 1.9, 9, dtype=torch.float64)] * 3)
    point, finish, _ = solve_by_halves(matrices, rhs)
    assert finish.codes.tolist() == [0, 0, 0]
    true = torch.linalg.solve(matrices, rhs.double())
    torch.testing.assert_close(point.double(), true, rtol=0, atol=5e-3)


def test_a_product_that_is_not_in_use_is_left_alone() -> None:
    rhs = random_rhs(2, 5, dtype=torch.float32)
    matrices = spectrum(*[torch.linspace(0.5, 1.5, 5, dtype=torch.float64)] * 2)
    product = Halves(matrices, rhs)
    product.in_use = False
    with torch.no_grad():
        session = opteq.CG(tol=1e-5).open_states(
            lambda v: single(v) - (matrices.float() @ single(v)[:, :, None])[:, :, 0],
            rhs, Layout.of(rhs), 0.0, None, product,
        )  # fmt: skip
        drive(session.run)
        finish = session.finish()
    assert not product.given
    assert float(finish.residual.max()) <= 1e-5


def test_right_sides_of_one_number_a_sample() -> None:
    same_linear(solve_linear(torch.tensor([[[0.5]], [[1.5]]], dtype=torch.float64), random_rhs(2)), near=1e-9)


def test_long_right_sides() -> None:
    width = 2 * PIECE + 3
    slopes = torch.linspace(0, 0.8, width, dtype=torch.float64)
    rhs = random_rhs(2, width)
    layout, solver = Layout.of(rhs), opteq.CG(tol=1e-6)
    with torch.no_grad():
        finishes = []
        for opened in (LinearSolver.open_states, opteq.CG.open_states):
            session = opened(solver, lambda v: slopes * v, rhs, layout, 0.0)
            drive(session.run)
            finishes.append(session.finish())
    points = [layout.restore(finish.point) for finish in finishes]
    assert finishes[0].steps.tolist() == finishes[1].steps.tolist()
    torch.testing.assert_close(points[1], points[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(points[1], rhs / (1 - slopes), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned")
def test_linear_systems_read_nothing_before_it_is_written() -> None:
    rhs = random_rhs(3, 4)
    rhs[1] = 0
    rhs[2] = torch.nan
    same_linear(solve_linear(spectrum(*[torch.linspace(0.2, 1.8, 4, dtype=torch.float64)] * 3), rhs), near=1e-9)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_products_are_given_numbers_for_rows_that_have_ended(dtype: torch.dtype) -> None:
    """A product by autograd is looked at by those who search for what is not a number."""
    diagonal = torch.stack([torch.ones(9), torch.logspace(-1, 0, 9), torch.ones(9)]).to(dtype)
    rhs, given = random_rhs(3, 9, dtype=dtype), []
    rhs[2] = 0

    def product(v: State) -> State:
        given.append(blocks(v)[0].clone())
        return v - diagonal * v

    with torch.no_grad():
        session = opteq.CG(tol=1e-3).open_states(product, rhs, Layout.of(rhs), 0.0)
        drive(session.run)
        assert session.finish().steps[1] > 5
    assert all(bool(v.isfinite().all()) for v in given)


# -------------------------------------------------------------------------------------------------- whole layers


NAMES = "opteq-relu opteq-conv opteq-decorrelation written-tuple mopteq-conv geq-conv"


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES.split()], ids=lambda case: case.name)
def test_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Run] = []
    for kind in (FusedPlain, FusedConjugateGradients):
        monkeypatch.setattr(kind, "begin", _noting(kind.begin, made))
    found = []
    for fused in (False, True):
        problem = case.problem()
        layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-3, max_steps=20), on_failure="ignore")
        x = case.input(batch=2).requires_grad_()
        with opteq.fast_paths(fused=fused):
            features = layer(x)
            slopes = gradients(features, [x, *problem.parameters()])
        assert bool(made) == fused
        report, _ = layer.last or (None, None)
        assert report is not None
        found.append(
            ([part.detach() for part in blocks(features)], slopes, report.steps.tolist(), report.codes.tolist())
        )
    plain, fast = found
    assert difference(fast[0], plain[0]) < 1e-10
    assert difference(fast[1], plain[1]) < 1e-7
    assert fast[2:] == plain[2:]


def _noting(begin: Callable[[Run], None], made: list[Run]) -> Callable[[Run], None]:
    def wrapped(run: Run) -> None:
        made.append(run)
        begin(run)

    return wrapped


# ---------------------------------------------------------------------------------------- where they are not used


def test_the_plain_path_is_taken_where_kernels_cannot_be() -> None:
    start = torch.zeros(2, 3)

    def run(solver: Solver, start: Tensor = start) -> Run:
        return solver.open(torch.cos, start, keep_inverse=False).run

    assert isinstance(run(opteq.Anderson()), PlainRun)  # a tape may be wanted
    with torch.no_grad():
        assert isinstance(run(opteq.Anderson()), FusedAnderson)
        assert isinstance(run(opteq.Anderson(memory=9)), PlainRun)
        assert isinstance(run(opteq.Broyden()), PlainRun)
        assert isinstance(run(opteq.Anderson(), start[:0]), PlainRun)
        assert isinstance(run(opteq.Picard(), start[:, :0]), PlainRun)
        assert isinstance(opteq.Anderson().open(torch.cos, start).run, PlainRun)  # its estimate of J is wanted
        with opteq.fast_paths(fused=False):
            assert isinstance(run(opteq.Anderson()), PlainRun)
        kept = torch.func.vmap(lambda y: opteq.Picard().solve(torch.cos, y, keep_inverse=False).state)(start[:, None])
        assert kept.shape == (2, 1, 3)


def test_more_pieces_than_one_program_can_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MOST_PARTS", 2)
    with torch.no_grad():
        runs = [
            solver.open(torch.cos, torch.zeros(1, width), keep_inverse=False).run
            for width in (2 * PIECE, 2 * PIECE + 1)
            for solver in (opteq.Anderson(), opteq.Picard())
        ]
    assert [isinstance(run, PlainRun) for run in runs] == [False, False, True, True]


def test_fast_paths_are_put_back() -> None:
    before = replace(paths)

    def fails() -> None:
        with opteq.fast_paths(fused=False, graphs=False):
            assert (paths.fused, paths.graphs) == (False, False)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert paths == before


# ------------------------------------------------------------------------------------------------------ compilation


COMPILE = """
import sys

import triton.language as tl

from compiling import ptx
from opteq.engine.triton import kernels as k

NUMBERS = "tol floor growth rounding ridge root low high eps".split()
BOOKS = dict.fromkeys("numbers gram scale weights targets units trace lengths".split(), "*fp64")
BOOKS |= dict.fromkeys("flags used held newer older".split(), "*i32")
ENDS = {"NON_FINITE": 2, "INDEFINITE": 3, "SINGULAR": 6}


def build(kernel, capability, wide, state, column, warps, constants):
    wide_pointer = "*fp64" if wide == tl.float64 else "*fp32"
    types = BOOKS | {"sums": wide_pointer, "merits": wide_pointer, "damping": wide_pointer}
    types |= {"residuals": column, "moves": column, "columns": column, "parts": "i32", "column": "i64"}
    types["squares"] = "*fp64"
    types |= dict.fromkeys(NUMBERS, "fp32") | dict.fromkeys("rows width slot place first step".split(), "i32")
    if kernel.__name__.startswith("cg_"):
        types |= dict.fromkeys("rhs added out product direction directions old new".split(), state)
        types |= {"apart": "i64", "lanes": "i32", "paces": wide_pointer}
        types |= dict.fromkeys("tops old_tops new_tops gain".split(), "*fp32")
        state = wide_pointer
    ptx(kernel, capability, dict.fromkeys(kernel.arg_names, state) | types, constants, num_warps=warps)


capability = int(sys.argv[1])
for wide, state, column, half in (
    (tl.float32, "*bf16", "*fp16", True),
    (tl.float64, "*fp64", "*fp64", False),
):
    common = {"WIDE": wide, "HALF": half, "DAMPED": half, "CLAMPED": half, "MERITED": half, "M": 5, "MP": 8, "P": 8}
    common |= {"R": 7, "RP": 8, "SCALED": half, "IMAGED": half}
    for kernel, warps, more in (
        (k.judge, 1, {"NON_FINITE": 2}),
        (k.judge, 1, {"NON_FINITE": 2, "M": 1, "MP": 1}),
        (k.judge_start, 1, {"NON_FINITE": 2, "K": 14}),
        (k.judge_start, 1, {"NON_FINITE": 2, "K": 2, "M": 0, "MP": 1, "HALF": False, "MERITED": False}),
        (k.anderson_observe, 2, {"PIECE": 4096, "BLOCK": 512}),
        (k.anderson_mix, 2, {"BLOCK": 1024}),
        (k.images_begin, 4, {"BLOCK": 2048, "FIRST": True}),
        (k.images_observe, 1, {"PIECE": 2048, "BLOCK": 512}),
        (k.images_observe, 1, {"PIECE": 2048, "BLOCK": 256, "R": 10, "RP": 16}),
        (k.images_judge, 1, {"NON_FINITE": 2}),
        (k.images_judge, 4, {"NON_FINITE": 2, "M": 8, "MP": 8, "R": 10, "RP": 16, "P": 1024, "MERITED": False}),
        (k.images_judge, 1, {"NON_FINITE": 2, "M": 1, "MP": 1, "R": 3, "RP": 4}),
        (k.images_mix, 2, {"BLOCK": 1024}),
        (k.images_mix, 2, {"BLOCK": 1024, "R": 10, "RP": 16}),
        (k.plain_observe, 8, {"K": 14, "BLOCK": 4096, "NON_FINITE": 2, "START": True, "DAMPED": False}),
        (k.plain_observe, 8, {"K": 2, "BLOCK": 4096, "NON_FINITE": 2, "START": False}),
        (k.keep, 8, {"BLOCK": 4096, "SAVED": False, "FINITE": False}),
        (k.keep, 8, {"BLOCK": 4096, "SAVED": True, "FINITE": True}),
        (k.summarise, 1, {"BLOCK": 128, "CONVERGED": 0, "MAX_STEPS": 1}),
        (k.cg_squares, 8, {"BLOCK": 4096}),
        (k.cg_begin, 8, {"BLOCK": 4096, "NON_FINITE": 2, "FIRST": True, "SQUARED": half}),
        (k.cg_curvature, 8, {"BLOCK": 4096}),
        (k.cg_update, 8, {"BLOCK": 4096, "FIRST": True, "SQUARED": half, "START": half, "NARROW": half}),
        (k.cg_judge, 1, ENDS),
        (k.cg_direction, 8, {"BLOCK": 4096, "FOLD": half, "AGAIN": half, "KEPT": 6}),
        (k.cg_settle, 8, {"BLOCK": 4096, "ADDED": half, "FOLDED": half, "KEPT": 6}),
    ):
        if half or (capability == 90 and kernel in (k.judge, k.anderson_observe, k.cg_update) and "M" not in more):
            build(kernel, capability, wide, state, column, warps, common | more)
"""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    names = names_compiled(COMPILE, capability, tmp_path)
    jitted = {name for name, value in vars(kernels).items() if hasattr(value, "arg_names") and not name.startswith("_")}
    assert names == {name for name in jitted if not name.startswith("_")} or not jitted
    assert {"judge", "anderson_observe", "anderson_mix", "plain_observe", "keep"} <= names


@pytest.mark.parametrize("rows", [1, 7, 1024, 2500])
def test_flags_are_told(rows: int) -> None:
    from opteq.engine.triton.telling import tell

    flags = (torch.arange(rows, dtype=torch.int32) % 3 == 0).to(torch.int32)
    told = torch.full((rows + 1,), -1, dtype=torch.int32)
    tell(flags, told[:rows])
    assert torch.equal(told[:rows], flags)
    assert told[rows] == -1  # and nothing beyond them
