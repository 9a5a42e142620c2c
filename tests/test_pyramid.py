"""An input for every branch, the stem that makes it, and what different sizes mean for convexity."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import opteq
from all_cases import CASES
from cases import Case
from opteq import models
from opteq.common.errors import UserError
from opteq.couplings import Coupling, ring_norm
from opteq.models.blocks.pyramid import Pyramid
from opteq.models.blocks.residual import InvertedBlock
from opteq.operators import Conv2d, Downsample
from opteq.problems.base import Problem
from opteq.problems.hidden import Structure
from opteq.states import blocks

SCALES = (1, 2, 4)


def branches(bound: float = 0.9, scales: tuple[int, ...] = SCALES) -> list[opteq.Branch]:
    torch.manual_seed(0)
    return [opteq.Branch(Conv2d(4, 5, 3, bound=bound), nn.Conv2d(3, 5, 3, padding=1), scale) for scale in scales]


def problems() -> dict[str, Problem]:
    parts = [opteq.OptEq(branch.W, branch.U) for branch in branches()]
    return {
        "mopteq": opteq.MOptEq(branches(), diversity=0.01, smoothing=0.5).double(),
        "popteq": opteq.POptEq(branches()).double(),
        "parallel": opteq.Parallel(parts, SCALES).double(),
    }


def image(side: int = 8) -> Tensor:
    return torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shrunk(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if scale == 1 else Downsample(scale)(x) for scale in SCALES)


@pytest.mark.parametrize("name", problems())
def test_averages_given_by_hand_are_what_branches_see(name: str) -> None:
    problem = problems()[name]
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-11, max_steps=200))
    found = []
    for given in (lambda x: x, shrunk):
        x = image().requires_grad_()
        features = layer(given(x))
        total = torch.stack([part.square().sum() for part in features]).sum()
        found.append([*features, *torch.autograd.grad(total, [x, *problem.parameters()])])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-9)


def test_every_branch_may_see_something_else() -> None:
    problem = problems()["mopteq"]
    x = tuple(torch.randn_like(part) for part in shrunk(image()))
    hidden = problem(x)
    for index, (branch, part) in enumerate(zip(branches(), x, strict=True)):
        assert branch.U is not None
        torch.testing.assert_close(hidden.injections[index], branch.U.double()(part))


def test_inputs_that_do_not_fit() -> None:
    problem, x = problems()["mopteq"], image()
    with pytest.raises(ValueError, match="a tuple with 3, one per branch; got 2"):
        problem(shrunk(x)[:2])
    with pytest.raises(ValueError, match=r"views of one image.*\(8, 8\), \(4, 4\), \(4, 4\).*\[1, 2, 4\]"):
        problem((*shrunk(x)[:2], shrunk(x)[1]))
    with pytest.raises(ValueError, match="one per part; got 1"):
        problems()["parallel"]((x,))
    with pytest.raises(TypeError, match=r"should be a tensor.*got tuple"):
        opteq.OptEq(Conv2d(4, 5, 3, bound=0.9), nn.Conv2d(3, 5, 3, padding=1))(shrunk(x))
    with pytest.raises(TypeError, match=r"should be a tensor.*got tuple"):
        problem(())
    bad = x.clone()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.warns(opteq.ConvergenceWarning, match="1 values that are not finite"):
        opteq.Equilibrium(problem)((bad, *shrunk(x)[1:]))
    with pytest.raises(ValueError, match=r"one batch size; got \[2, 1, 1\]"):
        opteq.Equilibrium(problems()["parallel"]).solve((x, *(part[:1] for part in shrunk(x)[1:])))


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 2), (4, 4, 4), (8, 4, 2), (8, 4, 2, 1), (4, 4, 2, 2), (2, 8)])
def test_ring_norm_is_the_norm_of_the_ring(sizes: tuple[int, ...]) -> None:
    starts = [size * size for size in sizes]

    def negative_gradient(flat: Tensor) -> Tensor:
        pieces = flat[None, :, None].split(starts, dim=1)
        features = tuple(p.reshape(1, 1, size, size) for p, size in zip(pieces, sizes, strict=True))
        return torch.cat([h.flatten() for h in Coupling().negative_gradient(features)])

    matrix = torch.stack([negative_gradient(e) for e in torch.eye(sum(starts), dtype=torch.float64)])
    torch.testing.assert_close(matrix, matrix.mT)
    assert torch.linalg.matrix_norm(matrix, ord=2).item() == pytest.approx(ring_norm(sizes), abs=1e-12)


@pytest.mark.parametrize("heritage", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 4, 2), (4, 2)])
def test_curvature_bound_holds_for_any_signs(sizes: tuple[int, ...], heritage: bool) -> None:
    channels, coupling = 3, Coupling(0.2, heritage=heritage)
    counts = [channels * size * size for size in sizes]
    worst = 0.0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        signs = tuple(
            torch.randint(0, 2, (1, channels, channels), generator=generator).double().mul(2).sub(1) for _ in sizes
        )
        if seed == 0:
            signs = tuple(-torch.ones_like(s) for s in signs)
        for s in signs:
            s.diagonal(dim1=-2, dim2=-1).zero_()

        def negative_gradient(flat: Tensor, signs: tuple[Tensor, ...] = signs) -> Tensor:
            pieces = flat.split(counts, dim=1)
            features = tuple(p.reshape(-1, channels, size, size) for p, size in zip(pieces, sizes, strict=True))
            fused = coupling.negative_gradient(features, tuple(s.expand(len(flat), -1, -1) for s in signs))
            return torch.cat([h.flatten(1) for h in fused], dim=1)

        matrix = negative_gradient(torch.eye(sum(counts), dtype=torch.float64))
        worst = max(worst, float(torch.linalg.matrix_norm(matrix, ord=2)))
    limit = coupling.curvature_bound(channels, sizes)
    assert worst <= limit + 1e-12
    assert worst == pytest.approx(limit, rel=1e-9)  # all signs -1 attain it
    assert limit <= coupling.curvature_bound(channels) + 1e-12


def test_scales_make_larger_bounds_convex() -> None:
    x = image()
    for bound, scales, structure in (
        (1.2, (1, 2, 4), Structure.POSITIVE),
        (1.2, (1, 1, 1), Structure.SYMMETRIC),
        (1.6, (1, 2, 4), Structure.SYMMETRIC),
    ):
        problem = opteq.MOptEq(branches(bound, scales)).double()
        assert problem(x).structure is structure
        for branch in problem.branch_list():  # let every W reach its bound
            with torch.no_grad():
                branch.W.weight.mul_(100)
        certificate = problem.certificate()
        assert certificate.unique is (True if structure is Structure.POSITIVE else None)
        factor = bound**2 * ring_norm(tuple(4 // s for s in scales))
        assert certificate.contraction == pytest.approx(factor, rel=0.08)


def test_a_stride_in_U_is_not_trusted() -> None:
    """With it, features have other sizes than scales say."""
    parts = [
        opteq.Branch(Conv2d(4, 5, 3, bound=1.2), nn.Conv2d(3, 5, 3, padding=1, stride=stride), scale)
        for stride, scale in ((4, 1), (2, 2), (1, 4))
    ]
    for part in parts:
        with torch.no_grad():
            part.W.weight.mul_(100)
    problem = opteq.MOptEq(parts).double()
    assert [tuple(c.shape[2:]) for c in problem(image()).injections] == [(2, 2)] * 3
    assert problem(image()).structure is Structure.SYMMETRIC
    assert problem.certificate().contraction == pytest.approx(1.44, rel=0.08)


def test_a_pyramid() -> None:
    stem = Pyramid(3, (4, 6, 8), depth=2, levels=(0, 2, 2, 1))
    shapes = [tuple(level.shape) for level in stem(torch.randn(2, 3, 16, 16))]
    assert shapes == [(2, 4, 16, 16), (2, 8, 4, 4), (2, 8, 4, 4), (2, 6, 8, 8)]
    last = Pyramid(3, (4, 6), depth=0)(torch.randn(2, 3, 16, 16))
    assert isinstance(last, Tensor)
    assert last.shape == (2, 6, 8, 8)


def test_a_pyramid_of_its_own_depth_and_kind_on_every_level() -> None:
    stem = Pyramid(3, (4, 6, 8), depth=(2, 0, 1), levels=(0, 1, 2), block=("basic", "basic", "inverted"))
    kinds = [[type(part).__name__ for part in stage] for stage in stem.stages]
    assert kinds == [["Sequential", "ResidualBlock", "ResidualBlock"], ["Sequential"], ["InvertedBlock"]]
    shapes = [tuple(level.shape) for level in stem(torch.randn(2, 3, 10, 14))]
    assert shapes == [(2, 4, 10, 14), (2, 6, 5, 7), (2, 8, 3, 4)]


@pytest.mark.parametrize(("inputs", "stride"), [(8, 1), (5, 1), (8, 2), (5, 2)])
def test_an_inverted_block_is_what_it_says(inputs: int, stride: int) -> None:
    """Against its formula with dense weights: a channel's own 5 x 5 kernel is a dense one with zeros elsewhere."""
    torch.manual_seed(0)
    block = InvertedBlock(inputs, 8, stride).double()
    x = torch.randn(3, inputs, 7, 6, dtype=torch.float64)
    own = block.spread.conv.weight
    dense = torch.zeros(inputs, inputs, 5, 5, dtype=torch.float64)
    dense[torch.arange(inputs), torch.arange(inputs)] = own.detach()[:, 0]

    def normalised(z: Tensor) -> Tensor:
        return (z - z.mean((0, 2, 3), keepdim=True)) / (z.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()

    def mixed(z: Tensor, weight: Tensor) -> Tensor:
        return normalised(torch.einsum("oi,bihw->bohw", weight[:, :, 0, 0], z))

    spread = normalised(torch.nn.functional.conv2d(x, dense, stride=stride, padding=2))
    added = mixed(mixed(spread, block.widen.conv.weight).relu(), block.narrow.conv.weight)
    past = x
    if stride > 1:  # the odd row has no partner to be averaged with
        rows = [x[:, :, i : i + 2].mean(2) for i in range(0, 7, 2)]
        past = torch.stack(rows, 2).unflatten(3, (3, 2)).mean(4)
    if isinstance(block.past, nn.Sequential):
        past = mixed(past, block.past[1].conv.weight)
    torch.testing.assert_close(block(x), past + added)
    assert sum(weight.numel() for weight in (own, block.widen.conv.weight, block.narrow.conv.weight)) == (
        25 * inputs + 32 * (inputs + 8)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mopteq-0.48m", {"stem_widths": (8, 8, 12, 16), "channels": 8, "hidden": (4, 4, 8, 8)}),
        (
            "mopteq-0.48m",
            {"stem_widths": (8, 8, 12, 16), "stem_block": "inverted", "channels": 8, "hidden": (4, 4, 8, 8)},
        ),
        ("mopteq-193k", {"stem_widths": (8, 12), "channels": 8, "hidden": (4, 4, 4), "scales": (2, 2, 2)}),
        ("popteq-193k", {"stem_widths": (8, 12), "channels": 8, "hidden": (4, 4, 4), "scales": (1, 2, 2)}),
        ("geq-5m", {"stem_widths": (8, 8, 8, 16), "channels": 8, "hidden": (8,) * 6, "projection": 8}),
        ("opteq-199k", {"stem_widths": (8, 16), "channels": 8, "hidden": (4, 4, 4, 4, 4)}),
    ],
)
def test_models_behind_a_pyramid(name: str, options: dict[str, object]) -> None:
    model = models.create(name, stem="pyramid", stem_depth=1, **options)
    scores = model(torch.randn(2, 3, 32, 32))
    scores.sum().backward()
    assert scores.shape == (2, 10)
    assert all(p.grad is not None for p in model.stem.parameters())


def test_a_pyramid_asked_for_wrongly() -> None:
    with pytest.raises(UserError, match="needs stem_widths"):
        models.create("mopteq-0.48m", stem="pyramid")
    with pytest.raises(UserError, match=r"2 levels has the scales \[1, 2\]; got a branch with 4"):
        models.create("mopteq-0.48m", stem="pyramid", stem_widths=(8, 8))
    with pytest.raises(UserError, match="stem_widths has no effect with stem='plain'"):
        models.create("mopteq-0.48m", stem_widths=(8, 8))
    with pytest.raises(UserError, match="stem_width and downsample have no effect"):
        models.create("mopteq-0.48m", stem="pyramid", stem_widths=(8, 8, 8, 8), downsample=1)
    with pytest.raises(UserError, match=r"same number of channels; got \[8, 8, 8, 16\]"):
        models.create("mopteq-0.48m", stem="pyramid", stem_widths=(8, 8, 8, 16), perturbation=0.1)
    four = {"stem": "pyramid", "stem_widths": (8, 8, 8, 8)}
    with pytest.raises(UserError, match=r"stem_depth should be .* one for each of 4 levels; got \[1, 2\]"):
        models.create("mopteq-0.48m", **four, stem_depth=[1, 2])
    with pytest.raises(UserError, match=r"stem_block should be .* one for each of 4 levels; got \['basic'\]"):
        models.create("mopteq-0.48m", **four, stem_block=["basic"])
    with pytest.raises(UserError, match="unknown stem_block 'invert'"):
        models.create("mopteq-0.48m", **four, stem_block="invert")
    with pytest.raises(UserError, match="stem_block should be one of basic, inverted, or a list of such"):
        models.create("mopteq-0.48m", **four, stem_block=["basic", "deep", "basic", "basic"])
    with pytest.raises(UserError, match=r"with stem='pyramid' only; got stem_depth=\(1, 2\)"):
        models.create("mopteq-0.48m", stem="residual", stem_depth=[1, 2])
    for stem in ({"stem": "residual"}, {"stem": "pyramid", "stem_widths": [8], "stem_depth": [0]}):
        for name, value in (("stem_block", "inverted"), ("stem_attention", True)):
            with pytest.raises(UserError, match=f"{name} has no effect with stem_depth=0"):
                models.create("mopteq-193k", **stem, **{name: value})
    with pytest.raises(UserError, match="stem_block has no effect with stem='plain'"):
        models.create("mopteq-0.48m", stem_block="inverted")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bound_problem_goes_when_nobody_has_it(case: Case) -> None:
    """Without the garbage collector: what it holds may be gigabytes of a GPU's memory."""
    problem = case.problem()
    layer = opteq.Equilibrium(problem, on_failure="ignore")
    layer.solver = dataclasses.replace(layer.solver, max_steps=5)  # every step holds the same
    # Imports that torch puts off to a first call leave frames behind that the collector alone removes.
    torch.stack([part.sum() for part in blocks(layer(case.input().requires_grad_()))]).sum().backward()
    made: list[weakref.ref[object]] = []
    problem.register_forward_hook(lambda _, __, hidden: made.append(weakref.ref(hidden)))
    gc.disable()
    try:
        features = blocks(layer(case.input().requires_grad_()))
        torch.stack([part.sum() for part in features]).sum().backward()
        del features
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()
