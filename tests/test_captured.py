"""Bounds captured as CUDA graphs: the same numbers and gradients, however calls and backward passes interleave."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from opteq import operators as op
from opteq.operators import captured
from opteq.operators.captured import Job, in_one_launch
from opteq.operators.norms import _scale, bounded

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_on_a_cpu_the_function_is_called_as_it_is() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (value,) = in_one_launch(Job(lambda t: t.square().sum(), "square", (x,)))
    assert float(value.detach()) == 5
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    assert torch.autograd.grad(slope.sum(), x)[0].tolist() == [2, 2]


def eager(weight: Tensor, bound: float) -> Tensor:
    return weight * _scale(bound, weight)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_scaled_weight_has_the_derivatives_of_its_formula(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    v = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    wanted = eager(weight, 0.7)
    monkeypatch.setattr(captured, "_capturable", lambda inputs: True)
    monkeypatch.setattr(captured, "_graph", lambda *form, **apart: None)
    found = bounded(weight, 0.7)
    assert type(found.grad_fn).__name__ == "_ScaledBackward"
    torch.testing.assert_close(found, wanted)
    for create in (False, True):
        (slope,) = torch.autograd.grad(found, weight, v, create_graph=create, retain_graph=True)
        (expected,) = torch.autograd.grad(wanted, weight, v, create_graph=create, retain_graph=True)
        torch.testing.assert_close(slope, expected)
    second = torch.autograd.grad(slope.square().sum(), weight)[0]
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), weight)[0])
    small = weight.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(eager(small, 0.7), small, v.float())
    with torch.autocast("cpu", torch.bfloat16):  # which is no concern of a bound
        (slope,) = torch.autograd.grad(bounded(small, 0.7), small, v.float(), create_graph=True)
    torch.testing.assert_close(slope, expected)
    many = torch.randn(3, *v.shape, dtype=torch.float64)
    (slopes,) = torch.autograd.grad(bounded(weight, 0.7), weight, many, is_grads_batched=True)
    for own, one in zip(slopes, many, strict=True):
        torch.testing.assert_close(own, torch.autograd.grad(eager(weight, 0.7), weight, one)[0])


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("shape", [(6, 4), (8, 5, 3, 3), (4, 4, 1, 1)])
def test_captured_equals_eager_when_passes_interleave(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3)]
    outputs = [bounded(w, 0.7) for w in weights]  # three forward passes before the first backward
    for w, found in zip(weights, outputs, strict=True):
        wanted = eager(w, 0.7)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        v = torch.randn_like(found)
        (slope,) = torch.autograd.grad(found, w, v)
        (expected,) = torch.autograd.grad(wanted, w, v)
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@cuda
def test_second_derivatives_no_grad_inference_and_copies() -> None:
    torch.manual_seed(0)
    operator = op.Conv2d(4, 6, 3, bound=0.7).cuda()
    operator.weight.data.mul_(2)
    w = operator.weight
    (slope,) = torch.autograd.grad(bounded(w, 0.7).square().sum(), w, create_graph=True)
    (expected,) = torch.autograd.grad(eager(w, 0.7).square().sum(), w, create_graph=True)
    second = torch.autograd.grad(slope.square().sum(), w)[0]
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), w)[0], rtol=1e-3, atol=1e-4)
    z = torch.randn(2, 4, 7, 7, device="cuda")
    reference = operator(z).detach()
    with torch.no_grad():
        torch.testing.assert_close(operator(z), reference)
    with torch.inference_mode():
        torch.testing.assert_close(operator(z), reference)
    torch.testing.assert_close(copy.deepcopy(operator)(z).detach(), reference)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.testing.assert_close(operator(z).float().detach(), reference, rtol=0.05, atol=0.05)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = operator(z).detach()
    torch.cuda.synchronize()
    torch.testing.assert_close(other, reference)


@pytest.mark.gpu
@cuda
def test_inside_a_captured_training_step() -> None:
    operator = op.Dense(5, 7, bound=0.7).cuda()
    z = torch.randn(3, 5, device="cuda")
    expected = operator(z).detach()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operator(z)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = operator(z)
    graph.replay()
    torch.testing.assert_close(static.detach(), expected)


@pytest.mark.gpu
@cuda
def test_bounds_of_many_operators_together_are_those_of_each() -> None:
    torch.manual_seed(0)
    parts = [op.Conv2d(4, 6, 3, bound=0.7), op.Dense(5, 9, bound=1.1), op.SeparableConv2d(6, 4, 3, bound=0.5)]
    module = torch.nn.ModuleList([*parts, op.Conv2d(3, 3, 3)]).cuda()
    for round_ in range(3):  # a graph that is replayed sees the weights of the moment
        for weight in module.parameters():
            weight.data.mul_(1.5 + round_)
        inputs = [torch.randn(2, 4, 7, 7).cuda(), torch.randn(2, 5).cuda(), torch.randn(2, 6, 7, 7).cuda()]

        def slopes(inputs: list[Tensor] = inputs) -> list[Tensor]:
            total = sum(part(v).square().sum() for part, v in zip(parts, inputs, strict=True))
            return list(torch.autograd.grad(total, [weight for part in parts for weight in part.parameters()]))

        alone = slopes()
        with op.bounded_together(module):
            together = slopes()
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("behind", [False, True], ids=["idle", "behind"])
def test_bounds_beside_an_input(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of their own where the device has more to do than Python, which gives the same numbers."""
    from opteq.operators import norms, together

    monkeypatch.setattr(together, "_LONG", 1)
    torch.manual_seed(0)
    operator, x = op.Conv2d(32, 48, 3, bound=0.7).cuda(), torch.randn(2, 32, 9, 9, device="cuda")

    def slope() -> Tensor:
        return torch.autograd.grad(operator(x).square().sum(), operator.weight)[0]

    alone = slope()
    for _ in range(3):  # the first call has no call before it
        torch.cuda.synchronize()
        with op.bounded_together(operator, beside=x):
            pass
        if behind:
            torch.cuda._sleep(10**8)
            with op.bounded_together(operator, beside=x):
                pass
        else:
            torch.cuda.synchronize()
        with op.bounded_together(operator, beside=x):
            known = norms.known_scales.get()
            assert (known is not None and all(one.ready is not None for one in known.values())) == behind
            found = slope()
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
