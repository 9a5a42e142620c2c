"""Tensors copied into others, against torch's own copies. Without a GPU Triton's interpreter runs the kernel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiling import names_compiled
from opteq import _copying
from opteq._copying import best_turned_inside, copy_all, in_layout_of
from opteq._fast import settings

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 256, 16, 16), (3, 130, 9, 11), (2, 64, 1, 3), (1, 2, 100, 700)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turned_pictures_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    turned(shape, dtype, monkeypatch)


@triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled")
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 65, 9, 8), (1, 64, 8, 8), (1, 2, 1, 1), (2, 4, 1, 70)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_turned_pictures(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "interpreted", True)
    turned(shape, dtype, monkeypatch)


def turned(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from opteq import _copying_kernels as kernels

    calls, turn = [], kernels.turn
    monkeypatch.setattr(kernels, "turn", lambda *given: (calls.append(1), turn(*given)))
    monkeypatch.setattr(_copying, "_LARGE", 1)
    monkeypatch.setattr(_copying, "_WORTH", 1)
    source = numbers(*shape, dtype=dtype)
    own = torch.empty_like(source, memory_format=torch.channels_last)
    copy_all([own], [source])
    assert torch.equal(own, source)
    assert calls or own.is_contiguous()


@pytest.mark.parametrize("large", [1, 20, 10**6])
def test_copies_are_those_of_torch(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copying, "_LARGE", large)
    tensors = [numbers(3, 4), numbers(2, 3, 4, 5), numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    tensors += [numbers(6, 7).mT, numbers(2, 3, 4, 5)[:, :, ::2], numbers(1)[0]]
    into = [torch.empty(tensor.shape, dtype=torch.float64, device=DEVICE) for tensor in tensors]
    into[1] = into[1].to(memory_format=torch.channels_last)
    copy_all(into, tensors)
    for own, tensor in zip(into, tensors, strict=True):
        assert torch.equal(own, tensor.double())
    copy_all([], [])


@triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel is compiled")
@pytest.mark.parametrize("large", [1, 10**6])
def test_a_tensor_in_the_layout_of_another(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from opteq import _copying_kernels as kernels

    calls, turn = [], kernels.turn
    monkeypatch.setattr(kernels, "turn", lambda *given: (calls.append(1), turn(*given)))
    monkeypatch.setattr(settings, "interpreted", True)
    monkeypatch.setattr(_copying, "_LARGE", large)
    plain, wanted = numbers(2, 3, 5, 4), numbers(2, 3, 5, 4).to(memory_format=torch.channels_last)
    assert in_layout_of(plain, plain) is plain
    assert in_layout_of(wanted, wanted) is wanted
    for given, form in (
        (plain, wanted),
        (wanted, plain),
        (plain.double(), wanted),
        (plain[:1].expand(2, 3, 5, 4), wanted),
    ):
        found = in_layout_of(given, form)
        assert found.stride() == form.stride()
        assert found.dtype == given.dtype
        assert torch.equal(found, given)
    assert len(calls) == (2 if large == 1 else 0)  # for what lies channel by channel, of either dtype
    # Inside of a graph what is large enough for a kernel and too small for a launch of its own.
    assert best_turned_inside(plain, wanted) == (large == 1)
    assert not best_turned_inside(wanted, wanted)
    assert not best_turned_inside(plain.double(), wanted)
    monkeypatch.setattr(_copying, "_WORTH", 1)
    assert not best_turned_inside(plain, wanted)


COMPILE = """
import sys
from compiling import ptx
from opteq._copying_kernels import _turn

types = {"source": "*bf16", "out": "*bf16", "channels": "i32", "pixels": "i32"}
ptx(_turn, int(sys.argv[1]), types, {"TILE": 64}, num_warps=4)
"""


@triton
@pytest.mark.slow  # a kernel of ten lines, which the tests on a GPU compile too
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    assert names_compiled(COMPILE, 90, tmp_path) == {"_turn"}
