"""Certificates that follow from the terms a user writes, against dense Hessians."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opteq
from opteq import operators as op
from opteq import potentials
from opteq.common.curvature.arithmetic import NotKnown
from opteq.common.curvature.bounds import Input
from opteq.common.curvature.certify import curvature_of_terms

N = 6


class Written(opteq.Objective):
    """Terms by a function of the problem, y and x."""

    def __init__(self, function: Callable[[Any, Any, Any], dict[str, Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.K = op.Dense(N, 4, bound=0.8)
        self.W = op.Dense(N, N, bound=0.7)
        self.huber, self.student = potentials.Huber(scale=0.3), potentials.Student(scale=0.5)
        self.spline = potentials.Spline(channels=4, knots=9, rho=1.0, mu=2.0)
        self.weight = nn.Parameter(torch.tensor(0.4))
        self.weights = nn.Parameter(torch.rand(4) + 0.1)
        self.U = nn.Linear(N, N)
        self.kernel = nn.Parameter(torch.randn(3, 1, 3) / 3)
        self.tensor = nn.Parameter(torch.randn(4, 2, N) / 4)
        self.function = function

    def terms(self, y: Any, x: Any) -> dict[str, Any]:
        return self.function(self, y, x)


def data(y: Any, x: Any) -> Any:
    return 0.5 * (y - x).square().sum(1)


KNOWN: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "denoising": lambda p, y, x: {"data": data(y, x), "prior": p.huber(p.K(y)).flatten(1).sum(1)},
    "weighted": lambda p, y, x: {"data": data(y, x), "prior": p.weight.exp() * p.huber(p.K(y)).sum(1)},
    "weakly convex": lambda p, y, x: {"data": data(y, x), "prior": 0.5 * p.student(p.K(y)).sum(1)},
    "spline": lambda p, y, x: {"data": data(y, x), "prior": 0.3 * p.spline(p.K(y)).sum(1)},
    "by channel": lambda p, y, x: {"data": data(y, x), "prior": (p.weights * p.huber(p.K(y))).sum(1)},
    "differences": lambda p, y, x: {"data": data(y, x), "rough": p.huber(y[:, 1:] - y[:, :-1]).sum(1)},
    "diff": lambda p, y, x: {
        "data": data(y, x),
        "rough": p.huber(y.diff()).sum(1) + torch.diff(y - x, n=2, dim=1).square().sum(1),
    },
    "diffs and slices": lambda p, y, x: {"data": data(y, x), "rough": (y.diff(dim=1) - y[:, 1:]).square().sum(1)},
    "one term": lambda p, y, x: {"all": data(y, x) + p.huber(p.K(y)).sum(1) + 3.0},
    "one concave term": lambda p, y, x: {
        "all": (y - x).square().flatten(1).sum(1) - 0.5 * p.W(y).square().flatten(1).sum(dim=1)
    },
    "reversed": lambda p, y, x: {"data": torch.sum((x - y) ** 2, dim=1), "ridge": (2.0 - p.weight) * y.square().sum(1)},
    "adjoint": lambda p, y, x: {"data": data(y, x), "concave": -0.9 * p.W.adjoint(y).square().sum(1)},
    "one term of two": lambda p, y, x: {"all": 2 * (data(y, x) - 0.5 * p.W(y).square().sum(1)) + 1},
    "linear": lambda p, y, x: {"ridge": y.pow(2).sum(1) / 2, "likeness": -(p.U(x) * y).sum(1), "mean": y.mean(1)},
    "centred": lambda p, y, x: {"data": data(y, x), "prior": p.huber(p.K(y) - p.weights).sum(1)},
    "of x": lambda p, y, x: {"data": data(y, p.U(x)), "size": x.square().sum(1)},
    "by itself": lambda p, y, x: {
        "data": data(y, x),
        "size": 0.5 * (y * y).sum(1),
        "rough": (lambda r: r * r)(p.K(y - x)).sum(1),
    },
    "a sum squared": lambda p, y, x: {"data": data(y, x), "sum": y.sum(1).square()},
    "a square operator": lambda p, y, x: {"data": data(3 * p.W(y), x), "ridge": 0.01 * y.square().sum(1)},
    "of both": lambda p, y, x: {
        "data": data(p.W(y), p.W(x)),
        "rough": p.huber(p.W(y)[:, 1:] - y[:, :-1]).sum(1),
        "r": data(y, x),
    },
    "torch's matrix": lambda p, y, x: {
        "data": data(y, x),
        "prior": 0.5 * p.student(p.U(y)).sum(1),
        "r": data(p.U(y - x), 0),
    },
    "torch's convolution": lambda p, y, x: {
        "data": data(y, x),
        "prior": p.huber(F.conv1d(y[:, None], p.kernel, padding=1)).flatten(1).sum(1),
        "strided": F.conv1d((y - x)[:, None], p.kernel, p.weights[:3], stride=2, dilation=2).square().flatten(1).sum(1),
        "concave": -0.05 * F.conv1d(y[:, None].flatten(1)[:, None], p.kernel).square().sum(dim=(1, 2)),
    },
    "matmul": lambda p, y, x: {
        "data": data(y, x),
        "prior": p.huber(y @ torch.ones(N, 2, dtype=torch.float64)).sum(1),
    },
    "logistic": lambda p, y, x: {
        "data": 2 * data(y, x),
        "fit": F.softplus(p.K(y)).sum(1) - F.logsigmoid(p.W(y)).sum(1),
    },
    "waves": lambda p, y, x: {
        "data": 3 * data(y, x),
        "w": y.cos().sum(1) - p.W(y).sin().sum(1) + y.tanh().mul(0.5).sum(1),
    },
    "growth": lambda p, y, x: {
        "data": data(y, x),
        "e": p.K(y).exp().sum(1) + torch.cosh(y).sum(1) + torch.sigmoid(y).sum(1),
    },
    "means": lambda p, y, x: {"data": 1e-3 * (y - x).square().mean(1), "prior": p.huber(p.K(y)).mean(1)},
    "torch's losses": lambda p, y, x: {
        "data": F.mse_loss(y, x, reduction="none").sum(1) + F.mse_loss(x, p.W(y), reduction="none").sum(1),
        "h": F.huber_loss(p.K(y), p.K(x), reduction="none", delta=0.2).sum(1),
        "s": F.smooth_l1_loss(p.K(y - x), 0.5 * p.K(x), reduction="none", beta=0.3).sum(1),
    },
    "sharp softplus": lambda p, y, x: {"data": data(y, x), "s": nn.Softplus(beta=3)(p.K(y)).sum(1)},
    "softmax": lambda p, y, x: {"data": 0.2 * data(y, x), "s": torch.logsumexp(p.K(y - x), 1) + y.logsumexp(dim=-1)},
    "smooth total variation": lambda p, y, x: {
        "data": data(y, x),
        "one": (y.diff().square() + 0.01).sqrt().sum(1),
        "joint": 0.3 * (2 * p.K(y - x).square().sum(1) + 0.1 + y.square().mean(1)) ** 0.5,
        "weighted": (p.weights * torch.sqrt(p.K(y).pow(2) + 0.5)).sum(1),
    },
    "contractions": lambda p, y, x: {
        "data": data(y, x),
        "heads": -0.3 * p.student(torch.einsum("hkd,bd->bhk", p.tensor, y)).flatten(1).sum(1),
        "shared": torch.einsum("bd,dko->bko", y - x, p.tensor.mT.reshape(N, 2, 4)).square().flatten(1).sum(1),
        "by entry": p.huber(torch.einsum("...d,de->...d", y, p.U.weight)).sum(1),
        "blocks": -0.1 * torch.einsum("bh,hkd->bhkd", p.K(y), p.tensor).cos().flatten(1).sum(1),
        "again": torch.einsum("bij->bji", y.reshape(-1, 2, 3)).logsumexp((1, 2)),
    },
    "matrices on either side": lambda p, y, x: {
        "data": 2 * data(y, x),
        "left": 0.1 * p.student(p.W.weight @ (y - x)[:, :, None]).sum(dim=(1, 2)),
        "several": -0.1 * p.student(p.tensor @ y[:, None, :, None]).flatten(1).sum(1),
        "stacked": -0.1 * (y[:, None, None, None] @ p.tensor.mT[:, None]).cos().flatten(1).sum(1),
        "vector": (y @ p.U.bias).exp(),
    },
    "other shapes": lambda p, y, x: {
        "data": (y - x).view(x.shape[0], -1, 3).square().sum((1, 2)),
        "padded": (F.pad(y, (1, 0)) - F.pad(y, (0, 1))).square().sum(1),
        "mirrored": -0.01 * F.pad(y[:, None], (2, 1), mode="reflect").square().flatten(1).sum(1),
        "repeated": F.pad(y[:, None], (2, 0), mode="replicate").cos().mul(0.03).flatten(1).sum(1),
        "around": -0.02 * (y - y.roll(1, 1) + y.flip(1)).square().sum(1),
        "moved": 0.1
        * y.reshape(-1, 2, 3).permute(0, 2, 1).transpose(1, 2).unsqueeze(1).diff(dim=3).square().sum((1, 2, 3)),
        "short": -0.01 * F.pad(y, (-1, -2), value=4.0).square().sum(1),
    },
    "sums so far": lambda p, y, x: {
        "data": data(y.cumsum(1), x),
        "s": p.huber(y.reshape(-1, 2, 3).cumsum(dim=2)).sum((1, 2)),
    },
    "a matrix of the input": lambda p, y, x: {
        "ridge": 0.01 * y.square().sum(1),
        "fit": F.softplus(x[:, None] @ y[:, :, None]).sum(dim=(1, 2)),
        "also": torch.einsum("bd,be->bde", x, y).logsumexp((1, 2)),
    },
    "two states": lambda p, y, x: {"data": data(3 * y - y, x), "mean": p.huber(p.K(y)).mean(1)},
}


def hessian(problem: Written, y: Tensor, x: Tensor) -> Tensor:
    def total(state: Tensor) -> Tensor:
        return torch.stack(list(problem.terms(state[None], x).values())).sum()

    return torch.autograd.functional.hessian(total, y)


@pytest.mark.parametrize("name", KNOWN)
def test_hessians_lie_in_the_interval(name: str) -> None:
    problem = Written(KNOWN[name]).double()
    low, high, mixed = curvature_of_terms(problem.terms, Input())
    assert low > 0
    certificate = problem.certificate()
    assert certificate.exists
    assert certificate.unique
    for scale in (0.01, 0.3, 3.0):
        y, x = scale * torch.randn(N, dtype=torch.float64), scale * torch.randn(1, N, dtype=torch.float64)
        spectrum = torch.linalg.eigvalsh(hessian(problem, y, x))
        assert low - 1e-9 <= spectrum[0]
        assert spectrum[-1] <= high + 1e-9

        def slope(given: Tensor, y: Tensor = y) -> Tensor:
            state = y[None].clone().requires_grad_()
            total = torch.stack(list(problem.terms(state, given).values())).sum()
            return torch.autograd.grad(total, state, create_graph=True)[0][0]

        jacobian = torch.autograd.functional.jacobian(slope, x)[:, 0]
        assert torch.linalg.matrix_norm(jacobian, 2) <= mixed + 1e-9


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_root_of_several_squares_ties_them_together(share: float) -> None:
    """Each square alone has a mixed derivative of 0, or little."""

    def terms(problem: Any, y: Any, x: Any) -> dict[str, Any]:
        one, other = (part.square().flatten(1).sum(1) for part in (y, share * y - x))
        return {"ridge": y.square().sum(1), "joint": (one + other + 0.1).sqrt()}

    assert Written(terms).certificate().lipschitz is None


class Measured(Written):
    """An inverse problem: fewer measurements than unknowns, or more."""

    def __init__(self, rows: int, how: str) -> None:
        super().__init__(lambda p, y, x: {"data": data(p.A(y), x), "ridge": 0.1 * y.square().sum(1)})
        self.A, self.how = op.Dense(N, rows), how

    def start(self, x: Any) -> Any:
        back = self.A.adjoint(x)
        return {"adjoint": back, "zeros": torch.zeros_like(back), "other": 0 * back}[self.how]


@pytest.mark.parametrize("how", ["adjoint", "zeros"])
@pytest.mark.parametrize("rows", [4, 9])
def test_a_reconstruction_is_as_stable_as_its_certificate_says(rows: int, how: str) -> None:
    problem = Measured(rows, how).double()
    certificate, norm = problem.certificate(), float(problem.A.norm())
    assert certificate.lipschitz == pytest.approx(norm / 0.2)
    A = problem.A.weight.detach()
    exact = torch.linalg.solve(A.T @ A + 0.2 * torch.eye(N, dtype=A.dtype), A.T)
    assert torch.linalg.matrix_norm(exact, 2) <= certificate.lipschitz
    x = torch.randn(3, rows, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(opteq.Equilibrium(problem, opteq.FISTA(tol=1e-12))(x), x @ exact.T, atol=1e-9)


def test_a_start_of_unknown_shape_says_nothing_of_the_input() -> None:
    certificate = Measured(4, "other").certificate()
    assert certificate.exists
    assert certificate.lipschitz is None


def test_functions_of_one_object_count_as_those_of_a_class() -> None:
    problem: Any = Written(lambda p, y, x: {"data": data(y, x)})
    problem.features = lambda y: 5 * y
    assert problem.certificate().exists
    assert problem.certificate().lipschitz is None
    wide: Any = Written(lambda p, y, x: {"data": data(y, x)})
    wide.start, wide.curvature = lambda x: x[:, :1] * 0, 1.0  # the Hessian is N
    assert (wide.certificate().contraction, wide.certificate().lipschitz) == (None, None)


def test_bounds_are_attained() -> None:
    problem = Written(lambda p, y, x: {"data": data(y, x), "prior": 0.5 * p.W(y).square().sum(1)}).double()
    problem.W = op.Dense(N, N, bound=0.7).double()
    nn.init.orthogonal_(problem.W.weight)
    low, high, mixed = curvature_of_terms(problem.terms, Input())
    assert (low, mixed) == pytest.approx((1.0, 1.0))
    assert math.isclose(high, 1.49, rel_tol=1e-2)


def test_the_layer_is_as_steep_as_its_certificate_says() -> None:
    problem = Written(KNOWN["weakly convex"]).double()
    problem.curvature = 2.0
    certificate = problem.certificate()
    assert certificate.lipschitz is not None
    assert certificate.contraction is not None
    layer = opteq.Equilibrium(problem, opteq.FISTA(tol=1e-12))
    x = torch.randn(4, N, dtype=torch.float64)
    moved = x + 0.1 * torch.randn_like(x)
    with torch.no_grad():
        assert ((layer(x) - layer(moved)).norm(dim=1) <= certificate.lipschitz * (x - moved).norm(dim=1)).all()
        hidden = problem(x)
        steps = (hidden.step(x) - hidden.step(moved)).norm(dim=1)
        assert (steps <= certificate.contraction * (x - moved).norm(dim=1)).all()


class Hidden(opteq.HiddenProblem):
    """``g = -1/2 |W' y|^2 - <x, y> + c/2 |differences|^2``, as a user would write it."""

    penalty = "relu"

    def __init__(self, weight: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.W, self.weight = op.Dense(N, N, bound=0.6), weight

    def smooth(self, y: Any, x: Any) -> Any:
        likeness = -(x * y).sum(1) - 0.5 * self.W.adjoint(y).square().sum(1)
        return {"likeness": likeness, "rough": 0.5 * self.weight * (y[:, 1:] - y[:, :-1]).square().sum(1)}


@pytest.mark.parametrize("weight", [0.1, 2.0])
def test_the_smooth_part_of_a_hidden_problem_certifies_it(weight: float) -> None:
    problem = Hidden(weight).double()
    certificate = problem.certificate()
    assert certificate.exists
    assert certificate.unique
    y = torch.randn(N, dtype=torch.float64)
    curved = torch.autograd.functional.hessian(
        lambda state: sum(problem.smooth(state[None], y[None]).values()).sum(), y
    )
    steepest = torch.linalg.matrix_norm(curved, 2)
    assert certificate.contraction is not None
    assert steepest <= certificate.contraction <= max(0.36, 4 * weight) + 1e-9
    assert (certificate.contraction < 1) == (weight == 0.1)  # beyond it, G is strongly convex all the same


def test_slices_of_other_shapes_may_be_repeated() -> None:
    for index in (slice(2, None), slice(None, 1), slice(0, 3)):
        problem = Written(lambda p, y, x, index=index: {"a": data(y, x), "b": (y[:, 1:] - y[:, index]).square().sum(1)})
        assert curvature_of_terms(problem.terms, Input())[1] == math.inf
    near = Written(lambda p, y, x: {"a": data(y, x), "b": 0.5 * (y[..., 1:] - y[..., :-1]).square().sum(1)})
    assert curvature_of_terms(near.terms, Input()) == pytest.approx((1.0, 5.0, 1.0))


UNKNOWN: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "'relu'": lambda p, y, x: {"data": torch.relu(y - x).square().sum(1)},
    "a threshold below 20": lambda p, y, x: {"data": F.softplus(y, threshold=2).sum(1)},
    "a sum of squares": lambda p, y, x: {"data": data(y, x), "b": (1 - y.square()).sqrt().sum(1)},
    "and a positive": lambda p, y, x: {"data": data(y, x), "b": (y.square() + 2.0 - 2.0).sqrt().sum(1)},
    "'sqrt'": lambda p, y, x: {"data": data(y, x), "b": y.sqrt().sum(1)},
    "reduction='none'": lambda p, y, x: {"data": F.mse_loss(y, x)},
    "'huber_loss' of values": lambda p, y, x: {"data": F.huber_loss(y.square(), x, reduction="none").sum(1)},
    "'exp' with": lambda p, y, x: {"data": torch.exp(y, out=None).sum(1)},
    "by itself": lambda p, y, x: {"data": data(y, x), "square": (y[:, None] @ y[:, :, None]).flatten(1).sum(1)},
    "two functions of y": lambda p, y, x: {"data": data(y, x), "form": (y * p.W(y)).sum(1)},
    "multiplies two": lambda p, y, x: {"data": data(y, x), "quartic": (y.square() * y).sum(1)},
    "to values of a term": lambda p, y, x: {"data": p.U(data(y, x)).sum(1)},
    "'add_'": lambda p, y, x: {"data": (y + 0).add_(1).square().sum(1)},
    "branches on values": lambda p, y, x: {"data": data(y, x) if x.any() else y.sum(1)},
    "reads 'ndim'": lambda p, y, x: {"data": (y - x).square().sum(1) / x.ndim},
    "divides by": lambda p, y, x: {"data": (y - x).square().sum(1) / x.shape[1]},
    "of y with itself": lambda p, y, x: {"data": torch.einsum("bd,bd->b", y, y)},
    "without '->'": lambda p, y, x: {"data": torch.einsum("bd,ed", y, p.W.weight).square().sum(1)},
    "samples of the batch": lambda p, y, x: {"data": torch.einsum("bd->db", y).square().sum(1)},
    "another dtype": lambda p, y, x: {"data": y.view(torch.complex128).abs().square().sum(1)},
    "dtype": lambda p, y, x: {"data": y.view(dtype=torch.float64).square().sum(1)},
    "pads by": lambda p, y, x: {"data": F.pad(y, (0, x.shape[1])).square().sum(1)},
    "depends on x": lambda p, y, x: {"data": x * y.square()},
    "above -": lambda p, y, x: {"data": data(y, x), "concave": -p.student(2 * y).sum(1)},
    "above 0": lambda p, y, x: {"prior": p.huber(p.K(y)).sum(1)},
    "power of 4": lambda p, y, x: {"data": ((y - x) ** 4).sum(1)},
    "by a tensor": lambda p, y, x: {"data": y[:, torch.zeros(99, dtype=torch.long)].square().sum(1)},
    "'cat'": lambda p, y, x: {"data": torch.cat([y, y], 1).square().sum(1)},
    "divides": lambda p, y, x: {"data": data(y, x) / y.square().sum(1)},
    "joins samples": lambda p, y, x: {"data": data(y, x) + y.square().sum()},
    "selects samples": lambda p, y, x: {"data": data(y, x), "first": (y - y[0]).square().sum(1)},
    "compares values": lambda p, y, x: {"data": data(y, x) * (y == 0)},
    "branches": lambda p, y, x: {"data": data(y, x) if x.is_cuda else -data(y, x)},
    "weights a term": lambda p, y, x: {"data": data(y, x), "masked": -(y.square() * (x > 0)).sum(1)},
    "needs tensors": lambda p, y, x: {"data": 2**y},
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_is_not_known_says_so(reason: str) -> None:
    certificate = Written(UNKNOWN[reason]).certificate()
    assert certificate.exists is None
    assert certificate.unique is None
    assert reason in certificate.reasons["exists"]


def test_repeated_entries_do_not_fool_the_bounds() -> None:
    """Broadcasting repeats what is concave as often as the other operand is long."""
    problem = Written(lambda p, y, x: {"all": (y.square().sum(1, keepdim=True) - 0.9 * p.K(y).square()).sum(1)})
    low, high, _ = curvature_of_terms(problem.terms, Input())
    assert (low, high) == (-math.inf, math.inf)
    inner = Written(lambda p, y, x: {"all": (data(y, x) - 0.1 * p.K(y).square().sum(1)).sum(-1)})
    assert curvature_of_terms(inner.terms, Input())[0] == -math.inf
    spread = Written(lambda p, y, x: {"all": -(y[:, None] + p.weights[:, None]).square().sum(dim=(1, 2))})
    assert curvature_of_terms(spread.terms, Input())[0] == -math.inf


def test_a_matrix_that_acts_on_copies_counts_as_often() -> None:
    """Found by an audit: broadcasting repeats y for every leading dimension of the matrix."""
    weight = torch.eye(2, dtype=torch.float64)[:, :, None, None]
    problem = Written(lambda p, y, x: {"a": -(y[:, None, None, :, None] @ weight).square().flatten(1).sum(1)})
    assert curvature_of_terms(problem.terms, Input())[0] == pytest.approx(-4)


@pytest.mark.parametrize("equation", ["bi,ij->bj", "bi,ij->bi", "bi,ij->bij"])
@pytest.mark.parametrize(("entries", "rows"), [(1, 5), (5, 1), (5, 5)])
def test_entries_that_einsum_repeats_count_as_often(equation: str, entries: int, rows: int) -> None:
    """Found by a review: y may have one entry along an index of the matrix, and the matrix one along an index of y."""
    weight = torch.rand(rows, 4, dtype=torch.float64)

    def term(y: Any) -> Any:
        return -torch.einsum(equation, y, weight).square().flatten(1).sum(1)

    low = curvature_of_terms(lambda y, x: {"a": term(y)}, Input())[0]
    hessian = torch.autograd.functional.hessian(lambda y: term(y[None]).sum(), torch.ones(entries, dtype=torch.float64))
    assert low <= torch.linalg.eigvalsh(hessian)[0] + 1e-9
    assert low > -math.inf or rows == 1


def test_weights_that_depend_on_the_input_say_nothing_of_it() -> None:
    problem = Written(lambda p, y, x: {"data": data(y, x), "b": (y @ x.mean(0).outer(x.mean(0))).square().sum(1)})
    assert problem.certificate().unique
    assert problem.certificate().lipschitz is None
    biased = Written(lambda p, y, x: {"data": data(y, x), "b": F.linear(y, p.W.weight, 9 * x).square().sum(1)})
    assert biased.certificate().lipschitz is None


def test_a_mean_is_strongly_convex_by_an_unknown_number() -> None:
    certificate = Written(KNOWN["means"]).certificate()
    assert certificate.unique
    assert (certificate.contraction, certificate.lipschitz) == (None, None)
    assert "depends on the number of entries" in certificate.reasons["exists"]
    concave = Written(lambda p, y, x: {"data": (y - x).square().mean(1), "c": -1e-9 * y.square().sum(1)})
    assert concave.certificate().unique is None


def test_a_penalty_that_is_not_convex_is_refused() -> None:
    problem = Written(KNOWN["denoising"])
    problem.penalty = "relu"
    assert problem.certificate().unique
    problem.penalty = opteq.penalties.FromActivation(lambda u: 1.5 * u, lipschitz=1.5)
    assert problem.certificate().unique is None


def remembered(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    problem.kept = x.mean(1)
    return {"data": data(y, x), "concave": -problem.kept * y.square().sum(1)}


def caught(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    try:
        count = y.shape[1]
    except Exception:
        count = 1
    return {"data": data(y, x), "concave": -0.1 * count * y.square().sum(1)}


def renamed(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    total = first = data(y, x)
    total -= 0.9 * y.square().sum(1)
    return {"both": first}


def unseen_by_autograd(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    with torch.no_grad():
        held = y + 1
    return {"data": data(y - 2 * held, x)}  # y moves downhill along minus its gradient


def written(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    problem.weight.data.copy_(-x.square().mean())
    return {"data": data(y, x), "concave": problem.weight * y.square().sum(1)}


def written_entries(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    weights = torch.zeros(N)
    weights[:] = -x[0].square()
    return {"data": data(y, x), "concave": (weights * y.square()).sum(1)}


def written_by_a_name(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    torch.mean(-x.square(), dim=(0, 1), out=problem.weight.data)
    return {"data": data(y, x), "concave": problem.weight * y.square().sum(1)}


def longer(problem: Any, y: Any, x: Any) -> dict[str, Any]:
    x.mul_(9)
    return {"data": data(y, x)}


@pytest.mark.parametrize(
    "function",
    [
        lambda p, y, x: {"data": data(y, x), "concave": -x.sub(y).square().sum(1)},
        lambda p, y, x: {"data": data(y, x), "concave": 5 * x.mul(y).cos().sum(1)},
        lambda p, y, x: {"data": data(y, x), "concave": -x.dist(y)},
        lambda p, y, x: {"data": (0.01 if isinstance(x, Tensor) else 1) * data(y, x), "p": 0.5 * p.student(y).sum(1)},
        lambda p, y, x: {"data": data(y, x[0] if isinstance(x, tuple) else x)},
        lambda p, y, x: {"a": 0.1 * y.square().sum(1) + 0.2 * y.square().sum(1), "b": -0.3 * y.square().sum(1)},
        lambda p, y, x: {"nothing": (0.8 * y - (0.1 * y + 0.7 * y)).square().sum(1)},
        lambda p, y, x: {"data": data(y, x) + F.mse_loss(y, x, size_average=True, reduction="none")},
        caught,
        remembered,
        renamed,
        unseen_by_autograd,
        written,
        written_entries,
        written_by_a_name,
        longer,
    ],
)  # fmt: skip
def test_nothing_false_is_certified(function: Any) -> None:
    """Found by an audit: each of these was called convex."""
    problem = Written(function)
    certificate = problem.certificate()
    assert certificate.exists is None
    assert certificate.unique is None
    assert certificate.lipschitz is None


def test_tensors_of_an_earlier_input_are_no_weights() -> None:
    problem = Written(lambda p, y, x: {"data": data(y, x), "ridge": p.kept * y.square().sum(1)})
    problem.kept = torch.ones(1)  # by an earlier call; another input may make it negative
    assert problem.certificate().unique is None
    assert "no parameter or buffer" in problem.certificate().reasons["unique"]


def test_certificates_leave_nothing_behind() -> None:
    def cached(problem: Any, y: Any, x: Any) -> dict[str, Any]:
        if not hasattr(problem, "kept"):
            problem.kept = x.mean(1, keepdim=True)
        return {"data": data(y, x - problem.kept)}

    problem = Written(cached)
    problem.certificate()
    assert not hasattr(problem, "kept")
    assert opteq.Equilibrium(problem)(torch.ones(2, N)).abs().max() < 1e-6


def test_an_error_of_the_code_is_no_certificate() -> None:
    with pytest.raises(NotKnown, match="no tensor"):
        curvature_of_terms(lambda y, x: {"data": 3.0}, Input())


def random_objective(seed: int) -> Callable[[Any, Any], dict[str, Any]]:
    """Terms put together at random: linear maps, slices, constants of several shapes, squares, potentials and sums."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    maps = [op.Dense(N, rng.choice([1, 3, N]), bound=rng.uniform(0.3, 1.5)).double() for _ in range(2)]
    plain = nn.Linear(N, rng.choice([2, N])).double()
    classic = [potentials.Huber(0.5), potentials.Student(0.7), potentials.Gaussian(0.6), potentials.GemanMcClure(0.8)]
    bends = [
        *(one.double() for one in classic),
        nn.Softplus(beta=2.0),
        F.logsigmoid,
        torch.sin,
        torch.sigmoid,
        torch.tanh,
    ]
    shapes = ((), (N,), (N,), (3, 1), (1,))
    constants = [torch.randn(shape, dtype=torch.float64) for shape in shapes] + [torch.rand(N, dtype=torch.float64)]
    slices = [(slice(1, None), slice(None, -1)), (slice(1, None), slice(None, 1)), (slice(0, 1), slice(None))]

    def linear(depth: int) -> Callable[[Any, Any], Any]:
        one, other = (linear(depth - 1), linear(depth - 1)) if depth else (None, None)
        if one is None or other is None:
            return rng.choice([lambda y, x: y, lambda y, x: y - x])
        chosen, constant, number, (i, j) = (
            rng.choice(maps),
            rng.choice(constants),
            rng.uniform(-2, 2),
            rng.choice(slices),
        )
        return rng.choice([
            lambda y, x: one(y, x) * number, lambda y, x: one(y, x) + constant, lambda y, x: constant * one(y, x),
            lambda y, x: one(y, x)[..., i] - one(y, x)[..., j], lambda y, x: one(y, x) - other(y, x),
            lambda y, x: chosen(y), lambda y, x: plain(one(y, x)), lambda y, x: chosen(one(y, x)),
            lambda y, x: chosen.adjoint(chosen(y)) - chosen(x),
            lambda y, x: F.pad(one(y, x), (1, 0)) - F.pad(other(y, x), (0, 1)), lambda y, x: one(y, x).cumsum(-1),
            lambda y, x: F.pad(one(y, x), (1, 2), mode="replicate"), lambda y, x: other(y, x) - one(y, x).roll(1, -1),
            lambda y, x: torch.einsum("...k,dk->...d", one(y, x), plain.weight),
            lambda y, x: one(y, x).reshape(y.shape[0], -1, 2).transpose(1, 2).flatten(1),
        ])  # fmt: skip

    def bent(depth: int) -> Callable[[Any, Any], Any]:
        inner, potential = linear(rng.randrange(3)), rng.choice(bends)
        if not depth:
            return rng.choice([
                lambda y, x: inner(y, x).square(), lambda y, x: potential(inner(y, x)),
                lambda y, x: inner(y, x).logsumexp(-1, keepdim=True),
            ])  # fmt: skip
        one, other, constant = bent(depth - 1), bent(depth - 1), rng.choice(constants)
        number, keep = rng.uniform(-2, 2), rng.random() < 0.5
        return rng.choice([
            lambda y, x: number * one(y, x), lambda y, x: one(y, x) * constant, lambda y, x: one(y, x) + other(y, x),
            lambda y, x: one(y, x).sum(-1, keepdim=keep), lambda y, x: one(y, x).mean(-1, keepdim=True),
            lambda y, x: constant - one(y, x), lambda y, x: (one(y, x) + abs(number)).sqrt(),
        ])  # fmt: skip

    whole = bent(3)
    return lambda y, x: {"all": whole(y, x).flatten(1).sum(1)}


def test_random_objectives_bend_within_their_bounds() -> None:
    """Where the bounds are known, and the code runs: broadcasting fails for some, and joins samples in others."""
    held = 0
    for seed in range(350):
        terms = random_objective(seed)
        y, x = torch.randn(2, 2, N, dtype=torch.float64)
        try:
            low, high, _ = curvature_of_terms(terms, Input())
            if (low, high) == (-math.inf, math.inf):
                continue
            found = torch.autograd.functional.hessian(lambda state: terms(state, x)["all"].sum(), y)  # noqa: B023
        except (NotKnown, RuntimeError, IndexError, ValueError):
            continue
        spectrum = torch.linalg.eigvalsh(found[0, :, 0])
        if bool(found[0, :, 1].any()):
            continue
        tolerance = 1e-9 * (1 + float(spectrum.abs().max()))
        assert low - tolerance <= spectrum[0], seed
        assert spectrum[-1] <= high + tolerance, seed
        held += 1
    assert held > 50


class Regression(opteq.Objective):
    takes_tuples = True

    def terms(self, w: Any, x: Any) -> dict[str, Any]:
        X, target = x
        fit = 0.5 * ((X * w[:, None]).sum(-1) - target).square().mean(1)
        return {"fit": fit, "ridge": 0.1 * w.square().sum(1)}


def test_an_input_of_several_tensors_may_be_unpacked_and_weight_the_state() -> None:
    certificate = Regression().certificate()
    assert certificate.exists
    assert certificate.unique
    assert certificate.lipschitz is None
    assert "the terms are 0.2-strongly convex" in str(certificate)


@pytest.mark.parametrize("name", ["loop", "zip"])
def test_an_input_taken_apart_otherwise_is_not_followed(name: str) -> None:
    parts = {"loop": lambda x: [(1.0, t) for t in x], "zip": lambda x: zip((1.0, -2.0), x, strict=False)}[name]
    problem = Written(lambda p, y, x: {"data": sum(w * (y - t).square().sum(1) for w, t in parts(x))})
    assert "it takes the input apart by a loop or a function" in str(problem.certificate())


def test_a_linear_term_whose_slope_depends_on_the_input_leaves_no_bound_on_how_the_minimiser_moves() -> None:
    for term in (lambda y, x: F.linear(y, x).sum(1), lambda y, x: (x * y).sum(1) + y.sum(1)):
        problem = Written(lambda p, y, x, term=term: {"data": data(y, x), "tilt": term(y, x)})
        assert problem.certificate().unique
        assert problem.certificate().lipschitz is None
    tilted = Written(lambda p, y, x: {"data": data(y, x), "tilt": 0.3 * y.sum(1) + (p.U.bias * y).sum(1)})
    assert tilted.certificate().lipschitz == 1
