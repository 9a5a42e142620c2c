"""Laws 8 and 10: an ordinary module, whose memory does not grow with the number of steps."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import distributed_worker
import opteq
from all_cases import CASES
from cases import EXACT_GRADIENTS, ROUGH_GRADIENTS, SOLVERS, Case, by_name
from opteq import operators as op
from opteq.gradients import Gradient
from opteq.states import blocks
from oracles import difference, gradients, probe_loss
from training_cases import start

ids = [case.name for case in CASES]
GRADIENTS = {**EXACT_GRADIENTS, **ROUGH_GRADIENTS}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_copies_are_equal_and_independent(case: Case) -> None:
    solver = opteq.Anderson(max_steps=20)  # copies are equal at any tolerance
    layer = opteq.Equilibrium(case.problem(), solver, opteq.Phantom(), on_failure="ignore")
    x = case.input()
    layer(x)  # so that reports of an earlier call are there to be left behind
    expected = [part.detach() for part in blocks(layer(x))]
    clone = opteq.Equilibrium(case.problem(), solver, opteq.Phantom(), on_failure="ignore")
    for weight in clone.parameters():
        weight.data.zero_()
    clone.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == layer.state_dict().keys()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), clone):
        for found, wanted in zip(blocks(other(x)), expected, strict=True):
            torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=0)
        for weight in other.parameters():
            weight.data.fill_(0.01)
    for found, wanted in zip(blocks(layer(x)), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=0)


@pytest.mark.chosen
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_inference_mode_changes_nothing(case: Case) -> None:
    """Some torch take derivatives for zero there, and steps and judgements of minima are made of derivatives."""
    layer = opteq.Equilibrium(case.problem(), opteq.Anderson(max_steps=8), on_failure="ignore")
    with torch.no_grad():
        expected = layer.solve(case.input())
    with torch.inference_mode():
        found = layer.solve(case.input())
    assert found.status == expected.status
    torch.testing.assert_close(blocks(found.state), blocks(expected.state), rtol=0, atol=0)


def _product(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x * z + 0.5)


class _Quadratic(opteq.Objective):
    """Neither a step nor its gradient by the matrix needs the matrix again, but products with the Hessian do."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(0.2 * torch.rand(4, 4))

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y - x).square().sum(1), "form": ((y @ self.matrix) * y).sum(1)}


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.linear(z) + x)


class _Around(opteq.Objective):
    """The objective of a layer whose terms call another layer on the input."""

    curvature = 1.6

    def __init__(self, inner: opteq.Equilibrium) -> None:
        super().__init__()
        self.inner = inner

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y - x).square().sum(1), "near": 0.3 * (y - self.inner(x).mean(1, True)).square().sum(1)}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize(
    "case",
    [*by_name("opteq-relu"), Case("quadratic", _Quadratic, (4,))],
    ids=lambda case: case.name,
)
def test_a_layer_inside_the_terms_of_another_has_its_gradient(case: Case, gradient: Gradient) -> None:
    """Terms are called inside of torch.func, and what depends on the input alone is tracked by autograd outside."""
    torch.manual_seed(0)
    x = case.input()
    if isinstance(gradient, opteq.Phantom | opteq.Unrolled) and gradient.steps > 60:
        gradient = dataclasses.replace(gradient, steps=60)  # these maps contract by a half at least
    inner = opteq.Equilibrium(case.problem(), opteq.Anderson(tol=1e-12, max_steps=200), gradient)
    layer = opteq.Equilibrium(_Around(inner), opteq.FISTA(tol=1e-12, measure="error"), opteq.Implicit(tol=1e-12))
    tracked = [x.requires_grad_(), *layer.parameters()]
    closed = (x + 0.6 * inner(x).mean(1, True)) / 1.6  # where the gradient of the terms is zero
    assert difference(gradients(layer(x), tracked), gradients(closed, tracked)) < 1e-6  # Shine amplifies rounding


CHANGED = [
    *CASES,
    Case("quadratic", _Quadratic, (4,)),
    Case("cell", lambda: opteq.FixedPoint(_Cell()), (4,)),
    Case("product", lambda: opteq.FixedPoint(_product), (4,)),
]


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("case", CHANGED, ids=lambda case: case.name)
def test_changes_in_place_before_backward_are_errors_or_without_effect(case: Case, traced: bool) -> None:
    """As in torch: an optimiser's step between forward and backward, or an input that is used again."""
    layer = opteq.Equilibrium(case.problem(), opteq.Anderson(max_steps=30), on_failure="ignore")
    weights = list(layer.parameters())

    def gradients(change: bool) -> list[Tensor]:
        x = case.input().div(4).requires_grad_()
        given = x + 0
        loss = sum((part.square().sum() for part in blocks(layer(given))), x.new_zeros(()))
        if change:
            with torch.no_grad():
                for changed in (*weights, given):
                    changed.add_(0.2)
        found = torch.autograd.grad(loss, [x, *weights], allow_unused=True)
        return [one for one in found if one is not None]

    for _ in range(3 * traced):
        gradients(change=False)
    expected = gradients(change=False)
    try:
        found = gradients(change=True)
    except RuntimeError as error:
        message = str(error)
    else:
        torch.testing.assert_close(found, expected)
        return
    assert "modified by an inplace operation" in message


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep written"), ids=lambda case: case.name)
def test_functional_transforms(case: Case, gradient: Gradient) -> None:
    layer = opteq.Equilibrium(case.problem(), opteq.Anderson(tol=1e-12, max_steps=60), gradient, on_failure="ignore")
    x = case.input()
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, weights, (x,)).square().sum()

    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    whole = grad(loss)(weights, x)
    assert difference(list(whole.values()), expected) < 1e-9
    a_sample = vmap(grad(loss), in_dims=(None, 0))(weights, x[:, None])
    assert difference([g.sum(dim=0) for g in a_sample.values()], expected) < 1e-6


@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep written"), ids=lambda case: case.name)
def test_vmap_and_jacrev(case: Case) -> None:
    layer = opteq.Equilibrium(case.problem(), opteq.Anderson(tol=1e-12, max_steps=60)).requires_grad_(False)
    x = case.input()
    torch.testing.assert_close(vmap(lambda one: layer(one[None])[0])(x), layer(x), rtol=1e-9, atol=1e-11)
    expected = torch.autograd.functional.jacobian(lambda x: layer(x), x)
    torch.testing.assert_close(jacrev(lambda x: layer(x))(x), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep"), ids=lambda case: case.name)
def test_jacobians_by_batched_gradients_are_right_or_refused(case: Case) -> None:
    x = case.input(1)
    jacobian = torch.autograd.functional.jacobian
    for gradient in (opteq.Phantom(), opteq.Shine()):
        layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"], gradient)
        expected = jacobian(lambda x, layer=layer: layer(x), x)
        torch.testing.assert_close(jacobian(lambda x, layer=layer: layer(x), x, vectorize=True), expected)
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"])
    with pytest.raises(RuntimeError, match=r"do not pass through an adjoint solve; use torch\.func\.jacrev"):
        jacobian(lambda x: layer(x), x, vectorize=True)


@pytest.mark.parametrize("case", by_name("opteq-relu opteq-conv deep"), ids=lambda case: case.name)
def test_inside_a_compiled_model(case: Case) -> None:
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"])
    model = nn.Sequential(layer, nn.Flatten(), nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    x = case.input().requires_grad_()
    inputs = [x, *model.parameters()]
    torch.testing.assert_close(compiled(x), model(x))
    assert difference(gradients(compiled(x), inputs), gradients(model(x), inputs)) < 1e-12


def test_second_derivatives_are_refused_by_adjoint_solves() -> None:
    (case,) = by_name("opteq-tanh")
    x = case.input().requires_grad_()
    for gradient in (opteq.Implicit(), opteq.Shine()):
        layer = opteq.Equilibrium(case.problem(), SOLVERS["broyden"], gradient)
        # A loss that is linear in the features: nothing but the layer could make the gradient depend on x.
        (slope,) = torch.autograd.grad(probe_loss(layer(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"can't be differentiated again.*Unrolled"):
            torch.autograd.grad(slope.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="can't be differentiated again"):
            torch.autograd.grad(slope.sum(), list(layer.parameters()), allow_unused=True)


@pytest.mark.parametrize("gradient", [opteq.Unrolled(steps=60), opteq.Phantom(steps=60, damping=1.0)], ids=str)
def test_second_derivatives_are_right_on_a_tape(gradient: Gradient) -> None:
    (case,) = by_name("opteq-tanh")
    layer = opteq.Equilibrium(case.problem(), opteq.Picard(tol=1e-14, max_steps=200), gradient, on_failure="ignore")
    x = case.input(1).requires_grad_()
    if isinstance(gradient, opteq.Unrolled):
        assert torch.autograd.gradgradcheck(lambda x: probe_loss(layer(x)), (x,), atol=1e-6)
    else:  # a phantom gradient is the derivative of its own steps, with the point they start from held fixed
        (slope,) = torch.autograd.grad(probe_loss(layer(x)), x, create_graph=True)
        assert torch.isfinite(torch.autograd.grad(slope.sum(), x)[0]).all()


# torch scripts a formula of its own in forward mode, and warns about that.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_is_refused_or_right() -> None:
    (case,) = by_name("opteq-tanh")
    x, tangent = case.input(), case.input(seed=1)
    for gradient in (opteq.Implicit(), opteq.Phantom(), opteq.OneStep(), opteq.Shine()):
        layer = opteq.Equilibrium(case.problem(), SOLVERS["broyden"], gradient)
        with pytest.raises(RuntimeError, match=r"forward-mode differentiation .* does not pass"):
            jvp(layer, (x,), (tangent,))
    layer = opteq.Equilibrium(case.problem(), SOLVERS["picard"], opteq.Unrolled(60), on_failure="ignore")
    _, found = jvp(layer, (x,), (tangent,))
    expected = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_hessians_by_forward_over_reverse_are_refused_or_right() -> None:
    """The dual numbers of ``torch.func.hessian`` lie below its reverse mode, where the input does not show them."""
    (case,) = by_name("opteq-tanh")
    x = case.input(1)

    def loss(gradient: Gradient) -> Callable[[Tensor], Tensor]:
        layer = opteq.Equilibrium(case.problem(), SOLVERS["picard"], gradient, on_failure="ignore")
        return lambda x: probe_loss(layer(x))

    with pytest.raises(RuntimeError, match=r"forward-mode differentiation .*hessian\) does not pass"):
        hessian(loss(opteq.Implicit()))(x)
    for gradient in (opteq.Unrolled(60), opteq.Phantom()):
        expected = torch.autograd.functional.hessian(loss(gradient), x)
        torch.testing.assert_close(hessian(loss(gradient))(x), expected)


def test_export_of_an_equilibrium_says_what_to_do() -> None:
    (case,) = by_name("written")
    with pytest.raises(RuntimeError, match=r"torch.export can't take an equilibrium as it is: .*fixed number of steps"):
        torch.export.export(opteq.Equilibrium(case.problem()), (case.input(),), strict=False)


def kept_bytes(steps: int, gradient: Gradient) -> int:
    problem = opteq.OptEq(op.Dense(40, 40, bound=0.99), None).double()
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-300, max_steps=steps), gradient, on_failure="ignore")
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = layer(torch.randn(8, 40, dtype=torch.float64))
    assert features.requires_grad
    return sum(kept.values())


def test_implicit_memory_does_not_grow_with_the_steps() -> None:
    for gradient in (opteq.Implicit(), opteq.OneStep(), opteq.Shine()):
        assert kept_bytes(100, gradient) == kept_bytes(10, gradient)
    assert kept_bytes(100, opteq.Phantom(steps=5)) == kept_bytes(10, opteq.Phantom(steps=5))
    # The measure does see memory where it grows.
    assert kept_bytes(10, opteq.Unrolled(steps=60)) > 2 * kept_bytes(10, opteq.Unrolled(steps=10))


def test_distributed_data_parallel_averages_gradients(tmp_path: Path) -> None:
    """Two processes with half a batch each against one with the whole batch."""
    processes = [start(distributed_worker.main, rank, str(tmp_path)) for rank in range(2)]
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    (case,) = by_name("opteq-relu")
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"])
    expected = torch.autograd.grad(layer(case.input(4)).square().mean(), list(layer.parameters()))
    assert difference(found, expected) < 1e-9


@pytest.mark.parametrize("gradient", [opteq.Implicit(tol=1e-12), opteq.Unrolled(10)], ids=["implicit", "unrolled"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("opteq-relu", "written", "affine", "splitting", "mopteq-perturbed")],
    ids=lambda case: case.name,
)
def test_inside_a_checkpoint_that_is_not_reentrant(case: Case, gradient: Gradient) -> None:
    """Its hooks on saved tensors kept torch.func from running, and so every step that comes from autograd."""
    layer = opteq.Equilibrium(case.problem(), SOLVERS["anderson"], gradient, on_failure="ignore")

    def loss(x: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in blocks(layer(x))]).sum()

    x = case.input(2).requires_grad_()
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    expected = torch.autograd.grad(loss(x), [x, *weights], allow_unused=True)
    inside = checkpoint(loss, x, use_reentrant=False)
    for found, wanted in zip(torch.autograd.grad(inside, [x, *weights], allow_unused=True), expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
