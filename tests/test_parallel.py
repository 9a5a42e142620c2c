"""Problems side by side equal their parts alone; POptEq and its fusions; plots and measures of branches."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opteq
from cases import SOLVERS
from opteq import operators as op
from opteq.analysis import branches as analysis
from opteq.couplings import diversity, heritage, products
from opteq.problems.branches.mopteq import MOptEq
from opteq.problems.branches.parallel import Parallel
from opteq.problems.branches.popteq import POptEq
from opteq.problems.hidden import BoundMap, Hidden, Linearisation, Structure, SymmetricLinearisation
from opteq.solvers import Status
from opteq.states import State, blocks
from opteq.training.optim.jacobian import squared_radius

DOUBLE = torch.float64


def picture_branches(*scales: int, channels: int = 3, seed: int = 0) -> list[opteq.Branch]:
    torch.manual_seed(seed)
    return [
        opteq.Branch(op.Conv2d(channels, 4, 3, bound=0.8), nn.Conv2d(2, 4, 3, padding=1), scale) for scale in scales
    ]


def single(activation: str = "relu", bound: float | None = 0.8) -> opteq.OptEq:
    return opteq.OptEq(op.Dense(5, 6, bound=bound), nn.Linear(4, 6), activation)


def deep(count: int = 2) -> opteq.DeepOptEq:
    return opteq.DeepOptEq([(op.Dense(5, 6, bound=0.8), nn.Linear(4, 6)) for _ in range(count)])


def ring() -> MOptEq:
    branches = [opteq.Branch(op.Dense(3, 4, bound=0.7), nn.Linear(4, 4)) for _ in range(2)]
    return MOptEq(branches, diversity=0.1, smoothing=0.5)


class Drift(opteq.problems.Problem):
    """A map without an objective."""

    def bind(self, x: Tensor) -> BoundMap:
        class Bound(BoundMap):
            def start(self) -> Tensor:
                return torch.zeros_like(x)

            def step(self, y: State) -> Tensor:
                return 0.5 * torch.roll(torch.tanh(blocks(y)[0]), 1, dims=1) + x

        return Bound()


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def test_parts_are_solved_as_if_alone() -> None:
    torch.manual_seed(0)
    parts = [single(), ring(), deep(), Drift(), Parallel([single("tanh"), single()])]
    together = Parallel(parts).double()
    x = gaussian(3, 4)
    solution = opteq.Equilibrium(together, SOLVERS["anderson"]).solve(x)
    states, features = [], []
    for part in parts:
        alone = opteq.Equilibrium(part, SOLVERS["anderson"]).solve(x)
        states += blocks(alone.state)
        features += blocks(alone.features)
    assert len(solution.state) == len(states) == 7  # tuples inside are flattened
    for found, wanted in zip(solution.state + solution.features, states + features, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_scales_pool_the_input() -> None:
    torch.manual_seed(0)
    parts = [
        opteq.OptEq(op.Conv2d(3, 4, 3, bound=0.8), nn.Conv2d(2, 4, 3, padding=1)),
        opteq.OptEq(op.Conv2d(3, 5, 3, bound=0.8), nn.Conv2d(2, 5, 3, padding=1)),
    ]
    x = gaussian(2, 2, 8, 4)
    found = opteq.Equilibrium(Parallel(parts, scales=[1, 2]).double(), SOLVERS["anderson"])(x)
    for z, part, view in zip(found, parts, (x, F.avg_pool2d(x, 2)), strict=True):
        torch.testing.assert_close(z, opteq.Equilibrium(part, SOLVERS["anderson"])(view), rtol=1e-9, atol=1e-10)


def test_terms_have_the_number_of_their_part() -> None:
    problem = Parallel([single(), ring(), Parallel([single()])]).double()
    hidden = problem(gaussian(3, 4))
    assert isinstance(hidden, Hidden)
    y = hidden.step(hidden.start())
    names = set(hidden.terms(y))
    expected = {"0.penalty", "0.quadratic", "0.coupling", "0.input", "1.heritage", "1.diversity", "2.0.coupling"}
    assert expected <= names
    pieces = (y[0], y[1:3], (y[3],))
    total = sum(part.objective(piece) for part, piece in zip(hidden.parts, pieces, strict=True))
    torch.testing.assert_close(hidden.objective(y), total)
    torch.testing.assert_close(sum(hidden.smooth_terms(y).values()), hidden.smooth(y))


def test_an_objective_needs_one_of_every_part() -> None:
    x = gaussian(2, 4)
    mixed = Parallel([single(), deep()]).double()(x)
    assert not isinstance(mixed, Hidden)
    y = mixed.step(mixed.start())
    assert {"0.coupling", "1.objective"} <= set(mixed.terms(y))
    torch.testing.assert_close(mixed.objective(y), mixed.parts[0].objective(y[0]) + mixed.parts[1].objective(y[1]))
    for part, message in ((deep(3), "only one or two layers"), (Drift(), "Bound has no objective")):
        hidden = Parallel([single(), part]).double()(x)
        with pytest.raises(ValueError, match=message):
            hidden.objective(hidden.start())


def test_parts_have_penalties_of_their_own() -> None:
    mixed = Parallel([single(), single("tanh")]).double()(gaussian(2, 4))
    assert isinstance(mixed, Hidden)
    y = mixed.step(mixed.start())
    assert mixed.penalties(y) == [opteq.penalties.get("relu"), opteq.penalties.get("tanh")]
    torch.testing.assert_close(mixed.step(y)[1], torch.tanh(mixed.preactivation(y)[1]))
    product = torch.autograd.functional.vjp(lambda one: mixed.step((y[0], one))[1], y[1], torch.ones_like(y[1]))[1]
    radius = squared_radius(mixed, y)
    assert radius.shape == (2,)
    assert radius.isfinite().all()
    torch.testing.assert_close(mixed.linearise(y).adjoint((torch.zeros_like(y[0]), torch.ones_like(y[1])))[1], product)


class Well(opteq.Objective):
    """Its start, 0, is a maximum."""

    curvature = 4.0

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"well": ((y.square() - 1).square() / 4).sum(1) + 0 * (x * y).sum(1)}


class Bowl(opteq.Objective):
    """Its condition number is 1e3."""

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        weights = torch.logspace(0, 3, y.shape[1], dtype=y.dtype)
        return {"bowl": 0.5 * (weights * y.square()).sum(1) - (x * y).sum(1)}


@pytest.mark.parametrize(
    "beside",
    [
        list,
        lambda: [Well()],
        lambda: [single()],
        lambda: [MOptEq([opteq.Branch(op.Dense(3, 4, bound=0.5), nn.Linear(4, 4))], diversity=0.1)],  # it jumps
        lambda: [opteq.FixedPoint(lambda z, x: 0.5 * torch.cos(z) + x)],
    ],
    ids=["alone", "well", "opteq", "jumps", "no objective"],
)
def test_a_maximum_of_a_part_is_none_of_the_sum(beside: Callable[[], list[opteq.problems.Problem]]) -> None:
    layer = opteq.Equilibrium(Parallel([Well(), *beside()]).double(), opteq.Anderson(), on_failure="ignore")
    x = torch.zeros(2, 4, dtype=DOUBLE)
    assert layer.solve(x).status == (Status.NOT_A_MINIMUM,) * 2
    around = tuple(piece + 0.9 for piece in layer.problem(x).start())
    found = layer.solve(x, start=around)
    assert Status.NOT_A_MINIMUM not in found.status
    torch.testing.assert_close(found.state[0].abs(), torch.ones_like(x), atol=1e-3, rtol=0)


def test_options_by_default_are_those_of_the_part_that_needs_most() -> None:
    x = gaussian(3, 50)
    alone = opteq.Equilibrium(Bowl())
    layer = opteq.Equilibrium(Parallel([Bowl(), Well()]))
    assert layer.solver == alone.solver
    assert layer.gradient == alone.gradient
    x.requires_grad_()
    z = layer(x)[0]
    exact = x / torch.logspace(0, 3, 50, dtype=DOUBLE)
    torch.testing.assert_close(z, exact, rtol=1e-2, atol=1e-3)
    (slope,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(slope, 1 / torch.logspace(0, 3, 50, dtype=DOUBLE).expand(3, 50), rtol=1e-3, atol=1e-6)
    mixed = Parallel([Bowl(), opteq.OptEq(op.Dense(5, 6, bound=0.8), nn.Linear(50, 6))])
    assert mixed.default_solver() == opteq.Anderson(max_steps=alone.solver.max_steps)
    assert Parallel([single()]).default_solver() is None
    assert Parallel([single()]).default_gradient_steps() is None


@pytest.mark.parametrize(
    ("parts", "structure", "method"),
    [
        (lambda: [single(), ring()], Structure.POSITIVE, "CG"),
        (lambda: [single(), single(bound=None)], Structure.SYMMETRIC, "MINRES"),
        (lambda: [single(), deep()], Structure.GENERAL, "GMRES"),
    ],
)
def test_the_weakest_structure_decides(parts: object, structure: Structure, method: str) -> None:
    problem = Parallel(parts()).double()
    x = gaussian(2, 4).requires_grad_()
    hidden = problem(x)
    assert hidden.structure is structure
    kind = Linearisation if structure is Structure.GENERAL else SymmetricLinearisation
    assert isinstance(hidden.linearise(hidden.start()), kind)
    solution = opteq.Equilibrium(problem, SOLVERS["anderson"]).solve(x)
    sum(part.square().sum() for part in solution.features).backward()
    assert solution.backward.method == f"adjoint by {method}"
    assert solution.backward.converged.all()


def test_merit_damping_and_coupling_are_handed_on() -> None:
    x = gaussian(3, 4)
    plain = Parallel([single(), single()]).double()(x)
    y = plain.step(plain.start())
    image, merit = plain.step_and_merit(y)
    torch.testing.assert_close(image, plain.step(y))
    torch.testing.assert_close(merit, sum(p.step_and_merit(b)[1] for p, b in zip(plain.parts, y, strict=True)))
    assert plain.damping == 1.0
    smoothed = Parallel([single(), ring(), ring()]).double()(x)
    assert smoothed.damping.shape == (3,)
    torch.testing.assert_close(smoothed.damping, torch.minimum(*(part.damping for part in smoothed.parts[1:])))
    assert not Parallel([ring(), single(), deep()]).double()(x).has_merit
    decorrelated = opteq.OptEq(
        op.Dense(5, 6, bound=0.8), nn.Linear(4, 6), regularizer=opteq.regularizers.Decorrelation(eps=0.1), gamma=0.05
    )
    assert not plain.coupled
    assert Parallel([single(), decorrelated]).double()(x).coupled


def test_a_cycling_part_is_told() -> None:
    class Row(nn.Module):
        def __init__(self, row: list[float]) -> None:
            super().__init__()
            self.row = row

        def forward(self, x: Tensor) -> Tensor:
            return x.new_tensor(self.row).expand(len(x), 2)

    branches = []
    for row in ([0.05, 1.0], [0.0, 1.0]):
        W = op.Dense(2, 2, bound=0.75)
        W.weight.data = 0.7 * torch.eye(2, dtype=DOUBLE)
        branches.append(opteq.Branch(W, Row(row)))
    problem = Parallel([single(), MOptEq(branches, diversity=0.4)]).double()
    for solver in (opteq.Anderson(), opteq.Broyden(), opteq.Picard(damping=0.5)):
        solution = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(gaussian(2, 4))
        assert solution.status == (Status.CYCLING,) * 2


def test_solvers_that_work_on_features() -> None:
    x = gaussian(2, 4)
    sam = opteq.SAM(regularizer=opteq.regularizers.Ridge(), max_steps=20, polish=5)
    problem = Parallel([single(), ring()]).double()
    solution = opteq.Equilibrium(problem, sam, on_failure="ignore").solve(x)
    alone = opteq.Equilibrium(problem.problems[0], sam, on_failure="ignore").solve(x)
    torch.testing.assert_close(solution.features[0], alone.features, rtol=1e-12, atol=1e-12)
    fused = POptEq(picture_branches(1, 2), fuse="sum").double()
    with pytest.raises(ValueError, match='fuse="none"'):
        opteq.Equilibrium(fused, sam)(gaussian(1, 2, 4, 4))


# POptEq


def test_popteq_is_opteq_in_every_branch() -> None:
    branches = picture_branches(1, 2, 4)
    problem = POptEq(branches).double()
    x = gaussian(2, 2, 4, 8)
    found = opteq.Equilibrium(problem, SOLVERS["anderson"])(x)
    for z, branch in zip(found, branches, strict=True):
        alone = opteq.Equilibrium(opteq.OptEq(branch.W, branch.U), SOLVERS["anderson"])
        torch.testing.assert_close(z, alone(F.avg_pool2d(x, branch.scale)), rtol=1e-9, atol=1e-10)
    assert [branch.scale for branch in problem.branches] == [1, 2, 4]
    assert problem.branches[1].W is branches[1].W


@pytest.mark.parametrize("fuse", ["none", "sum"])
def test_popteq_is_solved_in_its_features(fuse: str) -> None:
    """As each branch alone: with the gradients of the state's equation, and steps and residuals no worse."""
    problem = POptEq(picture_branches(1, 2), fuse=fuse).double()
    x = gaussian(2, 2, 4, 8)
    assert problem.bind(x).compact_form() is not None
    assert Parallel([part for part, _ in problem.parts()], scales=[1, 2]).bind(x).compact_form() is None
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12, max_steps=100))
    unrolled = opteq.Equilibrium(problem, opteq.Picard(tol=0, max_steps=400), gradient=opteq.Unrolled())
    solution = layer.solve(x)
    assert solution.converged.all()
    y = solution.state
    bound = problem.bind(x)
    moved = torch.stack([(a - b).flatten(1).norm(dim=1) for a, b in zip(bound.step(y), y, strict=True)]).norm(dim=0)
    size = torch.stack([piece.flatten(1).norm(dim=1) for piece in y]).norm(dim=0)
    assert (moved / size <= solution.residual + 1e-15).all()

    def gradients(of: opteq.Equilibrium) -> tuple[Tensor, ...]:
        loss = sum(
            (piece * torch.linspace(-1, 2, piece.numel(), dtype=DOUBLE).view_as(piece)).sum() for piece in blocks(of(x))
        )
        return torch.autograd.grad(loss, [x, *problem.parameters()])

    x.requires_grad_()
    for found, expected in zip(gradients(layer), gradients(unrolled), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_fusions() -> None:
    x = gaussian(2, 2, 4, 8)
    tuples = opteq.Equilibrium(POptEq(picture_branches(2, 1)).double(), SOLVERS["anderson"])(x)
    repeated = tuples[0].repeat_interleave(2, 2).repeat_interleave(2, 3)
    summed = opteq.Equilibrium(POptEq(picture_branches(2, 1), fuse="sum").double(), SOLVERS["anderson"])(x)
    torch.testing.assert_close(summed, repeated + tuples[1], rtol=1e-12, atol=1e-12)
    problem = POptEq(picture_branches(2, 1), fuse="conv").double()
    joined = opteq.Equilibrium(problem, SOLVERS["anderson"])(x)
    expected = F.conv2d(torch.cat([repeated, tuples[1]], 1), problem.convolution.weight, padding=1)
    torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
    assert problem.convolution.weight.shape == (6, 6, 3, 3)
    assert problem.convolution.bias is None
    dense = [opteq.Branch(op.Dense(3, 4, bound=0.8), nn.Linear(4, 4)) for _ in range(2)]
    assert opteq.Equilibrium(POptEq(dense, fuse="sum"))(torch.randn(2, 4)).shape == (2, 3)


def test_weights_move_between_popteq_and_mopteq() -> None:
    """The ablation compares the same weights with and without heritage and diversity."""
    plain, tied = POptEq(picture_branches(1, 2)), MOptEq(picture_branches(1, 2, seed=1), diversity=0.1)
    assert plain.state_dict().keys() == tied.state_dict().keys()
    assert "branches.0.W.weight" in plain.state_dict()
    plain.load_state_dict(tied.state_dict())
    torch.testing.assert_close(plain.branches[1].U.weight, tied.branches[1].U.weight)
    learned = POptEq([opteq.Branch(op.Dense(3, 6, bound=0.8), nn.Linear(4, 6))], opteq.penalties.LinearActivation(6))
    assert any("penalty" in name for name in learned.state_dict())


@pytest.mark.parametrize("fuse", ["none", "sum", "conv"])
def test_certificate_of_all_parts(fuse: str) -> None:
    problem = POptEq(picture_branches(1, 2), fuse=fuse).double()
    certificate = problem.certificate()
    factors = [float(branch.W.norm()) ** 2 for branch in problem.branches]
    assert certificate.exists is True
    assert certificate.unique is True
    assert certificate.contraction == pytest.approx(max(factors))
    assert "part 1" in certificate.reasons["contraction"]
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-11, max_steps=200))
    a, b = gaussian(20, 2, 4, 4), gaussian(20, 2, 4, 4, seed=1)
    with torch.no_grad():
        for other in (b, a + 0.01 * b, a.mean((2, 3), keepdim=True).expand_as(a)):
            pairs = zip(blocks(layer(a)), blocks(layer(other)), strict=True)
            moved = sum((u - v).flatten(1).square().sum(1) for u, v in pairs).sqrt()
            assert (moved <= certificate.lipschitz * (other - a).flatten(1).norm(dim=1)).all()


def test_a_strided_injection_leaves_open_how_often_pixels_are_repeated() -> None:
    """One pixel moves the small picture of the second branch, of which the sum then has four copies."""
    branches = [opteq.Branch(op.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1, stride=stride)) for stride in (1, 2)]
    for branch, size in zip(branches, (0.01, 0.5), strict=True):
        nn.init.constant_(branch.W.weight, size)
        nn.init.constant_(branch.U.weight, 2 * size)
    layer = opteq.Equilibrium(POptEq(branches, "identity", fuse="sum").double(), opteq.Anderson(tol=1e-12))
    pixel = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    pixel[0, 0, 0, 0] = 1
    moved = (layer(pixel) - layer(torch.zeros_like(pixel))).norm().item()
    assert moved == pytest.approx(2 * 0.5 / (1 - 0.25), rel=0.01)
    certificate = layer.problem.certificate()
    assert certificate.lipschitz is None or moved <= certificate.lipschitz
    assert "how often pixels are repeated" in certificate.reasons["lipschitz"]
    assert certificate.unique is True
    apart = POptEq(branches, "identity").certificate().lipschitz
    assert apart is not None


@pytest.mark.parametrize("fuse", ["sum", "conv"])
def test_certificate_where_sizes_are_no_multiples(fuse: str) -> None:
    """From 4 to 6 pixels every other one is there twice: one that moves is then in four places."""
    branches = [opteq.Branch(op.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), scale) for scale in (2, 3)]
    for branch, size in zip(branches, (0.01, 0.5), strict=True):
        nn.init.constant_(branch.W.weight, size)
        nn.init.constant_(branch.U.weight, 2 * size)
    problem = POptEq(branches, "identity", fuse=fuse).double()
    if problem.convolution is not None:
        nn.init.dirac_(problem.convolution.weight)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-12))
    still = (torch.zeros(1, 1, 6, 6, dtype=torch.float64), torch.zeros(1, 1, 4, 4, dtype=torch.float64))
    moving = (still[0], still[1].clone())
    moving[1][0, 0, 0, 0] = 1
    moved = (layer(moving) - layer(still)).norm().item()
    assert moved == pytest.approx(2 * 0.5 / (1 - 0.25))
    assert moved <= problem.certificate().lipschitz <= 1.01 * moved


def test_certificate_with_an_unknown_part() -> None:
    certificate = Parallel([single(), Drift()]).certificate()
    assert certificate.exists is None
    assert certificate.contraction is None
    assert certificate.lipschitz is None
    assert "part 1: Drift declares nothing" in certificate.reasons["exists"]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Parallel([]), ValueError, "Parallel needs at least one problem"),
        (lambda: Parallel([nn.Linear(2, 2)]), TypeError, "problem 0 should be a hidden problem"),
        (
            lambda: Parallel([single()], scales=[1, 2]),
            ValueError,
            "scales should have one number per problem (1); got 2",
        ),
        (lambda: Parallel([single()], scales=[0]), ValueError, "scales should be at least 1; got 0"),
        (lambda: POptEq([]), ValueError, "at least one opteq.Branch"),
        (lambda: POptEq(picture_branches(1), fuse="summ"), ValueError, "unknown fuse 'summ'; did you mean 'sum'?"),
        (
            lambda: POptEq([opteq.Branch(op.Dense(3, 4), nn.Linear(4, 4))], fuse="conv"),
            ValueError,
            'fuse="conv" needs branches with images',
        ),
        (
            lambda: opteq.Equilibrium(POptEq([picture_branches(1)[0], picture_branches(1, channels=5)[0]], fuse="sum"))(
                torch.randn(1, 2, 4, 4)
            ),
            ValueError,
            'fuse="sum" needs the same number of channels in all branches; got [3, 5]',
        ),
        (
            lambda: Parallel([single()], scales=[2])(torch.randn(2, 4)),
            ValueError,
            "part 0 has scale=2, so it needs images",
        ),
        (
            lambda: POptEq(picture_branches(1, 2))(torch.randn(1, 2, 4, 5)),
            ValueError,
            "divide by 2; got an input of shape (1, 2, 4, 5)",
        ),
    ],
)
def test_errors(build: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build()


# Looking at branches


def test_measures() -> None:
    features = tuple(gaussian(3, 4, side, side, seed=side) for side in (4, 2, 4))
    measured = analysis.measure_branches(features)
    torch.testing.assert_close(measured.heritage, 2 * heritage(features).sum(0) / 12)
    torch.testing.assert_close(measured.diversity, 2 * diversity(features).sum(0) / 36)
    for found, matrix in zip(measured.correlations, products(features), strict=True):
        torch.testing.assert_close(found, matrix.abs())
    # The sums of the paper, over each branch's two neighbours.
    total = torch.zeros(3, dtype=DOUBLE)
    for i in range(3):
        for j in ((i + 1) % 3, (i - 1) % 3):
            total += heritage((features[i], features[j]))[0]
    torch.testing.assert_close(measured.heritage, total / 12)


def test_the_module_does_what_it_is_for() -> None:
    """With the same weights, MOptEq's channels resemble their own kind more, and others less, than POptEq's."""
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Conv2d(8, 16, 3, bound=0.9), nn.Conv2d(4, 16, 3, padding=1)) for _ in range(3)]
    x = torch.randn(16, 4, 8, 8)
    with torch.no_grad():
        tied = analysis.measure_branches(
            opteq.Equilibrium(MOptEq(branches, diversity=0.03, smoothing=0.1), opteq.Anderson(tol=1e-3))(x)
        )
        plain = analysis.measure_branches(opteq.Equilibrium(POptEq(branches))(x))
    assert (tied.heritage > plain.heritage).all()
    assert tied.diversity.mean() < plain.diversity.mean()


def test_reconstructed_perturbation_is_the_sign_of_the_adjoint() -> None:
    (branch,) = picture_branches(1)
    x = gaussian(2, 2, 4, 4)
    for problem in (opteq.OptEq(branch.W, branch.U), MOptEq([branch]), POptEq([branch])):
        layer = opteq.Equilibrium(problem.double(), SOLVERS["anderson"])
        with torch.no_grad():
            (state,) = blocks(layer.solve(x).state)
            expected = 0.1 * torch.sign(F.conv_transpose2d(state, branch.U.weight, padding=1))
        found = analysis.reconstructed_perturbation(layer, x, 0.1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    two = POptEq(picture_branches(1, 2)).double()
    with torch.no_grad():
        states = opteq.Equilibrium(two, SOLVERS["anderson"]).solve(x).state
        backs = [
            F.conv_transpose2d(state, part.U.weight, padding=1)
            for state, part in zip(states, two.branches, strict=True)
        ]
        joint = backs[0] + backs[1].repeat_interleave(2, 2).repeat_interleave(2, 3) / 4
    layer = opteq.Equilibrium(two, SOLVERS["anderson"])
    torch.testing.assert_close(analysis.reconstructed_perturbation(layer, x, 1.0), torch.sign(joint), rtol=0, atol=0)


def test_reconstruction_leaves_modes_and_training_perturbations_alone() -> None:
    branches = picture_branches(1, 1)
    branches[0].U = nn.Sequential(branches[0].U, nn.Dropout(0.5).eval())
    problem = MOptEq(branches, perturbation=0.5).double()
    modes = [part.training for part in problem.modules()]
    x = gaussian(1, 2, 4, 4)
    found = analysis.reconstructed_perturbation(problem, x, 0.1)
    assert [part.training for part in problem.modules()] == modes
    problem.eval()
    torch.testing.assert_close(found, analysis.reconstructed_perturbation(problem, x, 0.1), rtol=0, atol=0)
    with pytest.raises(TypeError, match="Drift has no objective"):
        analysis.reconstructed_perturbation(Drift(), gaussian(1, 4), 0.1)
    with pytest.raises(ValueError, match="size should be at least 0"):
        analysis.reconstructed_perturbation(problem, x, -0.1)


def test_reconstructed_perturbations_do_more_than_random_ones() -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(6, 12, bound=0.7), nn.Linear(20, 12)).double()
    layer = opteq.Equilibrium(problem, SOLVERS["anderson"])
    x = gaussian(64, 20)
    with torch.no_grad():
        state = layer.solve(x).state
        best = problem(x - analysis.reconstructed_perturbation(layer, x, 0.1)).objective(state)
        for seed in range(5):
            random = problem(x - 0.1 * torch.sign(gaussian(64, 20, seed=seed + 1))).objective(state)
            assert (random <= best + 1e-12).all()
    generator = torch.Generator().manual_seed(0)
    effects = analysis.compare_perturbations(
        layer, x, lambda z: -z.square().sum(), sizes=[0.0, 0.1, 0.3], trials=3, generator=generator
    )
    assert [effect.size for effect in effects] == [0.0, 0.1, 0.3]
    assert effects[0].reconstructed == pytest.approx(effects[0].uniform)
    # Moving the input against U'y starves the features; random moves hardly do.
    for effect in effects[1:]:
        assert effect.reconstructed > max(effect.signs, effect.uniform)


def test_plots() -> None:
    features = tuple(gaussian(5, 3, 4, 4, seed=i) for i in range(3))
    measured = analysis.measure_branches(features)
    axes = analysis.plot_averages({"MOptEq": measured, "POptEq": measured})
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["MOptEq", "POptEq"]
    assert len(axes.collections[0].get_offsets()) == 5
    heat = analysis.plot_correlation(measured, sample=1, pair=2)
    assert heat.get_xlabel() == "channels of branch 0"
    assert heat.images[0].get_array().shape == (3, 3)
    effects = [analysis.PerturbationEffect(size, 0.5, 0.6, 0.7) for size in (0.0, 0.1)]
    lines = analysis.plot_perturbations(effects, axes=heat)
    assert lines is heat
    assert len(lines.get_lines()) == 3
