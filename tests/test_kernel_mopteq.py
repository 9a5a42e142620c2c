"""MOptEq whose branches see the input through a kernel, against autograd, scipy, finite differences and GEQ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opteq
from lazy import lazily
from opteq import kernels
from opteq import operators as op
from opteq.kernels.inner_product import InnerProduct
from opteq.models.blocks.kernel_mopteq import KernelMOptEq
from opteq.problems import GEQ
from opteq.problems.hidden import Hidden
from opteq.states import inner

optimize = lazily("scipy.optimize")
KERNELS = [kernels.Sigmoid(), kernels.Polynomial(2)]


def problem(kernel: InnerProduct, count: int = 3, **options: object) -> KernelMOptEq:
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Dense(3, 4, bound=0.6), nn.Linear(2, 4)) for _ in range(count)]
    return KernelMOptEq(branches, kernel, **options).double()


@pytest.mark.parametrize("kernel", KERNELS, ids=["sigmoid", "polynomial"])
def test_closed_forms_agree_with_autograd(kernel: InnerProduct) -> None:
    hidden = problem(kernel, diversity=0.1, smoothing=0.2)(torch.randn(2, 2).double())
    y = tuple(torch.rand(2, 4).double() for _ in range(3))
    for own, other in zip(hidden.preactivation(y), Hidden.preactivation(hidden, y), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)
    v = tuple(torch.randn(2, 4).double() for _ in range(3))
    for own, other in zip(hidden.negative_hessian_at(y)(v), Hidden.negative_hessian_at(hidden, y)(v), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_scipy_finds_the_same_minimiser() -> None:
    made = problem(kernels.Sigmoid(), diversity=0.05, smoothing=0.2)
    x = 0.5 * torch.randn(1, 2).double()
    solution = opteq.Equilibrium(made, opteq.Anderson(tol=1e-11, max_steps=300)).solve(x)
    assert bool(solution.converged.all())
    hidden = made(x)

    def split(flat: np.ndarray) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(flat.reshape(3, 1, 4)).unbind())

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        y = tuple(part.clone().requires_grad_() for part in split(flat))
        total = sum(part.square().sum() / 2 for part in y) + hidden.smooth(y).sum()
        grads = torch.autograd.grad(total, y)
        return float(total.detach()), torch.stack(grads).flatten().numpy()

    found = optimize.minimize(
        value, np.full(12, 0.1), jac=True, bounds=[(0, None)] * 12, options={"ftol": 1e-15, "gtol": 1e-12}
    )
    torch.testing.assert_close(
        torch.cat(solution.state).flatten().detach(), torch.from_numpy(found.x), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=["sigmoid", "polynomial"])
def test_one_branch_is_geq(kernel: InnerProduct) -> None:
    """One branch without D: ``W W' y`` is the coupling of GEQ with the transposed operator."""
    alone = problem(kernel, count=1, activation="tanh")
    branch = alone.branch_list()[0]
    other = GEQ(op.Dense(4, 3, bound=0.6).double(), branch.U, kernel, activation="tanh")
    other.W.weight.data.copy_(branch.W.weight.data.T)
    x, y = torch.randn(2, 2).double(), torch.rand(2, 4).double()
    torch.testing.assert_close(alone(x).step((y,))[0], other(x).step(y))
    torch.testing.assert_close(alone(x).objective((y,)), other(x).objective(y))
    torch.testing.assert_close(alone(x).start()[0], other(x).start())


def test_the_implicit_gradient() -> None:
    layer = opteq.Equilibrium(problem(kernels.Sigmoid(), activation="tanh"), opteq.Anderson(tol=1e-12, max_steps=300))
    x = torch.randn(2, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: layer(given), (x,), eps=1e-6, atol=1e-6)


def test_it_refuses_what_it_cannot_do() -> None:
    with pytest.raises(TypeError, match=r"kernels.Sigmoid\(\); got Gaussian"):
        problem(kernels.Gaussian())  # type: ignore[arg-type]
    certificate = problem(kernels.Sigmoid()).certificate()
    assert (certificate.exists, certificate.unique) == (True, None)
    assert problem(kernels.Polynomial(2)).certificate().exists is None


def test_inhibition_around_a_kernel_is_not_called_convex() -> None:
    wrapped = opteq.Inhibited(problem(kernels.Polynomial(2)), [op.Dense(3, 4) for _ in range(3)]).double()
    hidden = wrapped(10 * torch.randn(1, 2).double())
    v = tuple(c.detach() for c in hidden.rest.injections)
    assert bool(inner(v, hidden.hessian_at(hidden.start())(v)).detach() < 0)
    assert not hidden.convex
    assert wrapped.certificate().unique is None
