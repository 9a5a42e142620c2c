"""The kernels that resample channels-last pictures, against torch's. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import opteq
from compiling import names_compiled
from opteq import _triton
from opteq import operators as op
from opteq.engine.settings import has_triton
from opteq.engine.settings import settings as paths
from opteq.operators import resample_fused

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The next version of Triton changes a default of its compiler, which this one says once.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

# The interpreter cuts digits off where a GPU rounds, so that its bfloat16 is right to one unit in the last place.
UNIT = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DTYPES = list(UNIT)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[set]:
    """The kernels on a CPU; gives the variants that have been launched."""
    monkeypatch.setattr(paths, "interpreted", True)
    monkeypatch.setattr(resample_fused, "_ready", set())
    return resample_fused._ready


def picture(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, dtype).contiguous(memory_format=torch.channels_last)


def pooled(v: Tensor, k: int) -> Tensor:
    """By torch, in float64."""
    return F.avg_pool2d(v.double(), k)


def spread(u: Tensor, k: int) -> Tensor:
    """From the definition, in float64."""
    return u.double().repeat_interleave(k, dim=2).repeat_interleave(k, dim=3) / k**2


def agree(found: Tensor | None, wanted: Tensor, dtype: torch.dtype, cancelled: Tensor | None = None) -> None:
    """Equal to rounding, relative to ``cancelled``: the same mean of magnitudes, where summands may cancel."""
    assert found is not None
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert (
        (found.double() - wanted).abs() <= UNIT[dtype] * (wanted if cancelled is None else cancelled).abs() + tiny
    ).all()


def both_ways(shape: tuple[int, int, int, int], k: int, dtype: torch.dtype, device: str = "cpu") -> None:
    batch, channels, height, width = shape
    v = picture(batch, channels, height * k, width * k, dtype=dtype, device=device, seed=k)
    u = picture(*shape, dtype=dtype, device=device, seed=k + 1)
    agree(resample_fused.pooled(v, k), pooled(v, k), dtype, pooled(v.abs(), k))
    agree(resample_fused.spread(u, k), spread(u, k), dtype)


# ------------------------------------------------------------------------------------------------ by the interpreter


@triton
@no_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((2, 64, 3, 5), 2), ((1, 96, 2, 2), 3), ((2, 128, 1, 2), 4), ((1, 200, 1, 2), 2), ((3, 33, 1, 1), 8),
     ((2, 1, 3, 2), 2), ((1, 5, 2, 1), 5), ((1, 3, 1, 1), 17), ((2, 6, 2, 2), 1)],
    ids=str,
)  # fmt: skip
def test_both_kernels(shape: tuple[int, int, int, int], k: int, dtype: torch.dtype, interpreted: set) -> None:
    both_ways(shape, k, dtype)
    assert {variant[0] for variant in interpreted} == {"pool", "spread"}


@triton
@no_gpu
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 4), st.integers(1, 4)),
    k=st.sampled_from([2, 3, 4, 8]),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=15, derandomize=True)
def test_any_shape(shape: tuple[int, int, int, int], k: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "interpreted", True)
        both_ways(shape, k, dtype)


@triton
@no_gpu
@pytest.mark.parametrize(("entries", "wide", "size"), [(1, 1, 8), (10**4, 32, 2), (10**6, 128, 4), (10**9, 64, 2)])
def test_tiles_of_every_height(entries: int, wide: int, size: int, interpreted: set, monkeypatch) -> None:
    tall = resample_fused._pixels(entries, wide, size)
    assert tall >= 1
    assert tall & (tall - 1) == 0
    assert 256 <= tall * wide <= 2048 // size or tall * wide == max(256, wide)
    monkeypatch.setattr(resample_fused, "_pixels", lambda *_: tall)
    both_ways((3, 7, 3, 5), 2, torch.float32)


def test_columns_waste_little() -> None:
    for channels in range(1, 300):
        wide = _triton.columns(channels)
        padded = -(-channels // wide) * wide
        assert wide & (wide - 1) == 0
        assert padded < channels + 32
    assert [_triton.columns(c) for c in (1, 3, 32, 64, 96, 128, 200, 256)] == [1, 4, 32, 64, 32, 128, 32, 128]


@triton
@no_gpu
def test_offsets_of_64_bits(interpreted: set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample_fused, "_LARGE", 0)
    for k in (2, 5, 17):
        both_ways((2, 3, 2, 3), k, torch.float32)
    assert all(variant[6] for variant in interpreted)


@triton
@no_gpu
def test_views_into_a_batch(interpreted: set) -> None:
    """A picture that does not begin where vectors begin in memory."""
    v = picture(3, 5, 2, 6, dtype=torch.bfloat16)[1:]
    assert v.data_ptr() % 16 != 0
    agree(resample_fused.pooled(v, 2), pooled(v, 2), torch.bfloat16, pooled(v.abs(), 2))
    assert [variant[-1] for variant in interpreted] == [False]


@triton
@no_gpu
def test_what_is_not_finite_stays_in_its_square(interpreted: set) -> None:
    v = picture(1, 3, 4, 4)
    v[0, 1, 0, 3], v[0, 2, 3, 0] = torch.nan, torch.inf
    torch.testing.assert_close(op.resample(v, 2), F.avg_pool2d(v, 2), equal_nan=True)
    torch.testing.assert_close(op.resample(v, 8), spread(v, 2), equal_nan=True)


# ------------------------------------------------------------------------------------------------------- the operator


@triton
@no_gpu
@pytest.mark.parametrize("k", [2, 3])
def test_the_adjoint_is_the_adjoint(k: int, interpreted: set) -> None:
    v, u = picture(2, 6, 4 * k, 3 * k, seed=1), picture(2, 6, 4, 3, seed=2)
    P = op.AveragePool(k).prepare()
    torch.testing.assert_close((P(v) * u).sum(), (v * P.adjoint(u)).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(P(P.adjoint(u)), u / k**2, rtol=1e-14, atol=0)
    assert {variant[0] for variant in interpreted} == {"pool", "spread"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch loads its rules of forward mode
@triton
@no_gpu
@pytest.mark.parametrize(("here", "size"), [((2, 2), (1, 1)), ((1, 2), (2, 4))], ids=["pool", "spread"])
def test_derivatives_of_both_orders_and_modes(here: tuple[int, int], size: tuple[int, int], interpreted: set) -> None:
    v = picture(1, 2, *here).requires_grad_()

    def bent(v: Tensor) -> Tensor:  # without something that bends there would be no second derivative
        return op.resample(v * v, size)

    assert torch.autograd.gradcheck(bent, v, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(bent, v)
    assert {variant[0] for variant in interpreted} == {"pool", "spread"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch loads its rules of forward mode
@triton
@no_gpu
def test_derivatives_are_those_of_the_plain_path(interpreted: set) -> None:
    v, tangent = picture(2, 5, 4, 4, seed=1).requires_grad_(), picture(2, 5, 4, 4, seed=2)

    def derivatives(size: int) -> list[Tensor]:
        value = op.resample(v.sin(), size)
        (slope,) = torch.autograd.grad(value.square().sum(), v, create_graph=True)
        (curvature,) = torch.autograd.grad((slope * tangent).sum(), v)
        with forward_ad.dual_level():
            moved = op.resample(forward_ad.make_dual(v.detach().sin(), tangent), size)
            return [value.detach(), slope.detach(), curvature, forward_ad.unpack_dual(moved).tangent]

    for size in (2, 8):
        found = derivatives(size)
        launched = set(interpreted)
        with opteq.fast_paths(fused=False):
            wanted = derivatives(size)
        assert launched
        assert interpreted == launched
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@triton
@no_gpu
def test_a_gradient_in_another_layout(interpreted: set) -> None:
    v = picture(2, 3, 4, 4).requires_grad_()
    weights = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 2, 2)
    (slope,) = torch.autograd.grad(op.resample(v, 2), v, weights)
    torch.testing.assert_close(slope, spread(weights, 2))
    (slope,) = torch.autograd.grad(op.resample(v, 2).sum(), v)
    torch.testing.assert_close(slope, torch.full_like(v, 0.25))


# ----------------------------------------------------------------------------------------------------- the plain path


@triton
@no_gpu
def test_what_takes_the_plain_path(interpreted: set) -> None:
    v = picture(2, 3, 4, 4)
    wanted = {2: pooled(v, 2), 8: spread(v, 2)}
    for size in wanted:
        with opteq.fast_paths(fused=False):
            torch.testing.assert_close(op.resample(v, size), wanted[size])
        torch.testing.assert_close(op.resample(v.contiguous(), size), wanted[size])
        torch.testing.assert_close(torch.func.vmap(lambda one, s=size: op.resample(one[None], s)[0])(v), wanted[size])
        (slope,) = torch.func.grad(lambda x, s=size: op.resample(x, s).sum())(v).unique()
        assert slope == (0.25 if size == 2 else 1)
        assert op.resample(v[:0], size).shape == (0, 3, size, size)
    for picture_of_its_kind in (v.contiguous(), v[:0], v.to(torch.complex128), torch.nn.Parameter(v)):
        assert resample_fused.pooled(picture_of_its_kind, 2) is None
        assert resample_fused.spread(picture_of_its_kind, 2) is None
    assert not interpreted


@triton
@no_gpu
def test_compiled_functions_take_the_plain_path(interpreted: set) -> None:
    v = picture(2, 3, 4, 4)
    compiled = torch.compile(lambda x: (op.resample(x, 2), op.resample(x, 8)), backend="eager", fullgraph=True)
    down, up = compiled(v)
    torch.testing.assert_close(down, pooled(v, 2))
    torch.testing.assert_close(up, spread(v, 2))
    assert not interpreted


@triton
@no_gpu
def test_nothing_is_compiled_inside_a_capture(interpreted: set, monkeypatch: pytest.MonkeyPatch) -> None:
    v = picture(2, 3, 4, 4)
    monkeypatch.setattr(resample_fused, "is_capturing", lambda picture: True)
    assert resample_fused.pooled(v, 2) is None
    torch.testing.assert_close(op.resample(v, 2), pooled(v, 2))
    monkeypatch.undo()
    monkeypatch.setattr(paths, "interpreted", True)
    assert resample_fused.pooled(v, 2) is not None
    monkeypatch.setattr(resample_fused, "is_capturing", lambda picture: True)
    assert resample_fused.pooled(v, 2) is not None
    assert resample_fused.pooled(v, 4) is None


def test_without_triton_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "interpreted", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    v = picture(2, 3, 4, 4)
    _triton._compiles_for.cache_clear()
    has_triton.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Triton is not installed"):
            down = op.resample(v, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            up = op.resample(v, 8)
    finally:
        _triton._compiles_for.cache_clear()
        has_triton.cache_clear()
    torch.testing.assert_close(down, pooled(v, 2))
    torch.testing.assert_close(up, spread(v, 2))


# ------------------------------------------------------------------------------------------------------- compilation


COMPILE = """
import sys

import triton.language as tl

from compiling import ptx
from opteq.operators import resample_kernels as k

capability = int(sys.argv[1])


def build(kernel, numbers, channels, factor, large=False):
    wide = tl.float64 if numbers == "*fp64" else tl.float32
    constants = {"C": channels, "K": factor, "PIXELS": 16, "CHANNELS": 64, "LARGE": large, "WIDE": wide}
    types = {"fine": numbers, "coarse": numbers, "pixels": "i64" if large else "i32", "width": "i32"}
    aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    code = ptx(kernel, capability, types, constants, aligned, num_warps=4)
    if channels == 64 and numbers != "*fp64":  # the widest loads and stores
        assert "ld.global.v4.b32" in code and "st.global.v4.b32" in code


for kernel in (k.pool, k.spread):
    for numbers in ("*fp64", "*fp32", "*bf16", "*fp16"):
        for factor in (2, 8, 17):
            build(kernel, numbers, 64, factor)
    build(kernel, "*bf16", 7, 3)
    build(kernel, "*bf16", 64, 2, large=True)
    build(kernel, "*fp32", 64, 8, large=True)
"""


@triton
@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    assert names_compiled(COMPILE, capability, tmp_path) == {"pool", "spread"}


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@triton
@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((128, 64, 16, 16), 2), ((128, 128, 4, 4), 8), ((32, 96, 8, 8), 4), ((5, 200, 3, 7), 3), ((3, 7, 2, 3), 2),
     ((1, 3, 1, 2), 17), ((2, 2, 1, 1), 64)],
    ids=str,
)  # fmt: skip
def test_both_kernels_on_a_gpu(shape: tuple[int, int, int, int], k: int, dtype: torch.dtype) -> None:
    both_ways(shape, k, dtype, "cuda")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch loads its rules of forward mode
@pytest.mark.gpu
@triton
@gpu
def test_derivatives_on_a_gpu() -> None:
    v = picture(1, 2, 2, 4, device="cuda").requires_grad_()
    for size in ((1, 2), (4, 8)):
        assert torch.autograd.gradcheck(lambda x, s=size: op.resample(x * x, s), v, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda x, s=size: op.resample(x * x, s), v)


@pytest.mark.gpu
@triton
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_changes_nothing_on_a_gpu(dtype: torch.dtype) -> None:
    v = picture(8, 64, 8, 8, dtype=dtype, device="cuda").requires_grad_()
    for size in (4, 16):
        with torch.autocast("cuda", torch.bfloat16):
            value = op.resample(v, size)
            (slope,) = torch.autograd.grad(value, v, value.detach())
        assert value.dtype == slope.dtype == dtype
        with opteq.fast_paths(fused=False):
            plain = op.resample(v, size)
        torch.testing.assert_close(value, plain, rtol=UNIT[dtype], atol=UNIT[dtype])
        # What resampling has done to a picture, its adjoint does to the result.
        torch.testing.assert_close(slope, op.resample(plain, 8), rtol=4 * UNIT[dtype], atol=4 * UNIT[dtype])


@pytest.mark.gpu
@triton
@gpu
def test_a_capture_on_a_gpu() -> None:
    """With kernels that are ready, and with those that are not: either way no compilation, and the right numbers."""
    for channels, warm in ((48, True), (80, False)):
        v = picture(4, channels, 8, 8, dtype=torch.float32, device="cuda").requires_grad_()

        def work(v: Tensor = v) -> list[Tensor]:
            down, up = op.resample(v, 2), op.resample(v, 16)
            return [down, up, *torch.autograd.grad(down.square().sum() + up.square().sum(), v)]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), opteq.fast_paths(fused=warm):
            work()
        torch.cuda.current_stream().wait_stream(side)
        before = set(resample_fused._ready)
        assert any(variant[3] == channels for variant in before) == warm
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = work()
        assert resample_fused._ready == before
        with torch.no_grad():
            v.copy_(picture(4, channels, 8, 8, dtype=torch.float32, device="cuda", seed=9))
        graph.replay()
        with opteq.fast_paths(fused=False):
            wanted = work()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@triton
@gpu
def test_more_entries_than_32_bits_count_on_a_gpu() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    v = torch.empty(2056, 64, 128, 128, dtype=torch.bfloat16, device="cuda", memory_format=torch.channels_last)
    assert v.numel() > 2**31
    v[-2:] = picture(2, 64, 128, 128, dtype=torch.bfloat16, device="cuda")
    down = resample_fused.pooled(v, 2)
    assert down is not None
    agree(down[-2:], pooled(v[-2:], 2), v.dtype, pooled(v[-2:].abs(), 2))
    up = resample_fused.spread(down, 2)
    assert up is not None
    agree(up[-2:], spread(down[-2:], 2), v.dtype)
