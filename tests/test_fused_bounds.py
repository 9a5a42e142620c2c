"""Bounds in half precision and by fused kernels, against LAPACK and the plain path. Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import opteq
from compiling import names_compiled
from opteq import operators as op
from opteq.operators import captured, fused, symbol
from opteq.operators.correlation import forms_by_products
from opteq.operators.fused import can_fuse
from opteq.operators.gram import _read, _squarings, eigenvalue_bound, gram_form
from opteq.operators.half import rounded_bounds
from opteq.operators.norms import _scale, bounded, kernel_norm

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _narrow_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_NARROWEST", 1)


@pytest.mark.gpu
@gpu
def test_kernels_serve_wide_weights_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    narrow, wide = (torch.randn(9, 1, n, 256, device="cuda") for n in (fused._NARROWEST - 1, fused._NARROWEST))
    assert can_fuse(wide, 16)
    assert not can_fuse(narrow, 16)
    with opteq.fast_paths(bounds=False):
        assert not can_fuse(wide, 16)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused path on a CPU, with a coarse grid and few squarings: the interpreter is slow."""
    monkeypatch.setattr(fused, "_interpreted", True)
    monkeypatch.setattr(symbol, "_TRAINING", ((math.inf, symbol._Effort(4, 2)),))


def plain(kernel: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    with opteq.fast_paths(fused=False):
        return with_slope(kernel, groups)


def with_slope(kernel: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    value = kernel_norm(kernel, groups)
    return value.detach(), torch.autograd.grad(value, kernel)[0]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))).requires_grad_()


# ------------------------------------------------------------------------------------------------- half precision


def forms(spectra: np.ndarray) -> tuple[Tensor, Tensor]:
    """Hermitian matrices with the given eigenvalues ``(batch, n)`` in real form, and the root of their mean trace."""
    rng = np.random.default_rng(0)
    n = spectra.shape[1]
    Q, _ = np.linalg.qr(rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n)))
    A = (Q * spectra[:, None]) @ Q.conj().T
    return torch.from_numpy(A.real + A.imag).float(), torch.tensor([math.sqrt(spectra.sum(1).mean())])


@triton
@no_gpu
@pytest.mark.parametrize("n", [1, 20, 34])  # in float32, and in float16 with tiles that are not full
def test_rounded_bounds_are_safe_and_close(n: int, interpreted: None) -> None:
    line = np.linspace(0, 1, n + 1)[1:]
    spectra = np.stack([np.ones(n), line, np.r_[np.zeros(n - 1), 1], 0.9 + 0.1 * line, 1e-3 * line**9])
    spectra[:, -1] = spectra.max(1)
    form, length = forms(spectra)
    bounds = rounded_bounds(form, length, 4)
    excess = (bounds.numpy() / spectra.max(1)) ** 0.5 - 1
    reference = eigenvalue_bound(form, 4).numpy()
    beyond = (bounds.numpy() / reference) ** 0.5 - 1
    assert excess.min() > -1e-5
    assert np.abs(beyond[:4]).max() < 2e-3
    assert beyond[4] < 0.02  # a thousandth of the mean, so that halves are coarse: looser, and still a bound


@triton
@no_gpu
def test_what_rounding_does_is_paid_for(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the measured errors the bounds of such matrices would be too small."""
    rng = np.random.default_rng(1)
    K = rng.standard_normal((2, 40, 3)) + 1j * rng.standard_normal((2, 40, 3))
    A = K @ K.conj().transpose(0, 2, 1)
    form = torch.from_numpy(A.real + A.imag).float()
    top = np.linalg.eigvalsh(A)[:, -1]
    # In these units most of the entries are below the smallest halves: rounding changes a lot.
    far = torch.tensor([float(np.sqrt(np.trace(A[0]).real * 1e5))])
    bounds = rounded_bounds(form, far, 4).numpy()
    assert (bounds >= top * (1 - 1e-6)).all()
    assert (bounds <= top * 1.5).all()


def test_gram_matrices_by_products_of_taps() -> None:
    taps = torch.randn(6, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    place = (2, 3, 6, 7, torch.float64, torch.device("cpu"))
    table = symbol._make_frequencies(*place)
    expected = gram_form(*torch.tensordot(table, taps, dims=1).transpose(1, 2).flatten(1, 2))
    torch.testing.assert_close(forms_by_products(taps, symbol._make_pairs(*place)), expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_closed_derivative_is_that_of_the_operations(n: int, symmetric: bool) -> None:
    rng = np.random.default_rng(n)
    K = rng.standard_normal((3, n, n + 1)) + (0 if symmetric else 1j) * rng.standard_normal((3, n, n + 1))
    A = K @ K.conj().transpose(0, 2, 1)
    form = torch.from_numpy(A.real + A.imag).requires_grad_()
    weight = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for squarings in (1, 2, 4, 7):
        (found,) = torch.autograd.grad(eigenvalue_bound(form, squarings, symmetric), form, weight)
        (expected,) = torch.autograd.grad(_read(*_squarings(form, squarings, symmetric)), form, weight)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


CASES = {
    "matrix": ((7, 4), 1),
    "wide matrix": ((36, 40), 1),
    "kernel": ((5, 3, 3, 3), 1),
    "kernel in half precision": ((36, 34, 1, 3), 1),
    "grouped": ((8, 3, 3, 1), 2),
    "one channel": ((1, 3, 1, 3), 1),
}


@triton
@no_gpu
@pytest.mark.parametrize("name", CASES)
def test_fused_is_plain(name: str, interpreted: None) -> None:
    shape, groups = CASES[name]
    for scale in (1.0, 1e20) if name == "matrix" else (1.0,):
        kernel = normal(*shape, scale=scale)
        value, slope = with_slope(kernel, groups)
        expected, by_kernel = plain(kernel, groups)
        torch.testing.assert_close(value, expected, rtol=5e-5, atol=0)
        torch.testing.assert_close(slope, by_kernel, rtol=1e-4, atol=1e-5 * float(by_kernel.abs().max()))


@triton
@no_gpu
def test_many_equal_maxima(interpreted: None) -> None:
    """A pixel that stays where it is has the same symbol everywhere: the others set the value, a little above."""
    kernel = torch.zeros(36, 36, 1, 3)
    kernel[:, :, 0, 1] = torch.linalg.qr(normal(36, 36).detach())[0]
    value, slope = with_slope(kernel.requires_grad_())
    expected, _ = plain(kernel)
    assert expected * (1 - 1e-6) <= value <= expected * 1.001
    torch.testing.assert_close((slope * kernel).sum(), value, rtol=1e-5, atol=0)  # Euler: norms are homogeneous


@triton
@no_gpu
def test_the_bound_of_the_others_counts(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = normal(4, 3, 1, 3)
    before, slope = with_slope(kernel)
    chosen = fused._chosen
    monkeypatch.setattr(fused, "_chosen", lambda bounds: (chosen(bounds)[0], 1.21 * bounds.amax()[None]))
    raised, steeper = with_slope(kernel)
    assert 1.09 * before <= raised <= 1.11 * before
    torch.testing.assert_close(steeper, slope * (raised / before), rtol=1e-4, atol=1e-5)


@triton
@no_gpu
def test_zero_and_not_a_number(interpreted: None) -> None:
    for shape in ((5, 4), (4, 3, 1, 3)):
        value, slope = with_slope(torch.zeros(shape, requires_grad=True))
        assert value < 1e-10
        assert slope.isfinite().all()
        broken = torch.ones(shape)
        broken[0, 0] = math.nan
        assert kernel_norm(broken).isnan()


@triton
@no_gpu
def test_second_derivatives_of_the_fused_bound(interpreted: None) -> None:
    weight = normal(3, 2, 1, 3, scale=3.0)

    def curvature() -> Tensor:
        (slope,) = torch.autograd.grad(bounded(weight, 0.5).square().sum(), weight, create_graph=True)
        return torch.autograd.grad((slope * weight.detach().cos()).sum(), weight)[0]

    found = curvature()
    with opteq.fast_paths(fused=False):
        expected = curvature()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@triton
@no_gpu
def test_what_cannot_be_fused(interpreted: None) -> None:
    taps = torch.randn(3, 1, 4, 5)
    assert can_fuse(taps, 3)
    assert not can_fuse(taps.double(), 3)
    assert not can_fuse(taps, 10**6)
    assert not can_fuse(taps[:, :, :0], 3)
    with opteq.fast_paths(fused=False):
        assert not can_fuse(taps, 3)
    many = torch.func.vmap(kernel_norm)(normal(2, 3, 4).detach())
    torch.testing.assert_close(many[1], kernel_norm(normal(2, 3, 4).detach()[1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", ["fused", "plain"])
@pytest.mark.parametrize("shape", [(20, 6), (6, 5, 3, 3)])
def test_autocast_does_not_reach_gradients(shape: tuple[int, ...], path: str, request: pytest.FixtureRequest) -> None:
    if path == "fused":
        if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
            pytest.skip("kernels are interpreted")
        request.getfixturevalue("interpreted")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def scale(inside: bool) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return captured._evaluate(partial(_scale, 0.5), [weight], True)

    (value, (slope,)), (wanted, (expected,)) = scale(True), scale(False)
    assert torch.equal(value, wanted)
    assert torch.equal(slope, expected)


# ------------------------------------------------------------------------------------------------------ side by side


def test_branches_of_a_graph_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        """Knows which work it has to wait for."""

        def __init__(self) -> None:
            self.behind: set[str] = set()

        def wait_stream(self, other: Stream) -> None:
            self.behind |= other.behind

        def __enter__(self) -> None:
            current.append(self)

        def __exit__(self, *_: object) -> None:
            current.pop()

    main = Stream()
    current = [main]
    fake = SimpleNamespace(Stream=Stream, current_stream=lambda: current[-1], stream=lambda stream: stream)
    monkeypatch.setattr(captured.torch, "cuda", fake)
    waited: dict[str, set[str]] = {}

    def work(name: str) -> str:
        waited[name] = set(current[-1].behind)
        current[-1].behind.add(name)
        return name

    found = captured._side_by_side([partial(work, name) for name in "abc"], [Stream() for _ in "abc"])
    assert found == ["a", "b", "c"]
    assert waited == {"a": set(), "b": set(), "c": set()}
    assert main.behind == {"a", "b", "c"}


# ------------------------------------------------------------------------------------------------------- compilation


COMPILE = """
import sys

from compiling import ptx
from opteq.operators import squaring_kernels as k

WHOLE = dict.fromkeys("n each parts batches count level".split(), "i32") | {"picked": "*i64", "winner": "*i64"}
COMMON = {"PARTS": 64, "LEVELS": 8, "T": 4, "EPS": 1e-7, "FLOOR": 4e-6, "MOST": 4, "PADDED": 128, "K": 32}
capability = int(sys.argv[1])


def build(kernel, store, warps, stages, **constants):
    types = WHOLE | dict.fromkeys("in_s in_t out_s out_t".split(), store)
    types = dict.fromkeys(kernel.arg_names, "*fp32") | types
    ptx(kernel, capability, types, COMMON | constants, num_warps=warps, num_stages=stages)


half = {"REAL": False, "TILE": 64, "PRECISION": "ieee", "PICKED": False, "FIRST": False}
full = {"TILE": 32, "PRECISION": "tf32x3", "PICKED": True, "FIRST": True, "STORE": True}
build(k.begin, "*fp16", 4, 2, **half)
build(k.square, "*fp16", 4, 3, **half, STORE=True)
build(k.square, "*fp16", 4, 3, **half, STORE=False)
for real in (False, True) if capability == 90 else (False,):
    build(k.begin, "*fp32", 4, 2, **full, REAL=real)
    build(k.square, "*fp32", 2, 3, **full, REAL=real)
    build(k.finish, "*fp32", 4, 2, **full, REAL=real)
    for top in (False, True) if capability == 90 else (False,):
        build(k.slope, "*fp32", 2, 3, **full, REAL=real, TOP=top)
build(k.read, "*fp32", 1, 2)
build(k.choose, "*fp32", 4, 2)
build(k.value, "*fp32", 1, 2, **full)
build(k.settle, "*fp32", 1, 2, **full)
"""


@triton
@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    assert names_compiled(COMPILE, capability, tmp_path) == {
        "begin",
        "square",
        "read",
        "choose",
        "value",
        "settle",
        "slope",
        "finish",
    }


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@triton
@gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((64, 40), 1), ((8, 5, 3, 3), 1), ((64, 256, 3, 3), 1), ((128, 256, 3, 3), 1), ((256, 256, 3, 3), 1),
     ((100, 70, 3, 3), 1), ((24, 8, 5, 3), 3), ((512, 512, 3, 3), 1), ((2048, 32), 1)],
)  # fmt: skip
def test_fused_is_plain_on_a_gpu(shape: tuple[int, ...], groups: int) -> None:
    for seed in range(3):
        kernel = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda().requires_grad_()
        value, slope = with_slope(kernel, groups)
        expected, by_kernel = plain(kernel, groups)
        assert expected * (1 - 2e-5) <= value <= expected * 1.001
        if value <= expected * (1 + 1e-5):  # the same frequency has won
            difference = (slope - by_kernel).norm() / by_kernel.norm()
            assert difference < 2e-3
        torch.testing.assert_close((slope * kernel).sum(), value, rtol=1e-4, atol=0)


@pytest.mark.gpu
@triton
@gpu
def test_many_bounds_at_once_on_a_gpu() -> None:
    torch.manual_seed(0)
    parts = [op.Conv2d(256, hidden, 3, bound=0.9) for hidden in (64, 128, 128, 256)] + [op.Dense(32, 48, bound=0.9)]
    module = torch.nn.ModuleList(parts).cuda()
    for weight in module.parameters():
        weight.data.mul_(2)
    for _ in range(3):
        with op.bounded_together(module):
            together = [part.prepare().weight for part in parts]
        for part, weight in zip(parts, together, strict=True):
            torch.testing.assert_close(weight, part.prepare().weight, rtol=1e-5, atol=1e-6)
            with opteq.fast_paths(fused=False):
                eager = part.weight * (0.9 / kernel_norm(part.weight))
            torch.testing.assert_close(weight, eager, rtol=2e-3, atol=1e-6)
