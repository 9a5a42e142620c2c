"""A bound problem in two parts, structure and tensors: put together again it is the same problem, on any tensors.

And the layouts that fast paths rely on: channels-last pictures give the numbers that others give.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
from all_cases import CASES
from cases import Case, by_name
from opteq import operators as op
from opteq import penalties
from opteq.couplings import Coupling, diversity, heritage, products
from opteq.operators import resample
from opteq.problems.base import Problem
from opteq.problems.freezing import Frozen, freeze
from opteq.problems.hidden import BoundMap
from opteq.problems.linearisation import SymmetricLinearisation
from opteq.problems.mopteq import MOptEq
from opteq.states import State, blocks, map_state

# They hold closures or modules: a user's own problem, an activation that is learned, kernels that are functions.
WHOLE = {"written", "written-tuple", "opteq-linear", "geq-polynomial", "geq-sigmoid"}


def bound(case: Case, seed: int = 0, batch: int = 3) -> BoundMap:
    return case.problem()(case.input(batch, seed=seed))


def frozen_of(hidden: BoundMap) -> Frozen:
    frozen = freeze(hidden)
    assert frozen is not None
    return frozen


FREEZABLE = [case for case in CASES if freeze(bound(case)) is not None]


def nearby(hidden: BoundMap, seed: int) -> State:
    """A state in the domain of the problem, away from the start."""
    generator = torch.Generator().manual_seed(seed)
    state = hidden.step(hidden.start())
    return hidden.project(
        map_state(
            lambda part: part.detach() + 0.1 * torch.randn(part.shape, generator=generator, dtype=part.dtype), state
        )
    )


def equal(a: State, b: State) -> bool:
    return all(torch.equal(u, v) for u, v in zip(blocks(a), blocks(b), strict=True))


def same_problem(found: BoundMap, wanted: BoundMap) -> None:
    assert type(found) is type(wanted)
    with torch.no_grad():
        assert equal(found.start(), wanted.start())
        y, v = nearby(wanted, 1), nearby(wanted, 2)
        assert equal(found.step(y), wanted.step(y))
        if not wanted.aside:  # what only features need, a fusion after the solve, may have stayed behind
            assert equal(found.features(y), wanted.features(y))
        assert equal(found.project(v), wanted.project(v))
        assert (found.measured is None) == (wanted.measured is None)
        if found.measured is not None and wanted.measured is not None:
            (image, merit), (own_image, own_merit) = found.measured(y), wanted.measured(y)
            assert equal(image, own_image)
            assert torch.equal(merit, own_merit)
        assert torch.equal(torch.as_tensor(found.damping), torch.as_tensor(wanted.damping))
        for name in ("structure", "coupled", "contracts", "jumps", "interval"):
            assert getattr(found, name) == getattr(wanted, name), name
        local, own = found.linearise(y), wanted.linearise(y)
        assert type(local) is type(own)
        assert equal(local.product(v), own.product(v))
        assert equal(local.adjoint(v), own.adjoint(v))
        if isinstance(local, SymmetricLinearisation) and isinstance(own, SymmetricLinearisation):
            assert equal(local.scaled(v), own.scaled(v))
            assert (local.reduction is None) == (own.reduction is None)
            if local.reduction is not None and own.reduction is not None:
                u, own_u = local.reduction.restrict(v), own.reduction.restrict(v)
                assert equal(u, own_u)
                assert equal(local.reduction.product(u), own.reduction.product(u))
                assert equal(local.reduction.expand(u), own.reduction.expand(u))
        form, own_form = found.compact_form(), wanted.compact_form()
        assert (form is None) == (own_form is None)
        if form is not None and own_form is not None:
            assert equal(form.start, own_form.start)
            z = wanted.features(y)
            assert equal(form.step(z), own_form.step(z))
            assert equal(form.state(z), own_form.state(z))


def test_most_problems_can_be_frozen() -> None:
    assert {case.name for case in CASES} - {case.name for case in FREEZABLE} <= WHOLE


@pytest.mark.parametrize("case", FREEZABLE, ids=lambda case: case.name)
def test_thawed_is_the_same_problem(case: Case) -> None:
    hidden = bound(case)
    frozen = frozen_of(hidden)
    same_problem(frozen.thaw([tensor.clone() for tensor in frozen.tensors]), hidden)


@pytest.mark.parametrize("case", FREEZABLE, ids=lambda case: case.name)
def test_thawed_with_other_tensors_is_another_batch(case: Case) -> None:
    frozen, other = frozen_of(bound(case)), bound(case, seed=1)
    tensors = frozen_of(other).tensors
    assert [tensor.shape for tensor in frozen.tensors] == [tensor.shape for tensor in tensors]
    assert any(not torch.equal(a, b) for a, b in zip(frozen.tensors, tensors, strict=True))
    same_problem(frozen.thaw(tensors), other)


@pytest.mark.parametrize("case", FREEZABLE, ids=lambda case: case.name)
def test_two_batches_have_one_structure(case: Case) -> None:
    problem = case.problem()
    first = problem(case.input(seed=0))
    second = problem(case.input(seed=1))
    with torch.no_grad():
        for parameter in problem.parameters():
            parameter.mul_(0.9)
    assert frozen_of(first).structure == frozen_of(second).structure == frozen_of(problem(case.input(seed=2))).structure
    # What has been asked of a problem before it is frozen does not show.
    asked = problem(case.input(seed=1))
    asked.linearise(asked.step(asked.start()))
    assert frozen_of(asked).structure == frozen_of(first).structure


def dense(activation: str | penalties.Penalty = "relu", bound: float | None = 0.8, **options: object) -> Problem:
    return opteq.OptEq(op.Dense(5, 6, bound=bound), nn.Linear(4, 6), activation, **options)


def branches(**options: object) -> Problem:
    parts = [opteq.Branch(op.Dense(4, 5, bound=0.7), nn.Linear(4, 5)) for _ in range(3)]
    return MOptEq(parts, **options)


DIFFERENT: dict[str, tuple[Callable[[], Problem], Callable[[], Problem]]] = {
    "activation": (dense, lambda: dense("tanh")),
    "a parameter of the activation": (lambda: dense(penalties.ELU(1.0)), lambda: dense(penalties.ELU(0.5))),
    "mu": (dense, lambda: dense(mu=1.5)),
    "the contraction that a bound proves": (dense, lambda: dense(bound=None)),
    "alpha": (
        lambda: opteq.DeepOptEq([(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6))], alpha=0.5),
        lambda: opteq.DeepOptEq([(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6))], alpha=0.6),
    ),
    "diversity": (lambda: branches(diversity=0.1), lambda: branches(diversity=0.2)),
    "smoothing": (lambda: branches(diversity=0.1, smoothing=0.1), lambda: branches(diversity=0.1, smoothing=0.2)),
    "heritage": (lambda: branches(diversity=0.1), lambda: branches(diversity=0.1, heritage=False)),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_all_but_tensors_belongs_to_the_structure(pair: tuple[Callable[[], Problem], Callable[[], Problem]]) -> None:
    x = torch.randn(2, 4)
    first, second, again = frozen_of(pair[0]()(x)), frozen_of(pair[1]()(x)), frozen_of(pair[0]()(x))
    assert first.structure != second.structure
    assert first.structure == again.structure


def test_the_padding_of_a_kernel_belongs_to_the_structure() -> None:
    x = torch.randn(2, 2, 5, 5)
    structures = {
        size: frozen_of(opteq.OptEq(op.Conv2d(2, 3, size, bound=0.8), nn.Conv2d(2, 3, 1))(x)).structure
        for size in (3, 5, (3, 5), (5, 3))
    }
    assert len(set(structures.values())) == 4


@pytest.mark.parametrize("name", ["written", "written-tuple", "opteq-linear"])
def test_modules_and_closures_stay_whole(name: str) -> None:
    (case,) = by_name(name)
    hidden = bound(case)
    assert freeze(hidden) is None
    assert freeze(hidden) is None  # and the answer is remembered


def test_one_problem_that_cannot_be_frozen_keeps_no_other_of_its_kind_from_it() -> None:
    (linear,), (relu,) = by_name("opteq-linear"), by_name("opteq-relu")
    assert type(bound(linear)) is type(bound(relu))
    assert freeze(bound(linear)) is None
    assert freeze(bound(relu)) is not None


def test_freezing_is_done_once() -> None:
    hidden = bound(CASES[0])
    assert freeze(hidden) is freeze(hidden)


class Token:
    """Something whose life can be watched."""


class Watched(torch.autograd.Function):
    """The identity; the tape holds a token for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("case", FREEZABLE, ids=lambda case: case.name)
def test_nothing_of_the_tape_is_held(case: Case) -> None:
    problem, token = case.problem(), Token()
    life = weakref.ref(token)
    hidden = problem(Watched.apply(case.input().requires_grad_(), token))
    del token
    assert life() is not None
    assert any(part.requires_grad for part in blocks(hidden.step(hidden.start())))
    frozen = frozen_of(hidden)
    assert all(type(t) is Tensor and not t.requires_grad and t.grad_fn is None for t in frozen.tensors)
    del hidden
    gc.collect()
    assert life() is None
    thawed = frozen.thaw(frozen.tensors)
    assert not any(part.requires_grad for part in blocks(thawed.step(thawed.start())))


class Remembering(BoundMap):
    """Holds what makes its tensors anew whenever it is asked for them, as something compressed or lazy may."""

    def __init__(self, values: list[float]) -> None:
        self.parts = _Lazy(values)

    def start(self) -> State:
        return torch.zeros(1, 1)

    def step(self, y: State) -> State:
        return y


class _Lazy:
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __reduce__(self) -> tuple[object, ...]:
        return list, (), None, (torch.tensor([value]) for value in self.values)


def test_tensors_that_live_for_a_moment_are_not_mixed_up() -> None:
    values = [float(value) for value in range(100)]
    assert [float(tensor) for tensor in frozen_of(Remembering(values)).tensors] == values


# ------------------------------------------------------------------------------------------- channels last


def both_layouts(function: Callable[..., object], *pictures: Tensor) -> None:
    """Values and gradients of ``function`` for pictures that lie either way in memory."""
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        own = [picture.clone(memory_format=layout).requires_grad_() for picture in pictures]
        result = function(*own)
        parts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]
        weights = [torch.linspace(-1, 1, part.numel(), dtype=part.dtype).reshape(part.shape) for part in parts]
        total = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
        slopes = torch.autograd.grad(total, own)
        found.append([*parts, *slopes])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def picture(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 5, 4, 4), (3, 1, 8, 4), (2, 2, 4, 4)], ids=str)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_pooling_in_both_layouts(shape: tuple[int, ...], factor: int) -> None:
    pool = op.AveragePool(factor)
    both_layouts(pool, picture(*shape))
    both_layouts(pool.adjoint, picture(*shape))
    last = picture(*shape).contiguous(memory_format=torch.channels_last)
    for image in (pool(last), pool.adjoint(last)):
        assert image.is_contiguous(memory_format=torch.channels_last)
    expected = torch.nn.functional.avg_pool2d(picture(*shape), factor)
    torch.testing.assert_close(pool(last), expected, rtol=1e-13, atol=1e-13)
    u = picture(*expected.shape, seed=1).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close((pool(last) * u).sum(), (last * pool.adjoint(u)).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(2, 4), (4, 8), (8, 16)])
def test_resampling_in_both_layouts(size: tuple[int, int]) -> None:
    both_layouts(lambda z: resample(z, size), picture(2, 3, 4, 8))


@pytest.mark.parametrize(
    "coupling",
    [
        Coupling(),
        Coupling(0.1),
        Coupling(0.1, smoothing=0.4),
        Coupling(0.1, heritage=False),
        Coupling(0.1, smoothing=0.4, heritage=False),
    ],
    ids=str,
)
def test_couplings_in_both_layouts(coupling: Coupling) -> None:
    ring = [picture(2, 3, 4, 4), picture(2, 3, 2, 2, seed=1), picture(2, 3, 8, 8, seed=2)]
    moves = tuple(picture(*z.shape, seed=5 + i) for i, z in enumerate(ring))
    both_layouts(lambda *z: coupling.fuse(z), *ring)
    both_layouts(lambda *z: tuple(coupling.terms(z).values()), *ring)
    if coupling.smoothing:  # else h is linear between its kinks
        both_layouts(lambda *z: coupling.jacobian_at(z)(moves), *ring)
    both_layouts(lambda *z: (heritage(z), diversity(z, 0.2), *products(z)), *ring)
    both_layouts(lambda *v: coupling.jacobian_at(tuple(ring))(v), *moves)


@pytest.mark.parametrize("name", ["mopteq-conv", "popteq-conv", "parallel", "opteq-conv", "deep-conv", "geq-conv"])
def test_problems_in_both_layouts(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    problem = case.problem()
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        problem = problem.to(memory_format=layout)
        x = case.input().clone(memory_format=layout).requires_grad_()
        hidden = problem(x)
        y = hidden.step(hidden.step(hidden.start()))
        slopes = torch.autograd.grad(
            sum(part.square().sum() for part in blocks(y)), [x, *problem.parameters()], allow_unused=True
        )
        found.append([*blocks(y), *(slope for slope in slopes if slope is not None)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)
