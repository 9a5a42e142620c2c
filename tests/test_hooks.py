"""Hooks: refused on W, where they would have no effect; honoured on U, whose norm is unknown then."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import opteq
from opteq import kernels
from opteq import operators as op
from opteq.problems.base import Problem


def old_spectral_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(module)


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "spectral_norm": old_spectral_norm,
    "weight_norm": old_weight_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "hook": lambda module: module.register_forward_hook(lambda module, given, found: 10 * found),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda module, given: (10 * given[0],)),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
}
PROBLEMS: dict[str, Callable[[op.Operator, nn.Module], Problem]] = {
    "opteq": opteq.OptEq,
    "deep": lambda W, U: opteq.DeepOptEq([(W, U), (op.Dense(4, 6, bound=0.5), None)]),
    "popteq": lambda W, U: opteq.POptEq([opteq.Branch(W, U), opteq.Branch(op.Dense(4, 6, bound=0.5), nn.Linear(3, 6))]),
    "mopteq": lambda W, U: opteq.MOptEq([opteq.Branch(W, U)]),
    "geq": lambda W, U: opteq.GEQ(W, U, kernel=kernels.Gaussian(gamma=0.3)),
    "geq-linear": lambda W, U: opteq.GEQ(op.Stack([W]), nn.Sequential(U, nn.Linear(6, 4)), kernel=kernels.Linear()),
    "parallel": lambda W, U: opteq.Parallel([opteq.OptEq(W, U)]),
    "affine": lambda W, U: opteq.AffineOptEq(opteq.OptEq(W, U), torch.eye(4)),
}
each_hook = pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
each_problem = pytest.mark.parametrize("build", PROBLEMS.values(), ids=PROBLEMS)
REFUSAL = r"(?s)W.* has hooks .*torch\.nn\.utils\.parametrize"


def maps() -> tuple[op.Dense, nn.Linear]:
    return op.Dense(4, 6, bound=0.8), nn.Linear(3, 6)


def seeded(build: Callable[..., Problem], W: op.Operator, U: nn.Module) -> Problem:
    """The same other parts every time."""
    torch.manual_seed(1)
    return build(W, U)


@each_hook
@each_problem
def test_a_hook_on_w_is_refused_at_construction(build: Callable[..., Problem], hook: Callable[..., object]) -> None:
    W, U = maps()
    hook(W)
    with pytest.raises(ValueError, match=REFUSAL):
        build(W, U)(torch.zeros(2, 3))  # a stack looks at its parts when it is bound


@each_hook
@each_problem
def test_a_hook_on_w_is_refused_later(build: Callable[..., Problem], hook: Callable[..., object]) -> None:
    W, U = maps()
    problem = build(W, U)
    assert problem.certificate().contraction is not None or build is PROBLEMS["affine"]
    hook(W)
    with pytest.raises(ValueError, match=REFUSAL):
        problem(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=REFUSAL):
        problem.certificate()


@each_hook
def test_a_hook_on_the_projection_of_a_kernel_is_refused(hook: Callable[..., object]) -> None:
    problem = opteq.GEQ(op.Conv2d(2, 2, kernel_size=3), kernel=kernels.Gaussian(0.3, patch=2, split=2, hidden=3))
    projection = problem.kernel.projection
    assert projection is not None
    hook(projection)
    with pytest.raises(ValueError, match=r"kernel.projection has hooks"):
        problem(torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize("hook", list(HOOKS.values())[:5], ids=list(HOOKS)[:5])
@each_problem
def test_a_hook_on_u_acts_and_its_norm_is_unknown(build: Callable[..., Problem], hook: Callable[..., object]) -> None:
    W, U = maps()
    problem = seeded(build, W, U)
    before = problem.certificate()
    hook(U)
    x = torch.randn(2, 3)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6))

    class Once(nn.Module):
        """The same values, without a hook."""

        def forward(self, x: Tensor) -> Tensor:
            return U(x)

    U.eval()  # spectral_norm would take another step of its iteration
    reference = opteq.Equilibrium(seeded(build, W, Once()), opteq.Anderson(tol=1e-6))
    for a, b in zip(torch.atleast_1d(layer(x)), torch.atleast_1d(reference(x)), strict=True):
        torch.testing.assert_close(a, b)
    torch.stack([part.square().sum() for part in torch.atleast_1d(layer(x))]).sum().backward()
    assert all(p.grad is not None for p in U.parameters())
    after = problem.certificate()
    assert (after.exists, after.unique, after.contraction) == (before.exists, before.unique, before.contraction)
    if before.lipschitz is not None:
        assert after.lipschitz is None
        assert "not known" in after.reasons["lipschitz"]


@each_problem
def test_parametrisations_act_and_are_certified(build: Callable[..., Problem]) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    W, U = maps()
    plain = seeded(build, W, U)
    parametrize.register_parametrization(W, "weight", Double())
    parametrizations.spectral_norm(U)
    problem = seeded(build, W, U)
    layer = opteq.Equilibrium(problem)
    torch.stack([part.square().sum() for part in torch.atleast_1d(layer(torch.randn(2, 3)))]).sum().backward()
    assert all(p.grad is not None for p in (*W.parameters(), *U.parameters()))
    assert problem.certificate().contraction == pytest.approx(plain.certificate().contraction)


class Pulled(opteq.HiddenProblem):
    """Written by a user, who calls W."""

    penalty = "tanh"

    def __init__(self, W: op.Operator) -> None:
        super().__init__()
        self.W = W

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -0.25 * self.W(y).square().sum(1) - (x * y).sum(1)


class Matched(opteq.Objective):
    """Likewise, with the whole objective."""

    def __init__(self, W: op.Operator) -> None:
        super().__init__()
        self.W = W

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": (self.W(y) - x).square().sum(1), "ridge": y.square().sum(1)}


class Map(nn.Module):
    """Likewise, without an objective."""

    def __init__(self, W: op.Operator) -> None:
        super().__init__()
        self.W = W

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + x)


WRITTEN: dict[str, Callable[[op.Operator], Problem]] = {
    "hidden": Pulled,
    "objective": Matched,
    "map": lambda W: opteq.FixedPoint(Map(W)),
}
each_written = pytest.mark.parametrize("build", WRITTEN.values(), ids=WRITTEN)


@pytest.mark.parametrize("hook", list(HOOKS.values())[:3], ids=list(HOOKS)[:3])
@each_written
def test_old_reparametrisations_in_own_functions_are_refused(
    build: Callable[..., Problem], hook: Callable[..., object]
) -> None:
    """Their weights were those of an earlier call, and what they train got no gradient."""
    W = op.Dense(4, 4, bound=0.8)
    problem = build(W)
    problem(torch.zeros(2, 4))
    hook(W)
    with pytest.raises(ValueError, match=REFUSAL):
        problem(torch.zeros(2, 4))


@each_written
def test_hooks_after_a_call_act_in_own_functions(build: Callable[..., Problem]) -> None:
    W = op.Dense(4, 4, bound=0.8)
    layer = opteq.Equilibrium(build(W), opteq.Anderson(tol=1e-6))
    x = torch.randn(2, 4)
    plain = layer(x)
    W.register_forward_hook(lambda module, given, found: 0.5 * found)
    assert not torch.allclose(layer(x), plain, rtol=1e-3)


class Tripled(op.Dense):
    """With a forward of its own, and the norm of what it inherits."""

    def forward(self, v: Tensor) -> Tensor:
        return 3 * super().forward(v)


@each_problem
def test_a_w_with_its_own_forward_is_refused(build: Callable[..., Problem]) -> None:
    with pytest.raises(ValueError, match=r"(?s)W.* has its own forward, which would have no effect"):
        build(Tripled(4, 6, bound=0.8), nn.Linear(3, 6))(torch.zeros(2, 3))


class Scale(nn.Identity):
    """A subclass that is not the identity."""

    def forward(self, input: Tensor) -> Tensor:
        return 5 * input


class Standardised(nn.Conv2d):
    """It inherits the forward, and not the convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, 50 * weight, bias)


@pytest.mark.parametrize("U", [Scale(), Standardised(3, 3, 1), Tripled(4, 4)], ids=lambda U: type(U).__name__)
def test_the_norm_of_a_subclass_that_computes_something_else_is_unknown(U: nn.Module) -> None:
    assert op.module_norm(U) is None
    assert op.module_norm(nn.Sequential(nn.Identity(), U)) is None


def test_torchinfo_sums_a_layer_up() -> None:
    """By hooks on every module that read the sizes of tensors and fail on anything else."""
    seen: dict[nn.Module, tuple[int, ...]] = {}

    def hook(module: nn.Module, given: object, found: object) -> None:
        if not isinstance(found, Tensor):
            raise TypeError(f"Model contains a layer with an unsupported input or output type: {found}")
        seen[module] = tuple(found.shape)

    hook.__module__ = "torchinfo.torchinfo"
    W, U = maps()
    layer = opteq.Equilibrium(opteq.OptEq(W, U))
    x = torch.randn(2, 3)
    plain, certificate = layer(x), layer.problem.certificate()
    for module in layer.modules():
        module.register_forward_hook(hook)
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)
    assert (seen[layer], seen[U]) == ((2, 4), (2, 6))
    assert layer.problem.certificate() == certificate
