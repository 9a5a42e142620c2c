"""Convolutions with a bias on the fast path, against torch's. Without a GPU Triton's interpreter runs the kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import opteq
from compiling import names_compiled
from opteq._fast import settings as paths
from opteq.operators import biased
from opteq.operators.biased import convolved

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")

NEAR = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[set]:
    """The kernels on a CPU; gives the variants that have been launched."""
    monkeypatch.setattr(paths, "interpreted", True)
    monkeypatch.setattr(biased, "_ready", set())
    monkeypatch.setattr(biased, "_WORTH", 0)
    return biased._ready


def case(
    shape: tuple[int, int, int, int], outputs: int, dtype: torch.dtype, device: str = "cpu", **options: object
) -> tuple[nn.Conv2d, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape) + outputs)
    U = nn.Conv2d(shape[1], outputs, 3, padding=1, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in U.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    return U.to(device, dtype), x.contiguous(memory_format=torch.channels_last).requires_grad_()


def same(U: nn.Conv2d, x: Tensor, dtype: torch.dtype) -> None:
    """Value and all gradients are those of the module, computed in float64."""
    found = convolved(U, x)
    assert found is not None
    v = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    v = v.contiguous(memory_format=torch.channels_last)
    slopes = torch.autograd.grad(found, [x, U.weight, U.bias], v)
    exact = nn.Conv2d(U.in_channels, U.out_channels, U.kernel_size, U.stride, U.padding, U.dilation, U.groups).double()
    exact.load_state_dict({name: part.double().cpu() for name, part in U.state_dict().items()})
    z = x.detach().double().cpu().requires_grad_()
    wanted = exact(z)
    expected = torch.autograd.grad(wanted, [z, exact.weight, exact.bias], v.double().cpu())
    assert found.dtype == dtype
    for ours, theirs in zip((found.detach(), *slopes), (wanted.detach(), *expected), strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double().cpu() - theirs).norm() <= NEAR[dtype] * theirs.norm() + 1e-30


@triton
@no_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "outputs"), [((2, 3, 4, 5), 8), ((1, 2, 1, 1), 2), ((3, 4, 5, 3), 200), ((2, 8, 40, 30), 3)], ids=str
)
def test_value_and_gradients(
    shape: tuple[int, int, int, int], outputs: int, dtype: torch.dtype, interpreted: set
) -> None:
    same(*case(shape, outputs, dtype), dtype)
    assert {variant[0] for variant in interpreted} == {"add", "sums"}


@triton
@no_gpu
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    outputs=st.integers(2, 140),
)
@settings(deadline=None, max_examples=15, derandomize=True)
def test_any_shape(shape: tuple[int, int, int, int], outputs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "interpreted", True)
        patch.setattr(biased, "_WORTH", 0)
        same(*case(shape, outputs, torch.float64), torch.float64)


@triton
@no_gpu
def test_many_tiles_a_program(interpreted: set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "_PARTS", 3)
    monkeypatch.setattr(biased, "_TILE", 32)
    for shape in ((2, 3, 9, 7), (1, 2, 1, 5)):
        same(*case(shape, 8, torch.float64), torch.float64)
    assert interpreted


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_options_of_the_convolution_and_other_layouts() -> None:
    for options in ({"stride": 2}, {"dilation": 2}, {"groups": 2}):
        U, x = case((2, 4, 8, 8), 6, torch.float64, **options)
        same(U, x, torch.float64)
    U, x = case((2, 4, 5, 5), 6, torch.float64)
    rows = x.detach().contiguous().requires_grad_()  # not channels last, and so is what torch makes of it
    same(U, rows, torch.float64)
    found = convolved(U, x)
    assert found is not None
    (slope,) = torch.autograd.grad(found.sum(), U.bias)  # a gradient that is no memory of its own
    assert slope.tolist() == [50.0] * 6


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_and_forward_mode() -> None:
    U, x = case((2, 3, 4, 4), 5, torch.float64)

    def map_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = torch.func.functional_call(Called(U), {"U.weight": weight, "U.bias": bias}, (x,))
        return found.tanh()

    inputs = (x, U.weight, U.bias)
    assert torch.autograd.gradcheck(map_of, inputs)
    assert torch.autograd.gradgradcheck(map_of, inputs, fast_mode=True)
    with forward_ad.dual_level():
        pushed = convolved(U, forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        assert pushed is not None
        expected = U(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        tangents = [forward_ad.unpack_dual(value).tangent for value in (pushed, expected)]
    torch.testing.assert_close(*tangents)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_many_gradients_at_once_and_a_bias_that_torch_refuses() -> None:
    U, x = case((2, 3, 4, 4), 5, torch.float64)
    found = convolved(U, x)
    assert found is not None
    several = torch.randn(3, *found.shape, dtype=torch.float64)
    (slopes,) = torch.autograd.grad(found, U.bias, several, is_grads_batched=True)
    torch.testing.assert_close(slopes, several.sum(dim=(1, 3, 4)))
    U.bias.data = U.bias.data.float()
    assert convolved(U, x) is None


class Called(nn.Module):
    def __init__(self, U: nn.Conv2d) -> None:
        super().__init__()
        self.U = U

    def forward(self, x: Tensor) -> Tensor:
        found = convolved(self.U, x)
        assert found is not None
        return found


class Louder(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@triton
@no_gpu
@pytest.mark.usefixtures("interpreted")
def test_modules_that_do_something_else_are_called() -> None:
    U, x = case((1, 3, 4, 4), 5, torch.float64)
    assert convolved(U, x) is not None
    for other in (nn.Linear(3, 5), nn.Conv2d(3, 5, 3, bias=False), nn.Conv2d(3, 5, 3, padding_mode="circular"),
                  Louder(3, 5, 3), nn.Sequential(U)):  # fmt: skip
        assert convolved(other.double(), x) is None
    seen: list[int] = []
    handle = U.register_forward_hook(lambda *_: seen.append(1))
    assert convolved(U, x) is None
    problem = opteq.OptEq(opteq.operators.Conv2d(4, 5, 3, bound=0.9), U).double()
    problem(x)
    assert seen == [1]
    handle.remove()
    U.forward = lambda z: z  # type: ignore[method-assign]
    assert convolved(U, x) is None
    del U.forward
    with opteq.fast_paths(fused=False):
        assert convolved(U, x) is None
    torch.testing.assert_close(problem(x).block.c if hasattr(problem(x), "block") else U(x), U(x))


def test_bytes_are_those_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    U, x = case((2, 3, 6, 8), 5, torch.float32, stride=2)
    for more in (0, 1):
        monkeypatch.setattr(biased, "_WORTH", U(x).numel() * 4 + more)
        assert biased._is_worth_it(U, x) == (more == 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not biased._is_worth_it(U, x)
            monkeypatch.setattr(biased, "_WORTH", U(x).numel() + more)
            assert biased._is_worth_it(U, x) == (more == 0)


@triton
@no_gpu
def test_small_pictures_are_left_to_torch(interpreted: set, monkeypatch: pytest.MonkeyPatch) -> None:
    U, x = case((2, 3, 6, 8), 5, torch.float32)
    for worth, found in ((2 * 5 * 48 * 4, True), (2 * 5 * 48 * 4 + 1, False)):
        monkeypatch.setattr(biased, "_WORTH", worth)
        assert (convolved(U, x) is not None) == found
    assert interpreted


def test_a_cpu_calls_the_module() -> None:
    U, x = case((1, 3, 4, 4), 5, torch.float32)
    assert convolved(U, x) is None


SCRIPT = """
import sys
from compiling import ptx
from opteq.operators import bias_kernels as kernels

for narrow in ("*bf16", "*fp64"):
    wide = "*fp64" if narrow == "*fp64" else "*fp32"
    import triton.language as tl
    types = {"source": narrow, "bias": wide, "out": narrow, "parts": wide, "pixels": "i32", "tiles": "i32"}
    shape = {"C": 96, "PIXELS": 64, "CHANNELS": 32, "WIDE": tl.float64 if narrow == "*fp64" else tl.float32}
    for kernel in (kernels.add, kernels.sums):
        ptx(kernel, int(sys.argv[1]), types, shape, num_warps=4)
"""


@triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    assert names_compiled(SCRIPT, capability, tmp_path) == {"add", "sums"}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize(
    ("shape", "outputs"), [((8, 16, 32, 32), 64), ((3, 5, 7, 9), 130), ((128, 8, 16, 16), 256)], ids=str
)
def test_on_a_gpu(
    shape: tuple[int, int, int, int], outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(biased, "_WORTH", 0)
    same(*case(shape, outputs, dtype, "cuda"), dtype)


@pytest.mark.gpu
@gpu
def test_autocast_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased, "_WORTH", 0)
    U, x = case((4, 16, 8, 8), 64, torch.float32, "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, wanted = convolved(U, x), U(x)
    assert found is not None
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    v = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(value, [x, U.weight, U.bias], v) for value in (found, wanted))
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        assert (own - other).norm() <= 2e-2 * other.norm()
