"""Convolutions by products of 16 bits, against float64. Without a GPU Triton's interpreter runs the kernels.

It can't multiply bfloat16, which is tested on a GPU only.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import opteq
from compiling import names_compiled
from opteq._fast import settings as paths
from opteq._precision import convolutions_may_round
from opteq.operators import anchored, biased, choice, conv, narrow, narrow_choice, narrow_layer, narrow_rounding
from opteq.operators.base import LinearMap
from opteq.operators.conv import ConvMap
from opteq.operators.narrow_plans import Plan, Sums
from opteq.operators.narrow_products import convolve_finely
from opteq.operators.recalled import by_weight
from opteq.operators.round_trip import RoundTrip
from opteq.problems.base import Problem
from opteq.problems.block import Block
from opteq.solvers import Solver, graphs
from opteq.states import blocks

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU with TMA"
)
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

# The interpreter takes its time: of tests that are much alike, some are run on demand.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

Size = tuple[int, int, int, int, int]
SIZES: list[Size] = [(2, 16, 32, 5, 6), (3, 32, 16, 8, 8), (1, 16, 80, 1, 5), (1, 48, 16, 1, 1), (5, 16, 16, 3, 2)]
# Products of numbers that are rounded to 11 bits are so far off, on average; and a third rounding comes after. In a
# sample of few pixels chance, and cancellation, can make more of it.
TF32, FEW = 4.5e-4, 2e-3


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_choice, "_interpreted", True)
    monkeypatch.setattr(narrow_rounding, "_PARTS", 2)  # each is a program, which takes the interpreter a while
    monkeypatch.setattr(narrow_rounding, "_ALONE", 512)
    monkeypatch.setattr(narrow_choice, "_LEAST", 0)
    monkeypatch.setattr(paths, "recording", True)  # so that a map keeps its rows


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def case(size: Size, taps: tuple[int, int] = (3, 3), device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """A weight, an argument and what is added to its product."""
    batch, inputs, outputs, height, width = size
    generator = torch.Generator().manual_seed(sum(size) + taps[0])
    weight = torch.randn(outputs, inputs, *taps, generator=generator) / (inputs * taps[0] * taps[1]) ** 0.5
    v = torch.randn(batch, inputs, height, width, generator=generator)
    c = torch.randn(batch, outputs, height, width, generator=generator)
    return weight.to(device), last(v.to(device)), last(c.to(device))


def all_products(linear: ConvMap, v: Tensor, c: Tensor, slope: Tensor | None = None) -> dict[str, Tensor]:
    """Everything that a convolution is asked for."""
    slope = c.abs() if slope is None else slope
    return {
        "product": linear(v),
        "adjoint": linear.adjoint(c),
        "rectified": linear.rectified(v, c),
        "rectified and back": RoundTrip(linear, LinearMap.rectified_back(linear, c), lambda: c, rectify=True)(v),
        "the same, anchored": linear.rectified_back(c, solved_for=1.0)(v),
        "masked and back": linear.weighed_back(lambda u: u * (c > 0), lambda: c > 0)(v),
        "weighed and back": linear.weighed_back(lambda u: u * slope, lambda: slope)(v),
        "from zero and back": linear.rectified_back(c)(None),
        "the same by halves": linear.rectified_back(c).back(linear.rectified_back(c, 1.0).there(v)),
        "masked": linear.weighed(v, lambda u: u * (c > 0), lambda: c > 0),
        "weighed": linear.weighed(v, lambda u: u * slope, lambda: slope),
    }


def errors(
    found: dict[str, Tensor], weight: Tensor, v: Tensor, c: Tensor, slope: Tensor | None = None
) -> dict[str, float]:
    """Relative errors of every sample, the largest of them."""
    wanted = all_products(ConvMap(weight.double()), v.double(), c.double(), slope)
    gaps = {}
    for name, value in found.items():
        assert value.dtype == v.dtype
        assert value.shape == wanted[name].shape
        assert value.is_contiguous(memory_format=torch.channels_last)
        gap = (value.double() - wanted[name]).flatten(1).norm(dim=1) / wanted[name].flatten(1).norm(dim=1)
        gaps[name] = float(gap.nan_to_num(nan=0.0).max())
    return gaps


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("size", "taps"), list(zip(SIZES, [(3, 3), (1, 1), (1, 3), (3, 1), (5, 3)], strict=True)), ids=str
)
@torch.no_grad()
def test_products(size: Size, taps: tuple[int, int]) -> None:
    weight, v, c = case(size, taps)
    assert max(errors(all_products(ConvMap(weight), v, c), weight, v, c).values()) < FEW


def rounded(tensor: Tensor) -> Tensor:
    """To the 11 bits of TF32, half to even not minded."""
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_errors_are_those_of_tf32() -> None:
    weight, v, c = case((4, 64, 64, 8, 8))
    linear = ConvMap(weight)
    trip = RoundTrip(linear, LinearMap.rectified_back(linear, c), lambda: c, rectify=True)
    found = errors({"rectified and back": trip(v)}, weight, v, c)
    inside = ConvMap(rounded(weight).double())
    between = (inside(rounded(v).double()) + c).relu().float()
    theirs = errors({"rectified and back": last(inside.adjoint(rounded(between).double()).float())}, weight, v, c)
    assert found["rectified and back"] < 1.05 * theirs["rectified and back"]
    assert found["rectified and back"] > 0.9 * theirs["rectified and back"]  # or they were computed in another way


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["masked", "weighed"])
@torch.no_grad()
def test_arguments_that_are_halves_already(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, v, c = case((3, 16, 32, 5, 6))
    v[1] *= 1e9
    linear, slope = ConvMap(weight), (c > 0 if kind == "masked" else c.abs())
    trip = linear.weighed_back(lambda u: u * slope, lambda: slope)
    assert isinstance(trip, RoundTrip)
    by_halves = trip.scaled_for(v)
    assert by_halves is not None
    assert by_halves.in_use
    wanted = trip(v)
    made = trip._kept(v, torch.float16)
    halves, tops = narrow_rounding.rounded_with_sizes(torch.float16, v, made.offset, made.gain)
    torch.testing.assert_close(tops[3:], by_halves.gain * tops[:3])
    assert torch.equal(by_halves(halves.permute(0, 3, 1, 2), tops), wanted)  # for that is what it does
    half = trip.scaled_for(v, share=0.5)
    assert half is not None
    assert torch.equal(half(halves.permute(0, 3, 1, 2), tops), 0.5 * wanted)

    monkeypatch.setattr(paths, "recording", False)
    assert not by_halves.in_use  # outside of captured solves products are torch's
    assert trip.scaled_for(v.to(torch.float16)) is None
    assert trip.scaled_for((v, v)) is None
    rectified = RoundTrip(linear, LinearMap.rectified_back(linear, c), lambda: c, rectify=True)
    assert rectified.scaled_for(v) is None  # which is not linear


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("exponent", [-100, 60])
@torch.no_grad()
def test_numbers_of_all_sizes(exponent: int) -> None:
    weight, v, c = case((2, 16, 16, 5, 6))
    slope = c.abs()
    by_weight, by_c = (2.0**20, 1) if exponent < 0 else (2.0**-14, 2.0**-20)
    own, beside, kernel = v * 2.0**exponent, c * 2.0**exponent * by_c, weight * by_weight
    found = all_products(ConvMap(kernel), own, beside, slope)
    assert max(errors(found, kernel, own, beside, slope).values()) < TF32


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_samples_and_rows_have_scales_of_their_own() -> None:
    weight, v, c = case((4, 16, 32, 5, 6))
    sizes = torch.tensor([1.0, 1e-12, 1e9, 0.0]).reshape(-1, 1, 1, 1)
    weight[3] *= 1e-9
    weight[:, 5] *= 1e9
    weight[7] = 0
    v, c = last(v * sizes), last(c * sizes)
    found = all_products(ConvMap(weight), v, c)
    assert max(errors(found, weight, v, c).values()) < TF32
    assert not found["product"][:, 7].any()
    row = ConvMap(weight)(v)[:, 3].double()
    wanted = ConvMap(weight.double())(v.double())[:, 3]
    assert (row - wanted).norm() < TF32 * wanted.norm()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning", "ignore:.*overflow:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), slow(-float("inf"))])
@torch.no_grad()
def test_what_is_not_finite_stays_so_and_with_its_sample(bad: float) -> None:
    weight, v, c = case((3, 16, 16, 4, 4))
    linear = ConvMap(weight)
    fine = all_products(linear, v, c)
    v[1, 2, 1, 1] = bad
    for name, value in all_products(linear, v, c).items():
        if name in ("adjoint", "from zero and back"):
            continue
        assert not torch.isfinite(value[1]).all() or name == "rectified"
        assert torch.equal(value[[0, 2]], fine[name][[0, 2]])


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_no_overflow_where_the_bound_is_attained() -> None:
    """All entries alike, weights too: a product is as large as it can be."""
    weight, v, c = (torch.full_like(part, 3.0) for part in case((2, 16, 16, 6, 6)))
    found = all_products(ConvMap(weight), last(v), last(c))
    assert max(errors(found, weight, v, c).values()) < TF32


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_halves_under_autocast_have_no_scale() -> None:
    weight, v, c = case((2, 16, 32, 5, 6))
    with torch.autocast("cpu", dtype=torch.float16):
        linear = ConvMap(weight)
        found = linear.rectified_back(c.half())(v.half())
        masked = linear.weighed_back(lambda u: u * (c > 0), lambda: c > 0)(v.half())
    gaps = errors({"rectified and back": found.float(), "masked and back": masked.float()}, weight, v, c)
    assert found.dtype == torch.float16
    assert max(gaps.values()) < 3 * TF32


WHOLE = [(4, 16, 32, 4, 8), (2, 80, 16, 16, 16), (8, 16, 144, 4, 4), (1, 16, 16, 64, 64)]


def same_by_weight(size: Size, taps: tuple[int, int], device: str = "cpu") -> None:
    weight, v, u = case(size, taps, device)
    v, u = v * 1e-9, u * 1e6
    wanted = by_weight(ConvMap(weight.double()), v.double(), u.double())
    found = by_weight(ConvMap(weight), v, u)
    assert found.shape == wanted.shape
    assert 1e-5 < (found - wanted).norm() / wanted.norm() < TF32


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("size", "taps"), list(zip(WHOLE[:3], [(3, 3), (5, 1), (1, 3)], strict=True)), ids=str)
@torch.no_grad()
def test_derivatives_by_weights(size: Size, taps: tuple[int, int]) -> None:
    same_by_weight(size, taps)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e12])
@torch.no_grad()
def test_samples_count_in_a_sum_by_their_products(size: float) -> None:
    """Whatever the sizes of the two factors; those that are zero on one side have no say."""
    weight, v, u = case((5, 16, 16, 8, 8), (1, 1))
    v *= torch.tensor([1e6, 1e-6, 0.0, 1.0, 1e-20]).reshape(-1, 1, 1, 1)
    u *= size * torch.tensor([1e-6, 1e6, 1e20, 0.0, 1e-3]).reshape(-1, 1, 1, 1)
    wanted = by_weight(ConvMap(weight.double()), v.double(), u.double())
    found = by_weight(ConvMap(weight), v, u)
    assert 1e-5 < (found - wanted).norm() / wanted.norm() < TF32


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_sums_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "processors", lambda _: 2)
    assert Sums.of(16, 16, 8, 8, 16, 1, 2) == Sums((1, 8, 8), 16, 2, 64, 64, 4, 4)
    same_by_weight((16, 16, 16, 8, 8), (1, 1))


def test_pictures_that_are_not_cut_into_boxes() -> None:
    for size in ((8, 16, 5, 8), (8, 16, 8, 12), (3, 16, 4, 8), (8, 16, 1, 128), (8, 16, 7, 7)):
        assert Sums.of(*size, 32, 9, 132) is None
    for size, box in (((128, 64, 32, 32), (1, 2, 32)), ((128, 256, 8, 8), (1, 8, 8)), ((64, 256, 4, 4), (4, 4, 4))):
        plan = Sums.of(*size, 256, 9, 132)
        assert plan is not None
        assert plan.box == box
        assert plan.boxes * 64 == size[0] * size[2] * size[3]


def biased_layer(device: str = "cpu", bias: bool = True, size: Size = (4, 16, 32, 4, 8)) -> tuple[nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    U = nn.Conv2d(size[1], size[2], 3, padding=1, bias=bias).to(device)
    return U, case(size, device=device)[1].requires_grad_()


def same_layer(U: nn.Conv2d, x: Tensor) -> None:
    found = narrow_layer.convolved(U, x, biased.summed)
    assert found is not None
    inputs = [x, *U.parameters()]
    v = last(torch.randn_like(found))
    ours = [found, *torch.autograd.grad(found, inputs, v)]
    wanted = U(x)
    theirs = [wanted, *torch.autograd.grad(wanted, inputs, v)]
    for own, other in zip(ours, theirs, strict=True):
        assert own.shape == other.shape
        assert (own - other).norm() < 2 * TF32 * other.norm()
    # The gradient of a sum is one number, expanded; and of some inputs no gradient may be wanted.
    (slope,) = torch.autograd.grad(narrow_layer.convolved(U, x.detach(), biased.summed).sum(), [U.weight])  # type: ignore[union-attr]
    (other,) = torch.autograd.grad(U(x.detach()).sum(), [U.weight])
    assert (slope - other).norm() < 2 * TF32 * other.norm()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bias", [True, slow(False)])
def test_a_module(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_layer, "_WORTH", 0)
    U, x = biased_layer(bias=bias)
    same_layer(U, x)
    monkeypatch.setattr(paths, "interpreted", True)
    monkeypatch.setattr(biased, "_WORTH", 0)
    found = biased.convolved(U, x)
    assert found is not None
    assert "_Convolved" in type(found.grad_fn).__name__


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_and_forward_mode_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_layer, "_WORTH", 0)
    U, x = biased_layer()
    slopes, tangents = [], []
    for layer in (lambda x: narrow_layer.convolved(U, x, biased.summed), U):
        (slope,) = torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), [x, U.weight, U.bias]))
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(layer(forward_ad.make_dual(x.detach(), torch.ones_like(x)))).tangent)
    for own, other in zip((*slopes[0], tangents[0]), (*slopes[1], tangents[1]), strict=True):
        assert (own - other).norm() < 1e-2 * other.norm()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_samples_of_a_module_have_nothing_to_do_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_layer, "_WORTH", 0)
    U, x = biased_layer()
    sizes = torch.tensor([1.0, 1e12, 1e-12, 0.0]).reshape(-1, 1, 1, 1)
    x = last(x.detach() * sizes).requires_grad_()
    found = narrow_layer.convolved(U, x, biased.summed)
    assert found is not None
    wanted = U(x)
    v = last(torch.randn_like(wanted) * torch.tensor([1e-9, 1e-12, 1e9, 1.0]).reshape(-1, 1, 1, 1))
    ours, theirs = (torch.autograd.grad(value, [x, U.weight], v) for value in (found, wanted))
    for own, other in ((found, wanted), (ours[0], theirs[0])):
        gap = (own - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
        assert gap.max() < 2 * TF32
    assert (ours[1] - theirs[1]).norm() < 2 * TF32 * theirs[1].norm()
    several = torch.randn(2, *found.shape)
    (slopes,) = torch.autograd.grad(narrow_layer.convolved(U, x, biased.summed), U.bias, several, is_grads_batched=True)
    torch.testing.assert_close(slopes, several.sum(dim=(1, 3, 4)), rtol=1e-4, atol=1e-4)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_transformations_take_the_plain_operations() -> None:
    weight, v, c = case((4, 16, 16, 4, 4))
    linear = ConvMap(weight)
    with torch.no_grad():
        for product, argument in ((linear, v), (linear.adjoint, c), (linear.rectified_back(c[:1]), v)):
            one_by_one = torch.func.vmap(lambda u, product=product: product(u[None])[0])(argument)
            torch.testing.assert_close(one_by_one.norm(), product(argument).norm(), rtol=0.2, atol=0)
    layer = layer_of(16, 32)
    x = last(torch.randn(2, 4, 6, 6))
    slopes = torch.func.jacrev(lambda x: layer(x).sum(dim=(1, 2, 3)))(x)
    assert slopes.shape == (2, 2, 4, 6, 6)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_scales_and_none_are_not_confused() -> None:
    """A map that is used as it is, and under autocast; and one that was made outside of where it is used."""
    weight, v, c = case((2, 16, 16, 4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "recording", True)
        with torch.autocast("cpu", dtype=torch.float16):
            linear = ConvMap(weight)
        there = linear.rectified_back(c)
        wide = there(v)
        with torch.autocast("cpu", dtype=torch.float16):
            half = there(v.half())
        again = there(v)
    wanted = all_products(ConvMap(weight.double()), v.double(), c.double())["rectified and back"]
    for found in (wide, half, again):
        assert (found.double() - wanted).norm() < 3 * TF32 * wanted.norm()
    outside = ConvMap(weight)
    with torch.autocast("cpu", dtype=torch.float16):
        assert (outside.rectified_back(c)(v.half()).double() - wanted).norm() < 3 * TF32 * wanted.norm()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_what_is_added_may_be_broadcast() -> None:
    weight, v, _ = case((3, 16, 16, 4, 4))
    exact = ConvMap(weight.double())
    for c in (torch.full((1, 1, 1, 1), 0.3), torch.full((16, 1, 1), -0.2)):
        there = ConvMap(weight).rectified_back(c)
        for part in (v, v[:2], last(v[:, :, :3])):
            wanted = exact.adjoint(torch.relu(exact(part.double()) + c))
            assert (there(part) - wanted).norm() < FEW * wanted.norm()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_a_large_negative_number_that_is_cut_off_hides_nothing() -> None:
    weight, v, c = case((2, 16, 16, 4, 4))
    c[:, 3] = -1e15
    found = errors({"rectified and back": ConvMap(weight).rectified_back(c)(v),
                    "from zero and back": ConvMap(weight).rectified_back(c)(None)}, weight, v, c)  # fmt: skip
    assert max(found.values()) < TF32


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_modules_that_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    U, x = biased_layer()
    assert narrow_layer.convolved(U, x, biased.summed) is None  # too few operations
    monkeypatch.setattr(narrow_layer, "_WORTH", 0)
    assert narrow_layer.convolved(U, x, biased.summed) is not None
    for options in ({"stride": 2}, {"padding": 0}, {"dilation": 2, "padding": 2}, {"groups": 2}, {"padding": "same"}):
        other = nn.Conv2d(16, 32, 3, **{"padding": 1, **options})  # type: ignore[arg-type]
        assert narrow_layer.convolved(other, x, biased.summed) is None
    assert narrow_layer.convolved(nn.Conv2d(16, 32, 2, padding=1), x, biased.summed) is None
    assert narrow_layer.convolved(nn.Conv2d(16, 33, 3, padding=1), x, biased.summed) is None
    assert narrow_layer.convolved(U, x[:, :, :, :7], biased.summed) is None
    assert narrow_layer.convolved(U.double(), x.double(), biased.summed) is None


def called(linear: ConvMap, v: Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels would be used."""
    with monkeypatch.context() as patch:
        patch.setattr(narrow, "convolve", lambda *_, **__: (_ for _ in ()).throw(StopAsyncIteration))
        try:
            linear(v)
        except StopAsyncIteration:
            return True
        return False


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_where_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, v, _ = case((2, 16, 32, 5, 6))
    assert not called(ConvMap(weight), v, monkeypatch)  # a tape may be wanted
    with torch.no_grad():
        assert called(ConvMap(weight), v, monkeypatch)
        assert not called(ConvMap(weight.double()), v.double(), monkeypatch)
        assert not called(ConvMap(weight[:24]), v, monkeypatch)
        assert not called(ConvMap(weight), v.contiguous(), monkeypatch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not called(ConvMap(weight), v.bfloat16(), monkeypatch)  # torch's are as good
        monkeypatch.setattr(narrow_choice, "_LEAST", 2 * 2 * 30 * 16 * 32 * 9 + 1)
        assert not called(ConvMap(weight), v, monkeypatch)
        monkeypatch.setattr(narrow_choice, "_LEAST", 2 * 2 * 30 * 16 * 32 * 9)
        assert called(ConvMap(weight), v, monkeypatch)
        monkeypatch.setattr(narrow_choice, "convolutions_may_round", lambda: False)
        assert not called(ConvMap(weight), v, monkeypatch)


def test_whether_tf32_is_allowed() -> None:
    assert convolutions_may_round()
    precision = torch.backends.cudnn.conv
    before = precision.fp32_precision
    try:
        precision.fp32_precision = "ieee"
        assert not convolutions_may_round()
    finally:
        precision.fp32_precision = before
    assert convolutions_may_round()
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert not convolutions_may_round()
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert convolutions_may_round()


def test_a_cpu_takes_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, v, c = case((2, 16, 32, 5, 6))
    with torch.no_grad():
        assert not called(ConvMap(weight), v, monkeypatch)
        found = errors(all_products(ConvMap(weight), v, c), weight, v, c)
    assert max(found.values()) < 1e-6


def layer_of(inputs: int, outputs: int, taps: int = 3, mu: float = 1.0, **options: object) -> opteq.Equilibrium:
    torch.manual_seed(0)
    problem = opteq.OptEq(
        opteq.operators.Conv2d(inputs, outputs, taps, bound=0.8),
        nn.Conv2d(4, outputs, 3, padding=1),
        mu=mu,
        **options,  # type: ignore[arg-type]
    )
    return opteq.Equilibrium(problem, opteq.Anderson(tol=1e-3), opteq.Implicit(tol=1e-3))


def slopes(layer: opteq.Equilibrium, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    features = layer(x)
    features.float().square().sum().backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad.double() for parameter in layer.parameters()]  # type: ignore[union-attr]
    layer.zero_grad()
    return features.detach().double(), found


def near(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], bound: float) -> None:
    assert (ours[0] - theirs[0]).norm() < bound * theirs[0].norm()
    for own, other in zip(ours[1], theirs[1], strict=True):
        assert (own - other).norm() < 5 * bound * other.norm()


@triton
@no_gpu
@pytest.mark.parametrize(("activation", "mu"), [("relu", 1.7), slow("tanh", 1.0)])
def test_a_layer(mu: float, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(16, 32, mu=mu, activation=activation)
    x = last(torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)))
    wanted = slopes(layer, x)
    monkeypatch.setattr(paths, "fused", False)  # a CPU has ways of its own, by which it does not come here
    monkeypatch.setattr(narrow_choice, "_interpreted", True)
    monkeypatch.setattr(narrow_choice, "_LEAST", 0)
    near(slopes(layer, x), wanted, 4e-3)


def test_plans_cover_every_pixel() -> None:
    for batch, height, width in itertools.product((1, 3, 128), (1, 7, 32, 224), (1, 9, 28, 32)):
        plan = Plan.of(batch, height, width, 48, 200, 132)
        samples, high, wide = plan.box
        assert samples * high * wide in (128, 256)
        assert plan.boxes * samples * high * wide >= batch * height * width
        assert plan.tiles * plan.tile >= 200
        assert 48 % plan.depth == 0
    assert Plan.of(128, 32, 32, 64, 128, 132).box == (1, 4, 32)
    assert Plan.of(128, 8, 8, 256, 256, 132).box == (2, 8, 8)
    assert Plan.of(128, 28, 28, 64, 64, 132).boxes * 128 < 1.15 * 128 * 28 * 28


class Recorded(RoundTrip):
    """Counts what is prepared."""

    count = 0

    def _prepared(self, *arguments: object) -> object:  # type: ignore[override]
        self.count += 1
        return super()._prepared(*arguments)  # type: ignore[arg-type]


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_what_may_be_left_out_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, v, c = case((2, 16, 16, 4, 4))
    trip = Recorded(ConvMap(weight), lambda v: v, lambda: c, rectify=True)
    monkeypatch.setattr(paths, "keeping", False)
    trip(v)
    trip(v)
    assert trip.count == 2
    monkeypatch.setattr(paths, "keeping", True)
    trip(v)
    trip(v)
    assert trip.count == 3


def exact_trip(weight: Tensor, c: Tensor) -> Callable[[Tensor | None], Tensor]:
    linear, double = ConvMap(weight.double()), c.double()
    return lambda v: linear.adjoint((double if v is None else linear(v.double()) + double).relu())


def settled(weight: Tensor, c: Tensor) -> Tensor:
    """The fixed point of that, which is a contraction."""
    weight *= 0.2
    z, step = None, exact_trip(weight, c)
    for _ in range(100):
        z = step(z)
    assert z is not None
    return last(z.float())


def gaps(found: Tensor, wanted: Tensor) -> Tensor:
    """Distances, sample by sample."""
    return (found.double() - wanted.double()).flatten(1).norm(dim=1)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_fine_products() -> None:
    weight, v, c = case((2, 32, 48, 4, 5))
    v[1] *= 1e-6
    linear, double = ConvMap(weight), ConvMap(weight.double())
    half = torch.float16
    found = convolve_finely(v, linear, half, False, c, "rectify")
    wanted = (double(v.double()) + c.double()).relu()
    assert (gaps(found, wanted) < 1e-6 * wanted.flatten(1).norm(dim=1)).all()
    there = convolve_finely(v, linear, half, adjoint=False)
    assert (gaps(there, double(v.double())) < 1e-6 * there.flatten(1).norm(dim=1)).all()
    back = torch.empty_like(v)
    convolve_finely(c, linear, half, adjoint=True, positive=True, out=back)
    assert (gaps(back, double.adjoint(c.double().relu())) < 1e-6 * back.flatten(1).norm(dim=1)).all()


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("batch", "alone"), [(3, False), (3, True)])
@torch.no_grad()
def test_errors_go_with_the_distance_to_a_fine_evaluation(
    batch: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:  # a program a sample, and a fine evaluation in two parts
        monkeypatch.setattr(narrow_rounding, "processors", lambda device: 1)
        monkeypatch.setattr(anchored, "_ROOM", 2 * 4 * 32 * 16)
    weight, _, c = case((batch, 16, 32, 4, 4))
    v = settled(weight, c)
    trip, exact = ConvMap(weight).rectified_back(c, solved_for=1.0), exact_trip(weight, c)
    scale = exact(v).flatten(1).norm(dim=1)
    noise = torch.randn_like(v) * v.std()
    for start in (None, v + 0.2 * noise):
        found = gaps(trip(start), exact(start)) / scale
        assert (found > 1e-5).all()
        assert (found < FEW).all()
    assert (gaps(trip(v + 1e-3 * noise), exact(v + 1e-3 * noise)) < 1e-6 * scale).all()  # the second one is fine
    linear = ConvMap(weight.double())
    for distance in (1e-1, 1e-2, 2e-3):
        near = v + distance * noise
        wanted = (linear(near.double()) + c.double()).relu()
        between = trip.there(near)
        for name, value, true in (
            ("whole", trip(near), exact(near)),
            ("there", between, wanted),
            ("back", trip.back(between), linear.adjoint(between.double())),
        ):
            gap = gaps(value, true) / true.flatten(1).norm(dim=1)
            assert (gap < distance * FEW + 1e-6).all(), (name, distance, gap)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning", "ignore:.*overflow:RuntimeWarning")
@pytest.mark.parametrize("wild", [float("nan"), 1e6])
@torch.no_grad()
def test_a_wild_proposal_is_not_remembered(wild: float) -> None:
    weight, _, c = case((3, 16, 16, 4, 4))
    answer = settled(weight, c)
    trip, exact = ConvMap(weight).rectified_back(c, solved_for=1.0), exact_trip(weight, c)
    trip(trip(None))
    proposal = answer.clone()
    proposal[1] = wild
    found = trip(proposal)  # which would be remembered
    fine = exact(answer)
    assert (gaps(found, fine)[[0, 2]] < 1e-6 * fine.flatten(1).norm(dim=1)[[0, 2]]).all()
    assert wild == 1e6 or not found[1].isfinite().all()
    gap = gaps(trip(answer), fine) / fine.flatten(1).norm(dim=1)
    assert gap[0] < 1e-6
    assert gap[2] < 1e-6
    assert 1e-5 < gap[1] < FEW


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_where_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, v, c = case((2, 16, 16, 4, 4))
    trip, exact = ConvMap(weight).rectified_back(c, solved_for=1.0), exact_trip(weight, c)
    monkeypatch.setattr(paths, "recording", False)
    trip(None)
    for _ in range(3):
        gap = gaps(trip(v), exact(v)) / exact(v).flatten(1).norm(dim=1)
        assert (gap > 1e-5).all()
    monkeypatch.setattr(paths, "recording", True)
    scale = exact(v).flatten(1).norm(dim=1)
    assert (gaps(trip(v), exact(v)) < 1e-6 * scale).all()  # a start that is not zero, which is fine
    few = v[:1].contiguous(memory_format=torch.channels_last)
    alone = ConvMap(weight).rectified_back(c[:1], solved_for=1.0)
    assert torch.equal(alone(few), ConvMap(weight).rectified_back(c, solved_for=1.0)(v)[:1])


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("far", [slow(1.0), 1e4])
@torch.no_grad()
def test_a_start_that_is_far_away_spoils_nothing(far: float) -> None:
    weight, noise, c = case((3, 16, 16, 4, 4))
    answer = settled(weight, c)
    trip, exact = ConvMap(weight).rectified_back(c, solved_for=1.0), exact_trip(weight, c)
    start = answer + far * noise
    trip(start)
    wanted = exact(answer)
    scale = wanted.flatten(1).norm(dim=1)
    for bound in (FEW, 1e-6, 1e-6):  # as from zero: the second one after the start is fine
        assert (gaps(trip(answer), wanted) < bound * scale).all()


@pytest.fixture
def recorded(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves take their steps as if they were captured."""
    monkeypatch.setattr(paths, "fused", False)  # a CPU has ways of its own, by which it does not come here


def anchors(monkeypatch: pytest.MonkeyPatch) -> list[anchored.AnchoredTrip]:
    """All trips with an anchor that are made from now on."""
    made: list[anchored.AnchoredTrip] = []

    class Noted(anchored.AnchoredTrip):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(conv, "AnchoredTrip", Noted)
    return made


@triton
@no_gpu
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("mu", "warm"), [(1.0, False), (4.0, True), slow(0.25, False), slow(0.25, True), slow(1.0, True), slow(4.0, False)]
)
@torch.no_grad()
def test_a_solve_is_finer_than_its_products(mu: float, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = anchors(monkeypatch)
    torch.manual_seed(0)
    problem = opteq.OptEq(opteq.operators.Conv2d(16, 32, 3, bound=0.7 * mu**0.5), mu=mu)
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=2e-6))
    x = last(torch.randn(2, 32, 4, 4))
    double = copy.deepcopy(layer).double()
    double.solver = opteq.Anderson(tol=1e-11, max_steps=200)
    wanted = double.solve(x.double())
    solution = layer.solve(x, start=last(torch.rand(2, 32, 4, 4)) if warm else None)
    assert solution.report.converged.all()
    for found, true in ((solution.features, wanted.features), (solution.state, wanted.state)):
        assert (gaps(found, true) < 1e-5 * true.flatten(1).norm(dim=1)).all()
    (anchor,) = [trip._anchor for trip in made if trip._anchor is not None]
    distance = gaps(anchor.point, wanted.features) / wanted.features.flatten(1).norm(dim=1)
    assert (distance < 0.1).all()  # it has moved


@triton
@no_gpu
@pytest.mark.usefixtures("recorded")
@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), slow(float("inf")), slow(-float("inf"))])
def test_a_sample_that_is_not_finite_is_no_concern_of_others(bad: float) -> None:
    layer = layer_of(16, 32)
    layer.on_failure = "ignore"
    x = last(torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(2)))
    wanted = layer.solve(x).features.detach()
    x[1, 0, 2, 2] = bad
    with torch.no_grad():
        solution = layer.solve(x)
    assert int(solution.report.codes[1]) != 0
    assert solution.features.isfinite().all()  # as the state is
    assert (gaps(solution.features, wanted)[[0, 2]] < 1e-3 * wanted.flatten(1).norm(dim=1)[[0, 2]]).all()


@triton
@no_gpu
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("close", [False, True])
def test_the_state_tells_which_units_are_cut_off(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = opteq.OptEq(opteq.operators.Conv2d(16, 32, 3, bound=0.7))
    hidden = problem.bind(last(torch.randn(2, 32, 4, 4)))
    solution = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-4)).solve(hidden.block.c)
    state, features = solution.state.detach(), solution.features.detach()
    asked: list[Tensor] = []
    own = Block.activation
    monkeypatch.setattr(Block, "activation", lambda block, z: asked.append(z) or own(block, z))  # type: ignore[func-returns-value]
    taped = hidden.linearise_on_tape(state, features, close)
    assert taped is not None
    assert bool(asked) != close  # a product less
    linear, v = ConvMap(hidden.block.W.weight.double()), last(torch.randn(2, 16, 4, 4))  # type: ignore[attr-defined]
    wanted = linear.adjoint((state > 0) * linear(v.double()))
    with torch.no_grad():
        assert (gaps(taped.reduction.product(v), wanted) < FEW * wanted.flatten(1).norm(dim=1)).all()


@triton
@no_gpu
@pytest.mark.usefixtures("recorded")
@torch.no_grad()
def test_maps_that_are_not_solved_for_have_no_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = anchors(monkeypatch)
    torch.manual_seed(0)
    layers = [(opteq.operators.Conv2d(16, 16, 3, bound=0.7), nn.Conv2d(4, 16, 3, padding=1)) for _ in range(2)]
    layer = opteq.Equilibrium(opteq.DeepOptEq(layers, alpha=0.8), opteq.Picard(tol=1e-3, max_steps=100))
    x = last(torch.randn(2, 4, 4, 4))
    features = layer(x)
    assert not made
    monkeypatch.setattr(narrow_choice, "_interpreted", False)
    wanted = layer(x)
    assert (gaps(features, wanted) < 5e-3 * wanted.flatten(1).norm(dim=1)).all()


def test_which_evaluations_are_fine() -> None:
    assert [turn for turn in range(1, 200) if anchored._is_due(turn)] == [2, 8, 32, 128]


def test_choices_are_made_outside_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing, measured, asked = [False], [], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(choice, "_second_is_faster", {})
    monkeypatch.setattr(narrow_choice, "_refused", set())
    times = {"plain": 2.0, "quick": 1.0}
    monkeypatch.setattr(choice, "_milliseconds", lambda way: measured.append(way) or times[way()])  # type: ignore[func-returns-value]

    def prepare() -> Callable[[], str]:
        asked.append(1)
        return lambda: "quick"

    def chosen(key: str) -> bool:
        return narrow_choice.is_chosen(key, torch.ones(1), lambda: "plain", prepare)  # type: ignore[arg-type, return-value]

    capturing[0] = True
    assert not chosen("a")  # nothing is known
    capturing[0] = False
    with opteq.fast_paths(graphs=False):
        assert not chosen("a")  # and nothing need be
    assert not asked
    assert not chosen("a")
    assert not chosen("a")
    assert len(asked) == 1
    assert len(measured) == 2
    capturing[0] = True
    assert chosen("a")
    times["quick"] = 3.0
    capturing[0] = False
    assert not chosen("b")
    capturing[0] = True
    assert not chosen("b")
    assert chosen("a")

    def broken() -> Callable[[], str]:
        asked.append(1)
        raise ValueError("no such instruction")

    capturing[0] = False
    with pytest.warns(UserWarning, match="no such instruction"):
        assert not narrow_choice.is_chosen("c", torch.ones(1), lambda: "plain", broken)  # type: ignore[arg-type, return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not narrow_choice.is_chosen("c", torch.ones(1), lambda: "plain", broken)  # type: ignore[arg-type, return-value]
    assert len(asked) == 3


SCRIPT = """
import sys
from compiling import ptx
from opteq.operators import narrow_kernels as kernels

capability = int(sys.argv[1])
for kind in ("fp16", "bf16"):
    scaled = kind == "fp16"
    wide = "fp32" if scaled else kind
    ptx(kernels.weights, capability, {"weight": "*" + wide, "out": "*" + kind, "inverses": "*fp32", "sums": "*fp32",
        **dict.fromkeys(("start", "by_row", "by_column", "by_tap", "by_side"), "i32")},
        {"COLUMNS": 48, "TAPS": 9, "WIDTH": 3, "BLOCK": 1024, "SCALED": scaled, "FINE": scaled}, num_warps=4)
    # In 16 bits throughout, the others differ from these by what they leave out; each takes five seconds and more.
    for then, beside, out in (("rectify", "*" + wide, kind), *([("nothing", "*fp32", wide), ("weigh", "*u8", kind),
                              ("change", "*fp32", kind), ("add", "*fp32", wide)] if scaled else [])):
        code = ptx(kernels.convolve, capability, {
            "source": f"tensordesc<{kind}[1, 4, 32, 64]>", "weight": f"tensordesc<{kind}[128, 64]>",
            "out": f"tensordesc<{out}[1, 4, 32, 128]>", "beside": beside, "inverses": "*fp32", "tops": "*fp32",
            **dict.fromkeys(("batch", "height", "width", "tiles_high", "tiles_wide"), "i32")},
            {"COLUMNS": 192 if then == "add" else 64, "CHANNELS": 128 if then == "add" else 64, "ROWS": 128,
             "TAPS_HIGH": 3, "TAPS_WIDE": 3, "SAMPLES": 1, "HIGH": 4, "WIDE": 32, "TILE": 128, "DEPTH": 64, "STAGES": 3,
             "THEN": then, "SCALED": scaled, "RESCALED": scaled and out == kind}, num_warps=8, num_stages=3)
        assert "wgmma.mma_async" in code and "cp.async.bulk.tensor.4d" in code
for kernel in (kernels.largest, kernels.narrow, kernels.narrow_alone, kernels.divide):
    names = ("source", "minus", "parts", "sizes", "offset", "gain", "tops")
    ptx(kernel, capability, {"out": "*fp16", **dict.fromkeys(names, "*fp32"), "size": "i32", "batch": "i32",
        "stride": "i32"}, {"BLOCK": 4096, "PARTS": 16, "COUNT": 16, "RECTIFY": False, "TOLD": True, "BOUNDED": True,
        "POSITIVE": False, "LESS": "positive", "CHANNELS": 48}, num_warps=8)
for kernel in (kernels.gap, kernels.adopt):
    names = ("left", "right", "source", "out", "parts", "least", "fewer")
    ptx(kernel, capability, {**dict.fromkeys(names, "*fp32"), "share": "fp32", "size": "i32"},
        {"BLOCK": 4096, "PARTS": 16}, num_warps=8)
ptx(kernels.balance, capability, {"batch": "i32",
    **dict.fromkeys(("tops_left", "tops_right", "sizes", "total"), "*fp32")}, {"PADDED": 128}, num_warps=4)
code = ptx(kernels.correlate, capability, {
    "left": "tensordesc<fp16[64, 128]>", "right": "tensordesc<fp16[1, 2, 32, 64]>", "out": "*fp32",
    "top_left": "*fp32", "top_right": "*fp32",
    **dict.fromkeys(("boxes", "each", "tiles_high", "tiles", "sides"), "i32")},
    {"ROWS": 128, "COLUMNS": 64, "TAPS_HIGH": 3, "TAPS_WIDE": 3, "SAMPLES": 1, "HIGH": 2, "WIDE": 32, "TILE": 128,
     "SIDE": 64, "STAGES": 4}, num_warps=4, num_stages=4)
assert "wgmma.mma_async" in code and "cp.async.bulk.tensor.4d" in code
"""


@triton
def test_kernels_compile(tmp_path: Path) -> None:
    assert names_compiled(SCRIPT, 90, tmp_path) == {
        "weights", "convolve", "largest", "narrow", "narrow_alone", "divide", "gap", "adopt", "correlate", "balance"
    }  # fmt: skip


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[object]]:
    """The kernels wherever they can be used; gives what was chosen."""
    turns = itertools.cycle([0.0, 1.0])
    made: dict[object, bool] = {}
    monkeypatch.setattr(choice, "_second_is_faster", made)
    monkeypatch.setattr(choice, "_milliseconds", lambda way: (way(), next(turns))[1])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(narrow_choice, "_LEAST", 0)
    graphs.forget()
    yield made.keys()  # type: ignore[misc]
    graphs.forget()


def captured(work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a graph gives, after a run outside of it."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    "size", [*SIZES, (16, 32, 64, 32, 32), (8, 64, 128, 28, 28), (9, 256, 144, 16, 16), (128, 256, 256, 8, 8)], ids=str
)
@torch.no_grad()
def test_products_on_a_gpu(size: Size, always: set[object]) -> None:
    weight, v, c = case(size, device="cuda")
    found = captured(lambda: all_products(ConvMap(weight), v, c))
    assert max(errors(found, weight, v, c).values()) < FEW
    assert len(always) >= 5 or size[3:] == (1, 1)  # where strides may be anything, and kernels are not used


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("size", [*WHOLE, (128, 256, 256, 8, 8), (32, 64, 128, 32, 32)], ids=str)
@torch.no_grad()
def test_derivatives_by_weights_on_a_gpu(size: Size, always: set[object]) -> None:
    weight, v, u = case(size, device="cuda")
    wanted = by_weight(ConvMap(weight.double()), v.double(), u.double())
    found = captured(lambda: {"slope": by_weight(ConvMap(weight), v, u)})["slope"]
    assert 1e-5 < (found - wanted).norm() / wanted.norm() < TF32
    assert always


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("bias", [True, False])
def test_a_module_on_a_gpu(bias: bool, always: set[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_layer, "_WORTH", 0)
    same_layer(*biased_layer("cuda", bias, (64, 64, 128, 32, 32)))
    assert always


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_autocast_on_a_gpu(dtype: torch.dtype, always: set[object]) -> None:
    weight, v, c = case((8, 64, 128, 16, 16), device="cuda")

    def work() -> dict[str, Tensor]:
        with torch.autocast("cuda", dtype=dtype):
            linear = ConvMap(weight)
            there = linear.rectified_back(c.to(dtype))(v.to(dtype))
            masked = linear.weighed_back(lambda u: u * (c > 0), lambda: c > 0)(v.to(dtype))
        assert there.dtype == dtype
        return {"rectified and back": there.float(), "masked and back": masked.float()}

    bound = 3 * TF32 if dtype == torch.float16 else 1e-2
    assert max(errors(captured(work), weight, v, c).values()) < bound
    assert any(isinstance(key, tuple) and key[0] == "round trip" for key in always)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(("inputs", "outputs", "side"), [(32, 64, 16), (64, 64, 7), (48, 16, 12)])
def test_a_layer_on_a_gpu(activation: str, inputs: int, outputs: int, side: int, always: set[object]) -> None:
    layer = layer_of(inputs, outputs, activation=activation, mu=1.3).cuda()
    for seed in range(5):
        x = last(torch.randn(8, 4, side, side, generator=torch.Generator().manual_seed(seed)).cuda())
        with torch.no_grad():
            layer.problem.W.weight.mul_(1.02)  # type: ignore[union-attr, operator]
        with opteq.fast_paths(fused=False, graphs=False):
            wanted = slopes(layer, x)
        near(slopes(layer, x), wanted, 4e-3)
    kind = "round trip" if inputs <= outputs else "narrow"  # else the state is solved for, not the features
    assert any(isinstance(key, tuple) and key[0] == kind for key in always)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("solver", [opteq.Anderson, opteq.Picard, opteq.Broyden])
def test_captured_solves_are_finer_than_tf32(solver: type[Solver], always: set[object]) -> None:
    torch.manual_seed(0)
    # Without an input term, which would be rounded as TF32 wants it.
    problem = opteq.OptEq(opteq.operators.Conv2d(32, 64, 3, bound=0.8), mu=1.2)
    layer = opteq.Equilibrium(problem, solver(tol=2e-6, max_steps=60)).cuda()
    double = copy.deepcopy(layer).double()
    double.solver = opteq.Anderson(tol=1e-11, max_steps=200)
    for seed in range(9):  # the last ones by one graph
        x = last(torch.randn(8, 64, 16, 16, generator=torch.Generator().manual_seed(seed)).cuda())
        solution = layer.solve(x)
        if not seed:
            continue  # which is not captured
        assert solution.report.converged.all()
        wanted = double.solve(x.double())
        assert (gaps(solution.features, wanted.features) < 1e-5 * wanted.features.flatten(1).norm(dim=1)).all()
        assert (gaps(solution.state, wanted.state) < 1e-5 * wanted.state.flatten(1).norm(dim=1)).all()
    assert any(isinstance(key, tuple) and key[0] == "round trip" for key in always)


@pytest.mark.gpu
@gpu
def test_an_input_of_nan_on_a_gpu(always: set[object]) -> None:
    layer = layer_of(32, 64).cuda()
    layer.on_failure = "ignore"
    for turn in range(4):
        x = last(torch.randn(4, 4, 8, 8).cuda())
        if turn == 3:
            x[2, 0, 0, 0] = float("nan")
        solution = layer.solve(x)
    fine = torch.isfinite(solution.features).flatten(1).all(dim=1)
    assert solution.report.codes[[0, 1, 3]].eq(0).all()
    assert int(solution.report.codes[2]) != 0
    assert fine[[0, 1, 3]].all()
    assert always


def wide(scale: int = 1) -> opteq.Branch:
    return opteq.Branch(opteq.operators.Conv2d(16, 32, 3, bound=0.7), nn.Conv2d(4, 32, 3, padding=1), scale)


OTHERS: dict[str, Callable[[], Problem]] = {
    "deep": lambda: opteq.DeepOptEq(
        [(opteq.operators.Conv2d(16, m, 3, bound=0.7), nn.Conv2d(4, m, 3, padding=1)) for m in (32, 48)], alpha=0.8
    ),
    "mopteq": lambda: opteq.MOptEq([wide(), wide(2)], diversity=0.05, smoothing=0.5),
    "popteq": lambda: opteq.POptEq([wide(), wide(2)]),
    "geq": lambda: opteq.GEQ(
        opteq.operators.Conv2d(16, 32, 3, bound=0.7), nn.Conv2d(4, 16, 3, padding=1), opteq.kernels.Linear()
    ),
    "side by side": lambda: opteq.Parallel([
        opteq.OptEq(opteq.operators.Conv2d(16, 32, 3, bound=0.8), nn.Conv2d(4, 32, 3, padding=1)),
        opteq.OptEq(opteq.operators.Conv2d(32, 16, 3, bound=0.8), nn.Conv2d(4, 16, 3, padding=1)),
    ]),
}  # fmt: skip


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", list(OTHERS))
@pytest.mark.parametrize("solver", [opteq.Anderson(tol=1e-3), opteq.Picard(tol=1e-3, max_steps=200)], ids=type)
def test_other_problems_on_a_gpu(name: str, solver: Solver, always: set[object]) -> None:
    torch.manual_seed(1)
    layer = opteq.Equilibrium(OTHERS[name](), solver, opteq.Implicit(tol=1e-3)).cuda()

    def pass_by(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parts = blocks(layer(x))
        sum((part.square().sum() for part in parts), torch.zeros((), device="cuda")).backward()  # type: ignore[no-untyped-call]
        found = [p.grad.double() for p in layer.parameters() if p.grad is not None]
        layer.zero_grad(set_to_none=True)
        return [part.detach().double() for part in parts], found

    for seed in range(4):
        x = last(torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(seed)).cuda())
        with opteq.fast_paths(fused=False, graphs=False):
            features, wanted = pass_by(x)
        found, ours = pass_by(x)
        for own, other in zip(found, features, strict=True):
            assert (own - other).norm() < 5e-3 * other.norm()
        for own, other in zip(ours, wanted, strict=True):
            assert (own - other).norm() < 3e-2 * other.norm() + 1e-6
    assert always
