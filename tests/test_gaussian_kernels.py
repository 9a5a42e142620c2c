"""The Gaussian kernel's passes over patches, against torch. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opteq
from compiling import names_compiled
from opteq.engine.settings import settings as paths
from opteq.kernels import Gaussian, gaussian_fused
from opteq.operators import Conv2d, Patches

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]
# The interpreter cuts digits off where a GPU rounds.
UNIT = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "interpreted", not torch.cuda.is_available())
    monkeypatch.setattr(gaussian_fused, "_ready", set())


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert float((found.double() - wanted).abs().max()) <= UNIT[dtype] * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3, 3, 32), (3, 2, 2, 5, 7), (1, 1, 1, 1, 1), (2, 1, 1, 1, 1000)], ids=str)
@pytest.mark.parametrize("kind", ["number", "tensor", "a sample"])
def test_weights_and_their_derivative(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    q, a = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sharp = 0.3 / shape[-1]
    gamma: float | Tensor = sharp
    if kind == "tensor":
        gamma = torch.tensor(sharp, dtype=wide, device=q.device)
    if kind == "a sample":
        gamma = sharp * (1 + torch.arange(len(q), dtype=wide, device=q.device)).reshape(-1, 1, 1, 1)
    with torch.no_grad():
        found = gaussian_fused.weigh(q, gamma)
        assert found is not None
        weights, weighed = found
        bent = gaussian_fused.bend(q, a, gamma, weights)
    assert bent is not None
    assert weights.dtype == wide
    assert weighed.dtype == bent.dtype == dtype
    exact, move = q.double(), a.double()
    sharpness = gamma.double() if isinstance(gamma, Tensor) else gamma
    e = torch.exp(-sharpness * exact.square().sum(-1))
    near(weights, e, torch.float64 if dtype == torch.float64 else torch.float32)
    near(weighed, e[..., None] * exact, dtype)
    exact.requires_grad_()
    pulled = torch.exp(-sharpness * exact.square().sum(-1))[..., None] * exact
    (slope,) = torch.autograd.grad(pulled, exact, move)  # a gradient's derivative is symmetric
    near(bent, -slope, dtype)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    q = drawn(2, 1, 2, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        assert gaussian_fused.weigh(q.transpose(1, 2), 1.0) is not None  # a dimension of one: contiguous all the same
        assert gaussian_fused.weigh(q.transpose(2, 4), 1.0) is None
        assert gaussian_fused.weigh(q[..., :0], 1.0) is None
        assert gaussian_fused.weigh(q, torch.ones(2, 1, 2, 1, device=q.device)) is None
        assert gaussian_fused.weigh(drawn(1, 2000, dtype=torch.float64), 1.0) is None
        with opteq.fast_paths(fused=False):
            assert gaussian_fused.weigh(q, 1.0) is None
    assert gaussian_fused.weigh(q, 1.0) is None  # a tape is wanted


@pytest.mark.parametrize("options", [{"patch": 2, "split": 4, "hidden": 6}, {"gamma": 0.05}], ids=str)
def test_a_layer_with_and_without_them(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = opteq.GEQ(Conv2d(4, 4, 3, bound=0.9), kernel=Gaussian(**options)).double().to(device)  # type: ignore[arg-type]
    x = drawn(3, 4, 4, 4, dtype=torch.float64).requires_grad_()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-10, max_steps=200), opteq.Implicit(tol=1e-10))

    def found() -> tuple[Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y.square().sum(), [x, *problem.parameters()]))

    fused = found()
    assert {variant[0] for variant in gaussian_fused._ready} == {"weigh", "bend"}  # type: ignore[index]
    with opteq.fast_paths(fused=False, graphs=False):
        torch.testing.assert_close(fused, found(), rtol=1e-7, atol=1e-9)


def test_patches_of_a_channels_last_picture_go_back_to_one() -> None:
    picture = torch.randn(2, 8, 4, 6)
    R = Patches(split=4, patch=2).prepare()
    for given in (picture, picture.contiguous(memory_format=torch.channels_last)):
        back = R.adjoint(R(given))
        assert torch.equal(back, picture)
        assert back.stride() == given.stride()


COMPILED = """
import sys

import triton.language as tl
from compiling import ptx
from opteq.kernels import gaussian_kernels

types = dict(patches="*bf16", moves="*bf16", gamma="*fp32", weights="*fp32", weighed="*bf16", bent="*bf16", rows="i32",
    share="i32")
constants = dict(D=32, ROWS=128, WIDTH=32, WIDE=tl.float32)
for kernel in (gaussian_kernels.weigh, gaussian_kernels.bend):
    ptx(kernel, int(sys.argv[1]), types, constants, num_warps=4)
"""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_they_compile_for_gpus_that_are_not_here(capability: int, tmp_path: Path) -> None:
    assert names_compiled(COMPILED, capability, tmp_path) == {"weigh", "bend"}
